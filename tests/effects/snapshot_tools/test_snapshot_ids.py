"""Fingerprints, manifests and the ids that follow from them."""

from __future__ import annotations

import json
import random
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from mulligan.files.snapshot.fingerprint import Fingerprint
from mulligan.files.snapshot.manifest import CapturedFile, Manifest, snapshot_id
from mulligan.values.digest import digest_of
from mulligan.values.paths import RepoPath
from tests.effects.snapshot_tools.snapshot_workspace import SnapshotWorkspace, git, open_snapshot_workspace

EMPTY_ID = "sha256:ab8e276bbdf315853db202f46bbea6427a77d47dbf08c407b2acff41a238b421"
MAIN_ID = "sha256:1410c76f711659054a75d2c89bd09f8ccea924ca83b66fa38367a8b8e2f042fb"
NAMES = ["a", "b-c", "d.e", "F", "ä", "日本", "x y", "z~", "🦀", '"q"', "tab\there"]


def independent_id(fingerprint: dict[str, str], files: dict[str, bytes]) -> str:
    rows = [{"blob": f"sha256:{sha256(files[p]).hexdigest()}", "path": p} for p in sorted(files, key=str.encode)]
    one, two = (
        json.dumps(v, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        for v in (fingerprint, {"entries": rows})
    )
    return "sha256:" + sha256(f"{one}\n{two}".encode()).hexdigest()


@pytest.mark.req("D10.vector_empty", "S2.create.output", "S2.snapshot_id.encoding")
def test_the_known_repository_with_an_empty_manifest_has_the_known_id(repo: SnapshotWorkspace) -> None:
    assert repo.ok("snapshot.create", paths=[])["snapshot_id"] == EMPTY_ID


@pytest.mark.req("D10.vector_main_rs", "S2.create.given_paths")
def test_the_known_repository_with_one_file_has_the_known_id(repo: SnapshotWorkspace) -> None:
    assert repo.snapshot("src/main.rs") == MAIN_ID


@pytest.mark.req("C17.goldens_executed")
def test_a_directory_has_the_id_of_its_files(repo: SnapshotWorkspace) -> None:
    assert repo.snapshot("src") == MAIN_ID == repo.snapshot("src/") == repo.snapshot("./src//main.rs")


@pytest.mark.req(
    "S2.snapshot_id.derivation",
    "S2.snapshot_id.manifest_shape",
    "S2.snapshot_id.manifest_sorted",
    "S2.fingerprint.canonical",
    "D4.fingerprints_strings_only",
)
def test_ids_agree_with_an_independent_implementation_on_a_thousand_manifests() -> None:
    rng = random.Random(6)
    for _ in range(1000):
        files = {
            "/".join(rng.choices(NAMES, k=rng.randint(1, 4))): rng.randbytes(rng.randint(0, 40))
            for _ in range(rng.randint(0, 12))
        }
        print_ = Fingerprint(
            rng.randbytes(20).hex(), rng.choice(["", rng.randbytes(20).hex()]), rng.randbytes(32).hex()
        )
        entries = [
            CapturedFile(RepoPath(p), digest_of(d), len(d), rng.choice([0o644, 0o755])) for p, d in files.items()
        ]
        rng.shuffle(entries)
        assert snapshot_id(print_, Manifest.of(entries)) == independent_id(print_.to_json(), files)


@pytest.mark.req("D10.meta_beside_manifest", "C12.kinds_and_modes_kept")
def test_mode_kind_and_empty_directories_do_not_change_the_id() -> None:
    print_ = Fingerprint("", "", "0" * 64)
    blob = digest_of(b"x")
    plain = Manifest.of([CapturedFile(RepoPath("a"), blob, 1)])
    other = Manifest.of(
        [CapturedFile(RepoPath("a"), blob, 1, 0o755, "symlink")], [(RepoPath("e"), 0o700)], [RepoPath(".")]
    )
    assert snapshot_id(print_, plain) == snapshot_id(print_, other)
    assert Manifest.from_json(json.loads(json.dumps(other.to_json()))) == other


@pytest.mark.req("S2.fingerprint.head_oid", "S2.fingerprint.index_oid", "S2.fingerprint.status_hash")
def test_the_fingerprint_agrees_with_git(repo: SnapshotWorkspace) -> None:
    repo.write("new/a.txt", "1")
    repo.write("README.md", "changed")
    git(repo.root, "mv", "src/main.rs", "src/moved.rs")
    found = repo.ok("snapshot.create", paths=[])["fingerprint"]
    assert found == {
        "head_oid": git(repo.root, "rev-parse", "HEAD").decode().strip(),
        "index_oid": git(repo.root, "write-tree").decode().strip(),
        "status_hash": sha256(git(repo.root, "status", "--porcelain=v1", "-z")).hexdigest(),
    }


@pytest.mark.req("S2.fingerprint.head_oid", "S2.fingerprint.index_oid")
def test_before_the_first_commit_there_is_no_head_and_in_a_conflict_no_index(tmp_path: Path) -> None:
    root = tmp_path / "r"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    with open_snapshot_workspace(root, tmp_path / "s") as workspace:
        found = workspace.ok("snapshot.create", paths=[])["fingerprint"]
        assert (found["head_oid"], found["index_oid"]) == ("", git(root, "write-tree").decode().strip())
    conflicted(root)
    with open_snapshot_workspace(root, tmp_path / "s") as workspace:
        assert workspace.ok("snapshot.create", paths=[])["fingerprint"]["index_oid"] == ""


def conflicted(root: Path) -> None:
    for branch, text in (("main", "0"), ("one", "1"), ("two", "2")):
        if branch != "main":
            git(root, "checkout", "-q", "-b", branch, "main")
        (root / "f").write_text(text)
        git(root, "add", "f")
        git(root, "commit", "-q", "-m", branch)
    with pytest.raises(subprocess.CalledProcessError):
        git(root, "merge", "one")


@pytest.mark.req("D10.without_git")
def test_without_git_every_file_counts_as_untracked(folder: SnapshotWorkspace) -> None:
    folder.write("b/c", "1")
    folder.write("b-c", "2")
    folder.write("a", "3")
    found = folder.ok("snapshot.create", paths=["."])
    listed = b"?? a\0?? b-c\0?? b/c\0"
    assert found["fingerprint"] == {"head_oid": "", "index_oid": "", "status_hash": sha256(listed).hexdigest()}


def test_packed_refs_and_detached_heads_are_read_as_git_reads_them(repo: SnapshotWorkspace) -> None:
    git(repo.root, "pack-refs", "--all")
    packed = repo.ok("snapshot.create", paths=[])["fingerprint"]["head_oid"]
    git(repo.root, "checkout", "-q", "--detach")
    detached = repo.ok("snapshot.create", paths=[])["fingerprint"]["head_oid"]
    assert packed == detached == git(repo.root, "rev-parse", "HEAD").decode().strip()


def test_a_linked_working_tree_has_its_own_head_and_index(repo: SnapshotWorkspace, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    git(repo.root, "worktree", "add", "-q", "-b", "side", str(linked))
    (linked / "extra").write_text("1")
    git(linked, "add", "extra")
    git(linked, "commit", "-q", "-m", "extra")
    with open_snapshot_workspace(linked, tmp_path / "store2") as workspace:
        found = workspace.ok("snapshot.create", paths=[])["fingerprint"]
    assert found["head_oid"] == git(linked, "rev-parse", "HEAD").decode().strip()
    assert found["index_oid"] == git(linked, "write-tree").decode().strip()
