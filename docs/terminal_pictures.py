"""Makes the pictures of the command line in `docs/guides/terminal` from what tmux shows.

`python docs/terminal_pictures.py`; it needs `tmux`. Each picture is an SVG file of a real terminal: 80 or 120
columns, on a light or a dark ground.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PICTURES = Path(__file__).parent / "guides" / "terminal"
_ROWS = 24
_CELL_WIDTH, _CELL_HEIGHT, _MARGIN = 8.4, 18, 12
_COLOURS = {"31": "#cf222e", "32": "#1a7f37", "33": "#9a6700", "35": "#8250df", "36": "#1b7c83"}
_ON_DARK = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "35": "#d2a8ff", "36": "#76e3ea"}
_SEQUENCE = re.compile(r"\x1b\[([0-9;]*)m")

_WORK = r"""
export PS1='$ ' MULLIGAN_BACKGROUND=off
mulligan call write_file --turn t1 \
  --args '{"path":"cart.py","content":"def total(items):\n    return sum(items)\n"}' >/dev/null
mulligan exec -- sh -c 'mkdir build; echo x > build/cart.js; echo 日本語 > 説明.txt' >/dev/null
mulligan call edit_file --args '{"path":"cart.py","old_string":"sum(items)","new_string":"sum(items) * 2"}' >/dev/null
mulligan exec -- sh -c 'rm -rf build; git push origin main' >/dev/null 2>&1
echo '# by a person' >> cart.py
mulligan call edit_file --args '{"path":"cart.py","old_string":"* 2","new_string":"* 3"}' >/dev/null
clear; echo ready
"""


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, columns, dark, typed in (
        ("log-light-80", 80, False, "mulligan log; mulligan status"),
        ("plan-dark-120", 120, True, "mulligan diff --stat; mulligan undo"),
        ("show-dark-80", 80, True, "mulligan show; mulligan unod"),
    ):
        lines = _shown(typed, columns)
        (PICTURES / f"{name}.svg").write_text(_picture(lines, columns, dark=dark), "utf-8")


def _shown(typed: str, columns: int) -> list[str]:
    """What a terminal shows after the user has typed a line, with its colours."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        work, socket = Path(base) / "shop", str(Path(base) / "tmux")
        work.mkdir()
        setup = Path(base) / "setup.sh"
        setup.write_text(_WORK)
        environ = {**os.environ, "MULLIGAN_HOME": f"{base}/home", "HOME": base, "LANG": "C.UTF-8", "PAGER": "cat"}
        environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"

        def tmux(*words: str) -> str:
            command = ["tmux", "-S", socket, "-f", "/dev/null", *words]
            return subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, check=True).stdout

        tmux("-u", "new-session", "-d", "-x", str(columns), "-y", str(_ROWS), f"bash --init-file {setup}")
        try:
            _wait(tmux, "ready\n$ ")
            tmux("send-keys", f"clear; {typed}", "Enter")
            shown = _wait(tmux, "$ ", "]: ", without="ready").splitlines()
            # The temporary folder has another name each time.
            return [line.replace(base, "/home/ann") for line in shown if line]
        finally:
            tmux("kill-server")


def _wait(tmux: object, *ends: str, without: str = "\0") -> str:
    """The screen, as soon as it ends with a prompt and has not changed for a while."""
    assert callable(tmux), "it is the function above"
    before = ""
    for _ in range(600):
        time.sleep(0.5)
        shown = str(tmux("capture-pane", "-p", "-e"))
        plain = _SEQUENCE.sub("", shown).rstrip("\n")
        if plain and without not in plain and any(plain.endswith(end.rstrip()) for end in ends) and shown == before:
            return shown.rstrip()
        before = shown
    raise TimeoutError(before)


def _picture(lines: list[str], columns: int, *, dark: bool) -> str:
    ground, ink, colours = ("#0d1117", "#e6edf3", _ON_DARK) if dark else ("#ffffff", "#1f2328", _COLOURS)
    width, height = columns * _CELL_WIDTH + 2 * _MARGIN, len(lines) * _CELL_HEIGHT + 2 * _MARGIN
    rows = [
        f'<text x="{_MARGIN}" y="{_MARGIN + _CELL_HEIGHT * (number + 0.75)}" xml:space="preserve">'
        f"{_spans(line, colours)}</text>"
        for number, line in enumerate(lines)
    ]
    font = 'font-family="DejaVu Sans Mono, Noto Sans Mono CJK JP, monospace" font-size="14"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" {font} fill="{ink}">'
    return "\n".join([head, f'<rect width="100%" height="100%" rx="6" fill="{ground}"/>', *rows, "</svg>\n"])


def _spans(line: str, colours: dict[str, str]) -> str:
    """The line in pieces of one look each."""
    pieces: list[str] = []
    look: dict[str, str] = {}
    for number, part in enumerate(_SEQUENCE.split(line)):
        if number % 2:
            for code in part.split(";"):
                look = {} if code in ("", "0", "39") else look | _look(code, colours)
        elif part:
            styles = "".join(f' {name}="{value}"' for name, value in look.items())
            pieces.append(f"<tspan{styles}>{html.escape(part)}</tspan>")
    return "".join(pieces)


def _look(code: str, colours: dict[str, str]) -> dict[str, str]:
    if code in colours:
        return {"fill": colours[code]}
    return {"1": {"font-weight": "bold"}, "2": {"opacity": "0.6"}}.get(code, {})


if __name__ == "__main__":
    main()
