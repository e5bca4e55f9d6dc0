"""Installs hooks in the settings files of agents, and removes them without a trace.

`HOSTS` lists the agents: where their settings are, which events they report, how an entry looks. Beside the store,
Mulligan remembers each file before and after the installation. If the file has not changed since, `uninstall` restores
it byte for byte. If somebody has edited it, `uninstall` cuts out only Mulligan's entries, and the containers that
Mulligan added for them if they are empty.

Settings are JSON with comments (`//`, `/* */`) and trailing commas. The parser records the position of every value, so
that an insertion or a cut changes no other character.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from mulligan.store.sqlite_file import private_folder
from mulligan.values.canonical import decode, encode
from mulligan.values.errors import MulliganError, fault, fault_of_os_error
from mulligan.values.fast_dataclass import fast_dataclass

Scope = Literal["user", "project"]

_READ_ONLY_NAMES = """
    Read Glob Grep LS NotebookRead WebFetch WebSearch TodoWrite TodoRead ToolSearch AskUserQuestion ListMcpResourcesTool
    ReadMcpResourceTool BashOutput TaskOutput TaskCreate TaskGet TaskList TaskUpdate
    read_file read_many_files list_directory glob grep_search search_file_content google_web_search web_fetch
    write_todos save_memory update_topic read_background_output list_background_processes
    view_image update_plan get_goal web_search request_user_input
"""
READ_ONLY_TOOLS = frozenset(_READ_ONLY_NAMES.split())
"""Tools that change no file; Mulligan records nothing for them."""

CLIENT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "agents", "hooks", "client.py")
COMMANDS = "commands"
"""The argument of a hook that answers typed commands; `client` has it too, because it imports nothing."""
MARK = "mulligan/agents/hooks/client.py"
"""Every command that Mulligan installs contains this, wherever Mulligan is installed."""


@fast_dataclass(slots=True, frozen=True)
class Host:
    """An agent. The folder in `home_variable` replaces `folder` in the home directory; `timeout` is in its own unit."""

    name: str
    folder: str
    home_variable: str | None
    user_file: str
    project_file: str
    tool_events: tuple[str, ...]
    other_events: tuple[str, ...]
    timeout: int
    matcher: str | None = None
    named: bool = False
    answers: bool = False
    """The prompt hook answers typed commands, as `mulligan install` wants it."""

    @property
    def events(self) -> tuple[str, ...]:
        return (*self.tool_events, *self.other_events)

    def settings_path(self, scope: Scope, *, root: str, environ: Mapping[str, str]) -> str:
        if scope == "project":
            return os.path.join(os.path.abspath(root), self.folder, self.project_file)
        moved = environ.get(self.home_variable) if self.home_variable else None
        home = environ.get("HOME") or os.path.expanduser("~")
        return os.path.join(moved or os.path.join(home, self.folder), self.user_file)

    def entry(self, event: str, command: str) -> dict[str, Any]:
        """One item of the list of an event."""
        hook: dict[str, Any] = {"name": "mulligan"} if self.named else {}
        hook |= {"type": "command", "command": command, "timeout": self._timeout(event)}
        matched = self.matcher is not None and event in self.tool_events
        return {"matcher": self.matcher, "hooks": [hook]} if matched else {"hooks": [hook]}

    def _timeout(self, event: str) -> int:
        if self.answers and event in _PROMPT_EVENTS:
            return self.timeout * _ANSWERS_TIMES
        # Codex allows three seconds, and warns at each start about a hook that wants more.
        return 3 if self.answers and self.name == "codex" and event == "SessionEnd" else self.timeout

    # What `Settings` asks of the entries that it adds.

    @property
    def expected(self) -> tuple[str, ...]:
        return self.events

    def held(self, root: Node) -> list[str]:
        """The event of each of Mulligan's entries."""
        return _ours(root)

    def added(self, text: str, path: str, store: str | None) -> str:
        self._check(parse_settings(text, path), path)
        command = command_for(self.name, store, answers=self.answers)
        for event in self.events:
            text = _added(text, event, _pretty(self.entry(event, command)), path=path)
        return text

    def without(self, text: str, path: str, theirs: Container[str]) -> str:
        while text.strip() and (found := _first_of_ours(parse_settings(text, path))) is not None:
            text = _removed(text, found, theirs=theirs)
        return text

    def _check(self, node: Node, path: str) -> None:
        """Raises if a value to which Mulligan must add has the wrong type."""
        hooks = node.get("hooks")
        if hooks is not None and not isinstance(hooks.value, dict):
            raise fault("unsupported_target", f'{path}: "hooks" is not an object; correct that first.')
        for event in self.events:
            listed = hooks.get(event) if hooks is not None else None
            if listed is not None and not isinstance(listed.value, list):
                raise fault("unsupported_target", f'{path}: "hooks.{event}" is not a list; correct that first.')


