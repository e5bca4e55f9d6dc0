"""`mulligan serve`: the HTTP server and the web timeline."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import click

from mulligan.cli.options import STORE_HELP, store_url
from mulligan.values import VERSION
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import fault

if TYPE_CHECKING:
    from mulligan.cli.command_server import CommandServer
    from mulligan.servers.http.access import Access
    from mulligan.servers.http.roots import ServedRoots
    from mulligan.servers.http.server import Opened
    from mulligan.servers.own_host import Asgi

_KEEPER_WAIT_S = 5.0
_OPEN_FILES = 4_096
"""For a thousand event streams, as many other connections, and the store. Many shells allow only 1 024."""


class Wish(NamedTuple):
    """What was asked for on the command line."""

    host: str
    port: int
    roots: tuple[str, ...]
    store: str | None
    key_file: str | None


@click.command("serve")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65_535),
    default=8730,
    show_default=True,
    help="The port; 0 chooses a free one.",
)
@click.option(
    "--root",
    "roots",
    metavar="DIR",
    multiple=True,
    type=click.Path(file_okay=False),
    help="Serve only this root; may be given again. Default: every root of the store that this host can reach.",
)
@click.option("--store", metavar="URL", callback=store_url, help=f"The store: {STORE_HELP}.")
@click.option("--session", metavar="ID", help="Not used: the page shows all sessions.")
@click.option("--json", "as_json", is_flag=True, help="Errors as JSON.")
@click.option(
    "--api-key-file",
    "--token-file",
    "key_file",
    metavar="FILE",
    help="Accept these static keys, one a line. A missing file is created with one random key.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
def serve_verb(
    *,
    host: str,
    port: int,
    roots: tuple[str, ...],
    store: str | None,
    key_file: str | None,
    opens: bool,
    session: str | None,
    as_json: bool,
) -> int:
    """Serve the web timeline, the JSON API and MCP over HTTP.

    The printed address carries a code that works once, within five minutes. Other clients send a token made by
    `mulligan token create`, or a key of --api-key-file, as Authorization: Bearer.
    """
    try:
        from mulligan.servers.http.server import Server, bind, url_of
    except ModuleNotFoundError as error:
        from mulligan.servers.auth import needs_serve

        raise needs_serve("serve", error) from error
    if store is not None:
        from mulligan.api import has_store

        if not has_store(store):
            raise fault("store_unreadable", f"There is no store in {store}; leave --store out to use your own.")
    for root in roots:
        if not os.path.isdir(root):
            raise fault("unknown_root", f"{root} is no folder; --root names one to serve.")
    commands = _fork_command_server()
    if isinstance(commands, int):
        return commands  # this process is a fork that has run a verb of the command line
    _allow_open_files(_OPEN_FILES)
    listener = bind(host, port)
    port = listener.getsockname()[1]

    def tell(opened: Opened) -> None:
        url = url_of(host, listener, opened.new_code())
        click.echo(f"Mulligan is at {url}")
        sys.stdout.flush()
        if opens:
            click.launch(url)

    with listener:
        wish = Wish(host, port, tuple(map(os.path.abspath, roots)), store, key_file)
        Server(lambda: _open(wish, commands), host, tell).run(listener)
    return 0


def _allow_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))


def _fork_command_server() -> CommandServer | int | None:
    """Now, while this process has one thread. It begins to serve when the server has become the background process.

    None: the user wants each verb to run in a process of its own.
    """
    from mulligan.cli import command_server, run

    return None if os.environ.get("MULLIGAN_BACKGROUND") == "off" else command_server.start(run)


def _open(wish: Wish, commands: CommandServer | None) -> Opened:
    """The composition: store, roots, access, events, MCP, and the background process of the hooks."""
    from mulligan import api
    from mulligan.cli.servers import read_key_file
    from mulligan.history.rewind import archive_of
    from mulligan.servers.auth import StaticKeys
    from mulligan.servers.http.access import Access
    from mulligan.servers.http.app import TimelineApp
    from mulligan.servers.http.colours import Colours
    from mulligan.servers.http.events import EventReader
    from mulligan.servers.http.roots import ServedRoots
    from mulligan.servers.http.server import Opened
    from mulligan.servers.http.service import Service
    from mulligan.session.tokens import Tokens

    keys = StaticKeys() if wish.key_file is None else read_key_file(wish.key_file, "--api-key-file")
    with ExitStack() as closing:
        ledger = api.open_ledger(wish.store)
        closing.callback(ledger.store.close)
        closing.callback(ledger.tell_growth)
        tokens = Tokens(ledger.store, ledger.journal, clock=ledger.clock)
        access = Access(keys, tokens, ledger.clock, f"mulligan_{wish.port}")
        _check_address(wish.host, access)
        roots = ServedRoots(ledger, wish.roots)
        closing.callback(roots.close)
        if ledger.any_open() and (rows := roots.rows()):
            api.recover_from(roots.get(rows[0].id))
        colours = Colours()
        closing.callback(colours.close)
        store = ledger.store.directory
        service = Service(
            ledger,
            roots,
            colours,
            EventReader(archive_of(ledger)),
            VERSION,
            try_demo=lambda: _record_demo(store),
        )
        if store is not None:
            closing.callback(_be_background_process(store, _Commands(commands)))
        app = TimelineApp(service, access, lambda: _mcp(access, roots, wish.host, closing))
        return Opened(app, access.new_code, closing.pop_all().close)


def _check_address(host: str, access: Access) -> None:
    from mulligan.servers.http.access import has_lasting_token
    from mulligan.servers.own_host import LOOPBACK

    if host not in LOOPBACK and not access.keys and not has_lasting_token(access.tokens):
        words = f"{host} can be reached from other machines: give --api-key-file, or make a token first with"
        raise fault("bad_usage", f"{words} `mulligan token create`.")


def _mcp(access: Access, roots: ServedRoots, host: str, closing: ExitStack) -> Asgi:
    """MCP for the first root: the one asked for, else the nearest above the current folder, else any."""
    from mulligan.boundary.verdict import Boundary
    from mulligan.servers.mcp.dispatch import Toolbox
    from mulligan.servers.mcp.http import AcceptedClients, make_app
    from mulligan.servers.mcp.protocol import TOOLSETS

    rows = roots.rows()
    if not rows:
        raise fault("unknown_root", "There is no root yet that MCP could work in.")
    here = os.fsencode(os.getcwd()) + b"/"
    above = [row for row in rows if here.startswith(row.place + b"/")]
    chosen = roots.get(max(above or rows[:1], key=lambda row: len(row.place)).id)
    toolbox = Toolbox(chosen, Boundary(os.fsdecode(chosen.disk.root.path)), None)
    closing.callback(toolbox.close)
    return make_app(toolbox, TOOLSETS, clients=AcceptedClients(access.keys, access.tokens), host=host)


class _Commands:
    """The command server, as the background process asks about it.

    The server stays the background process until somebody ends it, also without verbs to run. The command server ends
    before that if another version of Mulligan is installed; then each verb runs in a process of its own.
    """

    has_ended = False

    def __init__(self, server: CommandServer | None) -> None:
        self._server = server

    @property
    def used_at_s(self) -> float:
        return monotonic_s()

    def begin(self, folder: str) -> None:
        if self._server is not None:
            self._server.begin(folder)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def _be_background_process(store: str, commands: _Commands) -> Callable[[], None]:
    """Take the sockets of hooks and command line over, so that both share one process with the page.

    Call what it returns to end.
    """
    from mulligan.agents.hooks.background import BackgroundProcess, take_lock
    from mulligan.agents.hooks.recorder import Dispatcher
    from mulligan.agents.hooks.socket import ask_background, background_folder
    from mulligan.cli.hooks import RecordedRoots

    folder = background_folder(store)
    ask_background(folder, b"stop")
    until = monotonic_s() + _KEEPER_WAIT_S
    lock, waiting = take_lock(folder, wait=False), threading.Event()
    while lock is None and monotonic_s() < until:
        waiting.wait(0.05)
        lock = take_lock(folder, wait=False)
    if lock is None:
        # It is busy with a command and goes on; hooks and verbs reach it as before.
        commands.close()
        return lambda: None
    held = lock
    commands.begin(folder)
    recorders = RecordedRoots(store)
    keeper = BackgroundProcess(Dispatcher(folder, recorders.recorder_for), recorders.sync, commands)
    thread = threading.Thread(target=keeper.serve, name="mulligan-hooks", daemon=True)
    thread.start()

    def end() -> None:
        keeper.stop()
        thread.join()
        recorders.close()
        os.close(held)

    return end


_CART = """\
PRICES = {"apple": 3, "pear": 4}


