r"""Removes secrets and private names from a JSON document. Pure: nothing here reads the machine.

`Redactor` replaces three things and notes each in the manifest: the value of a field whose name says that it is secret;
text that looks like a secret of a known kind (`secret_kinds`); and the private parts of paths. Keys are redacted too.
It also searches strings that are JSON and base64 inside strings; it removes a run of base64 that is too long to decode.
Terminal escape sequences neither hide nor split a secret. Redacting twice changes nothing. Errors and manifests give
only the place and the kind of what was found.

`PrivateNames` hides home directories, user names, host names and roots, anywhere in a string.

A root becomes `<root>` (further ones `<root:1>`, …), and a home becomes `<home>`. In the home of another user below
/home, /Users or C:\Users, only the name becomes `<user>`, as a user name by itself does; the machine's name becomes
`<host>`. The longest match wins, so a root inside a home is a root. Escaped (`\/`) and URL-encoded (`%2F`) separators
count.

`ReplayFilter` reduces a bundle to what a replay needs: a list of allowed values, by place and form.

It withholds everything else, so a payload under a new key never passes. It drops unknown keys without naming them,
because a key can be payload too. An allowed value must also have its form: a word, an id, a time, a number, a digest.
File paths become `path:1`, `path:2`, …; the same path always gets the same number.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as NotBase64
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from mulligan.session.bundle.secret_kinds import BLOCKING_KINDS, SECRET_KINDS, START, SecretKind, looks_random, span_of
from mulligan.values.canonical import decode, encode
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import KIB_BYTES

# The repeats are bounded, so that the regex does not read a long run of backslashes again from each of them.
_SEPARATOR = r"(?:\\{0,16}+/|\\{1,16}+|%2[Ff]|%5[Cc])"
_ANY_HOME = re.compile(
    rf"(?:{START}|(?<=-[A-Za-z]))(?P<place>(?:{_SEPARATOR}mnt{_SEPARATOR}[a-z]|[A-Za-z](?::|%3[Aa]))?{_SEPARATOR}(?:home|Users){_SEPARATOR})"
    r"(?P<who>[^\s/\\\"'`%:;,<>|&(){}\[\]*?$#=]{1,64})"
)
_GENERIC = """
    root user users admin administrator ubuntu debian fedora dev developer runner vscode node app test tests
    default guest home codespace gitpod docker container nobody git www-data ec2-user vagrant build builder ci
    main src local localhost server machine desktop laptop shared public python agent assistant system tool
    tools session sessions call calls message messages model content role event events turn claude codex gemini
    opencode mulligan open closed
