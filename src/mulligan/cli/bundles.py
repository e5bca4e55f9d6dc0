"""Bundles: export a session, import one, or seed one from another agent's file."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from mulligan.cli.doors import look, work
from mulligan.cli.options import Common, common_options, options_saying
from mulligan.cli.output import counted, print_json, size_words, visible
from mulligan.values.faults import fault, fault_of_os_error

if TYPE_CHECKING:
    from mulligan.session.bundle import Document

_PRIVATE = 0o600


@click.command("export")
@click.argument("wanted", metavar="SESSION", required=False)
@click.option(
    "--mode", type=click.Choice(["sanitized", "local", "replay_only"]), default="sanitized", show_default=True
)
@click.option("-o", "--output", metavar="FILE", help="Where to write it. Default: standard output.")
@click.option("--with-content", is_flag=True, help="With the bodies of files (only with --mode local).")
@common_options
def export_verb(common: Common, *, wanted: str | None, mode: str, output: str | None, with_content: bool) -> None:
    """Write a session as one portable JSON document.

    sanitized: secrets, private paths and names are taken out; fit for sharing. local: everything, for your own
    machines. replay_only: what happened, without anything that was said. Refused if a secret would remain.
    """
    from mulligan.values.canonical import encode

    session = wanted or common.session
    if session is None:
        raise click.UsageError("Which session? `mulligan sessions` lists them.")
    with look(common) as opened:
        bundle = opened.sessions.export(session, mode, content=True if with_content else None)
    data = encode(bundle) + b"\n"
    if output is None or output == "-":
        sys.stdout.buffer.write(data)
        return
    _write(output, data)
    _tell(common, bundle, output, len(data))


def _write(path: str, data: bytes) -> None:
    """Readable by its owner only. An existing file is replaced whole, or left alone."""
    draft = f"{path}.{os.getpid()}.part"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(draft, path)
        finally:
            # Once it has replaced the file, there is no draft any more.
            with suppress(FileNotFoundError):
                os.unlink(draft)
    except OSError as error:
        raise fault_of_os_error(error, f"Writing {path}") from None


def _tell(common: Common, bundle: Document, path: str, size: int) -> None:
    facts = {
        "bundle_id": bundle["bundle_id"],
        "mode": bundle["redaction"]["mode"],
        "messages": len(bundle["transcript"]["sections"][0]["messages"]),
        "entries": len(bundle["redaction"]["entries"]),
    }
    if common.as_json:
        print_json({**facts, "path": path, "bytes": size})
        return
    words = f"{counted(facts['messages'], 'message')}, {counted(facts['entries'], 'redaction')}, {size_words(size)}"
    click.echo(f"{visible(path)}: {facts['mode']}, {words}")


@click.command("import")
@click.argument("file", metavar="FILE")
@click.option("--as", "name", metavar="ID", help="The new session's id. Default: the one it had.")
@click.option(
    "--from", "agent", type=click.Choice(["claude", "codex", "gemini"]), help="FILE is a session of that agent."
)
@click.option("--last", type=click.IntRange(min=0), metavar="N", help="With --from: only the last N messages.")
@click.option("--drop-tool-calls", is_flag=True, help="With --from: only what was said.")
@options_saying("Not used: --as names the new session.")
def import_verb(
    common: Common, *, file: str, name: str | None, agent: str | None, last: int | None, drop_tool_calls: bool
) -> int:
    """Make a session from a bundle, or with --from out of another agent's session file."""
    if agent is None and (last is not None or drop_tool_calls):
        raise click.UsageError("--last and --drop-tool-calls need --from.")
    if agent is not None:
        options = {"rename_session": name, "source_agent": agent, "truncate_to_last": last}
        return _seed(common, file, {**options, "drop_tool_calls": drop_tool_calls})
    data = _read(file)
    with work(common) as opened:
        session = opened.sessions.import_bundle(data, name=name)
        count = opened.sessions.get(session, "import").length()
    if common.as_json:
        print_json({"ok": True, "session_id": session, "messages_loaded": count})
    else:
        click.echo(f"{visible(session)}: {counted(count, 'message')}")
    return 0


def _seed(common: Common, file: str, options: dict[str, object]) -> int:
    with work(common) as opened:
        done = opened.sessions.seed_from_jsonl(file, options)
    if common.as_json:
        print_json(done)
    elif done["ok"]:
        click.echo(f"{visible(done['session_id'])}: {counted(done['messages_loaded'], 'message')}")
    else:
        click.echo(f"mulligan: {visible(done['error'])}", err=True)
    return 0 if done["ok"] else 2


def _read(file: str) -> bytes:
    """At most one byte more than a bundle may have, so that a larger file is refused without reading it whole."""
    from mulligan.session.bundle import BUNDLE_MAX_BYTES, check_bundle_size

    if file == "-":
        return sys.stdin.buffer.read(BUNDLE_MAX_BYTES + 1)
    try:
        with open(file, "rb") as bundle:
            check_bundle_size(os.fstat(bundle.fileno()).st_size)
            return bundle.read(BUNDLE_MAX_BYTES + 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            raise fault("bad_usage", f"{file} is not a file that can be read.") from None
        raise fault_of_os_error(error, f"Reading {file}") from None
