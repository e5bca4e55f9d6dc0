"""The session verbs as a person and a script use them."""

from __future__ import annotations

from pathlib import Path

import pytest

import mulligan.api as api
from tests.cli.cli_result import Run


@pytest.fixture
def talked(work: Path) -> None:
    with api.open(str(work)) as opened:
        session = opened.session("talk")
        for number in range(20):
            session.inject({"role": "assistant" if number % 2 else "user", "content": f"line {number}\x1b[31m"})
        session.fork(dst="kid")
        opened.session("over").close("done")


@pytest.mark.usefixtures("talked")
class TestSessions:
    @pytest.mark.req("D14.cli.sessions")
    def test_lists_the_open_sessions_of_this_root(self, run: Run, work: Path, tmp_path: Path) -> None:
        found = run("sessions", "--json").json
        assert [(one["id"], one["length"], one["parent_id"], one["root"]) for one in found] == [
            ("talk", 20, None, str(work)),
            ("kid", 20, "talk", str(work)),
        ]
        assert [one["id"] for one in run("sessions", "--all", "--json").json] == ["talk", "kid", "over"]
        (tmp_path / "other").mkdir()
        assert run("sessions", "--root", str(tmp_path / "other"), "--json").json == []
        assert len(run("sessions", "--root", str(tmp_path / "other"), "--everywhere", "--json").json) == 2

    def test_prints_sessions_as_text(self, run: Run) -> None:
        lines = run("sessions").out.splitlines()
        assert [line.split()[:4] for line in lines] == [
            ["talk", "open", "20", "messages"],
            ["kid", "open", "20", "messages"],
        ]
        assert "forked from talk" in lines[1]

    def test_show_escapes_control_characters_of_messages(self, run: Run) -> None:
        done = run("sessions", "show", "talk", "--limit", "2")
        assert done.code == 0 and "\x1b" not in done.out
        assert [line.split(":")[0] for line in done.out.splitlines()[-2:]] == ["user", "assistant"]
        assert "line 17" not in done.out and "line 19\\x1b[31m" in done.out
        assert run("sessions", "show", "talk", "--json").json["length"] == 20

    def test_a_closed_session_is_refused(self, run: Run) -> None:
        assert run("sessions", "close", "talk", "--reason", "bored", "--json").json == {
            "session_id": "talk",
            "closed": True,
        }
        for verb in (["show"], ["close"], ["reset", "--yes"]):
            assert run("sessions", *verb, "talk").code == 2
        assert run("sessions", "show", "nobody").code == 2

    def test_reset_needs_yes(self, run: Run) -> None:
        assert run("sessions", "reset", "talk").code == 2
        assert run("sessions", "show", "talk", "--json").json["length"] == 20
        assert run("sessions", "reset", "talk", "--yes").code == 0
        assert run("sessions", "show", "talk", "--json").json["length"] == 0
        assert run("sessions", "show", "kid", "--json").json["length"] == 20


@pytest.mark.usefixtures("talked")
class TestCompact:
    @pytest.mark.req("D14.cli.compact")
    def test_compact_shortens_the_context_window(self, run: Run) -> None:
        assert run("compact", "talk", "--json").json == {"session_id": "talk", "messages_before": 20, "messages": 13}
        assert run("compact", "--session", "kid", "--keep-last", "4", "--strategy", "truncate").code == 0
        assert run("sessions", "show", "kid", "--json").json["length"] == 5

    @pytest.mark.parametrize(
        "options", [["--keep-last", "-1"], ["--strategy", "llm"], ["--strategy", "custom"], ["--nonsense"]]
    )
    def test_an_impossible_compaction_is_bad_usage(self, run: Run, options: list[str]) -> None:
        assert run("compact", "talk", *options).code == 2
        assert run("compact", "nobody").code == 2


class TestRewindAndFork:
    def test_rewind_moves_transcript_and_files_or_one_of_them(self, run: Run, work: Path) -> None:
        with api.open(str(work)) as opened:
            session = opened.session("talk")
            with session.turn("one"):
                session.inject({"role": "user", "content": "one"})
                with session.call("w", tool_call_id="c1") as call:
                    call.write_file("a.txt", "x")
                session.inject({"role": "assistant", "content": "done"})
            first = session.message_ids()[0]
        asked = ("rewind", first, "--session", "talk")
        dry = run(*asked, "--dry-run", "--json").json
        assert dry["talk"] == {"messages": 0, "messages_before": 2} and (work / "a.txt").exists()
        done = run(*asked)
        assert done.code == 0 and "removed 2 messages" in done.out and not (work / "a.txt").exists()
        assert "restored 2 messages" in run("redo", "--session", "talk").out
        assert run(*asked, "--no-transcript").code == 0 and not (work / "a.txt").exists()
        assert run("sessions", "show", "talk", "--json").json["length"] == 2
        assert run("redo", "--session", "talk").code == 0
        assert run(*asked, "--no-files").code == 0 and (work / "a.txt").exists()
        assert run("sessions", "show", "talk", "--json").json["length"] == 0

    def test_fork_at_a_message(self, run: Run, work: Path) -> None:
        with api.open(str(work)) as opened:
            for number in range(3):
                opened.session("talk").inject({"role": "user", "content": str(number)})
            second = opened.session("talk").message_ids()[1]
        made = run("fork", "--session", "talk", "--at", second, "--name", "kid", "--json").json
        assert made["session_id"] == "kid"
        assert run("sessions", "show", "kid", "--json").json["length"] == 2


def test_before_the_first_call_there_are_no_sessions(run: Run, tmp_path: Path) -> None:
    assert run("sessions", "--json").json == []
    assert run("sessions").out == "No open sessions.\n"
    assert not (tmp_path / "home").exists()
