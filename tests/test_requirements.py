"""The requirements table and the tests agree, in both directions."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.requirement_marks import Mark, marks_in, marks_under
from tests.requirements import (
    IDS,
    REQUIREMENTS,
    UNKNOWN_MET,
    Requirement,
    main,
    met_lines,
    met_text,
    parse_table,
    summary,
)

TESTS = Path(__file__).parent

ID_FORM = re.compile(r"(S[0-4]|D([1-9]|1[0-9])|[AWCH][1-9][0-9]?|HS[1-9][0-9]?|AR)(\.[a-z0-9]+(_[a-z0-9]+)*){1,2}")
WORD = st.text("abcXYZ019._:/", min_size=1)
ISSUES = frozenset({0, 2, 3, 4, 5, 6, 7, 8, 9, *range(16, 23)})


@pytest.fixture(scope="module")
def marks() -> list[Mark]:
    return marks_under(TESTS)


@pytest.mark.req("D19.requirements_table")
class TestTable:
    def test_ids_are_unique(self) -> None:
        counted = Counter(row.id for row in REQUIREMENTS)
        assert [id_ for id_, count in counted.items() if count > 1] == []

    def test_ids_are_well_formed(self) -> None:
        assert [row.id for row in REQUIREMENTS if not ID_FORM.fullmatch(row.id)] == []

    def test_every_row_names_an_issue_that_exists(self) -> None:
        assert [row.id for row in REQUIREMENTS if row.issue not in ISSUES] == []

    def test_an_id_begins_with_its_document(self) -> None:
        documents = {"S": r"S\d", "D": r"DESIGN \d+", "H": "snapshots-and-sessions", "C": "snapshots-and-sessions"}
        documents |= {"A": "effects-and-transactions", "W": "effects-and-transactions"}
        astray = [row.id for row in REQUIREMENTS if not re.match(documents[row.id[0]], row.source)]
        assert astray == []

    def test_a_numbered_prefix_is_the_number_of_its_source(self) -> None:
        numbered = [row for row in REQUIREMENTS if re.match(r"S\d|D\d", row.id)]
        wrong = [row.id for row in numbered if _number(row.id) != _number(row.source.removeprefix("DESIGN "))]
        assert wrong == []

    def test_every_document_and_every_mistake_is_there(self) -> None:
        prefixes = {id_.split(".")[0] for id_ in IDS}
        expected = {f"S{n}" for n in range(5)} | {f"D{n}" for n in range(1, 20)} | {f"A{n}" for n in range(1, 16)}
        expected |= {f"W{n}" for n in range(1, 33)} | {f"H{n}" for n in range(1, 22)}
        expected |= {f"HS{n}" for n in range(1, 15)} | {f"C{n}" for n in range(1, 19)} | {"AR"}
        assert prefixes == expected


@pytest.mark.req("D19.requirements_table")
class TestMetFile:
    def test_it_names_only_rows_of_the_table(self) -> None:
        assert UNKNOWN_MET == ()

    def test_it_is_sorted_without_repeats(self) -> None:
        assert met_lines() == sorted(set(met_lines()))

    def test_it_is_what_the_marks_give(self, marks: list[Mark]) -> None:
        """If not: `python -m tests.requirements --write-met`."""
        assert met_lines() == met_text(marks).splitlines()

    def test_what_is_written_leaves_out_unknown_names_and_what_shows_nothing(self) -> None:
        one, other, third = sorted(IDS)[:3]
        given = [Mark((other, "D1.no_such_id"), "x"), Mark((one, other), "y"), Mark((third,), "z", "skipped")]
        assert met_text(given) == f"{one}\n{other}\n"


@pytest.mark.req("D19.requirements_table")
class TestMarks:
    def test_every_met_requirement_has_a_test(self, marks: list[Mark]) -> None:
        shown = {id_ for mark in marks if not mark.astray for id_ in mark.ids}
        assert [row.id for row in REQUIREMENTS if row.status == "met" and row.id not in shown] == []

    def test_every_id_that_a_test_names_exists(self, marks: list[Mark]) -> None:
        assert [(mark.where, id_) for mark in marks for id_ in mark.ids if id_ not in IDS] == []

    def test_every_mark_is_on_a_test(self, marks: list[Mark]) -> None:
        assert [(mark.where, mark.astray) for mark in marks if mark.astray] == []


def _number(text: str) -> str:
    found = re.search(r"\d+", text)
    return found.group() if found else ""


COUNTS = {
    "function": "@pytest.mark.req('a')\ndef test_x(): ...",
    "async function": "@pytest.mark.req('a')\nasync def test_x(): ...",
    "bare mark": "@mark.req('a')\ndef test_x(): ...",
    "method": "class TestX:\n    @pytest.mark.req('a')\n    def test_x(self): ...",
    "class": "@pytest.mark.req('a')\nclass TestX:\n    def test_x(self): ...",
    "class that inherits": "@pytest.mark.req('a')\nclass TestX(Contract): ...",
    "module": "pytestmark = pytest.mark.req('a')\ndef test_x(): ...",
    "module list": "pytestmark = [pytest.mark.slow, pytest.mark.req('a')]\ndef test_x(): ...",
    "module of a machine": "pytestmark = pytest.mark.req('a')\nTestX = Machine.TestCase",
    "class attribute": "class TestX:\n    pytestmark = pytest.mark.req('a')\n    def test_x(self): ...",
    "param": "@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.req('a'))])\ndef test_x(n): ...",
    "param list": "CASES = [pytest.param(1, marks=[pytest.mark.slow, pytest.mark.req('a')])]",
}

DOES_NOT_COUNT = {
    "helper function": "@pytest.mark.req('a')\ndef make_x(): ...",
    "empty class": "@pytest.mark.req('a')\nclass TestX: ...",
    "module without tests": "pytestmark = pytest.mark.req('a')\ndef make_x(): ...",
    "variable": "shows = pytest.mark.req('a')\n@shows\ndef test_x(): ...",
    "other call's marks": "make(1, marks=pytest.mark.req('a'))",
    "no ids": "@pytest.mark.req()\ndef test_x(): ...",
    "not called": "@pytest.mark.req\ndef test_x(): ...",
    "computed id": "@pytest.mark.req('a' + b)\ndef test_x(): ...",
    "starred ids": "@pytest.mark.req(*IDS)\ndef test_x(): ...",
    "keyword": "@pytest.mark.req('a', why='b')\ndef test_x(): ...",
    "skipped": "@pytest.mark.skip\n@pytest.mark.req('a')\ndef test_x(): ...",
    "skipped sometimes": "@pytest.mark.req('a')\n@pytest.mark.skipif(True, reason='')\ndef test_x(): ...",
    "expected to fail": "@pytest.mark.req('a')\n@pytest.mark.xfail\ndef test_x(): ...",
    "in a skipped class": "@pytest.mark.skip\nclass TestX:\n    @pytest.mark.req('a')\n    def test_x(self): ...",
    "skipped module": "pytestmark = [pytest.mark.skip, pytest.mark.req('a')]\ndef test_x(): ...",
    "skipped param": "[pytest.param(1, marks=[pytest.mark.xfail, pytest.mark.req('a')])]",
}


@pytest.mark.req("D19.requirements_table")
class TestReadingMarks:
    @pytest.mark.parametrize("source", COUNTS.values(), ids=COUNTS.keys())
    def test_a_mark_that_pytest_attaches_counts(self, source: str) -> None:
        assert [(mark.ids, mark.astray) for mark in marks_in(source)] == [(("a",), "")]

    @pytest.mark.parametrize("source", DOES_NOT_COUNT.values(), ids=DOES_NOT_COUNT.keys())
    def test_a_mark_that_shows_nothing_does_not_count(self, source: str) -> None:
        assert [bool(mark.astray) for mark in marks_in(source)] == [True]

    def test_all_ids_of_all_marks_are_found_with_their_place(self) -> None:
        source = dedent("""\
            @pytest.mark.req("a", "b")
            def test_x(): ...

            @pytest.mark.req("c")
            def test_y(): ...
        """)
        assert list(marks_in(source, "f.py")) == [Mark(("a", "b"), "f.py:1"), Mark(("c",), "f.py:4")]

    def test_files_below_folders_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "test_x.py").write_text("@pytest.mark.req('a')\ndef test_x(): ...", "utf-8")
        assert marks_under(tmp_path) == [Mark(("a",), "deep/test_x.py:1")]


@pytest.mark.req("D19.requirements_table")
class TestReadingTables:
    def test_a_row_takes_the_source_above_it_and_its_status_from_the_met_ids(self) -> None:
        table = "[S1 x]\nS1.a.b | 3 | does | things\n\n[S1 y]\nS1.a.c | 0 | more\n"
        assert list(parse_table(table, met=frozenset({"S1.a.c"}))) == [
            Requirement("S1.a.b", "S1 x", "does | things", "open", 3),
            Requirement("S1.a.c", "S1 y", "more", "met", 0),
        ]

    @pytest.mark.parametrize(
        "table", ["S1.a | 3 | no source", "[S1]\nS1.a | 3", "[S1]\nS1.a | | x", "[S1]\nS1.a | x | y"]
    )
    def test_a_malformed_row_is_refused(self, table: str) -> None:
        with pytest.raises(ValueError):
            list(parse_table(table))

    @given(st.lists(st.tuples(WORD, st.integers(0, 9), WORD, WORD)))
    def test_what_is_written_as_a_table_is_read_back(self, rows: list[tuple[str, int, str, str]]) -> None:
        table = "\n\n".join(f"[{source}]\n{id_} | {issue} | {text}" for id_, issue, source, text in rows)
        expected = [Requirement(id_, source, text, "open", issue) for id_, issue, source, text in rows]
        assert list(parse_table(table)) == expected

    def test_the_summary_counts_both(self) -> None:
        rows = [Requirement("a", "", "", status, 0) for status in ("met", "open", "open")]
        assert summary(rows) == "requirements: 1 met, 2 open"


@pytest.mark.req("D19.requirements_table")
class TestListing:
    @pytest.mark.parametrize("status", ["open", "met"])
    def test_it_lists_what_is_left_of_an_issue(self, status: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--issue", "3", f"--{status}"]) == 0
        *listed, last = capsys.readouterr().out.splitlines()
        wanted = [row for row in REQUIREMENTS if row.issue == 3 and row.status == status]
        assert [line.split()[2] for line in listed] == [row.id for row in wanted]
        assert last == summary(wanted)

    def test_it_runs_as_a_script(self) -> None:
        script = [sys.executable, "-m", "tests.requirements", "--issue", "9"]
        done = subprocess.run(script, cwd=TESTS.parent, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == summary([row for row in REQUIREMENTS if row.issue == 9])
