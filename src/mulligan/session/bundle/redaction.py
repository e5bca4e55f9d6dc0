"""Taking secrets and private names out of a JSON document. Pure: nothing here looks at the machine.

Three things are replaced, each noted in the manifest: the value of a field whose name says that it is secret; whatever
in a string looks like a secret of a known kind (`secret_kinds`); and the private part of paths. Keys are strings too.
A string that is itself JSON is looked into, and so is base64 in a string; a run of base64 that is too long to look
into is taken out whole. Terminal escape sequences neither hide nor split a secret. Redacting twice changes nothing.

No function here ever puts what it found into an error or a manifest: only where it was and what kind.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as NotBase64
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from mulligan.session.private_names import PrivateNames
from mulligan.session.secret_kinds import BLOCKING_KINDS, SECRET_KINDS, SecretKind, looks_random, span_of
from mulligan.values.canonical import decode, encode
from mulligan.values.faults import MulliganError, fault
from mulligan.values.limits import KIB_BYTES

REDACTED = "[redacted]"
WINDOW_CHARS = 256 * KIB_BYTES
OVERLAP_CHARS = 16 * KIB_BYTES
JSON_IN_STRINGS_DEPTH = 8
_SHORT_CHARS, _SHORT_TEXTS, _SECRET_MIN_CHARS = 64, 65_536, 4

_FIELDS = """
    authorization proxy_authorization cookie set_cookie api_key apikey x_api_key x_auth_token x_csrf_token x_xsrf_token
    access_token refresh_token id_token bearer_token session_token auth_token client_secret secret password passwd pwd
    passphrase private_key secret_key secret_access_key access_key account_key encryption_key signing_key credentials
    connection_string database_url
"""
_ENDINGS = """
    _token _secret _password _passwd _passphrase _apikey _api_key _private_key _secret_key _access_key _credentials
"""
SENSITIVE_FIELDS = frozenset(_FIELDS.split())
SENSITIVE_ENDINGS = tuple(_ENDINGS.split())
DOUBTFUL_FIELDS = frozenset({"token", "auth", "jwt", "session_key", "credential", "signature"})
"""Names of harmless things too: their values are taken out only if they look random."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
BASE64_MAX_CHARS = 64 * KIB_BYTES
_BASE64_MIN_CHARS = 20
_BASE64_RUN = re.compile(
    # In lines, as mail and PEM have it, or in one piece.
    r"(?:[A-Za-z0-9+/]{60,76}+(?:\r?\n|(?:\\r)?\\n)){2,}+[A-Za-z0-9+/]{0,76}+={0,2}"
    rf"|[A-Za-z0-9+/_-]{{{_BASE64_MIN_CHARS},}}+={{0,2}}"
)
_LINE_BREAK = re.compile(r"\r?\n|(?:\\r)?\\n")
_URL_SAFE = str.maketrans("-_", "+/")
_ESCAPE = re.compile(
    r"(?:\x1b|\\u001[bB]|\\x1[bB]|\\033|\\e)"
    r"(?:\[[0-9;:<=>?]{0,64}+[ -/]{0,4}+[@-~]"
    r"|\][^\x07\x1b\\]{0,2048}+(?:\x07|\x1b\\|\\u0007|\\a)"
    r"|[()#][A-Za-z0-9]|[=>78cDEHMNOZ])"
    r"|\x9b[0-9;:<=>?]{0,64}+[ -/]{0,4}+[@-~]"
)
"""A command to a terminal (a colour, a movement, a title), as it is and as JSON, C and shells spell it."""
_BASE64 = re.compile(r"(?:base64:)?[A-Za-z0-9+/]{16,}+={0,2}\Z")
_LEFT_BEHIND = re.compile(r"<redacted:[a-z_0-9]+:\d+>")


@dataclass(frozen=True, slots=True)
class Policy:
    """What to take out. `extra_fields` are further sensitive names; `names` are this machine's private names."""

    kinds: tuple[SecretKind, ...] = SECRET_KINDS
    names: PrivateNames = field(default_factory=PrivateNames)
    extra_fields: frozenset[str] = frozenset()

    def is_sensitive(self, name: str) -> bool:
        plain = _plain(name)
        return plain in SENSITIVE_FIELDS or plain.endswith(SENSITIVE_ENDINGS) or plain in self.extra_fields


