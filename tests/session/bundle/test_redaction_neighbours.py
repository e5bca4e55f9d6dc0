"""A secret is found whatever touches it, and the last check before an export finds what a redaction misses."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mulligan
from mulligan.session.bundle import redaction
from mulligan.session.bundle import redaction as private_names
from mulligan.session.bundle.export_check import check_export, secret_in
from mulligan.session.bundle.redaction import BASE64_MAX_CHARS, PrivateNames, RedactionPolicy, Redactor
from mulligan.values.errors import MulliganError
from tests.session.bundle.example_secrets import BY_SHAPE
from tests.session.bundle.test_redaction import parse

DISTINCTIVE = (
    *("github_classic", "github_app", "github_fine_grained", "slack_bot", "slack_app", "aws_key_id", "gitlab"),
    *("huggingface", "google_api", "google_client_secret", "npm", "pypi", "openai_classic", "openai_project"),
    *("anthropic", "stripe", "docker", "vault", "digitalocean", "mulligan", "jwt"),
)
# The redaction knows them, and the last check does not.
OTHERS = ("databricks", "hubspot", "square", "elevenlabs", "azure_client")
NEIGHBOURS = (
    *(
        "",
        "a",
        "Z",
        "7",
        "-",
        "_",
        "-p",
        "x" * 9_000,
        "TOKEN_",
        "x9",
        '"',
        "'",
        "=",
        ":",
        "/",
        "%3D",
        "\\n",
        "\\u0022",
        "é",
        "秘",
    ),
    *("\x1b[32m", "\x1b[1;38;5;10m", "\x1b[0m", "\\u001b[32m", "\\x1b[31m", "\\033[0m", "\x1b]0;title\x07"),
)
neighbours = st.sampled_from(NEIGHBOURS)


def redacted(value: Any) -> tuple[Any, int]:
    names = PrivateNames(roots=("/work/project",), homes=("/home/someone",), users=("someone",), hosts=("computer",))
    redactor = Redactor(RedactionPolicy(names=names))
    return redactor.document(value), len(redactor.entries)


def seen(value: Any) -> str:
    """A document as a person reads it: without escapes, and with what base64 stands for."""
    text = json.dumps(value, ensure_ascii=False)
    plain = re.sub(r"(?:\x1b|\\+u001b|\\+x1b|\\+033)\[[0-9;]*m", "", text)
    runs = re.findall(r"[A-Za-z0-9+/_-]{16,}", text)
    data = [base64.urlsafe_b64decode(run.replace("+", "-").replace("/", "_")[: len(run) // 4 * 4]) for run in runs]
    return "\n".join([text, plain, *(one.decode("latin-1") for one in data)])


@pytest.mark.req("HS11.any_neighbour")
@pytest.mark.parametrize("before", NEIGHBOURS)
@pytest.mark.parametrize("kind", (*DISTINCTIVE, *OTHERS))
def test_a_secret_is_removed_after_any_prefix(kind: str, before: str) -> None:
    secret = BY_SHAPE[kind](Random(f"{kind} {before}"))
    clean, count = redacted(f"run {before}{secret}\x1b[0m now")
    assert secret not in seen(clean) and count


@pytest.mark.req("HS11.any_neighbour")
@settings(max_examples=60)
@given(
    st.sampled_from(DISTINCTIVE),
    neighbours,
    neighbours,
    st.integers(0, 2**32),
    st.sampled_from([0, 1, 2, 3, 4]),
    st.data(),
)
def test_a_secret_is_removed_from_any_surrounding_text(
    kind: str, before: str, after: str, seed: int, form: int, data: st.DataObject
) -> None:
    secret = BY_SHAPE[kind](Random(seed))
    at = data.draw(st.integers(0, len(secret)))
    texts = [
        f"{before}{secret}{after}",
        f"{secret[:at]}\x1b[1m{secret[at:]}",
        "see " + base64.b64encode(f"config {before}{secret}{after}".encode()).decode() + " there",
        "abc"[: at % 4] + base64.urlsafe_b64encode(f"{before}{secret}{after} and more".encode()).decode(),
        "log " + json.dumps(json.dumps({"line": f"{before}{secret}{after}"})),
    ]
    clean, count = redacted({"content": texts[form]})
    shown = seen(clean)
    assert secret not in shown and count
    assert redacted(clean)[0] == clean
    assert secret_in(json.dumps(clean)) is None


@pytest.mark.req("HS11.any_neighbour")
@pytest.mark.parametrize(
    "command",
    [
        "\x1b%G",
        "\x1b(B",
        "\x1b[m\x0f",
        "\x0e",
        "\x1b*0",
        "\x1bPq#0\x1b\\",
        "\x1bk top\x1b\\",
        "\x1b_Ga=q\x1b\\",
        "\x1b^x\x07",
    ],
    ids=lambda command: repr(command)[1:-1],
)
@pytest.mark.parametrize("kind", DISTINCTIVE)
def test_a_secret_is_taken_out_if_any_command_to_a_terminal_is_in_it(kind: str, command: str) -> None:
    secret = BY_SHAPE[kind](Random(f"{kind} {command}"))
    for at in (1, len(secret) // 2):
        clean, count = redacted(f"run {secret[:at]}{command}{secret[at:]} now")
        assert secret not in clean.replace(command, "") and count


@pytest.mark.req("HS11.base64_runs")
@pytest.mark.parametrize("before", ["-", "_", "-p", "KEY_"])
def test_base64_in_lines_is_read_whatever_stands_before_it(before: str) -> None:
    secret = "dop_v1_" + "9f86d081" * 8
    lines = base64.encodebytes(f"{'.' * 20}{secret}".encode()).decode()
    assert redacted(before + lines)[0] == f"<redacted:base64_text:{len(before + lines) - 1}>\n"


@pytest.mark.req("HS11.base64_runs")
def test_base64_is_searched_up_to_a_limit_and_goes_whole_beyond_it() -> None:
    secret = BY_SHAPE["github_classic"](Random(1))
    harmless = base64.b64encode(b"The quick brown fox. " * 100).decode()
    assert redacted(f"see {harmless} there")[0] == f"see {harmless} there"
    room = BASE64_MAX_CHARS // 4 * 3 - len(secret)
    longest = base64.b64encode(b"." * room + secret.encode()).decode()
    assert len(longest) == BASE64_MAX_CHARS
    assert redacted(f"a {longest} b")[0] == f"a <redacted:base64_text:{len(longest)}> b"
    longer = base64.b64encode(b"." * (room + 300)).decode()
    assert redacted(f"a {longer} b")[0] == f"a <redacted:long_base64:{len(longer)}> b"
    lines = "\n".join(re.findall(".{1,76}", base64.b64encode(b"." * 500 + secret.encode() + b"." * 500).decode()))
    assert secret not in seen(redacted(f"-\n{lines}\n-")[0].replace("\n", ""))
    assert "redacted:base64_text" in redacted(f"-\n{lines}\n-")[0]


@pytest.mark.req("HS11.base64_runs")
@pytest.mark.parametrize("width", [60, 64, 76, 120])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\n    ", "\\n"], ids=["lf", "crlf", "indented", "escaped"])
def test_base64_in_lines_is_read_as_one_text(ends: str, width: int) -> None:
    """Wherever the break is, also in two lines, and also below a line that only looks like base64."""
    secret = "dop_v1_" + "9f86d081" * 8
    for before in range(width):
        whole = base64.b64encode(f"{'.' * before} {secret} end".encode()).decode()
        lines = ends.join(whole[at : at + width] for at in range(0, len(whole), width))
        for text in (lines, f"{'a1' * 32}\n{lines}"):
            assert "redacted" in redacted(text)[0], (before, text)
            assert ends == "\\n" or secret_in(text) == "digitalocean"


@pytest.mark.req("HS11.other_code")
@pytest.mark.parametrize("kind", DISTINCTIVE)
@pytest.mark.parametrize("before", ["", "a", "TOKEN_", "\x1b[32m"])
def test_the_last_check_finds_a_secret_by_itself(kind: str, before: str) -> None:
    secret = BY_SHAPE[kind](Random(kind))
    hidden = base64.b64encode(f"{before}{secret}".encode()).decode()
    split = f"{secret[:9]}\x1b[1m{secret[9:]}"
    for document in ({"a": [f"{before}{secret}"]}, {f"{before}{secret}": 1}, {"a": {"b": hidden}}, {"a": split}):
        with pytest.raises(MulliganError) as caught:
            check_export(document, doing="This export")
        assert caught.value.code == "unredacted_secret"
        assert secret not in f"{caught.value} {caught.value.details}"


@pytest.mark.req("HS11.other_code")
def test_the_last_check_shares_nothing_with_the_redaction() -> None:
    import ast
    import inspect

    from mulligan.session.bundle import export_check

    imports = [one for one in ast.walk(ast.parse(inspect.getsource(export_check))) if isinstance(one, ast.ImportFrom)]
    assert {one.module for one in imports if "mulligan" in str(one.module)} == {"mulligan.values.errors"}


@pytest.mark.req("HS11.any_neighbour", "HS11.other_code")
def test_a_sanitized_export_of_glued_secrets_holds_none_of_them(tmp_path: Any) -> None:
    found = [BY_SHAPE[kind](Random(kind)) for kind in DISTINCTIVE]
    with mulligan.open(tmp_path, store=str(tmp_path.parent / "store")) as opened:
        session = opened.session("s")
        for secret in found:
            for before in ("\x1b[32m", "-p", "TOKEN_", "x", "7"):
                session.inject({"role": "user", "content": f"use {before}{secret}"})
        text = json.dumps(session.export(), ensure_ascii=False)
    assert [secret for secret in found if secret in text] == []


@pytest.mark.req("S3.bundle.sanitized")
@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"user": "ann", "password": "!?!"}),
        json.dumps([json.dumps({"cookie": "!?!"})]),
        base64.b64encode(b"pwd=!?!?!?!?").decode(),
    ],
    ids=["a field of JSON in a string", "JSON in JSON in a string", "base64 that is too short for a key"],
)
def test_an_export_takes_out_what_only_its_form_shows_to_be_a_secret(tmp_path: Path, content: str) -> None:
    with mulligan.open(tmp_path, store=tmp_path.parent / "store") as opened:
        session = opened.session("s")
        session.inject({"role": "user", "content": content})
        text = json.dumps(session.export(), ensure_ascii=False)
    assert "!?!" not in text
    assert content not in text


@pytest.mark.req("HS11.linear_time")
def test_no_repeat_outside_the_table_of_kinds_is_without_a_bound() -> None:
    """From each place where a search begins, these patterns read a bounded number of characters."""
    names = PrivateNames(roots=("/work/project",), homes=("/home/someone",), users=("someone",))
    patterns = [private_names._ANY_HOME, names._known, redaction._ESCAPE]
    assert max(bound for one in patterns for bound in repeats(parse(one.pattern))) <= 2_048


def repeats(node: Any) -> Iterator[int]:
    """The most times that each repeat of a pattern may repeat."""
    for operation, argument in node:
        name = str(operation)
        if name.endswith("_REPEAT"):
            yield int(argument[1])
            yield from repeats(argument[2])
        elif name in ("ASSERT", "ASSERT_NOT", "SUBPATTERN"):
            yield from repeats(argument[-1])
        elif name == "ATOMIC_GROUP":
            yield from repeats(argument)
        elif name == "BRANCH":
            for branch in argument[1]:
                yield from repeats(branch)


@pytest.mark.req("HS11.linear_time")
@pytest.mark.parametrize("character", list('\\aA0-_/=% \n\x1b[.:"é'))
def test_a_long_run_of_one_character_is_redacted(character: str) -> None:
    """Before repeats were bounded, 300 000 backslashes did not end."""
    text = character * 300_000
    clean, _ = redacted(text)
    assert clean == text or clean.startswith("<redacted:long_base64:")
