"""`mulligan doctor`: what this machine offers, found out by trying, without changing anything that stays."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec

import click

from mulligan.cli.errors import exit_code_of_fault
from mulligan.cli.options import Common, options_saying
from mulligan.cli.output import paint, print_json, visible
from mulligan.opening import open_store, store_directory
from mulligan.values.clock import SystemClock
from mulligan.values.faults import MulliganError, fault
from mulligan.values.plain import plain
from mulligan.workspace.exec.kernel import SYS_LANDLOCK_CREATE_RULESET, syscall
from mulligan.workspace.kernel import LINUX, RESOLVE_BENEATH, exchange, nobody_writes, open_beneath

_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_GET_NOTIF_SIZES = 3
_LANDLOCK_VERSION = 1
_PROGRAM_TIMEOUT_S = 10.0
_NOT_USED = "Not used: it is about the machine and the store."


@plain(slots=True, frozen=True)
class Finding:
    """`ok` is None for what is only said, not judged; `code` is that of the fault that was met."""

    name: str
    value: str
    ok: bool | None = None
    code: str | None = None


@click.command("doctor")
@options_saying(_NOT_USED, root=_NOT_USED)
def doctor_verb(common: Common) -> int:
    """Say what this machine offers and what is missing. Missing parts cost speed or features, never correctness.

    A store that does not open gives the exit code that every verb would: 3 if it is damaged.
    """
    found = [*_ourselves(), *_store(common), *_capture(common), *_kernel(), *_programs()]
    if common.as_json:
        print_json({"findings": [asdict(finding) for finding in found]})
    else:
        for finding in found:
            click.echo(f"{_mark(finding)} {finding.name}: {visible(finding.value)}")
    return max(exit_code_of_fault(fault(finding.code, finding.value)) if finding.code else 0 for finding in found)


def _mark(finding: Finding) -> str:
    if finding.ok is None:
        return "     "
    return paint("  ok ", "green") if finding.ok else paint("none ", "yellow")


def _ourselves() -> list[Finding]:
    import apsw

    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.release()}"),
        Finding("sqlite", str(apsw.sqlite_lib_version()), True),
    ]


def _capture(common: Common) -> list[Finding]:
    """The files that say what is not to be captured. Without any, an example to copy."""
    from mulligan.workspace.capture_rules import EXAMPLE, PROJECT_FILE, CaptureRules, user_file

    files = (user_file(os.environ), os.path.join(os.path.abspath(common.root or "."), PROJECT_FILE))
    rules = CaptureRules(files)
    try:
        rules.load()
    except MulliganError as error:
        return [Finding("capture", error.message, False, error.code)]
    there = [name for name in files if os.path.exists(name)]
    if rules.any:
        return [Finding("capture", f"some paths are not captured: {', '.join(there)}", True)]
    return [Finding("capture", f"every path; to leave some out, write into {files[0]}: {' '.join(EXAMPLE.split())}")]


def _store(common: Common) -> list[Finding]:
    from mulligan.store.sqlite_file import TRUST_OWNER

    directory = store_directory(common.store, os.environ)
    if directory is None:
        return [Finding("store", "in memory")]
    found = [Finding("state directory", directory, os.path.isdir(directory))]
    if os.path.isdir(directory):
        from mulligan.store.sqlite_file import file_system_of

        found.append(Finding("file system", file_system_of(directory) or "unknown"))
    if os.environ.get(TRUST_OWNER) == "1":
        found.append(Finding("owner", f"{TRUST_OWNER}=1: a state directory of another user is trusted", False))
    if os.path.exists(os.path.join(directory, "store.db")):
        found += _opens(common)
    return found


def _opens(common: Common) -> list[Finding]:
    from mulligan.history.schema import SCHEMA
    from mulligan.store.housekeeping import sync_failure
    from mulligan.store.machine import older_processes

    try:
        store = open_store(common.store, SCHEMA, durability="process", clock=SystemClock(), create=False)
        with store.read() as tx:
            failed, older = sync_failure(tx), older_processes(tx, store.is_alive)
        store.close()
    except MulliganError as error:
        return [Finding("store", error.message, False, error.code)]
    unsafe = [Finding("sync", f"a power cut may take what was written since {failed}", False)] if failed else []
    outdated = [Finding("older process", f"{words}; restart it", False) for words in older]
    return [Finding("store", "opens", True), *unsafe, *outdated]


def _kernel() -> list[Finding]:
    return [
        _tried("openat2", "paths resolve beneath a handle", _try_openat2),
        _tried("exchange", "files are replaced without a gap", _try_exchange),
        _tried("leases", "writers of a file are seen", _try_lease),
        _tried("seccomp notify", "commands are watched call by call", _try_notify),
        _tried("overlay", "commands can run on a copy", _try_overlay),
        _tried("landlock", "commands can be confined", _try_landlock),
        *_inotify(),
    ]


def _tried(name: str, good: str, attempt: Callable[[], bool]) -> Finding:
    try:
        works = attempt()
    except OSError as error:
        return Finding(name, f"not here ({error.strerror or error})", False)
    return Finding(name, good if works else "not here", works)


def _try_openat2() -> bool:
    directory = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.close(open_beneath(directory, b".", os.O_RDONLY | os.O_DIRECTORY, resolve=RESOLVE_BENEATH))
    finally:
        os.close(directory)
    return True


def _try_exchange() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "other"):
            with open(os.path.join(folder, name), "wb") as file:
                file.write(name.encode())
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            exchange(directory, b"one", b"other")
        finally:
            os.close(directory)
        with open(os.path.join(folder, "one"), "rb") as file:
            return file.read() == b"other"


def _try_lease() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        handle = os.open(path, os.O_RDONLY)
        try:
            return nobody_writes(handle) is True
        finally:
            os.close(handle)


def _try_notify() -> bool:
    import ctypes

    number = _SYS_SECCOMP.get(platform.machine())
    if not LINUX or number is None:
        return False
    sizes = (ctypes.c_uint16 * 3)()
    return syscall(number, _SECCOMP_GET_NOTIF_SIZES, 0, ctypes.byref(sizes)) == 0


def _try_overlay() -> bool:
    if not LINUX:
        return False
    with open("/proc/filesystems", encoding="ascii") as file:
        return any(line.split()[-1] == "overlay" for line in file)


def _try_landlock() -> bool:
    return LINUX and syscall(SYS_LANDLOCK_CREATE_RULESET, 0, 0, _LANDLOCK_VERSION) >= 1


def _inotify() -> list[Finding]:
    limits = []
    for name in ("max_user_watches", "max_user_instances") if LINUX else ():
        try:
            with open(f"/proc/sys/fs/inotify/{name}", encoding="ascii") as file:
                limits.append(Finding(f"inotify {name}", file.read().strip()))
        except OSError:
            limits.append(Finding(f"inotify {name}", "unknown"))
    return limits


def _programs() -> list[Finding]:
    beside = os.path.dirname(sys.executable)
    return [
        _program("git", shutil.which("git")),
        _program("rg", shutil.which("rg") or shutil.which("rg", path=beside)),
        Finding(
            "re2", "installed" if find_spec("re2") else "not installed; grep is slower", find_spec("re2") is not None
        ),
    ]


def _program(name: str, path: str | None) -> Finding:
    if path is None:
        return Finding(name, "not installed", False)
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=_PROGRAM_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, f"{path} does not run: {error}", False)
    return Finding(name, done.stdout.decode("utf-8", "replace").splitlines()[0], done.returncode == 0)
