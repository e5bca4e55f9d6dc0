"""The spine: one way for every request, whoever sends it, and one file per family of effects."""
