"""What stands above the hunks of one file in a unified diff: which file, what becomes of it, with which mode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from mulligan.values.limits import MAX_PATH_BYTES
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.patch.names import DEV_NULL, Named, named, unquote, without_leading

Action = Literal["modify", "create", "delete", "rename", "copy"]

GIT_FACTS = (
    b"old mode ",
    b"new mode ",
    b"new file mode ",
    b"deleted file mode ",
    b"rename from ",
    b"rename to ",
    b"copy from ",
    b"copy to ",
    b"similarity index ",
    b"dissimilarity index ",
    b"index ",
    b"--- ",
    b"+++ ",
)
"""How the lines between `diff --git` and the first hunk begin."""

_GIT_LINE_BYTES_MAX = 4 * MAX_PATH_BYTES
_MODE = re.compile(rb"[0-7]{6}\Z")
_INDEX_MODE = re.compile(rb"[0-9a-f]+\.\.[0-9a-f]+ ([0-7]{6})\Z")
_STAMP = re.compile(
    rb"(1969-12-31|1970-01-01) ([0-2][0-9]):([0-5][0-9]):00(?:\.0+)? ([+-])([0-2][0-9]):?([0-5][0-9])\s*\Z"
)


@plain(slots=True, frozen=True)
class Header:
    """`old` is None for a file that is created, `new` for one that is deleted. Modes are git's, None when not told."""

    action: Action
    old: Named | None
    new: Named | None
    mode_before: int | None = None
    mode_after: int | None = None


def unreadable(message: str) -> Refused:
    return Refused("parse_error", "patch_parse_error", message, errors=[message])


def git_header(names: bytes, facts: Mapping[bytes, bytes], strip: int) -> Header:
    """From the rest of the `diff --git` line and the lines below it, by their beginnings."""
    action = _git_action(facts)
    before, after = _modes(facts)
    moves = action == "rename" or action == "copy"
    old, new = _moved(action, facts, strip) if moves else _stayed(action, _shared_name(names, strip), facts, strip)
    return Header(action, old, new, before, after)


def begins_another(names: bytes, facts: Mapping[bytes, bytes], pair: tuple[bytes, bytes], strip: int) -> bool:
    """Whether a `---`, `+++` pair below a git header is the next file's, not part of it.

    It is when the header says all there is to say of its own files and the pair names neither. Git gives the mode of
    the one file to the other there, and finds fault with a rename; either way the first file would be lost.
    """
    action = _git_action(facts)
    if action == "modify" and b"new mode " not in facts:
        return False
    own = _moved(action, facts, strip) if action in ("rename", "copy") else (_shared(names, strip),)
    others = [_side(line, None, strip) for line in pair]
    if (action == "create" and others[0] is None) or (action == "delete" and others[1] is None):
        return False
    known = {name.text for name in own if name is not None}
    return bool(known) and known.isdisjoint(name.text for name in others if name is not None)


def _shared(names: bytes, strip: int) -> Named | None:
    name = _shared_name(names, strip)
    return None if name is None else named(name, strip)


def _git_action(facts: Mapping[bytes, bytes]) -> Action:
    signs: dict[Action, bool] = {
        "create": b"new file mode " in facts or _name_of(facts.get(b"--- ")) == DEV_NULL,
        "delete": b"deleted file mode " in facts or _name_of(facts.get(b"+++ ")) == DEV_NULL,
        "rename": b"rename from " in facts or b"rename to " in facts,
        "copy": b"copy from " in facts or b"copy to " in facts,
    }
    told = [action for action, said in signs.items() if said]
    if len(told) > 1:
        raise unreadable(f"One file header says both {told[0]} and {told[1]}.")
    return told[0] if told else "modify"


def _modes(facts: Mapping[bytes, bytes]) -> tuple[int | None, int | None]:
    index = _INDEX_MODE.match(facts.get(b"index ", b""))
    kept = int(index[1], 8) if index else None
    before = _mode(facts.get(b"old mode ", facts.get(b"deleted file mode ")))
    after = _mode(facts.get(b"new mode ", facts.get(b"new file mode ")))
    return (before if before is not None else kept), (after if after is not None else kept)


def _mode(text: bytes | None) -> int | None:
    if text is None:
        return None
    if not _MODE.match(text):
        raise unreadable("A file mode in a diff has six octal digits.")
    return int(text, 8)


_Sides = tuple[Named | None, Named | None]


