"""The deterministic substrate: `snapshot.*` and `workspace.*` tools over the live tree and over immutable snapshots."""
