"""Programs that nobody here wrote, and the inputs they judge us by."""
