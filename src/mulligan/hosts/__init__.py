"""Undo inside the hosts: what a person types into an agent's prompt, and what Mulligan tells the model.

Read `typed` first: `parse_typed` recognises a command in a prompt, in the spelling that each host allows, and `answer`
runs it in the agent's session. `news` writes what the model learns at its next prompt: which of its calls were undone,
and which files a person edited.
"""
