"""Opens the states that power cuts leave of a recorded history, and checks what Mulligan promises for each.

    python tests/power/check.py BASE LOG MODE states FIRST COUNT
    python tests/power/check.py BASE LOG MODE twice FIRST COUNT
    python tests/power/check.py BASE LOG MODE without FILE:FUNCTION:LINE
    python tests/power/check.py BASE LOG MODE mounted OPERATIONS

The first form opens the states of COUNT seeds. In the second, the power is cut once more while Mulligan recovers. The
third opens states in which the syncs of one line of Mulligan did not happen, until one breaks a promise. The fourth
takes the files as they are, after so many operations. Prints one JSON object a line for each state. Every state is
opened in a process of its own, under another boot.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from itertools import product
from random import Random
from typing import Any

import apsw

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.power.disk_states import Mode, Node, PowerCut, Recording, Step, Sync, Version, materialise, read_tree
from tests.power.history import KINDS
from tests.power.machine import pretend_boot, show_inodes, start_machine, wait_for_no_disk
from tests.power.recorder import CallSite, read_log
from tests.power.second_cut import Recovery

DRAFT_PREFIX = ".mulligan-"
MOMENTS_A_SITE = 12
RECOVERIES_A_SITE = 4


@dataclass
class Result:
    """What became of one state. `seed` and the mode repeat it."""

    seed: int
    kind: str
    at: int
    violations: list[str] = field(default_factory=list)


def cut_of(recording: Recording, mode: Mode, seed: int, dropped: Callable[[Sync], bool]) -> tuple[str, PowerCut]:
    """Each seed takes the next kind of call, and in or shortly after a step of that kind a moment."""
    random = Random(f"{mode} {seed}")
    kind = KINDS[seed % len(KINDS)]
    steps = [step for step in recording.steps if step.kind == kind]
    step = random.choice(steps)
    end = step.end or min([one.begin for one in recording.steps if one.begin > step.begin] or [recording.length])
    late = random.random() < 0.25
    at = random.randint(end, min(end + 40, recording.length)) if late else random.randint(step.begin + 1, end)
    return kind, PowerCut(recording, mode, at, random, dropped)


class Opened:
    """Mulligan, opened on what a power cut has left."""

    def __init__(self, base: str, mode: Mode) -> None:
        from mulligan.cli import run

        self._run = run
        self.base = base
        self.options = ["--root", os.path.join(base, "tree"), "--store", os.path.join(base, "state")]
        self.mode = mode

    def open(self) -> str:
        """Open and close as a program does; what recovery prints."""
        import mulligan

        tree, state = self.options[1], self.options[3]
        mulligan.open(tree, store=state, durability=self.mode).close()
        return ""

    def ask(self, *verb: str, root: str | None = None) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        options = ["--root", root or self.options[1], *self.options[2:]]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = self._run([*verb, *options])
        return int(code), out.getvalue(), err.getvalue()

    def statuses(self) -> dict[str, str]:
        """The status of each call that is on record, in the root and in its forks."""
        forks = os.path.join(self.base, "state", "forks")
        roots = [os.path.join(forks, name) for name in os.listdir(forks)] if os.path.isdir(forks) else []
        return self._statuses(None) | {call: status for root in roots for call, status in self._statuses(root).items()}

    def _statuses(self, root: str | None) -> dict[str, str]:
        code, out, err = self.ask("log", "--json", "--limit", "1000", root=root)
        if code != 0:
            raise AssertionError(f"log: {code} {err}")
        return {entry["id"]: entry["status"] for entry in json.loads(out)}

    def lost_digests(self) -> set[str]:
        """The bodies that the store gave up after the cut."""
        if not os.path.exists(self._database):
            return set()
        rows = apsw.Connection(self._database).execute("SELECT digest FROM blobs WHERE place = 'lost'")
        return {"sha256:" + digest.hex() for (digest,) in rows}

    def changes(self) -> list[tuple[str, str, str | None]]:
        """Of each committed call that is not undone: its paths, and the digests of what was there before."""
        query = """SELECT changes.call, changes.path, changes.before FROM changes JOIN calls ON calls.id = changes.call
            WHERE calls.status = 'committed' AND calls.undone_by IS NULL"""
        rows = apsw.Connection(self._database).execute(query)
        return [(call, os.fsdecode(path), json.loads(before).get("digest")) for call, path, before in rows]

    @property
    def _database(self) -> str:
        return os.path.join(self.base, "state", "store.db")

    def coverage(self, call: str) -> set[tuple[str, str]]:
        code, out, err = self.ask("coverage", call, "--json")
        assert code == 0, err
        return {(note["path"], note["reason"]) for one in json.loads(out) for note in one["coverage"]}

    def planned_undo(self, call: str) -> list[dict[str, Any]]:
        _, out, err = self.ask("undo", call, "--dry-run", "--json")
        assert out, err
        return list(json.loads(out)["outcomes"])

    def not_captured(self, calls: Sequence[str]) -> set[str]:
        """The paths of which these calls say that it is not certain who changed them."""
        answers = [self.ask("coverage", call, "--json") for call in calls]
        listed = [one for code, out, _ in answers if code == 0 for one in json.loads(out)]
        notes = [note for one in listed for note in one["coverage"]]
        return {"tree/" + note["path"] for note in notes if note["reason"] == "ambiguous"}


def check(base: str, cut: PowerCut) -> Iterator[str]:
    """The violations of the promise in one state."""
    yield from _check_state(base, cut, cut.state())


def check_after_second(base: str, first: PowerCut, recovery: Recovery, second: PowerCut) -> Iterator[str]:
    """The violations of the promise if the power is cut once more while Mulligan recovers: it stays the same."""
    yield from _check_state(base, first, second.state(), printed=recovery.printed)


def _check_state(base: str, cut: PowerCut, state: dict[str, Node], printed: str = "") -> Iterator[str]:
    show_inodes(materialise(base, state))
    start_machine()
    yield from check_files(base, cut, printed)


def check_files(base: str, cut: PowerCut, printed_before: str = "") -> Iterator[str]:
    """The same for files that are there already."""
    opened = Opened(base, cut.mode)
    code, _, printed = opened.ask("status")
    printed += printed_before
    first_boot = not os.path.exists(os.path.join(base, "state", "store.db"))
    if code != 0 and not (first_boot and code == 2):
        yield f"status ends with {code}: {printed}"
        return
    opened.open()
    found = read_tree(base)
    yield from (f"{path} is a stray draft" for path in found if DRAFT_PREFIX in path)
    code, out, err = opened.ask("verify", "--json")
    if code != 0:
        yield f"verify ends with {code}: {out}{err}"
    yield from _lost_violations(opened)
    if cut.mode == "process":
        yield from _process_violations(cut, found, printed)
    else:
        yield from _power_violations(cut, found, opened)


def _lost_violations(opened: Opened) -> Iterator[str]:
    """A body that the cut took is said to be lost, by coverage and by undo, and never in `power` mode."""
    lost = opened.lost_digests()
    if lost and opened.mode == "power":
        yield f"bodies are lost in power mode: {sorted(lost)}"
    for call, path, before in opened.changes() if lost else ():
        if before not in lost:
            continue
        if (path, "lost") not in opened.coverage(call):
            yield f"{path} of call {call} is lost, and coverage does not say so"
        outcomes = [one for one in opened.planned_undo(call) if one["path"] == path]
        # A path that has its earlier content already is skipped without a reason.
        wrong = [one for one in outcomes if one["outcome"] != "skipped" or one.get("reason", "lost") != "lost"]
        yield from (f"undo of {call} says {one}, and the content is lost" for one in wrong)


def _process_violations(cut: PowerCut, found: dict[str, Node], printed: str) -> Iterator[str]:
    for path, versions in cut.recording.versions.items():
        known = [version for version in versions if version.at < cut.at]
        if not known or DRAFT_PREFIX in path:
            continue
        allowed = _allowed(cut, known)
        now = _content(found.get(path))
        if allowed is None or now in allowed or _is_printed(path, printed):
            continue
        # A new file replaces nothing. But if it is where another file was moved to, the content must be somewhere.
        if None not in allowed or _is_moved_here(cut, path, known[-1], found):
            yield f"{path} holds {_shown(now)}, not one of {[_shown(one) for one in allowed]}"
    unknown = [path for path in found if path not in cut.recording.versions and DRAFT_PREFIX not in path]
    yield from (f"{path} was never there" for path in unknown)


def _is_moved_here(cut: PowerCut, path: str, last: Version, found: dict[str, Node]) -> bool:
    """Whether another name held this content on the disk when the step began that put it here, and now none does."""
    whole = PowerCut(cut.recording, cut.mode, cut.at, Random(0))
    begun = max((step.begin for step in cut.recording.steps if step.begin < last.at), default=0)
    earlier = [
        _is_durable(whole, version, number, versions)
        for other, versions in cut.recording.versions.items()
        for number, version in enumerate(versions)
        if other != path
        and version.content == last.content
        and last.content
        and version.at < cut.at
        # A step before that one may have deleted an equal file: that one was not moved here.
        and all(later.at > begun for later in versions[number + 1 : number + 2])
    ]
    return any(earlier) and all(_content(node) != last.content for node in found.values())


def _is_printed(path: str, printed: str) -> bool:
    return path.removeprefix("tree/") in printed


def _allowed(cut: PowerCut, known: Sequence[Version]) -> set[bytes | None] | None:
    """The contents that a path may hold: from the last one that was surely on the disk. None: anything, for a command
    wrote it by itself since then."""
    whole = PowerCut(cut.recording, cut.mode, cut.at, Random(0))
    begun = _begin_of_unfinished(cut)
    durable = [number for number, version in enumerate(known) if _is_durable(whole, version, number, known)]
    if durable:
        # The call that made it may not be on record: then recovery takes the call back.
        made_at = known[durable[-1]].at
        begun = min(begun, max((step.begin for step in cut.recording.steps if step.begin < made_at), default=begun))
    before_step = [number for number, version in enumerate(known) if version.at < begun]
    first = min(durable[-1] if durable else 0, before_step[-1] if before_step else 0)
    window = known[first:]
    if any(version.foreign for version in window):
        return None
    is_new = first == 0 and known[0].at >= begun
    return {version.content for version in window} | ({None} if is_new or not durable else set())


def _begin_of_unfinished(cut: PowerCut) -> int:
    """Since when nothing was acknowledged. Recovery takes back the step under way, and a call that died before it."""
    number, _ = cut.recording.step_at(cut.at) or (0, None)
    steps = cut.recording.steps
    while number > 0 and steps[number - 1].end is None:
        number -= 1
    return steps[number].begin


def _is_durable(cut: PowerCut, version: Version, number: int, known: Sequence[Version]) -> bool:
    """Its name and its content were synced before the cut, and the content has not been written over since."""
    if version.at >= cut.last_sync or version.file is None:
        return False
    later = [one for one in known[number + 1 :] if one.file == version.file]
    return cut.synced_at(version.file) > version.at and not later


def _power_violations(cut: PowerCut, found: dict[str, Node], opened: Opened) -> Iterator[str]:
    number, step = cut.recording.step_at(cut.at) or (0, Step("start", 0))
    is_done = step.end is not None and step.end < cut.at
    allowed = [step.after] if is_done else [step.before, step.after]
    states = [tree for tree in allowed if tree is not None]
    # After a command, if it is not certain whether the user changed a path since, the path stays and is named.
    named = opened.not_captured(step.calls) if step.kind in ("exec watch", "exec scan") and not is_done else set()
    differences = [[one for one in _difference(found, tree) if one.partition(": ")[0] not in named] for tree in states]
    if all(differences):
        yield f"the files differ: {min(differences, key=len)}"
    if is_done and (lost := _difference(read_tree(opened.base, "state/forks"), step.forks)):
        yield f"the files of forks differ: {lost}"
    acknowledged = [
        call for one in cut.recording.steps[: number + is_done] for call in one.calls if one.end is not None
    ]
    log = opened.statuses()
    missing = [call for call in acknowledged if log.get(call) not in ("committed", "undone")]
    if missing:
        yield f"acknowledged calls are not on record: {missing}"
    if not is_done and step.calls and step.after is not None and _difference(step.before, step.after):
        is_recorded = log.get(step.calls[-1]) == "committed"
        if not named and is_recorded != (not _difference(found, step.after)):
            yield f"the call is {'' if is_recorded else 'not '}on record, and the files say otherwise"


def _difference(found: dict[str, Node], wanted: dict[str, Node]) -> list[str]:
    paths = sorted(found.keys() | wanted.keys())
    return [
        f"{path}: {_shown_node(found.get(path))} instead of {_shown_node(wanted.get(path))}"
        for path in paths
        if _comparable(found.get(path)) != _comparable(wanted.get(path))
    ]


def _comparable(node: Node | None) -> tuple[Any, ...] | None:
    return None if node is None else (node.kind, node.mode, node.content)


def _content(node: Node | None) -> bytes | None:
    if node is None:
        return None
    return node.content if node.kind == "file" else node.kind.encode() + node.content


def _shown(content: bytes | None) -> str:
    if content is None:
        return "nothing"
    return f"{len(content)} bytes {content[:24]!r}"


def _shown_node(node: Node | None) -> str:
    return "nothing" if node is None else f"{node.kind} {node.mode:o} {_shown(node.content)}"


def in_child(act: Callable[[], list[str]]) -> list[str]:
    """Run in a process of its own. An exception in it is a violation too."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = act()
        except Exception:  # noqa: BLE001  # whatever goes wrong in a state is a finding
            answer = [traceback.format_exc()]
        with os.fdopen(writing, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return list(json.loads(text)) if text else ["the process that opened the state died"]


def load_modules(base: str, recording: Recording, mode: Mode) -> None:
    """Import what opening a state needs, which the processes then share. A state is opened in a process to find out."""
    _, cut = cut_of(recording, mode, KINDS.index("undo"), _none)

    def needed() -> list[str]:
        list(check(base, cut))
        return [name for name in sys.modules if name.startswith(("mulligan", "pydantic", "orjson", "click"))]

    for name in in_child(needed):
        with contextlib.suppress(ImportError):
            import_module(name)


def _violations(base: str, cut: PowerCut) -> list[str]:
    return list(check(base, cut))


def sites_of(recording: Recording) -> list[str]:
    """The lines of Mulligan that sync something, by the names of what they call."""
    found = {site for sync in recording.syncs for site in sync.sites if is_sync_call(site)}
    return sorted(map(shown_site, found))


def is_sync_call(site: CallSite) -> bool:
    import mulligan

    line = linecache.getline(os.path.join(os.path.dirname(mulligan.__file__), site[0]), site[2])
    return "sync" in line.partition("#")[0]


def shown_site(site: CallSite) -> str:
    return f"{site[0]}:{site[1]}:{site[2]}"


def cuts_without(recording: Recording, mode: Mode, site: str) -> Iterator[PowerCut]:
    """Cuts shortly after a sync of that line, if the line were not there."""
    dropped = partial(_is_by, site)
    moments = [sync.at for sync in recording.syncs if dropped(sync)]
    random = Random(site)
    ends = [step.end for step in recording.steps if step.end is not None]
    for moment in random.sample(moments, min(len(moments), MOMENTS_A_SITE)):
        # Just after the sync, after what relies on it, after the next steps were acknowledged, and at the end.
        soon = [moment + random.randint(1, 10), moment + random.randint(10, 200)]
        later = [*soon, *[end + 1 for end in ends if end > moment][:4], recording.length]
        for at, is_worst in product(later, (True, False)):
            disk = Random(f"{site} {at}")
            yield PowerCut(recording, mode, min(at, recording.length), disk, dropped, is_worst=is_worst)


def _is_by(site: str, sync: Sync) -> bool:
    return site in map(shown_site, sync.sites)


def violations_without(base: str, recording: Recording, mode: Mode, site: str) -> Iterator[Result]:
    """In the history, then in recoveries from cuts in it. Ends with the first state that breaks a promise."""
    for cut in cuts_without(recording, mode, site):
        found = in_child(partial(_violations, base, cut))
        yield Result(0, site, cut.at, found)
        if found:
            return
    for seed in range(RECOVERIES_A_SITE):
        _, first = cut_of(recording, mode, seed, _none)
        recovery = Recovery(base, first)
        for second in cuts_without(recovery.recording, mode, site):
            found = in_child(partial(_violations_after_second, base, first, recovery, second))
            yield Result(seed, site, second.at, found)
            if found:
                return


def _none(_: Sync) -> bool:
    return False


def _violations_after_second(base: str, first: PowerCut, recovery: Recovery, second: PowerCut) -> list[str]:
    return list(check_after_second(base, first, recovery, second))


def _violations_twice(base: str, first: PowerCut, seed: int) -> list[str]:
    recovery = Recovery(base, first)
    return _violations_after_second(base, first, recovery, recovery.cut(f"{seed} {first.mode}"))


def main(base: str, log: str, mode: Mode, verb: str, *rest: str) -> None:
    pretend_boot("another boot")
    wait_for_no_disk()
    recording = Recording(read_log(log))
    if verb == "mounted":
        cut = PowerCut(recording, mode, int(rest[0]), Random(0))
        print(json.dumps(asdict(Result(0, mode, cut.at, list(check_files(base, cut))))))
        return
    load_modules(base, recording, mode)
    if verb == "without":
        for result in violations_without(base, recording, mode, rest[0]):
            print(json.dumps(asdict(result)), flush=True)
        return
    first, count = map(int, rest)
    for seed in range(first, first + count):
        kind, cut = cut_of(recording, mode, seed, _none)
        act = partial(_violations, base, cut) if verb == "states" else partial(_violations_twice, base, cut, seed)
        print(json.dumps(asdict(Result(seed, kind, cut.at, in_child(act)))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