"""
# Account names that identify nobody and are also ordinary words.
GENERIC_NAMES = frozenset(_GENERIC.split())

_NAME_CHARS = 3
_LONG_NAME_CHARS = 5
_WORD = START.replace("_-]", "]")
_WORD_END = r"(?![A-Za-z0-9])"
_SHORT_WORD = START.replace("_-]", "_]")
_SHORT_WORD_END = r"(?![A-Za-z0-9_])"


@dataclass(frozen=True)
class PrivateNames:
    """The private names of one machine. All are optional; homes in the usual places are found without them."""

    roots: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def hide(self, text: str) -> tuple[str, list[str]]:
        """The text with private names replaced, and the replacements in order of appearance, each once."""
        used: dict[str, None] = {}

        def known(found: re.Match[str]) -> str:
            replacement = self._table[(found.lastindex or 1) - 1][1]
            used[replacement] = None
            return replacement

        def anyone(found: re.Match[str]) -> str:
            used[f"{found['place']}<user>"] = None
            return f"{found['place']}<user>"

        if self._table:
            text = self._known.sub(known, text)
        if "home" in text or "Users" in text:
            text = _ANY_HOME.sub(anyone, text)
        return text, list(used)

    @cached_property
    def _table(self) -> list[tuple[str, str]]:
        """The patterns and their replacements, longest path first."""
        named = [(root, "<root>" if number == 0 else f"<root:{number}>") for number, root in enumerate(self.roots)]
        named += [(home, "<home>") for home in self.homes]
        paths = sorted(((path.rstrip("/\\"), shown) for path, shown in named), key=lambda one: -len(one[0]))
        table = [(_path_pattern(path), shown) for path, shown in paths if path]
        return table + _words(self.users, "<user>") + _words(self.hosts, "<host>")

    @cached_property
    def _known(self) -> re.Pattern[str]:
        return re.compile("|".join(f"({pattern})" for pattern, _ in self._table))


def _path_pattern(path: str) -> str:
    """Matches the path with any separators, and joined by dashes, as some agents name their folders."""
    names = [re.escape(name) for name in re.split(r"[/\\]+", path) if name]
    lead = _SEPARATOR if path[0] in "/\\" else _WORD
    plain = lead + _SEPARATOR.join(names) + r"(?![A-Za-z0-9_-])"
    dashed = "-" + "-".join(names) + _WORD_END
    return f"{plain}|{dashed}" if len(names) > 1 else plain


def _words(words: Iterable[str], shown: str) -> list[tuple[str, str]]:
    """Patterns for names as whole words. Next to a short name `_` counts as a letter, so `max` does not match
    `max_size`."""
    chosen = sorted({word for word in words if len(word) >= _NAME_CHARS and word.lower() not in GENERIC_NAMES})
    return [(_bounded(word), shown) for word in chosen]


def _bounded(word: str) -> str:
    is_long = len(word) >= _LONG_NAME_CHARS
    start, end = (_WORD, _WORD_END) if is_long else (_SHORT_WORD, _SHORT_WORD_END)
    return start + re.escape(word) + end


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
# Fields that are often harmless: their values are removed only if they look random.
DOUBTFUL_FIELDS = frozenset({"token", "auth", "jwt", "session_key", "credential", "signature"})

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
BASE64_MAX_CHARS = 64 * KIB_BYTES
_BASE64_MIN_CHARS = 20
# In lines, as mail, PEM and `base64` have it, with or without an indentation, or in one piece.
_LINE_END = r"(?:\r?\n|(?:\\{1,4}+r)?\\{1,4}+n)[ \t]{0,16}+"
_BASE64_RUN = re.compile(
    rf"(?:[A-Za-z0-9+/_-]{{60,}}+{_LINE_END})++[A-Za-z0-9+/_-]*+={{0,2}}"
    rf"|[A-Za-z0-9+/_-]{{{_BASE64_MIN_CHARS},}}+={{0,2}}"
)
_LINE_BREAK = re.compile(_LINE_END)
_URL_SAFE = str.maketrans("-_", "+/")
# A command to a terminal (a colour, a movement, a title), as it is and as JSON, C and shells spell it.
_ESCAPE = re.compile(
    r"(?:\x1b|\\u001[bB]|\\x1[bB]|\\033|\\e)"
    r"(?:\[[0-9;:<=>?]{0,64}+[ -/]{0,4}+[@-~]"
    r"|[\]PX^_k][^\x07\x1b\\]{0,2048}+(?:\x07|\x1b\\|\\u0007|\\a)"
    r"|[ -/]{1,4}+[0-~]|[=>78cDEHMNOZ])"
    r"|\x9b[0-9;:<=>?]{0,64}+[ -/]{0,4}+[@-~]"
    r"|[\x0e\x0f]"
)
_ESCAPES_BEGIN = ("\x1b", "\\", "\x9b", "\x0e", "\x0f")
_BASE64 = re.compile(r"(?:base64:)?[A-Za-z0-9+/]{16,}+={0,2}\Z")
_REDACTION_MARK = re.compile(r"<redacted:[a-z_0-9]+:\d+>")


@dataclass(frozen=True, slots=True)
class RedactionPolicy:
    """What to remove. `extra_fields` are further sensitive fields; `names` are this machine's private names."""

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


