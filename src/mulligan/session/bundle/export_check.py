"""The last check before an export is written: does anything in it look like a secret?

This module shares no code and no table with the redaction, so that one mistake cannot be in both. It knows fewer kinds,
those whose shape leaves no doubt, and does not look at what comes before them. It looks for literal prefixes and counts
the characters that follow, so its time grows no faster than the text. It reads every string of the document in four
ways: as it is, without terminal escapes, without JSON's escapes, and as the bytes that its base64 encodes.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any

from mulligan.values.errors import fault

_UPPER = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = b"0123456789"
_ALNUM = _UPPER + _UPPER.lower() + _DIGITS
_WORD = _ALNUM + b"_"
_URL64 = _WORD + b"-"
_BASE64 = _ALNUM + b"+/="

_PREFIXES: tuple[tuple[str, tuple[bytes, ...], bytes, int], ...] = (
    ("github", (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"), _WORD, 36),
    ("gitlab", (b"glpat-",), _URL64, 20),
    ("slack", (b"xoxb-", b"xoxp-", b"xoxa-", b"xoxr-", b"xoxs-", b"xapp-1-"), _URL64, 20),
    ("aws", (b"AKIA", b"ASIA"), _UPPER + _DIGITS, 16),
    ("google", (b"AIza",), _URL64, 35),
    ("google", (b"GOCSPX-", b"ya29."), _URL64, 28),
    ("anthropic", (b"sk-ant-",), _URL64, 40),
    ("openai", (b"sk-proj-", b"sk-svcacct-", b"sk-admin-"), _URL64, 40),
    ("openai", (b"sk-",), _ALNUM, 48),
    ("stripe", (b"sk_live_", b"sk_test_", b"rk_live_", b"rk_test_"), _ALNUM, 24),
    ("npm", (b"npm_",), _ALNUM, 36),
    ("pypi", (b"pypi-AgE",), _URL64, 50),
    ("huggingface", (b"hf_",), _ALNUM, 34),
    ("docker", (b"dckr_pat_", b"dckr_oat_"), _URL64, 27),
    ("vault", (b"hvs.", b"hvb."), _URL64, 40),
    ("digitalocean", (b"dop_v1_", b"doo_v1_", b"dor_v1_"), b"abcdef" + _DIGITS, 64),
    ("mulligan", (b"mlg_",), _URL64, 43),
)
# Where a name could have the shape, a key has digits and letters of both cases too.
_MAY_BE_A_NAME = frozenset({"gitlab", "openai"})

_JWT_PART_MAX_BYTES = 8_000
_RUN_MAX_BYTES = 65_536
_RUN = re.compile(rb"[A-Za-z0-9+/_-]{24,}+")
_TERMINAL = re.compile(rb"(?:\x1b|\\u001[bB]|\\x1[bB]|\\033|\\e)\[[0-9;:?]{0,64}+[A-Za-z]")
_JSON_ESCAPES = ((b"\\n", b"\n"), (b"\\r", b"\r"), (b"\\t", b"\t"), (b"\\/", b"/"), (b'\\"', b'"'), (b"\\\\", b"\\"))
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def check_export(document: Mapping[str, Any], *, doing: str) -> None:
    """Raise `unredacted_secret` if a string of the document contains a secret. The error does not show it."""
    for path, text in _strings(document, "$"):
        kind = secret_in(text)
        if kind is not None:
            where = path if secret_in(path) is None else "$"
            words = f"{doing} is refused: the text at {where} looks like a secret ({kind}). Remove it first."
            raise fault("unredacted_secret", words, path=where, kind=kind)


def secret_in(text: str) -> str | None:
    """The kind of a secret in the text, if there is one."""
    data = text.encode("utf-8", "surrogatepass")
    return next((kind for view in _views(data) if (kind := _kind_in(view)) is not None), None)


def _strings(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Every string, keys too. The walk keeps its own list of what is left, so no document is too deep for it."""
    left: list[tuple[str, object]] = [(path, value)]
    while left:
        where, one = left.pop()
        if isinstance(one, str):
            yield where, one
        elif isinstance(one, Mapping):
            for key, item in one.items():
                yield where, key
                left.append((f"{where}.{key}", item))
        elif isinstance(one, list | tuple):
            left += [(f"{where}[{index}]", item) for index, item in enumerate(one)]


def _views(data: bytes) -> Iterator[bytes]:
    yield data
    if b"\\" in data or b"\x1b" in data:
        shown = _TERMINAL.sub(b"", data)
        yield shown
        for escape, meant in _JSON_ESCAPES:
            shown = shown.replace(escape, meant)
        yield shown
    # Tools write base64 in lines, and a secret may begin in one and end in the next.
    for run in (*_RUN.findall(data), *(_RUN.findall(data.translate(None, b"\r\n \t")) if b"\n" in data else ())):
        symbols = run[:_RUN_MAX_BYTES].translate(_URL_SAFE)
        for skipped in range(4):
            left = symbols[skipped:]
            left = left[:-1] if len(left) % 4 == 1 else left
            yield b64decode(left + b"=" * (-len(left) % 4))


def _kind_in(data: bytes) -> str | None:
    for kind, prefixes, alphabet, least in _PREFIXES:
        for prefix in prefixes:
            for after in _ends_of(prefix, data):
                key = data[after : after + least]
                if len(key) == least and not key.strip(alphabet) and _is_random(kind, key):
                    return kind
    if _has_private_key(data):
        return "private_key"
    return "jwt" if _has_jwt(data) else None


def _ends_of(literal: bytes, data: bytes) -> Iterator[int]:
    at = data.find(literal)
    while at >= 0:
        yield at + len(literal)
        at = data.find(literal, at + 1)


def _is_random(kind: str, key: bytes) -> bool:
    if kind not in _MAY_BE_A_NAME:
        return True
    return key.upper() != key and key.lower() != key and len(key.translate(None, _DIGITS)) < len(key)


def _has_private_key(data: bytes) -> bool:
    """Its first line, and the beginning of what follows."""
    for after in _ends_of(b"PRIVATE KEY", data):
        begin = data.rfind(b"-----BEGIN ", max(0, after - 64), after)
        rest = data[after : after + 64].removeprefix(b" BLOCK")
        body = rest.removeprefix(b"-----").lstrip(b" \r\n\t\\nrt\"',+")[:16]
        if begin >= 0 and rest.startswith(b"-----") and len(body) == 16 and not body.strip(_BASE64):
            return True
    return False


def _has_jwt(data: bytes) -> bool:
    """Three parts between dots, of which the first two begin as JSON objects do."""
    for after in _ends_of(b".eyJ", data):
        head = data[max(0, after - 4 - _JWT_PART_MAX_BYTES) : after - 4]
        head = head[len(head.rstrip(_URL64)) :]
        body = data[after : after + _JWT_PART_MAX_BYTES]
        signature = body.lstrip(_URL64)
        has_parts = head.rfind(b"eyJ", 0, -12) >= 0 and len(body) - len(signature) >= 12
        is_signed = signature.startswith(b".") and len(signature) >= 17 and not signature[1:17].strip(_URL64)
        if has_parts and is_signed:
            return True
    return False
