"""`mulligan demo`: a scripted agent works in a temporary folder, and Mulligan undoes it. Offline, in seconds."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mulligan.cli.format import paint
from mulligan.history.outcome_text import outcome_lines

if TYPE_CHECKING:
    from mulligan.api import Mulligan
    from mulligan.effects.session import DurableSession
    from mulligan.history.undo import UndoResult

_CART = """\
PRICES = {"apple": 3, "pear": 4}


def total(items):
    return sum(PRICES[item] for item in items)


def receipt(items):
    return f"{len(items)} items, {total(items)} coins"
"""


@click.command("demo")
@click.option("--keep", metavar="DIR", help="Run in this new folder and keep it.")
def demo_verb(keep: str | None) -> None:
    """Watch Mulligan undo, merge, redo and fork a scripted agent's work, in a temporary folder."""
    if keep is not None:
        _make(keep)
        _play(Path(keep))
        click.echo(f"\nThe files and the store are in {keep}.")
        return
    with tempfile.TemporaryDirectory(prefix="mulligan-demo-") as folder:
        _play(Path(folder))


def _make(folder: str) -> None:
    try:
        os.makedirs(folder)
    except OSError as error:
        raise click.UsageError(f"Cannot create {folder}: {error.strerror}.") from None


def _play(folder: Path) -> None:
    import mulligan.api as api

    shop, store = folder / "shop", folder / "store"
    shop.mkdir()
    (shop / "cart.py").write_text(_CART)
    (shop / ".env").write_text("TOKEN=do-not-lose-me\n")
    with api.open(str(shop), store=str(store)) as opened:
        session = opened.session("demo")
        _say("A small shop: cart.py, and a .env that is not under version control.")
        _first_turn(session)
        _failing_call(session, shop)
        _person(shop)
        _undo_and_redo(session, shop)
        _shell(session, shop)
        _fork(opened, session, folder)
        _show(opened)


def _say(text: str) -> None:
    click.echo("\n" + paint("▸ " + text, "cyan"))


def _tell(way: UndoResult, came: str = "restored") -> None:
    for line in outcome_lines(way, came=came):
        click.echo(f"    {line}")


def _first_turn(session: DurableSession) -> None:
    _say('You ask the agent to "add a discount". It makes two calls.')
    with session.turn("add a discount"):
        with session.call("prices") as call:
            call.edit_file("cart.py", '{"apple": 3, "pear": 4}', '{"apple": 3, "pear": 4, "plum": 2}')
        with session.call("discount") as call:
            call.edit_file("cart.py", "return sum(PRICES", "return 0.9 * sum(PRICES")
            call.write_file("NOTES.md", "Everything is ten per cent off.\n")
    click.echo("    edited cart.py twice, wrote NOTES.md")


def _failing_call(session: DurableSession, shop: Path) -> None:
    _say("Then one of its tools deletes cart.py and crashes.")
    before = (shop / "cart.py").read_text()
    try:
        with session.call("refactor") as call:
            call.delete("cart.py")
            call.write_file("cart/__init__.py", "oops", create_parents=True)
            raise RuntimeError("the tool crashed")
    except RuntimeError:
        pass
    same = (shop / "cart.py").read_text() == before and not (shop / "cart").exists()
    click.echo(f"    the call left no trace: {'cart.py is as it was' if same else 'SOMETHING IS WRONG'}")


def _person(shop: Path) -> None:
    _say("Meanwhile you edit cart.py yourself, in your editor: coins become euros.")
    cart = shop / "cart.py"
    cart.write_text(cart.read_text().replace("coins", "euros"))


def _undo_and_redo(session: DurableSession, shop: Path) -> None:
    _say("You do not like the discount. `mulligan undo` undoes that one call and keeps your edit:")
    _tell(session.undo("discount"))
    _quote(shop)
    _say("You change your mind: `mulligan redo`.")
    _tell(session.redo())
    _quote(shop)


def _quote(shop: Path) -> None:
    for line in (shop / "cart.py").read_text().splitlines():
        if "return" in line:
            click.echo(paint(f"      {line}", "dim"))


def _shell(session: DurableSession, shop: Path) -> None:
    _say("The agent runs a careless shell command: rm -rf deletes NOTES.md, and .env too.")
    with session.call("clean up") as call:
        receipt = call.exec(["sh", "-c", "rm -rf .env NOTES.md; echo cleaned"])
    click.echo(f"    exit code {receipt.exit_code}; {receipt.strategy} captured {len(receipt.changes)} changed paths")
    _say("`mulligan undo` restores both files:")
    _tell(session.undo())
    click.echo(paint(f"      .env: {(shop / '.env').read_text().strip()}", "dim"))


def _fork(opened: Mulligan, session: DurableSession, folder: Path) -> None:
    import mulligan.api as api
    from mulligan.history.branches import fork_files, merge_branch

    _say("The agent tries another idea in a fork, on a copy of every file.")
    made = fork_files(opened.open_root, session.id, str(folder / "idea"), child="idea")
    with (
        api.open(str(folder / "idea"), store=str(folder / "store")) as copy,
        copy.session("idea").call("tax") as call,
    ):
        call.edit_file("cart.py", "return 0.9 * sum(", "return 0.9 * 1.2 * sum(")
    click.echo("    the fork's cart.py adds tax; your cart.py has not changed")
    _say("You like the fork: `mulligan merge idea`.")
    _tell(merge_branch(opened.open_root, made.session), came="brought in")


def _show(opened: Mulligan) -> None:
    from mulligan.cli.inspect import diff_lines, log_lines
    from mulligan.history.log import calls_of, can_be_undone, diff_view, log_view

    _say("All calls, newest first (`mulligan log`):")
    for line in log_lines(log_view(opened.open_root)):
        click.echo(f"  {line}")
    _say("And the newest change (`mulligan diff`):")
    with opened.open_root.ledger.store.read() as tx:
        newest = next(row for row in calls_of(tx, opened.open_root, None) if can_be_undone(row))
    for line in diff_lines(diff_view(opened.open_root, newest)):
        click.echo(line)
