"""A path on the command line is what a person means by it, in whichever folder he stands."""

from __future__ import annotations

from pathlib import Path

import pytest

import mulligan
from tests.cli.cli_result import Run, write


@pytest.fixture
def call(run: Run, work: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A call that changed `g.txt` here and `top.txt` above; and we stand in `sub`."""
    (work / "sub").mkdir()
    (work / "sub" / "g.txt").write_text("old\n")
    (work / "top.txt").write_text("old\n")
    done = run("exec", "--", "sh", "-c", "echo new > sub/g.txt; echo new > top.txt")
    assert done.code == 0, done
    monkeypatch.chdir(work / "sub")
    return str(run("log", "--json").json[0]["id"])


HERE = ["g.txt", "./g.txt", "../sub/g.txt", "sub/g.txt"]
"""As typed here, and from the root as scripts say it."""


@pytest.mark.parametrize("path", HERE)
def test_cat_takes_a_path_from_this_folder_or_from_the_root(run: Run, call: str, path: str) -> None:
    assert (run("cat", call, path).out, run("cat", call, path, "--after").out) == ("old\n", "new\n")


@pytest.mark.parametrize("path", HERE)
def test_blame_takes_the_same_paths(run: Run, call: str, path: str) -> None:
    assert [line["origin"] for line in run("blame", path, "--json").json] == [call]


@pytest.mark.parametrize("path", HERE)
def test_undo_and_restore_take_the_same_paths(run: Run, work: Path, call: str, path: str) -> None:
    for verb in (("undo", call, "--path", path), ("restore", call, path)):
        assert run(*verb, "--json").json["outcomes"] == [{"path": "sub/g.txt", "outcome": "restored"}]
        assert ((work / "sub/g.txt").read_text(), (work / "top.txt").read_text()) == ("old\n", "new\n")
        assert run("redo").code == 0


def test_a_deleted_path_is_still_found_in_history(run: Run, work: Path, call: str) -> None:
    (work / "sub" / "g.txt").unlink()
    (work / "g.txt").write_text("another\n")
    assert run("cat", call, "g.txt").out == "old\n"


def test_an_absolute_path_inside_the_root_works(run: Run, work: Path, call: str) -> None:
    (work.parent / "alias").symlink_to(work)
    for folder in (work, work.parent / "alias"):
        assert run("cat", call, str(folder / "sub" / "g.txt")).out == "old\n"


def test_a_path_through_a_link_is_resolved(run: Run, work: Path, call: str) -> None:
    (work / "sub" / "way").symlink_to(work)
    (work / "sub" / "name").symlink_to("g.txt")
    assert run("cat", call, "way/sub/g.txt").out == "old\n"
    assert [line["origin"] for line in run("blame", "way/top.txt", "--json").json] == [call]
    assert [line["origin"] for line in run("blame", "name", "--json").json] == [call]


def test_undo_of_a_link_restores_the_link_itself(run: Run, work: Path, call: str) -> None:
    assert run("exec", "--", "ln", "-s", "g.txt", "name").code == 0
    assert run("undo", "--path", "name", "--json").json["outcomes"] == [{"path": "sub/name", "outcome": "restored"}]


def test_the_error_names_the_missing_path(run: Run, work: Path, call: str) -> None:
    (work / "sub" / "other").write_text("x")
    for name in ("other", "nowhere"):
        assert f" sub/{name} " in run("cat", call, name).err
    assert " sub/nowhere " in run("blame", "nowhere").err
    assert run("undo", call, "--path", "nowhere", "--json").json["outcomes"][0]["path"] == "sub/nowhere"


@pytest.mark.parametrize("path", ["../../out", "/etc/passwd", ""])
def test_a_path_outside_the_root_is_refused_from_every_folder(run: Run, call: str, path: str) -> None:
    for verb in (("cat", call, path), ("undo", "--path", path), ("restore", call, path), ("blame", path)):
        assert run(*verb, "--json").json["error"]["code"] == "invalid_path"


@pytest.mark.req("D11.mount_paths_absolute")
@pytest.mark.parametrize("path", ["../lib/b", "{}/lib/b", "{}/alias/b"])
def test_changes_in_a_mounted_root_have_absolute_paths(run: Run, work: Path, path: str) -> None:
    (work.parent / "lib").mkdir()
    (work.parent / "alias").symlink_to("lib")
    lib = str(work.parent / "lib" / "b")
    with mulligan.open(str(work)) as opened:
        session = opened.session("s")
        session.add_root(str(work.parent / "lib"), mount_mode="extend")
        with session.call() as made:
            made.write_file("a", "1\n")
            made.write_file(lib, "1\n")
    assert [one["path"] for one in run("show", made.id, "--json").json["changes"]] == ["a", lib]
    assert run("diff", "--session", "s", "--json").json["calls"] == [made.id]
    assert run("cat", made.id, path.format(work.parent), "--after").out == "1\n"
    assert [line["call_id"] for line in run("blame", path.format(work.parent), "--json").json] == [made.id]
    done = run("undo", made.id, "--path", path.format(work.parent), "--json").json
    assert done["outcomes"] == [{"path": lib, "outcome": "restored"}] and (work / "a").exists()


@pytest.mark.req("D11.mount_paths_absolute")
def test_cat_finds_a_call_that_worked_only_in_a_mounted_root(run: Run, work: Path) -> None:
    file = work.parent / "lib" / "b"
    file.parent.mkdir()
    with mulligan.open(str(work)) as opened:
        session = opened.session("s")
        session.add_root(str(file.parent), mount_mode="extend")
        for label, content in (("first", "1\n"), ("second", "2\n")):
            with session.call(label) as call:
                call.write_file(str(file), content)
    assert (run("cat", "second", str(file)).out, run("cat", "second", str(file), "--after").out) == ("1\n", "2\n")
    (line,) = run("blame", str(file), "--json").json
    assert run("cat", line["call_id"], str(file), "--after").out == "2\n"
    assert run("cat", "third", str(file), "--json").json["error"]["code"] == "unknown_call"


def test_with_another_root_paths_are_relative_to_that_root(
    run: Run, work: Path, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "top.txt").write_text("nobody asked\n")
    monkeypatch.chdir(tmp_path / "away")
    root = ("--root", str(work))
    assert run("cat", call, "top.txt", *root).out == "old\n"
    assert [line["origin"] for line in run("blame", "top.txt", "--json", *root).json] == [call]


def test_in_the_root_folder_paths_are_relative_to_the_root(run: Run, work: Path) -> None:
    (work / "sub").mkdir()
    call = write(run, "sub/g.txt", "x\n")
    assert run("cat", call, "sub/g.txt", "--after").out == "x\n"
    assert run("undo", "--path", "g.txt", "--json").json["outcomes"][0]["path"] == "g.txt"


def test_in_a_deleted_folder_paths_are_relative_to_the_root(run: Run, work: Path, call: str) -> None:
    (work / "sub" / "g.txt").unlink()
    (work / "sub").rmdir()
    assert run("cat", call, "sub/g.txt", "--root", str(work)).out == "old\n"
