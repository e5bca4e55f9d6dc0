"""The contract of `Replacement` on every disk: no bytes are lost if a person changes the file between any two steps."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mulligan.files.disk import Image
from mulligan.files.replace import FoundEntry, Replacement, Swapped, TargetEntry
from mulligan.testing.builders import Dir, File, Link, Node, Sketch, as_tree
from mulligan.testing.faults import Crash, FaultPlan, steps_of
from mulligan.values.entries import ABSENT, DirEntry, Entry, FileEntry, SymlinkEntry, kind_of
from mulligan.values.paths import RepoPath
from tests.contracts.disk_under_test import DRAFT, DiskContractBase, DiskUnderTest, file_entry

EXPECTED: dict[str, Node | None] = {"absent": None, "file": File(b"old"), "symlink": Link("old"), "dir": Dir()}
THEIRS: dict[str, Node | None] = {
    "absent": None,
    "file": File(b"theirs"),
    "symlink": Link("theirs"),
    "dir": Dir(0o700),
    "full dir": Dir(),
}
WANTED: dict[str, Node | None] = {
    "absent": None,
    "file": File(b"new", 0o755),
    "symlink": Link("new"),
    "dir": Dir(0o711),
    "mode": File(b"old", 0o600),
}

KINDS = ["absent", "file", "symlink", "dir"]


def entry_of(node: Node | None) -> Entry:
    if node is None:
        return ABSENT
    if isinstance(node, Link):
        return SymlinkEntry(node.target)
    return DirEntry(node.mode) if isinstance(node, Dir) else file_entry(node.content, node.mode)


def sketch_of(node: Node | None, name: str = "x") -> Sketch:
    return {} if node is None else {name: node}


@dataclass(slots=True)
class Rescues:
    """The images that a replacement found instead of the expected one and handed to its caller."""

    images: list[Image] = field(default_factory=list)

    def __call__(self, image: Image) -> None:
        self.images.append(image)

    @property
    def contents(self) -> set[bytes]:
        return {image.data for image in self.images if image.content is not None}


def replace_entry(
    tested: DiskUnderTest, expected: Node | None, wanted: Node | None, *, insist: bool = False, inside: int = 1
) -> tuple[object, Rescues]:
    rescues = Rescues()
    content = wanted.content if isinstance(wanted, File) else None
    with tested.resolve("x") as resolved:
        aim = TargetEntry(entry_of(wanted), content)
        outcome = Replacement(
            tested.disk, resolved, DRAFT, entry_of(expected), aim, rescues, insist=insist, inside=inside
        ).run()
    return outcome, rescues


class UndisturbedContract(DiskContractBase):
    """No other process changes the file during the replacement."""

    @pytest.mark.parametrize("wanted", WANTED)
    @pytest.mark.parametrize("expected", KINDS)
    def test_an_expected_entry_is_replaced(self, expected: str, wanted: str) -> None:
        before, after = EXPECTED[expected], WANTED[wanted]
        with self.open_disk(sketch_of(before)) as tested:
            outcome, rescues = replace_entry(tested, before, after)
            assert isinstance(outcome, Swapped)
            assert tested.tree() == as_tree(sketch_of(after))
            assert (kind_of(outcome.entry), rescues.images) == (kind_of(entry_of(after)), [])
            assert outcome.race_window is False

    @pytest.mark.parametrize("insist", [False, True])
    @pytest.mark.parametrize(("expected", "found", "wanted"), list(product(KINDS, THEIRS, WANTED)))
    def test_an_unexpected_entry_stays_or_is_rescued(
        self, expected: str, found: str, wanted: str, insist: bool
    ) -> None:
        if _is_as_expected(expected, found, wanted):
            return
        there = THEIRS[found]
        before = dict(sketch_of(there)) | ({"x/inner": "deep"} if found == "full dir" else {})
        with self.open_disk(before) as tested:
            outcome, rescues = replace_entry(tested, EXPECTED[expected], WANTED[wanted], insist=insist)
            if isinstance(outcome, FoundEntry):
                assert tested.tree() == as_tree(before)
                assert outcome.image.entry == tested.disk.image(tested.resolve("x")).entry
            else:
                assert insist and found in ("file", "symlink")
                assert tested.tree() == as_tree(sketch_of(WANTED[wanted]))
                assert [image.entry for image in rescues.images] == [replace_time(entry_of(there), rescues)]

    @pytest.mark.parametrize("found", ["file", "symlink"])
    @pytest.mark.parametrize("wanted", ["file", "symlink", "absent"])
    @pytest.mark.parametrize("expected", ["file", "symlink"])
    def test_with_insist_an_unexpected_entry_is_rescued_and_replaced(
        self, expected: str, wanted: str, found: str
    ) -> None:
        with self.open_disk(sketch_of(THEIRS[found])) as tested:
            outcome, rescues = replace_entry(tested, EXPECTED[expected], WANTED[wanted], insist=True)
            assert isinstance(outcome, Swapped)
            assert len(rescues.images) == 1

    def test_a_given_mtime_is_set_and_the_resulting_one_is_reported(self) -> None:
        with self.open_disk({"x": "old"}) as tested:
            outcome, _ = replace_entry(tested, File(b"old"), File(b"new"))
            assert isinstance(outcome, Swapped) and isinstance(outcome.entry, FileEntry)
            assert outcome.entry.mtime_ns == tested.disk.mtime_ns(tested.resolve("x")) > 0
            aim = TargetEntry(file_entry(b"3", mtime_ns=5_000), b"3")
            Replacement(tested.disk, tested.resolve("x"), DRAFT, file_entry(b"new"), aim, Rescues()).run()
            assert tested.disk.mtime_ns(tested.resolve("x")) == 5_000

    def test_a_directory_gets_its_attributes_and_time_too(self) -> None:
        wanted = DirEntry(0o750, 6_000, (("user.color", "cmVk"),))
        with self.open_disk({}) as tested, tested.resolve("x") as resolved:
            outcome = Replacement(tested.disk, resolved, DRAFT, ABSENT, TargetEntry(wanted), Rescues()).run()
            assert (outcome, tested.disk.image(resolved).entry) == (Swapped(wanted), wanted)

    def test_a_file_with_hard_links_inside_stays_one_file(self) -> None:
        with self.open_disk({"x": "old"}) as tested:
            tested.person.hard_link("x", "y")
            outcome, _ = replace_entry(tested, File(b"old"), File(b"new", 0o755), inside=2)
            assert isinstance(outcome, Swapped) and outcome.race_window
            assert tested.tree() == as_tree({"x": File(b"new", 0o755), "y": File(b"new", 0o755)})

    @pytest.mark.parametrize("wanted", [File(b"new"), File(b"old", 0o755)])
    def test_a_hard_link_outside_keeps_its_content(self, wanted: File) -> None:
        with self.open_disk({"x": "old"}) as tested:
            tested.person.hard_link("x", "y")
            outcome, _ = replace_entry(tested, File(b"old"), wanted)
            assert isinstance(outcome, Swapped) and not outcome.race_window
            assert tested.tree() == as_tree({"x": wanted, "y": "old"})

    @pytest.mark.parametrize("insist", [False, True])
    def test_a_changed_hard_linked_file_is_rescued_before_it_is_written(self, insist: bool) -> None:
        with self.open_disk({"x": "theirs"}) as tested:
            tested.person.hard_link("x", "y")
            outcome, rescues = replace_entry(tested, File(b"old"), File(b"new"), insist=insist, inside=2)
            assert isinstance(outcome, Swapped if insist else FoundEntry)
            assert rescues.contents == {b"theirs"}
            assert tested.person.read("y") == (b"new" if insist else b"theirs")

    @pytest.mark.parametrize("wanted", ["file", "symlink"])
    @pytest.mark.parametrize("expected", ["file", "symlink"])
    def test_without_renameat2_exchange_the_replacement_still_works(self, expected: str, wanted: str) -> None:
        before, after = EXPECTED[expected], WANTED[wanted]
        plan = FaultPlan().fail(errno.EINVAL, step="exchange", lasting=True)
        with self.open_disk(sketch_of(before), plan) as tested:
            outcome, _ = replace_entry(tested, before, after)
            assert isinstance(outcome, Swapped) and outcome.race_window
            assert tested.tree() == as_tree(sketch_of(after))

    def test_if_nothing_can_be_staged_replacing_by_a_link_raises(self) -> None:
        plan = FaultPlan().fail(errno.EACCES, step="stage.link").fail(errno.EACCES, step="set_aside")
        with self.open_disk({"x": "old"}, plan) as tested, pytest.raises(PermissionError):
            replace_entry(tested, File(b"old"), Link("new"))

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
    @pytest.mark.parametrize("wanted", WANTED)
    @pytest.mark.parametrize("expected", KINDS)
    def test_a_full_or_broken_disk_at_any_step_loses_nothing(self, expected: str, wanted: str, number: int) -> None:
        before, after = EXPECTED[expected], WANTED[wanted]

        def run(plan: FaultPlan) -> None:
            with self.open_disk(sketch_of(before), plan) as tested:
                replace_entry(tested, before, after)

        for at in range(1, len(steps_of(run)) + 1):
            with self.open_disk(sketch_of(before), FaultPlan().fail(number, at=at)) as tested:
                with pytest.raises(OSError) as error:
                    replace_entry(tested, before, after)
                assert error.value.errno == number
                assert tested.tree().get("x") in (before, after)

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
    @pytest.mark.parametrize(
        ("expected", "wanted"), [("file", "dir"), ("symlink", "dir"), ("dir", "file"), ("dir", "symlink")]
    )
    def test_if_the_second_step_fails_the_first_is_undone(self, expected: str, wanted: str, number: int) -> None:
        before, second = EXPECTED[expected], "make_dir" if wanted == "dir" else "place"
        with self.open_disk(sketch_of(before), FaultPlan().fail(number, step=second)) as tested:
            with pytest.raises(OSError) as error:
                replace_entry(tested, before, WANTED[wanted])
            assert error.value.errno == number
            assert tested.tree() == as_tree(sketch_of(before))

    @pytest.mark.parametrize("wanted", WANTED)
    @pytest.mark.parametrize("expected", KINDS)
    def test_a_crash_after_any_step_loses_nothing(self, expected: str, wanted: str) -> None:
        before, after = EXPECTED[expected], WANTED[wanted]

        def run(plan: FaultPlan) -> None:
            with self.open_disk(sketch_of(before), plan) as tested:
                replace_entry(tested, before, after)

        for at in range(1, len(steps_of(run)) + 1):
            with self.open_disk(sketch_of(before), FaultPlan().crash_before(at=at)) as tested:
                with pytest.raises(Crash):
                    replace_entry(tested, before, after)
                left = tested.tree()
                whole = [sketch_of(before).get("x"), sketch_of(after).get("x")]
                assert left.get("x") in [*whole, None]
                if left.get("x") is None and isinstance(before, File | Link) and isinstance(after, File | Link):
                    assert left.get(DRAFT.decode()) == before


def _is_as_expected(expected: str, found: str, wanted: str) -> bool:
    """All empty directories count as equal. A full directory only prevents its removal."""
    if expected == "dir":
        return found == "dir" or (found == "full dir" and wanted == "dir")
    return expected == found == "absent"


def replace_time(entry: Entry, rescues: Rescues) -> Entry:
    """The entry with the mtime of the rescued one: a replacement keeps times but does not compare them."""
    found = rescues.images[0].entry
    if isinstance(entry, FileEntry) and isinstance(found, FileEntry):
        return file_entry(rescues.images[0].data, entry.mode, found.mtime_ns)
    return entry


ACTS = st.sampled_from(["save", "save_in_place", "remove", "make_dir", "fill_dir", "make_link"])
SCRIPTS = st.dictionaries(st.integers(1, 12), ACTS, max_size=5)


@dataclass(slots=True)
class OtherWriter:
    """A person who changes `x` just before chosen steps, and the contents of theirs that must not be lost.

    What they overwrite or remove themselves is their own doing; what only we took out of its place is ours to keep.
    """

    tested: DiskUnderTest
    script: dict[int, str]
    at_stake: set[bytes]
    steps: int = 0
    saves: int = 0

    def at_step(self, _: str, __: RepoPath) -> None:
        self.steps += 1
        act = self.script.get(self.steps)
        if act is not None:
            self.do(act)

    def do(self, act: str) -> None:
        person = self.tested.person
        self.saves += 1
        content = b"save %d" % self.saves
        image = self.tested.disk.image(self.tested.resolve("x"))
        if act == "fill_dir" and isinstance(image.entry, DirEntry):
            person.save(f"x/inner-{self.saves}", content)
            self.at_stake.add(content)
        if isinstance(image.entry, DirEntry):
            return
        self.at_stake.discard(image.content or b"")
        if act == "save" or (act == "save_in_place" and isinstance(image.entry, FileEntry)):
            person.save("x", content) if act == "save" else person.save_in_place("x", content)
            self.at_stake.add(content)
            return
        person.remove("x")
        if act in ("make_dir", "fill_dir"):
            person.make_dir("x")
        elif act == "make_link":
            person.make_link("x", f"link {self.saves}")


class OtherWriterContract(DiskContractBase):
    """A person changes the file between our steps."""

    @settings(
        max_examples=150,
        deadline=None,
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )
    @given(
        found=st.sampled_from([*KINDS, "theirs"]),
        expected=st.sampled_from(KINDS),
        wanted=st.sampled_from(sorted(WANTED)),
        insist=st.booleans(),
        script=SCRIPTS,
    )
    def test_no_save_is_lost_whatever_happens_between_the_steps(
        self, *, found: str, expected: str, wanted: str, insist: bool, script: dict[int, str]
    ) -> None:
        there = File(b"theirs") if found == "theirs" else EXPECTED[found]
        plan = FaultPlan()
        with self.open_disk(sketch_of(there), plan) as tested:
            stake = {there.content} if isinstance(there, File) else set[bytes]()
            bystander = OtherWriter(tested, script, stake)
            plan.act(bystander.at_step, lasting=True)
            outcome, rescues = replace_entry(tested, EXPECTED[expected], WANTED[wanted], insist=insist)
            left = tested.tree()
            on_disk = {node.content for node in left.values() if isinstance(node, File)}
            assert bystander.at_stake <= on_disk | rescues.contents | {b"old"}
            drafts = [path for path in left if path.startswith(DRAFT.decode())]
            assert all(isinstance(left[path], Dir) or "/" in path for path in drafts)
            if isinstance(outcome, Swapped) and not script:
                assert left.get("x") == WANTED[wanted]

    @pytest.mark.parametrize("act", ["save", "save_in_place"])
    @pytest.mark.parametrize("insist", [False, True])
    @pytest.mark.parametrize("at", range(1, 12))
    def test_two_saves_in_a_row_at_every_point_are_both_kept(self, at: int, insist: bool, act: str) -> None:
        for gap in range(1, 5):
            plan = FaultPlan()
            with self.open_disk({"x": "theirs"}, plan) as tested:
                bystander = OtherWriter(tested, {at: act, at + gap: act, at + 2 * gap: "save"}, {b"theirs"})
                plan.act(bystander.at_step, lasting=True)
                _, rescues = replace_entry(tested, File(b"old"), File(b"new"), insist=insist)
                on_disk = {node.content for node in tested.tree().values() if isinstance(node, File)}
                assert bystander.at_stake <= on_disk | rescues.contents


class ReplacementContract(UndisturbedContract, OtherWriterContract):
    """Replacements with and without other writers."""
