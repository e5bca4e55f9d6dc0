"""Finds files by content (`grep.grep`) and by name (`glob.glob`). Read `grep.py` first.

A pattern is parsed by `pattern`, which defines the language of grep. `ripgrep` and `native` are the two engines, and
find the same lines.
"""
