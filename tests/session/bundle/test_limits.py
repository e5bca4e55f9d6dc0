"""A bundle that is too large is refused before it is parsed: the process stays small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mulligan

MIB = 1024 * 1024
IMPORT = """
import sys
from mulligan.__main__ import main
try:
    main()
finally:
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(peak.split()[1], file=sys.stderr)
"""


def _imported(tmp_path: Path, file: str, stdin: Path | None = None) -> tuple[int, str, int]:
    """The exit code, what it said, and the largest memory of the process in bytes."""
    (tmp_path / "work").mkdir(exist_ok=True)
    with open(stdin or "/dev/null", "rb") as given:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                IMPORT,
                "import",
                file,
                "--root",
                str(tmp_path / "work"),
                "--store",
                str(tmp_path / "store"),
            ],
            stdin=given,
            capture_output=True,
            text=True,
            check=False,
        )
    *words, peak = done.stderr.splitlines()
    return done.returncode, "\n".join(words), int(peak) * 1024


@pytest.mark.req("D11.bundle_too_large")
@pytest.mark.parametrize("by_stdin", [False, True])
def test_a_document_of_100_mb_is_refused_without_reading_it_whole(tmp_path: Path, by_stdin: bool) -> None:
    bundle, small = tmp_path / "large.json", tmp_path / "small.json"
    small.write_text("{}")
    with bundle.open("wb") as file:
        file.write(b'{"_type": "mulligan_session_bundle", "x": [' + b"{}," * 33_333_333 + b"{}]}")
    code, words, peak = _imported(tmp_path, "-" if by_stdin else str(bundle), bundle)
    _, _, base = _imported(tmp_path, str(small))
    assert (code, "more than 64 MiB" in words) == (2, True)
    # What standard input gives up to the limit is read; nothing of it is parsed.
    assert peak - base < 80 * MIB


def test_a_bundle_that_could_not_be_imported_is_not_exported(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "zeros").write_bytes(bytes(49 * MIB))
    with mulligan.open(tmp_path / "work", store=str(tmp_path / "store")) as m:
        session = m.session("s")
        with session.call() as call:
            assert call.delete("zeros").ok
        with pytest.raises(mulligan.MulliganError) as caught:
            session.export("local", content=True)
        assert (caught.value.code, caught.value.details["problem"]) == ("invalid_bundle", "too_large")
        assert session.export("local")["content"]["blobs"][0]["size"] == 49 * MIB
