"""What a call was, for people: its agent, its command, its prompt, and whether it also acted outside of the files.

Commands and prompts may quote secrets, so they are redacted as exports are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from mulligan.history import cause
from mulligan.history.cause import ObservedTool
from mulligan.history.tables import TURNS, CallRow
from mulligan.session.lifecycle import call_end_seq
from mulligan.session.tables import session_journal
from mulligan.store.journal import RECORDS, parse_record
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId

TEXT_MAX = 2_000
"""Characters of a command or a prompt that an answer has at most."""

_RUNS = frozenset({"shell", "exec", "run", "host.exec"})
_MCP = re.compile(r"mcp:(.+):[^:]*", re.DOTALL)
"""The default session of an MCP client: its name, and the root."""
_AT_COMMAND = r"(?:\A|[|;&(){}\n`]|\b(?:sudo|then|do|else|exec|env|time|nohup)\s)\s*"
_OUTSIDE_COMMANDS = {
    "push": re.compile(_AT_COMMAND + r"git\b[^|;&\n]*\spush\b"),
    "network": re.compile(
        _AT_COMMAND + r"(?:curl|wget|ssh|scp|sftp|twine|gh|aws|gcloud|(?:npm|yarn|pnpm|cargo)\s+publish)\b"
    ),
    "other_daemon": re.compile(_AT_COMMAND + r"(?:docker|podman|kubectl|systemctl|psql|mysql|redis-cli)\b"),
}
_OUTSIDE_GAPS = ("network", "other_daemon")


@fast_dataclass(slots=True, frozen=True)
class CallAbout:
    """The agent of a call, its command, and the prompt that caused it; None for what is not on record.

    `outside` names what the call reached besides files, which undo cannot reach: `push`, `network`, `other_daemon`.
    """

    agent: str | None = None
    command: str | None = None
    prompt: str | None = None
    outside: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON."""
        return {
            "agent": self.agent,
            "command": self.command,
            "prompt": self.prompt,
            "outside": list(self.outside),
        }


def about_call(tx: Tx, row: CallRow, gaps: Iterable[Mapping[str, str]] = ()) -> CallAbout:
    """What a call was. `gaps` is its coverage."""
    if row.external:
        return CallAbout()
    command = command_of(tx, row)
    turn = None if row.session is None else tx.get(TURNS, row.session, row.turn)
    prompt = None if turn is None else turn.prompt
    return CallAbout(
        agent_of(row),
        None if command is None else redacted(command)[:TEXT_MAX],
        None if prompt is None else redacted(prompt)[:TEXT_MAX],
        outside_of(command, gaps),
    )


def call_named(tx: Tx, row: CallRow) -> dict[str, Any]:
    """What a plan says of a call that it undoes."""
    gaps = [] if row.coverage == "[]" else decode(row.coverage)
    names = {"id": row.id, "session_id": row.session, "tool": row.tool, "label": row.label}
    return {**names, **about_call(tx, row, gaps).to_json()}


def agent_of(row: CallRow) -> str | None:
    """The program whose agent made the call, if it is on record: a host with hooks, or an MCP client."""
    why = row.why
    told = why.about.get("agent") if isinstance(why, ObservedTool) else None
    if isinstance(told, str):
        return told
    client = _MCP.fullmatch(row.session or "")
    return None if client is None else client[1]


def command_of(tx: Tx, row: CallRow) -> str | None:
    """The command line of a call that ran one: from the agent's hook, else from the record of the call's end."""
    told = cause.command_of(row.why)
    if told is not None:
        return told
    if row.tool not in _RUNS or row.session is None or row.ended_at is None:
        return None
    session = SessionId(row.session)
    seq = call_end_seq(tx, session, row.id, row.ended_at)
    record = None if seq is None else tx.get(RECORDS, session_journal(session), seq)
    for effect in [] if record is None else parse_record(record).payload.get("effects", []):
        params = effect.get("params", {})
        if isinstance(params.get("command"), str):
            return str(params["command"])
        argv = params.get("argv")
        if isinstance(argv, list) and argv:
            is_shell = len(argv) == 3 and argv[0] in ("sh", "bash") and argv[1] == "-c"
            return str(argv[2]) if is_shell else shlex.join(map(str, argv))
    return None


def outside_of(command: str | None, gaps: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """What a call reached besides files: what its capture saw, and what its command is known for."""
    found = {gap["reason"] for gap in gaps if gap["reason"] in _OUTSIDE_GAPS}
    found |= {name for name, form in _OUTSIDE_COMMANDS.items() if command is not None and form.search(command)}
    return tuple(name for name in _OUTSIDE_COMMANDS if name in found)


def redacted(text: str) -> str:
    """The text without secrets."""
    # Imported here, because its many patterns take longer to load than a quick verb, and most calls have no text.
    from mulligan.session.bundle.redaction import without_secrets

    return without_secrets(text)[0]
