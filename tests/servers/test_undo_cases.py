"""One table of undo cases, carried out through Python, the command line, HTTP, MCP and ACP: the outcomes are equal.

Each case has a project of its own with two prompts of an agent and an edit of a person between them. The table says
what the answer is and what the files hold afterwards; every interface that has the verb must do just that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.cli import run as run_cli
from mulligan.values.errors import MulliganError
from tests.servers.acp.client import Client, connected
from tests.servers.mcp.server_process import on_stdio
from tests.web.serving import Served, serving

Outcome = tuple[str, str, str | None]
"""A path, what became of it, and the reason."""


@dataclass(frozen=True)
class Told:
    """What an interface answered."""

    outcomes: tuple[Outcome, ...] = ()
    overwrote: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Case:
    """`call` is "first", "second", an unknown id, or None. `prepare` is what the session undid before."""

    name: str
    verb: str
    files: dict[str, str]
    outcomes: tuple[Outcome, ...] = ()
    overwrote: tuple[str, ...] = ()
    error: str | None = None
    call: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    person_writes: str | None = None
    prepare: str | None = None

    @property
    def told(self) -> Told:
        return Told(tuple(sorted(self.outcomes, key=str)), self.overwrote, self.error)


@dataclass(frozen=True)
class Project:
    """Where a case takes place. `calls` has the ids of its calls."""

    root: Path
    home: Path
    session: str
    calls: dict[str, str]

    def id_of(self, case: Case) -> str | None:
        return None if case.call is None else self.calls.get(case.call, case.call)

    def files(self) -> dict[str, str]:
        return {file.name: file.read_text() for file in self.root.iterdir()}


def notes(**replaced: str) -> str:
    lines = {number: f"line {number}" for number in range(1, 41)}
    lines |= {int(name[1:]): text for name, text in replaced.items()}
    return "".join(f"{line}\n" for line in lines.values())


BY_HAND = {"_15": "line 15, by hand"}
FIRST = {"_3": "line three", "_30": "line thirty"}
SECOND = {"_20": "line twenty"}
MINE = notes(**FIRST, **BY_HAND, **SECOND).replace("line three", "line of mine")
NOW = {"notes.txt": notes(**FIRST, **BY_HAND, **SECOND), "added.txt": "added\n"}
NO_SECOND = {"notes.txt": notes(**FIRST, **BY_HAND), "added.txt": "added\n", "gone.txt": "gone\n"}
SECOND_BACK: tuple[Outcome, ...] = (("gone.txt", "restored", None), ("notes.txt", "restored", None))
ADDED_BACK: Outcome = ("added.txt", "restored", None)
CONFLICT: Outcome = ("notes.txt", "conflicted", "same_lines")

CASES = [
    Case(
        "undo a call below an edit and a later call",
        "undo",
        {"notes.txt": notes(**BY_HAND, **SECOND)},
        (ADDED_BACK, ("notes.txt", "merged", None)),
        call="first",
    ),
    Case("undo the newest call", "undo", NO_SECOND, SECOND_BACK),
    Case(
        "undo one path",
        "undo",
        {"notes.txt": NOW["notes.txt"]},
        (ADDED_BACK,),
        call="first",
        options={"paths": ["added.txt"]},
    ),
    Case(
        "undo one hunk",
        "undo",
        {**NOW, "notes.txt": notes(_30="line thirty", **BY_HAND, **SECOND)},
        (("notes.txt", "merged", None),),
        call="first",
        options={"hunks": {"notes.txt": [0]}},
    ),
    Case(
        "undo a hunk and another path",
        "undo",
        {"notes.txt": notes(_3="line three", **BY_HAND, **SECOND)},
        (ADDED_BACK, ("notes.txt", "merged", None)),
        call="first",
        options={"paths": ["added.txt"], "hunks": {"notes.txt": [1]}},
    ),
    Case(
        "undo a hunk that the call does not have",
        "undo",
        NOW,
        error="invalid_params",
        call="first",
        options={"hunks": {"notes.txt": [7]}},
    ),
    Case(
        "plan an undo",
        "undo",
        NOW,
        (ADDED_BACK, ("notes.txt", "merged", None)),
        call="first",
        options={"dry_run": True},
    ),
    Case("undo a call that does not exist", "undo", NOW, error="unknown_call", call="0" * 12),
    Case(
        "undo, and a person edited the same line",
        "undo",
        {"notes.txt": MINE},
        (ADDED_BACK, CONFLICT),
        call="first",
        person_writes=MINE,
    ),
    Case(
        "undo nothing if there is a conflict",
        "undo",
        {**NOW, "notes.txt": MINE},
        (("added.txt", "skipped", None), CONFLICT),
        call="first",
        options={"on_conflict": "refuse"},
        person_writes=MINE,
    ),
    Case(
        "undo over a person's edit of the same line",
        "undo",
        {"notes.txt": notes()},
        (ADDED_BACK, ("notes.txt", "restored", None)),
        ("notes.txt",),
        call="first",
        options={"on_conflict": "overwrite"},
        person_writes=MINE,
    ),
    Case(
        "restore a call",
        "restore",
        {"notes.txt": notes(**BY_HAND)},
        (ADDED_BACK, ("notes.txt", "merged", None)),
        call="first",
    ),
    Case(
        "restore one path",
        "restore",
        {"notes.txt": NOW["notes.txt"]},
        (ADDED_BACK,),
        call="first",
        options={"paths": ["added.txt"]},
    ),
    Case(
        "restore one hunk",
        "restore",
        {**NOW, "notes.txt": notes(_30="line thirty", **BY_HAND, **SECOND)},
        (("notes.txt", "merged", None),),
        call="first",
        options={"hunks": {"notes.txt": [0]}},
    ),
    Case(
        "restore a hunk that the call does not have",
        "restore",
        NOW,
        error="invalid_params",
        call="first",
        options={"hunks": {"notes.txt": [7]}},
    ),
    Case("restore a call that does not exist", "restore", NOW, error="unknown_call", call="0" * 12),
    Case("roll the last turn back", "rollback", NO_SECOND, SECOND_BACK),
    Case("redo a rollback", "redo", NOW, SECOND_BACK, prepare="rollback"),
    Case("redo with nothing to redo", "redo", NOW, error="nothing_to_redo"),
    Case(
        "rewind to before a call",
        "rewind",
        {"notes.txt": notes(**BY_HAND), "gone.txt": "gone\n"},
        (ADDED_BACK, ("gone.txt", "restored", None), ("notes.txt", "merged", None)),
        call="first",
    ),
    Case("rewind to after a call", "rewind", NO_SECOND, SECOND_BACK, call="first", options={"side": "after"}),
]


def record(project: Path, home: Path, session_id: str, case: Case) -> Project:
    project.mkdir()
    (project / "notes.txt").write_text(notes())
    (project / "gone.txt").write_text("gone\n")
    calls: dict[str, str] = {}
    with mulligan.open(project, store=home) as opened:
        session = opened.session(session_id)
        with session.turn("one"), session.call("one") as call:
            call.edit_file("notes.txt", "line 3\n", "line three\n")
            call.edit_file("notes.txt", "line 30\n", "line thirty\n")
            call.write_file("added.txt", "added\n")
        calls["first"] = call.id
        (project / "notes.txt").write_text(notes(**FIRST, **BY_HAND))
        with session.turn("two"), session.call("two") as call:
            call.edit_file("notes.txt", "line 20\n", "line twenty\n")
            call.delete("gone.txt")
        calls["second"] = call.id
        if case.prepare is not None:
            getattr(session, case.prepare)()
    if case.person_writes is not None:
        (project / "notes.txt").write_text(case.person_writes)
    return Project(project, home, session_id, calls)


def told_in(answer: Any) -> Told:
    """From the JSON that Python, the command line, HTTP and MCP share."""
    if "error" in answer:
        return Told(error=answer["error"]["code"])
    outcomes = [(one["path"], one["outcome"], one.get("reason")) for one in answer["outcomes"]]
    return Told(tuple(sorted(outcomes, key=str)), tuple(answer["overwrote_external"]))


class Interfaces:
    """Every way in. A server is started with the first case that needs it, and serves all cases."""

    def __init__(self, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> None:
        self._request, self._capfd = request, capfd

    def python(self, project: Project, case: Case) -> Told:
        with mulligan.open(project.root, store=project.home) as opened:
            verb = getattr(opened.session(project.session), case.verb)
            called = project.id_of(case)
            try:
                return told_in(verb(*([] if called is None else [called]), **case.options).to_json())
            except MulliganError as error:
                return Told(error=error.code)

    def cli(self, project: Project, case: Case) -> Told:
        options = dict(case.options)
        words = [case.verb, *([called] if (called := project.id_of(case)) is not None else [])]
        for path in options.pop("paths", ()):
            words += ["--path", path] if case.verb == "undo" else [path]
        for path, some in options.pop("hunks", {}).items():
            words += [word for number in some for word in ("--hunk", f"{path}:{number}")]
        if options.pop("side", "before") == "after":
            words.append("--after")
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
        words += ["--root", str(project.root), "--store", str(project.home), "--session", project.session]
        self._capfd.readouterr()
        run_cli([*words, "--json", "--yes"])
        return told_in(json.loads(self._capfd.readouterr().out))

    def http(self, project: Project, case: Case) -> Told:
        called, options = project.id_of(case), dict(case.options)
        query: dict[str, Any] = {name: options.pop(name) for name in ("dry_run", "on_conflict") if name in options}
        if "dry_run" in query:
            query["dry_run"] = "1"
        in_session = case.verb in ("rollback", "redo", "rewind")
        path = f"/sessions/{project.session}" if in_session else f"/calls/{called}"
        body = {**options, **({"to": called} if case.verb == "rewind" else {})}
        served: Served = self._request.getfixturevalue("served")
        with served.client() as client:
            answer = client.post(f"/api/v1{path}/{case.verb}", json=body, params=query)
        return told_in(answer.json())

    def mcp(self, project: Project, case: Case) -> Told:
        called = project.id_of(case)
        named: dict[str, Any] = {} if called is None else {"to" if case.verb == "rewind" else "call": called}
        with on_stdio(project.root, project.home) as host:
            host.greet()
            answer = host.call(f"history_{case.verb}", **named, session_id=project.session, **case.options)
        return told_in(answer["structuredContent"])

    def acp(self, project: Project, case: Case) -> Told:
        """ACP's frames list the restored paths and the skipped ones, so the outcomes come from both lists."""
        called, options = project.id_of(case), dict(case.options)
        if "on_conflict" in options:
            options["onConflict"] = options.pop("on_conflict")
        if called is not None:
            options["to" if case.verb == "rewind" else "toolCallId"] = called
        method = "restore_tool_call" if case.verb == "restore" else case.verb
        client: Client = self._request.getfixturevalue("acp")
        frame = client.answer(client.begin(f"_mulligan/session/{method}", sessionId=project.session, **options))
        if "error" in frame:
            found = frame["error"]["data"]["status"]
            return Told(error={"no_redo": "nothing_to_redo"}.get(found, found))
        body, start = frame["result"], len(str(project.root)) + 1
        parts = [body] if case.verb == "restore" else body["fsRestores"]
        outcomes: list[Outcome] = [(path[start:], "back", None) for one in parts for path in one["restoredPaths"]]
        for one in parts:
            outcomes += [(left["path"][start:], "left", left["reason"]) for left in one["skippedPathsWithReasons"]]
        replaced = tuple(path[start:] for path in body.get("overwrote_external", ()))
        return Told(tuple(sorted(outcomes, key=str)), replaced)