@fast_dataclass(slots=True, frozen=True)
class Member:
    """One member of an object in a settings file, or, without a `name`, one item of a list.

    `holder` is the key of that object or list in the settings.
    """

    holder: str
    name: str | None
    value: Any

    @property
    def expected(self) -> tuple[str, ...]:
        return (self.name or str(self.value),)

    def held(self, root: Node) -> list[str]:
        holder = root.get(self.holder)
        return [] if holder is None or self._index(holder) is None else list(self.expected)

    def added(self, text: str, path: str, store: str | None) -> str:
        holder = parse_settings(text, path).get(self.holder)
        if holder is None:
            empty = "[]" if self.name is None else "{}"
            text = insert(text, parse_settings(text, path), f'"{self.holder}": {empty}')
            holder = parse_settings(text, path).get(self.holder)
        if holder is None or not isinstance(holder.value, list if self.name is None else dict):
            raise fault("unsupported_target", f'{path}: "{self.holder}" has another type; correct that first.')
        if self._index(holder) is not None:
            raise fault("unsupported_target", f'{path}: "{self.holder}" has "{self.name}" already; remove that first.')
        item = _pretty(self.value)
        return insert(text, holder, item if self.name is None else f'"{self.name}": {item}')

    def without(self, text: str, path: str, theirs: Container[str]) -> str:
        root = parse_settings(text if text.strip() else "{}", path)
        holder = root.get(self.holder)
        index = None if holder is None else self._index(holder)
        if holder is None or index is None:
            return text
        text = cut(text, holder, index)
        root = parse_settings(text, path)
        holder = root.get(self.holder)
        if holder is None or not _is_bare(text, holder) or self.holder in theirs:
            return text
        keys = [item.key for item in root.items or ()]
        return cut(text, root, len(keys) - 1 - keys[::-1].index(self.holder))

    def _index(self, holder: Node) -> int | None:
        for index, item in enumerate(holder.items or ()):
            if item.key == self.name if self.name is not None else item.node.value == self.value:
                return index
        return None


_PROMPT_EVENTS = frozenset({"UserPromptSubmit", "BeforeAgent"})
_ANSWERS_TIMES = 12
"""A hook that answers commands gets a minute: the host sends a command to its model if the hook takes longer."""


_NOT_READ_ONLY = "^(?!(?:" + "|".join(sorted(name for name in READ_ONLY_TOOLS if name[0].isupper())) + ")$)"

HOSTS: Mapping[str, Host] = MappingProxyType(
    {
        "claude": Host(
            name="claude",
            folder=".claude",
            home_variable="CLAUDE_CONFIG_DIR",
            user_file="settings.json",
            project_file="settings.local.json",
            tool_events=("PreToolUse", "PostToolUse", "PostToolUseFailure"),
            other_events=("UserPromptSubmit", "Stop", "SessionStart", "SessionEnd"),
            timeout=5,
            matcher=_NOT_READ_ONLY,
        ),
        "gemini": Host(
            name="gemini",
            folder=".gemini",
            home_variable=None,
            user_file="settings.json",
            project_file="settings.json",
            tool_events=("BeforeTool", "AfterTool"),
            other_events=("BeforeAgent", "AfterAgent", "SessionStart", "SessionEnd"),
            timeout=5_000,
            named=True,
        ),
        "codex": Host(
            name="codex",
            folder=".codex",
            home_variable="CODEX_HOME",
            user_file="hooks.json",
            project_file="hooks.json",
            tool_events=("PreToolUse", "PostToolUse"),
            other_events=("UserPromptSubmit", "Stop", "SessionStart", "SessionEnd"),
            timeout=5,
        ),
    }
)


def command_for(host: str, store: str | None = None, *, answers: bool = False) -> str:
    """The shell command of a hook. It always exits with 0: an agent takes other codes for a refusal.

    With `answers`, which needs a store, its prompt hook answers typed commands.
    """
    words = [*client_words(host), *([] if store is None else [store, *([COMMANDS] if answers else [])])]
    return " ".join(shlex.quote(word) for word in words) + " 2>/dev/null || true"


