"""The history verbs as a person and a script use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.values.clock import FixedClock, SystemClock
from tests.cli.cli_result import Run, write


def edit(run: Run, path: str, old: str, new: str, *options: str) -> str:
    """The id of a call that replaced a text in a file."""
    given = {"path": path, "old_string": old, "new_string": new}
    done = run("call", "edit_file", "--args", json.dumps(given), *options)
    assert done.code == 0, done
    return str(done.json["call_id"])


@pytest.mark.req("D14.cli.call")
def test_call_prints_the_receipt_with_the_call_id(run: Run, work: Path) -> None:
    done = run("call", "write_file", "--args", '{"path": "a", "content": "x"}')
    body = done.json
    assert (done.code, body["status"], body["created"], (work / "a").read_text()) == (0, "ok", True, "x")
    again = run("call", "host.fs.write_file", "--args", '{"path": "a", "content": "y", "mode": "create_new"}')
    assert (again.code, again.json["error_code"], (work / "a").read_text()) == (1, "file_exists", "x")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("call", "no_such_tool"), "unknown_effect"),
        (("call", "write_file", "--args", "[1]"), "invalid_params"),
        (("call", "write_file", "--args", "{"), "invalid_json"),
        (("undo", "nothing"), "unknown_call"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], code: str) -> None:
    write(run, "a", "x")
    done = run(*arguments, "--json")
    assert (done.code, done.json["error"]["code"], len(done.err.splitlines())) == (2, code, 1)


@pytest.mark.req(
    "D14.cli.log", "D14.json.log_fields", "D14.json.log_newest_first", "D14.json.log_limit", "D14.json.external"
)
def test_log_lists_calls_and_external_edits_newest_first(run: Run, work: Path) -> None:
    first = write(run, "a", "one\n", "--turn", "t1", "--label", "call_1")
    (work / "a").write_text("one\ntwo\n")
    second = write(run, "a", "three\n")
    rows = run("log", "--json").json
    assert [row["id"] for row in rows] == [second, rows[1]["id"], first]
    assert rows[-1] == {
        "id": first,
        "label": "call_1",
        "session_id": "default",
        "turn_id": "t1",
        "tool": "write_file",
        "agent": None,
        "command": None,
        "prompt": None,
        "outside": [],
        "status": "committed",
        "external": False,
        "started_at": rows[-1]["started_at"],
        "ended_at": rows[-1]["ended_at"],
        "changes": [{"path": "a", "kind": "created", "added": 1, "removed": 0}],
        "coverage": [],
    }
    external = rows[1]
    assert external["external"]
    assert (external["tool"], external["session_id"], external["changes"]) == (
        None,
        None,
        [{"path": "a", "kind": "modified", "added": 1, "removed": 0}],
    )
    assert [row["id"] for row in run("log", "--json", "--limit", "1").json] == [second]
    assert run("diff", "--json").json["calls"] == [second]
    assert run("diff", first, external["id"], "--json").json["calls"] == [first, external["id"], second]


@pytest.mark.parametrize("verb", ["show", "diff", "undo", "restore", "rewind"])
def test_a_call_id_is_looked_up_within_the_session_and_root(run: Run, work: Path, verb: str) -> None:
    call = write(run, "a", "one\n", "--session", "one")
    beside = work.parent / "beside"
    beside.mkdir()
    for elsewhere in (("--session", "other"), ("--root", str(beside))):
        done = run(verb, call, *elsewhere, "--json")
        assert (done.code, done.json["error"]["code"]) == (2, "unknown_call")
    assert (work / "a").read_text() == "one\n"
    assert run(verb, call, "--session", "one", "--json").code == 0


@pytest.mark.req("D14.json.log_statuses")
def test_log_says_how_each_call_ended(run: Run) -> None:
    write(run, "a", "x")
    run("undo")
    run("call", "edit_file", "--args", '{"path": "a", "old_string": "q", "new_string": "r"}')
    statuses = {row["tool"]: row["status"] for row in run("log", "--json").json}
    assert statuses == {"write_file": "undone", "undo": "committed", "edit_file": "aborted"}


def test_log_says_why_a_call_was_rolled_back(run: Run) -> None:
    run("call", "edit_file", "--args", '{"path": "a", "old_string": "q", "new_string": "r"}')
    run("call", "exec", "--args", '{"argv": ["sh", "-c", "echo x > x; false"], "rollback_on": "nonzero"}')
    told = [line.partition("rolled back, no changes kept: ")[2] for line in run("log").out.splitlines()]
    assert told == ["nonzero exit", "path not found"]
    newest = run("log", "--json").json[0]["id"]
    assert run("show", newest).out.splitlines()[0].endswith("rolled back, no changes kept: nonzero exit")


@pytest.mark.req("D14.json.log_change_kinds")
def test_log_names_each_kind_of_change(run: Run, work: Path) -> None:
    write(run, "a", "x\n")
    (work / "script").write_text("x")
    run("exec", "--", "chmod", "755", "script")
    run("call", "move", "--args", '{"path": "a", "to": "b"}')
    kinds = {(row["tool"], c["path"], c["kind"]) for row in run("log", "--json").json for c in row["changes"]}
    assert kinds == {
        ("write_file", "a", "created"),
        ("exec", "script", "mode"),
        ("move", "a", "deleted"),
        ("move", "b", "renamed"),
    }


def test_lines_of_a_moved_file_are_not_counted_as_changed(run: Run) -> None:
    write(run, "a", "1\n2\n3\n")
    run("call", "move", "--args", '{"path": "a", "to": "b"}')
    with mulligan.open() as m, m.session().call() as call:
        assert call.move("b", "c").ok and call.edit_file("c", "2", "two\nand a half").ok
    write(run, "d", "d\n")
    run("call", "move", "--args", '{"path": "c", "to": "d", "overwrite": true}')
    over, _, edited, moved, _ = run("log", "--json").json
    assert [counts(row) for row in (moved, edited, over)] == [
        {"a": ("deleted", 0, 0), "b": ("renamed", 0, 0)},
        {"b": ("deleted", 0, 0), "c": ("renamed", 2, 1)},
        {"c": ("deleted", 0, 4), "d": ("renamed", 4, 1)},
    ]


def counts(row: dict[str, Any]) -> dict[str, tuple[str, int, int]]:
    return {one["path"]: (one["kind"], one["added"], one["removed"]) for one in row["changes"]}


@pytest.mark.req("D14.cli.undo", "D14.cli.redo", "D14.json.ways_back", "D14.cli.whole_root")
def test_undo_and_redo_without_a_session_apply_to_the_whole_root(run: Run, work: Path) -> None:
    earlier = FixedClock(SystemClock().now() - timedelta(minutes=11))
    with mulligan.open(str(work), clock=earlier) as opened:
        for session, name in (("one", "a"), ("two", "b")):
            with opened.session(session).call() as call:
                call.write_file(name, name)
    done = run("undo", "--json").json
    (named,) = done.pop("calls")
    assert (named["tool"], named["session_id"]) == (None, "two")
    assert done == {
        "ok": True,
        "call_id": done["call_id"],
        "outcomes": [{"path": "b", "outcome": "restored"}],
        "overwrote_external": [],
        "rescue": done["call_id"],
    }
    run("undo")
    assert os.listdir(work) == []
    run("redo")
    run("redo")
    assert sorted(os.listdir(work)) == ["a", "b"]
    assert run("redo").code == 2


@pytest.mark.req("D14.cli.exit_1", "D6.on_conflict.merge")
def test_undo_says_what_it_merged_and_what_it_left_alone(run: Run, work: Path) -> None:
    write(run, "a", "1\n2\n3\n4\n5\n")
    write(run, "b", "1\n2\n3\n")
    call = run(
        "call",
        "apply_patch",
        "--args",
        json.dumps(
            {
                "patch": "*** Begin Patch\n*** Update File: a\n@@\n-1\n+one\n"
                "*** Update File: b\n@@\n-2\n+two\n*** End Patch"
            }
        ),
    ).json["call_id"]
    (work / "a").write_text("one\n2\n3\n4\nfive\n")
    (work / "b").write_text("1\nzwei\n3\n")
    done = run("undo", call)
    assert done.code == 1
    assert done.out.splitlines()[:2] == [
        "merged your edit in a",
        "left b as it is: you changed the same lines",
    ]
    assert ((work / "a").read_text(), (work / "b").read_text()) == ("1\n2\n3\n4\nfive\n", "1\nzwei\n3\n")


@pytest.mark.req("D14.cli.ways_back_options")
def test_a_dry_run_shows_the_plan_and_changes_nothing(run: Run, work: Path) -> None:
    write(run, "a", "x")
    done = run("undo", "--dry-run", "--json").json
    assert (done["call_id"], done["outcomes"]) == (None, [{"path": "a", "outcome": "restored"}])
    assert (work / "a").read_text() == "x"
    assert [row["tool"] for row in run("log", "--json").json] == ["write_file"]


def test_a_plan_shows_the_commit_that_undo_keeps(run: Run, work: Path) -> None:
    git = ("git", "-C", str(work), "-c", "user.name=u", "-c", "user.email=e")
    subprocess.run([*git, "init", "-q"], check=True)
    heads = []
    for number in range(2):
        assert run("exec", "--", *git, "commit", "-q", "--allow-empty", "-m", str(number)).code == 0
        heads.append(subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout)
    shown = run("undo", "--dry-run").out
    assert f"HEAD {heads[0][:12]}→{heads[1][:12]}" in shown and "--git restore" in shown


def linked_tree(work: Path, tmp_path: Path) -> Git:
    """Makes `work` a linked working tree of a repository beside it."""
    git = Git(work)
    main = str(tmp_path / "main")
    git("init", "-q", main)
    git("-C", main, "commit", "-q", "--allow-empty", "-m", "0")
    git("-C", main, "worktree", "add", "-q", str(work))
    return git


class Git:
    def __init__(self, at: Path) -> None:
        self._at = at

    def __call__(self, *words: str) -> str:
        command = ["git", "-c", "user.name=u", "-c", "user.email=e", *words]
        return subprocess.run(command, cwd=self._at, capture_output=True, text=True, check=True).stdout.strip()


def commit_in_exec(run: Run, line: str, *options: str) -> str:
    """The id of a call whose command made a commit."""
    line = line.replace("COMMIT", "git -c user.name=u -c user.email=e commit -q")
    assert run("exec", *options, "--", "sh", "-c", line).code == 0
    return next(str(row["id"]) for row in run("log", "--json").json if row["tool"] == "exec")


@pytest.mark.req("D6.git_outside_says_how", "D6.git_outside_restore")
def test_undo_of_a_commit_in_a_linked_working_tree_names_git_restore_which_works(
    run: Run, work: Path, tmp_path: Path
) -> None:
    git = linked_tree(work, tmp_path)
    old = git("rev-parse", "HEAD")
    call = commit_in_exec(run, "echo one > a && git add a && COMMIT -m 1")
    new = git("rev-parse", "HEAD")
    said = run("undo", call).out
    assert f"HEAD {old[:12]}→{new[:12]}" in said and "--git restore" in said
    assert (git("rev-parse", "HEAD"), (work / "a").exists()) == (new, False)
    git("status")  # writes the index anew
    assert run("undo", call, "--git", "restore").code == 0
    assert (git("rev-parse", "HEAD"), git("status", "--short"), git("fsck")) == (old, "", "")
    assert run("undo", call, "--git", "restore", "--json").json["error"]["code"] == "nothing_to_undo"
    assert run("redo").code == 0 and git("rev-parse", "HEAD") == new
    assert run("redo").code == 0 and git("status", "--short") == ""
    assert run("undo", call, "--git", "restore").code == 0
    assert (git("rev-parse", "HEAD"), git("status", "--short")) == (old, "")
    assert run("verify").code == 0


@pytest.mark.req("D6.git_outside_restore")
def test_rollback_with_git_restore_in_a_linked_working_tree_undoes_all_commits_of_the_turn(
    run: Run, work: Path, tmp_path: Path
) -> None:
    git = linked_tree(work, tmp_path)
    old = git("rev-parse", "HEAD")
    for number in range(3):
        commit_in_exec(run, f"echo {number} > a && git add a && COMMIT -m {number}", "--turn", "t")
    assert run("rollback", "--git", "restore").code == 0
    assert (git("rev-parse", "HEAD"), git("status", "--short"), os.listdir(work)) == (old, "", [".git"])


@pytest.mark.req("D6.git_outside_restore")
def test_undo_of_a_call_that_only_committed_in_a_linked_working_tree(run: Run, work: Path, tmp_path: Path) -> None:
    git = linked_tree(work, tmp_path)
    old = git("rev-parse", "HEAD")
    write(run, "a", "one")
    git("add", "a")
    call = commit_in_exec(run, "COMMIT -m 1")
    assert "--git restore" in run("undo", call, "--dry-run").out
    assert run("undo", call, "--git", "restore").code == 0
    assert (git("rev-parse", "HEAD"), git("status", "--short")) == (old, "A  a")


@pytest.mark.req("D6.git_outside_restore")
def test_a_branch_created_in_a_linked_working_tree_is_removed_with_its_commit(
    run: Run, work: Path, tmp_path: Path
) -> None:
    git = linked_tree(work, tmp_path)
    branch, old = git("branch", "--show-current"), git("branch", "-v")
    call = commit_in_exec(run, "git checkout -q -b new && echo 1 > a && git add a && COMMIT -m 1")
    assert run("undo", call, "--git", "restore").code == 0
    assert (git("branch", "--show-current"), git("branch", "-v"), git("status", "--short")) == (branch, old, "")
    assert run("redo").code == 0
    assert (git("branch", "--show-current"), git("log", "-1", "--format=%s"), git("status", "--short")) == (
        "new",
        "1",
        "",
    )


@pytest.mark.req("D6.git_outside_restore")
def test_a_later_commit_or_one_of_another_working_tree_is_never_undone(run: Run, work: Path, tmp_path: Path) -> None:
    git = linked_tree(work, tmp_path)
    main = str(tmp_path / "main")
    old = git("rev-parse", "HEAD")
    call = commit_in_exec(run, f"echo 1 > a && git add a && COMMIT -m 1 && cd {main} && COMMIT --allow-empty -m other")
    git("commit", "-q", "--allow-empty", "-m", "mine")
    top, other = git("rev-parse", "HEAD"), git("-C", main, "rev-parse", "HEAD")
    left = run("undo", call, "--git", "restore", "--json")
    outcomes = {one["path"]: (one["outcome"], one.get("reason")) for one in left.json["outcomes"]}
    assert (left.code, outcomes[".git"]) == (1, ("conflicted", "git_changed"))
    assert git("rev-parse", "HEAD") == top
    assert run("undo", call, "--git", "restore", "--on-conflict", "overwrite", "--yes").code == 0
    assert (git("rev-parse", "HEAD"), git("-C", main, "rev-parse", "HEAD")) == (old, other)
    assert run("redo").code == 0 and git("rev-parse", "HEAD") == top


@pytest.mark.req("D6.git_outside_restore")
def test_a_lock_of_git_in_a_linked_working_tree_leaves_everything_as_it_is(
    run: Run, work: Path, tmp_path: Path
) -> None:
    git = linked_tree(work, tmp_path)
    call = commit_in_exec(run, "echo 1 > a && git add a && COMMIT -m 1")
    new, lock = git("rev-parse", "HEAD"), Path(git("rev-parse", "--git-path", "index.lock"))
    lock.touch()
    assert run("undo", call, "--git", "restore", "--json").json["error"]["code"] == "path_busy"
    assert (git("rev-parse", "HEAD"), (work / "a").read_text(), lock.exists()) == (new, "1\n", True)
    lock.unlink()
    assert run("undo", call, "--git", "restore").code == 0
    assert not list((tmp_path / "main/.git").rglob("*.lock"))


@pytest.mark.req("D6.git_outside_restore")
def test_an_unfinished_merge_in_a_linked_working_tree_is_undone(run: Run, work: Path, tmp_path: Path) -> None:
    git = linked_tree(work, tmp_path)
    branch = git("branch", "--show-current")
    for name, text in ((branch, "mine"), ("theirs", "theirs")):
        git("checkout", "-q", *(() if name == branch else ("-b", name, "HEAD~1")))
        (work / "a").write_text(text)
        git("add", "a")
        git("commit", "-q", "-m", name)
    git("checkout", "-q", branch)
    old = git("rev-parse", "HEAD")
    call = commit_in_exec(run, "git merge theirs || true")
    assert git("status", "--short") == "AA a"
    assert run("undo", call, "--git", "restore").code == 0
    assert (git("rev-parse", "HEAD"), git("status", "--short"), (work / "a").read_text()) == (old, "", "mine")
    assert subprocess.run(["git", "rev-parse", "-q", "--verify", "MERGE_HEAD"], cwd=work, check=False).returncode != 0


@pytest.mark.req("D14.cli.yes_needed")
@pytest.mark.parametrize("verb", [("gc",), ("drop", "x"), ("undo", "--on-conflict", "overwrite")])
def test_without_a_terminal_destructive_verbs_need_yes(run: Run, verb: tuple[str, ...]) -> None:
    write(run, "a", "x")
    assert run(*verb).code == 2


@pytest.mark.req("D14.cli.restore")
def test_restore_also_undoes_later_calls_on_those_paths(run: Run, work: Path) -> None:
    write(run, "a", "one")
    call = write(run, "a", "two")
    write(run, "a", "three")
    write(run, "b", "b")
    assert run("restore", call).code == 0
    assert ((work / "a").read_text(), (work / "b").read_text()) == ("one", "b")


@pytest.mark.req("D14.cli.rollback", "D14.cli.turn_option")
def test_rollback_undoes_a_whole_turn(run: Run, work: Path) -> None:
    write(run, "before", "x")
    write(run, "a", "a", "--turn", "t")
    run("exec", "--turn", "t", "--", "sh", "-c", "echo b > b")
    assert run("rollback").code == 0
    assert os.listdir(work) == ["before"]
    run("redo")
    assert sorted(os.listdir(work)) == ["a", "b", "before"]


@pytest.mark.req("D14.cli.rewind")
@pytest.mark.parametrize(("side", "left"), [("--before", ["one"]), ("--after", ["one", "two"])])
def test_rewind_goes_to_before_or_after_a_call(run: Run, work: Path, side: str, left: list[str]) -> None:
    write(run, "one", "1")
    call = write(run, "two", "2")
    write(run, "three", "3")
    assert run("rewind", call, "--before", "--after").code == 2
    assert run("rewind", call, side).code == 0
    assert sorted(os.listdir(work)) == sorted(left)


@pytest.mark.req("D14.cli.show", "D14.cli.diff", "D14.cli.cat")
def test_show_diff_and_cat_show_one_call(run: Run, work: Path) -> None:
    write(run, "a", "old\n")
    call = write(run, "a", "new\n")
    shown = run("show", call, "--json").json
    assert (shown["id"], shown["prompt"], shown["changes"][0]["path"]) == (call, None, "a")
    (work / "a").write_text("old\n")
    patch = run("diff", call).out
    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=work, check=True)
    assert (work / "a").read_text() == "new\n"
    assert (run("cat", call, "a").out, run("cat", call, "a", "--after").out) == ("old\n", "new\n")


def test_diff_shows_a_move_as_a_move_and_git_applies_it(run: Run, work: Path) -> None:
    (work / "old").mkdir()
    (work / "old" / "moved").write_text("same\nthen\n")
    (work / "old" / "edited").write_text("one\ntwo\n")
    command = "mv old new; printf 'one\\nzwei\\n' > new/edited; chmod +x new/moved"
    assert run("exec", "--", "sh", "-c", command).code == 0
    made = {path.name: (path.read_bytes(), path.stat().st_mode) for path in (work / "new").iterdir()}
    patch = run("diff", run("log", "--json").json[0]["id"]).out
    assert "rename from old/moved" in patch and "-same" not in patch
    assert run("undo", "--yes").code == 0
    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=work, check=True)
    assert {path.name: (path.read_bytes(), path.stat().st_mode) for path in (work / "new").iterdir()} == made
    assert not (work / "old").exists()


@pytest.mark.req("D14.cli.blame")
def test_blame_names_the_call_of_each_line(run: Run, work: Path) -> None:
    first = write(run, "a", "one\ntwo\n")
    second = run("call", "edit_file", "--args", '{"path":"a","old_string":"two","new_string":"zwei"}').json["call_id"]
    (work / "a").write_text("one\nzwei\nmine\n")
    lines = run("blame", "a", "--json").json
    assert [(line["text"], line["origin"]) for line in lines] == [
        ("one\n", first),
        ("zwei\n", second),
        ("mine\n", "external"),
    ]


class TestBlameFollows:
    """Whoever moves lines, merges them in or brings them back has not written them."""

    def origins(self, run: Run, path: str) -> list[str]:
        return [line["origin"] for line in run("blame", path, "--json").json]

    def test_moves(self, run: Run, work: Path) -> None:
        (work / "a").write_text("old\nolder\n")
        first = edit(run, "a", "older", "first")
        for source, target in (("a", "b"), ("b", "c"), ("c", "a"), ("a", "b")):
            run("call", "move", "--args", json.dumps({"path": source, "to": target}))
        second = edit(run, "b", "old", "second")
        assert self.origins(run, "b") == [second, first]

    def test_a_move_over_another_file(self, run: Run) -> None:
        mine = write(run, "a", "same\nmine\n")
        write(run, "b", "same\n")
        run("call", "move", "--args", '{"path": "a", "to": "b", "overwrite": true}')
        assert self.origins(run, "b") == [mine, mine]

    def test_hundreds_of_moves(self, run: Run, work: Path) -> None:
        write(run, "f0", "line\n")
        with mulligan.open(str(work)) as opened:
            for number in range(300):
                assert opened.session("default").perform("move", {"path": f"f{number}", "to": f"f{number + 1}"})[0].ok
        assert len(self.origins(run, "f300")) == 1

    def test_undo_and_redo(self, run: Run, work: Path) -> None:
        (work / "a").write_text("old\nmiddle\nkept\n")
        first = edit(run, "a", "kept", "first")
        second = edit(run, "a", "old", "second")
        run("undo")
        assert self.origins(run, "a") == ["before", "before", first]
        run("redo")
        assert self.origins(run, "a") == [second, "before", first]
        run("undo", first)
        assert self.origins(run, "a") == [second, "before", "before"]

    def test_a_merge_from_a_fork(self, run: Run, work: Path, tmp_path: Path) -> None:
        mine = write(run, "a", "1\n2\n3\n")
        run("fork", "--files", "copy", "--to", str(tmp_path / "fork"), "--name", "idea")
        theirs = edit(run, "a", "3", "three", "--root", str(tmp_path / "fork"))
        new = write(run, "new", "theirs\n", "--root", str(tmp_path / "fork"))
        ours = edit(run, "a", "1", "one")
        assert run("merge", "idea").code == 0
        assert (self.origins(run, "a"), self.origins(run, "new")) == ([ours, mine, theirs], [new])


def test_coverage_lists_every_call(run: Run, work: Path, tmp_path: Path) -> None:
    assert run("exec", "--strategy", "notify", "--", "sh", "-c", f"echo x > {tmp_path}/outside").code == 0
    gap = run("log", "--json").json[0]
    assert gap["coverage"] == [{"path": str(tmp_path / "outside"), "reason": "outside_root"}]
    with mulligan.open(str(work)) as opened:
        for _ in range(1000):
            opened.session("default").perform("list_dir", {"path": "."})
    assert run("coverage", "--json").json == [{"id": gap["id"], "coverage": gap["coverage"]}]
    assert "outside" in run("coverage").out


def test_status_names_only_the_open_calls_of_this_workspace_and_session(run: Run, work: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with ExitStack() as opened:
        calls = []
        for root, session in ((work, "one"), (tmp_path / "other", "two")):
            open_root = opened.enter_context(mulligan.open(str(root)))
            call = opened.enter_context(open_root.session(session).call())
            assert call.write_file("a", "x").ok
            calls.append(call.id)
        assert run("status", "--json").json["open"] == calls[:1]
        assert run("status", "--json", "--session", "none").json["open"] == []
        assert run("status", "--json", "--root", str(tmp_path / "other")).json["open"] == calls[1:]


def _python_calls(run: Run, *words: str) -> int:
    """How many Python functions the verb calls, when all that it needs is loaded."""
    assert run(*words).code == 0
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run(*words)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.req("D17.long_histories")
def test_verbs_that_show_the_current_state_read_no_more_of_a_long_history(run: Run, work: Path) -> None:
    verbs = [("status",), ("coverage",), ("sessions",), ("blame", "kept"), ("status", "--session", "default")]
    with mulligan.open(str(work)) as opened:
        session = opened.session("default")
        for path in ("kept", *["a"] * 9):
            assert session.perform("write_file", {"path": path, "content": "x\n"})[0].ok
        before = [_python_calls(run, *words, "--json") for words in verbs]
        for count in range(1_000):
            assert session.perform("write_file", {"path": "a", "content": f"{count}\n"})[0].ok
        after = [_python_calls(run, *words, "--json") for words in verbs]
    assert run("status", "--json").json["calls"] == 1_010
    assert [now <= 1.3 * then for then, now in zip(before, after, strict=True)] == [True] * len(verbs), (before, after)


@pytest.mark.req("D14.cli.status", "D14.cli.coverage", "D14.cli.pin")
def test_status_coverage_and_pin_show_the_only_call(run: Run) -> None:
    call = write(run, "a", "x")
    status = run("status", "--json").json
    assert (status["undo"], status["redo"], status["open"], status["calls"]) == (call, None, [], 1)
    assert run("coverage", "--json").json == []
    assert run("pin", call, "--json").json == {"id": call, "pinned": True}
    assert run("verify").code == 0


@pytest.mark.req(
    "D14.cli.fork",
    "D14.cli.branches",
    "D14.cli.merge",
    "D14.cli.drop",
    "D6.fork_copy",
    "D6.fork_merge",
    "D6.fork_drop",
    "HS6.fork_with_files",
)
def test_a_fork_is_made_merged_and_dropped(run: Run, work: Path, tmp_path: Path) -> None:
    write(run, "a", "1\n2\n3\n4\n5\n")
    (work / ".gitignore").write_text("ignored\n")
    (work / "ignored").write_text("mine")
    made = run("fork", "--files", "copy", "--to", str(tmp_path / "fork"), "--name", "idea", "--json").json
    assert (made["session_id"], (tmp_path / "fork" / "ignored").read_text()) == ("idea", "mine")
    run(
        "call",
        "edit_file",
        "--root",
        str(tmp_path / "fork"),
        "--args",
        '{"path":"a","old_string":"5","new_string":"five"}',
    )
    (work / "a").write_text("one\n2\n3\n4\n5\n")
    assert [row["status"] for row in run("branches", "--json").json] == ["open"]
    merged = run("merge", "idea", "--json").json
    assert (merged["ok"], (work / "a").read_text()) == (True, "one\n2\n3\n4\nfive\n")
    run("undo", merged["call_id"])
    assert (work / "a").read_text() == "one\n2\n3\n4\n5\n"
    assert run("drop", "idea", "--yes").code == 0
    assert not (tmp_path / "fork").exists()


@pytest.mark.req("D14.cli.fork_session")
def test_fork_without_a_session_forks_the_last_used_session(run: Run, work: Path) -> None:
    write(run, "a", "1\n")
    earlier = write(run, "b", "1\n", "--session", "claude")
    write(run, "c", "1\n", "--session", "codex")
    assert run("fork", "--json").json["parent_id"] == "codex"
    assert run("fork", "--at", earlier, "--json").json["parent_id"] == "claude"
    assert run("fork", "--session", "default", "--json").json["parent_id"] == "default"


def test_fork_lists_files_that_differ_from_that_point(run: Run, work: Path, tmp_path: Path) -> None:
    write(run, "a", "1\n")
    write(run, "a", "2\n")
    (work / "a").write_text("mine\n")
    point, place = run("log", "--json").json[0]["id"], str(tmp_path / "fork")
    told = run("fork", "--at", point, "--files", "copy", "--to", place).out
    assert "not captured a: you changed the same lines\n" in told
    assert run("coverage", "--root", place).out.endswith("  a: you changed the same lines\n")


@pytest.mark.req("D14.cli.default_session")
def test_call_exec_and_run_use_the_session_default(run: Run) -> None:
    write(run, "a", "x")
    for verb in ("exec", "run"):
        assert run(verb, "--", "sh", "-c", f"echo {verb} > {verb}").code == 0
    assert [(row["session_id"], row["external"]) for row in run("log", "--json").json] == [("default", False)] * 3


@pytest.mark.req("D14.cli.gc")
def test_gc_frees_unreferenced_bytes(run: Run) -> None:
    write(run, "a", "x" * 1000)
    done = run("gc", "--yes", "--json").json
    assert (done["blobs"], done["bytes"]) == (0, 0)
    assert run("undo").code == 0


@pytest.mark.req("D14.cli.demo")
def test_the_demo_plays_to_its_end(run: Run) -> None:
    done = run("demo")
    assert done.code == 0
    assert "SOMETHING IS WRONG" not in done.out
    assert "merged your edit in cart.py" in done.out


def test_the_demo_refuses_an_existing_folder(run: Run, tmp_path: Path) -> None:
    done = run("demo", "--keep", str(tmp_path))
    assert done.code == 2 and "File exists" in done.err


@pytest.mark.req("D14.cli.reads_never_write")
@pytest.mark.parametrize("verb", [("log",), ("status",), ("diff",), ("coverage",), ("branches",), ("show", "x")])
def test_reading_verbs_before_the_first_call_create_nothing(
    run: Run, work: Path, tmp_path: Path, verb: tuple[str, ...]
) -> None:
    done = run(*verb)
    assert (done.code, (tmp_path / "home").exists(), os.listdir(work)) == (2 if "show" in verb else 0, False, [])


def test_a_named_store_that_does_not_exist_is_an_error(run: Run, tmp_path: Path) -> None:
    assert run("log", "--store", str(tmp_path / "nowhere")).code == 2


@pytest.mark.req("D14.cli.root_default")
def test_a_folder_below_a_known_root_belongs_to_that_root(
    run: Run, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = write(run, "a", "x")
    (work / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(work / "deep" / "er")
    assert [row["id"] for row in run("log", "--json").json] == [call]


@pytest.mark.req("D14.cli.many_processes")
def test_calls_of_several_processes_at_once_all_commit(run: Run, work: Path) -> None:
    write(run, "seed", "x")
    command = [sys.executable, "-m", "mulligan.cli", "call", "write_file", "--args"]
    children = [
        subprocess.Popen([*command, json.dumps({"path": f"f{n}", "content": str(n)})], stdout=subprocess.DEVNULL)
        for n in range(8)
    ]
    assert [child.wait(timeout=600) for child in children] == [0] * 8
    assert sorted(os.listdir(work)) == sorted([*(f"f{n}" for n in range(8)), "seed"])
    assert len(run("log", "--json").json) == 9
    assert run("verify").code == 0


def test_a_merge_without_changes_offers_no_undo(run: Run, work: Path) -> None:
    write(run, "a", "x")
    done = run("merge", run("fork", "--files", "copy", "--json").json["session_id"])
    assert (done.code, done.out) == (0, "No files changed.\n")


def test_a_copy_is_made_beside_the_store_in_use(run: Run, work: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(run, "a", "x", "--store", str(store))
    made = run("fork", "--files", "copy", "--store", str(store), "--json").json
    assert Path(made["directory"]).is_relative_to(store) and os.listdir(made["directory"]) == ["a"]
    assert not (tmp_path / "home").exists()


def test_option_to_requires_files_copy(run: Run, tmp_path: Path) -> None:
    done = run("fork", "--to", str(tmp_path / "copy"))
    assert (done.code, "--files copy" in done.err, (tmp_path / "copy").exists()) == (2, True, False)


@pytest.mark.parametrize("verb", ["call", "exec", "run", "compact"])
def test_help_names_the_default_session(run: Run, verb: str) -> None:
    told = " ".join(run(verb, "--help").out.split())
    assert "Only this session" not in told and "Default: 'default'." in told
    assert "Default: the nearest known root that contains this folder" in told


NOT_UTF8 = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.mark.parametrize(
    "program",
    [
        (sys.executable, "-m", "mulligan"),
        (sys.executable, "-m", "mulligan.cli"),
        (os.path.join(os.path.dirname(sys.executable), "mulligan"),),
    ],
)
def test_another_locale_changes_no_name_and_no_command(run: Run, work: Path, program: tuple[str, ...]) -> None:
    write(run, "ünï", "x")
    here = run("log", "--json").out.encode()
    there = subprocess.run([*program, "log", "--json"], env=os.environ | NOT_UTF8, capture_output=True, check=True)
    assert there.stdout == here
    command = [*program, "run", "--", "sh", "-c", "echo $PYTHONUTF8 $LC_ALL"]
    ran = subprocess.run(command, env=os.environ | NOT_UTF8, capture_output=True, check=True)
    assert ran.stdout == b"0 C\n"


def test_with_another_file_name_encoding_the_error_says_how_to_start(work: Path) -> None:
    script = "import mulligan\ntry: mulligan.open()\nexcept mulligan.MulliganError as error: print(error.code)"
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | NOT_UTF8, capture_output=True, check=True)
    assert done.stdout == b"invalid_encoding\n"


def test_a_created_or_deleted_folder_is_one_line(run: Run, work: Path) -> None:
    (work / "keep").mkdir()
    (work / "keep" / "a").write_text("x")
    made = (
        "mkdir -p big/in keep/few; for i in 1 2 3; do echo $i > big/in/$i; echo $i > keep/few/$i; done; echo y > keep/a"
    )
    assert run("exec", "--", "sh", "-c", made).code == 0
    line = run("log").out
    assert "A big and 4 in it, M keep/a +1 -1, A keep/few, A keep/few/1 +1 -0 and 2 more" in line
    told = run("undo", "--yes").out.splitlines()
    assert told[:-1] == [
        "removed big and 4 in it",
        "restored keep/a",
        *("removed " + path for path in ("keep/few", "keep/few/1", "keep/few/2", "keep/few/3")),
    ]
    assert run("log", "--json").json[0]["changes"][1] == {"path": "big/in", "kind": "deleted", "added": 0, "removed": 0}


def test_a_moved_folder_is_shown_as_one_move(run: Run, work: Path) -> None:
    (work / "old" / "in").mkdir(parents=True)
    (work / "old" / "a").write_text("a")
    assert run("exec", "--", "mv", "old", "new").code == 0
    assert "R old → new and 2 in it" in run("log").out
    assert run("call", "move", "--args", '{"path": "new", "to": "newer"}').code == 0
    assert "R new → newer and 2 in it" in run("log").out
    assert run("exec", "--", "sh", "-c", "mkdir own; mv newer/a own/b").code == 0
    assert "A own, R newer/a → own/b" in run("log").out


def test_many_gaps_with_one_reason_are_one_line_and_git_files_come_last(
    run: Run, work: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    subprocess.run(["git", "init", "-q"], cwd=work, check=True)
    made = f"for i in 1 2 3 4; do echo $i > {outside}/$i; done; echo x > .git/description; echo x > z"
    assert run("exec", "--strategy", "notify", "--", "sh", "-c", made).code == 0
    assert "A z +1 -0, M .git/description" in run("log").out
    told = f"not captured {outside}/1 and 3 more: it is outside the workspace (`mulligan coverage` lists them)"
    assert told in run("undo", "--dry-run").out.splitlines()
    assert len(run("coverage").out.splitlines()) == 4
