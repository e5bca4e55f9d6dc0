"""Patches: `v4a` (the format of Codex) and `unified` (the format of diff and git).

Each module parses a patch and stages it: it computes the new contents from the old ones and changes no file.
`unified.FilePatch` and `v4a.Operation` are one file's part of a patch. Read `unified.py` first.
"""
