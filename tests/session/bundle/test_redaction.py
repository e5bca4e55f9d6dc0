"""Secrets go, look-alikes stay, and nothing that was found is ever shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mulligan.session.bundle.redaction import (
    OVERLAP_CHARS,
    REDACTED,
    WINDOW_CHARS,
    PrivateNames,
    RedactionPolicy,
    Redactor,
    first_secret,
    refuse_secrets,
    without_secrets,
)
from mulligan.session.bundle.secret_kinds import BLOCKING_KINDS, SECRET_KINDS, SecretKind, span_of
from mulligan.values.errors import MulliganError
from tests.session.bundle.example_secrets import BY_SHAPE, IN_CONTEXT, Planted, look_alikes, secrets

CORPUS = list(secrets(7))

PLACES: dict[str, Callable[[str], Any]] = {
    "message": lambda text: {"role": "user", "content": text},
    "blocks": lambda text: {"role": "user", "content": [{"type": "text", "text": text}]},
    "tool argument": lambda text: {"tool_calls": [{"function": {"name": "run", "arguments": {"command": text}}}]},
    "arguments as text": lambda text: {"function": {"arguments": json.dumps({"command": text})}},
    "output": lambda text: {"role": "tool", "content": f"$ run\n{text}\nexit 0\n"},
    "file content": lambda text: {"path": "notes.txt", "content": f"# a file\n{text}\n# end\n"},
    "environment": lambda text: "HOME=/x\nLANG=C\n" + text + "\nPATH=/bin\n",
    "url": lambda text: f"see https://example.com/a and {text}",
    "nested": lambda text: {"a": {"b": [[{"c": text}]]}},
    "json in a string": lambda text: json.dumps({"a": [{"note": text}]}),
    "json in json in a string": lambda text: json.dumps({"a": json.dumps({"note": text})}),
    "json in a log line": lambda text: "12:00 INFO body=" + json.dumps({"body": text}) + " done",
    "escaped twice in a log line": lambda text: "12:00 INFO " + json.dumps(json.dumps({"body": text})) + " done",
    "key": lambda text: {text: 1},
}


def redacted(value: Any, policy: RedactionPolicy | None = None) -> tuple[Any, list[dict[str, str]]]:
    redactor = Redactor(policy or RedactionPolicy())
    return redactor.document(value), [entry.to_json() for entry in redactor.entries]


def texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *texts_in(item))]
    return [text for item in value for text in texts_in(item)] if isinstance(value, list) else []


def survives(planted: Planted, value: Any) -> bool:
    """As it is, or as JSON writes it."""
    forms = [form for part in planted.parts for form in (part, json.dumps(part)[1:-1])]
    return any(form in text for form in forms for text in (*texts_in(value), json.dumps(value)))


class TestTheCorpus:
    def test_it_is_as_large_as_it_should_be(self) -> None:
        assert len(CORPUS) >= 200
        assert len({planted.kind for planted in CORPUS}) >= 25
        assert len({text for _, text in look_alikes(7)}) >= 500

    @pytest.mark.parametrize("place", PLACES)
    def test_no_secret_survives(self, place: str) -> None:
        found = [planted for planted in CORPUS if survives(planted, redacted(PLACES[place](planted.text))[0])]
        assert [planted.kind for planted in found] == []

    @pytest.mark.parametrize("place", PLACES)
    def test_each_replacement_is_in_the_manifest(self, place: str) -> None:
        for planted in CORPUS:
            value, entries = redacted(PLACES[place](planted.text))
            assert entries, planted.kind
            assert all(set(entry) == {"path", "class", "action", "replacement"} for entry in entries)
            assert all(any(entry["replacement"] in text for text in texts_in(value)) for entry in entries)
            assert not survives(planted, entries)

    def test_harmless_things_stay(self) -> None:
        touched = [kind for kind, text in look_alikes(7) if redacted(text)[1]]
        assert len(touched) <= 0.02 * len(list(look_alikes(7))), touched

    @settings(max_examples=60)
    @given(st.integers(0, 2**32), st.sampled_from(sorted(PLACES)))
    @example(47348550, "arguments as text")  # a password that begins with `oS+`
    def test_any_seed_does(self, seed: int, place: str) -> None:
        for planted in secrets(seed, each=1):
            assert not survives(planted, redacted(PLACES[place](planted.text))[0]), planted.kind

    @pytest.mark.parametrize("place", PLACES)
    def test_redacting_twice_changes_nothing(self, place: str) -> None:
        for planted in CORPUS:
            once, _ = redacted(PLACES[place](planted.text))
            assert redacted(once) == (once, [])

    def test_every_kind_by_shape_is_one_that_stops_an_export(self) -> None:
        shapes = [planted for planted in CORPUS if planted.kind in BY_SHAPE]
        assert [planted.kind for planted in shapes if first_secret(planted.secret) is None] == []
        assert {kind.name for kind in BLOCKING_KINDS if kind.heuristic} == set()
        assert set(IN_CONTEXT).isdisjoint(BY_SHAPE)


class TestFields:
    @pytest.mark.parametrize(
        "name",
        [
            "Authorization",
            "api_key",
            "apiKey",
            "x-api-key",
            "clientSecret",
            "DB_PASSWORD",
            "set-cookie",
            "ssh_private_key",
        ],
    )
    def test_a_field_with_a_secret_name_is_removed_whole(self, name: str) -> None:
        value, entries = redacted({"a": [{name: "abc"}]})
        assert value == {"a": [{name: REDACTED}]}
        assert [(one["class"], one["action"], one["replacement"]) for one in entries] == [
            ("sensitive_field", "replaced", REDACTED)
        ]

    @pytest.mark.parametrize("nothing", [None, True, False, "", [], {}])
    def test_empty_values_are_no_secrets(self, nothing: Any) -> None:
        assert redacted({"password": nothing}) == ({"password": nothing}, [])

    def test_everything_below_a_secret_field_is_removed(self) -> None:
        assert redacted({"credentials": {"user": "a", "deep": [1, {"b": "c"}]}})[0] == {"credentials": REDACTED}

    def test_a_schema_may_describe_a_secret(self) -> None:
        schema = {"type": "object", "properties": {"password": {"type": "string", "description": "The pass phrase."}}}
        assert redacted(schema) == (schema, [])

    def test_a_path_names_odd_keys_in_brackets(self) -> None:
        _, entries = redacted({"a b": {"c": [{"password": "x"}]}})
        assert [one["path"] for one in entries] == ['$["a b"].c[0].password']

    def test_keys_that_become_the_same_keep_both_members(self) -> None:
        random = Random(1)
        keys = [BY_SHAPE["npm"](random), BY_SHAPE["npm"](random)]
        value, _ = redacted({keys[0]: 1, keys[1]: 2})
        assert sorted(value.values()) == [1, 2]

    def test_usage_numbers_are_no_secrets(self) -> None:
        usage = {"max_tokens": 5, "input_tokens": 7, "token_count": 9, "token": "hello"}
        assert redacted(usage) == (usage, [])


class TestPrivateNames:
    names = PrivateNames(
        roots=("/home/alice/work/shop", "/srv/data"),
        homes=("/home/alice",),
        users=("alice", "dev"),
        hosts=("alicebook",),
    )

    @pytest.mark.req("HS8.paths_redacted")
    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("cat /home/alice/work/shop/src/a.py", "cat <root>/src/a.py"),
            ("/srv/data/x.csv and /srv/database", "<root:1>/x.csv and /srv/database"),
            ("see /home/alice/.ssh/config", "see <home>/.ssh/config"),
            ("-I/home/alice/include", "-I<home>/include"),
            ("file:///home/alice/a", "file://<home>/a"),
            ("/Users/bob/a, C:\\Users\\bob\\b", "/Users/<user>/a, C:\\Users\\<user>\\b"),
            ("/mnt/c/Users/bob/x", "/mnt/c/Users/<user>/x"),
            ("{\\n/home/carol/x", "{\\n/home/<user>/x"),
            ("%2Fhome%2Falice%2Fa", "<home>%2Fa"),
            ("\\/home\\/alice\\/a", "<home>\\/a"),
            ("~/.claude/projects/-home-alice-work-shop/x", "~/.claude/projects/<root>/x"),
            ("-rw-r--r-- 1 alice staff", "-rw-r--r-- 1 <user> staff"),
            ("/tmp/pytest-of-alice/x", "/tmp/pytest-of-<user>/x"),
            ("alice@alicebook:~$", "<user>@<host>:~$"),
        ],
    )
    def test_names_and_places_are_hidden(self, text: str, shown: str) -> None:
        assert self.names.hide(text)[0] == shown
        assert self.names.hide(shown) == (shown, [])

    @pytest.mark.parametrize(
        "text", ["malice in wonderland", "https://example.com/home/settings", "src/home/index.ts", "the dev server"]
    )
    def test_other_words_stay(self, text: str) -> None:
        assert self.names.hide(text) == (text, [])

    def test_a_short_name_is_no_part_of_another_one(self) -> None:
        names = PrivateNames(users=("max",))
        assert names.hide("max_tokens of max, pytest-of-max")[0] == "max_tokens of <user>, pytest-of-<user>"

    def test_each_kind_of_replacement_is_reported(self) -> None:
        _, entries = redacted("in /srv/data by alice", RedactionPolicy(names=self.names))
        assert [(one["class"], one["replacement"]) for one in entries] == [
            ("local_pointer_path", "<root:1>"),
            ("local_pointer_path", "<user>"),
        ]


class TestLongTexts:
    @settings(max_examples=25)
    @given(st.integers(0, 2**32), st.data())
    def test_a_secret_at_any_place_of_a_long_text_is_found(self, seed: int, data: st.DataObject) -> None:
        planted = data.draw(st.sampled_from(list(secrets(seed, each=1))))
        edge = data.draw(st.integers(1, 2)) * (WINDOW_CHARS - OVERLAP_CHARS)
        before = edge + data.draw(st.integers(-200, OVERLAP_CHARS + 200))
        text = " word" * (before // 5) + "\n" + planted.text + "\n" + " word" * 20_000
        assert not survives(planted, without_secrets(text)[0])

    def test_a_key_longer_than_a_window_goes_whole(self) -> None:
        lines = "\n".join("Ab1+" * 16 for _ in range(6_000))
        begin, end = "-----BEGIN RSA PRIVATE" + " KEY-----", "-----END RSA PRIVATE" + " KEY-----"
        clean, replacements = without_secrets(f"before\n{begin}\n{lines}\n{end}\nafter")
        assert clean == f"before\n{replacements[0]}\nafter"

    def test_a_key_that_was_cut_off_goes_as_far_as_it_is_there(self) -> None:
        lines = "\n".join("Ab1+" * 16 for _ in range(5))
        begin = "-----BEGIN OPENSSH PRIVATE" + " KEY-----"
        clean, _ = without_secrets(f"{begin}\n{lines}\nAb1+Ab1\n... (truncated)")
        assert "Ab1+" not in clean
        assert clean.endswith("\n... (truncated)")

    @pytest.mark.parametrize("kind", SECRET_KINDS, ids=lambda kind: kind.name)
    def test_no_pattern_can_run_away(self, kind: SecretKind) -> None:
        """What is repeated without end gives nothing back; what gives back is bounded, and so is what it holds."""
        assert ways(parse(kind.pattern.pattern), 1) <= 8_192

    @pytest.mark.parametrize(
        "hostile",
        [
            *(
                "eyJ",
                "eyJaaaaaaaaa.",
                "ghp_",
                "sk-",
                "password='",
                "password=",
                "://a:",
                "?token=",
                "bearer ",
                "cookie: a=",
            ),
            *(
                "--token ",
                "curl -u a",
                "login a password ",
                "<password>",
                "xoxb-",
                "/home/",
                "\\n",
                '["',
                "token token ",
            ),
            *(
                "-----BEGIN PRIVATE" + " KEY-----",
                "PuTTY-User-Key-File-2:",
                "M" * 25 + ".",
                "AccountKey=",
                "postgres://",
            ),
        ],
    )
    def test_a_pattern_is_started_no_more_often_than_the_text_grows(self, hostile: str) -> None:
        small, large = (_started(hostile * (size // len(hostile))) for size in (20_000, 80_000))
        assert large <= 4 * small + 1_000


def _started(text: str) -> int:
    """How many times patterns are started on a text, if every judge rejects all they find."""
    count, folded = 0, text.lower()
    for kind in SECRET_KINDS:
        at = 0
        while any(hint in folded for hint in kind.hints) and (found := kind.pattern.search(text, at)) is not None:
            count += 1
            at = max(span_of(found)[0], found.start() + 1)
    return count


UNBOUNDED = 10**9


def parse(pattern: str) -> Any:
    # The only way to see what a pattern is made of.
    return import_module("re._parser").parse(pattern)


def ways(node: Any, outer: int) -> int:
    """The most ways in which repeats that give back can divide a text between them, from one place."""
    most = outer
    for operation, argument in node:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, inner = argument
            bound = UNBOUNDED if int(high) > UNBOUNDED else int(high) - int(low) + 1
            most = max(most, ways(inner, outer * bound))
        elif name in ("POSSESSIVE_REPEAT", "ASSERT", "ASSERT_NOT", "SUBPATTERN"):
            most = max(most, ways(argument[-1], outer))
        elif name == "ATOMIC_GROUP":
            most = max(most, ways(argument, outer))
        elif name == "BRANCH":
            most = max(most, *(ways(branch, outer) for branch in argument[1]))
    return most


class TestSurvivors:
    def planted(self) -> str:
        return BY_SHAPE["github_classic"](Random(3))

    @pytest.mark.req("HS11.secret_not_echoed")
    def test_the_error_names_place_and_kind_and_shows_no_secret(self) -> None:
        secret = self.planted()
        with pytest.raises(MulliganError) as caught:
            refuse_secrets({"a": [{"b": f"x {secret}"}]}, doing="Exporting")
        error = caught.value
        assert (error.code, error.details["path"], error.details["kind"]) == (
            "unredacted_secret",
            "$.a[0].b",
            "github_token",
        )
        assert secret[:12] not in f"{error} {error.message} {error.details}"

    @pytest.mark.req("HS11.secret_not_echoed")
    def test_a_secret_that_is_a_key_is_not_shown_in_the_path(self) -> None:
        secret = self.planted()
        with pytest.raises(MulliganError) as caught:
            refuse_secrets({secret: {"b": secret}}, doing="Exporting")
        assert secret[:12] not in f"{caught.value} {caught.value.details}"

    def test_a_doubtful_secret_does_not_stop_an_export(self) -> None:
        refuse_secrets({"a": "password=hunter2hunter2"}, doing="Exporting")


class TestHostileInput:
    def test_json_too_deep_to_walk_is_still_searched(self) -> None:
        planted = CORPUS[6]
        text = "[" * 900 + json.dumps(planted.text) + "]" * 900
        assert not survives(planted, redacted(text)[0])

    @settings(max_examples=200)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        )
    )
    def test_any_document_has_one_redacted_form(self, value: Any) -> None:
        once, _ = redacted(value)
        assert redacted(once) == (once, [])

    @settings(max_examples=200)
    @given(st.text(alphabet="pasword=:'\"\\{}<>@/?&.ghp_-eyJ0123ABC \n", max_size=200))
    def test_redacting_scraps_twice_changes_nothing(self, text: str) -> None:
        once, _ = redacted(text)
        assert redacted(once) == (once, [])