def client_words(host: str) -> list[str]:
    """The program of a hook."""
    return [sys.executable, "-I", "-S", CLIENT, host]


_SPACE = re.compile(r"(?:[ \t\r\n]|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_SCALAR = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_DEPTH_MAX = 200


@fast_dataclass(slots=True)
class Node:
    """A JSON value and its position. `items` are those of an object or array; an object's items have keys."""

    value: Any
    start: int
    end: int
    items: list[Item] | None = None

    def get(self, key: str) -> Node | None:
        """The member of an object; of two with the same key, the last."""
        found = [item.node for item in self.items or () if item.key == key]
        return found[-1] if found and isinstance(self.value, dict) else None


@fast_dataclass(slots=True)
class Item:
    """A member of an object or an item of an array; `comma` is the position after its comma."""

    key: str | None
    start: int
    node: Node
    comma: int | None = None


def parse(text: str) -> Node:
    """Parses JSON with comments. Raises `invalid_json` with line and column."""
    try:
        return _Reader(text).document()
    except MulliganError:
        raise
    except RecursionError:
        raise fault("invalid_json", "It is nested too deeply.") from None


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def document(self) -> Node:
        self._skip()
        node = self._value(0)
        self._skip()
        if self._at < len(self._text):
            raise self._wrong("text after the end")
        return node

    def _value(self, depth: int) -> Node:
        if depth > _DEPTH_MAX:
            raise self._wrong("it is nested too deeply")
        start, sign = self._at, self._text[self._at : self._at + 1]
        if sign == "{":
            return self._container(start, depth, close="}", keyed=True)
        if sign == "[":
            return self._container(start, depth, close="]", keyed=False)
        return self._plain(start, _STRING if sign == '"' else _SCALAR)

    def _plain(self, start: int, pattern: re.Pattern[str]) -> Node:
        found = pattern.match(self._text, start)
        if found is None:
            raise self._wrong("no JSON value")
        self._at = found.end()
        try:
            return Node(decode(found.group()), start, self._at)
        except MulliganError:
            self._at = start
            raise self._wrong("no JSON value") from None

    def _container(self, start: int, depth: int, *, close: str, keyed: bool) -> Node:
        self._at += 1
        items: list[Item] = []
        while True:
            self._skip()
            if self._take(close):
                values = [(item.key, item.node.value) for item in items]
                value = dict(values) if keyed else [value for _, value in values]
                return Node(value, start, self._at, items)
            if items and items[-1].comma is None:
                raise self._wrong(f"a comma or {close} is missing")
            items.append(self._item(depth, keyed=keyed))
            self._skip()
            if self._take(","):
                items[-1].comma = self._at

    def _item(self, depth: int, *, keyed: bool) -> Item:
        start, key = self._at, None
        if keyed:
            key = self._plain(start, _STRING).value
            self._skip()
            if not self._take(":"):
                raise self._wrong("a colon is missing")
            self._skip()
        return Item(key, start, self._value(depth + 1))

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _take(self, sign: str) -> bool:
        taken = self._text.startswith(sign, self._at)
        self._at += len(sign) if taken else 0
        return taken

    def _wrong(self, what: str) -> MulliganError:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - (self._text.rfind("\n", 0, self._at) + 1) + 1
        return fault("invalid_json", f"Line {line}, column {column}: {what}.", line=line, column=column)


def insert(text: str, container: Node, item: str) -> str:
    """The text with an item added at the end of an object or array, indented like the items before it."""
    items = container.items or []
    if not items:
        return _insert_first(text, container, item)
    last = items[-1]
    lead = text[_line_start(text, last.start) : last.start]
    own_line = not lead.strip() and "\n" in text[container.start : last.start]
    glue = _newline(text) + lead if own_line else " "
    if last.comma is not None:
        return text[: last.comma] + glue + _indented(item, lead if own_line else "", text) + "," + text[last.comma :]
    at = last.node.end
    return text[:at] + "," + glue + _indented(item, lead if own_line else "", text) + text[at:]


def _insert_first(text: str, container: Node, item: str) -> str:
    """Adds the item after the opening bracket; white space and comments stay before the closing one."""
    outer = text[_line_start(text, container.start) : container.start]
    outer = outer[: len(outer) - len(outer.lstrip())]
    inner = outer + _step(text)
    newline = _newline(text)
    rest = text[container.start + 1 : container.end - 1]
    tail = rest if rest.strip() else newline + outer
    at = container.start + 1
    return text[:at] + newline + inner + _indented(item, inner, text) + tail + text[container.end - 1 :]


def _indented(item: str, lead: str, text: str) -> str:
    """An item of several lines, indented in the steps that this text uses, except for the first line."""
    lines = [(_step(text) * ((len(line) - len(line.lstrip(" "))) // 2)) + line.lstrip(" ") for line in item.split("\n")]
    return (_newline(text) + lead).join(lines)


def _step(text: str) -> str:
    found = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
    if found is None:
        return "  "
    return "\t" if found.group(1).startswith("\t") else found.group(1)[:8]


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _ends_line(text: str, at: int) -> bool:
    return text[at:].lstrip(" \t")[:1] in ("\r", "\n")


def cut(text: str, container: Node, index: int) -> str:
    """The text without one item and its comma; for the last item, without the comma before it."""
    items = container.items or []
    item = items[index]
    start, end = item.start, item.comma if item.comma is not None else item.node.end
    if len(items) == 1 and not text[container.start + 1 : start].strip():
        # `insert` added this item to an empty container.
        rest = text[end : container.end - 1]
        return text[: container.start + 1] + (rest if rest.strip() else "") + text[container.end - 1 :]
    lead = _line_start(text, start)
    if not text[lead:start].strip() and lead > container.start and _ends_line(text, end):
        # The item has its own lines: the cut takes the line end before it and keeps the one after it, so that a line
        # comment before the item still ends.
        start = lead - (2 if text[lead - 2 : lead] == "\r\n" else 1)
    elif index and text[start - 1 : start] in (" ", "\t"):
        start -= 1
    text = text[:start] + text[end:]
    before = items[index - 1] if index else None
    if before is not None and index == len(items) - 1 and before.comma is not None and item.comma is None:
        text = text[: before.comma - 1] + text[before.comma :]
    return text


_BOM = b"\xef\xbb\xbf"
_MEMORY = "installed"
_TRIES = 5


@fast_dataclass(slots=True, frozen=True)
class InstalledHooks:
    """The events for which a settings file has Mulligan's hooks, and those for which it should."""

    path: str
    events: tuple[str, ...]
    expected: tuple[str, ...]

    @property
    def is_installed(self) -> bool:
        return set(self.events) >= set(self.expected)


class Settings:
    """One settings file of one agent, and what Mulligan adds to it: hooks of a `Host`, or a `Member`.

    `memory` is the folder in which Mulligan remembers the original files.
    """

    def __init__(self, entries: Host | Member, path: str, memory: str) -> None:
        self._entries = entries
        self.path = path
        self._real = os.path.realpath(path)
        self._note = os.path.join(memory, _MEMORY, sha256(os.fsencode(self._real)).hexdigest()[:32] + ".json")

    def installed(self) -> InstalledHooks:
        data = self._read()
        events = () if data is None else tuple(self._entries.held(self._parsed(data)))
        return InstalledHooks(self.path, events, self._entries.expected)

    def places(self) -> list[tuple[str, int]]:
        """The event of each of Mulligan's hooks, and its index in the list of that event."""
        data = self._read()
        hooks = None if data is None else self._parsed(data).get("hooks")
        lists = [(item.key or "", item.node.items or ()) for item in (hooks.items or () if hooks is not None else ())]
        return [(event, index) for event, items in lists for index, one in enumerate(items) if _is_ours(one.node)]

    def install(self, store: str | None = None) -> bool:
        """Adds the hooks. False: they were there already. Raises, and changes nothing, if the file does not fit."""
        self._with_ours(self._read(), store)
        made = self._made_folder()
        return self._rewrite(lambda data: self._with_ours(data, store), made)

    def would_change(self, store: str | None = None) -> bool:
        """Whether `install` would change the file. Raises as `install` does."""
        data = self._read()
        return self._with_ours(data, store) != data

    def _with_ours(self, data: bytes | None, store: str | None) -> bytes:
        """The file with the hooks, made from the file without them, so that outdated hooks are replaced."""
        original = self._original(data)
        bom, text = _decoded(b"{}\n" if original is None or not original.strip() else original, self.path)
        return bom + self._entries.added(text, self.path, store).encode("utf-8")

    def _original(self, data: bytes | None) -> bytes | None:
        """The file without Mulligan's hooks."""
        if data is None:
            return None
        note = self._noted()
        if note is not None and note["after"] == _digest(data):
            return None if note["before"] is None else b64decode(note["before"])
        bom, text = _decoded(data, self.path)
        return bom + self._entries.without(text, self.path, _containers(note)).encode("utf-8")

    def uninstall(self) -> bool:
        """Removes the hooks. False: there were none."""
        data, note = self._read(), self._noted()
        if data is None or (note is None and not self._entries.held(self._parsed(data))):
            self._forget()
            return False
        made = note["made"] if note is not None else None
        original = self._original(data)
        if original is not None and note is not None and note["before"] is None and not _holds(original):
            original = None
        self._put(data, original)
        if original is None and made is not None:
            with suppress(OSError):
                os.rmdir(made)
        self._forget()
        return True

    # The file.

    def _rewrite(self, change: Callable[[bytes | None], bytes], made: str | None) -> bool:
        for _ in range(_TRIES):
            data = self._read()
            fresh = change(data)
            if fresh == data:
                return False
            original = self._original(data)
            self._remember(original, fresh, made)
            if self._put(data, fresh):
                return True
        raise fault("path_busy", f"Another process keeps changing {self.path}; try again.")

    def _read(self) -> bytes | None:
        try:
            with open(self._real, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise fault_of_os_error(error, f"Reading {self.path}") from error

    def _parsed(self, data: bytes) -> Node:
        _, text = _decoded(data, self.path)
        return parse_settings(text if text.strip() else "{}", self.path)

    def _put(self, expected: bytes | None, fresh: bytes | None) -> bool:
        """Replaces the file atomically if it has not changed. False: it has."""
        try:
            mode = self._writable_mode()
            if self._read() != expected:
                return False
            if fresh is None:
                os.unlink(self._real)
            else:
                replace_file(self._real, fresh, mode)
        except OSError as error:
            raise fault_of_os_error(error, f"Writing {self.path}") from error
        return True

    def _writable_mode(self) -> int:
        try:
            mode = stat.S_IMODE(os.stat(self._real).st_mode)
        except FileNotFoundError:
            return 0o600
        if not mode & stat.S_IWUSR or not os.access(self._real, os.W_OK):
            raise fault("forbidden", f"{self.path} is read-only; make it writable, or use the other scope.")
        return mode

    def _made_folder(self) -> str | None:
        """Creates the agent's folder; None if it exists."""
        folder = os.path.dirname(self._real)
        try:
            if os.path.isdir(folder):
                return None
            private_folder(folder)
        except OSError as error:
            raise fault_of_os_error(error, f"Making {folder}") from error
        return folder

    # What we remember.

    def _noted(self) -> dict[str, Any] | None:
        try:
            with open(self._note, "rb") as file:
                note: dict[str, Any] = decode(file.read())
        except (OSError, MulliganError):
            return None
        return note if isinstance(note, dict) and {"before", "after", "made"} <= note.keys() else None

    def _remember(self, before: bytes | None, after: bytes, made: str | None) -> None:
        earlier = self._noted()
        note = {
            "path": os.fsencode(self._real).hex(),
            "before": None if before is None else b64encode(before).decode("ascii"),
            "after": _digest(after),
            "made": made or (earlier["made"] if earlier is not None else None),
        }
        try:
            private_folder(os.path.dirname(self._note))
            replace_file(self._note, encode(note), 0o600)
        except OSError as error:
            raise fault_of_os_error(error, "Remembering the original settings") from error

    def _forget(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._note)


def remembered(memory: str) -> bool:
    """Whether Mulligan remembers any settings file with its hooks."""
    try:
        return bool(os.listdir(os.path.join(memory, _MEMORY)))
    except OSError:
        return False


def parse_settings(text: str, path: str) -> Node:
    """The settings as a tree. Raises `invalid_json` with the position, or `unsupported_target`."""
    try:
        node = parse(text)
    except MulliganError as error:
        raise fault("invalid_json", f"{path} is not JSON: {error.message} Mulligan changed nothing.") from None
    if not isinstance(node.value, dict):
        raise fault("unsupported_target", f"{path} is not a JSON object. Mulligan changed nothing.")
    return node


def _decoded(data: bytes, path: str) -> tuple[bytes, str]:
    bom = _BOM if data.startswith(_BOM) else b""
    try:
        return bom, data[len(bom) :].decode("utf-8")
    except UnicodeDecodeError:
        raise fault("unsupported_target", f"{path} is not UTF-8 text. Mulligan changed nothing.") from None


def _ours(node: Node) -> list[str]:
    """The event of each of Mulligan's entries."""
    hooks = node.get("hooks")
    if hooks is None or not isinstance(hooks.value, dict):
        return []
    return [item.key or "" for item in hooks.items or () for group in item.node.items or () if _is_ours(group.node)]


def _is_ours(group: Node) -> bool:
    hooks = group.value.get("hooks") if isinstance(group.value, dict) else None
    listed = hooks if isinstance(hooks, list) else []
    commands = [hook.get("command") for hook in listed if isinstance(hook, dict)]
    return bool(commands) and all(isinstance(one, str) and MARK in one.replace("\\", "/") for one in commands)


def _added(text: str, event: str, entry: str, *, path: str) -> str:
    node = parse_settings(text, path)
    hooks = node.get("hooks")
    if hooks is None:
        text = insert(text, node, '"hooks": {}')
        hooks = parse_settings(text, path).get("hooks")
    assert hooks is not None
    listed = hooks.get(event)
    if listed is None:
        text = insert(text, hooks, f'"{event}": []')
        again = parse_settings(text, path).get("hooks")
        listed = again.get(event) if again is not None else None
    assert listed is not None
    return insert(text, listed, entry)


class _EntryIndex(NamedTuple):
    """The indexes that lead to an entry: in the settings, in `hooks`, in the list of the event."""

    hooks: int
    event: int
    group: int


def _first_of_ours(root: Node) -> _EntryIndex | None:
    """Mulligan's first entry, also below a repeated key, which agents ignore: `uninstall` must remove every entry."""
    for i, member in enumerate(root.items or ()):
        for j, event in enumerate(member.node.items or () if member.key == "hooks" else ()):
            for k, group in enumerate(event.node.items or ()):
                if _is_ours(group.node):
                    return _EntryIndex(i, j, k)
    return None


def _removed(text: str, at: _EntryIndex, *, theirs: Container[str]) -> str:
    """The text without one entry, and without the list and object around it if Mulligan added them."""
    text = cut(text, _members(parse(text), at.hooks, at.event)[-1], at.group)
    root, hooks, listed = _members(parse(text), at.hooks, at.event)
    if not _is_bare(text, listed) or f"hooks.{(hooks.items or [])[at.event].key}" in theirs:
        return text
    text = cut(text, hooks, at.event)
    root, hooks = _members(parse(text), at.hooks)
    return text if not _is_bare(text, hooks) or "hooks" in theirs else cut(text, root, at.hooks)


def _members(root: Node, *indexes: int) -> list[Node]:
    """The node, its item with the first index, that item's item with the next, and so on."""
    found = [root]
    for index in indexes:
        found.append((found[-1].items or [])[index].node)
    return found


def _is_bare(text: str, node: Node) -> bool:
    """Whether a container has nothing in it, not even a comment."""
    return not text[node.start + 1 : node.end - 1].strip()


def _containers(note: Mapping[str, Any] | None) -> set[str]:
    """The keys that the settings had before the installation, if Mulligan remembers them, and those in `hooks`."""
    before = b"" if note is None or note["before"] is None else b64decode(note["before"])
    root = parse(before.decode("utf-8-sig")) if before.strip() else None
    found = {item.key or "" for item in (root.items or () if root is not None else ())}
    hooks = root.get("hooks") if root is not None else None
    return found | {f"hooks.{item.key}" for item in (hooks.items or () if hooks is not None else ())}


def _holds(data: bytes) -> bool:
    """Whether the settings hold anything, even a comment."""
    return data.strip() not in (b"", b"{}") and b"".join(data.split()) != b"{}"


def _pretty(value: Any, depth: int = 0) -> str:
    """Indented JSON, two spaces for each level."""
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value:
        rows = [f"{inner}{encode(key).decode()}: {_pretty(one, depth + 1)}" for key, one in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{outer}}}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(inner + _pretty(one, depth + 1) for one in value) + f"\n{outer}]"
    return encode(value).decode("utf-8")


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def replace_file(path: str, data: bytes, mode: int) -> None:
    """Replaces a file atomically and durably: readers, and a power cut, see the old file or the new one."""
    handle, draft = tempfile.mkstemp(prefix=".mulligan-", dir=os.path.dirname(path))
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)
