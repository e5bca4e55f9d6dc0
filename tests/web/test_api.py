"""The JSON API over a real server: calls, plans, undo operations, points, events."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import mulligan
from tests.web.serving import Served, record, run, serving, write_call


def root_of(server: Served) -> str:
    return str(server.get("/roots")["roots"][0]["id"])


@pytest.mark.req("D14.http.calls")
def test_calls_say_what_happened_newest_first(server: Served, calls: dict[str, str]) -> None:
    found = server.get("/calls", root=root_of(server))["calls"]
    told = [(one["tool"], one["status"], one["external"], one["prompt"], one["command"], one["files"]) for one in found]
    assert told == [
        ("broken", "aborted", False, None, None, 0),
        ("exec", "committed", False, "Clean up", "echo cleaned >> notes.txt", 1),
        (None, "committed", True, None, None, 1),
        ("write", "committed", False, "Number the important lines", None, 2),
        ("edit", "committed", False, "Number the important lines", None, 1),
    ]
    assert [one["id"] for one in sorted(found, key=lambda one: one["sort"], reverse=True)] == [
        one["id"] for one in found
    ]


@pytest.mark.req("D14.http.calls")
def test_pages_of_calls_follow_each_other_by_cursor(server: Served, calls: dict[str, str]) -> None:
    every = [one["id"] for one in server.get("/sessions/work/calls")["calls"]]
    paged: list[str] = []
    before: dict[str, str] = {}
    while True:
        page = server.get("/sessions/work/calls", limit=2, **before)
        paged += [one["id"] for one in page["calls"]]
        if page["next"] is None:
            break
        before = {"before": page["next"]}
    assert paged == every


@pytest.mark.req("D14.http.call_diff")
def test_a_diff_has_hunks_words_and_token_classes(server: Served, calls: dict[str, str]) -> None:
    (file,) = server.get(f"/calls/{calls['edit']}/diff")["files"]
    changed = [line for hunk in file["hunks"] for line in hunk["lines"] if line["kind"] != " "]
    assert [(line["kind"], line["text"], line["words"]) for line in changed] == [
        ("-", "line 3", [[5, 6]]),
        ("+", "line three", [[5, 10]]),
        ("-", "line 30", [[5, 7]]),
        ("+", "line thirty", [[5, 11]]),
    ]
    assert [hunk["index"] for hunk in file["hunks"]] == [0, 1]
    files = server.get(f"/calls/{calls['write']}/diff", paths="src/app.py")["files"]
    assert [0, 3, "k"] in files[0]["hunks"][0]["lines"][0]["spans"]


def test_changed_words_are_those_of_the_line_that_is_most_alike(server: Served, root: Path) -> None:
    with mulligan.open(root, store=server.home) as opened, opened.session("work").call("words") as call:
        call.write_file("a.py", "x = 1\nreturn greet(name)\n")
    with mulligan.open(root, store=server.home) as opened, opened.session("work").call("words") as call:
        call.edit_file("a.py", "return greet(name)\n", "word = table[name]\nreturn greet(word)\n")
    (file,) = server.get(f"/calls/{call.id}/diff")["files"]
    changed = [(line["text"], line["words"]) for line in file["hunks"][0]["lines"] if line["kind"] != " "]
    assert changed == [
        ("return greet(name)", [[13, 17]]),
        ("word = table[name]", []),
        ("return greet(word)", [[13, 17]]),
    ]


def test_a_request_colours_at_most_2000_lines(server: Served, root: Path) -> None:
    """The lines of one file alone, or of several files together."""
    with mulligan.open(root, store=server.home) as opened, opened.session("work").call("long") as call:
        for name in "abc":
            call.write_file(f"{name}.py", "import os\n" * 900)
        call.write_file("long.py", "import os\n" * 1_999)
    files = server.get(f"/calls/{call.id}/diff", lines=20_000)["files"]
    coloured = {file["path"]: all(line["spans"] for line in file["hunks"][0]["lines"]) for file in files}
    assert coloured == {"a.py": True, "b.py": True, "c.py": False, "long.py": False}
    (whole,) = server.get(f"/calls/{call.id}/diff", paths="long.py")["files"]
    assert whole["hunks"][0]["lines"][0]["spans"] != []


def test_undo_of_a_hunk_keeps_the_persons_edit_and_can_be_redone(
    server: Served, calls: dict[str, str], root: Path
) -> None:
    notes = root / "notes.txt"
    before = notes.read_text()
    body = {"hunks": {"notes.txt": [0]}}
    plan = server.post(f"/calls/{calls['edit']}/undo", body, dry_run=1)
    assert (plan["outcomes"], notes.read_text()) == ([{"outcome": "merged", "path": "notes.txt"}], before)
    done = server.post(f"/calls/{calls['edit']}/undo", body, if_match=f'"{plan["digest"]}"')
    assert done["ok"] is True
    assert notes.read_text() == before.replace("line three", "line 3")
    assert "by hand" in notes.read_text()
    server.post("/sessions/work/redo")
    assert notes.read_text() == before


def test_a_plan_that_no_longer_holds_is_answered_with_the_new_one(
    server: Served, calls: dict[str, str], root: Path
) -> None:
    plan = server.post(f"/calls/{calls['edit']}/undo", dry_run=1)
    (root / "elsewhere.txt").write_text("not in the plan\n")
    edited = (root / "notes.txt").read_text().replace("line 20\n", "line 20, meanwhile\n")
    (root / "notes.txt").write_text(edited)
    refused = server.post(f"/calls/{calls['edit']}/undo", if_match=plan["digest"], status=412)
    assert (root / "notes.txt").read_text() == edited
    assert refused["plan"]["digest"] != plan["digest"]
    server.post(f"/calls/{calls['edit']}/undo", if_match=refused["plan"]["digest"])
    assert (root / "notes.txt").read_text() == edited.replace("three", "3").replace("thirty", "30")


def test_changes_to_other_paths_do_not_change_a_plan(server: Served, calls: dict[str, str], root: Path) -> None:
    plan = server.post(f"/calls/{calls['edit']}/undo", dry_run=1)
    (root / "elsewhere.txt").write_text("not in the plan\n")
    assert server.post(f"/calls/{calls['edit']}/undo", dry_run=1)["digest"] == plan["digest"]
    assert server.post(f"/calls/{calls['edit']}/undo", if_match=plan["digest"])["ok"] is True


def test_a_conflict_stays_unless_it_is_overwritten_and_its_bytes_can_be_had(
    server: Served, calls: dict[str, str], root: Path
) -> None:
    edited = (root / "notes.txt").read_text().replace("line three", "line of mine")
    (root / "notes.txt").write_text(edited)
    for on_conflict, outcome in (("merge", "conflicted"), ("refuse", "conflicted"), ("overwrite", "restored")):
        plan = server.post(f"/calls/{calls['edit']}/undo", dry_run=1, on_conflict=on_conflict)
        changed = [line["text"] for line in plan["diffs"][0]["hunks"][0]["lines"] if line["kind"] != " "]
        assert (plan["outcomes"][0]["outcome"], changed) == (outcome, ["line of mine", "line 3"])
    left = server.post(f"/calls/{calls['edit']}/undo")
    assert (left["ok"], left["outcomes"][0]["reason"]) == (False, "same_lines")
    assert (root / "notes.txt").read_text() == edited
    done = server.post(f"/calls/{calls['edit']}/undo", on_conflict="overwrite")
    assert done["overwrote_external"] == ["notes.txt"]
    with server.client() as client:
        saved = client.get(f"/api/v1/calls/{done['rescue']}/bytes", params={"path": "notes.txt", "side": "before"})
    assert saved.text == edited
    assert saved.headers["content-security-policy"] == "sandbox"
    assert saved.headers["content-disposition"].startswith("attachment")


@pytest.mark.req("D14.http.dry_run", "D14.http.fork")
def test_every_undo_operation_takes_dry_run(server: Served, calls: dict[str, str], root: Path) -> None:
    before = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    server.post(f"/calls/{calls['edit']}/undo", dry_run=1)
    server.post(f"/calls/{calls['edit']}/restore", {"paths": ["notes.txt"]}, dry_run=1)
    server.post("/sessions/work/rollback", dry_run=1)
    server.post("/sessions/work/rewind", {"to": calls["edit"]}, dry_run=1)
    server.post("/sessions/work/fork", dry_run=1)
    assert {file: file.read_bytes() for file in root.rglob("*") if file.is_file()} == before


def test_files_and_folders_are_shown_as_of_a_call(server: Served, calls: dict[str, str]) -> None:
    root = root_of(server)
    names = [one["name"] for one in server.get("/tree", root=root, at=calls["write"], side="before")["entries"]]
    assert names == ["notes.txt"]
    names = [one["name"] for one in server.get("/tree", root=root, at=calls["write"], side="after")["entries"]]
    assert names == ["src", "notes.txt"]
    then = server.get("/file", root=root, path="notes.txt", at=calls["edit"], side="before")
    assert [line["text"] for line in then["lines"]][2] == "line 3"
    gone = server.get("/file", root=root, path="src/app.py", at=calls["edit"], side="after")
    assert gone["state"] == "absent"


def test_two_points_are_compared(server: Served, calls: dict[str, str]) -> None:
    query = {"root": root_of(server), "from": calls["edit"], "to": calls["edit"]}
    (file,) = server.get("/compare", **query)["files"]
    assert (file["path"], file["added"], file["removed"]) == ("notes.txt", 2, 2)
    found = server.get("/compare", root=root_of(server), **{"from": calls["edit"]})["files"]
    assert [(one["path"], one["added"]) for one in found if one["state"] == "text"] == [
        ("notes.txt", 4),
        ("src/app.py", 2),
    ]


def test_a_fork_is_compared_merged_and_dropped(server: Served, calls: dict[str, str], root: Path) -> None:
    made = server.post("/sessions/work/fork", {"files": "copy"}, status=201)
    copy = Path(made["directory"])
    write_call(server.home, copy, "idea.txt", "an idea\n")
    other = next(one["id"] for one in server.get("/roots")["roots"] if one["path"] == str(copy))
    here = next(one["id"] for one in server.get("/roots")["roots"] if one["path"] == str(root))
    (file,) = server.get("/compare", root=here, other=other)["files"]
    assert (file["path"], file["added"]) == ("idea.txt", 1)
    plan = server.post(f"/sessions/{made['session_id']}/merge", dry_run=1)
    assert (plan["outcomes"], (root / "idea.txt").exists()) == ([{"outcome": "restored", "path": "idea.txt"}], False)
    (copy / "idea.txt").write_text("a better idea\n")
    server.post(f"/sessions/{made['session_id']}/merge", if_match=plan["digest"], status=412)
    assert not (root / "idea.txt").exists()
    (copy / "idea.txt").write_text("an idea\n")
    server.post(f"/sessions/{made['session_id']}/merge", if_match=plan["digest"])
    assert (root / "idea.txt").read_text() == "an idea\n"
    server.post(f"/sessions/{made['session_id']}/drop")
    assert not copy.exists()


def test_blame_names_the_prompt_of_each_line(server: Served, calls: dict[str, str]) -> None:
    lines = server.get("/blame", root=root_of(server), path="notes.txt")["lines"]
    assert (lines[0]["origin"], lines[2]["prompt"]) == ("before", "Number the important lines")
    assert (lines[2]["call_id"], lines[14]["external"]) == (calls["edit"], True)


@pytest.mark.req("D14.http.sessions", "D14.http.session", "D14.http.call")
def test_a_session_and_a_call_are_shown(server: Served, calls: dict[str, str]) -> None:
    (listed,) = server.get("/sessions")["sessions"]
    shown = server.get("/sessions/work")
    assert (listed["id"], shown["id"], shown["parent_id"]) == ("work", "work", None)
    call = server.get(f"/calls/{calls['write']}")
    assert (call["id"], call["session_id"], call["status"]) == (calls["write"], "work", "committed")
    assert [one["path"] for one in call["changes"]] == ["src", "src/app.py"]


def test_search_finds_prompts_paths_commands_and_what_was_said(server: Served, root: Path) -> None:
    with mulligan.open(root, store=server.home) as opened:
        opened.session("work").inject({"role": "user", "content": "remember the walrus"})
    for words, where in (("important", "prompt"), ("app.py", "path"), ("cleaned", "command"), ("walrus", "transcript")):
        assert where in {one["where"] for one in server.get("/search", q=words)["results"]}
    assert server.get("/search", q="nowhere to be found") == {"results": [], "next": None}


def test_pages_of_a_search_follow_each_other(server: Served, calls: dict[str, str]) -> None:
    """A session that was only talked in is found too."""
    with mulligan.open(server.home.parent / "project", store=server.home) as opened:
        opened.session("talk").inject({"role": "user", "content": "notes of a meeting"})
    first = server.get("/search", q="notes", limit=2)
    assert [(one["where"], one["session_id"]) for one in first["results"]] == [("transcript", "talk"), ("path", None)]
    found = [one["call_id"] for one in server.get("/search", q="notes", before=first["next"])["results"]]
    external = next(one["id"] for one in server.get("/calls")["calls"] if one["external"])
    assert (first["results"][1]["call_id"], found) == (external, [calls["exec"], calls["edit"]])


def test_pages_of_a_folder_follow_each_other(server: Served, root: Path) -> None:
    (root / "d" / "folder").mkdir(parents=True)
    for name in ("b", "a", "é"):
        (root / "d" / name).touch()
    names: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = server.get("/tree", root=root_of(server), path="d", limit=1, **after)
        names += [one["name"] for one in page["entries"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert (names, page["total"]) == (["folder", "a", "b", "é"], 4)
    with server.client() as client:
        assert client.get("/api/v1/tree", params={"path": "d", "after": "x"}).status_code == 400


def test_lines_of_a_file_begin_where_the_client_asks(server: Served, calls: dict[str, str]) -> None:
    for route in ("file", "blame"):
        found = server.get(f"/{route}", root=root_of(server), path="notes.txt", line=3, limit=2)
        assert ([one["text"] for one in found["lines"]], found["total"]) == (["line three", "line 4"], 41)


def test_storage_says_what_a_cap_would_drop(server: Served) -> None:
    found = server.get("/storage")
    assert (found["cap"], found["would_evict"]) == (10 * 2**30, [])
    assert server.get("/storage", cap=1)["would_evict"] != []


def test_sessions_of_the_storage_and_roots_come_page_by_page(server: Served, calls: dict[str, str]) -> None:
    root = server.get("/roots")["roots"][0]
    with mulligan.open(root["path"], store=str(server.home)) as opened:
        opened.session("second").inject({"role": "user", "content": "hello"})
    first = server.get("/storage", limit=1)
    second = server.get("/storage", limit=1, before=first["next"])
    assert [[one["session_id"] for one in page["sessions"]] for page in (first, second)] == [["second"], ["work"]]
    assert (first["next"], second["next"]) == ("second", None)
    assert server.get("/roots")["next"] is None
    assert server.get("/roots", before=root["id"]) == {"roots": [], "next": None}


def test_collecting_garbage_says_how_far_it_is(server: Served) -> None:
    assert server.get("/storage")["gc"]["state"] == "idle"
    begun = server.post("/storage/gc", status=202)
    assert (begun["state"], begun["stage"] in ("blobs checked", "blobs deleted")) == ("running", True)
    while (gc := server.get("/storage")["gc"])["state"] == "running":
        assert 0 <= gc["done"] <= gc["total"]
    assert (gc["state"], gc["stage"], gc["done"]) == ("done", "blobs deleted", gc["total"])


@pytest.mark.req("D14.http.metrics", "D14.http.bearer")
def test_metrics_count_answers_streams_records_and_bytes(server: Served) -> None:
    with server.client() as client:
        client.get("/api/v1/roots")
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert int(lines['mulligan_http_responses_total{status="200"}']) >= 1
    assert int(lines["mulligan_journal_records"]) > 0 and int(lines["mulligan_store_bytes"]) > 0
    assert lines["mulligan_event_streams"] == "0"


@pytest.mark.req("D14.http.mcp")
def test_mcp_is_served_beside_the_page(server: Served, root: Path) -> None:
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "tests", "version": "1"}}
    headers = {"accept": "application/json, text/event-stream"}
    with server.client() as client:
        asked = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
        answer = client.post("/mcp", json=asked, headers=headers)
        assert answer.status_code == 200
        headers |= {"mcp-protocol-version": "2025-11-25"}
        if "mcp-session-id" in answer.headers:
            headers["mcp-session-id"] = answer.headers["mcp-session-id"]
        client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=headers)
        arguments = {"path": "by-mcp.txt", "content": "hello\n"}
        call = {"name": "write_file", "arguments": arguments}
        done = client.post(
            "/mcp", json={"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}, headers=headers
        )
    assert (done.status_code, (root / "by-mcp.txt").read_text()) == (200, "hello\n")


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ({"limit": "0"}, None),
        ({"limit": "501"}, None),
        ({"limit": "x"}, None),
        ({"offset": "3"}, None),
        ({"limit": ["1", "2"]}, None),
    ],
)
def test_parameters_are_those_of_the_table(server: Served, query: dict[str, Any], body: Any) -> None:
    with server.client() as client:
        answer = client.get("/api/v1/calls", params=query)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_params")


def test_wrong_methods_and_bodies_are_refused(server: Served, calls: dict[str, str]) -> None:
    with server.client() as client:
        assert client.get(f"/api/v1/calls/{calls['edit']}/undo").status_code == 405
        for body in (b"[]", b"{", b'{"paths": 1}', b'{"hunks": {"a": [-1]}}', b'{"nothing": 1}'):
            assert client.post(f"/api/v1/calls/{calls['edit']}/undo", content=body).status_code == 400


def frames(answer: httpx.Response) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events of a stream, with their ids."""
    place = 0
    for line in answer.iter_lines():
        if line.startswith("id: "):
            place = int(line[4:])
        if line.startswith("data: "):
            yield place, json.loads(line[6:])


