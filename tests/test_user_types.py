"""Programs of users pass a strict type checker: `mypy --strict` on the uses of the guides and on the examples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"


def _checked(tmp_path: Path, *programs: Path) -> str:
    """What mypy says, with no configuration but its strict one."""
    options = ["--strict", "--config-file=", "--python-version=3.11", f"--cache-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, programs)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.req("D12.typed_for_users")
def test_a_program_with_the_uses_of_the_guides_passes_mypy_strict(tmp_path: Path) -> None:
    examples = sorted(EXAMPLES.glob("*.py"))
    programs = [HERE / "fixtures" / "typed_program.py", *examples]
    assert _checked(tmp_path, *programs) == f"Success: no issues found in {len(programs)} source files\n"


@pytest.mark.slow
@pytest.mark.req("D12.typed_for_users")
def test_an_effect_of_an_async_call_that_is_not_awaited_is_a_type_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import mulligan\n"
        "async def write(session: mulligan.DurableSession) -> None:\n"
        "    async with session.call() as call:\n"
        "        call.write_file('a', 'x')\n"
        "        await call.write_file(7, 'x')\n"
    )
    said = _checked(tmp_path, program)
    assert "program.py:4: error: Value of type" in said and "[unused-coroutine]" in said
    assert "program.py:5: error: Argument 1" in said
