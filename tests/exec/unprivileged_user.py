"""Run a module of these tests as a user without any privilege, from a copy of the sources that such a user can read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import mulligan

NOBODY = 65534
_IGNORED = shutil.ignore_patterns("__pycache__")
_PACKAGES = (
    *("apsw", "orjson", "uuid_utils", "backports.zstd", "pydantic", "pydantic_core"),
    *("annotated_types", "typing_extensions", "typing_inspection", "click"),
)


def run_as_nobody(module: str, *arguments: str) -> str:
    """What the module prints when run as a program; the test fails with its errors if it fails."""
    home = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(Path(mulligan.__file__).parent, home / "mulligan", ignore=_IGNORED)
        _copy_tests(home)
        _copy_packages(home)
        home.chmod(0o755)
        found = subprocess.run(
            [_interpreter(), "-B", "-m", module, *arguments],
            cwd="/",
            env={"PATH": os.defpath, "PYTHONPATH": str(home)},
            capture_output=True,
            text=True,
            user=_user(),
            group=_user(),
        )
        assert found.returncode == 0, found.stderr
        return found.stdout
    finally:
        shutil.rmtree(home)


def _copy_tests(home: Path) -> None:
    tests = Path(__file__).parent.parent
    for folder in ("exec", "files", "history"):
        shutil.copytree(tests / folder, home / "tests" / folder, ignore=_IGNORED)
    for file in ("__init__.py", "temp_workspace.py"):
        shutil.copy(tests / file, home / "tests")


def _copy_packages(home: Path) -> None:
    """What a store and effects need; such a user may not be able to read where it is installed."""
    for name in _PACKAGES:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None, f"{name} is not installed"
        origin = Path(spec.origin)
        if spec.submodule_search_locations is None:
            shutil.copy(origin, home)
        else:
            target = home.joinpath(*name.split("."))
            shutil.copytree(origin.parent, target, ignore=_IGNORED)


def _user() -> int | None:
    return NOBODY if os.geteuid() == 0 else None


def _interpreter() -> str:
    """This interpreter, or the system's where ours is in a folder that only its owner may enter."""
    for candidate in (sys.executable, os.path.realpath(sys.executable), "/usr/bin/python3"):
        try:
            subprocess.run([candidate, "-c", ""], check=True, capture_output=True, user=_user(), group=_user())
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    raise AssertionError("no Python interpreter that an unprivileged user may run; install python3")
