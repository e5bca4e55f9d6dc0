"""How a fault reaches a person: one line that says what to do, and an exit code that a script can trust."""

from __future__ import annotations

import os
import sys

import click

from mulligan.cli.output import print_json, visible
from mulligan.values.faults import INTEGRITY_CODES, Family, MulliganError

PARTLY, BAD_USAGE, INTEGRITY, INTERRUPTED = 1, 2, 3, 130


def exit_code_of_fault(error: MulliganError) -> int:
    if error.code in INTEGRITY_CODES:
        return INTEGRITY
    return PARTLY if error.family is Family.WORLD_CHANGED else BAD_USAGE


def exit_code_of(error: Exception, *, as_json: bool) -> int:
    """Tell the person and give the code."""
    if isinstance(error, MulliganError):
        _tell(error.message, code=error.code, as_json=as_json)
        return exit_code_of_fault(error)
    if isinstance(error, BrokenPipeError):
        # The reader has gone; keep the interpreter from complaining about it while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PARTLY
    if isinstance(error, click.ClickException):
        hint = f" Try '{error.ctx.command_path} --help'." if isinstance(error, click.UsageError) and error.ctx else ""
        _tell(error.format_message() + hint, code="bad_usage", as_json=as_json)
        return BAD_USAGE
    _tell("Interrupted.", code="cancelled", as_json=as_json)
    return INTERRUPTED


def _tell(message: str, *, code: str, as_json: bool) -> None:
    if as_json:
        print_json({"error": {"code": code, "message": message}})
    click.echo(f"mulligan: {visible(' '.join(message.split()))}", err=True)
