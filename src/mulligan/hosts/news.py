"""What the model learns at its next prompt: which of its calls were undone or redone, and which files others edited.

The history is the source, so it does not matter where the person undid: in the host, in a terminal or on the web page.
A small file for each session says up to which change of the workspace the model has been told.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256

from mulligan.history.cause import UndoOperation
from mulligan.history.ledger import newest_wseq
from mulligan.history.log import calls_of, workspace_of
from mulligan.history.multi_root import main_of
from mulligan.history.observe import REVERTED
from mulligan.history.open_root import OpenRoot
from mulligan.history.outcome_text import call_title
from mulligan.history.tables import CALLS, CHANGES, TAKEN_IN_PART, CallRow
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.errors import MulliganError
from mulligan.values.ids import SessionId
from mulligan.values.text import visible

NEWS_MAX_BYTES = 2_048
_HEAD = "Mulligan: these files are not as you left them; read them again before you change them."
_MORE = "There is more: `mulligan log` lists it."
_CALLS_MAX = 8
_PATHS_MAX = 12
_OVERLAP = 50
"""If this many successive calls ended before the last news, all earlier ones did too."""


class News:
    """The news of the sessions of one root. `folder` remembers what each session's model has been told."""

    def __init__(self, open_root: OpenRoot, folder: str) -> None:
        self._open_root = open_root
        self._folder = folder

    def tell(self, session: SessionId) -> str | None:
        """What the model of this session has not been told yet, at most 2 KB; it counts as told from now on.

        None if there is nothing. A session's first prompt has no news.
        """
        with self._open_root.ledger.store.read() as tx:
            workspace = workspace_of(tx, self._open_root)
            newest, told = newest_wseq(tx, workspace), self._told(session, workspace)
            if told == newest:
                return None
            lines = [] if told is None else _lines(tx, self._open_root, session, told)
        # Remembered before the answer: the model must not be told twice, whatever happens to this process.
        self._remember(session, workspace, newest)
        return _within_limit(lines) if lines else None

    def _path(self, session: SessionId) -> str:
        return os.path.join(self._folder, sha256(session.encode()).hexdigest()[:32])

    def _told(self, session: SessionId, workspace: str) -> int | None:
        try:
            with open(self._path(session), "rb") as file:
                body = decode(file.read())
        except (OSError, MulliganError):
            return None
        if not isinstance(body, dict) or body.get("workspace") != workspace or type(body.get("wseq")) is not int:
            return None
        return int(body["wseq"])

    def _remember(self, session: SessionId, workspace: str, wseq: int) -> None:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=self._folder)
        try:
            with open(handle, "wb") as file:
                file.write(encode({"workspace": workspace, "wseq": wseq}))
            os.replace(draft, self._path(session))
        except OSError:
            with suppress(OSError):
                os.unlink(draft)
            raise


def _lines(tx: Tx, open_root: OpenRoot, session: SessionId, told: int) -> list[str]:
    """Names each call of the session that was undone or redone, and each file, once."""
    calls: dict[str, CallRow] = {}
    touched: dict[str, None] = {}
    edited: dict[str, None] = {}
    reverted: dict[str, None] = {}
    for row in reversed(list(_since(tx, open_root, told))):
        if row.external:
            (reverted if row.reason else edited).update(dict.fromkeys(_paths(tx, row)))
        elif isinstance(row.why, UndoOperation):
            own = [one for one in undone_calls(tx, row) if one.session == session]
            calls |= {one.id: one for one in own}
            touched |= dict.fromkeys(_paths(tx, row) if own else ())
    lines = [f"- {state}: {_listed(names, _CALLS_MAX)}" for state, names in _by_state(tx, calls.values()).items()]
    if touched:
        lines.append(f"- files that changed through that: {_listed(list(touched), _PATHS_MAX)}")
    if reverted:
        lines.append(f"- {REVERTED}: {_listed(list(reverted), _PATHS_MAX)}")
    others = [path for path in edited if path not in touched and path not in reverted]
    if others:
        lines.append(f"- edited by the person or another program: {_listed(others, _PATHS_MAX)}")
    return lines


def _since(tx: Tx, open_root: OpenRoot, told: int) -> Iterator[CallRow]:
    """The calls and outside edits whose changes came after those told, newest first."""
    before = 0
    for row in calls_of(tx, open_root, None):
        if row.wseq is None:
            continue
        if row.wseq > told:
            yield row
        before = before + 1 if row.wseq <= told else 0
        if before >= _OVERLAP:
            return


def undone_calls(tx: Tx, operation: CallRow) -> list[CallRow]:
    """The agent's calls that an undo operation concerns. An operation that reverses another one concerns its calls."""
    found: dict[str, CallRow] = {}
    waiting, seen = [operation], {operation.id}
    while waiting:
        cause = waiting.pop().why
        for call in (*cause.of, *cause.part) if isinstance(cause, UndoOperation) else ():
            row = tx.get(CALLS, call)
            # What a process did that a call had left running is the doing of that call.
            row = None if row is None else tx.get(CALLS, main_of(row)) or row
            if row is None or row.id in seen:
                continue
            seen.add(row.id)
            if isinstance(row.why, UndoOperation):
                waiting.append(row)
            else:
                found[row.id] = row
    return [found[call] for call in sorted(found)]


def _by_state(tx: Tx, calls: Iterable[CallRow]) -> dict[str, list[str]]:
    """The titles of calls by what the calls are now: a redo may have followed the undo."""
    found: dict[str, list[str]] = {}
    for row in calls:
        in_part = tx.select(TAKEN_IN_PART, {"call": row.id}, limit=1)
        state = "undone" if row.undone_by is not None else "undone in part" if in_part else "done again"
        found.setdefault(state, []).append(call_title(row, label=True))
    return found


def _listed(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _paths(tx: Tx, row: CallRow) -> list[str]:
    paths = [os.fsdecode(change.path) for change in tx.select(CHANGES, {"call": row.id})]
    return [visible(path) for path in paths if ".git" not in path.split("/")]


def _within_limit(lines: Sequence[str]) -> str:
    text = "\n".join([_HEAD, *lines])
    if len(text.encode()) <= NEWS_MAX_BYTES:
        return text
    kept = text.encode()[: NEWS_MAX_BYTES - len(_MORE) - 5].decode("utf-8", "ignore")
    return f"{kept}…\n{_MORE}"
