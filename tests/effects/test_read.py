"""read_file, stat, exists, list_dir, blob.read: what they answer, to the field."""

from __future__ import annotations

import os
import tracemalloc
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mulligan.testing import Dir, File, Link
from mulligan.values.digest import digest_of
from tests.effects.effect_session import EffectSession, Fields, failed, text

LIMIT = 16_384


def base64(data: bytes) -> str:
    return "base64:" + b64encode(data).decode()


def blob(data: bytes) -> Fields:
    body = {"blob_ref": digest_of(data), "size_bytes": len(data), "preview_bytes": base64(data[:512])}
    return {"blob": body}


def read(effects: EffectSession, path: str, content: Fields, *, truncated: bool = False, **more: Any) -> Fields:
    """The whole receipt of a good read."""
    status = (effects.root / path).stat()
    body = {"status": "ok", "content": content, "truncated": truncated}
    return {**body, "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns, **more}


@pytest.mark.req("S1.effects.read_file", "S1.verify.read_file_paths", "D12.receipt_attributes")
class TestReadFile:
    @pytest.mark.req(
        "S1.read_file.ok",
        "S1.read_file.path",
        "S1.read_file.content_text",
        "S1.read_file.size_bytes",
        "S1.output.small_utf8_is_text",
        "S1.output.inline_text_shape",
        "S1.output.default_auto",
        "S1.output.auto_small_inline",
        "D9.payload_shapes",
        "D9.receipts_canonical",
    )
    def test_small_text_is_returned_inline(self, effects: EffectSession) -> None:
        effects.plant({"a.txt": "één\n"})
        assert effects.perform("host.fs.read_file", path="a.txt") == read(effects, "a.txt", text("één\n"))

    @pytest.mark.req("D9.tool_aliases", "D9.tool_params")
    @pytest.mark.parametrize("name", ["path", "file_path"])
    def test_a_tool_takes_file_path_for_path(self, effects: EffectSession, name: str) -> None:
        effects.plant({"a.txt": "x"})
        assert effects.perform("read_file", **{name: "a.txt"}) == read(effects, "a.txt", text("x"))

    def test_an_absolute_path_inside_the_root_is_read(self, effects: EffectSession) -> None:
        effects.plant({"d/a.txt": "x"})
        for path in (str(effects.root / "d/a.txt"), f"/{effects.root}/d/./../d//a.txt"):
            assert effects.perform("read_file", path=path) == read(effects, "d/a.txt", text("x"))

    @pytest.mark.req("D9.empty_file_text")
    def test_an_empty_file_is_empty_text(self, effects: EffectSession) -> None:
        effects.plant({"a": ""})
        assert effects.perform("read_file", path="a") == read(effects, "a", text(""))

    @pytest.mark.req("W27.read_keeps_crlf")
    def test_crlf_and_byte_order_mark_are_kept(self, effects: EffectSession) -> None:
        effects.plant({"a": b"\xef\xbb\xbfa\r\nb\r\n"})
        assert effects.perform("read_file", path="a") == read(effects, "a", text("\ufeffa\r\nb\r\n"))

    @pytest.mark.req("S1.read_file.content_bytes", "S1.output.inline_bytes_shape", "D9.read_no_encoding")
    def test_content_that_is_not_utf8_is_returned_as_bytes(self, effects: EffectSession) -> None:
        effects.plant({"a": b"\xff\x00"})
        content = {"inline_bytes": {"bytes": base64(b"\xff\x00")}}
        assert effects.perform("read_file", path="a") == read(effects, "a", content)

    @pytest.mark.req("S1.read_file.encoding")
    def test_bytes_can_be_asked_for(self, effects: EffectSession) -> None:
        effects.plant({"a": "é"})
        content = {"inline_bytes": {"bytes": base64("é".encode()[1:])}}
        expected = read(effects, "a", content)
        assert effects.perform("read_file", path="a", encoding="bytes", offset_bytes=1) == expected

    @pytest.mark.req("D9.read_invalid_utf8", "S1.read_file.error", "S1.read_file.error_code", "D9.error_message_always")
    def test_requested_utf8_for_other_bytes_is_an_error(self, effects: EffectSession) -> None:
        effects.plant({"a": b"ab\xff"})
        assert effects.refused("read_file", path="a", encoding="utf8") == failed("invalid_utf8", size_bytes=3)

    @pytest.mark.req("S1.read_file.offset_bytes", "S1.read_file.max_bytes", "S1.read_file.truncated")
    def test_a_byte_range_is_returned(self, effects: EffectSession) -> None:
        effects.plant({"a": "0123456789"})
        assert effects.perform("read_file", path="a", offset_bytes=2, max_bytes=3) == read(
            effects, "a", text("234"), truncated=True
        )
        assert effects.perform("read_file", path="a", offset_bytes=7, max_bytes=3) == read(effects, "a", text("789"))
        assert effects.perform("read_file", path="a", offset_bytes=99) == read(effects, "a", text(""))
        assert effects.perform("read_file", path="a", max_bytes=0) == read(effects, "a", text(""), truncated=True)

    @pytest.mark.req("D9.read_widened_range")
    def test_a_range_that_cuts_characters_is_widened_and_says_so(self, effects: EffectSession) -> None:
        effects.plant({"a": "aé€b"})
        expected = read(effects, "a", text("é€"), truncated=True, range={"offset_bytes": 1, "length_bytes": 5})
        assert effects.perform("read_file", path="a", offset_bytes=2, max_bytes=2) == expected
        assert effects.perform("read_file", path="a", offset_bytes=2, max_bytes=2, encoding="utf8") == expected

    def test_a_page_that_fits_inline_stays_inline_whatever_it_cuts(self, effects: EffectSession) -> None:
        data = ("ab" + "€" * 20_000).encode()
        effects.plant({"a": data})
        wanted = data[:LIMIT].decode(errors="ignore")
        expected = read(
            effects, "a", text(wanted), truncated=True, range={"offset_bytes": 0, "length_bytes": len(wanted.encode())}
        )
        assert effects.perform("read_file", path="a", max_bytes=LIMIT) == expected
        assert effects.perform("read_file", path="a", max_bytes=LIMIT, output_mode="require_inline") == expected

    @pytest.mark.req("D9.read_lines")
    def test_lines_are_counted_from_0(self, effects: EffectSession) -> None:
        effects.plant({"a": "0\n1\r\n2\n3"})
        found = effects.perform("read_file", path="a", offset_lines=1, max_lines=2)
        assert found == read(effects, "a", text("1\r\n2\n"), truncated=True, range={"offset_lines": 1, "lines": 2})
        found = effects.perform("read_file", path="a", offset_lines=3)
        assert found == read(effects, "a", text("3"), range={"offset_lines": 3, "lines": 1})
        found = effects.perform("read_file", path="a", offset_lines=9)
        assert found == read(effects, "a", text(""), range={"offset_lines": 9, "lines": 0})

    @pytest.mark.req("D9.read_widened_range")
    def test_lines_cut_by_a_limit_hold_no_half_character(self, effects: EffectSession) -> None:
        effects.plant({"a": "é" * 10})
        found = effects.perform("read_file", path="a", max_lines=1, max_bytes=5)
        where = {"offset_lines": 0, "lines": 1}
        assert found == read(effects, "a", text("ééé"), truncated=True, range={**where, "length_bytes": 6})
        found = effects.within({"max_read_bytes": 5}).perform("read_file", path="a", max_lines=1)
        assert found == read(effects, "a", text("éé"), truncated=True, range=where)

    @pytest.mark.req("D9.read_no_encoding", "D9.read_invalid_utf8")
    @pytest.mark.parametrize("data", [b"ab\xff", b"\xfe\xff", b"ab\xe6\x97", b"ab\xe6", b"\xff\xe6\x97\xa5"])
    def test_lines_cut_by_a_limit_lose_no_byte_that_is_not_utf8(self, effects: EffectSession, data: bytes) -> None:
        effects.plant({"a": data + b"\n\n"})
        expected = read(
            effects,
            "a",
            {"inline_bytes": {"bytes": base64(data)}},
            truncated=True,
            range={"offset_lines": 0, "lines": 1},
        )
        limits: Fields = {"max_lines": 9, "max_bytes": len(data)}
        assert effects.perform("read_file", path="a", **limits) == expected
        assert effects.within({"max_read_bytes": len(data)}).perform("read_file", path="a", max_lines=9) == expected
        refusal = effects.refused("read_file", path="a", encoding="utf8", **limits)
        assert refusal == failed("invalid_utf8", size_bytes=len(data) + 2)

    @pytest.mark.req("W27.negative_offset", "D9.invalid_params", "D18.bad_input_changes_nothing")
    @pytest.mark.parametrize(
        "params",
        [
            {},
            {"path": 3},
            {"path": "a", "offset_bytes": -1},
            {"path": "a", "max_bytes": True},
            {"path": "a", "max_bytes": "3"},
            {"path": "a", "max_bytes": 2**63},
            {"path": "a", "offset_lines": -1},
            {"path": "a", "offset_lines": 0, "offset_bytes": 0},
            {"path": "a", "file_path": "a"},
            {"path": "a", "colour": "red"},
            {"path": "a", "session_id": "other"},
        ],
    )
    def test_invalid_parameters_are_refused(self, effects: EffectSession, params: Fields) -> None:
        effects.plant({"a": "x"})
        assert effects.refused("read_file", **params) == failed("invalid_params")

    def test_unknown_encodings_and_modes_have_their_own_codes(self, effects: EffectSession) -> None:
        effects.plant({"a": "x"})
        assert effects.refused("read_file", path="a", encoding="latin-1") == failed("invalid_encoding")
        assert effects.refused("read_file", path="a", output_mode="blob") == failed("invalid_output_mode")

    @pytest.mark.req("S1.read_file.not_found")
    @pytest.mark.parametrize("path", ["no", "no/such", "a/below-a-file", "dangling"])
    def test_a_missing_file_is_not_found(self, effects: EffectSession, path: str) -> None:
        effects.plant({"a": "x", "dangling": Link("nowhere")})
        assert effects.refused("read_file", path=path) == failed("path_not_found", "not_found")

    @pytest.mark.req("S1.read_file.is_directory")
    def test_a_directory_is_refused(self, effects: EffectSession) -> None:
        effects.plant({"d": None})
        for path in ("d", ".", "d/"):
            assert effects.refused("read_file", path=path) == failed("is_directory", "is_directory")

    @pytest.mark.req(
        "S1.read_file.content_blob",
        "S1.output.auto_large_blob",
        "S1.output.blob_shape",
        "S1.output.blob_deterministic",
        "S1.adapter.large_as_blob",
        "D9.inline_limit",
        "D9.preview_512",
    )
    def test_more_than_the_inline_limit_is_a_blob(self, effects: EffectSession) -> None:
        data = os.urandom(LIMIT + 1)
        effects.plant({"fits": data[:LIMIT], "large": data})
        assert "inline_bytes" in effects.perform("read_file", path="fits")["content"]
        for _ in range(2):
            assert effects.perform("read_file", path="large") == read(effects, "large", blob(data))

    @pytest.mark.req("S1.output.require_inline_fails", "S1.output.modes", "S1.read_file.output_mode")
    def test_require_inline_over_the_limit_fails(self, effects: EffectSession) -> None:
        effects.plant({"fits": "x" * LIMIT, "large": "x" * (LIMIT + 1)})
        assert effects.perform("read_file", path="fits", output_mode="require_inline")["status"] == "ok"
        expected = failed("inline_required_too_large", size_bytes=LIMIT + 1)
        assert effects.refused("read_file", path="large", output_mode="require_inline") == expected
        assert effects.refused("read_file", path="large", output_mode="require_inline", max_lines=1) == expected

    @pytest.mark.req("D9.read_bounded_memory")
    @pytest.mark.parametrize("more", [{}, {"offset_bytes": 2**29}, {"max_lines": 3}, {"encoding": "bytes"}])
    def test_a_part_of_a_huge_file_takes_little_memory(self, effects: EffectSession, more: Fields) -> None:
        with open(effects.root / "huge", "wb") as file:
            file.truncate(2**30)
        with effects.session.call() as call:
            tracemalloc.start()
            found = call.read_file("huge", max_bytes=LIMIT, **more)
            refused = call.read_file("huge", output_mode="require_inline")
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert found.ok and peak < 2**20
        assert (refused.error_code, refused.size_bytes) == ("inline_required_too_large", 2**30)

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.text(max_size=12), st.integers(0, 40), st.integers(0, 40))
    def test_a_read_returns_the_requested_bytes_widened_to_whole_characters(
        self, effects: EffectSession, content: str, offset: int, length: int
    ) -> None:
        data = content.encode()
        (effects.root / "a").write_bytes(data)
        found = effects.perform("read_file", path="a", offset_bytes=offset, max_bytes=length)
        got = found["content"]["inline_text"]["text"].encode()
        place = found.get("range", {"offset_bytes": min(offset, len(data)), "length_bytes": len(got)})
        start, end = place["offset_bytes"], place["offset_bytes"] + place["length_bytes"]
        assert data[start:end] == got and found["truncated"] == (end < len(data))
        assert start <= min(offset, len(data)) and end >= min(offset + length, len(data))