def _moved(action: Action, facts: Mapping[bytes, bytes], strip: int) -> _Sides:
    """`rename from` and the like name files without the `a/` and `b/` that `strip` counts on."""
    verb = action.encode()
    origin, goal = (_name_of(facts.get(verb + word), tab_ends=False) for word in (b" from ", b" to "))
    if origin is None or goal is None:
        raise unreadable("A rename or copy names where from and where to.")
    old, new = named(origin, max(strip - 1, 0)), named(goal, max(strip - 1, 0))
    for key, one in ((b"--- ", old), (b"+++ ", new)):
        again = _name_of(facts.get(key))
        if again is not None and named(again, strip).text != one.text:
            raise unreadable("A file header gives one file two names.")
    return old, new


def _stayed(action: Action, default: bytes | None, facts: Mapping[bytes, bytes], strip: int) -> _Sides:
    old, new = (_side(facts.get(key), default, strip) for key in (b"--- ", b"+++ "))
    if action == "create":
        _check_missing(facts.get(b"--- "))
        return None, _agreed(new, default, strip)
    if action == "delete":
        _check_missing(facts.get(b"+++ "))
        return _agreed(old, default, strip), None
    if _told(old).text != _told(new).text:
        raise unreadable("Two names for one file, and no rename.")
    return old, new


def _check_missing(text: bytes | None) -> None:
    if text is not None and _name_of(text) != DEV_NULL:
        raise unreadable("The missing side of a new or deleted file is /dev/null.")


def _agreed(name: Named | None, default: bytes | None, strip: int) -> Named:
    """The name of a file that comes or goes, which the first line of its header has to give too."""
    if default is not None and named(default, strip).text != _told(name).text:
        raise unreadable("A file header gives one file two names.")
    return _told(name)


def _told(name: Named | None) -> Named:
    if name is None:
        raise unreadable("A file header names no file; is `strip` right?")
    return name


def _side(text: bytes | None, default: bytes | None, strip: int) -> Named | None:
    name = default if text is None else _name_of(text)
    return None if name is None or name == DEV_NULL else named(name, strip)


def _name_of(text: bytes | None, *, tab_ends: bool = True) -> bytes | None:
    """The name in a header line: quoted, or up to the tab that a time stamp follows."""
    if text is None:
        return None
    if text.startswith(b'"'):
        quoted = unquote(text)
        if quoted is None:
            raise unreadable("A quoted file name in a diff is not well-formed.")
        return quoted[0]
    return text.partition(b"\t")[0] if tab_ends else text


def _shared_name(names: bytes, strip: int) -> bytes | None:
    """The one name that `a/NAME b/NAME` says twice, with its prefix. Names may hold spaces, so each is tried."""
    if len(names) > _GIT_LINE_BYTES_MAX:
        return None
    for first, second in _splits(names):
        wanted = without_leading(first, strip)
        if wanted is not None and second.endswith(wanted) and without_leading(second, strip) == wanted:
            return second
    return None


def _splits(names: bytes) -> list[tuple[bytes, bytes]]:
    if names.startswith(b'"'):
        first, rest = unquote(names) or (b"", b"")
        return [(first, _name_of(rest[1:]) or b"")]
    if names.endswith(b'"') and b' "' in names:
        start = names.index(b' "')
        return [(names[:start], _name_of(names[start + 1 :]) or b"")]
    cuts = [at for at, byte in enumerate(names) if byte == 0x20]
    return [(names[:at], names[at + 1 :]) for at in cuts]


def plain_header(old_line: bytes, new_line: bytes, strip: int, *, grows: bool, shrinks: bool) -> Header:
    """From `---` and `+++` alone. `grows`: no hunk has an old side; `shrinks`: none has a new one.

    `diff -N` writes a missing file as one of the epoch; a real file may be as old, so the hunks have to agree.
    """
    old, new = _side(old_line, None, strip), _side(new_line, None, strip)
    if new is not None and (old is None or (grows and _is_epoch(old_line))):
        return Header("create", None, new)
    if old is not None and (new is None or (shrinks and _is_epoch(new_line))):
        return Header("delete", old, None)
    if old is None or new is None:
        raise unreadable("Both sides of a file header are /dev/null.")
    one = old if new.text.startswith(old.text) else new
    return Header("modify", one, one)


def _is_epoch(line: bytes) -> bool:
    stamp = _STAMP.match(line.partition(b"\t")[2])
    if stamp is None:
        return False
    local_min = int(stamp[2]) * 60 + int(stamp[3]) - (1440 if stamp[1] == b"1969-12-31" else 0)
    offset_min = int(stamp[5]) * 60 + int(stamp[6])
    return local_min == (offset_min if stamp[4] == b"+" else -offset_min)
