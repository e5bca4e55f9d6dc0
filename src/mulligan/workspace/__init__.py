"""The files: one door to the disk, and what is read, searched, edited and run through it."""