@fast_dataclass(slots=True)
class Redactor:
    """One pass over documents. `entries` lists the redactions in order, each once.

    Without a policy it changes nothing. `form_keys` are the keys of the bundle format, which are never private.
    """

    policy: RedactionPolicy | None
    form_keys: frozenset[str] = frozenset()
    _seen: dict[Redaction, None] = field(default_factory=dict)
    _short: dict[str, tuple[str, list[tuple[str, str]]]] = field(default_factory=dict)

    @property
    def _rules(self) -> RedactionPolicy:
        assert self.policy is not None, "without a policy, no string is checked"
        return self.policy

    @property
    def entries(self) -> list[Redaction]:
        return list(self._seen)

    def note(self, path: str, kind: str, replacement: str, action: str = "replaced") -> None:
        self._seen[Redaction(path, kind, action, replacement)] = None

    def document(self, value: Any, path: str = "$", *, depth: int = 0) -> Any:
        """The value without its secrets; `path` is its place in the document."""
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
            name = key if key in self.form_keys else _free_name(self._text(key, f"{path}.*"), found)
            where = step(path, name)
            if not (describes and isinstance(item, Mapping)) and self._is_secret(key, item):
                found[name] = REDACTED
                if item != REDACTED:
                    self.note(where, "sensitive_field", REDACTED)
            else:
                found[name] = self.document(item, where, depth=depth)
        return found

    def _is_secret(self, name: str, value: Any) -> bool:
        """Whether the whole field is removed. None, true and false are never secrets."""
        if value is None or isinstance(value, bool) or value in ("", [], {}):
            return False
        if self._rules.is_sensitive(name):
            return not (isinstance(value, str) and _REDACTION_MARK.fullmatch(value))
        return _plain(name) in DOUBTFUL_FIELDS and isinstance(value, str) and looks_random(value, least=8)

    def _string(self, text: str, path: str, *, depth: int) -> str:
        if depth < JSON_IN_STRINGS_DEPTH and text[:64].lstrip()[:1] in ("{", "["):
            text = self._inside(text, path, depth=depth)
        return self._text(text, path)

    def _inside(self, text: str, path: str, *, depth: int) -> str:
        """A string that is a JSON document. It is encoded again only if something was removed."""
        try:
            value = decode(text)
            inner = Redactor(self.policy, self.form_keys)
            clean = inner.document(value, path, depth=depth + 1)
            if not inner.entries:
                return text
            rewritten = encode(clean).decode("utf-8")
        except (MulliganError, RecursionError):
            return text
        self._seen |= inner._seen
        return rewritten

    def _hides_text(self, text: str) -> bool:
        """Whether it is base64 of a text that contains a secret or a private name."""
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
        """The redacted text and its replacements. Results for short texts are cached, because they repeat often."""
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

    With `names`, base64 that contains one of them is removed too.
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
    """The kind of a secret in the text; None if there is none."""
    return next((name for _, _, name in _spans(text, BLOCKING_KINDS)), None)


