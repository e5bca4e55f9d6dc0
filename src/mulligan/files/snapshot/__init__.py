"""The state of a tree for the snapshot tools (S2): fingerprints, manifests and leases.

`fingerprint.Fingerprint` is the state of a repository as one value, `manifest.Manifest` lists the files of a snapshot,
and `lease.Lease` is a reader's claim that what it saw is still so. The tools over them are in
`effects.snapshot_tools`. Read `lease.py` first.
"""
