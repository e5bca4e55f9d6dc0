"""What `mulligan install` puts into each host, and how `mulligan uninstall` takes it away again.

`PACKAGES` has one row for each host. A package consists of settings files, to which Mulligan adds entries (`settings`),
and of files of its own. Beside the store, a note lists Mulligan's own files and folders with their digests: `uninstall`
removes a file only if nobody has changed it since.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from mulligan.hosts.settings import (
    COMMANDS,
    HOSTS,
    Host,
    Member,
    Scope,
    Settings,
    client_words,
    command_for,
    replace_file,
)
from mulligan.hosts.typed import DESCRIPTIONS, NO_ANSWER
from mulligan.store.sqlite_file import private_folder
from mulligan.values.canonical import decode, encode
from mulligan.values.errors import MulliganError, fault, fault_of_os_error
from mulligan.values.fast_dataclass import fast_dataclass

_NOTES = "packages"


@fast_dataclass(slots=True, frozen=True)
class Package:
    """What one host gets. `base` is the host's folder; `files` are Mulligan's own files below it.

    `added`: the entries in settings files, for a scope, the folder `base` and the store. `steps`: what remains for the
    person. `leaves`: what the host itself makes and `uninstall` leaves.
    """

    name: str
    title: str
    program: str
    base: Callable[[Scope, str, Mapping[str, str]], str]
    files: Callable[[str], Mapping[str, str]]
    added: Callable[[Scope, str, str], Mapping[str, Host | Member]]
    steps: tuple[str, ...]
    leaves: str | None = None
    scopes: tuple[Scope, ...] = ("user", "project")


def _home(environ: Mapping[str, str]) -> str:
    return environ.get("HOME") or os.path.expanduser("~")


def _folder_of(host: str) -> Callable[[Scope, str, Mapping[str, str]], str]:
    def folder(scope: Scope, root: str, environ: Mapping[str, str]) -> str:
        return os.path.dirname(HOSTS[host].settings_path(scope, root=root, environ=environ))

    return folder


def _hooks_in(host: str) -> Callable[[Scope, str, str], Mapping[str, Host | Member]]:
    row = replace(HOSTS[host], answers=True)
    return lambda scope, _, __: {row.user_file if scope == "user" else row.project_file: row}


def _no_settings(_: Scope, __: str, ___: str) -> Mapping[str, Host | Member]:
    return {}


def _claude_files(_: str) -> Mapping[str, str]:
    hints = {"undo": "[CALL]", "redo": "", "mulligan": "VERB"}
    return {f"commands/{name}.md": _claude_command(name, hint) for name, hint in hints.items()}


def _claude_command(name: str, hint: str) -> str:
    argument = f'argument-hint: "{hint}"\n' if hint else ""
    description = f'description: "{DESCRIPTIONS[name]}"\n'
    return f"---\n{description}{argument}disable-model-invocation: true\n---\n{NO_ANSWER}\n"


def _codex_files(_: str) -> Mapping[str, str]:
    return {
        f"skills/{name}/SKILL.md": f'---\nname: {name}\ndescription: "{description}"\n---\n{NO_ANSWER}\n'
        for name, description in DESCRIPTIONS.items()
    }


def _gemini_files(store: str) -> Mapping[str, str]:
    host = replace(HOSTS["gemini"], answers=True)
    command = command_for("gemini", store, answers=True)
    hooks = {"hooks": {event: [host.entry(event, command)] for event in host.events}}
    prompts = {"undo": "mulligan: undo {{args}}", "redo": "mulligan: redo {{args}}", "mulligan": "mulligan: {{args}}"}
    commands = {
        f"commands/{name}.toml": f'description = "{DESCRIPTIONS[name]}"\nprompt = """{prompt}\n{NO_ANSWER}"""\n'
        for name, prompt in prompts.items()
    }
    about = {"name": "mulligan", "version": "0.1.0"}
    return {"gemini-extension.json": _json(about), "hooks/hooks.json": _json(hooks), **commands}


def _gemini_base(_: Scope, __: str, environ: Mapping[str, str]) -> str:
    return os.path.join(_home(environ), ".gemini", "extensions", "mulligan")


def _opencode_base(scope: Scope, root: str, environ: Mapping[str, str]) -> str:
    if scope == "project":
        return os.path.join(root, ".opencode")
    return os.path.join(_config_home(environ), "opencode")


def _opencode_files(store: str) -> Mapping[str, str]:
    words = encode([*client_words("opencode"), store, COMMANDS]).decode("utf-8")
    command = f'---\ndescription: "{DESCRIPTIONS["mulligan"]}"\n---\n{NO_ANSWER}\n'
    return {
        "plugin/mulligan.js": _script("opencode.js").replace('"@HOOK@"', words),
        _TUI_PLUGIN: _script("opencode_tui.js"),
        "command/mulligan.md": command,
    }


_TUI_PLUGIN = "mulligan/tui.js"


def _script(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return file.read()


def _opencode_entry(_: Scope, base: str, __: str) -> Mapping[str, Host | Member]:
    return {"tui.json": Member("plugin", None, f"file://{quote(os.path.join(base, _TUI_PLUGIN))}")}


def _config_home(environ: Mapping[str, str]) -> str:
    return environ.get("XDG_CONFIG_HOME") or os.path.join(_home(environ), ".config")


def _zed_base(scope: Scope, root: str, environ: Mapping[str, str]) -> str:
    if scope == "project":
        return os.path.join(root, ".zed")
    return os.path.join(_config_home(environ), "zed")


def _zed_entry(_: Scope, __: str, store: str) -> Mapping[str, Host | Member]:
    words = ["-m", "mulligan", "acp", "--store", store, "--", "claude-agent-acp"]
    proxy = {"type": "custom", "command": sys.executable, "args": words, "env": {}}
    return {"settings.json": Member("agent_servers", "Mulligan", proxy)}


def _no_files(_: str) -> Mapping[str, str]:
    return {}


def _json(value: Any) -> str:
    return encode(value).decode("utf-8") + "\n"


PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        "claude": Package(
            "claude",
            "Claude Code",
            "claude",
            _folder_of("claude"),
            _claude_files,
            _hooks_in("claude"),
            ("Start a new session of `claude`, then type /undo or /mulligan VERB.",),
        ),
        "codex": Package(
            "codex",
            "Codex",
            "codex",
            _folder_of("codex"),
            _codex_files,
            _hooks_in("codex"),
            (
                "Codex runs a hook only after you trust it: start `codex`, and choose to trust the hooks.",
                "Then type undo, $undo or mulligan VERB.",
            ),
            "Codex keeps its trust in these hooks in config.toml.",
        ),
        "gemini": Package(
            "gemini",
            "Gemini CLI",
            "gemini",
            _gemini_base,
            _gemini_files,
            _no_settings,
            ("Start a new session of `gemini`, then type /undo or /mulligan VERB.",),
            scopes=("user",),
        ),
        "opencode": Package(
            "opencode",
            "opencode",
            "opencode",
            _opencode_base,
            _opencode_files,
            _opencode_entry,
            ("Start a new session of `opencode`, then type /undo or /mulligan VERB. Its first start is slow.",),
            "opencode itself installs packages beside a plugin (package.json, node_modules); they stay.",
        ),
        "zed": Package(
            "zed",
            "Zed",
            "zed",
            _zed_base,
            _no_files,
            _zed_entry,
            ("Open Zed's agent panel and start a thread with the agent Mulligan.",),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Installation:
    """A package in one scope. `store` is the directory of the store, `memory` the folder for notes beside it."""

    package: Package
    scope: Scope
    root: str
    environ: Mapping[str, str]
    store: str
    memory: str

    def __post_init__(self) -> None:
        if self.scope not in self.package.scopes:
            words = f"{self.package.title} takes Mulligan for all of your folders only; leave out --{self.scope}."
            raise fault("unsupported_target", words)

    @property
    def base(self) -> str:
        return self.package.base(self.scope, self.root, self.environ)

    @property
    def settings(self) -> list[Settings]:
        added = self.package.added(self.scope, self.base, self.store)
        return [Settings(entries, os.path.join(self.base, name), self.memory) for name, entries in added.items()]

    @property
    def files(self) -> dict[str, bytes]:
        """Mulligan's own files, by path."""
        return {os.path.join(self.base, name): text.encode() for name, text in self.package.files(self.store).items()}

    def changes(self) -> list[str]:
        """The files that `install` would create or change. Raises, as `install` does, if one is in the way."""
        own = self._noted()["files"]
        found: list[str] = []
        for path, data in self.files.items():
            now = _read(path)
            if now == data:
                continue
            if now is not None and own.get(path) != _digest(now):
                words = f"{path} exists, and Mulligan did not make it; move it away first. Mulligan changed nothing."
                raise fault("unsupported_target", words)
            found.append(path)
        return [*(one.path for one in self.settings if one.would_change(self.store)), *found]

    def install(self) -> list[str]:
        """Returns the files that it created or changed. Raises, and changes nothing, if one does not fit."""
        changed = self.changes()
        note = self._noted()
        for path in (*(one.path for one in self.settings), *self.files):
            note["folders"] += _missing_folders(os.path.dirname(path), note["folders"])
        note["files"] |= {path: _digest(data) for path, data in self.files.items()}
        # Remembered first: whatever happens in between, `uninstall` finds each file that this made.
        self._remember(note)
        for one in self.settings:
            one.install(self.store)
        for path, data in self.files.items():
            if path in changed:
                _write(path, data)
        return changed

    def uninstall(self) -> tuple[list[str], list[str]]:
        """Returns the files that it restored or removed, and Mulligan's files that it left: somebody edited them."""
        note = self._noted()
        trusted = codex_trust(self.settings[0]) if self.package.name == "codex" else None
        restored = [one.path for one in self.settings if one.uninstall()]
        if trusted is not None and trusted.forget():
            restored.append(trusted.path)
        left: list[str] = []
        for path, data in self.files.items():
            now = _read(path)
            if now is not None and _digest(now) not in (note["files"].get(path), _digest(data)):
                left.append(path)
            elif now is not None:
                os.unlink(path)
                restored.append(path)
        for folder in sorted(note["folders"], key=len, reverse=True):
            with suppress(OSError):
                os.rmdir(folder)
        with suppress(FileNotFoundError):
            os.unlink(self._note)
        return restored, left

    def missing(self) -> list[str]:
        """The files that are not as `install` makes them."""
        files = [path for path, data in self.files.items() if _read(path) != data]
        return [*(one.path for one in self.settings if not one.installed().is_installed), *files]

    @property
    def is_there(self) -> bool:
        """Whether any part of the package is installed."""
        every = [*(one.path for one in self.settings), *self.files]
        return len(self.missing()) < len(every)

    @property
    def _note(self) -> str:
        name = sha256(os.fsencode(f"{self.package.name}:{self.base}")).hexdigest()[:32]
        return os.path.join(self.memory, _NOTES, f"{name}.json")

    def _noted(self) -> dict[str, Any]:
        try:
            with open(self._note, "rb") as file:
                body = decode(file.read())
        except (OSError, MulliganError):
            body = None
        return body if isinstance(body, dict) and {"files", "folders"} <= body.keys() else {"files": {}, "folders": []}

    def _remember(self, note: Mapping[str, Any]) -> None:
        try:
            private_folder(os.path.dirname(self._note))
            replace_file(self._note, encode(note), 0o600)
        except OSError as error:
            raise fault_of_os_error(error, "Remembering what was installed") from error


