"""The hook that agents run: it sends the agent's event to the background process and lets the agent go on.

The agent runs this file with `python -I -S`. It imports only one built-in module besides those that the interpreter has
loaded anyway, so it takes little longer than starting Python. It always exits with 0 and in time, because an agent
takes other codes for a refusal. It stores what Mulligan records of an event that it cannot deliver in the spool; a
later process delivers it. The contents of files are not in the spool, because `capture.never` may name them.
"""

import os
import sys
import time

try:
    import _socket as socket  # importing `socket` itself takes as long as starting Python
except ImportError:
    import socket  # type: ignore[no-redef]

PROTOCOL = "1"
WAIT_S = 1.6
"""How long an agent waits for its hook; `MULLIGAN_HOOKS_WAIT_S` overrides it."""

COMMANDS = "commands"
TYPED_WAIT_S = 50.0
"""How long a hook waits for the answer to a typed command. Mulligan answers within 4 s of getting it; the rest of the
time is for a busy machine to start the background process."""

_POLL_S = 0.01
_INPUT_MAX = 64 * 1024 * 1024
_SPOOL_MAX = 1000
COMMAND_MAX = 4_000
"""How many characters of a command Mulligan records."""

_SPOOLED_FIELDS = (
    "hook_event_name",
    "session_id",
    "cwd",
    "prompt_id",
    "turn_id",
    "tool_use_id",
    "tool_name",
    "prompt",
    "transcript_path",
    "agent_id",
)
_PATH_INPUTS = ("file_path", "notebook_path")
_COMMAND_INPUTS = ("command", "cmd")
_PATCH_TOOL = "apply_patch"
_PATCH_INPUTS = ("command", "input")
FOLDER = "hooks"
_FIELDS_END = b"\n"


def main(argv: list[str]) -> None:
    """`client.py AGENT [STORE [commands]]`. With `commands`, the hook answers commands that a person types."""
    wait_s = _wait_s(os.environ.get("MULLIGAN_HOOKS_WAIT_S"))
    deadline = time.monotonic() + wait_s
    agent, home = argv[0], argv[1] if len(argv) > 1 else state_home(os.environ)
    raw = _read_all(0)
    if argv[2:] == [COMMANDS]:
        agent = f"{agent}:{COMMANDS}"
        if _may_be_typed(raw):
            wait_s = max(wait_s, TYPED_WAIT_S)
            deadline = time.monotonic() + wait_s
    folder = background_folder(home)
    message = _message(agent, raw, wait_s)
    answer = None
    fault = untrusted(home) or untrusted(folder) or untrusted(os.path.join(folder, "keeper.sock"))
    if fault:
        os.write(2, os.fsencode(f"mulligan: {fault}\n"))
        return
    try:
        answer = _ask(folder, message, deadline)
        if answer is None:
            answer = _ask_new_process(home, folder, message, deadline)
    except OSError:
        pass
    if answer is None or answer[:1] != b"0":
        _spool(folder, _message(agent, without_contents(raw), wait_s))
    if answer is not None and len(answer) > 1:
        os.write(1, answer[1:])


def _may_be_typed(raw: bytes) -> bool:
    """Whether the prompt may be a typed command. The background process decides; this only chooses a longer wait."""
    at = raw.find(b'"prompt"')
    start = raw[at + 8 : at + 200].lstrip(b' \t\n:"/$')
    return at >= 0 and start.startswith((b"undo", b"redo", b"mulligan"))


def state_home(environ: "os._Environ[str]") -> str:
    """The same rule as `mulligan.api.state_directory`, which is too slow to import here."""
    chosen = environ.get("MULLIGAN_HOME")
    if chosen:
        return os.path.abspath(chosen)
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "mulligan")


def background_folder(home: str, environ: "os._Environ[str] | dict[str, str]" = os.environ) -> str:
    """The folder of the socket and the spool: one for each mount namespace and folder of settings.

    A container has other files at the same paths, so its hooks need a process that sees the container's files. A
    process that reads the settings of another folder would capture what the user's own `capture.never` names.
    """
    try:
        namespace = str(os.stat("/proc/self/ns/mnt").st_ino)
    except OSError:
        namespace = "0"
    settings = environ.get("XDG_CONFIG_HOME", "")
    mark = f"-{_mark(settings)}" if os.path.isabs(settings) else ""
    return os.path.join(home, FOLDER, namespace + mark)