def refuse_secrets(document: Any, *, doing: str) -> None:
    """Raise `unredacted_secret` if the document contains a secret of a known shape. The error does not show it."""
    for path, text in strings_in(document):
        name = first_secret(text)
        if name is not None:
            where = without_secrets(path)[0]
            raise fault(
                "unredacted_secret",
                f"{doing} is refused: the text at {where} looks like a secret ({name}). Remove it first.",
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
    """A key that is not taken. Two keys may be redacted to the same text, and both members must stay."""
    if name not in taken:
        return name
    return next(free for number in range(2, len(taken) + 3) if (free := f"{name}#{number}") not in taken)


def strings_in(value: Any, path: str = "$") -> Iterator[tuple[str, str]]:
    """Every string of a document, keys included, with its path."""
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
    """The secrets in a text. Results for short texts (keys, roles, names) are cached, because they repeat often."""
    if len(text) < _SECRET_MIN_CHARS:
        return ()
    return _spans_of_short(text, tuple(kinds)) if len(text) <= _SHORT_CHARS else _all_spans(text, kinds)


@lru_cache(maxsize=16_384)
def _spans_of_short(text: str, kinds: tuple[SecretKind, ...]) -> tuple[Span, ...]:
    return tuple(_all_spans(text, kinds))


def _base64_spans(text: str, kinds: Sequence[SecretKind], names: PrivateNames | None) -> Iterator[Span]:
    """Runs of base64 whose plain text has a secret, and runs that are too long to decode."""
    if len(text) < _BASE64_MIN_CHARS:
        return
    for found in _BASE64_RUN.finditer(text):
        start, end = found.span()
        if end - start > BASE64_MAX_CHARS:
            yield start, end, "long_base64"
        elif any(_holds_secret(plain, kinds, names) for plain in _plain_texts(found[0])):
            yield start, end, "base64_text"


def _plain_texts(run: str) -> Iterator[str]:
    """Possible plain texts of a base64 run. Its first characters may belong to a word that touches it.

    Mulligan reads the lines together and each line alone: the line above may be a digest that is no part of it.
    """
    lines = _LINE_BREAK.split(run.rstrip("="))
    for symbols in ["".join(lines), *(lines if len(lines) > 1 else ())]:
        symbols = symbols.translate(_URL_SAFE)
        for skipped in range(4):
            whole = symbols[skipped:]
            whole = whole[:-1] if len(whole) % 4 == 1 else whole
            yield b64decode(whole + "=" * (-len(whole) % 4)).decode("utf-8", "replace")


def _holds_secret(plain: str, kinds: Sequence[SecretKind], names: PrivateNames | None) -> bool:
    """Whether a decoded text has a secret. Binary bytes can look like anything, so there only known shapes count."""
    is_text = "\ufffd" not in plain
    chosen = kinds if is_text else [kind for kind in kinds if not kind.heuristic]
    if next(iter(_spans(plain, chosen)), None) is not None:
        return True
    return is_text and names is not None and bool(names.hide(plain)[1])


def _all_spans(text: str, kinds: Sequence[SecretKind]) -> Iterator[Span]:
    """The spans in the text as written, and in the text as a terminal shows it."""
    yield from _spans_as_written(text, kinds)
    if any(begin in text for begin in _ESCAPES_BEGIN):
        yield from _spans_as_shown(text, kinds)


def _spans_as_shown(text: str, kinds: Sequence[SecretKind]) -> Iterator[Span]:
    """Scan a copy without escape sequences, and map the spans back to the text."""
    pieces: list[str] = []
    # Where in the copy each piece begins, and in the text.
    copied: list[int] = []
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
    """Scan window by window. A match that reaches a window's end is matched again over a longer part."""
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
            # A rejected match may overlap a real one that begins later.
            at = max(first, found.start() + 1)


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Overlapping spans become one, named by the kind that the table lists first, so no part of a secret stays."""
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


WITHHELD = "[withheld]"
PAYLOAD = "prompt_or_tool_payload"

_WORD_FORM = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,63}\Z|\[withheld\]\Z")
_ID_FORM = re.compile(r"[A-Za-z0-9<][A-Za-z0-9_.:@#/+<>=-]{0,255}\Z|\[withheld\]\Z")
_TIME_FORM = re.compile(r"\d{4}-\d\d-\d\dT[0-9:.]{5,20}(?:Z|[+-]\d\d:\d\d)\Z")
_DIGEST_FORM = re.compile(r"sha256:[0-9a-f]{64}\Z")
_MARK_FORM = re.compile(r"<[a-z]{1,16}(?::\d{1,6})?>\Z|\[redacted\]\Z")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is allowed if it has its form."""

    fits: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Hidden:
    """A value that is never allowed. `dropped`: no text can replace it, so its key is removed too."""

    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Emptied:
    """A list or an object that must exist and is emptied."""


@dataclass(frozen=True, slots=True)
class FilePath:
    """A file path, which becomes a number."""


Shape: TypeAlias = "Leaf | Hidden | Emptied | FilePath | Mapping[str, Shape] | list[Shape]"


def _matching(form: re.Pattern[str]) -> Leaf:
    return Leaf(lambda value: isinstance(value, str) and form.match(value) is not None)


WORD, ID, TIME = _matching(_WORD_FORM), _matching(_ID_FORM), _matching(_TIME_FORM)
DIGEST, MARK = _matching(_DIGEST_FORM), _matching(_MARK_FORM)
NUMBER = Leaf(lambda value: isinstance(value, int | float))
TEXT, DROPPED, EMPTIED, PATH = Hidden(), Hidden(dropped=True), Emptied(), FilePath()


def _each(shape: Shape, names: str) -> dict[str, Shape]:
    """Several members of one shape."""
    return dict.fromkeys(names.split(), shape)


_TOOL_CALL: Shape = {
    **_each(ID, "id call_id name"),
    **_each(TEXT, "arguments input args"),
    "type": WORD,
    "index": NUMBER,
    "function": {"name": ID, "arguments": TEXT},
}
_BLOCK: Shape = {
    **_each(WORD, "type visibility"),
    **_each(ID, "id tool_use_id name"),
    **_each(TEXT, "text input content thinking source data signature"),
    "is_error": NUMBER,
}
MESSAGE: Shape = {
    **_each(WORD, "role visibility"),
    **_each(ID, "name tool_call_id tool_use_id id messageId"),
    **_each(TEXT, "reasoning text"),
    **_each([_TOOL_CALL], "tool_calls native_tool_calls"),
    "is_error": NUMBER,
    "content": [_BLOCK],
    "metadata": {"live_session": {"client_id": ID, "mode": WORD, "source": WORD}},
}
_EVENT_FACTS: Shape = {
    **_each(WORD, "action mode reason status strategy mount_mode"),
    **_each(ID, "client_id request_id previous_controller_id active_controller_id"),
    **_each(NUMBER, "version chars archived_messages kept_messages shortened_messages"),
}
_EVENT: Shape = {
    **_each(WORD, "kind role visibility"),
    "id": ID,
    "at": TIME,
    "text": TEXT,
    "metadata": _EVENT_FACTS,
    "message": MESSAGE,
}
_SOURCE: Shape = {
    **_each(WORD, "schema kind agent"),
    "session_id": ID,
    "label": TEXT,
    "provenance": EMPTIED,
}
_FACTS: Shape = {
    **_each(TEXT, "system_prompt summary"),
    **_each(ID, "pinned_model provider model"),
    **_each(DROPPED, "scratchpad pinned_reasoning_policy"),
    "tool_format": WORD,
    "scratchpad_version": NUMBER,
    "source": _SOURCE,
}
_ENTRY: Shape = {
    **_each(NUMBER, "size mode mtime_ns"),
    "link_group": ID,
    "kind": WORD,
    "digest": DIGEST,
    "target": TEXT,
    "xattrs": DROPPED,
}
_CHANGE: Shape = {**_each(PATH, "path from origin"), "kind": WORD, "before": _ENTRY, "after": _ENTRY}
_RECEIPT: Shape = {
    **_each(WORD, "status error_code strategy sandbox"),
    **_each(NUMBER, "exit_code created written_bytes started_at_ns ended_at_ns replacements"),
}
_RECORD: Shape = {
    **_each(ID, "call session turn root workspace label tool scope by"),
    **_each(WORD, "status reason verb"),
    **_each(NUMBER, "observed wseq"),
    "prompt": TEXT,
    "cause": {"verb": WORD, "of": [ID]},
    "changes": [_CHANGE],
    "effects": [{"effect": WORD, "params": TEXT, "receipt": _RECEIPT}],
    "coverage": [{"path": PATH, "reason": WORD, "blob_ref": DIGEST}],
}
_SECTION: Shape = {
    **_each(WORD, "label scope location"),
    "id": ID,
    "summary": TEXT,
    "assets": EMPTIED,
    "messages": [MESSAGE],
    "events": [_EVENT],
    "places": [{"id": ID, "event": NUMBER}],
    "metadata": _FACTS,
}
_CALL: Shape = {
    **_each(ID, "tool_name tool_use_id call_id"),
    **_each(NUMBER, "is_rejected duration_ms iteration"),
    "args_hash": DIGEST,
    "status": WORD,
    "timestamp": TIME,
    "result": {"message": NUMBER, "digest": DIGEST, "bytes": NUMBER},
}
_RUN: Shape = {
    **_each(TIME, "started_at finished_at"),
    **_each(NUMBER, "messages events calls"),
    "session_id": ID,
    "status": WORD,
}
_REPLAY: Shape = {
    "replay_fixture": {
        "_type": WORD,
        "message_digests": [DIGEST],
        "tool_results": [{"tool_use_id": ID, "args_hash": DIGEST, "result_digest": DIGEST}],
    },
    "run_record": _RUN,
    "verification_outcomes": [{"check": WORD, "ok": NUMBER}],
    "event_log_pointers": [{"topic": ID, "events": NUMBER}],
    "transitions": [{"kind": WORD, "at": TIME, "event": NUMBER}],
    "checkpoints": [{"turn": ID, "at": TIME, "ended_at": TIME}],
    "trace_spans": [{**_each(ID, "span_id parent_id name"), **_each(WORD, "kind status"), **_each(TIME, "start end")}],
    "deterministic_events": [{"kind": WORD, "at": TIME, "payload": _RECORD}],
}
BUNDLE: Shape = {
    **_each(EMPTIED, "attachments metadata"),
    "_type": WORD,
    "schema_version": NUMBER,
    "created_at": TIME,
    "producer": {"name": WORD, "version": ID, "schema_id": ID},
    "source": {
        **_each(WORD, "kind status"),
        **_each(ID, "session_id root_session_id parent_session_id"),
        **_each(TIME, "started_at finished_at"),
        **_each(NUMBER, "child_count branched_at_event_index"),
        "task": TEXT,
    },
    "runtime": {
        **_each(EMPTIED, "metadata usage"),
        "mulligan_version": ID,
        "provider_models": [{"provider": ID, "model": ID}],
    },
    "workspace": {
        "primary": MARK,
        "anchored_at": TIME,
        "policy": WORD,
        "additional_roots": [{"path": MARK, "mount_mode": WORD, "mounted_at": TIME}],
    },
    "transcript": {"sections": [_SECTION]},
    "tools": {"schemas": EMPTIED, "calls": [_CALL]},
    "permissions": [{**_each(WORD, "kind source"), **_each(ID, "request_id agent"), "payload": TEXT}],
    "replay": _REPLAY,
    "content": {"encoding": WORD, "blobs": [{"digest": DIGEST, "size": NUMBER, "missing": NUMBER}]},
}


def _keys(shape: Shape) -> set[str]:
    if isinstance(shape, list):
        return _keys(shape[0])
    if not isinstance(shape, Mapping):
        return set()
    return set(shape) | {key for inner in shape.values() for key in _keys(inner)}


# The keys of the bundle format.
FORM_KEYS = frozenset(_keys(BUNDLE))


@fast_dataclass(slots=True)
class ReplayFilter:
    """One pass over a bundle. It notes what it withholds in the redactor's manifest."""

    redactor: Redactor
    _numbers: dict[str, str] = field(default_factory=dict)

    def apply(self, value: Any, shape: Shape, path: str = "$") -> Any:
        if value is None:
            return None
        if isinstance(shape, FilePath):
            return self._path(value, path)
        if isinstance(shape, Leaf):
            return value if shape.fits(value) else self._withhold(value, path)
        if isinstance(shape, Mapping) and isinstance(value, Mapping):
            return self._members(value, shape, path)
        if isinstance(shape, list) and isinstance(value, Sequence) and not isinstance(value, str):
            return [self.apply(item, shape[0], f"{path}[{index}]") for index, item in enumerate(value)]
        return self._withhold(value, path)

    def _members(self, value: Mapping[str, Any], shape: Mapping[str, Shape], path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in value.items():
            known = shape.get(key)
            if known is None:
                self._note(f"{path}.*")
            elif isinstance(known, Hidden) and known.dropped:
                self._note(step(path, key))
            elif isinstance(known, Emptied):
                found[key] = self._emptied(item, step(path, key))
            else:
                found[key] = self.apply(item, known, step(path, key))
        return found

    def _emptied(self, value: Any, path: str) -> Any:
        if value:
            self._note(path)
        return [] if isinstance(value, list) else {}

    def _note(self, path: str) -> None:
        self.redactor.note(path, PAYLOAD, WITHHELD, "withheld")

    def _withhold(self, value: Any, path: str) -> Any:
        if value in ("", WITHHELD):
            return value
        self._note(path)
        return WITHHELD

    def _path(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or re.fullmatch(r"path:\d+", value):
            return str(value) if isinstance(value, str) else str(self._withhold(value, path))
        shown = self._numbers.setdefault(value, f"path:{len(self._numbers) + 1}")
        self.redactor.note(path, PAYLOAD, shown, "withheld")
        return shown
