"""Bearer tokens: made once, known only by their handles, and over when they are over."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mulligan
from mulligan.history.projection import SCHEMA
from mulligan.session.tokens import HANDLE_PREFIX, Token, Tokens, handle_of
from mulligan.store.journal import Journal, records_of
from mulligan.store.memory import MemoryStore
from mulligan.store.sqlite import SqliteStore
from mulligan.store.verify import verify
from mulligan.values.errors import MulliganError
from tests.session.manual_clock import NOON, HandClock
from tests.session.store_size import settled_bytes

TOMORROW = NOON + timedelta(days=1)
OWN = "Own-token_of-ours-0123456789-ABCDEFGHIJKLMNOPq"


class Till:
    """A store with tokens and a clock, as a test wants them."""

    def __init__(self, store: SqliteStore | MemoryStore, clock: HandClock) -> None:
        self.store, self.clock = store, clock
        self.tokens = Tokens(store, Journal(SCHEMA), clock=clock)

    def create(self, **given: Any) -> Token:
        return self.tokens.create(**{"principal": "ann", "expires_at": TOMORROW, **given})

    def kinds(self) -> list[str]:
        with self.store.read() as tx:
            return [record.kind for record in records_of(tx, "store")]

    def code_of(self, act: Any) -> str:
        with pytest.raises(MulliganError) as caught:
            act()
        return caught.value.code


@pytest.fixture
def till() -> Till:
    return Till(MemoryStore(SCHEMA), HandClock())


@pytest.fixture
def disk_till(tmp_path: Path) -> Iterator[Till]:
    store = SqliteStore(str(tmp_path / "home"), SCHEMA)
    yield Till(store, HandClock())
    store.close()


class TestCreate:
    @pytest.mark.req("D11.token_format", "S3.token.generated_when_omitted")
    def test_a_token_is_the_prefix_and_32_random_bytes_in_base64url(self, till: Till) -> None:
        made = {till.create().id for _ in range(50)}
        assert len(made) == 50
        for token in made:
            assert token is not None and re.fullmatch(r"mlg_[A-Za-z0-9_-]{43}", token)
            assert len(urlsafe_b64decode(token.removeprefix("mlg_") + "=")) == 32

    @pytest.mark.req(
        "S3.token_field.id",
        "S3.token_field.principal",
        "S3.token_field.created_at",
        "S3.token_field.last_seen_at",
        "S3.token_field.expires_at",
        "S3.token_field.attributes",
        "S3.token.rfc3339_times",
        "S3.token.records_caller",
        "S3.token.optional_created_at",
    )
    def test_a_token_has_its_principal_and_its_times(self, till: Till) -> None:
        made = till.create(id=OWN, attributes={"role": "operator", "n": [1, None]})
        assert made == Token(
            id=OWN,
            handle=handle_of(OWN),
            principal="ann",
            created_at="2026-03-01T12:00:00.000000Z",
            last_seen_at="2026-03-01T12:00:00.000000Z",
            expires_at="2026-03-02T12:00:00.000000Z",
            attributes={"role": "operator", "n": [1, None]},
        )
        assert till.tokens.get(OWN) == made

    @pytest.mark.req("S3.token.optional_created_at", "S3.token.rfc3339_times")
    def test_times_may_be_text_or_of_another_zone(self, till: Till) -> None:
        early = datetime(2026, 3, 1, 10, tzinfo=timezone(timedelta(hours=3)))
        made = till.create(created_at=early, expires_at="2026-03-02T01:00:00+01:00")
        assert (made.created_at, made.expires_at) == ("2026-03-01T07:00:00.000000Z", "2026-03-02T00:00:00.000000Z")

    @pytest.mark.parametrize(
        "wrong",
        [
            {"expires_at": NOON},
            {"expires_at": NOON - timedelta(seconds=1)},
            {"expires_at": datetime(2027, 1, 1)},
            {"expires_at": "soon"},
            {"expires_at": "2027-01-01T00:00:00"},
            {"expires_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))},
            {"expires_at": 12},
            {"created_at": TOMORROW + timedelta(days=1)},
            {"attributes": [1]},
            {"attributes": {"x": "y" * 5000}},
            {"id": 7},
        ],
    )
    def test_an_invalid_token_is_refused_and_leaves_no_record(self, till: Till, wrong: dict[str, Any]) -> None:
        assert till.code_of(lambda: till.create(**wrong)) == "invalid_params"
        assert till.kinds() == []

    @pytest.mark.parametrize("principal", ["", "  ", "x" * 300, "a\nb"])
    def test_a_principal_has_a_name(self, till: Till, principal: str) -> None:
        assert till.code_of(lambda: till.create(principal=principal)) == "invalid_id"

    @pytest.mark.req("S3.token.expired_stays_expired")
    @pytest.mark.parametrize("answer", ["get", "is_over", "touch"])
    def test_a_token_that_an_answer_called_expired_stays_expired_when_the_clock_is_set_back(
        self, till: Till, answer: str
    ) -> None:
        made = till.create(id=OWN)
        began = till.clock.time
        till.clock.pass_by(days=30)
        asked = {"get": lambda: till.tokens.get(OWN) is None, "touch": lambda: till.tokens.touch(OWN) is None}
        assert asked.get(answer, lambda: till.tokens.is_over(made))()
        till.clock.time = began
        assert till.tokens.get(OWN) is None
        assert till.tokens.touch(OWN) is None
        assert till.tokens.is_over(made)

    @pytest.mark.req("S3.token.supplied_id_entropy")
    @pytest.mark.parametrize(
        "weak",
        [
            *(
                "",
                "short",
                "x" * 31,
                "a" * 64,
                "ab" * 32,
                "pass word " * 8,
                "ü" * 40,
                OWN + "\n x",
                OWN[:42],
                f"{OWN}/a",
            ),
            *(
                "correct-horse-battery-staple-and-so-on-and-on-for-ever",
                "Correct-Horse-Battery-Staple-And-So-On-And-On-4",
            ),
            *("CORRECT-HORSE-BATTERY-STAPLE-AND-SO-ON-AND-ON-FOR-EVER", "0123456789abcdef" * 3, "9f86d081884c7d65" * 3),
        ],
    )
    def test_an_id_of_ones_own_must_be_hard_to_guess(self, till: Till, weak: str) -> None:
        with pytest.raises(MulliganError) as caught:
            till.create(id=weak)
        assert caught.value.code == "weak_token"
        assert not weak.strip() or weak.strip() not in caught.value.message

    @pytest.mark.parametrize(
        "strong",
        [
            *(OWN, f"  {OWN}\n", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"),
            *(
                "mlg_" + OWN,
                "n4bQgYhMfWWaL-qgxVrQFaO_TxsrC4Is0V1sFbDwCgg",
                "n4bQgYhMfWWaL-qgxVrQFaO_TxsrC4Is0V1sFbDwCgg=",
            ),
        ],
    )
    def test_a_valid_id_is_used_without_surrounding_spaces(self, till: Till, strong: str) -> None:
        assert till.create(id=strong).id == strong.strip()
        assert till.tokens.get(strong) is not None

    def test_an_id_is_used_once_even_after_its_end(self, till: Till) -> None:
        till.create(id=OWN)
        assert till.code_of(lambda: till.create(id=OWN)) == "token_exists"
        till.tokens.expire(OWN)
        assert till.code_of(lambda: till.create(id=OWN)) == "token_exists"


class TestGetTouchExpire:
    @pytest.mark.req("S3.token.none_when_unknown")
    @pytest.mark.parametrize("unknown", ["", "x", "mlg_" + "A" * 43, OWN, "é\ud800"])
    def test_an_unknown_token_is_none(self, till: Till, unknown: str) -> None:
        till.create()
        assert [till.tokens.get(unknown), till.tokens.touch(unknown), till.tokens.expire(unknown)] == [None] * 3
        assert till.kinds() == ["token.created"]

    @pytest.mark.req("S3.token.touch_updates_last_seen")
    def test_a_touch_is_seen_and_a_look_is_not(self, till: Till) -> None:
        till.create(id=OWN)
        till.clock.pass_by(seconds=5)
        looked = till.tokens.get(OWN)
        assert looked is not None and looked.last_seen_at == looked.created_at
        touched = till.tokens.touch(OWN)
        assert touched is not None and touched.last_seen_at == till.clock.text
        assert till.tokens.get(OWN) == touched

    def test_the_time_of_sight_never_runs_backwards(self, till: Till) -> None:
        till.create(id=OWN)
        till.clock.pass_by(minutes=5)
        seen = till.clock.text
        till.tokens.touch(OWN)
        till.clock.pass_by(minutes=-4)
        touched = till.tokens.touch(OWN)
        assert touched is not None and touched.last_seen_at == seen

    @pytest.mark.req("S3.token.none_when_expired", "S3.token.expired_not_extended")
    def test_the_moment_of_its_end_is_after_its_life(self, till: Till) -> None:
        till.create(id=OWN)
        till.clock.time = TOMORROW - timedelta(microseconds=1)
        assert till.tokens.get(OWN) and till.tokens.touch(OWN)
        till.clock.time = TOMORROW
        assert till.tokens.get(OWN) is None
        assert till.tokens.touch(OWN, expires_at=TOMORROW + timedelta(days=9), attributes={"a": 1}) is None
        (kept,) = till.tokens.listed()
        assert (kept.expires_at, kept.attributes) == ("2026-03-02T12:00:00.000000Z", {})

    @pytest.mark.req("S3.token.expired_not_extended")
    def test_a_clock_that_is_set_back_does_not_bring_it_back(self, till: Till) -> None:
        till.create(id=OWN)
        till.clock.time = TOMORROW
        assert till.tokens.touch(OWN) is None
        till.clock.time = NOON
        assert (till.tokens.get(OWN), till.tokens.touch(OWN)) == (None, None)

    @pytest.mark.req("S3.token.expire_revokes")
    def test_expire_ends_it_now_and_for_good(self, till: Till) -> None:
        till.create(id=OWN)
        till.clock.pass_by(hours=1)
        ended = till.tokens.expire(OWN)
        assert ended is not None and ended.expires_at == till.clock.text
        till.clock.time = NOON
        assert (till.tokens.get(OWN), till.tokens.touch(OWN, expires_at=TOMORROW)) == (None, None)
        again = till.tokens.expire(OWN)
        assert again is not None and again.expires_at == ended.expires_at
        assert till.kinds() == ["token.created", "token.expired"]

    def test_a_touch_may_move_the_end_and_replace_the_attributes(self, till: Till) -> None:
        till.create(id=OWN, attributes={"a": 1})
        later = TOMORROW + timedelta(days=1)
        touched = till.tokens.touch(OWN, expires_at=later, attributes={"b": 2})
        assert touched is not None
        assert (touched.expires_at, touched.attributes) == ("2026-03-03T12:00:00.000000Z", {"b": 2})
        till.clock.time = TOMORROW + timedelta(hours=1)
        assert till.tokens.get(OWN) is not None
        assert till.code_of(lambda: till.tokens.touch(OWN, expires_at=NOON)) == "invalid_params"

    @pytest.mark.req("HS12.touches_coalesced")
    def test_thousands_of_requests_cost_a_record_every_ten_minutes_at_most(
        self, disk_till: Till, tmp_path: Path
    ) -> None:
        disk_till.create(id=OWN, expires_at=NOON + timedelta(days=30))
        for _ in range(3_000):
            disk_till.clock.pass_by(seconds=3)
            assert disk_till.tokens.touch(OWN) is not None
        assert disk_till.kinds().count("token.touched") == 3_000 * 3 // 600
        seen = disk_till.tokens.get(OWN)
        assert seen is not None and seen.last_seen_at == disk_till.clock.text
        disk_till.store.close()
        assert settled_bytes(tmp_path / "home") < 400_000

    @pytest.mark.parametrize("wrong", [None, 7, b"mlg_"])
    def test_a_token_must_be_text(self, till: Till, wrong: Any) -> None:
        for verb in (till.tokens.get, till.tokens.touch, till.tokens.expire):
            assert till.code_of(lambda verb=verb: verb(wrong)) == "invalid_params"


class TestNothingWorksAsAToken:
    @pytest.mark.req("D18.token_theft", "S3.token.one_way_handle", "D11.token_handle")
    def test_a_handle_gives_no_access(self, till: Till) -> None:
        made = till.create()
        assert made.handle.startswith(HANDLE_PREFIX) and re.fullmatch(r"sha256:v1:[0-9a-f]{64}", made.handle)
        assert till.tokens.get(made.handle) is None and till.tokens.touch(made.handle) is None
        assert till.tokens.named(made.handle) == Token(**{**made.to_dict(), "id": None})

    @pytest.mark.req("S3.token.raw_only_from_create", "S3.token.one_way_handle", "D18.token_theft", "D11.token_handle")
    def test_the_raw_token_is_nowhere_in_the_files_of_the_store(self, tmp_path: Path) -> None:
        with mulligan.open(str(_folder(tmp_path)), store=str(tmp_path / "home")):
            made = mulligan.tokens.create(principal="ann", expires_at="2090-01-01T00:00:00Z")
            assert made.id is not None
            mulligan.tokens.touch(made.id, attributes={"a": 1})
            mulligan.tokens.expire(made.id)
            random = made.id.removeprefix("mlg_")
            files = [file for file in (tmp_path / "home").rglob("*") if file.is_file()]
            assert any(made.handle.encode() in file.read_bytes() for file in files)
            secrets = (random.encode(), urlsafe_b64decode(random + "="))
            assert [file for file in files for one in secrets if one in file.read_bytes()] == []
            assert random not in repr(made) and random not in str(made) and random not in str(made.to_dict())

    @pytest.mark.req("D11.token_handle")
    def test_every_comparison_with_a_stored_value_takes_the_same_time(self) -> None:
        """By reading the way of a token: it is hashed, looked up by its hash, and compared by compare_digest."""
        source = inspect.getsource(Tokens._known)
        tree = ast.parse(inspect.cleandoc("\n" + source))
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert calls == ["handle_of", "tx.get", "hmac.compare_digest"]
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and "token" in ast.unparse(node)]
        for verb in (Tokens.get, Tokens.touch):
            # All that is done with the raw token besides: it is given back to whoever gave it.
            assert "self._known(" in inspect.getsource(verb)


class TestDurable:
    CHILD = """
