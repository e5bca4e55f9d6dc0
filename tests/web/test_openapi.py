"""`/openapi.json` against the server: Schemathesis makes requests from the document and judges the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks as openapi_checks

from tests.web.serving import Served, record, serving

CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("openapi")
    record(folder / "project", folder / "home")
    with serving(folder / "home") as found:
        for _ in range(3):
            found.post("/sessions/work/fork", {"files": "copy"}, status=201)
        found.post("/sessions/work/attach", {"client_id": "page", "mode": "controller"})
        yield found


def known_names(server: Served) -> dict[str, list[str]]:
    """What exists on the server, by the parameters that name it. Names made at random alone never reach a function."""
    calls = [one["id"] for one in server.get("/calls")["calls"]]
    sessions = [one["id"] for one in server.get("/sessions")["sessions"]]
    roots = [one["id"] for one in server.get("/roots")["roots"] if one["fork_of"] is None]
    paths = ["notes.txt", "src", "src/app.py", "."]
    return {
        **dict.fromkeys(("call", "at", "from", "to", "before", "ids"), calls),
        "session": ["work"] * 5 + sessions,
        **dict.fromkeys(("root", "other"), roots),
        **dict.fromkeys(("path", "paths"), paths),
        "client_id": ["page"],
        "q": ["notes", "line"],
    }


@pytest.mark.req("D14.http.openapi_json")
def test_every_route_is_documented_with_its_answers(server: Served) -> None:
    with server.client() as client:
        document = client.get("/openapi.json").json()
    needed = {"/healthz", "/metrics", "/openapi.json", "/api/v1/sessions", "/api/v1/sessions/{session}"}
    needed |= {
        f"/api/v1/sessions/{{session}}/{name}" for name in ("calls", "events", "rollback", "redo", "rewind", "fork")
    }
    needed |= {f"/api/v1/calls/{{call}}{name}" for name in ("", "/diff", "/undo", "/restore")}
    assert needed <= set(document["paths"])
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert all(one["summary"] and one["responses"] for one in operations)


def use_known_names(data: st.DataObject, case: schemathesis.Case[Any], known: dict[str, list[str]]) -> None:
    """Put names that exist into most of the parameters that have one. Half of the requests leave the options out."""
    if data.draw(st.booleans()):
        for given in (case.query, case.headers):
            for name in [one for one in given if one not in ("path", "q", "from", "if-match")]:
                del given[name]
    if any(one.name == "root" for one in case.operation.query):
        case.query.setdefault("root", "")
    body = case.body if isinstance(case.body, dict) else {}
    for given in (case.path_parameters, case.query, body):
        for name in sorted(known.keys() & given.keys()):
            if data.draw(st.integers(0, 7)):
                chosen = data.draw(st.sampled_from(known[name]))
                given[name] = [chosen] if isinstance(given[name], list) else chosen


def conforms(server: Served, examples: int) -> Counter[tuple[str, int]]:
    """How often each operation answered with each status."""
    told: Counter[tuple[str, int]] = Counter()
    with server.client() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
        ordinary = [one for one in operations if not one.path.endswith(("/events", "/demo", "/storage/gc"))]
        headers, known = dict(client.headers), known_names(server)

        @settings(
            max_examples=examples,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        )
        @given(st.data())
        def judge(data: st.DataObject) -> None:
            operation = data.draw(st.sampled_from(ordinary))
            case = data.draw(operation.as_strategy())
            use_known_names(data, case, known)
            try:
                answer = case.call(base_url=server.base, headers=headers)
            except (ValueError, httpx.InvalidURL):
                return  # The client itself refuses to send such a header.
            told[operation.label, answer.status_code] += 1
            case.validate_response(answer, checks=CHECKS, headers=headers)

        judge()
    return told


def test_answers_are_as_documented(server: Served) -> None:
    conforms(server, 120)


@pytest.mark.slow
def test_many_more_answers_are_as_documented(server: Served) -> None:
    """Most operations succeed at least once, so their shapes are judged too."""
    told = conforms(server, 2_000)
    assert sum(told.values()) >= 1_900
    succeeded = {label for label, status in told if status < 300}
    assert len(succeeded) >= len({label for label, _ in told}) - 5