@fast_dataclass(slots=True, frozen=True)
class CodexTrust:
    """The tables of Codex's `config.toml` in which it keeps that the person trusts Mulligan's hooks."""

    path: str
    keys: frozenset[str]

    def forget(self) -> bool:
        """Removes the tables, and nothing else. False: there were none."""
        data = _read(self.path)
        text = (data or b"").decode("utf-8", "surrogateescape")
        parts = _TABLE.split(text)
        kept = [part for part in parts if not (found := _TRUST.match(part)) or found[1] not in self.keys]
        if len(kept) == len(parts):
            return False
        if not any(_TRUST.match(part) for part in kept):
            kept = [part for part in kept if part.strip() != "[hooks.state]"]
        _write(self.path, "".join(kept).encode("utf-8", "surrogateescape"))
        return True


_TABLE = re.compile(r"^(?=\[)", re.MULTILINE)
_TRUST = re.compile(r'\[hooks\.state\."((?:[^"\\]|\\.)*)"\]')


def codex_trust(hooks: Settings) -> CodexTrust:
    """The trust in Mulligan's entries. Codex names an entry by its file, its event, and its place in the list."""
    keys = {f"{hooks.path}:{_snake(event)}:{index}:0" for event, index in hooks.places()}
    return CodexTrust(os.path.join(os.path.dirname(hooks.path), "config.toml"), frozenset(keys))


def _snake(event: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", event).lower()


def any_installed(memory: str) -> bool:
    """Whether Mulligan remembers any installed package."""
    try:
        return bool(os.listdir(os.path.join(memory, _NOTES)))
    except OSError:
        return False


def _missing_folders(folder: str, known: list[str]) -> list[str]:
    found: list[str] = []
    while folder not in known and not os.path.isdir(folder):
        found.append(folder)
        folder = os.path.dirname(folder)
    return found


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise fault_of_os_error(error, f"Reading {path}") from error


def _write(path: str, data: bytes) -> None:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_file(path, data, stat.S_IMODE(os.stat(path).st_mode) if os.path.exists(path) else 0o644)
    except OSError as error:
        raise fault_of_os_error(error, f"Writing {path}") from error


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()
