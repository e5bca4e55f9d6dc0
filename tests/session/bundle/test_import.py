"""Bundles come back as they went, and what is no bundle does not get in."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mulligan.api as api
from mulligan.effects.session import DurableSession
from mulligan.session.bundle.format import MODES, parse_bundle, with_bundle_id
from mulligan.store.verify import verify
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import SystemClock
from mulligan.values.errors import MulliganError
from tests.session.bundle.example_sessions import CORPUS, Json, elsewhere, full, section_of, survivors, talk

NOW = SystemClock().now()


class TestComingBack:
    @pytest.mark.req("D11.bundle_import_validates", "D11.bundle_modes")
    @pytest.mark.parametrize("mode", MODES)
    def test_an_imported_session_exports_as_the_same_bundle(
        self, session: DurableSession, tmp_path: Path, mode: str
    ) -> None:
        full(session)
        talk(session, [CORPUS[0].text, "/home/marguerite/x"])
        bundle = session.export(mode)
        with elsewhere(tmp_path) as other:
            name = other.sessions.import_bundle(encode(bundle))
            again = other.sessions.get(name).export(mode)
            assert (name, again["bundle_id"]) == ("s", bundle["bundle_id"])
            assert again == bundle
            assert list(verify(other.open_root.ledger.store, other.open_root.ledger.journal.schema)) == []

    def test_the_transcript_is_in_the_context_window_as_it_was(self, session: DurableSession, tmp_path: Path) -> None:
        full(session)
        with elsewhere(tmp_path) as other:
            found = other.sessions.get(other.sessions.import_bundle(session.export("local")))
            assert found.messages() == session.messages()
            assert found.message_ids() == session.message_ids()
            kept = [{key: one[key] for key in ("id", "kind", "at")} for one in session.events()]
            assert [{key: one[key] for key in ("id", "kind", "at")} for one in found.events()] == kept
            assert found.scratchpad() == {"goals": ["ship"]}
            assert found.for_model().system == session.for_model().system

    @pytest.mark.parametrize("mode", MODES)
    def test_a_compacted_trimmed_or_forked_session_exports_again_as_the_same_bundle(
        self, session: DurableSession, tmp_path: Path, mode: str
    ) -> None:
        talk(session, [f"prompt {number}" for number in range(12)])
        session.compact(keep_last=6)
        child = session.fork()
        child.inject({"role": "user", "content": "more"})
        child.trim(5)
        child.inject({"role": "user", "content": "even more"})
        bundle = child.export(mode)
        with elsewhere(tmp_path) as other:
            found = other.sessions.get(other.sessions.import_bundle(bundle))
            assert found.length() == child.length() == 6
            assert found.export(mode) == bundle

    def test_who_and_where_it_is_imported_does_not_matter(
        self, session: DurableSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        talk(session, ["ask marguerite about it"])
        bundle = session.export()
        monkeypatch.setenv("USER", "marguerite")
        with elsewhere(tmp_path) as other:
            found = other.sessions.get(other.sessions.import_bundle(bundle))
            assert found.export() == bundle
            found.inject({"role": "user", "content": "marguerite again"})
            assert "marguerite" not in json.dumps(section_of(found.export())["messages"][-1])

    def test_an_imported_session_continues_and_keeps_its_earlier_redactions(
        self, session: DurableSession, tmp_path: Path
    ) -> None:
        talk(session, [CORPUS[0].text])
        bundle = session.export()
        with elsewhere(tmp_path) as other:
            found = other.sessions.get(other.sessions.import_bundle(bundle))
            found.inject({"role": "user", "content": f"also {CORPUS[9].secret}"})
            with found.call("write") as call:
                call.write_file("a.txt", "x")
            again = found.export()
        assert len(section_of(again)["messages"]) == len(section_of(bundle)["messages"]) + 1
        assert again["redaction"]["entries"][: len(bundle["redaction"]["entries"])] == bundle["redaction"]["entries"]
        assert again["redaction"]["entries"][-1]["replacement"].startswith("<redacted:")
        assert [one["status"] for one in again["tools"]["calls"] if "status" in one] == ["committed"]
        assert survivors(again) == []

    @pytest.mark.req("HS9.bundle_files_optional")
    def test_a_local_bundle_may_carry_the_bodies_of_files(self, session: DurableSession, tmp_path: Path) -> None:
        full(session)
        plain, whole = session.export("local"), session.export("local", content=True)
        assert [set(one) for one in plain["content"]["blobs"]] == [{"digest", "size"}]
        assert [set(one) for one in whole["content"]["blobs"]] == [{"digest", "size", "body"}]
        digest = whole["content"]["blobs"][0]["digest"]
        with elsewhere(tmp_path) as other:
            name = other.sessions.import_bundle(whole)
            assert other.open_root.ledger.blobs.read(digest) == b"plain words\n"
            assert other.sessions.get(name).export("local") == whole

    @pytest.mark.parametrize("mode", ["sanitized", "replay_only"])
    def test_bodies_go_into_no_other_bundle(self, session: DurableSession, mode: str) -> None:
        full(session)
        with pytest.raises(MulliganError):
            session.export(mode, content=True)

    def test_another_id_can_be_chosen_and_a_taken_one_is_refused(
        self, opened: api.Mulligan, session: DurableSession
    ) -> None:
        full(session)
        bundle = session.export("local")
        assert opened.sessions.import_bundle(bundle, name="copy") == "copy"
        assert opened.sessions.get("copy").messages() == session.messages()
        for name in (None, "copy", "s"):
            with pytest.raises(MulliganError) as caught:
                opened.sessions.import_bundle(bundle, name=name)
            assert caught.value.code == "session_exists"

    def test_imported_calls_are_evidence_and_not_history_here(self, session: DurableSession, tmp_path: Path) -> None:
        full(session)
        with elsewhere(tmp_path) as other:
            found = other.sessions.get(other.sessions.import_bundle(session.export("local", content=True)))
            with pytest.raises(MulliganError) as caught:
                found.undo()
            assert caught.value.code == "nothing_to_undo"
            view = found.view()
            assert (view["workspace_anchor"]["primary"], view["live_clients"]) == (other.root, [])

    @settings(max_examples=25)
    @given(st.data())
    def test_any_transcript_comes_back(self, data: st.DataObject) -> None:
        value = st.recursive(
            st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=9), _containers, max_leaves=6
        )
        step = st.sampled_from(["say", "say", "say", "emit", "trim", "compact", "pad", "reset", "close"])
        mode = data.draw(st.sampled_from(MODES))
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            first, second = api.open(one, store="memory:"), api.open(two, store="memory:")
            session = first.session("s")
            for what in data.draw(st.lists(step, max_size=12)):
                _do(session, what, data, value)
            bundle = session.export(mode)
            found = second.session(second.sessions.import_bundle(bundle))
            assert found.export(mode) == bundle
            assert found.length() == session.length()
            first.close()
            second.close()


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)


def _do(session: DurableSession, step: str, data: st.DataObject, value: st.SearchStrategy[Any]) -> None:
    if step == "say":
        role = data.draw(st.sampled_from(["user", "assistant", "tool", "tool_result", "odd role"]))
        session.inject({"role": role, "content": data.draw(value), "extra": data.draw(value)})
    elif step == "emit":
        session.emit("note", {"value": data.draw(value)}, text=data.draw(st.text(max_size=9)))
    elif step == "trim":
        session.trim(data.draw(st.integers(0, 3)))
    elif step == "compact":
        session.compact(keep_last=data.draw(st.integers(0, 3)))
    elif step == "pad":
        session.set_scratchpad({"value": data.draw(value)})
    elif step == "reset":
        session.reset()
    else:
        session.close("done")
        session.reopen()


def broken(session: DurableSession, change: Any) -> Json:
    """A bundle after a change; sealed again, so that only the change is wrong."""
    bundle: Json = decode(encode(session.export("local")))
    change(bundle)
    return with_bundle_id(bundle) if "bundle_id" in bundle else bundle


def _set(path: str, value: Any) -> Any:
    def change(bundle: Json) -> None:
        *steps, last = [int(one) if one.isdigit() else one for one in path.split(".")]
        at: Any = bundle
        for one in steps:
            at = at[one]
        at[last] = value

    return change


def _drop(path: str) -> Any:
    def change(bundle: Json) -> None:
        *steps, last = path.split(".")
        at: Any = bundle
        for one in steps:
            at = at[one]
        del at[last]

    return change


SECTION = "transcript.sections.0"


class TestJudgingBundles:
    @pytest.mark.req("D11.bundle_import_validates")
    @pytest.mark.parametrize(
        ("change", "problem", "path"),
        [
            (_drop("bundle_id"), "missing_required", "$.bundle_id"),
            (_drop("replay"), "missing_required", "$.replay"),
            (_drop("replay.deterministic_events"), "missing_required", "$.replay.deterministic_events"),
            (_set("tools", []), "missing_required", "$.tools.schemas"),
            (_set("_type", "other"), "invalid_type", "$._type"),
            (_set("redaction.mode", "open"), "invalid_form", "$.redaction.mode"),
            (_set("source.started_at", "soon"), "invalid_form", "$.source.started_at"),
            (_set("source.started_at", "9999-01-01T00:00:00.000000Z"), "invalid_form", "$.source.started_at"),
            (_set("transcript.sections", []), "invalid_form", "$.transcript.sections"),
            (_set(f"{SECTION}.messages.0", {"content": "x"}), "invalid_form", "$.transcript.sections[0].messages[0]"),
            (_set(f"{SECTION}.events.0.kind", " "), "invalid_form", "$.transcript.sections[0].events[0]"),
            (_set(f"{SECTION}.events.0.at", "x"), "invalid_form", "$.transcript.sections[0].events[0].at"),
            (_set(f"{SECTION}.events.0.metadata", []), "invalid_form", "$.transcript.sections[0].events[0]"),
            (_set(f"{SECTION}.places", []), "invalid_form", "$.transcript.sections[0].places"),
            (_set(f"{SECTION}.places.0.event", 99), "invalid_form", "$.transcript.sections[0].places[0]"),
            (_set(f"{SECTION}.places.0.event", True), "invalid_form", "$.transcript.sections[0].places[0]"),
            (_set(f"{SECTION}.places.1.event", 1), "invalid_form", "$.transcript.sections[0].places"),
            (_set("content.blobs", None), "invalid_form", "$.content.blobs"),
            (_set("content.blobs.0.body", "###"), "invalid_form", "$.content.blobs[0]"),
            (_set("content.blobs.0.body", "eA=="), "digest_mismatch", "$.content.blobs[0]"),
            (_set("content.blobs.0.digest", "not a digest"), "invalid_digest", "$.content.blobs[0]"),
            (_set("content.blobs.0.digest", "sha256:" + "A" * 64), "invalid_digest", "$.content.blobs[0]"),
            (_set("content.blobs.0.digest", 7), "invalid_digest", "$.content.blobs[0]"),
            (_set("content.blobs.0.size", 1_000_000), "size_mismatch", "$.content.blobs[0]"),
            (_set("content.blobs.0.size", -1), "invalid_size", "$.content.blobs[0]"),
            (_set("content.blobs.0.size", "1"), "invalid_size", "$.content.blobs[0]"),
            (_set("content.blobs.0.size", True), "invalid_size", "$.content.blobs[0]"),
            (
                _set("replay.replay_fixture.message_digests.0", "sha256:x"),
                "invalid_digest",
                "$.replay.replay_fixture.message_digests[0]",
            ),
            (_set("tools.calls.0.args_hash", "x"), "invalid_digest", "$.tools.calls[0].args_hash"),
            (_set("tools.calls.0.result", {"digest": "x"}), "invalid_digest", "$.tools.calls[0].result.digest"),
            (_set("tools.calls.0.result", {"bytes": -1}), "invalid_size", "$.tools.calls[0].result.bytes"),
        ],
    )
    def test_an_error_in_a_bundle_is_reported_with_its_path(
        self, opened: api.Mulligan, session: DurableSession, change: Any, problem: str, path: str
    ) -> None:
        full(session)
        with pytest.raises(MulliganError) as caught:
            opened.sessions.import_bundle(encode(broken(session, change)), name="new")
        details = caught.value.details
        assert (caught.value.code, details["problem"], details["path"]) == ("invalid_bundle", problem, path)
        assert [one["id"] for one in opened.sessions.list()] == ["s"]

    @pytest.mark.req("D11.bundle_import_validates")
    def test_a_bundle_that_was_changed_is_refused(self, opened: api.Mulligan, session: DurableSession) -> None:
        full(session)
        bundle = session.export("local")
        section_of(bundle)["messages"][0]["content"] = "something else"
        with pytest.raises(MulliganError) as caught:
            opened.sessions.import_bundle(bundle, name="new")
        assert caught.value.details["problem"] == "digest_mismatch"

    @pytest.mark.parametrize("version", [0, 2, True, "1", None])
    def test_other_versions_are_refused(self, opened: api.Mulligan, session: DurableSession, version: Any) -> None:
        full(session)
        with pytest.raises(MulliganError) as caught:
            opened.sessions.import_bundle(broken(session, _set("schema_version", version)), name="new")
        assert (caught.value.code, caught.value.details["supported"]) == ("unsupported_bundle_version", 1)

    @pytest.mark.req("HS11.secret_not_echoed")
    def test_a_shared_bundle_with_a_secret_is_refused_and_not_shown(
        self, opened: api.Mulligan, session: DurableSession
    ) -> None:
        full(session)
        secret = next(one for one in CORPUS if one.kind == "github_classic").secret
        section = broken(session, _set(f"{SECTION}.messages.0.content", secret))
        with pytest.raises(MulliganError) as caught:
            opened.sessions.import_bundle(
                with_bundle_id({**section, "redaction": {**section["redaction"], "mode": "sanitized"}})
            )
        assert caught.value.code == "unredacted_secret"
        assert secret[:10] not in f"{caught.value} {caught.value.details}"
        assert opened.sessions.import_bundle(section, name="mine") == "mine"

    def test_the_order_is_parts_type_version_secrets_form(self, session: DurableSession) -> None:
        full(session)
        secret = next(one for one in CORPUS if one.kind == "github_classic").secret
        bundle: Json = decode(encode(session.export("sanitized")))
        faults: list[tuple[Any, str]] = [
            (_set("source.started_at", "never"), "invalid_bundle"),
            (_set(f"{SECTION}.messages.0.content", secret), "unredacted_secret"),
            (_set("schema_version", 9), "unsupported_bundle_version"),
            (_set("_type", "other"), "invalid_bundle"),
            (_drop("replay.replay_fixture"), "invalid_bundle"),
            (_drop("metadata"), "invalid_bundle"),
        ]
        told = []
        for change, _ in faults:
            change(bundle)
            with pytest.raises(MulliganError) as caught:
                parse_bundle(bundle, now=NOW)
            told.append((caught.value.code, caught.value.details.get("path")))
        assert told == [
            ("invalid_bundle", "$.source.started_at"),
            ("unredacted_secret", "$.transcript.sections[0].messages[0].content"),
            ("unsupported_bundle_version", None),
            ("invalid_bundle", "$._type"),
            ("invalid_bundle", "$.replay.replay_fixture"),
            ("invalid_bundle", "$.metadata"),
        ]

    @pytest.mark.parametrize("data", [b"", b"[]", b"{", b"null", b'"x"', b"\xff\xfe", b"[" * 5_000, b'{"a":1e999}'])
    def test_data_that_is_no_bundle_is_refused(self, opened: api.Mulligan, data: bytes) -> None:
        with pytest.raises(MulliganError) as caught:
            opened.sessions.import_bundle(data)
        assert caught.value.code == "invalid_bundle"

    @settings(max_examples=60)
    @given(st.data())
    def test_a_bundle_with_any_part_replaced_is_refused_or_imported_whole(self, data: st.DataObject) -> None:
        bundle: Json = decode(encode(example()))
        at: Any = bundle
        for _ in range(data.draw(st.integers(1, 6))):
            keys = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
            if not keys:
                break
            parent, key = at, data.draw(st.sampled_from(keys))
            at = at[key]
        parent[key] = data.draw(st.none() | st.integers(-9, 9) | st.text(max_size=5) | st.just([]) | st.just({}))
        with tempfile.TemporaryDirectory() as root, api.open(root, store="memory:") as here_:
            try:
                name = here_.sessions.import_bundle(with_bundle_id(bundle))
            except MulliganError as error:
                assert error.code in ("invalid_bundle", "unsupported_bundle_version", "invalid_id", "invalid_params")
                assert here_.sessions.list() == []
            else:
                found = here_.sessions.get(name)
                assert found.length() == len(section_of(bundle)["messages"])
                found.inject({"role": "user", "content": "goes on"})
                assert [found.export(mode)["redaction"]["mode"] for mode in MODES] == list(MODES)


@cache
def example() -> Json:
    with tempfile.TemporaryDirectory() as root, api.open(root, store="memory:") as first:
        session = first.session("s")
        full(session)
        session.set_workspace_anchor({"primary": root})
        session.compact(keep_last=2)
        return session.export("local", content=True)
