"""What a call leaves behind: one end on record with everything in it, and nothing else anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from mulligan.history.log import calls_of
from mulligan.history.tables import OPEN, changes_of
from mulligan.store.journal import RECORDS, REFS, records_of
from mulligan.values.canonical import encode
from mulligan.values.digest import digest_of, raw_digest
from tests.temp_workspace import TempWorkspace


@pytest.mark.req("D3.journal_and_commit_together")
def test_the_end_of_a_call_is_one_transaction(workspace: TempWorkspace) -> None:
    """Whoever looks sees an open call without an end, or its end with all it changed; nothing between."""
    store, seen = workspace.open_root.ledger.store, list[tuple[list[str], str, int]]()

    def look() -> None:
        with store.read() as tx:
            row = next(calls_of(tx, workspace.open_root, None))
            ended = [record.kind for record in records_of(tx, "s:default")][-1]
            seen.append(([ended], row.status, len(changes_of(tx, row.id)) + len(tx.select(OPEN))))

    with workspace.session().call() as call:
        call.write_file("a", "a")
        call.write_file("b", "b")
        store.after_write = look  # type: ignore[attr-defined]  # the SQLite store's hook
    store.after_write = lambda: None  # type: ignore[attr-defined]  # the SQLite store's hook
    assert seen == [(["call.ended"], "committed", 2)]


@pytest.mark.req("AR.write_contents_by_ref")
def test_the_journal_keeps_large_contents_by_reference(workspace: TempWorkspace) -> None:
    content = "".join(f"line {number}\n" for number in range(20_000))
    with workspace.session().call() as call:
        call.write_file("large", content)
        call.write_file("small", "in the record")
    with workspace.open_root.ledger.store.read() as tx:
        *_, ended = records_of(tx, "s:default")
    large, small = (effect["params"]["content"] for effect in ended.payload["effects"])
    assert (large, small) == ({"digest": digest_of(content.encode()), "size_bytes": len(content)}, "in the record")
    assert digest_of(content.encode()) in ended.refs
    assert workspace.open_root.ledger.blobs.read(digest_of(content.encode())) == content.encode()


@pytest.mark.req("D4.large_payloads_are_refs")
def test_what_records_keep_by_reference_is_found_by_a_query(workspace: TempWorkspace) -> None:
    message = {"role": "user", "content": "long " * 30_000}
    with workspace.session().call() as call:
        call.write_file("large", "text\n" * 30_000)
    workspace.session().inject(message)
    wanted = {digest_of(encode(message)), digest_of(b"text\n" * 30_000)}
    with workspace.open_root.ledger.store.read() as tx:
        records = {record.seq: record for record in records_of(tx, "s:default")}
        edges = {row.seq for one in wanted for row in tx.select(REFS, {"digest": raw_digest(one)})}
        sizes = [len(row.body) for row in tx.select(RECORDS)]
    assert {records[seq].kind for seq in edges} == {"message.appended", "call.ended"}
    assert wanted <= {ref for seq in edges for ref in records[seq].refs}
    assert max(sizes) < 4_096


@pytest.mark.req("W31.no_leaked_temp_dirs")
def test_no_temporary_files_or_directories_are_left_behind(
    workspace: TempWorkspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    for good in (True, False):
        with workspace.session().call() as call:
            call.write_file("d/a", "a", create_parents=True)
            call.exec(["sh", "-c", "echo b > b"])
            if not good:
                call.fail("on purpose")
    workspace.session().undo()
    assert (list(temporary.iterdir()), list(workspace.root.iterdir())) == ([], [])
