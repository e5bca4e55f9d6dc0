"""The rules of our own code, as tests: sizes, names, exports, imports and links.

An exception to a rule is a line in `code_rule_allowances.txt`: `rule | place | reason`. A line that is no longer needed
fails too, so the list shrinks.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mulligan
from mulligan.values.errors import FAMILY_OF
from tests.code_measures import (
    FunctionSize,
    broad_excepts_in,
    code_lines,
    codes_in,
    comment_lines,
    dead_links_in,
    exceptions_in,
    functions_in,
    is_vague,
    percentile,
    public_classes_in,
    unfinished_in,
)

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
TESTS = ROOT / "tests"
GOLDEN_EXPORTS = TESTS / "golden" / "exports.txt"

FUNCTION_MEDIAN_LINES = 8
FUNCTION_P90_LINES = 30
FUNCTION_STOP_LINES = 70
FILE_P85_LINES = 600
FILE_STOP_LINES = 900
POSITIONAL_MAX = 4
ARGUMENTS_MAX = 8
EXPORTS_MAX = 90

FILES_MAX = {
    ".": 6,
    "agents": 16,
    "boundary": 4,
    "cli": 16,
    "effects": 25,
    "exec": 12,
    "files": 32,
    "history": 36,
    "hosts": 5,
    "servers": 30,
    "session": 28,
    "store": 17,
    "testing": 7,
    "values": 13,
}
"""How many modules each package may have. A new package brings its own line; a number only goes down."""
CODE_LINES_MAX = 54_495
COMMENTS_PER_100_LINES = {"exec": 3.9, "history": 4.2}
"""Odd code in these packages says why it is as it is."""
OLD_MODULE_NAMES_TEXT = (
    "opening looping executing going_back putting_back taking_over kept kept_rows live closing deeds lifting traits "
    "leftovers families sites present asides beside_store bounds over_cap dropping dead_windows points_turns here "
    "in_force known standing slices_back withholding evidence talk board hosting judging substrate keeping census "
    "stillness quiet places writing bystanders warden beyond between following sightings errands door toolbox speech "
    "gate doors words looking returning joining "
)
OLD_MODULE_NAMES = frozenset(OLD_MODULE_NAMES_TEXT.split())
"""Names that a stranger would not guess; the code base had them once."""

HEAVY_PROTOCOLS = frozenset({"acp", "anyio", "asyncio", "httpx", "mcp", "starlette", "uvicorn"})
HEAVY_AGENTS = frozenset({"claude_agent_sdk", "litellm", "openai"})
HEAVY_DATA = frozenset({"apsw", "obstore", "orjson", "psycopg", "pydantic", "pydantic_core", "re2", "watchfiles"})
HEAVY = HEAVY_PROTOCOLS | HEAVY_AGENTS | HEAVY_DATA


def modules(folder: Path) -> list[tuple[str, str]]:
    """Name and text of every Python file below a folder of the repository."""
    return [(str(file.relative_to(ROOT)), file.read_text("utf-8")) for file in sorted(folder.rglob("*.py"))]


def functions(folder: Path) -> list[FunctionSize]:
    return [size for name, text in modules(folder) for size in functions_in(text, name)]


def file_lines(folder: Path) -> dict[str, int]:
    return {name: len(text.splitlines()) for name, text in modules(folder)}


def package_of(name: str) -> str:
    """The package of a module of ours, given its file; `.` for the modules beside the packages."""
    parts = Path(name).parts
    return parts[2] if len(parts) > 3 else "."


def allowed(rule: str) -> set[str]:
    """The places that are excused from a rule."""
    rows = [line.split(" | ") for line in (TESTS / "code_rule_allowances.txt").read_text("utf-8").splitlines()]
    return {place for named, place, reason in rows if named == rule and reason.strip()}


class TestSizes:
    def test_the_median_function_is_short(self) -> None:
        assert percentile([size.lines for size in functions(SRC)], 50) <= FUNCTION_MEDIAN_LINES

    def test_nine_functions_in_ten_fit_half_a_screen(self) -> None:
        assert percentile([size.lines for size in functions(SRC)], 90) <= FUNCTION_P90_LINES

    @pytest.mark.parametrize("folder", [SRC, TESTS], ids=["src", "tests"])
    def test_no_function_passes_the_stop(self, folder: Path) -> None:
        assert [size for size in functions(folder) if size.lines > FUNCTION_STOP_LINES] == []

    def test_most_files_are_whole_and_not_long(self) -> None:
        assert percentile(list(file_lines(SRC).values()), 85) <= FILE_P85_LINES

    @pytest.mark.parametrize("folder", [SRC, TESTS], ids=["src", "tests"])
    def test_no_file_passes_the_stop(self, folder: Path) -> None:
        assert {name: lines for name, lines in file_lines(folder).items() if lines > FILE_STOP_LINES} == {}

    def test_packages_have_few_modules(self) -> None:
        counted = Counter(package_of(name) for name, _ in modules(SRC))
        assert {name: count for name, count in counted.items() if count > FILES_MAX.get(name, 0)} == {}

    def test_the_source_does_not_grow(self) -> None:
        assert sum(code_lines(text) for _, text in modules(SRC)) <= CODE_LINES_MAX

    def test_packages_with_odd_code_say_why(self) -> None:
        for package, least in COMMENTS_PER_100_LINES.items():
            texts = [text for name, text in modules(SRC) if package_of(name) == package]
            density = 100 * sum(map(comment_lines, texts)) / sum(map(code_lines, texts))
            assert density >= least, package

    def test_arguments_are_few_and_named(self) -> None:
        wide = {s.where for s in functions(SRC) if s.positional > POSITIONAL_MAX or s.arguments > ARGUMENTS_MAX}
        assert wide == allowed("arguments")


class TestNames:
    @pytest.mark.req("D3.no_vague_modules")
    def test_no_module_has_a_vague_name(self) -> None:
        parts = {part for name, _ in modules(SRC) for part in Path(name).with_suffix("").parts}
        assert [part for part in sorted(parts) if is_vague(part)] == []

    @pytest.mark.req("W32.one_class_per_error_name")
    def test_no_two_classes_of_exceptions_share_a_name(self) -> None:
        places = exceptions_in(modules(SRC))
        assert "src/mulligan/values/errors.py:MulliganError" in places
        counted = Counter(re.split(r"[:.]", place)[-1] for place in places)
        assert [name for name, count in counted.items() if count > 1] == []

    def test_no_module_has_one_of_the_old_names_or_is_a_lone_gerund(self) -> None:
        names = {Path(name).stem for name, _ in modules(SRC)}
        gerunds = {name for name in names if re.fullmatch(r"[a-z]+ing", name)}
        assert (names & OLD_MODULE_NAMES, gerunds) == (set(), set())

    def test_no_two_public_classes_share_a_name(self) -> None:
        counted = Counter(found for _, text in modules(SRC) for found in public_classes_in(text))
        assert [name for name, count in counted.items() if count > 1] == []

    def test_nothing_in_the_source_is_left_to_do(self) -> None:
        assert [place for name, text in modules(SRC) for place in unfinished_in(text, name)] == []


def test_everything_is_caught_only_where_a_reason_is_given() -> None:
    found = {place for name, text in modules(SRC) for place in broad_excepts_in(text, name)}
    assert found == allowed("broad_except")


def test_every_allowance_names_a_known_rule_and_a_reason() -> None:
    rows = [line.split(" | ") for line in (TESTS / "code_rule_allowances.txt").read_text("utf-8").splitlines()]
    assert [row for row in rows if len(row) != 3 or row[0] not in ("broad_except", "arguments") or not row[2]] == []


class TestExports:
    def test_a_star_import_leaves_the_open_of_python(self) -> None:
        names: dict[str, object] = {}
        exec("from mulligan import *\nfound = open", names)
        assert names["found"] is open
        assert mulligan.open.__module__ == "mulligan.api"
        assert "open" in dir(mulligan) and "Plan" in names

    def test_they_are_exactly_the_golden_list(self) -> None:
        assert sorted([*mulligan.__all__, "open"]) == GOLDEN_EXPORTS.read_text("utf-8").splitlines()

    def test_they_are_few_and_sorted_without_repeats(self) -> None:
        names = GOLDEN_EXPORTS.read_text("utf-8").splitlines()
        assert len(names) <= EXPORTS_MAX
        assert names == sorted(set(names))

    def test_each_can_be_had(self) -> None:
        exported = list(getattr(mulligan, "__all__", ()))
        assert [name for name in exported if not hasattr(mulligan, name)] == []


class TestImports:
    @pytest.mark.req("D3.lazy_reexports")
    def test_import_mulligan_loads_no_subpackage(self) -> None:
        assert {name for name in _modules_after("import mulligan") if name.startswith("mulligan")} == {"mulligan"}

    @pytest.mark.req("D17.import_is_light")
    def test_import_mulligan_loads_only_itself_and_the_standard_library(self) -> None:
        foreign = _loaded_by("import mulligan") - _loaded_by("") - set(sys.stdlib_module_names) - {"mulligan"}
        assert foreign == set()

    @pytest.mark.req("D17.import_is_light", "D17.heavy_imports_local")
    @pytest.mark.parametrize("statement", ["import mulligan", "import mulligan.cli"])
    def test_heavy_packages_wait_for_the_verb_that_needs_them(self, statement: str) -> None:
        assert _loaded_by(statement) & HEAVY - _loaded_by("") == set()

    @pytest.mark.req("D17.extras_optional")
    def test_without_any_extra_the_package_works(self, tmp_path: Path) -> None:
        extras = "mcp", "acp", "openai", "litellm", "claude_agent_sdk", "psycopg", "obstore", "watchfiles"
        (tmp_path / "root").mkdir()
        done = subprocess.run([sys.executable, "-c", BARE, str(tmp_path), *extras], capture_output=True, text=True)
        assert (done.returncode, done.stdout.split()[:1], done.stderr) == (0, ["found"], "")

    @pytest.mark.req("D17.apsw")
    def test_sqlite_is_never_the_standard_librarys(self) -> None:
        assert [name for name, text in modules(SRC) if "sqlite3" in _imports(text)] == []
        loaded = _loaded_by("import mulligan.store.sqlite")
        assert ("apsw" in loaded, "sqlite3" in loaded) == (True, False)


BARE = """
import os, sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))
import mulligan
from mulligan.cli import run
root, store = sys.argv[1] + "/root", sys.argv[1] + "/home"
with mulligan.open(root, store=store) as opened:
    with opened.session("s").call() as call:
        call.write_file("a", "text")
        if call.grep("t.x").matches:
            print("found", flush=True)
