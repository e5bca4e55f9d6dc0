"""The strategies that find out what a command changed.

`notify` stops each changing system call until Mulligan has stored the preimage; `touched_paths` remembers which paths
those were. `overlay` lets the command work on an overlay and reads the upper layer. `scan` compares stamps before and
after. The file watcher is in `files.tree.watcher`. All of them implement the protocol `notify.Capture`. Read it first.

This file imports nothing, because the launcher starts a bare interpreter and pays for each module that it loads.
"""
