"""`overlay`: the real tree never sees the command; what it did can be applied afterwards."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mulligan.exec.capture.overlay import Overlay
from mulligan.exec.command import Spools, command
from mulligan.exec.run import run
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import Refused
from tests.exec.change_kinds import KINDS, Kind
from tests.exec.lanes import lane
from tests.exec.overlay_isolation import not_isolated
from tests.exec.trees import tree
from tests.exec.unprivileged_user import NOBODY, run_as_nobody


def real(path: Path) -> bytes:
    return os.fsencode(os.path.realpath(path))


@pytest.mark.parametrize("kind", [lane("overlay", kind, kind) for kind in KINDS], ids=lambda kind: kind.name)
def test_it_is_isolated_and_can_be_applied(kind: Kind, tmp_path: Path) -> None:
    root, twin = tmp_path / "root", tmp_path / "twin"
    root.mkdir()
    twin.mkdir()
    assert not_isolated(kind, real(root), real(twin)) == []


def test_all_of_them_for_an_unprivileged_user() -> None:
    lines = run_as_nobody("tests.exec.overlay_isolation").splitlines()
    assert lines == [f"{len(KINDS)} kinds as {NOBODY if os.geteuid() == 0 else os.geteuid()}"]


def test_a_deadline_leaves_the_real_tree_untouched(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    before = tree(real(tmp_path))
    capture = Overlay()
    asked = command(["sh", "-c", "echo x > a; rm -f b; sleep 600"], str(tmp_path))
    ran = run(asked, capture=capture, sink=Spools(), deadline=monotonic_s() + 0.3)
    capture.close()
    assert ran.timed_out
    assert tree(real(tmp_path)) == before


def test_a_root_with_odd_characters_is_no_option(tmp_path: Path) -> None:
    root = tmp_path / "a,b:c=d \\e"
    root.mkdir()
    capture = Overlay()
    run(command(["touch", "made"], str(root)), capture=capture, sink=Spools())
    assert [change.path for change in capture.changes] == [real(root) + b"/made"]
    assert list(root.iterdir()) == []
    capture.close()


def test_the_size_of_the_layer_is_limited(tmp_path: Path) -> None:
    capture = Overlay(size_bytes=1 << 20)
    ran = run(
        command(["dd", "if=/dev/zero", "of=big", "bs=1M", "count=8"], str(tmp_path)), capture=capture, sink=Spools()
    )
    capture.close()
    assert ran.exit_code != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_root_with_a_file_system_mounted_inside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path / "inner"], check=True)
    try:
        with pytest.raises(Refused) as refused:
            run(command(["true"], str(tmp_path)), capture=Overlay(), sink=Spools())
    finally:
        subprocess.run(["umount", tmp_path / "inner"], check=True)
    assert (refused.value.code, refused.value.fields["reason"]) == ("unsupported_strategy", "submounts")