@dataclass(frozen=True, slots=True, order=True)
class Redaction:
    """One line of the manifest."""

    path: str
    kind: str
    action: str
    replacement: str

    def to_json(self) -> dict[str, str]:
        return {"path": self.path, "class": self.kind, "action": self.action, "replacement": self.replacement}


@dataclass(slots=True)
class Redactor:
    """One pass over documents. `entries` collects what was done, in the order it was met, each once.

    Without a policy everything stays as it is. `spared` are keys of a known form, which are never private.
    """

    policy: Policy | None
    spared: frozenset[str] = frozenset()
    _seen: dict[Redaction, None] = field(default_factory=dict)
    _short: dict[str, tuple[str, list[tuple[str, str]]]] = field(default_factory=dict)

    @property
    def _rules(self) -> Policy:
        assert self.policy is not None, "without a policy no string is looked at"
        return self.policy

    @property
    def entries(self) -> list[Redaction]:
        return list(self._seen)

    def note(self, path: str, kind: str, replacement: str, action: str = "replaced") -> None:
        self._seen[Redaction(path, kind, action, replacement)] = None

    def document(self, value: Any, path: str = "$", *, depth: int = 0) -> Any:
        """The value without its secrets; `path` says where it stands."""
        if self.policy is None:
            return value
        if isinstance(value, str):
            return self._string(value, path, depth=depth)
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth=depth)
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.document(item, f"{path}[{index}]", depth=depth) for index, item in enumerate(value)]
        return value

    def _mapping(self, value: Mapping[str, Any], path: str, *, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        describes = path.endswith(".properties")
        for key, item in value.items():
            name = key if key in self.spared else _free_name(self._text(key, f"{path}.*"), found)
            where = step(path, name)
            if not (describes and isinstance(item, Mapping)) and self._is_secret(key, item):
                found[name] = REDACTED
                if item != REDACTED:
                    self.note(where, "sensitive_field", REDACTED)
            else:
                found[name] = self.document(item, where, depth=depth)
        return found

    def _is_secret(self, name: str, value: Any) -> bool:
        """Whether the field is taken out whole. Nothing, yes and no are no secrets."""
        if value is None or isinstance(value, bool) or value in ("", [], {}):
            return False
        if self._rules.is_sensitive(name):
            return not (isinstance(value, str) and _LEFT_BEHIND.fullmatch(value))
        return _plain(name) in DOUBTFUL_FIELDS and isinstance(value, str) and looks_random(value, least=8)

    def _string(self, text: str, path: str, *, depth: int) -> str:
        if depth < JSON_IN_STRINGS_DEPTH and text[:64].lstrip()[:1] in ("{", "["):
            text = self._inside(text, path, depth=depth)
        return self._text(text, path)

    def _inside(self, text: str, path: str, *, depth: int) -> str:
        """A string that is a JSON document, written anew only if something had to go."""
        try:
            value = decode(text)
            inner = Redactor(self.policy, self.spared)
            clean = inner.document(value, path, depth=depth + 1)
            if not inner.entries:
                return text
            rewritten = encode(clean).decode("utf-8")
        except (MulliganError, RecursionError):
            return text
        self._seen |= inner._seen
        return rewritten

    def _hides_text(self, text: str) -> bool:
        """Whether it is the base64 of a text with something in it that has to go."""
        if len(text) > BASE64_MAX_CHARS or not _BASE64.match(text):
            return False
        try:
            plain = b64decode(text.removeprefix("base64:"), validate=True).decode("utf-8")
        except (NotBase64, UnicodeDecodeError):
            return False
        return bool(without_secrets(plain, self._rules.kinds)[1] or self._rules.names.hide(plain)[1])

    def _text(self, text: str, path: str) -> str:
        found = self._short.get(text)
        if found is None:
            found = self._cleaned(text)
            if len(text) <= _SHORT_CHARS and len(self._short) < _SHORT_TEXTS:
                self._short[text] = found
        clean, notes = found
        for kind, replacement in notes:
            self.note(path, kind, replacement)
        return clean

    def _cleaned(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """The text without what has to go, and what that was. Short ones are remembered: they come again and again."""
        if self._hides_text(text):
            return REDACTED, [("secret_pattern_or_url", REDACTED)]
        clean, secrets = without_secrets(text, self._rules.kinds, self._rules.names)
        clean, hidden = self._rules.names.hide(clean)
        notes = [("secret_pattern_or_url", one) for one in secrets]
        return clean, notes + [("local_pointer_path", one) for one in hidden]


def without_secrets(
    text: str, kinds: Sequence[SecretKind] = SECRET_KINDS, names: PrivateNames | None = None
) -> tuple[str, list[str]]:
    """The text with every secret replaced by `<redacted:KIND:BYTES>`, and the replacements in order.

    With `names`, base64 that holds one of them goes too.
    """
    pieces: list[str] = []
    replacements: list[str] = []
    at = 0
    for start, end, name in _merged([*_spans(text, kinds), *_base64_spans(text, kinds, names)]):
        replacement = f"<redacted:{name}:{len(text[start:end].encode('utf-8', 'surrogatepass'))}>"
        pieces += (text[at:start], replacement)
        replacements.append(replacement)
        at = end
    return ("".join([*pieces, text[at:]]), replacements) if pieces else (text, [])


def first_secret(text: str) -> str | None:
    """The name of a kind that is in the text, if any is."""
    return next((name for _, _, name in _spans(text, BLOCKING_KINDS)), None)


def refuse_survivors(document: Any, *, doing: str) -> None:
    """Raise `unredacted_secret` if a secret of a known shape is anywhere in the document, without showing it."""
    for path, text in strings_in(document):
        name = first_secret(text)
        if name is not None:
            where = without_secrets(path)[0]
            raise fault(
                "unredacted_secret",
                f"{doing} is refused: something at {where} looks like a secret ({name}). Take it out first.",
                path=where,
                kind=name,
            )


def step(path: str, key: str) -> str:
    """The path of a member: `$.a.b`, or `$["odd key"]`."""
    return f"{path}.{key}" if _IDENTIFIER.match(key) else f"{path}[{encode(key).decode('utf-8')}]"


@lru_cache(maxsize=4_096)
def _plain(name: str) -> str:
    return _CAMEL.sub("_", name).lower().replace("-", "_")


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """Two keys may be redacted to the same text; neither member may get lost."""
    if name not in taken:
        return name
    return next(free for number in range(2, len(taken) + 3) if (free := f"{name}#{number}") not in taken)


def strings_in(value: Any, path: str = "$") -> Iterator[tuple[str, str]]:
    """Every string of a document, keys too, and where it is."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield path, key
            yield from strings_in(item, step(path, key))
    elif isinstance(value, Sequence):
        for index, item in enumerate(value):
            yield from strings_in(item, f"{path}[{index}]")


Span = tuple[int, int, str]


def _spans(text: str, kinds: Sequence[SecretKind]) -> Iterable[Span]:
    """Short texts come again and again (keys, roles, names), so what is in them is remembered."""
    if len(text) < _SECRET_MIN_CHARS:
        return ()
    return _spans_of_short(text, tuple(kinds)) if len(text) <= _SHORT_CHARS else _all_spans(text, kinds)


@lru_cache(maxsize=16_384)
def _spans_of_short(text: str, kinds: tuple[SecretKind, ...]) -> tuple[Span, ...]:
    return tuple(_all_spans(text, kinds))


def _base64_spans(text: str, kinds: Sequence[SecretKind], names: PrivateNames | None) -> Iterator[Span]:
    """Runs of base64 with a secret in what they stand for, and runs that are too long to look into."""
    if len(text) < _BASE64_MIN_CHARS:
        return
    for found in _BASE64_RUN.finditer(text):
        start, end = found.span()
        if end - start > BASE64_MAX_CHARS:
            yield start, end, "long_base64"
        elif any(_holds_secret(plain, kinds, names) for plain in _plain_texts(found[0])):
            yield start, end, "base64_text"


def _plain_texts(run: str) -> Iterator[str]:
    """What a run of base64 may stand for. Its first characters may belong to a word that touches it."""
    symbols = _LINE_BREAK.sub("", run).rstrip("=").translate(_URL_SAFE)
    for skipped in range(4):
        whole = symbols[skipped:]
        whole = whole[:-1] if len(whole) % 4 == 1 else whole
        yield b64decode(whole + "=" * (-len(whole) % 4)).decode("utf-8", "replace")


def _holds_secret(plain: str, kinds: Sequence[SecretKind], names: PrivateNames | None) -> bool:
    """Bytes that are no text may look like anything, so only kinds of a known shape count there."""
    is_text = "\ufffd" not in plain
    chosen = kinds if is_text else [kind for kind in kinds if not kind.heuristic]
    if next(iter(_spans(plain, chosen)), None) is not None:
        return True
    return is_text and names is not None and bool(names.hide(plain)[1])


def _all_spans(text: str, kinds: Sequence[SecretKind]) -> Iterator[Span]:
    """Of the text as it is, and of the text as a terminal shows it."""
    yield from _spans_as_written(text, kinds)
    if "\x1b" in text or "\x9b" in text or "\\" in text:
        yield from _spans_as_shown(text, kinds)


def _spans_as_shown(text: str, kinds: Sequence[SecretKind]) -> Iterator[Span]:
    """Scan a copy without escape sequences, and say where in the text what it finds is."""
    pieces: list[str] = []
    copied: list[int] = []
    """where in the copy each piece begins, and in the text"""
    origins: list[int] = []
    at, size = 0, 0
    for found in _ESCAPE.finditer(text):
        pieces.append(text[at : found.start()])
        copied.append(size)
        origins.append(at)
        size += len(pieces[-1])
        at = found.end()
    if not pieces:
        return
    copied.append(size)
    origins.append(at)
    for start, end, name in _spans_as_written("".join([*pieces, text[at:]]), kinds):
        first, last = bisect_right(copied, start) - 1, bisect_right(copied, end - 1) - 1
        yield origins[first] + start - copied[first], origins[last] + end - copied[last], name


def _spans_as_written(text: str, kinds: Sequence[SecretKind]) -> Iterator[Span]:
    folded = text.lower()
    for kind in kinds:
        for hint in kind.hints:
            if hint in folded:
                yield from _spans_of(text, kind)
                break


def _spans_of(text: str, kind: SecretKind) -> Iterator[Span]:
    """Window by window. What reaches a window's end is matched again without that end."""
    size = len(text) if kind.unbounded else WINDOW_CHARS
    start = 0
    while True:
        end = min(start + size, len(text))
        yield from _spans_between(text, kind, start, end)
        if end == len(text):
            return
        start = end - OVERLAP_CHARS


def _spans_between(text: str, kind: SecretKind, at: int, end: int) -> Iterator[Span]:
    while (found := kind.pattern.search(text, at, end)) is not None:
        whole = kind.pattern.match(text, found.start()) if found.end() == end else found
        first, last = span_of(whole or found)
        if kind.judge is None or kind.judge(whole or found):
            yield first, last, kind.name
            at = max(found.end(), found.start() + 1)
        else:
            # What was rejected may hide a real one further on.
            at = max(first, found.start() + 1)


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Spans that overlap become one, under the name that the table has first, so that no part of a secret stays."""
    found: list[Span] = []
    ranked = [(start, end, rank, name) for rank, (start, end, name) in enumerate(spans)]
    best = 0
    for start, end, rank, name in sorted(ranked):
        if found and start < found[-1][1]:
            first, last, known = found[-1]
            found[-1] = (first, max(last, end), known if best < rank else name)
            best = min(best, rank)
        else:
            found.append((start, end, name))
            best = rank
    return found
