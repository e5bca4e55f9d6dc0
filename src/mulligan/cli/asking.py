"""Asking a person before something is done that he may not want."""

from __future__ import annotations

import sys

import click

from mulligan.cli.errors import PARTLY
from mulligan.cli.options import Common


def can_ask(common: Common) -> bool:
    """Whether somebody sees the question and can answer it. A script that wants JSON is not asked."""
    return not common.as_json and sys.stdin.isatty() and sys.stdout.isatty()


def ask(question: str, *, default: bool = False) -> None:
    """Go on only if the answer is yes; else nothing is done."""
    if not click.confirm(question, default=default):
        raise click.exceptions.Exit(PARTLY)


def make_sure(common: Common, question: str, *, yes: bool, otherwise: str) -> None:
    """Go on only if that is meant. Where there is nobody to ask, not to have said so is bad usage."""
    if yes:
        return
    if not can_ask(common):
        raise click.UsageError(otherwise)
    ask(question)