@pytest.mark.req("D14.http.events_stream")
def test_events_come_live_and_again_from_the_last_one(server: Served, root: Path) -> None:
    with server.client() as client, client.stream("GET", "/api/v1/events") as live:
        assert live.headers["content-type"].startswith("text/event-stream")
        events = frames(live)
        first = write_call(server.home, root, "a.txt", "a\n")
        heard = [next(events) for _ in range(2)]
        assert [(one["kind"], one["metadata"]["call_id"]) for _, one in heard] == [
            ("call_begun", first),
            ("call_ended", first),
        ]
    second = write_call(server.home, root, "b.txt", "b\n")
    run(server.home, root, "undo", second)
    last = {"last-event-id": str(heard[-1][0])}
    with server.client() as client, client.stream("GET", "/api/v1/events", headers=last) as again:
        events = frames(again)
        kinds = []
        while "call_undone" not in kinds:
            kinds.append(next(events)[1]["kind"])
    assert kinds == ["call_begun", "call_ended", "call_begun", "call_ended", "undo", "call_undone"]


def test_an_external_edit_is_an_event_of_the_sessions_of_its_files(server: Served, root: Path) -> None:
    after = server.get("/calls")["event"]
    (root / "notes.txt").write_text("all new\n")
    write_call(server.home, root, "notes.txt", "newer\n", session="other")
    path = f"/api/v1/sessions/work/events?after={after}"
    with server.client() as client, client.stream("GET", path) as live:
        _, event = next(frames(live))
    assert (event["kind"], event["metadata"]["paths"]) == ("external_edit", ["notes.txt"])


def test_a_server_that_is_killed_during_an_undo_leaves_the_call_whole_or_without_trace(
    tmp_path: Path, root: Path
) -> None:
    home = tmp_path / "home"
    record(root, home)
    for number in range(30):
        (root / f"many{number}").write_text("before\n")
    with mulligan.open(root, store=home) as opened, opened.session("work").call("many") as call:
        for number in range(30):
            call.write_file(f"many{number}", "after\n")
    with serving(home) as server:
        with server.client() as client, client.stream("GET", "/api/v1/events") as live:
            request = client.build_request("POST", f"/api/v1/calls/{call.id}/undo", json={})
            asking = httpx.Client(headers=client.headers, timeout=60)
            thread = threading.Thread(target=lambda: _ignore(asking, request))
            thread.start()
            next(frames(live))  # The undo has begun.
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            thread.join()
            asking.close()
        with serving(home, port=server.port) as again:
            shown = again.get(f"/calls/{call.id}")
    texts = {(root / f"many{number}").read_text() for number in range(30)}
    assert texts == ({"before\n"} if shown["status"] == "undone" else {"after\n"})


def _ignore(client: httpx.Client, request: httpx.Request) -> None:
    try:
        client.send(request)
    except httpx.TransportError:
        return
