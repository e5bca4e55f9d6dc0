"""Runs a command and reports every path that it changed, where possible before it changes.

`run.run_captured` runs a `command.Command` under the best capture strategy that the machine has and returns a
`run.CommandResult`. `start` asks the launcher process for a waiting process; `init` is the code of the launcher and of
the process that watches over one command; `pump` moves input and output; `capture` has the strategies. Read `run.py`
first, then `init.py`.

Nothing is imported here: the launcher starts a bare interpreter and pays for each module that it loads.
"""
