"""A real browser on the page: Debian's Chromium, driven by Playwright, watched for errors and foreign requests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.web.serving import Served

CHROMIUM = "/usr/bin/chromium"
AXE = Path(__file__).parents[2] / ".tools" / "web" / "node_modules" / "axe-core" / "axe.min.js"
SHOTS = Path(__file__).parents[2] / "docs" / "guides" / "timeline"
SHOWN = {
    "first-look-light",
    "timeline-light",
    "timeline-phone",
    "call-light",
    "call-dark",
    "plan-hunk-light",
    "changed-meanwhile-dark",
    "compare-light",
    "blame-light",
    "files-light",
    "forks-light",
    "storage-dark",
    "live-light",
    "call-phone",
}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "reduced_motion": "reduce"},
}


# Parts of the page that one would have to scroll sideways.
_TOO_WIDE = """
[...document.querySelectorAll(".top, .timeline, .detail, dialog[open], .plan-body")]
  .filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.className)
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        words = ["--no-sandbox", "--disable-dev-shm-usage"] if os.getuid() == 0 else ["--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=words)
        expect.set_options(timeout=120_000)  # no machine is too slow
        try:
            yield browser
        finally:
            browser.close()


class Window:
    """One open page of a server. `check` is for the end of each story."""

    def __init__(self, context: BrowserContext, server: Served, look: str, address: str) -> None:
        self.context = context
        self.server = server
        self.look = look
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.page: Page = context.new_page()
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self._console(message.type, message.text))
        self.page.goto(address)

    def _console(self, kind: str, text: str) -> None:
        # The browser reports answers that a story asks for (412), and a server that a story stops.
        expected = "Failed to load resource" in text or "ERR_" in text
        if kind == "error" and not expected:
            self.errors.append(text)

    def row(self, words: str) -> Any:
        return self.page.locator(".row").filter(has_text=words).first

    def go(self, hash_: str) -> None:
        self.page.goto(f"{self.server.base}/#{hash_}")

    def open_call(self, call: str) -> None:
        self.go(f"/call/{call}")
        self.page.locator(".call-head").wait_for()

    def button(self, name: str | re.Pattern[str]) -> Any:
        return self.page.get_by_role("button", name=name, exact=isinstance(name, str))

    def shot(self, name: str) -> None:
        """Judges what is on the screen. If the guide shows it, `make test-web` takes the picture anew."""
        self.check()
        if os.environ.get("MULLIGAN_SHOTS") and f"{name}-{self.look}" in SHOWN:
            SHOTS.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=SHOTS / f"{name}-{self.look}.png", animations="disabled")

    def check(self) -> None:
        """No error, nothing asked of another machine, nothing serious for people with disabilities, nothing cut off."""
        assert self.errors == []
        assert {urlsplit(url).hostname for url in self.asked if url.startswith("http")} <= {"127.0.0.1"}
        self.page.evaluate(AXE.read_text("utf-8"))
        found = self.page.evaluate("axe.run()")["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        told = [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in serious]
        assert not told, told
        assert self.page.evaluate(_TOO_WIDE) == []
