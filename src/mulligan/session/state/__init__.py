"""The typed state of a session: slices, which events change through reducers.

`session.Session` is the state of one agent and takes snapshots of it; `slices.Items` is one slice, immutable;
`slices.PendingChanges` are the changes of a call that is not committed yet. `slice_store` keeps slices in a store and
`slice_rows` undoes them, `types` turns values into JSON, `resources` holds what a run uses besides its session,
`orphan_calls` aborts calls whose block is gone. Read `slices.py` first."""
