"""S2: the `snapshot.*` and `workspace.*` tools, over the live tree and over immutable snapshots.

`tools.TOOLS` is the table of the eleven tools and `tools.run_tool` runs one. A `context.ToolRequest` is one request of
a session; `context.SnapshotContext` holds the leases and snapshots of one root. `read` answers without a record;
`write` changes files through the same effects as S1, guarded by a lease. `store.SnapshotStore` keeps snapshots.
Read `tools.py` first.
"""
