"""A fork with files that fails after its child session was opened."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import mulligan
from mulligan.values.errors import MulliganError


@pytest.mark.req("D6.fork_fails_whole")
def test_a_fork_that_fails_late_leaves_no_child_session_and_no_copy(tmp_path: Path) -> None:
    work, home, copy = tmp_path / "work", tmp_path / "home", tmp_path / "copy"
    work.mkdir()
    (work / "large.bin").write_bytes(os.urandom(300_000))
    with mulligan.open(work, store=home) as opened:
        session = opened.session("parent")
        with session.call("remove") as call:
            assert call.delete("large.bin").ok
        # The store lost the body that the copy needs, which shows only when the copy is brought back to that point.
        shutil.rmtree(home / "blobs")
        with pytest.raises(MulliganError):
            session.fork(at=call.id, files="copy", to=str(copy))
        assert [row["id"] for row in opened.sessions.list(closed=True)] == ["parent"]
        assert session.ancestry().child_ids == () and not copy.exists()


@pytest.mark.req("D6.fork_fails_whole")
def test_a_fork_to_where_nothing_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "work").mkdir()
    with mulligan.open(tmp_path / "work", store=tmp_path / "home") as opened:
        session = opened.session("parent")
        with pytest.raises(MulliganError) as refused:
            session.fork(files="copy", to=str(tmp_path / "file" / "copy"))
        assert refused.value.code in ("not_a_directory", "file_exists")
        assert [row["id"] for row in opened.sessions.list(closed=True)] == ["parent"]