@pytest.mark.req("S1.effects.stat", "S1.effects.exists")
class TestStat:
    def test_stat_of_a_file_and_a_directory(self, effects: EffectSession) -> None:
        effects.plant({"f": File(b"abc", 0o640), "d": Dir(0o750), "link": Link("f")})
        status = (effects.root / "f").stat()
        body = {"status": "ok", "exists": True, "is_dir": False, "size_bytes": 3, "mode": 0o640}
        for path in ("f", "link"):
            assert effects.perform("stat", path=path) == {**body, "mtime_ns": status.st_mtime_ns}
        mtime_ns = (effects.root / "d").stat().st_mtime_ns
        body = {"status": "ok", "exists": True, "is_dir": True, "size_bytes": 0, "mode": 0o750, "mtime_ns": mtime_ns}
        assert effects.perform("host.fs.stat", path="d") == body

    def test_stat_of_a_missing_path(self, effects: EffectSession) -> None:
        effects.plant({"f": "", "dangling": Link("gone")})
        for path in ("no", "no/no", "f/no", "dangling"):
            assert effects.refused("stat", path=path) == failed("path_not_found", "not_found", exists=False)
            assert effects.perform("host.fs.exists", path=path) == {"status": "ok", "exists": False}

    def test_exists_of_every_kind_of_path(self, effects: EffectSession) -> None:
        effects.plant({"f": "", "d": None, "link": Link("d")})
        for path in ("f", "d", "link", "."):
            assert effects.perform("exists", path=path) == {"status": "ok", "exists": True}