import sys
from datetime import timedelta
from mulligan.history.projection import SCHEMA
from mulligan.session.tokens import Tokens
from mulligan.store.journal import Journal
from mulligan.store.sqlite import SqliteStore
from mulligan.values.clock import SystemClock
clock = SystemClock()
tokens = Tokens(SqliteStore(sys.argv[1], SCHEMA), Journal(SCHEMA), clock=clock)
while True:
    made = tokens.create(principal="child", expires_at=clock.now() + timedelta(days=1))
    seen = tokens.touch(made.id)
    print("live", made.id, seen.last_seen_at, flush=True)
    gone = tokens.create(principal="child", expires_at=clock.now() + timedelta(days=1))
    tokens.expire(gone.id)
    print("gone", gone.id, "-", flush=True)
"""

    @pytest.mark.req("S3.token.crash_safe")
    def test_an_acknowledged_token_survives_kill_9(self, tmp_path: Path) -> None:
        home = str(tmp_path / "home")
        said: list[list[str]] = []
        for _ in range(3):
            child = subprocess.Popen([sys.executable, "-c", self.CHILD, home], text=True, stdout=subprocess.PIPE)
            assert child.stdout is not None
            said += [child.stdout.readline().split() for _ in range(7)]
            child.kill()
            # `communicate` would leave out what `readline` has read ahead.
            said += [line.split() for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
            child.communicate()
        store = SqliteStore(home, SCHEMA)
        tokens = Tokens(store, Journal(SCHEMA), clock=HandClock(datetime.fromisoformat("2026-01-01T00:00:00Z")))
        for what, token, seen in (words for words in said if len(words) == 3):
            found = tokens.get(token)
            assert (found is not None and found.last_seen_at == seen) if what == "live" else found is None
        assert list(verify(store, SCHEMA)) == []
        store.close()

    def test_two_processes_cannot_both_make_the_same_token(self, tmp_path: Path) -> None:
        stores = [SqliteStore(str(tmp_path / "home"), SCHEMA) for _ in range(2)]
        one, other = (Till(store, HandClock()) for store in stores)
        one.create(id=OWN)
        assert other.code_of(lambda: other.create(id=OWN)) == "token_exists"
        other.tokens.expire(OWN)
        assert one.tokens.get(OWN) is None
        for store in stores:
            store.close()


class TestTheModule:
    @pytest.mark.req("D11.token_api", "S3.token.verbs")
    def test_it_has_the_four_verbs_with_these_signatures(self) -> None:
        create = inspect.signature(mulligan.tokens.create)
        assert [(one.name, one.default) for one in create.parameters.values()] == [
            ("principal", inspect.Parameter.empty),
            ("expires_at", inspect.Parameter.empty),
            ("id", None),
            ("created_at", None),
            ("attributes", None),
        ]
        for verb in (mulligan.tokens.get, mulligan.tokens.touch, mulligan.tokens.expire):
            assert next(iter(inspect.signature(verb).parameters)) == "id"

    def test_it_acts_on_the_innermost_open_store(self, tmp_path: Path) -> None:
        root = str(_folder(tmp_path))
        with mulligan.open(root, store="memory:"):
            outer = mulligan.tokens.create(principal="o", expires_at="2090-01-01T00:00:00Z")
            assert outer.id is not None
            with mulligan.open(root, store="memory:") as inner:
                assert mulligan.tokens.get(outer.id) is None
                assert inner.tokens.listed() == []
            assert mulligan.tokens.get(outer.id) == outer


def _folder(base: Path) -> Path:
    folder = base / "work"
    folder.mkdir(exist_ok=True)
    return folder


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(-3_600, 40_000)),
        st.tuples(st.just("touch"), st.integers(0, 3)),
        st.tuples(st.just("expire"), st.integers(0, 3)),
        st.tuples(st.just("extend"), st.integers(0, 3)),
    ),
    max_size=30,
)


@given(STEPS)
@settings(max_examples=60)
def test_whatever_happens_a_token_once_refused_is_refused_for_ever(steps: list[tuple[str, int]]) -> None:
    till = Till(MemoryStore(SCHEMA), HandClock())
    ids = [till.create(expires_at=NOON + timedelta(hours=6 * (n + 1))).id or "" for n in range(4)]
    refused: set[str] = set()
    for what, number in steps:
        if what == "pass":
            till.clock.pass_by(seconds=number)
        elif what == "expire":
            till.tokens.expire(ids[number])
            refused.add(ids[number])
        else:
            ends = till.clock.time + timedelta(days=400) if what == "extend" else None
            if till.tokens.touch(ids[number], expires_at=ends) is None:
                refused.add(ids[number])
        assert [token for token in refused if till.tokens.get(token) is not None] == []
    assert list(verify(till.store, SCHEMA)) == []
