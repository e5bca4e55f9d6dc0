"""`mulligan install|uninstall`, `mulligan hooks …`, and the background process that the hooks report to."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from mulligan.cli.format import paint, print_json
from mulligan.cli.options import Common, confirm, options_saying, yes_option
from mulligan.hosts.settings import HOSTS, Scope, Settings
from mulligan.values.errors import fault
from mulligan.values.text import visible

if TYPE_CHECKING:
    from mulligan.cli.command_server import CommandServer
    from mulligan.hosts.install import Installation

_hook_options = options_saying(
    "Not used: hooks report every session of the agent.", root="The folder of the project. Default: this one."
)
_NEXT = {
    "claude": "Start a new session: running ones do not see the hooks. `claude` may ask you to trust the folder.",
    "gemini": "Start a new session. Hooks of a project run only in a folder that Gemini CLI trusts.",
    "codex": "Codex runs a hook only after you trust it: start `codex` and open /hooks.",
}


@click.group()
@_hook_options
def hooks(common: Common) -> None:
    """Make the tool calls of Claude Code, Gemini CLI or Codex undoable, through the agents' own hooks.

    You can give the common options before or after the sub-verb.
    """


def _scoped(command: Any) -> Any:
    for option in (
        click.option("--project", "scope", flag_value="project", help="Only in this folder."),
        click.option("--user", "scope", flag_value="user", default="user", help="In all of your folders (default)."),
        click.argument("agent", type=click.Choice(sorted(HOSTS))),
    ):
        command = option(command)
    return command


def _settings(common: Common, agent: str, scope: Scope) -> Settings:
    host = HOSTS[agent]
    path = host.settings_path(scope, root=_root(common), environ=os.environ)
    return Settings(host, path, hooks_folder(common.store))


def _root(common: Common) -> str:
    """A project's settings are where its agent looks for them: in the folder given, else in this one."""
    return common.root or os.getcwd()


def hooks_folder(store: str | None) -> str:
    """The folder in which Mulligan remembers what it changed in the settings of agents."""
    from mulligan.agents.hooks.socket import FOLDER

    return os.path.join(home_of(store), FOLDER)


def home_of(store: str | None) -> str:
    from mulligan.api import store_directory
    from mulligan.store.sqlite_file import refuse_untrusted

    home = store_directory(store, os.environ)
    if home is None:
        raise fault("unsupported_target", "Hooks need a store that outlives the agent; give --store a directory.")
    refuse_untrusted(home)
    return home


# Whole packages for hosts.


def _host_options(command: Any) -> Any:
    for option in (
        click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing."),
        yes_option,
        click.option("--project", "scope", flag_value="project", help="Only in this folder."),
        click.option("--user", "scope", flag_value="user", default="user", help="In all of your folders (default)."),
    ):
        command = option(command)
    return command


_HOST = click.Choice(["claude", "codex", "gemini", "opencode", "zed"])


@click.command("install")
@click.argument("host", type=_HOST, required=False)
@click.option("--list", "listing", is_flag=True, help="Show the hosts, their versions, and what is installed.")
@_host_options
@_hook_options
def install_host(common: Common, host: str | None, listing: bool, scope: Scope, *, yes: bool, dry_run: bool) -> None:
    """Set a host up: undo typed into its prompt, hooks, commands. Without HOST: every host found here."""
    if listing:
        _list_hosts(common)
        return
    names = [host] if host is not None else _detected()
    if not names:
        raise fault("unsupported_target", f"Mulligan found none of {', '.join(_HOST.choices)} here; name one.")
    chosen = [_installation(common, name, scope) for name in names]
    planned = {one.package.name: one.changes() for one in chosen}
    paths = [path for changes in planned.values() for path in changes]
    if not common.as_json:
        for path in paths:
            click.echo(f"{'would write' if dry_run else 'writes'} {visible(path)}")
    if paths and not dry_run:
        confirm(common, "Go ahead?", yes=yes, otherwise="`mulligan install` changes settings; confirm with --yes.")
        for one in chosen:
            one.install()
    body = [_installed_view(one, planned[one.package.name]) for one in chosen]
    steps = [f"{one.package.title}: {step}" for one in chosen for step in one.package.steps]
    done = [] if paths else [f"{', '.join(one.package.title for one in chosen)}: everything is installed already."]
    common.answer(body, *done, *([] if dry_run else steps))


@click.command("uninstall")
@click.argument("host", type=_HOST)
@_host_options
@_hook_options
def uninstall_host(common: Common, host: str, scope: Scope, *, yes: bool, dry_run: bool) -> None:
    """Remove what `mulligan install` added; every file is as it was before."""
    one = _installation(common, host, scope)
    if dry_run:
        here = [*(each.path for each in one.settings if each.installed().events), *filter(os.path.exists, one.files)]
        common.answer({"host": host, "changed": here}, *(f"would restore {visible(path)}" for path in here))
        return
    if one.is_there:
        confirm(common, f"Remove Mulligan from {one.package.title}?", yes=yes, otherwise="Confirm with --yes.")
    restored, left = one.uninstall()
    if not _any_installed(common):
        _stop(common)
    lines = [f"restored {visible(path)}" for path in restored]
    lines += [f"left {visible(path)}: somebody has edited it" for path in left]
    lines += [one.package.leaves] if one.package.leaves and restored else []
    common.answer(
        {"host": host, "changed": restored, "left": left},
        *(lines or [f"Mulligan is not installed in {one.package.title}."]),
    )