def _mark(text: str) -> str:
    """A short name for a text: its 64-bit FNV-1a hash, because importing `hashlib` is slow."""
    found = 0xCBF29CE484222325
    for byte in os.fsencode(text):
        found = (found ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{found:016x}"


def untrusted(path: str) -> "str | None":
    """The same rule as `mulligan.store.sqlite_file.refuse_untrusted`, which is too slow to import here."""
    user = os.geteuid()
    if user == 0 or os.environ.get("MULLIGAN_TRUST_OWNER") == "1":
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    if status.st_uid != user:
        return f"{path} belongs to user {status.st_uid}, not to you; set MULLIGAN_TRUST_OWNER=1 if you trust them."
    return f"Others can write to {path}; run `chmod go-w {path}`." if status.st_mode & 0o022 else None


def _message(agent: str, raw: bytes, wait_s: float) -> bytes:
    """One line of fields without spaces, then the agent's input unchanged."""
    project = os.fsencode(os.environ.get("CLAUDE_PROJECT_DIR") or os.environ.get("GEMINI_PROJECT_DIR") or "")
    numbers = (os.getppid(), now_ns(), int(wait_s * 1000))
    fields = (PROTOCOL, agent, project.hex() or "-", *map(str, numbers))
    return " ".join(fields).encode("ascii") + _FIELDS_END + raw


def without_contents(raw: bytes) -> bytes:
    """A hook's input without what the tool wrote, read or answered; empty if it is not a JSON object."""
    import json  # here, because only an event that cannot be delivered needs it

    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return b""
    if not isinstance(body, dict):
        return b""
    kept = {name: body[name] for name in _SPOOLED_FIELDS if isinstance(body.get(name), str)}
    kept["tool_input"] = recorded_input(body.get("tool_name"), body.get("tool_input"))
    return json.dumps(kept).encode("ascii")


def recorded_input(tool: object, given: object) -> "dict[str, str]":
    """What Mulligan records of a tool's input: paths and the command, and of a patch the lines that name files."""
    texts = {name: text for name, text in given.items() if isinstance(text, str)} if isinstance(given, dict) else {}
    paths = {name: texts[name] for name in _PATH_INPUTS if name in texts}
    if tool == _PATCH_TOOL:
        return paths | {name: _patch_headers(texts[name]) for name in _PATCH_INPUTS if name in texts}
    return paths | {name: texts[name][:COMMAND_MAX] for name in _COMMAND_INPUTS if name in texts}


def _patch_headers(patch: str) -> str:
    return "\n".join(line for line in patch.splitlines() if line.startswith("*** "))


def _wait_s(asked: "str | None") -> float:
    try:
        return min(60.0, max(0.1, float(asked or WAIT_S)))
    except ValueError:
        return WAIT_S


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


def _read_all(handle: int) -> bytes:
    pieces, size = [], 0
    while size < _INPUT_MAX:
        piece = os.read(handle, 1 << 16)
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def _ask(folder: str, message: bytes, deadline: float) -> "bytes | None":
    """The answer of the background process; None if no process answers."""
    speaker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The address of a socket has at most 107 bytes, so this process enters the folder first.
        os.chdir(folder)
        speaker.settimeout(max(0.05, deadline - time.monotonic()))
        speaker.connect("keeper.sock")
        _send(speaker, len(message).to_bytes(8, "big") + message)
        pieces: list[bytes] = []
        while True:
            speaker.settimeout(max(0.001, deadline - time.monotonic()))
            piece = speaker.recv(1 << 16)
            if not piece:
                return b"".join(pieces) or None
            pieces.append(piece)
    except FileNotFoundError:
        return None
    except ConnectionError:
        return None
    finally:
        speaker.close()


def _send(speaker: "socket.socket", data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[speaker.send(view[: 1 << 20]) :]


def _ask_new_process(home: str, folder: str, message: bytes, deadline: float) -> "bytes | None":
    """Starts the background process and asks it; if the user wants none, starts a process for this event only."""
    if os.environ.get("MULLIGAN_HOOKS_PROCESS") == "off":
        return _once(home, message, deadline)
    start_detached([*background_command(), "hooks", "keep", "--store", home])
    while time.monotonic() < deadline:
        answer = _ask(folder, message, deadline)
        if answer is not None:
            return answer
        time.sleep(_POLL_S)
    return None


def background_command() -> list[str]:
    return [sys.executable, "-E", "-P", "-m", "mulligan"]


def start_detached(command: list[str]) -> None:
    """Starts a daemon: not our child, without the agent's terminal, pipes and secret environment variables."""
    if os.fork():
        os.wait()
        return
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(nothing, handle)
        if not os.fork():
            os.execve(command[0], command, _environment())
    finally:
        os._exit(0)


def _environment() -> dict[str, str]:
    kept = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME")
    ours = ("MULLIGAN_HOME", "MULLIGAN_HOST", "MULLIGAN_TRUST_OWNER")
    return {name: os.environ[name] for name in (*kept, *ours) if name in os.environ}


def _once(home: str, message: bytes, deadline: float) -> "bytes | None":
    """Starts a process for this event only. If it needs longer than the deadline, it goes on without us."""
    given, giver = os.pipe()
    taker, taken = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            os.dup2(given, 0)
            os.dup2(taken, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.closerange(3, 32)
            command = [*background_command(), "hooks", "keep", "--once", "--store", home]
            os.execve(command[0], command, _environment())
        finally:
            os._exit(1)
    os.close(given)
    os.close(taken)
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(giver, rest[: 1 << 16]) :]
    os.close(giver)
    return _answer_by(taker, deadline)


def _answer_by(taker: int, deadline: float) -> "bytes | None":
    os.set_blocking(taker, False)
    while time.monotonic() < deadline:
        try:
            piece = os.read(taker, 1 << 16)
        except BlockingIOError:
            time.sleep(_POLL_S)
            continue
        return piece or None
    # It has the message and will see to it.
    return b"0"


def _spool(folder: str, message: bytes) -> None:
    try:
        place = os.path.join(folder, "spool")
        os.umask(0o077)
        os.makedirs(place, exist_ok=True)
        if len(os.listdir(place)) >= _SPOOL_MAX:
            return
        name = os.path.join(place, f"{now_ns():020d}-{os.getpid()}")
        handle = os.open(name + ".part", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(message)
            while rest:
                rest = rest[os.write(handle, rest) :]
        finally:
            os.close(handle)
        os.rename(name + ".part", name)
    except OSError:
        return


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        os._exit(0)
