"""Paths that try to get out, to hang, or to be something else: on every effect, with both ways of resolving."""

from __future__ import annotations

import os
import socket
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mulligan.files.diff import quote
from mulligan.testing import Link, Tree, plant, tree_of
from mulligan.values.canonical import encode
from mulligan.values.paths import text_from_wire
from tests.effects.effect_session import EffectSession, open_effect_session

SECRET = "SECRET-THAT-MUST-NOT-BE-SEEN"


@dataclass(frozen=True)
class Attack:
    """`code` is what every effect must answer; None: a name like any other, which must just stay inside."""

    path: str
    code: str | None


def wire(raw: bytes) -> str:
    return "base64:" + b64encode(raw).decode()


def traversals() -> Iterator[Attack]:
    ups = ["..", "../", "../..", "../../../../../../../../..", "./..", "d/../..", "d/./../../", "d//..//..", "no/../.."]
    ends = ["", "/secret", "/outside/secret", "/work-evil/secret", "/etc/passwd", "/work/d/a"]
    for up in ups:
        for end in ends:
            yield Attack(up.rstrip("/") + end, "path_not_allowed")
            yield Attack(wire((up.rstrip("/") + end).encode()), "path_not_allowed")


def absolutes(root: Path) -> Iterator[Attack]:
    outside = ["/", "//", "/etc/passwd", "/etc/../etc/passwd", "/dev/null", "/dev/zero", "/dev/tty", "/proc/self/mem"]
    outside += ["/proc/self/root/etc/passwd", "/proc/self/cwd", "/proc/1/root", "/proc/self/fd/0", "/sys", "/tmp"]
    outside += [
        f"/proc/self/root{root}/d/a",
        f"{root}-evil/secret",
        f"{root}/../outside/secret",
        f"{root}/..",
        f"{root}x",
    ]
    outside += [
        str(root.parent),
        f"{root}/../work-evil",
        f"/{root}/../outside/secret",
        f"{root}/d/../../outside/secret",
    ]
    for path in outside:
        yield Attack(path, "path_not_allowed")
        yield Attack(wire(path.encode()), "path_not_allowed")


def links() -> Iterator[Attack]:
    for name in OUTWARD:
        yield Attack(f"{name}/secret", "symlink_not_allowed")
        yield Attack(f"{name}/new", "symlink_not_allowed")
        yield Attack(f"{name}/new/deep", "symlink_not_allowed")
        yield Attack(f"./d/../{name}/./secret", "symlink_not_allowed")
    for name in ("loop", "loop-a", "loop-b", "d/loop"):
        yield Attack(f"{name}/x", "symlink_not_allowed")
    yield Attack("chain-10/a", "symlink_not_allowed")


OUTWARD = {
    "out": "../outside",
    "abs": "ABSOLUTE",
    "d/deep": "../../outside",
    "round": "d/../../outside",
    "chain": "chain-2",
    "chain-2": "d/../out",
    "evil": "../work-evil",
    "root": "/",
    "proc": "/proc/self/root",
    "cwd": "/proc/self/cwd",
    "slashes": "..//./outside///",
    "parent": "..",
    "etc": "/etc",
    "through": "in/../../outside",
}


def malformed() -> Iterator[Attack]:
    for path in ("", "\0", "a\0", "a/\0/b", "../\0", "base64:", "base64:!", "base64:YQ", "base64:Li4=x"):
        yield Attack(path, "invalid_path")
    for raw in (b"\0", b"a\0b"):
        yield Attack(wire(raw), "invalid_path")
    for path in (
        "x" * 256,
        "d/" + "é" * 128,
        "x/" * 3000 + "x",
        "x" * 5000,
        wire(b"y" * 4096),
        "d/" + "\U0001f600" * 64,
    ):
        yield Attack(path, "invalid_path")
    for path in ("\ud800", "d/\udfff", "\udc00x"):
        yield Attack(path, "invalid_path")


def look_alikes() -> Iterator[Attack]:
    odd = [
        "．．/secret",
        "‥/secret",
        "․․/secret",
        "..∕secret",
        "..／secret",
        "..\\secret",
        "%2e%2e/secret",
        "%2e%2e%2fsecret",
    ]
    odd += [
        "..;/secret",
        "...",
        "....//secret",
        ".. /secret",
        " ../secret",
        "..\u200b/secret",
        "\u202e../secret",
        "~",
        "~root/x",
    ]
    odd += [
        "C:\\x",
        "\\\\host\\share",
        "file:///etc/passwd",
        "d/a.",
        "d/a ",
        "CON",
        "nul",
        "-rf",
        "--help",
        "$HOME",
        "`id`",
    ]
    odd += [
        "*",
        "?",
        "[a]",
        "{a,b}",
        "!x",
        "#x",
        "a\nb",
        "a\rb",
        "\x1b[31m",
        "\u0000".replace("\0", "\x01"),
        "é",
        "e\u0301",
    ]
    for path in odd:
        yield Attack(path, None)
    for raw in (b"\xff", b"\xff/\xfe", b"d/\x80", b"..\xff", b"\xc0\xae\xc0\xae/secret", b"base64:x"):
        yield Attack(wire(raw), None)