@pytest.mark.req("S1.effects.list_dir", "S1.output.all_large_effects")
class TestListDir:
    @pytest.mark.req("AR.list_dir_bad_symlink")
    def test_names_in_byte_order_with_directories_marked(self, effects: EffectSession) -> None:
        effects.plant({"b": "", "a/x": "", "B": "", "é": "", ".h": "", "bad": Link("gone"), "to-a": Link("a")})
        expected = {"status": "ok", "entries": text(".h\nB\na/\nb\nbad\nto-a\né"), "count": 7, "truncated": False}
        assert effects.perform("list_dir") == {**expected, "summary_text": "7 entries"}
        expected = {"status": "ok", "entries": text("x"), "count": 1, "truncated": False, "summary_text": "1 entry"}
        assert effects.perform("host.fs.list_dir", path="to-a") == expected

    def test_an_empty_directory_has_no_names(self, effects: EffectSession) -> None:
        expected = {"status": "ok", "entries": text(""), "count": 0, "truncated": False, "summary_text": "0 entries"}
        assert effects.perform("list_dir") == expected

    def test_names_that_are_not_one_line_of_utf8_can_be_read_back(self, effects: EffectSession) -> None:
        effects.plant({"\udcff": "1", "a\nb": "2", "base64:x": "3"})
        names = effects.perform("list_dir")["entries"]["inline_text"]["text"].split("\n")
        assert names == [base64(b"a\nb"), base64(b"base64:x"), base64(b"\xff")]
        found = [effects.perform("read_file", path=name)["content"] for name in names]
        assert found == [text("2"), text("3"), text("1")]

    def test_such_directories_can_be_read_back_with_their_slash(self, effects: EffectSession) -> None:
        effects.plant({"d\udcfe/f": "", "a\nb/f": "", "plain/f": "", "base64:ff/f": ""})
        names = effects.perform("list_dir")["entries"]["inline_text"]["text"].split("\n")
        assert len(names) == 4 and all(name.endswith("/") for name in names)
        assert [effects.perform("list_dir", path=name)["entries"] for name in names] == [text("f")] * 4

    def test_the_limit_truncates(self, effects: EffectSession) -> None:
        effects.plant({f"{number:03}": "" for number in range(101)})
        found = effects.perform("list_dir")
        assert (found["count"], found["truncated"]) == (100, True)
        found = effects.perform("list_dir", max_results=101)
        assert (found["count"], found["truncated"]) == (101, False)
        assert effects.perform("list_dir", max_results=0)["entries"] == text("")

    def test_large_listings_are_blobs(self, effects: EffectSession) -> None:
        names = [f"{number:03}" + "n" * 200 for number in range(90)]
        effects.plant(dict.fromkeys(names, ""))
        data = "\n".join(names).encode()
        assert effects.perform("list_dir")["entries"] == blob(data)
        refusal = effects.refused("list_dir", output_mode="require_inline")
        assert refusal == failed("inline_required_too_large")

    def test_a_file_is_refused(self, effects: EffectSession) -> None:
        effects.plant({"f": ""})
        assert effects.refused("list_dir", path="f") == failed("not_directory")
        assert effects.refused("list_dir", path="no") == failed("path_not_found", "not_found")
        assert effects.refused("list_dir", output_mode="x") == failed("invalid_output_mode")


