"""Entries and changes: sameness, kinds, and their JSON."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.values.canonical import decode, encode
from mulligan.values.digest import digest_of
from mulligan.values.entries import (
    ABSENT,
    Change,
    DirEntry,
    Entry,
    FileEntry,
    SymlinkEntry,
    change_to_json,
    entry_from_json,
    entry_to_json,
    kind_of,
    kind_of_change,
    same_content,
    same_state,
)
from mulligan.values.errors import MulliganError
from mulligan.values.paths import RepoPath, from_wire, path_from_bytes

modes = st.integers(0, 0o7777)
times = st.integers(-(2**62), 2**62)
attributes = st.dictionaries(
    st.text("abc", min_size=1).map("user.".__add__),
    st.binary(max_size=4).map(lambda b: b64encode(b).decode()),
    max_size=2,
).map(lambda found: tuple(sorted(found.items())))
targets = (
    st.binary(min_size=1, max_size=12).filter(lambda b: 0 not in b).map(lambda b: b.decode("utf-8", "surrogateescape"))
)
files = st.builds(
    FileEntry,
    digest=st.binary(max_size=3).map(digest_of),
    size=st.integers(0, 2**62),
    mode=modes,
    mtime_ns=times,
    xattrs=attributes,
    link_group=st.none() | st.just("g1"),
)
entries: st.SearchStrategy[Entry] = (
    st.just(ABSENT) | files | st.builds(SymlinkEntry, targets) | st.builds(DirEntry, modes, times, attributes)
)
paths = st.sampled_from([b"a", b"d/\xff", b"base64:x"]).map(path_from_bytes)


@pytest.mark.req("D2.entry_kinds", "D2.entry_file_fields")
@given(entries)
def test_an_entry_survives_canonical_json(entry: Entry) -> None:
    assert entry_from_json(decode(encode(entry_to_json(entry)))) == entry


@given(st.builds(Change, paths, entries, entries, st.none() | paths))
def test_a_change_survives_canonical_json(change: Change) -> None:
    body = decode(encode(change_to_json(change)))
    origin = from_wire(body["from"]) if "from" in body else None
    before, after = entry_from_json(body["before"]), entry_from_json(body["after"])
    assert Change(from_wire(body["path"]), before, after, origin) == change


@given(entries, entries)
def test_same_state_is_same_content_and_more(one: Entry, other: Entry) -> None:
    assert same_state(one, one) and same_content(one, one)
    assert same_content(one, other) or not same_state(one, other)
    assert kind_of(one) == kind_of(other) or not same_content(one, other)


FILE = FileEntry(digest_of(b"x"), 1, 0o644, 5)


@pytest.mark.parametrize(
    ("other", "content", "state"),
    [
        (FILE, True, True),
        (replace(FILE, mtime_ns=9, link_group="g"), True, True),
        (replace(FILE, mode=0o755), True, False),
        (replace(FILE, xattrs=(("user.a", ""),)), True, False),
        (replace(FILE, digest=digest_of(b"y")), False, False),
        (SymlinkEntry("x"), False, False),
        (DirEntry(0o644), False, False),
        (ABSENT, False, False),
    ],
)
def test_same_content_and_same_state_compare_the_right_fields(other: Entry, content: bool, state: bool) -> None:
    assert (same_content(FILE, other), same_state(FILE, other)) == (content, state)


@pytest.mark.parametrize(
    ("before", "after", "origin", "kind"),
    [
        (ABSENT, FILE, None, "created"),
        (FILE, ABSENT, None, "deleted"),
        (FILE, replace(FILE, mode=0o755), None, "mode"),
        (FILE, replace(FILE, digest=digest_of(b"y")), None, "modified"),
        (FILE, SymlinkEntry("x"), None, "modified"),
        (ABSENT, FILE, RepoPath("old"), "renamed"),
    ],
)
def test_kinds_of_changes(before: Entry, after: Entry, origin: RepoPath | None, kind: str) -> None:
    assert kind_of_change(Change(RepoPath("p"), before, after, origin)) == kind


@pytest.mark.req("D2.entry_kinds")
@pytest.mark.parametrize(
    "body",
    [
        *({}, {"kind": "socket"}, {"kind": []}, {"kind": "file"}, {"kind": "symlink"}),
        {"kind": "dir", "mode": None, "mtime_ns": 0},
        {"kind": "file", "digest": "sha256:x", "size": 1, "mode": 1, "mtime_ns": 1},
        {"kind": "symlink", "target": "base64:!"},
    ],
)
def test_json_that_is_no_entry_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(MulliganError) as refused:
        entry_from_json(body)
    assert refused.value.code in ("invalid_entry", "invalid_digest")
