"""Effects: the operations of an agent. Each checks its parameters and paths, acts in a call, and returns a `Receipt`.

Read `perform.py` first: it is the path of every request. `EffectContext` (`context.py`) says where an effect takes
place and under which boundary; `registry.py` lists the effects, `params.py` declares their parameters, and `read.py`,
`write.py`, `patch.py` and `exec.py` carry them out. `session.py` and `handle.py` are what Python programs see: a
session, and `with session.call()`.
`snapshot_tools` has the tools that work on snapshots and leases.
"""