def _installation(common: Common, host: str, scope: Scope) -> Installation:
    from mulligan.hosts.install import PACKAGES, Installation

    store = home_of(common.store)
    return Installation(PACKAGES[host], scope, _root(common), os.environ, store, hooks_folder(common.store))


def _installed_view(one: Installation, changed: list[str]) -> dict[str, Any]:
    steps = list(one.package.steps)
    return {"host": one.package.name, "scope": one.scope, "changed": changed, "steps": steps}


def _detected() -> list[str]:
    from shutil import which

    from mulligan.hosts.install import PACKAGES

    return [name for name, package in PACKAGES.items() if which(package.program)]


def _list_hosts(common: Common) -> None:
    rows = list(host_states(common).values())
    lines = [
        f"{row['host']:<7} {row['version'] or 'not found':<12} {row['scope']:<8} {row['state']}"
        + "".join(f"\n  missing: {visible(path)}" for path in row["missing"] if row["state"] == "partly")
        for states in rows
        for row in states
    ]
    common.answer([row for states in rows for row in states], *lines)


def _host_view(common: Common, host: str) -> list[dict[str, Any]]:
    from mulligan.hosts.install import PACKAGES

    version, found = _version_of(PACKAGES[host].program), []
    for scope in PACKAGES[host].scopes:
        one = _installation(common, host, scope)
        missing = one.missing()
        state = "installed" if not missing else "partly" if one.is_there else "no"
        found.append({"host": host, "version": version, "scope": scope, "state": state, "missing": missing})
    return found


def host_states(common: Common) -> dict[str, list[dict[str, Any]]]:
    """What is installed in each host, for each scope."""
    return {name: _host_view(common, name) for name in _HOST.choices}


def hook_states(common: Common) -> list[dict[str, Any]]:
    """The state of the hooks of each agent, for each scope."""
    return _states(common, None)


def _version_of(program: str) -> str | None:
    """The version that the program prints; None if it is not here or does not answer."""
    import re
    import subprocess
    from shutil import which

    path = which(program)
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    number = re.search(r"\d+(\.\d+)+", done.stdout)
    return number.group() if number else "?"


_VERSION_S = 20.0


# Hooks alone.


@hooks.command()
@_scoped
@_hook_options
def install(common: Common, agent: str, scope: Scope) -> None:
    """Add Mulligan's hooks to the agent's settings."""
    settings = _settings(common, agent, scope)
    changed = settings.install(None if common.store is None else home_of(common.store))
    if common.as_json:
        print_json({"agent": agent, "path": settings.path, "changed": changed})
        return
    words = "Installed hooks in" if changed else "The hooks are already in"
    click.echo(f"{words} {visible(settings.path)}.")
    click.echo(_NEXT[agent])


@hooks.command()
@_scoped
@_hook_options
def uninstall(common: Common, agent: str, scope: Scope) -> None:
    """Remove Mulligan's hooks; the rest of the settings does not change."""
    settings = _settings(common, agent, scope)
    changed = settings.uninstall()
    if not _any_installed(common):
        _stop(common)
    if common.as_json:
        print_json({"agent": agent, "path": settings.path, "changed": changed})
        return
    click.echo(
        f"{'Removed the hooks from' if changed else 'There were no hooks of Mulligan in'} {visible(settings.path)}."
    )


def _any_installed(common: Common) -> bool:
    from mulligan.hosts.install import any_installed
    from mulligan.hosts.settings import remembered

    memory = hooks_folder(common.store)
    return remembered(memory) or any_installed(memory)


def _stop(common: Common) -> None:
    from mulligan.agents.hooks.socket import ask_background, background_folder

    ask_background(background_folder(home_of(common.store)), b"stop")


@hooks.command()
@click.argument("agent", type=click.Choice(sorted(HOSTS)), required=False)
@_hook_options
def status(common: Common, agent: str | None) -> None:
    """Show which hooks are installed, and whether the background process runs."""
    body = {"hooks": _states(common, agent), **_process(common)}
    if common.as_json:
        print_json(body)
        return
    for one in body["hooks"]:
        colour = {"installed": "green", "partly": "yellow", "broken": "red"}.get(one["state"], "dim")
        why = f" ({visible(one['reason'])})" if one.get("reason") else ""
        click.echo(f"{one['agent']:<7} {one['scope']:<8} {paint(one['state'], colour)}  {visible(one['path'])}{why}")
    running = body["process"]
    click.echo(f"background process: {'running, pid ' + str(running['pid']) if running else 'not running'}")
    if body["undelivered"]:
        click.echo(f"{body['undelivered']} events could not be delivered yet")
    if body["trouble"]:
        click.echo(paint(f"last error: {visible(body['trouble'].strip())}", "yellow"))


