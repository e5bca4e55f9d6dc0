"""The strict applier against `git apply`, on the differences between real releases of real packages.

The wheels are downloaded once, by pinned version, into `.tools/releases`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from zipfile import ZipFile

import pytest

from mulligan.files.patch.unified import PatchedFile, PatchHunk, UnifiedStaged, parse_unified, stage_unified
from mulligan.values.errors import Refused
from mulligan.values.paths import RepoPath

pytestmark = pytest.mark.hosts

RELEASES = Path(__file__).parents[3] / ".tools" / "releases"
PAIRS = [
    ("django", "5.0.14", "5.1.8"),
    ("pygments", "2.17.2", "2.19.1"),
    ("rich", "12.6.0", "13.9.4"),
    ("werkzeug", "2.3.8", "3.0.6"),
]
DIFFS_MIN = 500
GIT_ENV = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}

Texts = dict[str, bytes]


def wheel(name: str, version: str) -> Path:
    """The wheel of a release, from the disk or else from the package index."""
    found = list(RELEASES.glob(f"[{name[0]}{name[0].upper()}]{name[1:]}-{version}-*.whl"))
    if not found:
        RELEASES.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(RELEASES), f"{name}=={version}"], check=True)
        return wheel(name, version)
    return found[0]


def texts(archive: Path) -> Texts:
    with ZipFile(archive) as zipped:
        members = [member for member in zipped.namelist() if ".dist-info/" not in member and not member.endswith("/")]
        contents = {member: zipped.read(member) for member in members}
    return {member: content for member, content in contents.items() if b"\0" not in content}


def write_tree(root: Path, tree: Mapping[str, bytes]) -> None:
    for name, content in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def read_tree(root: Path) -> Texts:
    found = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".rej"]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def git(*args: str, cwd: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = GIT_ENV | {"GIT_CEILING_DIRECTORIES": str(cwd.parent)}
    return subprocess.run(["git", *args], cwd=cwd, env=env, input=stdin, capture_output=True)


@dataclass(frozen=True)
class Releases:
    """Every text that differs between the older and the newer releases, and git's diff of them."""

    old: Texts
    new: Texts
    patch: bytes

    def sections(self) -> dict[str, bytes]:
        """The diff of each file, by name."""
        parts = re.split(rb"^(?=diff --git )", self.patch, flags=re.MULTILINE)[1:]
        return {parse_unified(part, strip=2)[0].path: part for part in parts}


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    old: Texts = {}
    new: Texts = {}
    for name, before, after in PAIRS:
        one, other = texts(wheel(name, before)), texts(wheel(name, after))
        changed = {member for member in one.keys() | other.keys() if one.get(member) != other.get(member)}
        old |= {member: one[member] for member in changed & one.keys()}
        new |= {member: other[member] for member in changed & other.keys()}
    root = tmp_path_factory.mktemp("releases")
    write_tree(root / "old", old)
    write_tree(root / "new", new)
    diff = git("diff", "--no-index", "--no-renames", "old", "new", cwd=root)
    return Releases(old, new, diff.stdout)


def stage(patch: bytes, tree: Mapping[str, bytes]) -> UnifiedStaged:
    def look(path: RepoPath) -> PatchedFile | None:
        return PatchedFile(tree[path], 0o644) if path in tree else None

    return stage_unified(parse_unified(patch, strip=2), look)


def after(staged: UnifiedStaged, tree: Mapping[str, bytes]) -> dict[str, bytes]:
    written = {path: now.content for path, now in staged.files.items() if now is not None}
    return {path: content for path, content in tree.items() if path not in staged.files} | written


def test_real_diffs_apply_as_git_applies_them(releases: Releases, tmp_path: Path) -> None:
    write_tree(tmp_path, releases.old)
    applied = git("apply", "-p2", "-", cwd=tmp_path, stdin=releases.patch)
    staged = stage(releases.patch, releases.old)
    assert len(releases.sections()) >= DIFFS_MIN
    assert (applied.returncode, staged.rejects) == (0, ())
    assert after(staged, releases.old) == read_tree(tmp_path) == releases.new
    assert list(staged.applied) == sorted(releases.sections(), key=os.fsencode)


def test_the_inverses_of_real_diffs_apply(releases: Releases, tmp_path: Path) -> None:
    write_tree(tmp_path / "new", releases.old)
    write_tree(tmp_path / "old", releases.new)
    inverse = git("diff", "--no-index", "--no-renames", "-U1", "old", "new", cwd=tmp_path).stdout
    staged = stage(inverse, releases.new)
    assert staged.rejects == ()
    assert after(staged, releases.new) == releases.old


def test_renames_and_copies_that_git_finds_are_applied(releases: Releases, tmp_path: Path) -> None:
    moved = {f"moved/{name}": content for name, content in releases.new.items()}
    write_tree(tmp_path / "old", releases.old)
    write_tree(tmp_path / "new", moved)
    found = git("diff", "--no-index", "-M", "-l0", "old", "new", cwd=tmp_path).stdout
    assert found.count(b"\nrename from ") >= 300
    staged = stage(found, releases.old)
    assert staged.rejects == ()
    assert after(staged, releases.old) == moved


