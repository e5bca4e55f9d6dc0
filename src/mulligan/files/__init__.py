"""The files of a workspace: how Mulligan finds, reads, replaces, searches and compares them.

`resolve.Root` and `resolve.ResolvedPath` find a path without following links out of the root; `disk.Disk` is the only
code that changes a person's file, and `replace` replaces a file without losing another program's write. `tree` knows
what is below a directory and what changed there, `search` is grep and glob, `patch` reads patches, `snapshot` is S2.
`filesystems` offers the files as S4's `Filesystem`. Read `resolve.py` first, then `disk.py`.
"""
