"""Running a command so that every change it makes to the workspace is known, and where possible known beforehand.

Nothing is imported here: the launcher starts a bare interpreter and pays for each module it loads.
`run.run` is the door; `notify`, `watch`, `scan` and `overlay` are the four ways of catching changes.
"""
