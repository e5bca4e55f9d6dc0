"""`mulligan demo`: a scripted agent on a throw-away repository, and every way back at work. Offline, in seconds."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mulligan.cli.output import paint
from mulligan.cli.words import outcome_lines

if TYPE_CHECKING:
    from mulligan.effects.session import Session
    from mulligan.history.going_back import WayBack
    from mulligan.opening import Mulligan

_CART = """\
PRICES = {"apple": 3, "pear": 4}


def total(items):
    return sum(PRICES[item] for item in items)


def receipt(items):
    return f"{len(items)} items, {total(items)} coins"
"""


@click.command("demo")
@click.option("--keep", metavar="DIR", help="Play in this folder, which must not exist, and leave it there.")
def demo_verb(keep: str | None) -> None:
    """Watch an agent work, fail, be undone, merged, redone and forked, in a throw-away folder."""
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
        raise click.UsageError(f"{folder} cannot be made: {error.strerror}.") from None


def _play(folder: Path) -> None:
    import mulligan.opening as opening

    shop, store = folder / "shop", folder / "store"
    shop.mkdir()
    (shop / "cart.py").write_text(_CART)
    (shop / ".env").write_text("TOKEN=do-not-lose-me\n")
    with opening.open(str(shop), store=str(store)) as opened:
        session = opened.session("demo")
        _say("A small shop: cart.py, and a .env that no version control knows about.")
        _first_turn(session)
        _failing_call(session, shop)
        _person(shop)
        _undo_and_redo(session, shop)
        _shell(session, shop)
        _fork(opened, session, folder)
        _show(opened)


def _say(text: str) -> None:
    click.echo("\n" + paint("▸ " + text, "cyan"))


def _tell(way: WayBack, came: str = "restored") -> None:
    for line in outcome_lines(way, came=came):
        click.echo(f"    {line}")


def _first_turn(session: Session) -> None:
    _say('The agent is asked: "add a discount". It makes two calls.')
    with session.turn("add a discount"):
        with session.call("prices") as call:
            call.edit_file("cart.py", '{"apple": 3, "pear": 4}', '{"apple": 3, "pear": 4, "plum": 2}')
        with session.call("discount") as call:
            call.edit_file("cart.py", "return sum(PRICES", "return 0.9 * sum(PRICES")
            call.write_file("NOTES.md", "Everything is ten per cent off.\n")
    click.echo("    edited cart.py twice, wrote NOTES.md")


def _failing_call(session: Session, shop: Path) -> None:
    _say("Then a tool of the agent goes wrong half-way: it has deleted cart.py and crashes.")
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


def _undo_and_redo(session: Session, shop: Path) -> None:
    _say("You do not like the discount. `mulligan undo` takes back that one call, and keeps your edit:")
    _tell(session.undo("discount"))
    _quote(shop)
    _say("On second thoughts: `mulligan redo`.")
    _tell(session.redo())
    _quote(shop)


def _quote(shop: Path) -> None:
    for line in (shop / "cart.py").read_text().splitlines():
        if "return" in line:
            click.echo(paint(f"      {line}", "dim"))


def _shell(session: Session, shop: Path) -> None:
    _say("The agent runs a shell command that was not thought through: rm -rf, and .env is gone too.")
    with session.call("clean up") as call:
        receipt = call.exec(["sh", "-c", "rm -rf .env NOTES.md; echo cleaned"])
    click.echo(f"    exit code {receipt.exit_code}, caught by {receipt.strategy}: {len(receipt.changes)} paths changed")
    _say("`mulligan undo` brings back what the command did, the ignored file included:")
    _tell(session.undo())
    click.echo(paint(f"      .env: {(shop / '.env').read_text().strip()}", "dim"))


def _fork(opened: Mulligan, session: Session, folder: Path) -> None:
    import mulligan.opening as opening
    from mulligan.history.branches import fork_files, merge_branch

    _say("Two ideas are tried side by side: a fork gets a copy of every file.")
    made = fork_files(opened.desk, session.id, str(folder / "idea"), child="idea")
    with (
        opening.open(str(folder / "idea"), store=str(folder / "store")) as copy,
        copy.session("idea").call("tax") as call,
    ):
        call.edit_file("cart.py", "return 0.9 * sum(", "return 0.9 * 1.2 * sum(")
    click.echo("    in the fork, tax was added; here nothing has changed yet")
    _say("The fork wins: `mulligan merge idea`.")
    _tell(merge_branch(opened.desk, made.session), came="brought in")


def _show(opened: Mulligan) -> None:
    from mulligan.cli.looking import log_line, print_diff
    from mulligan.history.log import calls_of, can_be_undone
    from mulligan.history.views import diff_view, log_view

    _say("The whole story, newest first (`mulligan log`):")
    for row in log_view(opened.desk):
        click.echo("  " + log_line(row))
    _say("And the newest change (`mulligan diff`):")
    with opened.desk.ledger.store.read() as tx:
        newest = next(row for row in calls_of(tx, opened.desk, None) if can_be_undone(row))
    print_diff(diff_view(opened.desk, newest))
