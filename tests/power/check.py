"""Opens the states that power cuts leave of a recorded history, and checks what Mulligan promises for each.

    python tests/power/check.py BASE LOG MODE states FIRST COUNT
    python tests/power/check.py BASE LOG MODE without FILE:FUNCTION:LINE
    python tests/power/check.py BASE LOG MODE mounted OPERATIONS

The first form opens the states of COUNT seeds. The second opens states in which the syncs of one line of Mulligan did
not happen, until one breaks a promise. The third takes the files as they are, after so many operations. Prints one JSON
object a line for each state. Every state is opened in a process of its own, under another boot.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import linecache
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from itertools import product
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from power.disk_states import Mode, Node, PowerCut, Recording, Step, Sync, Version, materialise, read_tree
from power.history import KINDS
from power.recorder import BOOT_FILE, Site, read_log

DRAFT_PREFIX = ".mulligan-"
MOMENTS_A_SITE = 12


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

    def not_captured(self, calls: Sequence[str]) -> set[str]:
        """The paths of which these calls say that it is not certain who changed them."""
        answers = [self.ask("coverage", call, "--json") for call in calls]
        listed = [one for code, out, _ in answers if code == 0 for one in json.loads(out)]
        notes = [note for one in listed for note in one["coverage"]]
        return {"tree/" + note["path"] for note in notes if note["reason"] == "ambiguous"}


def check(base: str, cut: PowerCut) -> Iterator[str]:
    """The violations of the promise in one state."""
    show_inodes(materialise(base, cut.state()))
    start_machine()
    yield from check_files(base, cut)


def check_files(base: str, cut: PowerCut) -> Iterator[str]:
    """The same for files that are there already."""
    opened = Opened(base, cut.mode)
    code, _, printed = opened.ask("status")
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
    if cut.mode == "process":
        yield from _process_violations(cut, found, printed)
    else:
        yield from _power_violations(cut, found, opened)


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
    """Whether this content was on the disk under another name once, and now it is nowhere."""
    whole = PowerCut(cut.recording, cut.mode, cut.at, Random(0))
    earlier = [
        _is_durable(whole, version, number, versions)
        for other, versions in cut.recording.versions.items()
        for number, version in enumerate(versions)
        if other != path and version.content == last.content and last.content and version.at < cut.at
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


def reboot() -> None:
    """From now on this process runs under another boot, and it does not wait for the disk."""
    import apsw

    real_open = builtins.open

    def open_(file: Any, *rest: Any, **more: Any) -> Any:
        if file == BOOT_FILE:
            return io.StringIO("another-boot\n")
        return real_open(file, *rest, **more)

    class Quick(apsw.VFS):
        def __init__(self) -> None:
            super().__init__("mulligan-quick", "unix", makedefault=True)

        def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
            return QuickFile("unix", name, flags)

    class QuickFile(apsw.VFSFile):
        def xSync(self, flags: int) -> None:
            return None

    builtins.open = open_
    for name in ("fsync", "fdatasync", "sync"):
        setattr(os, name, lambda *_: None)
    _kept.append(Quick())


def start_machine() -> None:
    """From now on this process sees a machine that was started at this moment."""
    started_ns, real = time.time_ns(), time.clock_gettime_ns

    def clock_gettime_ns(clock: int) -> int:
        return time.time_ns() - started_ns if clock == time.CLOCK_BOOTTIME else real(clock)

    time.clock_gettime_ns = clock_gettime_ns


def show_inodes(recorded: dict[int, int]) -> None:
    """Files keep their inodes over a reboot: from now on this process sees those of the recording."""

    def showing(real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def look(*arguments: Any, **options: Any) -> os.stat_result:
            found = real(*arguments, **options)
            inode = recorded.get(found.st_ino)
            if not inode:
                return found
            exact = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
            return os.stat_result((found.st_mode, inode, *tuple(found)[2:]), exact)

        return look

    for name in ("stat", "lstat", "fstat"):
        real = getattr(os, name)
        setattr(os, name, showing(real))
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            supported.update({getattr(os, name)} if real in supported else ())


_kept: list[object] = []


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
    _, cut = cut_of(recording, mode, KINDS.index("undo"), lambda _: False)

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


def is_sync_call(site: Site) -> bool:
    import mulligan

    line = linecache.getline(os.path.join(os.path.dirname(mulligan.__file__), site[0]), site[2])
    return "sync" in line.partition("#")[0]


def shown_site(site: Site) -> str:
    return f"{site[0]}:{site[1]}:{site[2]}"


def cuts_without(recording: Recording, mode: Mode, site: str) -> Iterator[PowerCut]:
    """Cuts shortly after a sync of that line, if the line were not there."""

    def dropped(sync: Sync) -> bool:
        return site in map(shown_site, sync.sites)

    moments = [sync.at for sync in recording.syncs if dropped(sync)]
    random = Random(site)
    ends = [step.end for step in recording.steps if step.end is not None]
    for moment in random.sample(moments, min(len(moments), MOMENTS_A_SITE)):
        # Just after the sync, after the call that it belongs to was acknowledged, and some calls later.
        later = [moment + random.randint(1, 10), *[end + 1 for end in ends if end > moment][:4]]
        for at, is_worst in product(later, (True, False)):
            disk = Random(f"{site} {at}")
            yield PowerCut(recording, mode, min(at, recording.length), disk, dropped, is_worst=is_worst)


def main(base: str, log: str, mode: Mode, verb: str, *rest: str) -> None:
    reboot()
    recording = Recording(read_log(log))
    if verb == "mounted":
        cut = PowerCut(recording, mode, int(rest[0]), Random(0))
        print(json.dumps(asdict(Result(0, mode, cut.at, list(check_files(base, cut))))))
        return
    load_modules(base, recording, mode)
    if verb == "without":
        for cut in cuts_without(recording, mode, rest[0]):
            found = in_child(partial(_violations, base, cut))
            print(json.dumps(asdict(Result(0, rest[0], cut.at, found))), flush=True)
            if found:
                break
        return
    first, count = map(int, rest)
    for seed in range(first, first + count):
        kind, cut = cut_of(recording, mode, seed, lambda _: False)
        found = in_child(partial(_violations, base, cut))
        print(json.dumps(asdict(Result(seed, kind, cut.at, found))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
