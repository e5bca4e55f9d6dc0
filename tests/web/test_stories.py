"""What people do with the page, in a real browser against a real server; another process does the agent's work."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

import mulligan
from tests.web.browser import LOOKS, Window, chromium
from tests.web.serving import Served, environment, serving, write_call

pytestmark = pytest.mark.web

_SHORT = bool(os.environ.get("SHORT"))
Open = Callable[..., Window]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(params=["light"] if _SHORT else list(LOOKS))
def look(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(browser: Browser, look: str) -> Iterator[Open]:
    """Opens windows; all of them share the cookie that the printed address bought."""
    context = browser.new_context(**LOOKS[look])
    context.set_default_timeout(120_000)
    windows: list[Window] = []

    def open_window(server: Served) -> Window:
        address = server.base + "/" if windows else server.page
        windows.append(Window(context, server, look, address))
        return windows[-1]

    yield open_window
    for window in windows:
        window.check()
    context.close()


@pytest.fixture
def window(opened: Open, server: Served) -> Window:
    found = opened(server)
    found.page.locator(".row").first.wait_for()
    return found


def test_first_look(opened: Open, tmp_path: Path) -> None:
    with serving(tmp_path / "home") as server:
        window = opened(server)
        page = window.page
        for agent in ("Claude Code", "Codex", "Gemini CLI", "opencode", "Zed", "Python"):
            expect(page.get_by_role("heading", name=agent, exact=True)).to_be_visible()
        lines = page.locator(".starts code").all_inner_texts()
        assert lines[:5] == [f"mulligan install {name}" for name in ("claude", "codex", "gemini", "opencode", "zed")]
        # The last line is Python, and does what it says.
        folder = tmp_path / "mine"
        folder.mkdir()
        environ = environment(tmp_path / "of-the-line")
        subprocess.run([sys.executable, "-c", f"import mulligan\n{lines[5]}"], cwd=folder, env=environ, check=True)
        assert ((folder / "a.txt").read_text(), len(lines)) == ("hello", 6)
        window.shot("first-look")
        window.check()
        window.button("Try the demo").click()
        expect(window.row("rm -f NOTES.md")).to_be_visible()
        expect(window.row("failed, rolled back")).to_be_visible()
        expect(page.get_by_text("“Tidy up the folder”")).to_be_visible()
        window.shot("timeline")


def test_what_did_it_just_do(window: Window, server: Served, root: Path, calls: dict[str, str]) -> None:
    page = window.page
    for words in ("failed, rolled back", "echo cleaned >> notes.txt", "external edit", "src/app.py"):
        expect(window.row(words)).to_be_visible()
    expect(page.get_by_text("“Number the important lines”")).to_be_visible()
    window.open_call(calls["edit"])
    page.locator(".diff").first.wait_for()
    window.shot("call")
    detail = page.locator(".detail")
    detail.evaluate("one => { one.scrollTop = 60 }")
    diff = page.locator(".diff").first.element_handle()
    made = write_call(server.home, root, "fresh.txt", "fresh\n", turn="t9")
    page.locator(f'.row[data-call="{made}"]').wait_for(state="attached")
    assert diff is not None and diff.evaluate("one => one.isConnected")
    assert detail.evaluate("one => one.scrollTop") == 60
    expect(page.locator(".row.selected")).to_have_attribute("data-call", calls["edit"])
    expect(page.locator("[aria-live=polite].hidden")).to_contain_text("New")


def test_what_was_not_captured_is_said(window: Window, server: Served, root: Path) -> None:
    with mulligan.open(root, store=server.home) as opened, opened.session("work").call("exec") as call:
        call.exec(["sh", "-c", "mkfifo pipe; echo cleaner >> notes.txt"])
    expect(window.row("mkfifo pipe").locator(".badge")).to_have_text("1 gap")
    window.open_call(call.id)
    window.page.get_by_text("1 gap in what was captured").click()
    expect(window.page.locator(".gaps li")).to_have_text(["pipe it is a device, FIFO or socket"])


def test_the_place_in_a_long_list_does_not_move(
    window: Window, server: Served, root: Path, calls: dict[str, str]
) -> None:
    with mulligan.open(root, store=server.home) as opened:
        session = opened.session("long")
        for number in range(220):
            with session.call(f"step {number}") as call:
                call.write_file("counter.txt", f"{number}\n")
    page, rows = window.page, window.page.locator("m-timeline")
    page.reload()
    page.locator(".row").first.wait_for()
    if window.look == "phone":
        expect(page.locator(".row")).not_to_have_count(220)
    rows.evaluate("one => { one.scrollTop = 2000 }")
    window.row("Step 182").wait_for()
    before = window.row("Step 182").bounding_box()
    made = write_call(server.home, root, "fresh.txt", "fresh\n")
    expect(window.button(re.compile("1 new call"))).to_be_visible()
    assert window.row("Step 182").bounding_box() == before
    assert page.locator(".row").count() < 60
    window.button(re.compile("1 new call")).click()
    expect(page.locator(f'.row[data-call="{made}"]')).to_be_visible()
    # The newest 200 calls can be chosen from a list; the address may name an older one.
    window.go(f"/compare?from={calls['edit']}&to={calls['edit']}")
    expect(page.get_by_label("From")).to_have_value(calls["edit"])
    expect(page.locator(".diff h4")).to_have_text(["notes.txt"])


def test_an_agent_in_a_new_folder_is_seen_by_a_page_that_is_open(window: Window, server: Served, root: Path) -> None:
    page, other = window.page, root.with_name("other")
    other.mkdir()
    expect(page.get_by_label("Folder")).to_be_hidden()
    write_call(server.home, other, "first.txt", "x\n", session="elsewhere")
    expect(page.get_by_label("Folder").locator("option")).to_have_text(["other", "project"])
    expect(page.get_by_label("Folder")).to_have_value(server.get("/calls", session="work")["calls"][0]["root_id"])
    # More work there asks the server for no more than its calls.
    asked = len(window.asked)
    made = write_call(server.home, other, "second.txt", "x\n", session="elsewhere")
    page.get_by_label("Folder").select_option("other")
    expect(page.locator(f'.row[data-call="{made}"]')).to_be_visible()
    write_call(server.home, root, "third.txt", "x\n", session="work")
    assert not any("/sessions" in url for url in window.asked[asked:] if "root=" not in url)


def test_the_focus_stays_on_its_row(window: Window, server: Served, root: Path, calls: dict[str, str]) -> None:
    page = window.page
    focused = "document.activeElement.closest('.row')?.dataset.call"
    while page.evaluate(focused) != calls["exec"]:
        page.keyboard.press("j")
    made = write_call(server.home, root, "fresh.txt", "fresh\n")
    page.locator(f'.row[data-call="{made}"]').wait_for(state="attached")
    assert page.evaluate(focused) == calls["exec"]
    # Its row is drawn anew when another process undoes the call.
    server.post(f"/calls/{calls['exec']}/undo")
    expect(window.row("echo cleaned")).to_contain_text("undone")
    assert page.evaluate(focused) == calls["exec"]


def test_calls_of_two_agents_at_once_stay_below_their_prompts(window: Window, server: Served, root: Path) -> None:
    with mulligan.open(root, store=server.home) as opened:
        for number in range(2):
            for name in ("one", "two"):
                session = opened.session(name)
                with session.turn(f"Prompt of {name}", id=f"turn of {name}"), session.call(f"{name} {number}") as call:
                    call.write_file(f"{name}.txt", f"{number}\n")
    for words in ("One 0", "Two 0", "One 1", "Two 1"):
        window.row(words).wait_for()
    items = window.page.locator(".row, .group").all()
    boxes = [(one.bounding_box(), one.inner_text()) for one in items]
    shown = sorted((box["y"], text) for box, text in boxes if box is not None)
    expected = ["Prompt of two", "Two 1", "Prompt of one", "One 1", "Prompt of two", "Two 0", "Prompt of one", "One 0"]
    assert [words in text for words, (_, text) in zip(expected, shown, strict=False)] == [True] * 8


@pytest.mark.parametrize("part", ["call", "file", "hunk"])
def test_undo_exactly_this(opened: Open, server: Served, root: Path, calls: dict[str, str], part: str) -> None:
    window, other = opened(server), opened(server)
    before = (root / "notes.txt").read_text()
    window.open_call(calls["edit"])
    other.open_call(calls["edit"])
    names = {"call": "Undo …", "file": "Undo file … notes.txt", "hunk": "Undo hunk … 1 of notes.txt"}
    window.button(names[part]).click()
    dialog = window.page.get_by_role("dialog")
    expect(dialog.get_by_text("merged", exact=True)).to_be_visible()
    expect(dialog.locator("tr.added").first).to_contain_text("line 3")
    window.shot(f"plan-{part}")
    window.check()
    dialog.get_by_role("button", name="Undo 1 path").click()
    expect(window.page.get_by_text("Undo: 1 path changed.")).to_be_visible()
    after = before.replace("line three", "line 3")
    after = after if part == "hunk" else after.replace("line thirty", "line 30")
    assert (root / "notes.txt").read_text() == after
    assert "line 15, by hand" in after
    other.page.locator('.row:has-text("Undo")').first.wait_for(state="attached")
    if part == "call":
        expect(other.page.locator(".call-head .badge").first).to_have_text("undone")
        expect(other.button("Undo file … notes.txt")).to_be_hidden()
    window.page.get_by_role("link", name="See what was replaced").click()
    expect(window.page.locator("tr.removed").first).to_contain_text("line three")
    window.page.locator(".toast").get_by_role("button", name="Redo …").click()
    dialog.get_by_role("button", name="Redo 1 path").click()
    expect(window.page.get_by_text("Redo: 1 path changed.")).to_be_visible()
    assert (root / "notes.txt").read_text() == before


def test_it_changed_meanwhile(window: Window, root: Path, calls: dict[str, str]) -> None:
    window.open_call(calls["edit"])
    window.button("Undo …").click()
    dialog = window.page.get_by_role("dialog")
    apply = dialog.get_by_role("button", name="Undo 1 path")
    expect(apply).to_be_visible()
    edited = (root / "notes.txt").read_text().replace("line three", "line of mine")
    (root / "notes.txt").write_text(edited)
    apply.click()
    expect(dialog.get_by_text("The files changed meanwhile.")).to_be_visible()
    expect(dialog.get_by_text("the same lines were edited since")).to_be_visible()
    expect(dialog.get_by_text("Overwriting would do this:")).to_be_visible()
    expect(dialog.locator("tr.removed").first).to_contain_text("line of mine")
    expect(dialog.get_by_role("button", name="Nothing to undo")).to_be_disabled()
    assert (root / "notes.txt").read_text() == edited
    window.shot("changed-meanwhile")
    window.check()
    dialog.get_by_role("combobox").select_option("overwrite")
    dialog.get_by_role("button", name="Undo 1 path").click()
    expect(window.page.get_by_text("Undo: 1 path changed.")).to_be_visible()
    assert "line 3\n" in (root / "notes.txt").read_text()
    window.page.get_by_role("link", name="See what was replaced").click()
    expect(window.page.locator("tr.removed").filter(has_text="line of mine")).to_be_visible()


def test_compare(window: Window, calls: dict[str, str]) -> None:
    page = window.page
    window.go(f"/compare?from={calls['edit']}")
    expect(page.locator(".diff")).to_have_count(2)
    expect(page.locator(".word").filter(has_text="three")).to_be_visible()
    window.shot("compare")
    window.button("Side by side").click()
    expect(page.locator("table.sides").first).to_be_visible()
    expect(page.locator("td.removed .word").first).to_have_text("3")
    window.check()
    page.get_by_label("To", exact=True).select_option(calls["edit"])
    expect(page.locator(".diff")).to_have_count(1)


def test_compare_many_files(window: Window, server: Served, root: Path) -> None:
    with mulligan.open(root, store=server.home) as opened, opened.session("work").call("many") as call:
        for number in range(60):
            call.write_file(f"many{number:02}.txt", "x\n")
    window.go(f"/compare?from={call.id}&to={call.id}")
    expect(window.page.locator(".diff h4")).to_have_text([f"many{number:02}.txt" for number in range(50)])
    window.button("Show more of 60 paths").click()
    expect(window.page.locator(".diff h4")).to_have_text([f"many{number:02}.txt" for number in range(60)])


def test_compare_two_forks(window: Window, server: Served) -> None:
    made = server.post("/sessions/work/fork", {"files": "copy"}, status=201)
    write_call(server.home, Path(made["directory"]), "idea.txt", "an idea\n")
    window.go("/forks")
    window.page.locator(".session").get_by_role("link", name="Compare").click()
    expect(window.page.locator(".diff h4")).to_have_text(["idea.txt"])


def test_why_is_this_line_here(window: Window, calls: dict[str, str]) -> None:
    page = window.page
    window.open_call(calls["edit"])
    page.get_by_role("link", name="Why is this here?").click()
    link = page.locator("tr#L3 a.origin")
    expect(link).to_contain_text("Number the important lines")
    expect(page.locator("tr#L1")).to_contain_text("before the record")
    expect(page.locator("tr#L15")).to_contain_text("edited outside")
    window.shot("blame")
    link.click()
    expect(page).to_have_url(re.compile(calls["edit"]))
    expect(page.locator(".call-head blockquote")).to_have_text("Number the important lines")


def test_go_to_a_point(window: Window, server: Served, root: Path, calls: dict[str, str]) -> None:
    page = window.page
    with mulligan.open(root, store=server.home) as opened:
        opened.session("work").inject({"role": "user", "content": "said after all that"})
    window.open_call(calls["write"])
    page.get_by_role("link", name="Files at this point").click()
    expect(page.locator(".tree li")).to_have_count(1)
    expect(page.get_by_text("Nothing was said.")).to_be_visible()
    page.get_by_role("link", name="See it after").click()
    expect(page.locator(".tree li")).to_have_count(2)
    window.shot("files")
    page.get_by_role("link", name="notes.txt").click()
    expect(page.locator("tr#L3")).to_contain_text("line three")
    expect(page.locator("tr#L15")).not_to_contain_text("by hand")
    window.check()
    window.button("Rewind to here …").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name=re.compile("^Rewind")).click()
    expect(page.get_by_text(re.compile("^Rewind: 1 path changed"))).to_be_visible()
    assert "cleaned" not in (root / "notes.txt").read_text()
    assert "line 15, by hand" in (root / "notes.txt").read_text()
    window.go(f"/files?at={calls['edit']}&path=notes.txt")
    expect(page.locator(".point")).to_contain_text("As it was before Edit notes.txt")
    window.button("Restore this file …").click()
    dialog.get_by_role("button", name="Restore 1 path").click()
    expect(page.get_by_text("Restore: 1 path changed.")).to_be_visible()
    assert "line 3\n" in (root / "notes.txt").read_text()


def test_forks(window: Window, server: Served, root: Path, calls: dict[str, str]) -> None:
    page = window.page
    window.open_call(calls["exec"])
    window.button("Fork here …").click()
    expect(page.get_by_role("dialog")).to_contain_text("with 0 messages")
    expect(page.get_by_role("dialog").locator(".paths li")).to_have_text(["notes.txt"])
    window.check()
    window.button("Copy the files").click()
    expect(page.locator(".sessions ul .session")).to_have_count(1)
    fork = next(one for one in server.get("/sessions")["sessions"] if one["parent_id"] == "work")
    copy = Path(fork["directory"])
    expect(page.locator(".sessions ul .session a.name")).to_have_text("Fork of Number the important lines")
    assert "cleaned" not in (copy / "notes.txt").read_text()
    write_call(server.home, copy, "idea.txt", "an idea\n", session=fork["id"])
    window.shot("forks")
    page.get_by_role("button", name=re.compile("^Merge")).click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text("idea.txt").first).to_be_visible()
    dialog.get_by_role("button", name=re.compile("^Merge ")).click()
    expect(page.get_by_text(re.compile("^Merge: "))).to_be_visible()
    assert (root / "idea.txt").read_text() == "an idea\n"
    expect(page.locator(".sessions ul .session .badge").first).to_have_text("merged")


def test_dropping_a_fork_names_the_folder_first(window: Window, server: Served) -> None:
    made = server.post("/sessions/work/fork", {"files": "copy"}, status=201)
    window.go("/forks")
    window.page.get_by_role("button", name=re.compile("^Drop")).click()
    expect(window.page.get_by_role("dialog")).to_contain_text(made["directory"])
    window.check()
    window.button("Delete its files").click()
    expect(window.page.locator(".sessions ul .session .badge").first).to_have_text("dropped")
    assert not Path(made["directory"]).exists()


def test_search_and_storage(window: Window, server: Served, root: Path) -> None:
    page = window.page
    page.keyboard.press("/")
    page.keyboard.type("important")
    page.keyboard.press("Enter")
    expect(page.locator(".results li").first).to_contain_text("Number the important lines")
    window.shot("search")
    page.locator(".results a").first.click()
    page.locator(".call-head").wait_for()
    window.go("/storage")
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.get_by_label("Cap in GiB").fill("0.0001")
    window.button("What would that drop?").click()
    expect(page.get_by_text(re.compile("would drop the bytes of 3 calls"))).to_be_visible()
    expect(page.locator(".evicted a")).to_have_text(["Edit notes.txt", "Write src/app.py", "echo cleaned >> notes.txt"])
    with mulligan.open(root, store=server.home) as opened, opened.open_root.ledger.store.write():
        # The collection waits for the writer; the page says how far it is.
        window.button("Collect now").click()
        expect(page.get_by_role("progressbar", name="Collecting garbage")).to_be_visible()
    expect(page.get_by_text("Everything that is stored is needed.")).to_be_visible()
    window.shot("storage")


def test_live_session(opened: Open, server: Served, root: Path) -> None:
    window, other = opened(server), opened(server)
    page = window.page
    window.go("/session/work")
    other.go("/session/work")
    window.button("Take over").click()
    expect(page.locator(".clients li")).to_contain_text("this page")
    # Both windows are one browser; each is a client of its own.
    expect(other.page.locator(".clients .badge")).to_have_text("controller")
    page.get_by_label("Prompt").fill("Please go on")
    window.button("Send").click()
    expect(page.locator(".messages")).to_contain_text("Please go on")
    expect(other.page.locator(".messages")).to_contain_text("Please go on")
    with mulligan.open(root, store=server.home) as working:
        said = [one["content"] for one in working.session("work").messages()]
    assert said == ["Please go on"]
    window.shot("live")
    other.button("Take over").click()
    expect(page.get_by_label("Prompt")).to_have_count(0)


HOSTILE = "<img src=x onerror=alert(1)>\u202egnp.exe\x1b[31m"


def test_hostile_names_and_contents_stay_text(window: Window, server: Served, root: Path) -> None:
    page = window.page
    asked: list[str] = []
    page.on("dialog", lambda dialog: asked.append(dialog.message))
    with mulligan.open(root, store=server.home) as opened:
        session = opened.session("<script>alert(1)</script>")
        with session.turn(f"javascript:alert(1) {HOSTILE}"), session.call(HOSTILE) as call:
            call.write_file(f"{HOSTILE[:32]}.html", f"<script>alert(1)</script>\n{HOSTILE}\n")
    window.open_call(call.id)
    page.locator(".diff").wait_for()
    expect(page.locator(".diff")).to_contain_text("<script>alert(1)</script>")
    expect(page.locator(".call-head blockquote")).to_contain_text("\\u202egnp.exe\\u001b[31m")
    assert page.locator("m-app img, m-app script").count() == 0
    heard = page.evaluate(
        "[...document.querySelectorAll('[title], [aria-label]')].map(one => one.title + one.ariaLabel)"
    )
    assert any("\\u202e" in one for one in heard) and not any(sign in one for one in heard for sign in "\u202e\x1b")
    assert page.locator('a[href^="javascript"]').count() == 0
    assert asked == []


def test_large_and_binary_files_and_many_paths(window: Window, server: Served, root: Path) -> None:
    page = window.page
    (root / "large.txt").write_text("x" * 79 + "\n")
    with mulligan.open(root, store=server.home) as opened:
        with opened.session("work").call("large") as large:
            large.write_file("large.txt", ("y" * 79 + "\n") * 262_144)
            large.write_file("picture.bin", b"\0\1\2")
        with opened.session("work").call("many") as many:
            many.exec(["sh", "-c", "mkdir -p d; for n in $(seq 5000); do echo $n > d/$n; done"])
    window.open_call(large.id)
    expect(page.get_by_text("Too large to show here. 20.0 MiB.")).to_be_visible()
    expect(page.get_by_text("Not text; it differs.")).to_be_visible()
    window.open_call(many.id)
    expect(page.get_by_text("5,001 changed paths")).to_be_visible()
    window.button(re.compile("Show more of 5,001 paths")).click()
    expect(page.locator(".diff")).to_have_count(40)


def test_a_call_whose_bytes_were_dropped_says_so(window: Window, server: Served, root: Path) -> None:
    page, made = window.page, list[str]()
    with mulligan.open(root, store=server.home) as opened:
        for _ in range(4):
            with opened.session("work").call("large") as call:
                call.write_file("large.txt", os.urandom(500_000).hex())
            made.append(call.id)
    window.go("/storage")
    page.get_by_label("Cap in GiB").fill("0.001")
    window.button("Set the cap").click()
    expect(page.locator(".big")).to_contain_text("of 1.0 MiB")
    window.open_call(made[1])
    expect(page.locator(".call-head .badge").first).to_have_text("done, bytes dropped")


def test_a_lost_connection_is_said_and_heals_itself(window: Window, server: Served, root: Path) -> None:
    page = window.page
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    expect(page.locator(".live")).to_contain_text("connection lost")
    expect(window.row("echo cleaned")).to_be_visible()
    made = write_call(server.home, root, "while-away.txt", "x\n")
    with serving(server.home, port=server.port):
        expect(page.locator(".live")).to_have_text("live")
        expect(page.locator(f'.row[data-call="{made}"]')).to_be_visible()


def test_a_server_killed_during_an_undo_leaves_the_call_whole_or_without_trace(
    window: Window, server: Served, root: Path
) -> None:
    """The page resumes with the next server and shows which."""
    page, files = window.page, [root / f"many{number}" for number in range(60)]
    for file in files:
        file.write_text("before\n")
    with mulligan.open(root, store=server.home) as opened, opened.session("work").call("many") as call:
        for file in files:
            call.write_file(file.name, "after\n")
    window.open_call(call.id)
    window.button("Undo …").click()
    page.get_by_role("dialog").get_by_role("button", name="Undo 60 paths").click()
    while all(file.read_bytes() == b"after\n" for file in files):
        pass
    server.process.kill()
    server.process.wait()
    expect(page.locator(".live")).to_contain_text("connection lost")
    with serving(server.home, port=server.port) as again:
        expect(page.locator(".live")).to_have_text("live")
        is_undone = again.get(f"/calls/{call.id}")["status"] == "undone"
        assert {file.read_text() for file in files} == {"before\n" if is_undone else "after\n"}
        expect(page.locator(".call-head .badge").first).to_have_text("undone" if is_undone else "done")


def test_an_expired_token_leaves_what_is_on_screen(window: Window, server: Served, root: Path) -> None:
    told = json.loads(run_tokens(server))
    with mulligan.open(root, store=server.home) as opened:
        for one in told:
            opened.tokens.expire_named(one["handle"])
    window.go("/storage")
    expect(window.page.locator(".live")).to_contain_text("signed out")
    window.go("/")
    expect(window.row("echo cleaned")).to_be_attached()


def run_tokens(server: Served) -> str:
    command = [sys.executable, "-m", "mulligan", "token", "list", "--json"]
    return subprocess.run(command, env=environment(server.home), check=True, capture_output=True, text=True).stdout


@pytest.mark.req("D14.http.timeline")
def test_everything_works_by_keyboard(window: Window, root: Path, calls: dict[str, str]) -> None:
    page = window.page
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("next and previous call")
    window.check()
    page.keyboard.press("Escape")
    for _ in range(9):
        page.keyboard.press("j")
    page.keyboard.press("k")
    focused = page.evaluate("document.activeElement.closest('.row').dataset.call")
    assert focused == calls["write"]
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(calls["write"]))
    expect(page.locator(".diff h4")).to_have_text(["src/app.py", "src"])
    page.keyboard.press("u")
    expect(page.get_by_role("dialog").get_by_role("button", name=re.compile("^Undo "))).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_text(re.compile("^Undo: 2 paths changed"))).to_be_visible()
    assert not (root / "src").exists()
    page.keyboard.press("r")
    expect(page.get_by_role("dialog").get_by_role("button", name=re.compile("^Redo "))).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_text(re.compile("^Redo: 2 paths changed"))).to_be_visible()
    assert (root / "src" / "app.py").exists()
    page.keyboard.press("Escape")
    expect(page).to_have_url(re.compile("#/$"))


class Editor:
    """An ACP client that never answers a permission request itself."""

    def __init__(self, home: Path, root: Path) -> None:
        agent = [sys.executable, str(Path(__file__).with_name("asking_agent.py"))]
        command = [sys.executable, "-m", "mulligan", "acp", "--", *agent]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment(home), stdin=pipe, stdout=pipe, text=True, cwd=root)

    def say(self, **frame: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **frame}) + "\n")
        self.process.stdin.flush()

    def hear(self, number: int) -> dict[str, object]:
        """The answer to a request, or the request of the agent, with that id."""
        assert self.process.stdout is not None
        while True:
            frame: dict[str, object] = json.loads(self.process.stdout.readline())
            if frame.get("id") == number:
                return frame


def test_an_agent_gets_the_answer_that_the_page_gives(window: Window, server: Served, root: Path) -> None:
    editor = Editor(server.home, root)
    with editor.process:
        editor.say(id=1, method="initialize", params={"protocolVersion": 1, "clientCapabilities": {}})
        editor.hear(1)
        editor.say(id=2, method="session/new", params={"cwd": str(root), "mcpServers": []})
        editor.hear(2)
        text = {"type": "text", "text": "write it"}
        editor.say(id=3, method="session/prompt", params={"sessionId": "asking", "prompt": [text]})
        assert editor.hear(99)["method"] == "session/request_permission"
        window.go("/session/asking")
        expect(window.page.get_by_role("heading", name="Write answer.txt")).to_be_visible()
        expect(window.button("Allow")).to_be_disabled()
        window.check()
        window.button("Take over").click()
        window.button("Allow").click()
        assert editor.hear(3)["result"] == {"stopReason": "end_turn"}
        assert (root / "answer.txt").read_text() == "yes"
        expect(window.page.get_by_role("heading", name="Write answer.txt")).to_have_count(0)
        # The editor's own answer comes too late; the agent does not get a second one.
        editor.say(id=99, result={"outcome": {"outcome": "selected", "optionId": "no"}})
        assert editor.process.stdin is not None
        editor.process.stdin.close()
    assert (root / "answer.txt").read_text() == "yes"
