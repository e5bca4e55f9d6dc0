"""Bundles: what they carry and what they leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mulligan.api as api
from mulligan.effects.session import DurableSession, local_redaction_policy
from mulligan.session.bundle.format import MODES, parse_bundle
from mulligan.session.bundle.redaction import PrivateNames, RedactionPolicy
from mulligan.session.bundle.secret_kinds import SECRET_KINDS
from mulligan.values.canonical import encode
from mulligan.values.clock import SystemClock
from mulligan.values.errors import MulliganError
from tests.session.bundle.example_secrets import Planted
from tests.session.bundle.example_sessions import CORPUS, call_of, full, section_of, survivors, talk, texts_in


class TestParts:
    @pytest.mark.req(
        "S3.bundle_part.transcript",
        "S3.bundle_part.tool_calls",
        "S3.bundle_part.permissions",
        "S3.bundle_part.replay_fixtures",
        "S3.bundle_part.trace_spans",
        "S3.bundle_part.redaction_manifest",
    )
    def test_a_bundle_has_type_version_producer_and_transcript(self, session: DurableSession) -> None:
        full(session)
        bundle = session.export("local")
        assert (bundle["_type"], bundle["schema_version"], bundle["producer"]["name"]) == (
            "mulligan_session_bundle",
            1,
            "mulligan",
        )
        assert [one["role"] for one in section_of(bundle)["messages"]] == ["user", "assistant", "tool"] * 3
        assert section_of(bundle)["metadata"]["scratchpad"] == {"goals": ["ship"]}
        calls = bundle["tools"]["calls"]
        assert [(one["tool_use_id"], one["result"]["message"], one["is_rejected"]) for one in calls] == [
            ("c0", 2, False),
            ("c1", 5, False),
            ("c2", 8, False),
        ]
        assert (calls[1]["status"], calls[0].get("status")) == ("committed", None)
        assert [(one["request_id"], one["agent"]) for one in bundle["permissions"]] == [("p1", "tui")]
        assert [one["tool_use_id"] for one in bundle["replay"]["replay_fixture"]["tool_results"]] == ["c0", "c1", "c2"]
        assert [(one["kind"], one.get("status")) for one in bundle["replay"]["trace_spans"]] == [
            ("turn", None),
            ("call", "committed"),
        ]
        assert bundle["redaction"]["entries"] == []

    @pytest.mark.req("D11.bundle_modes")
    def test_sanitized_is_the_default_and_others_are_refused(self, session: DurableSession) -> None:
        full(session)
        assert session.export() == session.export("sanitized")
        assert {mode: session.export(mode)["redaction"]["mode"] for mode in MODES} == {mode: mode for mode in MODES}
        with pytest.raises(MulliganError):
            session.export("open")

    @pytest.mark.parametrize("mode", MODES)
    def test_the_same_session_gives_the_same_bytes(self, session: DurableSession, mode: str) -> None:
        full(session)
        assert encode(session.export(mode)) == encode(session.export(mode))

    def test_a_closed_session_can_still_be_exported(self, opened: api.Mulligan, session: DurableSession) -> None:
        full(session)
        session.close("done")
        bundle = opened.sessions.export("s")
        assert (bundle["source"]["status"], section_of(bundle)["events"][-1]["kind"]) == (
            "closed",
            "agent_session_closed",
        )

    def test_an_unknown_session_is_not_found(self, opened: api.Mulligan) -> None:
        with pytest.raises(MulliganError) as caught:
            opened.sessions.export("nobody")
        assert caught.value.code == "session_not_found"


def plant(session: DurableSession, planted: Planted, number: int) -> None:
    """In another place each time."""
    text = planted.text
    places: list[Any] = [
        lambda: session.inject({"role": "user", "content": text}),
        lambda: session.inject({"role": "user", "content": [{"type": "text", "text": text}]}),
        lambda: session.inject(
            {"role": "assistant", "content": "", "tool_calls": [call_of(f"k{number}", {"x": text})]}
        ),
        lambda: session.inject({"role": "tool", "tool_call_id": f"k{number - 1}", "content": f"out\n{text}"}),
        lambda: session.inject(
            {"role": "user", "content": "see", "metadata": {"deep": [{"note": json.dumps([text])}]}}
        ),
        lambda: session.emit("note", {"environment": f"A=1\n{text}\nB=2"}, text=text),
        lambda: session.inject({"role": "user", "content": "x", "custom": {text[:200]: text}}),
    ]
    places[number % len(places)]()


class TestSecrets:
    @pytest.mark.req("S3.bundle.sanitized", "D18.secrets_in_journals", "D11.bundle_redaction_entries")
    @pytest.mark.parametrize("mode", ["sanitized", "replay_only"])
    def test_none_of_the_corpus_is_in_a_bundle_to_share(self, session: DurableSession, mode: str) -> None:
        for number, planted in enumerate(CORPUS):
            plant(session, planted, number)
        with session.turn(CORPUS[0].text), session.call("write") as call:
            for number, planted in enumerate(CORPUS[::6]):
                call.write_file(f"f{number}.env", f"# settings\n{planted.text}\n")
            call.write_file("raw.bin", CORPUS[7].text.encode())
            call.exec(["printf", "%s", CORPUS[1].text], env={"NOTE": CORPUS[2].text})
        session.set_scratchpad({"facts": [CORPUS[3].text]})
        session.set_system_prompt(CORPUS[4].text)
        bundle = session.export(mode)
        assert survivors(bundle) == []
        entries = bundle["redaction"]["entries"]
        assert len(entries) >= 200
        assert all(set(one) == {"path", "class", "action", "replacement"} for one in entries)
        assert {one["action"] for one in entries} <= {"replaced", "withheld"}
        assert len(survivors(session.export("local"))) == len(CORPUS)

    @pytest.mark.req("D11.bundle_secret_fails", "HS11.secret_not_echoed")
    @pytest.mark.parametrize("mode", ["sanitized", "replay_only"])
    def test_an_export_with_a_secret_left_is_refused_and_shows_nothing(
        self, session: DurableSession, mode: str
    ) -> None:
        npm = next(one for one in CORPUS if one.kind == "npm").secret
        session.inject({"role": "user", "content": f"use {npm}", "tool_call_id": npm})
        blind = RedactionPolicy(kinds=tuple(kind for kind in SECRET_KINDS if kind.name != "npm_token"))
        with pytest.raises(MulliganError) as caught:
            session.export(mode, policy=blind)
        assert (caught.value.code, caught.value.details["kind"]) == ("unredacted_secret", "npm_token")
        assert npm[4:12] not in f"{caught.value!r} {caught.value.message} {caught.value.details}"

    @pytest.mark.req("S3.bundle.local")
    def test_a_local_bundle_is_whole(self, session: DurableSession) -> None:
        secret = CORPUS[8].secret
        session.inject({"role": "user", "content": secret})
        bundle = session.export("local")
        assert section_of(bundle)["messages"] == [{"role": "user", "content": secret}]
        assert (bundle["redaction"]["policy"], bundle["redaction"]["entries"]) == ("none", [])

    @pytest.mark.req("HS8.paths_redacted")
    @pytest.mark.parametrize("mode", ["sanitized", "replay_only"])
    def test_an_export_contains_no_roots_homes_or_user_names(
        self, opened: api.Mulligan, session: DurableSession, tmp_path: Path, mode: str
    ) -> None:
        (tmp_path / "extra").mkdir()
        session.set_workspace_anchor({"primary": opened.root})
        session.add_root(str(tmp_path / "extra"))
        home = "/home/marguerite"
        talk(
            session, [f"cd {opened.root}/src", f"ls {tmp_path}/extra", f"cat {home}/.netrc", "marguerite@studio77: ok"]
        )
        with session.call("run") as call:
            call.exec(["sh", "-c", f"echo {home}; pwd"])
        names = local_redaction_policy({"HOME": home, "USER": "marguerite"}).names
        policy = RedactionPolicy(names=type(names)(homes=names.homes, users=names.users, hosts=("studio77",)))
        bundle = session.export(mode, policy=policy)
        whole = json.dumps(bundle)
        assert [
            one for one in (opened.root, str(tmp_path / "extra"), home, "marguerite", "studio77") if one in whole
        ] == []
        assert bundle["workspace"]["primary"] == "<root>"
        assert [one["path"] for one in bundle["workspace"]["additional_roots"]] == ["<root:1>"]


@pytest.mark.parametrize("user", ["replay", "source", "places", "metadata", "assistant", "sections", "id"])
def test_a_user_may_be_called_as_our_own_words(session: DurableSession, user: str) -> None:
    full(session)
    names = PrivateNames(users=(user,), hosts=(user,))
    assert (
        session.export(policy=RedactionPolicy(names=names))["transcript"]["sections"][0]["messages"][0]["role"]
        == "user"
    )
    parse_bundle(session.export(policy=RedactionPolicy(names=names)), now=SystemClock().now())


PAYLOAD = "the quick brown payload"


class TestReplayOnly:
    @pytest.mark.req("S3.bundle.replay_only", "HS10.withheld_by_schema")
    def test_a_payload_passes_under_no_key_at_all(self, session: DurableSession) -> None:
        for key in (
            "content",
            "data",
            "summary",
            "result",
            "text",
            "note",
            "custom",
            "metadata",
            "name",
            "id",
            "blocks",
        ):
            session.inject({"role": "user", "content": "x", key: PAYLOAD})
            session.inject({"role": "assistant", "content": [{"type": "text", key: PAYLOAD}], PAYLOAD: key})
            session.emit("note", {key: PAYLOAD, PAYLOAD: [key]}, text=PAYLOAD)
        session.inject({"role": PAYLOAD, "content": PAYLOAD, "tool_calls": PAYLOAD, "reasoning": [PAYLOAD]})
        session.inject({"role": "assistant", "content": "", "tool_calls": [call_of("c1", {PAYLOAD: PAYLOAD})]})
        session.set_scratchpad({PAYLOAD: PAYLOAD})
        session.set_system_prompt(PAYLOAD)
        with session.turn(PAYLOAD), session.call("run") as call:
            call.write_file("the quick brown payload.txt", PAYLOAD)
            call.exec(["echo", PAYLOAD])
        bundle = session.export("replay_only")
        assert [text for text in texts_in(bundle) if "quick" in text or "brown" in text] == []

    @pytest.mark.req("HS10.withheld_by_schema")
    def test_structure_stays(self, session: DurableSession) -> None:
        full(session)
        bundle, local = session.export("replay_only"), session.export("local")
        shapes = [
            [(one["role"], one.get("tool_call_id")) for one in section_of(b)["messages"]] for b in (bundle, local)
        ]
        assert shapes[0] == shapes[1]
        assert bundle["tools"]["calls"] == local["tools"]["calls"]
        assert bundle["replay"]["trace_spans"] == local["replay"]["trace_spans"]
        ended = bundle["replay"]["deterministic_events"][2]["payload"]
        assert ended["changes"][0]["path"] == "path:1"
        assert ended["changes"][0]["after"]["size"] == 12
        assert ended["effects"][0]["receipt"]["status"] == "ok"

    def test_null_values_stay_null(self, session: DurableSession) -> None:
        session.inject({"role": "user", "content": None, "name": None})
        assert section_of(session.export("replay_only"))["messages"] == [
            {"role": "user", "content": None, "name": None}
        ]
