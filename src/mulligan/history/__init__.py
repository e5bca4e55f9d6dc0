"""Calls as transactions over files, and the operations that undo them.

Three types carry the package. A `Call` (`call`) is one transaction: it claims paths, stores preimages, changes files,
commits or aborts. `OpenRoot` (`open_root`) is a root folder in which calls run. A `RestorePlan` (`plan`) says what an
undo operation does to each path; it is pure. Read `call` first, then `undo`.

A call has parts, each in a module of its own. `undo_log` has what a call has done so far, and rolls it back by the
rules of `abort`. Who changes the files decides which module deals with it: the file tools change them through
`file_changes`; a command changes them itself (`command`, with `command_changes`, `apply_overlay` and `baseline`); an
agent's own tools are only observed (`observe`). `ledger` has the rows that a call writes, `tables` and `projection` say
what they mean, `cause` says what a call is.

An undo operation finds its calls (`log`, `rewind`, `partial_undo`, `multi_root`), plans (`plan`, with `merge` and
`git_changes`) and applies the plan as a call (`undo`).

`recovery` ends the calls of dead processes, `power_cuts` checks files after a power cut, `retention` evicts stored
bytes, `forget` erases them. `branches` has the copies of roots, for forks and for sandboxed roots alike; `scopes` has
snapshots under a caller's id, `checkpoint` the state of a run.
"""
