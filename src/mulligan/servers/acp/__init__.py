"""The Agent Client Protocol (ACP): Mulligan's own agent, and a proxy around any other agent.

`agent.AcpAgent` is the agent; `relay.Relay` is the proxy, and `recorder.ProxyRecorder` records what the agent behind it
does. Both use `undo.UndoMethods` for rollback, redo, restore and rewind, and `wire.Wire` for JSON-RPC. Read `undo`
first: it has the methods that Mulligan adds to the protocol.
"""