def in_git() -> Iterator[str]:
    for name in (".git", ".GIT", ".Git", ".git.", ".git ", ".git. .", "git~1", "GIT~1", ".g\u200cit", ".git\ufeff"):
        yield name
        yield f"{name}/config"
        yield f"d/{name}/hooks/pre-commit"
    yield from (".git::$INDEX_ALLOCATION/config", "to-git/config", "d/../.git/config", wire(b".git/config"))


def special() -> Iterator[str]:
    yield from ("fifo", "socket", "to-fifo", "d/../fifo")


def world(base: Path) -> EffectSession:
    plant(base / "outside", {"secret": SECRET, "dir/secret": SECRET})
    plant(base / "work-evil", {"secret": SECRET})
    effects = open_effect_session(base)
    outward = {name: Link(target.replace("ABSOLUTE", str(base / "outside"))) for name, target in OUTWARD.items()}
    chain = {f"chain-{at}": Link(f"chain-{at + 1}") for at in range(10, 61)}
    effects.plant(
        {"d/a": "one\n", "safe": "one\n", "in": Link("d"), ".git/config": "", "to-git": Link(".git"), **outward}
    )
    effects.plant(
        {"loop": Link("loop"), "loop-a": Link("loop-b"), "loop-b": Link("loop-a"), "d/loop": Link("../d/loop")}
    )
    effects.plant({**chain, "chain-61": Link("d"), "to-fifo": Link("fifo")})
    os.mkfifo(effects.root / "fifo")
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(effects.root)
        made.bind("socket")
        os.chdir(here)
    return effects


READS: dict[str, dict[str, object]] = {
    "read_file": {},
    "stat": {},
    "exists": {},
    "list_dir": {},
    "grep": {"pattern": "S"},
    "glob": {"pattern": "**"},
}
WRITES: dict[str, dict[str, object]] = {
    "write_file": {"content": "x"},
    "write_file deep": {"content": "x", "create_parents": True},
    "write_file new": {"content": "x", "create_parents": True, "mode": "create_new"},
    "edit_file": {"old_string": "one", "new_string": "two"},
    "delete": {"recursive": True},
    "move": {"to": "moved"},
    "move to": {"path": "safe", "overwrite": True},
    "mkdir": {"parents": True},
    "patch add": {},
    "patch update": {},
    "patch delete": {},
    "patch move": {},
}
PATCHES = {
    "patch add": "*** Add File: {}\n+x",
    "patch update": "*** Update File: {}\n@@\n-one\n+two",
    "patch delete": "*** Delete File: {}",
    "patch move": "*** Update File: safe\n*** Move to: {}",
}


@pytest.fixture(scope="module", params=["openat2", "walk"])
def effects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EffectSession]:
    made = world(tmp_path_factory.mktemp("attacks"))
    if request.param == "walk":
        disk = made.workspace.open_root.disk
        disk.root = replace(disk.root, resolves_beneath=False)
    yield made
    made.workspace.close()


def ask(effects: EffectSession, kind: str, path: str) -> tuple[str, str | None]:
    """Status and code of one request, which is put back whatever it did. Nothing secret is in the answer.

    Inside another call it is a savepoint of that, which is quicker.
    """
    params = {"path": path, **READS.get(kind, {}), **WRITES.get(kind, {})}
    if kind in PATCHES:
        params = {"patch": f"*** Begin Patch\n{PATCHES[kind].format(path)}\n*** End Patch"}
    if kind == "move to":
        params["to"] = path
    with effects.session.call() as call:
        receipt = call.perform("apply_patch" if kind in PATCHES else kind.partition(" ")[0], **params)
        call.fail("only an attack")
    assert SECRET.encode() not in encode(receipt.to_dict())
    return receipt.status, receipt.error_code


def around(effects: EffectSession) -> dict[str, Tree]:
    base = effects.root.parent
    return {name: tree_of(base / name) for name in ("outside", "work-evil")}


def inside(effects: EffectSession) -> list[str]:
    return sorted(
        os.fsdecode(name)
        for folder in (b".", b"d", b".git")
        for name in os.listdir(os.fsencode(effects.root) + b"/" + folder)
    )


STATUS = {"path_not_allowed": "forbidden", "symlink_not_allowed": "forbidden", "invalid_path": "error"}


