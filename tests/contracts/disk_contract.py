"""The judge of every disk: the same steps, the same outcomes, the same errors, real or simulated."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest

from mulligan.testing.builders import Dir, File, Link, Node, Sketch, as_tree
from mulligan.testing.disk_bench import DRAFT, DiskBench, Scene, file_entry
from mulligan.testing.faults import Crash, FaultPlan
from mulligan.testing.swap_contract import SwapContract
from mulligan.values.entries import ABSENT, DirEntry, FileEntry, SymlinkEntry
from mulligan.values.paths import RepoPath
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import NOTHING
from mulligan.workspace.places import Spot

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


class ResolvingContract(DiskBench):
    """From a path to the one spot it means."""

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
    def test_a_path_means_what_the_kernel_would_say(self, path: str, real: str) -> None:
        with self.scene(WOOD) as scene, scene.disk.resolve(RepoPath(path)) as spot:
            assert (spot.path, spot.place) == (real, scene.disk.root.place_of(RepoPath(real)))

    @pytest.mark.parametrize(
        ("path", "real"), [("to-a", "to-a"), ("to-d/up", "d/up"), ("self", "self"), ("out", "out")]
    )
    def test_the_last_link_is_left_alone_if_asked(self, path: str, real: str) -> None:
        with self.scene(WOOD) as scene, scene.disk.resolve(RepoPath(path), final=False) as spot:
            assert spot.path == real

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
    def test_a_way_that_does_not_exist_is_said_so(self, path: str, error: type[OSError]) -> None:
        with self.scene(WOOD) as scene, pytest.raises(error):
            scene.disk.resolve(RepoPath(path))

    @pytest.mark.parametrize("path", ["self", "self/x", "loop-1", "loop-2/y"])
    def test_links_in_a_circle_end(self, path: str) -> None:
        with self.scene(WOOD) as scene, pytest.raises(OSError) as error:
            scene.disk.resolve(RepoPath(path))
        assert error.value.errno == errno.ELOOP

    @pytest.mark.parametrize("path", ["out", "out/x", "far", "far/x", "round"])
    def test_no_link_leads_out_of_the_root(self, path: str) -> None:
        with self.scene(WOOD) as scene, pytest.raises(Refused) as refused:
            scene.disk.resolve(RepoPath(path))
        assert (refused.value.status, refused.value.code) == ("forbidden", "symlink_not_allowed")

    @pytest.mark.parametrize("path", ["to-a", "to-d/f", "here/a"])
    def test_where_links_are_denied_none_is_followed(self, path: str) -> None:
        with self.scene(WOOD) as scene, pytest.raises(Refused) as refused:
            scene.disk.resolve(RepoPath(path), follow="deny")
        assert refused.value.code == "symlink_not_allowed"

    def test_exactly_means_through_no_link_and_not_following_the_last(self) -> None:
        with self.scene(WOOD) as scene:
            with scene.disk.resolve_exactly(RepoPath("to-a")) as spot:
                assert spot.path == "to-a"
            with pytest.raises(Refused):
                scene.disk.resolve_exactly(RepoPath("to-d/f"))

    def test_names_that_are_not_text_are_fine(self) -> None:
        with self.scene({"\udcff/\udcfe": "x"}) as scene, scene.disk.resolve(RepoPath("\udcff/\udcfe")) as spot:
            assert (spot.path, spot.name, scene.disk.image(spot).content) == ("\udcff/\udcfe", b"\xfe", b"x")

    def test_a_spot_stays_in_the_directory_it_was_found_in(self) -> None:
        with self.scene({"d/f": "old", "e": None}) as scene, scene.spot("d/f") as spot:
            scene.person.remove("d/f")
            scene.person.remove_dir("d")
            scene.person.make_link("d", "e")
            assert scene.disk.image(spot) == NOTHING


class LookingContract(DiskBench):
    def test_an_image_says_all_there_is(self) -> None:
        sketch: Sketch = {"f": File(b"text", 0o640, 5_000), "l": Link("any where"), "d": Dir(0o700, 7_000)}
        with self.scene(sketch) as scene:
            images = {name: scene.disk.image(scene.spot(name)) for name in ("f", "l", "d", "none")}
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
        with self.scene({"b": "", "a": "", "\udcff": "", "é": ""}) as scene, scene.spot(".") as spot:
            assert isinstance(scene.disk.image(spot).entry, DirEntry)
            assert scene.disk.children(spot) == [b"a", b"b", "é".encode(), b"\xff"]

    def test_other_names_of_a_file_are_counted(self) -> None:
        with self.scene({"f": "x"}) as scene, scene.spot("f") as spot:
            scene.person.hard_link("f", "g")
            assert scene.disk.image(spot).links == 2

    @pytest.mark.parametrize(("name", "error"), [("none", FileNotFoundError), ("f", NotADirectoryError)])
    def test_only_a_directory_has_children(self, name: str, error: type[OSError]) -> None:
        with self.scene({"f": ""}) as scene, scene.spot(name) as spot, pytest.raises(error):
            scene.disk.children(spot)

    def test_looking_takes_no_step(self) -> None:
        with self.scene(WOOD) as scene, scene.spot("d") as spot:
            scene.disk.image(spot)
            scene.disk.children(spot)
            scene.disk.mtime_ns(spot)
            assert scene.steps() == []


Doing = Callable[[Scene, Spot], object]

_STAGED: dict[str, Doing] = {
    "stage_file": lambda scene, spot: scene.disk.stage_file(spot, DRAFT, b"1234", like=file_entry(b"1234")),
    "stage_link": lambda scene, spot: scene.disk.stage_link(spot, DRAFT, "to"),
}
DOING: dict[str, tuple[list[str], Doing]] = {
    "stage_file": (["stage.create", "stage.half", "stage.write"], _STAGED["stage_file"]),
    "stage_link": (["stage.link"], _STAGED["stage_link"]),
    "exchange": (["exchange"], lambda scene, spot: scene.disk.exchange(spot, DRAFT)),
    "place": (["place"], lambda scene, spot: scene.disk.place(spot, DRAFT)),
    "set_aside": (["set_aside"], lambda scene, spot: scene.disk.set_aside(spot, DRAFT)),
    "discard": (["discard"], lambda scene, spot: scene.disk.discard(spot, DRAFT)),
    "make_dir": (["make_dir"], lambda scene, spot: scene.disk.make_dir(spot, 0o750)),
    "remove_dir": (["remove_dir"], lambda scene, spot: scene.disk.remove_dir(spot)),
    "write_in_place": (
        ["in_place.open", "in_place.half", "in_place.write"],
        lambda scene, spot: scene.disk.write_in_place(spot, b"1234"),
    ),
    "set_metadata": (["metadata"], lambda scene, spot: scene.disk.set_metadata(spot, file_entry(b"", 0o604))),
    "set_mtime": (["mtime"], lambda scene, spot: scene.disk.set_mtime(spot, 9_000)),
    "sync_file": (["sync.file"], lambda scene, spot: scene.disk.sync_file(spot)),
    "sync_dir": (["sync.dir"], lambda scene, spot: scene.disk.sync_dir(spot)),
}
"""Every way to change the disk: the steps it announces, and a call of it on a spot."""

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


class ChangingContract(DiskBench):
    """Each method is its named steps; a step that fails changes nothing, one that crashes leaves what was done."""

    @pytest.mark.parametrize(("method", "before", "after"), OUTCOMES)
    def test_what_each_method_leaves(self, method: str, before: Sketch, after: Sketch | type[OSError]) -> None:
        steps, act = DOING[method]
        with self.scene(before) as scene, scene.spot("x") as spot:
            if isinstance(after, type):
                with pytest.raises(after):
                    act(scene, spot)
                assert scene.tree() == as_tree(before)
            else:
                act(scene, spot)
                assert (scene.tree(), scene.steps()) == (as_tree(after), steps)

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
    @pytest.mark.parametrize("method", [name for name in DOING if name != "write_in_place"])
    def test_a_step_that_fails_changes_nothing(self, method: str, number: int) -> None:
        steps, act = DOING[method]
        before: Sketch = _scene_for(method)
        for at in range(1, len(steps) + 1):
            with self.scene(before, FaultPlan().fail(number, at=at)) as scene, scene.spot("x") as spot:
                with pytest.raises(OSError) as error:
                    act(scene, spot)
                assert error.value.errno == number
                assert scene.tree() == as_tree(before)

    @pytest.mark.parametrize(
        ("at", "left"), [(1, None), (2, File(b"12", 0o600)), (3, File(b"1234", 0o600))], ids=["create", "half", "write"]
    )
    def test_a_crash_while_staging_leaves_what_was_written(self, at: int, left: File | None) -> None:
        with self.scene(F, FaultPlan().crash_before(at=at)) as scene, scene.spot("x") as spot:
            with pytest.raises(Crash):
                _STAGED["stage_file"](scene, spot)
            assert scene.tree() == as_tree(F if left is None else {**F, DRAFT.decode(): left})

    @pytest.mark.parametrize(("at", "left"), [(1, b"OLDOLD"), (2, b"12DOLD"), (3, b"1234")])
    def test_a_crash_while_writing_in_place_leaves_a_mixture(self, at: int, left: bytes) -> None:
        with self.scene({"x": "OLDOLD"}, FaultPlan().crash_before(at=at)) as scene, scene.spot("x") as spot:
            with pytest.raises(Crash):
                DOING["write_in_place"][1](scene, spot)
            assert scene.person.read("x") == left

    def test_a_staged_file_is_like_what_it_will_replace(self) -> None:
        like = FileEntry(file_entry(b"").digest, 0, 0o4751, 8_000_000, (("user.color", "cmVk"),))
        with self.scene({}) as scene, scene.spot("x") as spot:
            scene.disk.stage_file(spot, DRAFT, b"", like=like)
            assert scene.disk.image(spot, draft=DRAFT).entry == like
            scene.disk.place(spot, DRAFT)
            scene.disk.set_metadata(spot, replace(like, mode=0o600, xattrs=()))
            scene.disk.set_mtime(spot, 7_000_000)
            assert scene.disk.image(spot).entry == replace(like, mode=0o600, xattrs=(), mtime_ns=7_000_000)

    def test_writing_in_place_keeps_all_names_of_the_file(self) -> None:
        with self.scene({"x": "old"}) as scene, scene.spot("x") as spot:
            scene.person.hard_link("x", "y")
            scene.disk.write_in_place(spot, b"new")
            assert (scene.person.read("y"), scene.disk.image(spot).links) == (b"new", 2)

    def test_a_person_may_act_at_any_step(self) -> None:
        plan = FaultPlan()
        with self.scene(F, plan) as scene, scene.spot("x") as spot:
            plan.act(lambda *_: scene.person.save("x", b"mine"), step="exchange")
            scene.disk.stage_file(spot, DRAFT, b"ours", like=file_entry(b"ours"))
            scene.disk.exchange(spot, DRAFT)
            assert (scene.person.read("x"), scene.disk.image(spot, draft=DRAFT).content) == (b"ours", b"mine")

    def test_whether_somebody_still_writes_is_seen(self) -> None:
        with self.scene({"f": "x", "l": Link("f"), "d": None}) as scene, scene.spot("f") as spot:
            writing = scene.person.open_for_writing("f")
            assert scene.disk.settled(spot, b"f") in (False, None)
            writing.write(b"more")
            writing.close()
            assert scene.disk.settled(spot, b"f") in (True, None)
            assert (scene.disk.settled(spot, b"l"), scene.disk.settled(spot, b"d")) == (None, None)
            with pytest.raises(FileNotFoundError):
                scene.disk.settled(spot, b"none")

    def test_directory_times_and_modes_can_be_put_back(self) -> None:
        with self.scene({"d/x": ""}) as scene, scene.spot("d") as spot:
            scene.disk.set_metadata(spot, DirEntry(0o711))
            scene.disk.set_mtime(spot, 4_000)
            assert scene.disk.image(spot).entry == DirEntry(0o711, 4_000)
            assert scene.disk.mtime_ns(spot) == 4_000

    def test_nothing_at_all_is_absent(self) -> None:
        assert NOTHING.holds(ABSENT) and not NOTHING.replaceable


def _scene_for(method: str) -> Sketch:
    """Where the method would succeed."""
    if method in ("stage_file", "stage_link", "set_aside", "set_metadata", "set_mtime", "sync_file", "sync_dir"):
        return F
    if method == "exchange":
        return {**F, **DRAFTED}
    scenes: dict[str, Nodes] = {"place": DRAFTED, "discard": DRAFTED, "make_dir": N, "remove_dir": D}
    return scenes[method]


class DiskContract(ResolvingContract, LookingContract, ChangingContract, SwapContract):
    """Everything a disk promises. Implement `scene`."""
