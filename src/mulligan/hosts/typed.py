"""Commands that a person types into an agent's prompt: Mulligan answers them, and the host asks no model.

A host passes each prompt to Mulligan's hook. `SPELLINGS` says which prompts of each host are commands; any other prompt
is for the model. A command works in the agent's session only. An undo operation is applied at once if it leaves no
conflict and changes few paths; otherwise the answer is the plan, with the line that applies it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from mulligan.history.log import as_it_happened, calls_of, diff_view, find_call, log_view, newest_to_undo
from mulligan.history.open_root import OpenRoot
from mulligan.history.outcome_text import ago, call_title, changes_words, counted, outcome_lines, short
from mulligan.history.plan import RestorePlan
from mulligan.history.tables import CALLS, CHANGES, OPEN, REDO, TURNS, CallRow, TurnRow
from mulligan.history.undo import UndoOptions, UndoResult, redo, restore, rewind, rollback, undo
from mulligan.hosts.news import undone_calls
from mulligan.store.protocol import Tx
from mulligan.values.errors import MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath
from mulligan.values.text import visible

VERBS = ("undo", "redo", "rollback", "rewind", "restore", "status", "log", "diff")
DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "undo": "Undo the agent's last change (Mulligan)",
        "redo": "Redo what was undone last (Mulligan)",
        "mulligan": "Mulligan: undo, redo, rollback, rewind, restore, status, log, diff",
    }
)
"""The commands of a host, each with the line that its menu shows."""
PATHS_MAX = 50
"""An undo operation that changes more paths shows its plan first."""
NO_ANSWER = "Mulligan did not answer. Tell the person. Do nothing."
"""What the model reads if the hook of a typed command fails: hosts then send the command to the model."""

_LINES_MAX = 40
_DIFF_LINES_MAX = 200
_LOG_MAX = 20
_PROMPTS_MAX = 10
_PROMPT_SHOWN = 60
_UNDOING = frozenset({"undo", "redo", "rollback", "rewind", "restore"})


@fast_dataclass(slots=True, frozen=True)
class Spelling:
    """How a person writes commands in one host.

    `lead` matches the text before any verb; `bare` matches a whole prompt that is a verb with its arguments. `short`
    lists the verbs that have a short form, and `long` begins every other command that Mulligan prints. `conversation`
    says how the person rewinds the conversation, if the host can do that.
    """

    lead: str
    bare: str
    short: Mapping[str, str]
    long: str
    conversation: str | None = None

    def line(self, verb: str, *words: str) -> str:
        """The command as the person types it."""
        return " ".join([self.short.get(verb, f"{self.long}{verb}"), *words])


_CALL_ID = r"[0-9a-f]{4,}"

SPELLINGS: Mapping[str, Spelling] = MappingProxyType(
    {
        "claude": Spelling(
            # Commands of a plugin have its name before theirs.
            lead=r"/mulligan(?::mulligan)?(?:[:\s]|\Z)",
            bare=r"/(?P<verb>undo|redo)(?P<rest>\s.*)?",
            short={"undo": "/undo", "redo": "/redo"},
            long="/mulligan ",
            conversation="`/rewind` brings the conversation back too: choose the prompt, then restore the conversation "
            "only. `claude --resume` does the same for an earlier session.",
        ),
        "codex": Spelling(
            # Without a sign before it, a prompt is a command only if it can be nothing else.
            lead=rf"(?:[/$]mulligan(?:[:\s]|\Z)|mulligan\s+(?=(?:{'|'.join(VERBS)})\b))",
            bare=rf"(?:[/$](?P<verb>undo|redo)(?P<rest>\s.*)?|(?P<word>undo|redo)(?P<call>\s+{_CALL_ID})?)",
            short={"undo": "undo", "redo": "redo"},
            long="mulligan ",
            conversation="Esc Esc brings the conversation back to an earlier prompt.",
        ),
        "gemini": Spelling(
            lead=r"(?:mulligan:|/mulligan(?:[:\s]|\Z))",
            bare=r"/(?P<verb>undo|redo)(?P<rest>\s.*)?",
            short={"undo": "/undo", "redo": "/redo"},
            long="/mulligan ",
            conversation="`/rewind` brings the conversation back too.",
        ),
        "opencode": Spelling(
            lead=r"/mulligan(?:[:\s]|\Z)",
            bare=r"/(?P<verb>undo|redo)(?P<rest>\s.*)?",
            short={"undo": "/undo", "redo": "/redo"},
            long="/mulligan ",
            conversation="`ctrl+x u` is opencode's own undo of the conversation.",
        ),
        # An editor that speaks ACP; the proxy answers.
        "acp": Spelling(
            lead=r"/mulligan(?:[:\s]|\Z)",
            bare=r"/(?P<verb>undo|redo)(?P<rest>\s.*)?",
            short={"undo": "/undo", "redo": "/redo"},
            long="/mulligan ",
        ),
    }
)


@fast_dataclass(slots=True, frozen=True)
class TypedCommand:
    """A verb and its arguments. An unknown verb is answered with the list of verbs."""

    host: str
    verb: str
    words: tuple[str, ...] = ()

    @property
    def spelling(self) -> Spelling:
        return SPELLINGS[self.host]

    @property
    def is_undo_operation(self) -> bool:
        return self.verb in _UNDOING


def parse_typed(host: str, prompt: str) -> TypedCommand | None:
    """The command in a prompt; None if the prompt is for the model."""
    spelling, line = SPELLINGS.get(host), prompt.strip().removesuffix(NO_ANSWER).strip()
    if spelling is None:
        return None
    bare = re.fullmatch(spelling.bare, line, re.DOTALL)
    if bare is not None:
        found = bare.groupdict()
        verb = found["verb"] or found.get("word") or ""
        return TypedCommand(host, verb, _split(found["rest"] or found.get("call") or ""))
    lead = re.match(spelling.lead, line)
    if lead is None:
        return None
    verb, *words = _split(line[lead.end() :]) or ("status",)
    return TypedCommand(host, verb, tuple(words))


def _split(text: str) -> tuple[str, ...]:
    with suppress(ValueError):
        return tuple(shlex.split(text))
    return tuple(text.split())


@fast_dataclass(slots=True, frozen=True)
class Typing:
    """A typed command in its session. `cwd` is the folder that relative paths start from."""

    open_root: OpenRoot
    session: SessionId
    command: TypedCommand
    cwd: str

    @property
    def names(self) -> tuple[str, ...]:
        """The words that are no options."""
        return tuple(word for word in self.command.words if not word.startswith("--"))

    @property
    def options(self) -> frozenset[str]:
        return frozenset(word for word in self.command.words if word.startswith("--"))

    @property
    def row(self) -> str | None:
        return self.names[0] if self.names else None


class _PlanFirstError(Exception):
    """The plan leaves conflicts or changes many paths, so the person sees it before Mulligan applies it."""


def answer(open_root: OpenRoot, session: str, command: TypedCommand, cwd: str) -> str:
    """What the host shows to the person."""
    typing = Typing(open_root, SessionId(session), command, cwd)
    run = _RUN.get(command.verb)
    if run is None:
        return _usage(command)
    unknown = sorted(typing.options - _OPTIONS[command.is_undo_operation])
    if unknown:
        return f"Mulligan does not know {visible(unknown[0])} here.\n{_usage(command)}"
    try:
        return run(typing)
    except MulliganError as error:
        return visible(" ".join(error.message.split()))


_OPTIONS: Mapping[bool, frozenset[str]] = {
    True: frozenset({"--yes", "--overwrite", "--dry-run"}),
    False: frozenset(),
}


def still_running(command: TypedCommand) -> str:
    """The answer to a command that takes long."""
    status = command.spelling.line("status")
    if command.is_undo_operation:
        return f"Mulligan is still working on the {command.verb}. It finishes in the background; `{status}` shows it."
    return "Mulligan is still reading. Type the command again in a moment."


def _usage(command: TypedCommand) -> str:
    spelling = command.spelling
    known = "" if command.verb in VERBS else f"Mulligan has no command {visible(command.verb)!r}.\n"
    forms = ("undo [CALL]", "redo", "rollback", "rewind [N]", "restore PATH", "status", "log", "diff [CALL]")
    lines = [spelling.line(*form.split(" ", 1)) for form in forms]
    return f"{known}Commands: {', '.join(lines)}"


# Undo operations.

_Act = Callable[[UndoOptions], UndoResult]


def _undo(typing: Typing) -> str:
    return _operate(typing, lambda how: undo(typing.open_root, typing.row, how=how))


def _redo(typing: Typing) -> str:
    return _operate(typing, lambda how: redo(typing.open_root, how=how))


def _rollback(typing: Typing) -> str:
    return _operate(typing, lambda how: rollback(typing.open_root, how=how))


def _restore(typing: Typing) -> str:
    """Restores a path to what it was before the newest call of the session that changed it, or before a named call."""
    if not typing.names:
        return f"Name a path: {typing.command.spelling.line('restore', 'PATH')}"
    given = typing.names[-1]
    path = typing.open_root.disk.root.find(os.path.join(typing.cwd, given))
    if path is None:
        return f"{visible(given)} is outside of {visible(_root(typing))}."
    call = typing.names[0] if len(typing.names) > 1 else _newest_change(typing, path)
    if call is None:
        return f"No call of this session changed {visible(given)}."
    return _operate(typing, lambda how: restore(typing.open_root, call, paths=[path], how=how))


def _newest_change(typing: Typing, path: RepoPath) -> str | None:
    """The newest call of the session that is not undone and changed the path, or something below it."""
    place = typing.open_root.disk.root.place_of(path)
    with typing.open_root.ledger.store.read() as tx:
        for row in calls_of(tx, typing.open_root, typing.session, only={"undone_by": None, "way_back": None}):
            for change in tx.select(CHANGES, {"call": row.id}):
                if change.place == place or change.place.startswith(place + b"/"):
                    return row.id
    return None


def _rewind(typing: Typing) -> str:
    prompts = _prompts(typing)
    if typing.row is None:
        return _prompt_list(typing, prompts)
    if not typing.row.isdigit() or not 1 <= int(typing.row) <= len(prompts):
        return f"{visible(typing.row)} is no number of a prompt.\n{_prompt_list(typing, prompts)}"
    first = next((one.calls[0] for one in reversed(prompts[: int(typing.row)]) if one.calls), None)
    if first is None:
        return "No files changed since that prompt."
    done = _operate(typing, lambda how: rewind(typing.open_root, first.id, transcript=False, how=how))
    hint = typing.command.spelling.conversation
    return done if hint is None else f"{done}\n{hint}"


def _operate(typing: Typing, act: _Act) -> str:
    on_conflict: Any = "overwrite" if "--overwrite" in typing.options else "merge"
    if "--dry-run" in typing.options:
        return _plan_text(typing, act(UndoOptions(on_conflict, True, typing.session)))
    sure = bool(typing.options & {"--yes", "--overwrite"})
    try:
        done = act(UndoOptions(on_conflict, False, typing.session, check=None if sure else _check))
    except _PlanFirstError:
        return _plan_text(typing, act(UndoOptions(on_conflict, True, typing.session)))
    if not sure and done.call_id is None and not done.ok:
        return _plan_text(typing, done)
    return _done_text(typing, done)


def _check(plan: RestorePlan) -> None:
    if len(plan.moves) > PATHS_MAX or any(one.outcome in ("conflicted", "failed") for one in plan.outcomes):
        raise _PlanFirstError


def _done_text(typing: Typing, done: UndoResult) -> str:
    lines = outcome_lines(done)
    lines += [f"replaced your version of {visible(path)}; the store keeps it" for path in done.overwrote_external]
    if done.call_id is None:
        return "\n".join([*_capped(lines), "No files changed."])
    other = "undo" if typing.command.verb == "redo" else "redo"
    words = (short(done.call_id),) if other == "undo" else ()
    reverse = f"`{typing.command.spelling.line(other, *words)}` reverses this."
    past = {"undo": "Undid", "redo": "Redid", "rollback": "Rolled back", "rewind": "Rewound", "restore": "Restored"}
    head = f"{past[typing.command.verb]} {_calls_text(typing, done)}:"
    return "\n".join([head, *(f"  {line}" for line in _capped(lines or ["No files changed."])), reverse])


def _plan_text(typing: Typing, planned: UndoResult) -> str:
    count = 0 if planned.plan is None else len(planned.plan.moves)
    conflicts = sum(one.outcome == "conflicted" for one in planned.outcomes)
    spelling, verb = typing.command.spelling, typing.command.verb
    # The plan is for these calls, so the line that applies it names them: the agent may work on meanwhile.
    named = (short(planned.of[0]),) if verb == "undo" and len(planned.of) == 1 else typing.names
    head = f"Nothing is changed yet. The {verb} of {_calls_text(typing, planned)} would change {counted(count, 'path')}"
    head += f" and leave {counted(conflicts, 'conflict')}:" if conflicts else ":"
    lines = [f"  {line}" for line in _capped(outcome_lines(planned, dry_run=True))]
    apply = [f"`{spelling.line(verb, *named, '--yes')}` applies this."] if count else []
    force = f"`{spelling.line(verb, *named, '--overwrite')}` also replaces your own changes there."
    return "\n".join([head, *lines, *apply, *([force] if conflicts else [])])


def _calls_text(typing: Typing, done: UndoResult) -> str:
    with typing.open_root.ledger.store.read() as tx:
        found = [row for call in done.of if (row := tx.get(CALLS, call)) is not None]
        undoing = [one for row in found if row.way_back is not None for one in undone_calls(tx, row)]
        rows = [row for row in found if row.way_back is None] or undoing
    if len(rows) == 1:
        return f"{call_title(rows[0])} ({short(rows[0].id)})"
    return counted(len(rows), "call")


def _capped(lines: Sequence[str], most: int = _LINES_MAX) -> list[str]:
    left = len(lines) - most
    return [*lines[:most], f"and {left} more"] if left > 0 else list(lines)


# Reading.


@fast_dataclass(slots=True, frozen=True)
class PromptOfSession:
    """A prompt of the session and its calls that stand, oldest first."""

    turn: TurnRow
    calls: tuple[CallRow, ...]


def _prompts(typing: Typing) -> list[PromptOfSession]:
    """The last prompts of the session, newest first."""
    with typing.open_root.ledger.store.read() as tx:
        turns = [row for row in tx.select(TURNS, {"session": typing.session}) if row.opened]
        turns.sort(key=lambda row: row.started_at, reverse=True)
        return [PromptOfSession(row, _calls_of_turn(tx, row)) for row in turns[:_PROMPTS_MAX]]


def _calls_of_turn(tx: Tx, turn: TurnRow) -> tuple[CallRow, ...]:
    rows = tx.select(CALLS, {"session": turn.session, "turn": turn.id}, order=("id",))
    return tuple(row for row in rows if row.wseq is not None and row.undone_by is None and row.status == "committed")


def _prompt_list(typing: Typing, prompts: Sequence[PromptOfSession]) -> str:
    if not prompts:
        return "This session has no prompts yet."
    with typing.open_root.ledger.store.read() as tx:
        lines = [_prompt_line(tx, number, one) for number, one in enumerate(prompts, 1)]
    line = typing.command.spelling.line("rewind", "N")
    return "\n".join([*lines, f"`{line}` takes back what the session changed from prompt N on."])


def _prompt_line(tx: Tx, number: int, prompt: PromptOfSession) -> str:
    paths = sorted({os.fsdecode(one.path) for row in prompt.calls for one in tx.select(CHANGES, {"call": row.id})})
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    files = ", ".join(map(visible, paths[:4])) + more if paths else "no files"
    said = " ".join((prompt.turn.prompt or "").split())
    cut = said if len(said) <= _PROMPT_SHOWN else said[: _PROMPT_SHOWN - 1] + "…"
    return f"{number:>3}  {ago(prompt.turn.started_at):<12} {visible(cut)}: {files}"


def _status(typing: Typing) -> str:
    with typing.open_root.ledger.store.read() as tx:
        count = sum(1 for row in calls_of(tx, typing.open_root, typing.session) if row.way_back is None)
        newest = newest_to_undo(tx, typing.open_root, typing.session)
        running = [row for one in tx.select(OPEN) if one.session == typing.session and (row := tx.get(CALLS, one.call))]
        back = tx.select(REDO, {"session": typing.session})
        undone = max(back, key=lambda one: one.call) if back else None
        verb = None if undone is None or (row := tx.get(CALLS, undone.call)) is None else row.tool
    spelling = typing.command.spelling
    lines = [f"{visible(_root(typing))}: this session has {counted(count, 'call')} on record"]
    if newest is None:
        lines.append("nothing to undo")
    else:
        lines.append(f"`{spelling.line('undo')}` would undo {call_title(newest)} ({short(newest.id)})")
    lines += [f"`{spelling.line('redo')}` would reverse the last {verb}"] if verb else []
    lines += [f"{call_title(row)} ({short(row.id)}) is still running" for row in running]
    return "\n".join(lines)


def _root(typing: Typing) -> str:
    return os.fsdecode(typing.open_root.disk.root.path)


def _log(typing: Typing) -> str:
    views = log_view(typing.open_root, typing.session, limit=_LOG_MAX)
    with typing.open_root.ledger.store.read() as tx:
        rows = {view["id"]: tx.get(CALLS, view["id"]) for view in views}
    return "\n".join(_log_line(view, rows[view["id"]]) for view in views) or "This session has no calls yet."


def _log_line(view: Mapping[str, Any], row: CallRow | None) -> str:
    words = changes_words(view["changes"])
    more = f" and {len(words) - 4} more" if len(words) > 4 else ""
    title = call_title(row) if row is not None else "call"
    state = "" if view["status"] == "committed" else f" ({view['status']})"
    changed = ", ".join(words[:4]) or "no changes"
    return f"{short(view['id'])}  {ago(view['started_at']):<12} {title}{state}: {changed}{more}"


def _diff(typing: Typing) -> str:
    if typing.row is not None:
        row: CallRow | None = find_call(typing.open_root, typing.row, typing.session)
    else:
        with typing.open_root.ledger.store.read() as tx:
            rows = as_it_happened(tx, calls_of(tx, typing.open_root, typing.session))
            row = next((one for one in rows if one.wseq is not None), None)
    if row is None:
        return "This session has changed nothing yet."
    lines = [visible(line) for line in diff_view(typing.open_root, row).splitlines()]
    return "\n".join([f"{call_title(row)} ({short(row.id)})", *_capped(lines, _DIFF_LINES_MAX)])


_RUN: Mapping[str, Callable[[Typing], str]] = {
    "undo": _undo,
    "redo": _redo,
    "rollback": _rollback,
    "rewind": _rewind,
    "restore": _restore,
    "status": _status,
    "log": _log,
    "diff": _diff,
}
