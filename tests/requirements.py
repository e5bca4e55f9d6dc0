"""Every demand on the product, in one table, and which of them a test shows to hold.

The rows are in `requirement_tables/*.txt`: a `[source]` line, then `id | issue | sentence` for each demand of that
source. A test names what it shows with `@pytest.mark.req(id, ...)`. What holds is in `requirements_met.txt`, one id a
line, sorted, so that parallel work merges line by line; it is written from the marks and never by hand.
`test_requirements.py` checks both directions.

    python -m tests.requirements [--issue N] [--open | --met]
    python -m tests.requirements --write-met
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.requirement_marks import Mark, marks_under

HERE = Path(__file__).parent
TABLES = HERE / "requirement_tables"
MET_FILE = HERE / "requirements_met.txt"

Status = Literal["met", "open"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One demand. `issue` is the number of the issue that builds it; 0 is later."""

    id: str
    source: str
    sentence: str
    status: Status
    issue: int


def parse_table(text: str, *, met: frozenset[str] = frozenset(), name: str = "table") -> Iterator[Requirement]:
    """The rows of one table. A line that is no source, row or blank is an error, and so is a row without source."""
    source = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if line.startswith("[") and line.endswith("]"):
            source = line[1:-1]
            continue
        yield _parse_row(line, source=source, met=met, where=f"{name}:{number}")


def _parse_row(line: str, *, source: str, met: frozenset[str], where: str) -> Requirement:
    cells = [cell.strip() for cell in line.split(" | ", 2)]
    if len(cells) != 3 or not all(cells) or not source:
        raise ValueError(f"{where}: expected `id | issue | sentence` under a `[source]` line")
    id_, issue, sentence = cells
    return Requirement(id_, source, sentence, "met" if id_ in met else "open", int(issue))


def met_lines() -> list[str]:
    """The lines of the met file as they stand."""
    return MET_FILE.read_text(encoding="utf-8").splitlines()


def load() -> tuple[Requirement, ...]:
    """All requirements, table by table in the order of their file names."""
    met = frozenset(met_lines())
    tables = sorted(TABLES.glob("*.txt"))
    return tuple(row for table in tables for row in parse_table(table.read_text("utf-8"), met=met, name=table.name))


REQUIREMENTS: tuple[Requirement, ...] = load()
IDS: frozenset[str] = frozenset(row.id for row in REQUIREMENTS)
UNKNOWN_MET: tuple[str, ...] = tuple(line for line in met_lines() if line not in IDS)


def summary(rows: Sequence[Requirement] = REQUIREMENTS) -> str:
    """One line for the end of a test run."""
    met = sum(row.status == "met" for row in rows)
    return f"requirements: {met} met, {len(rows) - met} open"


def shown_ids(marks: Iterable[Mark]) -> list[str]:
    """The ids of the table that marks on tests name, sorted. What is skipped or expected to fail shows nothing."""
    return sorted({id_ for mark in marks if not mark.astray for id_ in mark.ids} & IDS)


def met_text(marks: Iterable[Mark]) -> str:
    """The met file as the marks give it."""
    return "".join(f"{id_}\n" for id_ in shown_ids(marks))


def _write_met() -> int:
    marks = marks_under(HERE)
    MET_FILE.write_text(met_text(marks), encoding="utf-8")
    print(f"{MET_FILE.name}: {len(shown_ids(marks))} of {len(IDS)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was asked for. Exit code 1 when the met file names an id that does not exist."""
    parser = argparse.ArgumentParser(description="List the requirements.")
    parser.add_argument("--issue", type=int, help="only those that this issue builds (0: later)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--open", dest="status", action="store_const", const="open", help="only those still open")
    which.add_argument("--met", dest="status", action="store_const", const="met", help="only those met")
    which.add_argument("--write-met", action="store_true", help="write the met file anew from the marks on tests")
    asked = parser.parse_args(argv)
    if asked.write_met:
        return _write_met()
    rows = [row for row in REQUIREMENTS if asked.issue in (None, row.issue) and asked.status in (None, row.status)]
    for row in rows:
        print(f"{row.status:4}  {row.issue}  {row.id}  [{row.source}]  {row.sentence}")
    print(summary(rows))
    for line in UNKNOWN_MET:
        print(f"{MET_FILE.name} names an unknown id: {line!r}", file=sys.stderr)
    return 1 if UNKNOWN_MET else 0


if __name__ == "__main__":
    raise SystemExit(main())
