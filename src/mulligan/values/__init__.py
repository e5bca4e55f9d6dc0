"""The values that every package uses: ids, digests, paths, entries of files, limits, time and errors.

`paths.RepoPath` is a path below a root, `entries.Entry` is what a path holds, `errors.MulliganError` is the base of all
exceptions and `errors.FAMILY_OF` the table of their codes. Pure: no input, no output. Read `entries.py` first.
"""

VERSION = "0.1.0"
"""The version of this program and of its package. Reading it from the installed package takes longer than a verb."""