assert run(["undo", "--root", root, "--store", store]) == 0
assert os.listdir(root) == []
"""


def _imports(source: str) -> set[str]:
    """Top-level names of all that a module imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    origins = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in plain | origins}


def _loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after the statement."""
    return {name.partition(".")[0] for name in _modules_after(statement)}


def _modules_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


class TestPackages:
    @pytest.mark.req(
        "D3.room_order", "D3.workspace_session_apart", "D3.agents_servers_apart", "D3.import_rule_enforced"
    )
    def test_the_import_rule_is_that_of_the_design_and_holds(self) -> None:
        contract, _ = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
        assert (contract["type"], contract["layers"], contract.get("ignore_imports")) == ("layers", PACKAGES, None)
        rooms = {name.removesuffix(".py") for name in os.listdir(SRC / "mulligan") if not name.startswith(("_", "py."))}
        assert rooms == {room for layer in PACKAGES for room in layer.split(" | ")}
        linter = Path(sys.executable).with_name("lint-imports")
        done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout

    @pytest.mark.req("D3.concrete_store_named_rarely")
    def test_only_the_edges_name_a_concrete_store(self) -> None:
        named = re.compile(r"mulligan\.store\.(memory|sqlite|postgres)\b|\b(Memory|Sqlite|Postgres)Store\b")
        naming = {Path(name).parts[2] for name, text in modules(SRC) if named.search(text)}
        assert naming <= {"store", "api.py", "cli", "servers", "testing"}

    @pytest.mark.req("D15.no_engine_switches")
    def test_no_module_asks_which_engine_it_is(self) -> None:
        engine = re.compile(r"\b(Memory|Sqlite|Postgres)Store\b")
        outside = [(name, text) for name, text in modules(SRC) if Path(name).parts[2] not in ("store", "testing")]
        assert [name for name, text in outside if engine.search(text)] == ["src/mulligan/api.py"]
        asks = re.compile(r"(isinstance|issubclass|type)\([^)]*(Memory|Sqlite|Postgres)Store\b")
        assert [name for name, text in modules(SRC) if asks.search(text)] == []

    @pytest.mark.req("D3.values_pure")
    def test_values_imports_nothing_that_touches_the_world(self) -> None:
        used = {name for _, text in modules(SRC / "mulligan" / "values") for name in _imports(text)}
        assert used - PURE == set()
        assert {name for name, text in modules(SRC / "mulligan" / "values") if re.search(r"\bopen\(", text)} == set()

    @pytest.mark.req("D3.sync_inside")
    def test_only_the_edges_are_async(self) -> None:
        edges, in_threads = ("servers", "agents"), Path("src/mulligan/effects/handle.py")
        inside = [
            (name, text) for name, text in modules(SRC) if Path(name).parts[2] not in edges and Path(name) != in_threads
        ]
        # A call may be entered with `async with`; one module awaits its effects, which run in threads.
        asked = {line.strip() for _, text in inside for line in text.splitlines() if re.match(r"\s*async def ", line)}
        assert {line.partition("(")[0] for line in asked} <= {"async def __aenter__", "async def __aexit__"}
        assert [name for name, text in inside if re.search(r"^\s*[^#\n]*\bawait ", text, re.M)] == []

    @pytest.mark.req("D3.banned_calls", "D3.world_is_argument", "S4.clock.no_direct_time")
    def test_time_ids_randomness_and_json_have_one_home(self) -> None:
        assert _banned("check", "--ignore-noqa", "src") == []
        assert len(_banned("check", "--stdin-filename", "src/mulligan/history/new.py", "-", source=WORLDLY)) == 6
        # Who is given randomness may say of what type it is.
        told = [(name, text.replace("from random import Random\n", "")) for name, text in modules(SRC)]
        assert {name for name, text in told if _imports(text) & {"random", "secrets"}} <= {
            name for name, _ in modules(SRC / "mulligan" / "testing")
        }


PACKAGES = [
    "testing",
    "cli",
    "builtins | tokens | command_client",
    "api",
    "servers | agents",
    "hosts",
    "effects",
    "history",
    "exec | session",
    "files",
]
PACKAGES += ["boundary", "store", "values"]

PURE = frozenset(
    {
        *(
            "__future__",
            "abc",
            "base64",
            "binascii",
            "collections",
            "dataclasses",
            "datetime",
            "enum",
            "errno",
            "functools",
        ),
        *("hashlib", "math", "mulligan", "operator", "orjson", "re", "sys", "time", "types", "typing"),
        *("unicodedata", "uuid"),
        # Neither does input or output: which call goes on here, and whether its block is still there.
        *("contextvars", "weakref"),
        "uuid_utils",
    }
)
"""`time` and ids have their one home here."""

WORLDLY = """
import datetime, json, random, time, uuid
x = datetime.datetime.now(), datetime.datetime.utcnow(), time.time(), uuid.uuid4(), json.dumps(1), random.random()
"""


def _banned(*arguments: str, source: str = "") -> list[str]:
    """What the linter says of calls that reach for the world."""
    ruff = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "--select", "TID251", "--output-format", "concise"]
    done = subprocess.run(ruff, cwd=ROOT, input=source, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if "TID251" in line]


@pytest.mark.req("W30.wheel_complete")
def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in SRC.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert [str(path) for path in files if str(path.relative_to(SRC)) not in held] == []


def test_links_in_the_documents_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    assert [dead for page in sorted(pages) for dead in dead_links_in(page, ROOT)] == []


class TestGauges:
    """The measures themselves, on code where the answer is known: a rule that cannot fail is no rule."""

    def test_a_function_is_measured_without_its_docstring(self) -> None:
        source = 'def f(a, b, /, c, *, d, e=1, **rest):\n    """One.\n\n    Two.\n    """\n    return a\n'
        assert list(functions_in(source, "m.py")) == [FunctionSize("m.py:f", 2, 3, 5)]

    def test_methods_and_inner_functions_are_measured_without_self(self) -> None:
        source = "class A:\n    def f(self, a):\n        def g(cls, b):\n            return 1\n        return g\n"
        assert list(functions_in(source, "m")) == [FunctionSize("m:A.f", 4, 1, 1), FunctionSize("m:A.f.g", 2, 1, 1)]

    @pytest.mark.parametrize("caught", ["", " Exception", " BaseException as e", " (OSError, Exception)"])
    def test_a_broad_except_is_found_with_its_function(self, caught: str) -> None:
        source = (
            f"class A:\n    def f(self):\n        try:\n            pass\n        except{caught}:\n            pass\n"
        )
        assert list(broad_excepts_in(source, "m.py")) == ["m.py:A.f"]

    def test_a_broad_except_of_a_module_is_found(self) -> None:
        assert list(broad_excepts_in("try:\n    pass\nexcept Exception:\n    pass\n", "m.py")) == ["m.py:"]

    def test_exceptions_are_known_by_their_bases(self) -> None:
        one = "class A(B): ...\nclass C: ...\nclass D(faults.E, Generic[T]): ...\n"
        two = "class B(OSError): ...\nclass E(A):\n    class F(ValueError): ...\n"
        assert exceptions_in([("1", one), ("2", two)]) == ["1:A", "1:D", "2:B", "2:E", "2:E.F"]

    def test_a_narrow_except_is_not_broad(self) -> None:
        assert list(broad_excepts_in("try:\n    pass\nexcept (OSError, KeyError):\n    pass\n", "m.py")) == []

    def test_code_and_comments_are_counted_apart(self) -> None:
        source = (
            '"""Doc."""\n\n# why\nx = (\n    1\n)  # type: ignore\ndef f():\n    """Two\n    lines."""\n    return x\n'
        )
        assert (code_lines(source), comment_lines(source)) == (5, 1)

    def test_public_classes_are_found(self) -> None:
        assert public_classes_in("class A:\n    class B: ...\nclass _C: ...\nclass D(A): ...\n") == ["A", "D"]

    @pytest.mark.parametrize(
        ("numbers", "percent", "expected"), [([], 50, 0), ([7], 90, 7), ([1, 2, 3, 4], 50, 2), ([*range(1, 11)], 90, 9)]
    )
    def test_percentiles(self, numbers: list[int], percent: int, expected: int) -> None:
        assert percentile(numbers, percent) == expected

    @given(st.lists(st.integers(), min_size=1), st.integers(1, 100))
    def test_a_percentile_is_the_least_number_that_covers_its_share(self, numbers: list[int], percent: int) -> None:
        found = percentile(numbers, percent)
        assert found in numbers
        assert sum(n <= found for n in numbers) * 100 >= percent * len(numbers)
        assert sum(n < found for n in numbers) * 100 < percent * len(numbers)

    @pytest.mark.parametrize("name", ["utils", "base", "core", "session_helpers", "path_utils", "manager"])
    def test_vague_names_are_vague(self, name: str) -> None:
        assert is_vague(name)

    @pytest.mark.parametrize("name", ["paths", "base64_names", "stale_base", "score", "disk"])
    def test_other_names_are_not(self, name: str) -> None:
        assert not is_vague(name)

    def test_unfinished_lines_are_found(self) -> None:
        assert list(unfinished_in("x = 1\n# TODO: y\nfixme_later = 2\nz = 'FIXME'\n", "m.py")) == ["m.py:2", "m.py:4"]

    def test_dead_links_are_found_and_living_ones_are_not(self, tmp_path: Path) -> None:
        (tmp_path / "b.md").write_text("# The `one` thing\n", "utf-8")
        page = tmp_path / "a.md"
        page.write_text(LINKS, "utf-8")
        assert list(dead_links_in(page, tmp_path)) == ["a.md: c.md", "a.md: b.md#two", "a.md: ../x.md", "a.md: d.md"]

    def test_importing_a_heavy_package_would_be_seen(self) -> None:
        assert {"pydantic", "orjson"} <= _loaded_by("import pydantic, orjson") & HEAVY - _loaded_by("")


LINKS = """# Here
[good](b.md) [dead](c.md "title") [heading](b.md#the-one-thing) [no heading](b.md#two) [self](#here) [web](https://x.y/z)
[outside](../x.md) `[code](e.md)`

```
[fenced](f.md)
```

[reference]: d.md
"""


@pytest.mark.req("D16.codes_in_one_table")
def test_every_code_that_is_written_in_the_source_is_in_the_one_table() -> None:
    written = {code for _, text in modules(SRC) for code in codes_in(text)}
    assert {"path_claimed", "ambiguous_matches", "store_newer"} <= written
    assert sorted(written - set(FAMILY_OF)) == []
