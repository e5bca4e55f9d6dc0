"""May this session do this to this resolved path?

`capability.Capability` says what a session may do at all, `policy.Policy` has rules for paths, and
`verdict.Boundary` answers for one operation on one path. Pure: nothing here touches a file. Read `verdict.py` first.
"""
