"""A transactional agent in ten lines: a tool that fails leaves no trace, and a whole run can be undone.

The model follows a script, so this runs offline; with `provider="openai:gpt-5.1"` it is a real model.
"""

import tempfile

import mulligan


def save(path: str, code: str, context: mulligan.ToolContext) -> str:
    """Save a Python file, and plan to test it."""
    context.filesystem.write(path, code)
    context.session.broadcast(mulligan.Plan(f"test {path}"))
    compile(code, path, "exec")  # a SyntaxError undoes the file and the plan; the model sees the error
    return f"saved {path}"


GOOD, BAD = {"path": "hello.py", "code": "print('hello')"}, {"path": "oops.py", "code": "print('oops"}
SCRIPT = [{"tool": "save", "args": GOOD}, {"tool": "save", "args": BAD}, "One of two is saved."]

with tempfile.TemporaryDirectory() as folder, mulligan.open(folder, store="memory:") as m:
    done = mulligan.agent_loop("Greet me.", session="agent", provider=SCRIPT, tools=[save])
    print(done.text, m.session("agent").files.glob("*"), m.session("agent")[mulligan.Plan].all())
    m.session("agent").rollback()
    print("Taken back:", m.session("agent").files.glob("*"), m.session("agent")[mulligan.Plan].all())
