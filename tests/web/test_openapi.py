"""`/openapi.json` against the server: Schemathesis makes requests from the document and judges the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
        yield found


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


def conforms(server: Served, examples: int) -> None:
    with server.client() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
        ordinary = [one for one in operations if not one.path.endswith(("/events", "/demo", "/storage/gc"))]
        headers = dict(client.headers)

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
            try:
                answer = case.call(base_url=server.base, headers=headers)
            except (ValueError, httpx.InvalidURL):
                return  # The client itself refuses to send such a header.
            case.validate_response(answer, checks=CHECKS, headers=headers)

        judge()


def test_answers_are_as_documented(server: Served) -> None:
    conforms(server, 120)


@pytest.mark.slow
def test_many_more_answers_are_as_documented(server: Served) -> None:
    conforms(server, 2_000)