def as_acp(told: Told) -> Told:
    words = {"restored": "back", "merged": "back"}
    outcomes = [(path, words.get(outcome, "left"), reason) for path, outcome, reason in told.outcomes]
    return Told(tuple(sorted(outcomes, key=str)), told.overwrote, told.error)


def has_verb(interface: str, case: Case) -> bool:
    """ACP has no `undo` of a call and no plan; over HTTP an undo names its call."""
    if interface == "acp":
        return case.verb != "undo" and "dry_run" not in case.options
    return interface != "http" or case.verb != "undo" or case.call is not None


WAYS: dict[str, Callable[[Interfaces, Project, Case], Told]] = {
    "python": Interfaces.python,
    "cli": Interfaces.cli,
    "http": Interfaces.http,
    "mcp": Interfaces.mcp,
    "acp": Interfaces.acp,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undo-cases") / "home"


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Served]:
    with serving(home) as found:
        yield found


@pytest.fixture(scope="module")
def acp(home: Path) -> Iterator[Client]:
    with connected(home, "--provider", "mock") as found:
        yield found


@pytest.mark.req("D14.http.undo", "D14.http.restore", "D14.http.rollback", "D14.http.redo", "D14.http.rewind")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("interface", WAYS)
def test_a_case_has_the_same_outcome_through_every_interface(
    interface: str,
    case: Case,
    home: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if not has_verb(interface, case):
        return
    project = record(tmp_path.resolve() / "project", home, f"{interface}{CASES.index(case)}", case)
    told = WAYS[interface](Interfaces(request, capfd), project, case)
    assert told == (as_acp(case.told) if interface == "acp" else case.told)
    assert project.files() == case.files