def total(items):
    return sum(PRICES[item] for item in items)


def receipt(items):
    return f"{len(items)} items, {total(items)} coins"
"""


def _record_demo(store: str | None) -> str:
    """A small project with a history: an agent's prompts and calls, a failed call, and an edit of a person."""
    from mulligan import api

    folder = tempfile.mkdtemp(prefix="mulligan-demo-")
    cart = os.path.join(folder, "cart.py")
    with open(cart, "w", encoding="utf-8") as file:
        file.write(_CART)
    with api.open(folder, store=store) as opened:
        session = opened.session()
        with session.turn("Add plums to the shop, and a discount of ten per cent"):
            with session.call("edit_file") as call:
                call.edit_file("cart.py", '"pear": 4}', '"pear": 4, "plum": 2}')
            with session.call("edit_file") as call:
                call.edit_file("cart.py", "return sum(PRICES", "return 0.9 * sum(PRICES")
                call.write_file("NOTES.md", "Everything is ten per cent off.\n")
        with open(cart, encoding="utf-8") as file:
            text = file.read()
        with open(cart, "w", encoding="utf-8") as file:
            file.write(text.replace("coins", "euros"))
        with session.turn("Tidy up the folder"):
            with session.call("shell", tool="shell") as call:
                call.exec(["sh", "-c", "rm -f NOTES.md && echo tidy"])
            try:
                with session.call("refactor") as call:
                    call.delete("cart.py")
                    raise RuntimeError("the tool crashed")
            except RuntimeError:
                pass  # Mulligan has put cart.py back; the page shows a call that failed.
        return opened.open_root.root.id
