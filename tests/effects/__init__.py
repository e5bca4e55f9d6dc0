"""File effects, judged by their receipts and by what is on the disk."""
