"""Lists what is below a directory, and finds what changed there.

`walk.Walk` lists the files below a directory without those that `ignore.IgnoreRules` exclude; `index.TreeCache` caches
walks and `index.DigestCache` caches digests as long as stamps and watches show no change. `watcher` reads inotify,
`directories` opens directories name by name and says when a stamp can be trusted. Read `walk.py` first.
"""
