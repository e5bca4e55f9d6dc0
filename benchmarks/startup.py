"""The start-up time of each entry point, compared with a Python that does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from timing import show

RUNS = 25
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""An installed program has its bytecode; one that compiles itself at every start would measure the compiler."""

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import mulligan": ["-c", "import mulligan"],
    "mulligan --help": ["-m", "mulligan.cli", "--help"],
    "mulligan status": ["-m", "mulligan.cli", "status"],
    "mulligan undo --dry-run": ["-m", "mulligan.cli", "undo", "--dry-run"],
    "mulligan exec -- true": ["-m", "mulligan.cli", "exec", "--", "true"],
}
WRITE = ["-m", "mulligan.cli", "call", "write_file", "--args", '{"path": "a", "content": "x"}']


def started_ms(arguments: list[str], base: str) -> tuple[float, float]:
    """Time on the clock and time on the processor of one run, in milliseconds."""
    start = time.perf_counter()
    environment = {**ENVIRONMENT, "MULLIGAN_HOME": os.path.join(base, "home")}
    work = os.path.join(base, "work")
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment, cwd=work)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return (time.perf_counter() - start) * 1e3, (used.ru_utime + used.ru_stime) * 1e3


def main() -> None:
    print("Start-up, whole process (the processor's time is what counts on a busy machine)")
    with tempfile.TemporaryDirectory() as base:
        os.mkdir(os.path.join(base, "work"))
        started_ms(WRITE, base)
        for name, arguments in COMMANDS.items():
            started_ms(arguments, base)
            runs = [started_ms(arguments, base) for _ in range(RUNS)]
            show(f"  {name}", sorted(clock for clock, _ in runs), "ms")
            show(f"  {name}, processor", sorted(processor for _, processor in runs), "ms")
    print()


if __name__ == "__main__":
    main()