def expected(kind: str, attack: Attack) -> set[tuple[str, str | None]]:
    assert attack.code is not None
    if kind not in PATCHES:
        return {(STATUS[attack.code], attack.code)}
    # A name that is empty or has a line break is no name for the grammar of a patch, which says so first.
    wrong: set[tuple[str, str | None]] = {("parse_error", "patch_parse_error"), ("reject", "invalid_path")}
    wrong |= {
        ("error", "invalid_path"),
        ("error", "invalid_patch"),
        ("not_found", "update_target_not_found"),
        ("not_found", "delete_target_not_found"),
    }
    if kind == "patch move" and not attack.path.strip():
        return {*wrong, ("ok", None)}  # no name at all: the file stays where it is
    return wrong if attack.code == "invalid_path" else {("forbidden", attack.code)}


@pytest.mark.req(
    "D18.path_escape",
    "D18.odd_names",
    "D8.openat2",
    "D8.nofollow_walk",
    "D3.judged_handle_is_acted_on",
    "S1.cap.fail_closed_on_escape",
    "S1.adapter.path_canonical",
    "S1.write_file.forbidden",
    "S1.read_file.forbidden",
)
@pytest.mark.parametrize("kind", [*READS, *WRITES])
def test_no_path_reaches_outside_the_root(effects: EffectSession, kind: str) -> None:
    attacks = [*traversals(), *absolutes(effects.root), *links(), *malformed(), *look_alikes()]
    assert len(attacks) >= 150
    before, own = around(effects), inside(effects)
    wrong = {}
    with effects.session.call("attacks"):
        for attack in attacks:
            found = ask(effects, kind, attack.path)
            if attack.code is not None and found not in expected(kind, attack):
                wrong[attack.path[:80]] = (found, attack.code)
    assert wrong == {}
    assert around(effects) == before
    assert inside(effects) == own


@pytest.mark.req("D8.patch_targets_checked", "D18.path_escape", "D6.tools_never_write_git")
@pytest.mark.parametrize(
    "diff",
    ["--- /dev/null\n+++ {0}\n@@ -0,0 +1 @@\n+x\n", "--- {0}\n+++ {0}\n@@ -1 +1 @@\n-one\n+two\n"],
    ids=["adds", "updates"],
)
def test_no_patch_reaches_outside_the_root(effects: EffectSession, diff: str) -> None:
    attacks = {one.path: one.code for one in [*traversals(), *absolutes(effects.root), *links(), *look_alikes()]}
    attacks |= dict.fromkeys(in_git(), "path_not_allowed")
    forbidden = {path: code for path, code in attacks.items() if code is not None and STATUS[code] == "forbidden"}
    assert len(forbidden) >= 150
    before, own = around(effects), inside(effects)
    found = {}
    with effects.session.call("attacks") as call:
        for path in forbidden:
            name = quote(b"b/" + text_from_wire(path).encode("utf-8", "surrogateescape"))
            receipt = call.apply_patch(diff.format(name), patch_format="unified")
            found[path] = receipt.error_code if receipt.status == "forbidden" else receipt.status
    assert found == forbidden
    assert (around(effects), inside(effects)) == (before, own)


@pytest.mark.req("D6.tools_never_write_git", "D18.path_escape")
@pytest.mark.parametrize("kind", WRITES)
def test_no_file_tool_writes_into_git(effects: EffectSession, kind: str) -> None:
    for path in in_git():
        assert ask(effects, kind, path) == ("forbidden", "path_not_allowed"), path


@pytest.mark.req("D18.special_files")
@pytest.mark.parametrize("kind", [*READS, *WRITES])
def test_special_files_neither_block_nor_change(effects: EffectSession, kind: str) -> None:
    codes = {"list_dir": "not_directory", "grep": "not_directory", "glob": "not_directory", "patch delete": None}
    for path in special():
        status, code = ask(effects, kind, path)
        if kind in ("stat", "exists"):
            assert status == "ok"
        elif kind in ("write_file new", "mkdir", "move to", "move", "delete", *PATCHES):
            assert status in ("conflict", "error", "reject", "ok") and (status != "ok" or path == "to-fifo"), (
                path,
                code,
            )
        else:
            assert (status, code) == ("error", codes.get(kind, "special_file")), path
    assert {"fifo", "socket", "to-fifo"} <= set(os.listdir(effects.root))


def test_deleting_a_link_keeps_its_target(effects: EffectSession) -> None:
    before = around(effects)
    for name in OUTWARD:
        assert ask(effects, "delete", name) == ("ok", None)
        assert ask(effects, "move", name) == ("ok", None)
        assert ask(effects, "patch delete", name) == ("ok", None)
        for kind in ("read_file", "write_file", "edit_file", "list_dir", "patch add", "patch update"):
            assert ask(effects, kind, name) == ("forbidden", "symlink_not_allowed"), (kind, name)
    assert around(effects) == before
