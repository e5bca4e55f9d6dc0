"""What a command does that no undo can reach, and who else was at work: heard of by `notify`, said in its coverage."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mulligan.exec.capture.notify import LISTED_MAX, Notify
from mulligan.exec.command import Spools, command
from mulligan.exec.run import CommandResult, run
from tests.exec.trees import Recorder

PYTHON = [sys.executable, "-I", "-S", "-c"]


def real(path: Path) -> bytes:
    return os.fsencode(os.path.realpath(path))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def caught(root: Path, *argv: str, witness: Recorder | None = None) -> CommandResult:
    return run(command(list(argv), str(root)), capture=Notify(witness or Recorder()), sink=Spools())


def sh(root: Path, text: str) -> CommandResult:
    return caught(root, "sh", "-c", text)


@pytest.mark.req("D6.coverage.outside_root")
class TestOutside:
    def test_a_write_outside_the_root_is_in_the_coverage(self, root: Path) -> None:
        outside = root.parent / "outside"
        outside.mkdir()
        (outside / "old").write_text("1")
        (outside / "gone").write_text("1")
        ran = sh(root, f"cd {outside}; echo 2 > old; rm gone; mkdir new; echo x > new/x; ln -s y link; mv new moved")
        found = {os.path.relpath(path, real(outside)): reason for path, reason in ran.coverage}
        assert found == dict.fromkeys([b"old", b"gone", b"link", b"moved"], "outside_root")

    def test_an_effect_that_leaves_no_trace_is_not_in_the_coverage(self, root: Path) -> None:
        outside = root.parent / "outside"
        outside.mkdir()
        (outside / "read").write_text("1")
        (outside / "closed").mkdir(mode=0o500)
        text = "t=$(mktemp); echo x > $t; rm $t; echo quiet > /dev/null; echo err >&2; cat ../outside/read"
        assert sh(root, text).coverage == ()

    def test_many_outside_paths_are_listed_by_their_folders(self, root: Path) -> None:
        outside = root.parent / "outside"
        ran = sh(root, f"mkdir {outside}; cd {outside}; for i in $(seq {LISTED_MAX + 10}); do echo $i > $i; done")
        assert ran.coverage == ((real(outside), "outside_root"),)

    def test_a_command_that_stays_inside_has_no_coverage(self, root: Path) -> None:
        assert sh(root, "mkdir -p a/b; echo x > a/b/c; mv a d; rm -rf d").coverage == ()


class TestOthers:
    @pytest.fixture
    def listening(self) -> Iterator[tuple[str, int]]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server.getsockname()

    @pytest.mark.req("D6.coverage.other_daemon")
    def test_a_connection_to_a_program_on_this_machine_is_in_the_coverage(
        self, root: Path, listening: tuple[str, int]
    ) -> None:
        path = root / "daemon"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
            code = (
                f"import socket; socket.create_connection({listening!r})\n"
                f"socket.socket(socket.AF_UNIX).connect({str(path)!r})"
            )
            ran = caught(root, *PYTHON, code)
        assert ran.coverage == (
            (real(path), "other_daemon"),
            (f"127.0.0.1:{listening[1]}".encode(), "other_daemon"),
        )

    @pytest.mark.req("D6.coverage.network")
    def test_a_network_connection_is_in_the_coverage_even_if_it_fails(self, root: Path) -> None:
        code = (
            "import socket\n"
            "s = socket.socket(); s.setblocking(False); s.connect_ex(('192.0.2.1', 443))\n"
            "d = socket.socket(type=socket.SOCK_DGRAM)\n"
            "try: d.sendto(b'x', ('192.0.2.2', 53))\n"
            "except OSError: pass\n"
            "d.connect(('127.0.0.1', 53)); d.send(b'x')\n"
        )
        assert caught(root, *PYTHON, code).coverage == (
            (b"127.0.0.1:53", "network"),
            (b"192.0.2.1:443", "network"),
            (b"192.0.2.2:53", "network"),
        )

    def test_a_connection_of_a_command_to_itself_is_not_in_the_coverage(self, root: Path) -> None:
        code = (
            "import socket\n"
            "s = socket.socket(socket.AF_UNIX); s.bind('own'); s.listen()\n"
            "socket.socket(socket.AF_UNIX).connect('own')\n"
            "a = socket.socket(socket.AF_UNIX); a.bind(b'\\0own'); a.listen()\n"
            "socket.socket(socket.AF_UNIX).connect(b'\\0own')\n"
            "one, other = socket.socketpair(); one.send(b'x')\n"
            "try: socket.socket(socket.AF_UNIX).connect('/nobody/there')\n"
            "except OSError: pass\n"
        )
        assert caught(root, *PYTHON, code).coverage == ()


def beside(root: Path, before: str, edit: Callable[[], object], after: str = ":") -> CommandResult:
    """Run `before`, let somebody else act, run `after`; all while one command runs."""
    reached, go = root.parent / "reached", root.parent / "go"
    os.mkfifo(reached)
    os.mkfifo(go)
    found: list[CommandResult] = []
    text = f"{before}; echo > {reached}; read x < {go}; {after}"
    work = threading.Thread(target=lambda: found.append(sh(root, text)))
    work.start()
    reached.read_text()
    edit()
    go.write_text("\n")
    work.join()
    return found[0]


class _Then(Recorder):
    """Tells another when it has its own."""

    def __init__(self, other: Recorder) -> None:
        super().__init__()
        self._other = other

    def about_to_change(self, paths: Sequence[bytes], *, going: bool = False) -> None:
        super().about_to_change(paths, going=going)
        self._other.about_to_change(paths, going=going)


class TestBystanders:
    """What happens more often than the command asked for is somebody else's doing."""

    def test_a_save_in_place_is_seen(self, root: Path) -> None:
        ran = beside(root, "echo agent > f", lambda: (root / "f").write_text("person"), "echo more >> f")
        assert ran.shared == {real(root) + b"/f"}

    def test_a_save_by_renaming_is_seen(self, root: Path) -> None:
        def save() -> None:
            (root / "f.tmp").write_text("person")
            (root / "f.tmp").rename(root / "f")

        (root / "f").write_text("1")
        assert beside(root, "echo agent > f", save).shared == {real(root) + b"/f"}

    def test_removing_and_making_again_are_seen(self, root: Path) -> None:
        (root / "gone").write_text("1")

        def act() -> None:
            (root / "gone").unlink()
            (root / "made").write_text("person")

        ran = beside(root, "echo 2 > gone; echo 2 > made; rm made", act)
        assert ran.shared == {real(root) + b"/gone", real(root) + b"/made"}

    def test_a_path_that_the_command_never_touched_is_not_reported(self, root: Path) -> None:
        ran = beside(root, "echo agent > f", lambda: (root / "other").write_text("person"))
        assert ran.touched == {real(root) + b"/f"} and not ran.shared

    @pytest.mark.parametrize("person", [lambda path: path.write_text("person"), Path.unlink])
    def test_a_change_before_the_commands_own_is_not_shared(self, root: Path, person: Callable[[Path], object]) -> None:
        (root / "f").write_text("1")
        ran = beside(root, "echo agent > own", lambda: person(root / "f"), "echo agent >> f")
        assert ran.touched == {real(root) + b"/f", real(root) + b"/own"} and not ran.shared

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_only_what_happened_after_the_preimage_is_beside_the_command(self, root: Path, moment: str) -> None:
        """The witness may take his time: he waits for calls of ours that are at work there."""
        (root / "f").write_text("1")

        def save(path: bytes) -> None:
            Path(os.fsdecode(path)).write_text("person")

        person = Recorder(on_told=save)
        witness = person if moment == "before" else _Then(person)
        ran = caught(root, "sh", "-c", "echo agent >> f", witness=witness)
        assert ran.shared == ({real(root) + b"/f"} if moment == "after" else frozenset())
        assert (root / "f").read_text() == "personagent\n"

    @pytest.mark.parametrize("lingers", [False, True])
    def test_who_comes_after_the_end_is_late_for_processes_that_linger(self, root: Path, lingers: bool) -> None:
        capture = Notify(Recorder(), lingers=lingers)
        run(command(["sh", "-c", "echo agent > f; echo agent > g"], str(root)), capture=capture, sink=Spools())
        (root / "f").write_text("person")
        assert capture.late() == ({real(root) + b"/f"} if lingers else frozenset())
        (root / "g").write_text("person")
        assert real(root) + b"/g" not in capture.late()

    def test_reading_is_no_deed(self, root: Path) -> None:
        assert beside(root, "echo agent > f", lambda: (root / "f").read_text()).shared == frozenset()

    @pytest.mark.parametrize(
        "text",
        [
            "exec 3> a; mv a b; echo x >&3; exec 3>&-",
            "exec 3> a; ln a c; rm a; exec 3>&-; echo x >> c",
            "mkdir d; exec 3> d/f; mv d e; exec 3>&-; echo x > e/f; rm -r e; mkdir d; echo y > d/f",
            "for i in 1 2 3; do (echo $i >> f) & done; wait",
            "exec 3> f; (sleep 0; echo x >&3) & wait; exec 3>&-",
            "sed -i s/a/b/ f; sed -i s/a/b/ f",
            "git init -q; git add -A; git -c user.name=u -c user.email=e commit -qm 1; git checkout -q -b x",
            "echo x > {outside}/f; mv {outside}/f f; echo y >> f",
            "exec 3<> f; echo x >&3; exec 4>/proc/self/fd/3; echo y >&4; exec 3>&- 4>&-",
        ],
    )
    def test_the_command_itself_is_never_taken_for_another_writer(self, root: Path, text: str) -> None:
        (root / "f").write_text("aaa\n")
        outside = root.parent / "outside"
        outside.mkdir()
        ran = sh(root, text.format(outside=outside) if "{outside}" in text else text)
        assert (ran.exit_code, ran.shared) == (0, frozenset())