def disturb(random: Random, content: bytes, hunks: list[PatchHunk]) -> bytes:
    """A file somebody else has edited a little since the diff was made. The last line stays the last."""
    lines = content.splitlines(keepends=True)
    place = random.randrange(len(lines))
    hunk = random.choice(hunks)
    inside = min(hunk.old_start - 1 + random.randrange(max(len(hunk.old), 1)), len(lines) - 1)
    kind = random.choice(["insert first", "insert somewhere", "drop somewhere", "change somewhere", "change inside"])
    if kind.startswith("insert"):
        lines.insert(0 if kind == "insert first" else place, b"somebody was here\n")
    elif kind == "drop somewhere":
        del lines[place]
    else:
        lines[inside if kind == "change inside" else place] = b"somebody was here\n"
    return b"".join(lines)


def exact_by_git(report: str) -> set[str]:
    """The files that `git apply --reject --verbose` applied whole, without moving any hunk."""
    clean = set(re.findall(r"^Applied patch (.+) cleanly\.$", report, re.MULTILINE))
    checks = re.split(r"^Checking patch (.+)\.\.\.$", report, flags=re.MULTILINE)
    moved = {name for name, told in zip(checks[1::2], checks[2::2], strict=True) if re.search(r"\(offset |fuzz", told)}
    return clean - moved


@pytest.mark.parametrize("seed", range(4))
def test_exactly_the_hunks_that_git_would_move_or_reject_are_rejected(
    releases: Releases, tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    sections = {name: part for name, part in releases.sections().items() if name in releases.old.keys() & releases.new}
    disturbed = {}
    for name, part in sections.items():
        hunks = [hunk for hunk in parse_unified(part, strip=2)[0].hunks if isinstance(hunk, PatchHunk)]
        disturbed[name] = disturb(random, releases.old[name], hunks)
    write_tree(tmp_path, disturbed)
    told = git("apply", "-p2", "--reject", "--verbose", "-", cwd=tmp_path, stdin=b"".join(sections.values()))
    staged = {name: stage(part, disturbed) for name, part in sections.items()}
    ours = {name for name, one in staged.items() if not one.rejects}
    theirs = exact_by_git(told.stderr.decode())
    assert len(sections) >= DIFFS_MIN and 50 <= len(theirs) <= len(sections) - 50
    assert ours == theirs
    by_git = read_tree(tmp_path)
    assert {name: after(staged[name], {})[name] for name in ours} == {name: by_git[name] for name in ours}


HEADERS_ALONE = {
    "mode": (b"diff --git o/x n/x\nold mode 100644\nnew mode 100755\n", {"x": (b"x\n", True)}),
    "rename": (
        b"diff --git o/x n/z\nsimilarity index 100%\nrename from x\nrename to z\n",
        {"z": (b"x\n", False)},
    ),
    "copy": (
        b"diff --git o/x n/z\nsimilarity index 100%\ncopy from x\ncopy to z\n",
        {"x": (b"x\n", False), "z": (b"x\n", False)},
    ),
    "new": (b"diff --git o/z n/z\nnew file mode 100755\nindex 0000000..e69de29\n", {"z": (b"", True)}),
    "gone": (b"diff --git o/e n/e\ndeleted file mode 100644\nindex e69de29..0000000\n", {}),
}
"""Headers that need no hunks, each with what it leaves of its own files."""

PLAIN_NEXT = b"--- o/y\n+++ n/y\n@@ -1 +1 @@\n-y\n+Y\n"


def with_modes(root: Path) -> dict[str, tuple[bytes, bool]]:
    return {name: (content, os.access(root / name, os.X_OK)) for name, content in read_tree(root).items()}


@pytest.mark.parametrize("kind", HEADERS_ALONE)
def test_a_plain_section_after_a_header_that_needs_no_hunks_is_a_section_of_its_own(kind: str, tmp_path: Path) -> None:
    """`git apply` gives the mode of one file to the other there, or refuses; so it gets the sections one by one."""
    header, left = HEADERS_ALONE[kind]
    tree = {"x": b"x\n", "y": b"y\n", "e": b""}
    write_tree(tmp_path, tree)
    one_by_one = [git("apply", "-p1", "-", cwd=tmp_path, stdin=part).returncode for part in (header, PLAIN_NEXT)]
    before = {RepoPath(path): PatchedFile(content, 0o644) for path, content in tree.items()}
    staged = stage_unified(parse_unified(header + PLAIN_NEXT), before.get)
    assert (one_by_one, staged.rejects) == ([0, 0], ())
    made = {path: (now.content, bool(now.mode & 0o100)) for path, now in staged.files.items() if now is not None}
    kept = {path: (content, False) for path, content in tree.items() if path not in staged.files}
    assert made | kept == with_modes(tmp_path)
    assert left.items() <= made.items() | kept.items()


@pytest.mark.parametrize(
    "header",
    [
        b"diff --git o/z n/z\nnew file mode 100644\n--- /dev/null\n+++ n/w\n@@ -0,0 +1 @@\n+w\n",
        b"diff --git o/x n/x\ndeleted file mode 100644\n--- o/y\n+++ /dev/null\n@@ -1 +0,0 @@\n-y\n",
        b"diff --git o/x n/z\nrename from x\nrename to z\n--- o/x\n+++ n/w\n@@ -1 +1 @@\n-x\n+w\n",
    ],
)
def test_a_header_that_gives_one_file_two_names_is_refused_as_git_refuses_it(header: bytes, tmp_path: Path) -> None:
    write_tree(tmp_path, {"x": b"x\n", "y": b"y\n"})
    assert git("apply", "-p1", "-", cwd=tmp_path, stdin=header).returncode != 0
    with pytest.raises(Refused) as refused:
        parse_unified(header)
    assert refused.value.code == "patch_parse_error"