@pytest.mark.req("D9.blob_read")
class TestBlobRead:
    def test_pages_put_together_are_the_blob(self, effects: EffectSession) -> None:
        data = ("€uro\n" * 8_000).encode()
        effects.plant({"a": data})
        ref = effects.perform("read_file", path="a")["content"]["blob"]["blob_ref"]
        found, at = "", 0
        while True:
            page = effects.perform("blob.read", blob_ref=ref, offset_bytes=at)
            assert page["size_bytes"] == len(data)
            found += page["content"]["inline_text"]["text"]
            at = len(found.encode())
            if not page["truncated"]:
                break
        assert found.encode() == data

    def test_a_page_is_what_was_asked_for(self, effects: EffectSession) -> None:
        effects.plant({"a": "x" * 20_000 + "é!"})
        ref = effects.perform("read_file", path="a")["content"]["blob"]["blob_ref"]
        body = {"status": "ok", "size_bytes": 20_003}
        page = effects.perform("blob.read", blob_ref=ref, offset_bytes=19_999, max_bytes=1)
        assert page == {**body, "content": text("x"), "truncated": True}
        page = effects.perform("blob.read", blob_ref=ref, offset_bytes=20_001, max_bytes=99)
        shown = {"offset_bytes": 20_000, "length_bytes": 3}
        assert page == {**body, "content": text("é!"), "truncated": False, "range": shown}
        page = effects.perform("blob.read", blob_ref=ref, offset_bytes=99_999)
        assert page == {**body, "content": text(""), "truncated": False}

    def test_a_page_that_cuts_characters_is_widened_and_says_so(self, effects: EffectSession) -> None:
        data = ("é" * 10_000).encode()
        effects.plant({"a": data})
        ref = effects.perform("read_file", path="a")["content"]["blob"]["blob_ref"]
        body = {"status": "ok", "size_bytes": len(data), "truncated": True}
        for (offset, most), shown in {
            (1, 3): (0, 4),
            (1, 1): (0, 2),
            (3, 2): (2, 4),
            (0, LIMIT + 1): (0, LIMIT),
        }.items():
            page = effects.perform("blob.read", blob_ref=ref, offset_bytes=offset, max_bytes=most)
            place = {"offset_bytes": shown[0], "length_bytes": shown[1]}
            assert page == {**body, "content": text("é" * (shown[1] // 2)), "range": place}

    def test_a_limit_is_not_exceeded_to_complete_a_character(self, effects: EffectSession) -> None:
        effects.plant({"a": "é" * 10_000})
        ref = effects.within().perform("read_file", path="a")["content"]["blob"]["blob_ref"]
        for limit in ("max_read_bytes", "max_inline_bytes"):
            page = effects.within({limit: 3}).perform("blob.read", blob_ref=ref, offset_bytes=1, max_bytes=99)
            assert (page["content"], page["range"]) == (text("é"), {"offset_bytes": 0, "length_bytes": 2})

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.text(max_size=12), st.integers(0, 40), st.integers(1, 40))
    def test_a_page_equals_reading_the_file_at_that_offset(
        self, effects: EffectSession, content: str, offset: int, length: int
    ) -> None:
        effects.plant({"a": content + "x" * (LIMIT + 1)})
        ref = effects.perform("read_file", path="a")["content"]["blob"]["blob_ref"]
        read = effects.perform("read_file", path="a", offset_bytes=offset, max_bytes=length)
        del read["mtime_ns"]
        assert effects.perform("blob.read", blob_ref=ref, offset_bytes=offset, max_bytes=length) == read

    @pytest.mark.req("D18.foreign_blobs")
    def test_only_blobs_handed_to_this_session_exist(self, effects: EffectSession) -> None:
        data = b"secret" * 5_000
        effects.plant({"a": data})
        other = EffectSession(effects.workspace, effects.workspace.session("other"))
        ref = other.perform("read_file", path="a")["content"]["blob"]["blob_ref"]
        assert other.perform("blob.read", blob_ref=ref)["status"] == "ok"
        assert effects.refused("blob.read", blob_ref=ref) == failed("unknown_blob")
        content = {"blob_ref": {"blob_ref": ref}}
        assert effects.refused("write_file", path="b", content=content) == failed("invalid_content")
        assert effects.refused("apply_patch", patch=content) == failed("invalid_patch")
        assert effects.perform("read_file", path="a")["status"] == "ok"
        assert effects.perform("blob.read", blob_ref=ref)["status"] == "ok"

    @pytest.mark.parametrize(
        "ref", ["", "x", "sha256:", "sha256:" + "0" * 64, "SHA256:" + "0" * 64, "../../etc/passwd"]
    )
    def test_an_invalid_blob_reference_is_refused(self, effects: EffectSession, ref: str) -> None:
        assert effects.refused("blob.read", blob_ref=ref) == failed("unknown_blob")

    def test_inside_one_call_a_blob_can_be_read_at_once(self, effects: EffectSession) -> None:
        effects.plant({"a": "x" * 20_000})
        with effects.session.call() as call:
            ref = call.read_file("a").content["blob"]["blob_ref"]
            assert call.read_blob(ref, max_bytes=3).content == text("xxx")
