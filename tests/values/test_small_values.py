"""Digests, ids, clocks and faults."""

from __future__ import annotations

import errno
import hashlib
import pickle
import re
from dataclasses import asdict, field, fields, replace
from datetime import UTC, datetime, timedelta, timezone
from inspect import isfunction, signature

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.values.clock import Clock, FixedClock, SystemClock, parse_timestamp, timestamp
from mulligan.values.digest import digest_from_raw, digest_of, parse_digest, raw_digest
from mulligan.values.errors import (
    FAMILY_OF,
    INTEGRITY_CODES,
    ConflictError,
    Family,
    ForbiddenError,
    InternalError,
    MulliganError,
    RequestError,
    fault,
    fault_of_os_error,
)
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SystemIds, parse_user_id


@pytest.mark.req("D2.digest_of_plain_bytes")
@given(st.binary(max_size=64))
def test_a_digest_is_the_sha_256_of_plain_bytes(data: bytes) -> None:
    digest = digest_of(data)
    assert digest == "sha256:" + hashlib.sha256(data).hexdigest()
    assert digest_from_raw(raw_digest(digest)) == parse_digest(digest) == digest
    assert digest_of(bytearray(data)) == digest_of(memoryview(data)) == digest


GOOD = digest_of(b"")


@pytest.mark.parametrize(
    "text", ["", GOOD[7:], GOOD.upper(), GOOD + "\n", GOOD[:-1], "sha1:" + GOOD[7:], None, b"x", " " + GOOD]
)
def test_text_that_is_no_digest_is_refused(text: object) -> None:
    with pytest.raises(MulliganError) as refused:
        parse_digest(text)
    assert refused.value.code == "invalid_digest"


@pytest.mark.req("D4.ids_uuid7")
def test_our_ids_are_uuid_7_and_sort_by_birth() -> None:
    ids = SystemIds()
    born = [ids.new() for _ in range(2_000)]
    assert born == sorted(set(born))
    assert all(
        re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", one) for one in born
    )


@pytest.mark.parametrize("text", ["a", "é x", "x" * 256, "../../etc", "\U0001f600"])
def test_an_id_that_a_user_chose_is_kept_as_it_is(text: str) -> None:
    assert parse_user_id(text) == text


@pytest.mark.parametrize("text", ["", "  ", "x" * 257, "a\nb", "a\0", "\x1b[31m", "\ud800", None, 3])
def test_an_id_that_cannot_be_shown_is_refused(text: object) -> None:
    with pytest.raises(MulliganError) as refused:
        parse_user_id(text, "session id")
    assert refused.value.code == "invalid_id"


@pytest.mark.req("S4.clock.fixed")
@given(st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1)), st.integers(-12, 12))
def test_timestamps_are_utc_sort_as_text_and_round_trip(moment: datetime, offset: int) -> None:
    here = moment.replace(tzinfo=timezone(timedelta(hours=offset)))
    text = timestamp(FixedClock(here))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", text)
    assert parse_timestamp(text) == here
    assert text < timestamp(FixedClock(here + timedelta(microseconds=1)))


@pytest.mark.req("S4.clock.protocol")
def test_the_system_clock_is_aware_and_in_utc() -> None:
    clock = SystemClock()
    assert isinstance(clock, Clock)
    assert clock.now().tzinfo is UTC


@pytest.mark.req("S4.clock.system_utc")
def test_the_system_clock_returns_the_present_time_in_utc() -> None:
    before = datetime.now(UTC)
    now = SystemClock().now()
    assert before <= now <= datetime.now(UTC)
    assert now.utcoffset() == timedelta(0)


@pytest.mark.req("D16.four_families")
def test_every_code_has_one_family_and_every_family_its_class() -> None:
    assert {kind.family for kind in FAMILY_OF.values()} == set(Family)
    assert set(FAMILY_OF.values()) == {RequestError, ForbiddenError, ConflictError, InternalError}
    assert all(re.fullmatch(r"[a-z0-9_]+", code) for code in FAMILY_OF)
    assert set(FAMILY_OF) > INTEGRITY_CODES
    assert all(FAMILY_OF[code] is InternalError for code in INTEGRITY_CODES)


@pytest.mark.parametrize("code", sorted(FAMILY_OF))
def test_a_fault_carries_its_code_and_details_even_to_another_process(code: str) -> None:
    error = fault(code, "words for a person", path="p", number=3)
    again = pickle.loads(pickle.dumps(error))
    for one in (error, again):
        assert (type(one), one.code, str(one), dict(one.details)) == (
            FAMILY_OF[code],
            code,
            "words for a person",
            {"path": "p", "number": 3},
        )


def test_an_unknown_code_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError):
        fault("no_such_code", "")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.EROFS, "read_only_disk"),
        (errno.ENOENT, "path_not_found"),
        (errno.EEXIST, "file_exists"),
        (errno.ENOTDIR, "not_a_directory"),
        (errno.EISDIR, "is_directory"),
        (errno.EACCES, "forbidden"),
        (errno.EPERM, "forbidden"),
        (errno.EIO, "io_error"),
        (errno.EMFILE, "io_error"),
    ],
)
def test_an_error_of_the_operating_system_has_a_code(number: int, code: str) -> None:
    error = fault_of_os_error(OSError(number, "said so"), "Doing it")
    assert (error.code, error.details["errno"]) == (code, number)
    assert fault_of_os_error(OSError("no number"), "Doing it").code == "io_error"


@fast_dataclass(slots=True, frozen=True)
class _Point:
    x: int
    tags: list[str] = field(default_factory=list, compare=False)


@fast_dataclass(slots=True)
class _Tagged:
    x: int
    tags: list[str] = field(default_factory=list)


@fast_dataclass(slots=True)
class _Named(_Tagged):
    name: str = "p"

    def __post_init__(self) -> None:
        self.name = self.name.upper()


class TestFastDataclass:
    def test_a_class_has_slots_and_works_as_a_dataclass(self) -> None:
        point = _Named(1, ["a"], name="q")
        assert repr(point) == "_Named(x=1, tags=['a'], name='Q')"
        assert asdict(replace(point, x=2)) == {"x": 2, "tags": ["a"], "name": "Q"}
        assert [one.name for one in fields(_Named)] == ["x", "tags", "name"]
        assert str(signature(_Tagged)) == "(x: 'int', tags: 'list[str]' = <factory>) -> None"
        match point:
            case _Named(x, tags, name):
                assert (x, tags, name) == (1, ["a"], "Q")
        assert (hasattr(point, "__dict__"), pickle.loads(pickle.dumps(point))) == (False, point)

    def test_frozen_classes_compare_and_hash_by_the_compared_fields(self) -> None:
        assert (_Point(1, ["a"]), hash(_Point(1, ["a"]))) == (_Point(1, ["b"]), hash(_Point(1)))
        assert _Point(1) != _Point(2)
        with pytest.raises(TypeError):
            hash(_Named(1))

    def test_a_field_that_cannot_be_given_has_its_default(self) -> None:
        @fast_dataclass(slots=True)
        class Counted:
            name: str
            count: int = field(default=7, init=False)

        assert Counted("a").count == 7

    def test_a_class_gets_its_methods_when_one_is_first_asked_for(self) -> None:
        @fast_dataclass(slots=True, frozen=True)
        class Late:
            x: int = 3

        before = vars(Late)["__init__"]
        assert not isfunction(before)
        made = [Late(), Late(4)]
        assert (isfunction(vars(Late)["__init__"]), [one.x for one in made]) == (True, [3, 4])
