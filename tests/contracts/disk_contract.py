"""The contract of every disk, real or simulated: the same steps, results and errors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest

from mulligan.files.disk import NOTHING
from mulligan.files.resolve import ResolvedPath
from mulligan.testing.builders import Dir, File, Link, Node, Sketch, as_tree
from mulligan.testing.faults import Crash, FaultPlan
from mulligan.values.entries import ABSENT, DirEntry, FileEntry, SymlinkEntry
from mulligan.values.errors import Refused
from mulligan.values.paths import RepoPath
from tests.contracts.disk_under_test import DRAFT, DiskContractBase, DiskUnderTest, file_entry
from tests.contracts.replacement_contract import ReplacementContract

WOOD: Sketch = {
    "a": "A",
    "d/f": "F",
    "d/e/g": "G",
    "to-a": Link("a"),
    "to-d": Link("d"),
    "to-e": Link("to-d/e"),
    "d/up": Link("../a"),
    "d/e/up-through": Link("../../to-e/../f"),
    "chain": Link("to-e/up-through"),
    "self": Link("self"),
    "loop-1": Link("loop-2/x"),
    "loop-2": Link("loop-1"),
    "dangling": Link("d/new"),
    "out": Link("../elsewhere"),
    "far": Link("/elsewhere"),
    "round": Link("d/../../outside"),
    "here": Link("."),
    "through-file": Link("a/x"),
    "file-and-up": Link("a/../d"),
}


class ResolveContract(DiskContractBase):
    """A path is resolved to one directory entry."""

    @pytest.mark.parametrize(
        ("path", "real"),
        [
            (".", "."),
            ("a", "a"),
            ("d/e/g", "d/e/g"),
            ("nothing", "nothing"),
            ("d/nothing", "d/nothing"),
            ("to-a", "a"),
            ("to-d/f", "d/f"),
            ("to-e/g", "d/e/g"),
            ("to-d/up", "a"),
            ("to-e/up-through", "d/f"),
            ("chain", "d/f"),
            ("dangling", "d/new"),
            ("here", "."),
            ("here/to-d/f", "d/f"),
            ("to-e", "d/e"),
        ],
    )
    def test_a_path_resolves_as_in_the_kernel(self, path: str, real: str) -> None:
        with self.open_disk(WOOD) as tested, tested.disk.resolve(RepoPath(path)) as resolved:
            assert (resolved.path, resolved.place) == (real, tested.disk.root.place_of(RepoPath(real)))

    @pytest.mark.parametrize(
        ("path", "real"), [("to-a", "to-a"), ("to-d/up", "d/up"), ("self", "self"), ("out", "out")]
    )
    def test_with_final_false_the_last_link_is_not_followed(self, path: str, real: str) -> None:
        with self.open_disk(WOOD) as tested, tested.disk.resolve(RepoPath(path), final=False) as resolved:
            assert resolved.path == real

    @pytest.mark.parametrize(
        ("path", "error"),
        [
            ("missing/x", FileNotFoundError),
            ("a/x", NotADirectoryError),
            ("to-a/x", NotADirectoryError),
            ("through-file", NotADirectoryError),
            ("file-and-up", NotADirectoryError),
            ("dangling/x", FileNotFoundError),
        ],
    )
    def test_a_missing_directory_or_loop_raises_its_error(self, path: str, error: type[OSError]) -> None:
        with self.open_disk(WOOD) as tested, pytest.raises(error):
            tested.disk.resolve(RepoPath(path))

    @pytest.mark.parametrize("path", ["self", "self/x", "loop-1", "loop-2/y"])
    def test_circular_links_raise_an_error(self, path: str) -> None:
        with self.open_disk(WOOD) as tested, pytest.raises(OSError) as error:
            tested.disk.resolve(RepoPath(path))
        assert error.value.errno == errno.ELOOP

    @pytest.mark.parametrize("path", ["out", "out/x", "far", "far/x", "round"])
    def test_no_link_leads_out_of_the_root(self, path: str) -> None:
        with self.open_disk(WOOD) as tested, pytest.raises(Refused) as refused:
            tested.disk.resolve(RepoPath(path))
        assert (refused.value.status, refused.value.code) == ("forbidden", "symlink_not_allowed")

    @pytest.mark.parametrize("path", ["to-a", "to-d/f", "here/a"])
    def test_with_links_denied_no_link_is_followed(self, path: str) -> None:
        with self.open_disk(WOOD) as tested, pytest.raises(Refused) as refused:
            tested.disk.resolve(RepoPath(path), follow="deny")
        assert refused.value.code == "symlink_not_allowed"

    def test_resolve_exactly_follows_no_link(self) -> None:
        with self.open_disk(WOOD) as tested:
            with tested.disk.resolve_exactly(RepoPath("to-a")) as resolved:
                assert resolved.path == "to-a"
            with pytest.raises(Refused):
                tested.disk.resolve_exactly(RepoPath("to-d/f"))

    def test_names_that_are_not_utf8_work(self) -> None:
        with (
            self.open_disk({"\udcff/\udcfe": "x"}) as tested,
            tested.disk.resolve(RepoPath("\udcff/\udcfe")) as resolved,
        ):
            assert (resolved.path, resolved.name, tested.disk.image(resolved).content) == (
                "\udcff/\udcfe",
                b"\xfe",
                b"x",
            )

    def test_a_resolved_path_stays_in_the_directory_it_was_found_in(self) -> None:
        with self.open_disk({"d/f": "old", "e": None}) as tested, tested.resolve("d/f") as resolved:
            tested.person.remove("d/f")
            tested.person.remove_dir("d")
            tested.person.make_link("d", "e")
            assert tested.disk.image(resolved) == NOTHING


class ReadContract(DiskContractBase):
    def test_an_image_holds_entry_and_content(self) -> None:
        sketch: Sketch = {"f": File(b"text", 0o640, 5_000), "l": Link("any where"), "d": Dir(0o700, 7_000)}
        with self.open_disk(sketch) as tested:
            images = {name: tested.disk.image(tested.resolve(name)) for name in ("f", "l", "d", "none")}
        assert images["f"].entry == file_entry(b"text", 0o640, 5_000)
        assert (images["f"].content, images["f"].links, images["f"].replaceable) == (b"text", 1, True)
        assert (images["l"].entry, images["l"].content, images["l"].replaceable) == (
            SymlinkEntry("any where"),
            None,
            True,
        )
        assert (images["d"].entry, images["d"].replaceable) == (DirEntry(0o700, 7_000), False)
        assert images["none"] == NOTHING

    def test_the_root_is_a_directory(self) -> None:
        with self.open_disk({"b": "", "a": "", "\udcff": "", "é": ""}) as tested, tested.resolve(".") as resolved:
            assert isinstance(tested.disk.image(resolved).entry, DirEntry)
            assert tested.disk.children(resolved) == [b"a", b"b", "é".encode(), b"\xff"]

    def test_hard_links_of_a_file_are_counted(self) -> None:
        with self.open_disk({"f": "x"}) as tested, tested.resolve("f") as resolved:
            tested.person.hard_link("f", "g")
            assert tested.disk.image(resolved).links == 2

    @pytest.mark.parametrize(("name", "error"), [("none", FileNotFoundError), ("f", NotADirectoryError)])
    def test_only_a_directory_has_children(self, name: str, error: type[OSError]) -> None:
        with self.open_disk({"f": ""}) as tested, tested.resolve(name) as resolved, pytest.raises(error):
            tested.disk.children(resolved)

    def test_reading_announces_no_step(self) -> None:
        with self.open_disk(WOOD) as tested, tested.resolve("d") as resolved:
            tested.disk.image(resolved)
            tested.disk.children(resolved)
            tested.disk.mtime_ns(resolved)
            assert tested.steps() == []


Doing = Callable[[DiskUnderTest, ResolvedPath], object]

_STAGED: dict[str, Doing] = {
    "stage_file": lambda tested, resolved: tested.disk.stage_file(resolved, DRAFT, b"1234", like=file_entry(b"1234")),
    "stage_link": lambda tested, resolved: tested.disk.stage_link(resolved, DRAFT, "to"),
}
DOING: dict[str, tuple[list[str], Doing]] = {
    "stage_file": (["stage.create", "stage.half", "stage.write"], _STAGED["stage_file"]),
    "stage_link": (["stage.link"], _STAGED["stage_link"]),
    "exchange": (["exchange"], lambda tested, resolved: tested.disk.exchange(resolved, DRAFT)),
    "place": (["place"], lambda tested, resolved: tested.disk.place(resolved, DRAFT)),
    "set_aside": (["set_aside"], lambda tested, resolved: tested.disk.set_aside(resolved, DRAFT)),
    "discard": (["discard"], lambda tested, resolved: tested.disk.discard(resolved, DRAFT)),
    "make_dir": (["make_dir"], lambda tested, resolved: tested.disk.make_dir(resolved, 0o750)),
    "remove_dir": (["remove_dir"], lambda tested, resolved: tested.disk.remove_dir(resolved)),
    "write_in_place": (
        ["in_place.open", "in_place.half", "in_place.write"],
        lambda tested, resolved: tested.disk.write_in_place(resolved, b"1234"),
    ),
    "set_metadata": (["metadata"], lambda tested, resolved: tested.disk.set_metadata(resolved, file_entry(b"", 0o604))),
    "set_mtime": (["mtime"], lambda tested, resolved: tested.disk.set_mtime(resolved, 9_000)),
    "sync_file": (["sync.file"], lambda tested, resolved: tested.disk.sync_file(resolved)),
    "sync_dir": (["sync.dir"], lambda tested, resolved: tested.disk.sync_dir(resolved)),
}
"""Every way to change the disk: the steps it announces, and a call of it on a resolved path."""

Nodes: TypeAlias = dict[str, Node | str | bytes | None]
F: Nodes = {"x": "old"}
D: Nodes = {"x": None}
N: Nodes = {}
DRAFTED: Nodes = {DRAFT.decode(): "new"}

OUTCOMES: list[tuple[str, Sketch, Sketch | type[OSError]]] = [
    ("stage_file", F, {"x": "old", DRAFT.decode(): "1234"}),
    ("stage_file", DRAFTED, FileExistsError),
    ("stage_link", N, {DRAFT.decode(): Link("to")}),
    ("stage_link", DRAFTED, FileExistsError),
    ("exchange", F | DRAFTED, {"x": "new", DRAFT.decode(): "old"}),
    ("exchange", {"x/in": "side", **DRAFTED}, {"x": "new", f"{DRAFT.decode()}/in": "side"}),
    ("exchange", {"x": Link("y"), **DRAFTED}, {"x": "new", DRAFT.decode(): Link("y")}),
    ("exchange", DRAFTED, FileNotFoundError),
    ("exchange", F, FileNotFoundError),
    ("place", DRAFTED, {"x": "new"}),
    ("place", F | DRAFTED, FileExistsError),
    ("place", D | DRAFTED, FileExistsError),
    ("place", {"x": Link("nowhere"), **DRAFTED}, FileExistsError),
    ("place", N, FileNotFoundError),
    ("set_aside", F, {DRAFT.decode(): "old"}),
    ("set_aside", {"x/in": "side"}, {f"{DRAFT.decode()}/in": "side"}),
    ("set_aside", {"x": Link("y")}, {DRAFT.decode(): Link("y")}),
    ("set_aside", N, FileNotFoundError),
    ("set_aside", F | DRAFTED, FileExistsError),
    ("discard", F | DRAFTED, F),
    ("discard", F, F),
    ("discard", {DRAFT.decode(): None}, N),
    ("discard", {DRAFT.decode() + "/in": "side"}, OSError),
    ("make_dir", N, {"x": Dir(0o750)}),
    ("make_dir", F, FileExistsError),
    ("make_dir", D, FileExistsError),
    ("remove_dir", D, N),
    ("remove_dir", {"x/in": "side"}, OSError),
    ("remove_dir", N, FileNotFoundError),
    ("remove_dir", F, NotADirectoryError),
    ("write_in_place", {"x": "longer than that"}, {"x": "1234"}),
    ("write_in_place", N, FileNotFoundError),
    ("write_in_place", {"x": Link("y"), "y": ""}, OSError),
    ("write_in_place", D, IsADirectoryError),
    ("set_metadata", F, {"x": File(b"old", 0o604)}),
    ("set_metadata", D, {"x": Dir(0o604)}),
    ("set_metadata", N, FileNotFoundError),
    ("set_metadata", {"x": Link("y"), "y": ""}, OSError),
    ("sync_file", F, F),
    ("sync_dir", F, F),
    ("sync_file", N, FileNotFoundError),
]


class ChangeContract(DiskContractBase):
    """Each method announces its steps. A step that fails changes nothing; after a crash, earlier steps remain."""

    @pytest.mark.parametrize(("method", "before", "after"), OUTCOMES)
    def test_the_result_of_each_method(self, method: str, before: Sketch, after: Sketch | type[OSError]) -> None:
        steps, act = DOING[method]
        with self.open_disk(before) as tested, tested.resolve("x") as resolved:
            if isinstance(after, type):
                with pytest.raises(after):
                    act(tested, resolved)
                assert tested.tree() == as_tree(before)
            else:
                act(tested, resolved)
                assert (tested.tree(), tested.steps()) == (as_tree(after), steps)

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
    @pytest.mark.parametrize("method", [name for name in DOING if name != "write_in_place"])
    def test_a_step_that_fails_changes_nothing(self, method: str, number: int) -> None:
        steps, act = DOING[method]
        before: Sketch = _scene_for(method)
        for at in range(1, len(steps) + 1):
            with self.open_disk(before, FaultPlan().fail(number, at=at)) as tested, tested.resolve("x") as resolved:
                with pytest.raises(OSError) as error:
                    act(tested, resolved)
                assert error.value.errno == number
                assert tested.tree() == as_tree(before)

    @pytest.mark.parametrize(
        ("at", "left"), [(1, None), (2, File(b"12", 0o600)), (3, File(b"1234", 0o600))], ids=["create", "half", "write"]
    )
    def test_a_crash_while_staging_leaves_what_was_written(self, at: int, left: File | None) -> None:
        with self.open_disk(F, FaultPlan().crash_before(at=at)) as tested, tested.resolve("x") as resolved:
            with pytest.raises(Crash):
                _STAGED["stage_file"](tested, resolved)
            assert tested.tree() == as_tree(F if left is None else {**F, DRAFT.decode(): left})

    @pytest.mark.parametrize(("at", "left"), [(1, b"OLDOLD"), (2, b"12DOLD"), (3, b"1234")])
    def test_a_crash_while_writing_in_place_leaves_a_mixture(self, at: int, left: bytes) -> None:
        with (
            self.open_disk({"x": "OLDOLD"}, FaultPlan().crash_before(at=at)) as tested,
            tested.resolve("x") as resolved,
        ):
            with pytest.raises(Crash):
                DOING["write_in_place"][1](tested, resolved)
            assert tested.person.read("x") == left

    def test_a_staged_file_has_the_mode_of_the_file_it_replaces(self) -> None:
        like = FileEntry(file_entry(b"").digest, 0, 0o4751, 8_000_000, (("user.color", "cmVk"),))
        with self.open_disk({}) as tested, tested.resolve("x") as resolved:
            tested.disk.stage_file(resolved, DRAFT, b"", like=like)
            assert tested.disk.image(resolved, draft=DRAFT).entry == like
            tested.disk.place(resolved, DRAFT)
            tested.disk.set_metadata(resolved, replace(like, mode=0o600, xattrs=()))
            tested.disk.set_mtime(resolved, 7_000_000)
            assert tested.disk.image(resolved).entry == replace(like, mode=0o600, xattrs=(), mtime_ns=7_000_000)

    def test_writing_in_place_keeps_all_hard_links(self) -> None:
        with self.open_disk({"x": "old"}) as tested, tested.resolve("x") as resolved:
            tested.person.hard_link("x", "y")
            tested.disk.write_in_place(resolved, b"new")
            assert (tested.person.read("y"), tested.disk.image(resolved).links) == (b"new", 2)

    def test_a_person_may_change_files_between_any_two_steps(self) -> None:
        plan = FaultPlan()
        with self.open_disk(F, plan) as tested, tested.resolve("x") as resolved:
            plan.act(lambda *_: tested.person.save("x", b"mine"), step="exchange")
            tested.disk.stage_file(resolved, DRAFT, b"ours", like=file_entry(b"ours"))
            tested.disk.exchange(resolved, DRAFT)
            assert (tested.person.read("x"), tested.disk.image(resolved, draft=DRAFT).content) == (b"ours", b"mine")

    def test_settled_says_whether_a_process_has_the_file_open_for_writing(self) -> None:
        with self.open_disk({"f": "x", "l": Link("f"), "d": None}) as tested, tested.resolve("f") as resolved:
            writing = tested.person.open_for_writing("f")
            assert tested.disk.settled(resolved, b"f") in (False, None)
            writing.write(b"more")
            writing.close()
            assert tested.disk.settled(resolved, b"f") in (True, None)
            assert (tested.disk.settled(resolved, b"l"), tested.disk.settled(resolved, b"d")) == (None, None)
            with pytest.raises(FileNotFoundError):
                tested.disk.settled(resolved, b"none")

    def test_directory_times_and_modes_can_be_restored(self) -> None:
        with self.open_disk({"d/x": ""}) as tested, tested.resolve("d") as resolved:
            tested.disk.set_metadata(resolved, DirEntry(0o711))
            tested.disk.set_mtime(resolved, 4_000)
            assert tested.disk.image(resolved).entry == DirEntry(0o711, 4_000)
            assert tested.disk.mtime_ns(resolved) == 4_000

    def test_the_empty_image_is_absent(self) -> None:
        assert NOTHING.holds(ABSENT) and not NOTHING.replaceable


def _scene_for(method: str) -> Sketch:
    """A tree in which the method succeeds."""
    if method in ("stage_file", "stage_link", "set_aside", "set_metadata", "set_mtime", "sync_file", "sync_dir"):
        return F
    if method == "exchange":
        return {**F, **DRAFTED}
    scenes: dict[str, Nodes] = {"place": DRAFTED, "discard": DRAFTED, "make_dir": N, "remove_dir": D}
    return scenes[method]


class DiskContract(ResolveContract, ReadContract, ChangeContract, ReplacementContract):
    """Everything a disk promises. Implement `open_disk`."""
