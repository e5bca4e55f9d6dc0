"""Our entries in other programs' settings: put in without touching anything else, taken out without a trace.

What a file was before, and what we made of it, is remembered beside the store. As long as the file is what we made, it
goes back byte for byte. If somebody has edited it since, only our entries are cut out, and what we had to add around
them where that is empty now.
"""

from __future__ import annotations

import os
import stat
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any, NamedTuple

from mulligan.agents.hooks.hosts import MARK, Host, command_for
from mulligan.agents.hooks.jsonc import Node, cut, insert, parse
from mulligan.agents.hooks.spool import private_folder
from mulligan.values.canonical import decode, encode
from mulligan.values.faults import MulliganError, fault, fault_of_os_error
from mulligan.values.plain import plain

_BOM = b"\xef\xbb\xbf"
_MEMORY = "installed"
_TRIES = 5


@plain(slots=True, frozen=True)
class Standing:
    """Whether our entries are in a settings file, and for which moments."""

    path: str
    events: tuple[str, ...]
    expected: tuple[str, ...]

    @property
    def is_installed(self) -> bool:
        return set(self.events) >= set(self.expected)


class Settings:
    """One settings file of one agent. `memory` is the folder where we remember what files were."""

    def __init__(self, host: Host, path: str, memory: str) -> None:
        self._host = host
        self.path = path
        self._real = os.path.realpath(path)
        self._note = os.path.join(memory, _MEMORY, sha256(os.fsencode(self._real)).hexdigest()[:32] + ".json")

    def standing(self) -> Standing:
        data = self._read()
        events = () if data is None else tuple(_ours(self._parsed(data)[1]))
        return Standing(self.path, events, self._host.events)

    def install(self, store: str | None = None) -> bool:
        """False: nothing to do. Refused with the reason, changing nothing, if the file cannot be merged with."""
        command = command_for(self._host.name, store)
        made = self._made_folder()
        return self._rewrite(lambda data: self._with_ours(data, command), made)

    def _with_ours(self, data: bytes | None, command: str) -> bytes:
        """Installed anew over what was there before us, so that a second time changes only what is out of date."""
        original = self._original(data)
        bom, text = _decoded(b"{}\n" if original is None or not original.strip() else original, self.path)
        self._check(parse_settings(text, self.path))
        for event in self._host.events:
            text = _added(text, event, _pretty(self._host.entry(event, command)), path=self.path)
        return bom + text.encode("utf-8")

    def _original(self, data: bytes | None) -> bytes | None:
        """What the file would be without us."""
        if data is None:
            return None
        note = self._noted()
        if note is not None and note["after"] == _digest(data):
            return None if note["before"] is None else b64decode(note["before"])
        return self._cut_out(data, _containers(note))

    def uninstall(self) -> bool:
        """False: there was nothing of ours."""
        data, note = self._read(), self._noted()
        if data is None or (note is None and _first_of_ours(self._parsed(data)[1]) is None):
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

    def _cut_out(self, data: bytes, theirs: Container[str]) -> bytes:
        bom, text = _decoded(data, self.path)
        while text.strip() and (found := _first_of_ours(parse_settings(text, self.path))) is not None:
            text = _removed(text, found, theirs=theirs)
        return bom + text.encode("utf-8")

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
        raise fault("path_busy", f"{self.path} is being changed by somebody else; try again.")

    def _read(self) -> bytes | None:
        try:
            with open(self._real, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise fault_of_os_error(error, f"Reading {self.path}") from error

    def _parsed(self, data: bytes) -> tuple[str, Node]:
        _, text = _decoded(data, self.path)
        return text, parse_settings(text if text.strip() else "{}", self.path)

    def _check(self, node: Node) -> None:
        """Everything we would add to is of the kind it must be."""
        hooks = node.get("hooks")
        if hooks is not None and not isinstance(hooks.value, dict):
            raise fault("unsupported_target", f'{self.path}: "hooks" is not an object; put that right first.')
        for event in self._host.events:
            listed = hooks.get(event) if hooks is not None else None
            if listed is not None and not isinstance(listed.value, list):
                raise fault("unsupported_target", f'{self.path}: "hooks.{event}" is not a list; put that right first.')

    def _put(self, expected: bytes | None, fresh: bytes | None) -> bool:
        """In one step, if the file is still what it was. False: it is not."""
        try:
            mode = self._writable_mode()
            if self._read() != expected:
                return False
            if fresh is None:
                os.unlink(self._real)
            else:
                _replace(self._real, fresh, mode)
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
        """The agent's folder, if it is us who make it."""
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
            _replace(self._note, encode(note), 0o600)
        except OSError as error:
            raise fault_of_os_error(error, "Remembering what the settings were") from error

    def _forget(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._note)


def remembered(memory: str) -> bool:
    """Whether any settings hold something of ours, as far as we remember."""
    try:
        return bool(os.listdir(os.path.join(memory, _MEMORY)))
    except OSError:
        return False


def parse_settings(text: str, path: str) -> Node:
    """The settings as a tree. Raises `invalid_json` with the place, or `unsupported_target`."""
    try:
        node = parse(text)
    except MulliganError as error:
        raise fault("invalid_json", f"{path} is not JSON: {error.message} Nothing was changed.") from None
    if not isinstance(node.value, dict):
        raise fault("unsupported_target", f"{path} does not hold an object. Nothing was changed.")
    return node


def _decoded(data: bytes, path: str) -> tuple[bytes, str]:
    bom = _BOM if data.startswith(_BOM) else b""
    try:
        return bom, data[len(bom) :].decode("utf-8")
    except UnicodeDecodeError:
        raise fault("unsupported_target", f"{path} is not UTF-8 text. Nothing was changed.") from None


def _ours(node: Node) -> list[str]:
    """The moments under which an entry of ours stands, once for each entry."""
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


class _Place(NamedTuple):
    """Which member of the settings, of that, and which entry under it."""

    hooks: int
    event: int
    group: int


def _first_of_ours(root: Node) -> _Place | None:
    """Wherever it stands: of several members with one key an agent minds only the last, but none of ours is to stay."""
    for i, member in enumerate(root.items or ()):
        for j, event in enumerate(member.node.items or () if member.key == "hooks" else ()):
            for k, group in enumerate(event.node.items or ()):
                if _is_ours(group.node):
                    return _Place(i, j, k)
    return None


def _removed(text: str, at: _Place, *, theirs: Container[str]) -> str:
    """Without one entry of ours, and without the list and the object around it if we made them for it."""
    text = cut(text, _members(parse(text), at.hooks, at.event)[-1], at.group)
    root, hooks, listed = _members(parse(text), at.hooks, at.event)
    if not _is_bare(text, listed) or f"hooks.{(hooks.items or [])[at.event].key}" in theirs:
        return text
    text = cut(text, hooks, at.event)
    root, hooks = _members(parse(text), at.hooks)
    return text if not _is_bare(text, hooks) or "hooks" in theirs else cut(text, root, at.hooks)


def _members(root: Node, *indexes: int) -> list[Node]:
    """The node, and what is reached from it step by step."""
    found = [root]
    for index in indexes:
        found.append((found[-1].items or [])[index].node)
    return found


def _is_bare(text: str, node: Node) -> bool:
    """Nothing in it, not even a comment."""
    return not text[node.start + 1 : node.end - 1].strip()


def _containers(note: Mapping[str, Any] | None) -> set[str]:
    """What the settings had before us that could hold our entries, as far as we remember."""
    before = b"" if note is None or note["before"] is None else b64decode(note["before"])
    hooks = parse(before.decode("utf-8-sig")).get("hooks") if before.strip() else None
    return set() if hooks is None else {"hooks", *(f"hooks.{item.key}" for item in hooks.items or ())}


def _holds(data: bytes) -> bool:
    """Whether there is anything in the settings, be it a comment."""
    return data.strip() not in (b"", b"{}") and b"".join(data.split()) != b"{}"


def _pretty(value: Any, depth: int = 0) -> str:
    """JSON for people, two spaces a step."""
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value:
        rows = [f"{inner}{encode(key).decode()}: {_pretty(one, depth + 1)}" for key, one in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{outer}}}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(inner + _pretty(one, depth + 1) for one in value) + f"\n{outer}]"
    return encode(value).decode("utf-8")


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def _replace(path: str, data: bytes, mode: int) -> None:
    """Whole or not at all, for whoever reads it and after a power cut."""
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