def _states(common: Common, agent: str | None) -> list[dict[str, Any]]:
    asked = [agent] if agent is not None else sorted(HOSTS)
    scopes: tuple[Scope, ...] = ("user", "project")
    return [_state(common, name, scope) for name in asked for scope in scopes]


def _state(common: Common, agent: str, scope: Scope) -> dict[str, Any]:
    from mulligan.values.errors import MulliganError

    settings = _settings(common, agent, scope)
    body: dict[str, Any] = {"agent": agent, "scope": scope, "path": settings.path}
    try:
        found = settings.installed()
    except MulliganError as error:
        return body | {"state": "broken", "reason": error.message}
    state = "installed" if found.is_installed else "partly" if found.events else "no"
    return body | {"state": state, "events": sorted(set(found.events))}


def _process(common: Common) -> dict[str, Any]:
    from mulligan.agents.hooks.recorder import TROUBLE
    from mulligan.agents.hooks.socket import Spool, ask_background, background_folder
    from mulligan.values.canonical import decode

    folder = background_folder(home_of(common.store))
    answer = ask_background(folder, b"status")
    try:
        with open(os.path.join(folder, TROUBLE), encoding="utf-8", errors="replace") as file:
            trouble = file.read(10_000)
    except OSError:
        trouble = ""
    return {
        "process": decode(answer) if answer else None,
        "undelivered": len(Spool(folder).names()),
        "trouble": trouble,
    }


@hooks.command(hidden=True)
@click.option("--once", is_flag=True, help="Record the one event on stdin, then end.")
@_hook_options
def keep(common: Common, once: bool) -> int:
    """Run the background process. Hooks and commands start it themselves."""
    from mulligan.agents.hooks import background
    from mulligan.agents.hooks.socket import background_folder

    home = home_of(common.store)
    folder = background_folder(home)
    roots = RecordedRoots(home)
    try:
        if once:
            background.record_once(folder, roots.recorder_for, sys.stdin.buffer.read(), _print_answer)
            return 0
        lock = background.take_lock(folder, wait=False)
        if lock is None:
            return 0  # another process is the background process
        commands = _start_command_server(lock)
        if isinstance(commands, int):
            return commands  # this process is a fork that has run a verb
        commands.begin(folder)
        background.run(folder, roots.recorder_for, roots.sync, commands)
        return 0
    finally:
        roots.close()


def _start_command_server(lock: int) -> CommandServer | int:
    from mulligan.cli import command_server, run

    return command_server.start(run, lock=lock)


def _print_answer(answer: bytes) -> None:
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


class RecordedRoots:
    """The roots that agents work in. Each is opened when its first event comes."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._by_root: dict[str, Any] = {}
        self._by_session: dict[str, Any] = {}

    def recorder_for(self, event: Any, project: str) -> Any:
        known = self._by_session.get(event.session)
        if known is None:
            known = self._by_session[event.session] = self._opened(self._root_of(event, project))
        return known[1]

    def _opened(self, root: str) -> Any:
        from mulligan import api
        from mulligan.agents.hooks.recorder import TOLD, Recorder
        from mulligan.agents.hooks.socket import FOLDER

        if root not in self._by_root:
            opened = api.open(root, store=self._home)
            self._by_root[root] = (opened, Recorder(opened.open_root, os.path.join(self._home, FOLDER, TOLD)))
        return self._by_root[root]

    def sync(self, process: str) -> None:
        from mulligan.api import sync_left

        sync_left(self._home, process)

    def _root_of(self, event: Any, project: str) -> str:
        """The root that the session has worked in; else the nearest known root above its project; else the project."""
        before = self._root_before(event.session)
        if before is not None and os.path.isdir(before):
            return before
        inside = project and (event.cwd == project or event.cwd.startswith(project.rstrip("/") + "/"))
        start = os.path.realpath(project if inside else event.cwd)
        return nearest_root(start, self._home)

    def _root_before(self, session: str) -> str | None:
        from mulligan.api import open_store
        from mulligan.history.projection import SCHEMA
        from mulligan.history.tables import ROOTS
        from mulligan.session.tables import SESSIONS
        from mulligan.values.clock import SystemClock

        store = open_store(self._home, SCHEMA, durability="process", clock=SystemClock())
        try:
            with store.read() as tx:
                row = tx.get(SESSIONS, session)
                root = tx.get(ROOTS, row.root) if row is not None else None
            return None if root is None else os.fsdecode(root.place) or "/"
        finally:
            store.close()

    def close(self) -> None:
        for opened, _ in self._by_root.values():
            opened.close()


def nearest_root(start: str, home: str) -> str:
    from mulligan.cli.open_root import known_roots

    above = [root for root in known_roots(home) if start == root or start.startswith(root.rstrip("/") + "/")]
    return max(above, key=len, default=start)
