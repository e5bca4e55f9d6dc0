"""Our ignore rules against the judge: `git check-ignore`, over generated rule files and paths."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from mulligan.files.tree.index import TreeCache
from mulligan.values.paths import ROOT
from tests.files.tree.ignored import is_ignored

NAMES = [
    b"a",
    b"b",
    b"ab",
    b"foo",
    b"bar",
    b"foo.o",
    b"a.c",
    b"b.py",
    b"x y",
    b"end ",
    b"#h",
    b"!n",
    b"[z]",
    b"\\s",
    b"*",
    b"-",
]
ODD_NAMES = [b"caf\xc3\xa9", b"caf\xe9", b"A", b"a-c", b"t\tt", b"{a,b}", b"a]", b"q?", b"..."]
PIECES = [
    b"*",
    b"**",
    b"?",
    b"/",
    b"/",
    b"[a-c]",
    b"[!a]",
    b"[^f]*",
    b"[[:alpha:]]",
    b"\\",
    b"\\*",
    b"[",
    b"]",
    b"***",
    b"{a,b}",
    b" ",
]
PIECES += [
    b"[]a]",
    b"[a-]",
    b"[\\]]",
    b"[[:foo:]]",
    b"[z-a]",
    b"[[:digit:][:upper:]]",
    b"\\/",
    b"[/]",
    b"**/",
    b"/**",
    b".",
    b"[[:a]",
    b"[\\a-c]",
]
LINES = [
    b"",
    b"#comment",
    b"\\#h",
    b"\\!n",
    b"foo/",
    b"*.o",
    b"!*.o",
    b"/a",
    b"a/b",
    b"a/**/b",
    b"**/foo",
    b"foo/**",
    b"end\\ ",
    b"x y   ",
    b"/",
    b"!",
    b"**",
]
LINES += [
    b"foo**/bar",
    b"/foo**/*o",
    b"a/b**/*b",
    b"**/a**/*a",
    b"a/f**",
    b"!foo/",
    b"*",
    b"!*/",
    b"a//b",
    b"//a",
    b"b\0hidden",
    b"caf\xe9",
    b"bar\r",
    b"\\",
    b"a\\",
    b"!/a/b/",
    b"/*",
    b"!/ab",
    b"foo.o  \\ ",
]


def rule_line(rng: random.Random) -> bytes:
    if rng.random() < 0.35:
        return rng.choice(LINES)
    body = b"".join(rng.choice(NAMES + ODD_NAMES if rng.random() < 0.55 else PIECES) for _ in range(rng.randint(1, 4)))
    return rng.choice([b"", b"", b"", b"!", b"/"]) + body + rng.choice([b"", b"", b"", b"/", b" ", b"\r"])


def rule_text(rng: random.Random) -> bytes:
    newline = rng.choice([b"\n", b"\n", b"\r\n"])
    text = newline.join(rule_line(rng) for _ in range(rng.randint(1, 6)))
    return rng.choice([b"", b"", b"", b"\xef\xbb\xbf"]) + text + rng.choice([b"", newline])


def random_path(rng: random.Random) -> bytes:
    return b"/".join(rng.choice(NAMES + (ODD_NAMES if rng.random() < 0.3 else [])) for _ in range(rng.randint(1, 4)))


def make_tree(root: bytes, rng: random.Random) -> list[tuple[bytes, bool]]:
    """A tree of random paths with random ignore files; returns every path in it and whether it is a directory."""
    for _ in range(45):
        path = os.path.join(root, random_path(rng))
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if not os.path.exists(path):
                Path(os.fsdecode(path)).touch()
        except (FileExistsError, NotADirectoryError):
            continue  # a file already stands where a directory was wanted
    found = []
    for directory, dirs, files in os.walk(root):
        dirs[:] = [name for name in dirs if name != b".git"]
        found += [(os.path.relpath(os.path.join(directory, name), root), True) for name in dirs]
        found += [(os.path.relpath(os.path.join(directory, name), root), False) for name in files]
        if directory == root or rng.random() < 0.3:
            with open(os.path.join(directory, b".gitignore"), "wb") as file:
                file.write(rule_text(rng))
    return found


def verdicts_of_git(root: bytes, paths: list[bytes]) -> list[bool]:
    """One verdict a path: ignored when the last pattern that matches does not begin with `!`."""
    command = [
        "git",
        "-c",
        "core.excludesFile=",
        "-c",
        "core.ignoreCase=false",
        "check-ignore",
        "--no-index",
        "--stdin",
        "-z",
        "-v",
        "-n",
    ]
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "HOME": os.fsdecode(root)}
    done = subprocess.run(command, input=b"\0".join(paths), cwd=root, env=env, capture_output=True, check=False)
    fields = done.stdout.split(b"\0")[:-1]
    patterns = fields[2::4]
    assert fields[3::4] == paths, done.stderr
    return [bool(pattern) and not pattern.startswith(b"!") for pattern in patterns]


def walked(root: Path) -> list[bytes]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return [os.fsencode(path) for path in TreeCache().walk(fd, ROOT).finish().files]
    finally:
        os.close(fd)


@pytest.mark.parametrize("seed", range(60))
def test_generated_rules_give_gits_verdict_on_every_path(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    root = os.fsencode(tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    found = make_tree(root, rng)
    (tmp_path / ".git/info/exclude").write_bytes(rule_text(rng))

    judged = verdicts_of_git(root, [path for path, _ in found])

    ours = [is_ignored(tmp_path, os.fsdecode(path), is_dir) for path, is_dir in found]
    wrong = [(path, is_dir, git) for (path, is_dir), git, us in zip(found, judged, ours, strict=True) if git != us]
    assert wrong == []
    kept = sorted(path for (path, is_dir), ignored in zip(found, judged, strict=True) if not is_dir and not ignored)
    assert [path for path in walked(tmp_path) if not path.endswith(b".gitignore")] == kept


@pytest.mark.parametrize("seed", range(100, 115))
def test_a_root_below_the_top_of_its_repository_gets_gits_verdict_too(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    found = make_tree(os.fsencode(tmp_path), rng)
    (tmp_path / ".git/info/exclude").write_bytes(rule_text(rng))
    judged = dict(zip(found, verdicts_of_git(os.fsencode(tmp_path), [path for path, _ in found]), strict=True))
    for directory in [path for (path, is_dir), ignored in judged.items() if is_dir and not ignored]:
        root = tmp_path / os.fsdecode(directory)
        below = {one: ignored for one, ignored in judged.items() if one[0].startswith(directory + b"/")}
        inside = [(path[len(directory) + 1 :], is_dir, ignored) for (path, is_dir), ignored in below.items()]
        assert [one for one in inside if is_ignored(root, os.fsdecode(one[0]), one[1]) != one[2]] == []
        kept = sorted(path for path, is_dir, ignored in inside if not is_dir and not ignored)
        assert [path for path in walked(root) if not path.endswith(b".gitignore")] == kept


def test_a_linked_worktree_has_the_rules_of_its_repository(tmp_path: Path) -> None:
    main, linked = tmp_path / "main", tmp_path / "linked"
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "init", "-q", main], check=True)
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "x"], cwd=main, check=True)
    subprocess.run(["git", "worktree", "add", "-q", linked], cwd=main, check=True, stderr=subprocess.DEVNULL)
    (main / ".git/info/exclude").write_text("secret\n/d/top\n")
    names = ["secret", "open", "d/secret", "d/top", "d/open"]
    (linked / "d").mkdir()
    for name in names:
        (linked / name).touch()
    assert verdicts_of_git(os.fsencode(linked), list(map(os.fsencode, names))) == [True, False, True, True, False]
    assert walked(linked) == [b"d/open", b"open"]
    assert walked(linked / "d") == [b"open"]


def test_the_generated_paths_are_many_and_both_kinds(tmp_path: Path) -> None:
    """The suite above judges at least 2 000 paths, and neither verdict is rare among them."""
    total = ignored = 0
    for seed in range(60):
        rng = random.Random(seed)
        root = tmp_path / str(seed)
        root.mkdir()
        found = make_tree(os.fsencode(root), rng)
        total += len(found)
        ignored += sum(is_ignored(root, os.fsdecode(path), is_dir) for path, is_dir in found)
    assert total >= 2_000
    assert total * 0.1 < ignored < total * 0.9
