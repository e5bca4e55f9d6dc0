"""What we ask of the kernel beyond what `os` offers, against other processes that really do it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOOKS = 20_000

OPENER = """
import os, sys
while os.path.exists(sys.argv[1]):
    try:
        os.close(os.open(sys.argv[1], os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        pass
"""

LOOKER = f"""
import os, sys
from mulligan.files.kernel import nobody_writes
handle = os.open(sys.argv[1], os.O_RDONLY)
print(*sorted({{str(nobody_writes(handle)) for _ in range({LOOKS})}}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
def test_a_writer_that_opens_the_file_during_the_check_does_not_kill_mulligan(tmp_path: Path) -> None:
    """The kernel tells the holder of a lease by a signal, whose usual one ends a process."""
    file = tmp_path / "f"
    file.write_text("x")
    with subprocess.Popen([sys.executable, "-S", "-c", OPENER, str(file)]) as opener:
        looked = subprocess.run([sys.executable, "-c", LOOKER, str(file)], capture_output=True, text=True, check=False)
        file.unlink()
        opener.wait()
    assert looked.returncode == 0
    assert looked.stdout.split() == ["False", "True"]
