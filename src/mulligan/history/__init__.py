"""Calls as transactions over files, and the operations that undo them.

A `Call` (`call`) is one transaction: it claims paths, stores preimages, changes files, commits or aborts. `OpenRoot`
(`open_root`) is a root folder in which calls run. A `RestorePlan` (`plan`) says what an undo operation does to each
path; it is pure. Read `call` first, then `undo`.

Who changes the files decides which module deals with it: the file tools change them through `call`; a command changes
them itself (`command`, with `live_changes`, `apply_overlay` and `baseline`); an agent's own tools are only observed
(`observe`). `recovery` ends the calls of dead processes, `power_cuts` checks files after a power cut, `retention`
evicts and forgets stored bytes, `branches` has forks and sandboxed copies, `checkpoint` the state of a run.
What a call is, and what it undid, is a value of `cause`.
"""
