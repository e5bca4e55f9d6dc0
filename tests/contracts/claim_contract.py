"""The contract of claims on every store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.store.protocol import CLAIMS, Claim, ClaimRow, Store, blockers, claim, may_wait, release
from mulligan.testing.world import Actor, Seed, SeededIds, World
from mulligan.values.ids import CallId
from tests.contracts.store_under_test import TIMEOUT_S, StoreContractBase, contract_settings
from tests.contracts.tables import CONTRACT_SCHEMA, THINGS, Thing

places = st.sampled_from([b"/r", b"/r/a", b"/r/a/b", b"/r/a/b/c", b"/r/a-", b"/r/a0", b"/r/a/b\xff", b"/s"])
wants = st.lists(st.builds(Claim, places, st.booleans()), min_size=1, max_size=3)


def _clash(mine: Claim | ClaimRow, theirs: Claim | ClaimRow) -> bool:
    """Two claims conflict if they have the same path, or if one is deep and its path is above the other."""
    above = [(mine, theirs), (theirs, mine)]
    return mine.place == theirs.place or any(bool(a.deep) and b.place.startswith(a.place + b"/") for a, b in above)


class ClaimContract(StoreContractBase):
    """A deep claim covers the paths below. A call gets all its claims or none. No two calls wait for each other."""

    @contract_settings
    @given(st.lists(st.tuples(st.sampled_from(["1", "2", "3"]), wants), max_size=6), wants)
    def test_blockers_are_exactly_the_conflicting_claims_of_other_calls(
        self, taken: list[tuple[str, list[Claim]]], wanted: list[Claim]
    ) -> None:
        with self.fresh() as store, store.write() as tx:
            for call, places_wanted in taken:
                if not blockers(tx, CallId(call), places_wanted):
                    claim(tx, CallId(call), places_wanted)
            others = [row for row in tx.select(CLAIMS) if row.call != "2"]
            expected = [row for row in others if any(_clash(one, row) for one in wanted)]
            assert blockers(tx, CallId("2"), wanted) == expected

    def test_a_call_can_deepen_its_own_claim(self, store: Store) -> None:
        with store.write() as tx:
            for deep in (False, True):
                claim(tx, CallId("1"), [Claim(b"/r/a", deep)])
            assert tx.select(CLAIMS) == [ClaimRow(b"/r/a", "1", 1)]
            assert blockers(tx, CallId("1"), [Claim(b"/r", True)]) == []

    def test_release_frees_only_the_claims_of_its_call(self, store: Store) -> None:
        with store.write() as tx:
            claim(tx, CallId("1"), [Claim(b"/r/a"), Claim(b"/r/b")])
            claim(tx, CallId("2"), [Claim(b"/s")])
            release(tx, CallId("1"))
            assert tx.select(CLAIMS) == [ClaimRow(b"/s", "2")]

    def test_a_selection_that_was_empty_has_what_was_put_since(self, store: Store) -> None:
        plain, deep = ClaimRow(b"/r/a", "1"), ClaimRow(b"/r/b", "1", 1)
        with store.write() as tx:
            assert (tx.select(CLAIMS, {"deep": 1}), tx.select(CLAIMS, {"call": "1"})) == ([], [])
        with store.write() as tx:
            claim(tx, CallId("1"), [Claim(b"/r/a")])
            assert (tx.select(CLAIMS, {"deep": 1}), tx.select(CLAIMS, {"call": "1"})) == ([], [plain])
            claim(tx, CallId("1"), [Claim(b"/r/b", True)])
            assert (tx.select(CLAIMS, {"deep": 1}), tx.select(CLAIMS, {"call": "1"})) == ([deep], [plain, deep])
        with pytest.raises(LookupError), store.write() as tx:
            assert tx.select(CLAIMS, {"call": "2"}) == []
            claim(tx, CallId("2"), [Claim(b"/s")])
            raise LookupError
        with store.write() as tx:
            assert tx.select(CLAIMS, {"call": "2"}) == []
            tx.update(CLAIMS, b"/r/a", call="2")
            assert tx.select(CLAIMS, {"call": "2"}) == [ClaimRow(b"/r/a", "2")]
        with store.read() as read:
            assert (read.select(CLAIMS, {"call": "3"}), read.select(CLAIMS, {"deep": 1})) == ([], [deep])

    def test_a_selection_that_was_empty_has_what_another_opening_put(self, directory: str) -> None:
        one, other = (self.open_store(directory, CONTRACT_SCHEMA) for _ in range(2))
        for reader in (one.read, one.write):
            with reader() as tx:
                assert tx.select(CLAIMS, {"deep": 1}) == []
        with other.write() as tx:
            claim(tx, CallId("1"), [Claim(b"/r", True)])
        for reader in (one.read, one.write):
            with reader() as tx:
                assert tx.select(CLAIMS, {"deep": 1}) == ([ClaimRow(b"/r", "1", 1)] if self.lasts else [])
        one.close()
        other.close()

    def test_the_older_waits_and_the_younger_gives_up(self, store: Store) -> None:
        ids = SeededIds()
        older, younger = CallId(ids.new()), CallId(ids.new())
        held = [ClaimRow(b"/r", younger)]
        assert (may_wait(older, held), may_wait(younger, [ClaimRow(b"/r", older)])) == (True, False)
        assert may_wait(older, [*held, ClaimRow(b"/s", "")]) is False

    @contract_settings
    @given(st.integers(0, 2**32), st.lists(st.lists(wants, min_size=1, max_size=3), min_size=2, max_size=5))
    def test_calls_that_wait_or_give_up_all_end_without_conflict(
        self, number: int, calls: list[list[list[Claim]]]
    ) -> None:
        world = World(Seed(number))
        ended: dict[str, str] = {}
        with world.seed, self.fresh() as store:
            names = [world.ids.new() for _ in calls]
            actors = {
                name: _calling(store, CallId(name), steps, ended) for name, steps in zip(names, calls, strict=True)
            }
            world.scheduler.run(actors, after_each=lambda: _nobody_clashes(store))
            assert sorted(ended) == names
            assert ended[names[0]] == "done"

    def test_threads_that_claim_at_once_never_get_the_same_path(self, store: Store) -> None:
        ids = SeededIds()
        names = [ids.new() for _ in range(40)]

        def attempt(name: str) -> bool:
            with store.write() as tx:
                if blockers(tx, CallId(name), [Claim(b"/r/a"), Claim(b"/r/b", True)]):
                    return False
                claim(tx, CallId(name), [Claim(b"/r/a"), Claim(b"/r/b", True)])
                tx.put(THINGS, Thing(name, 1))
                return True

        with ThreadPoolExecutor(8) as pool:
            won = [job.result(TIMEOUT_S) for job in [pool.submit(attempt, name) for name in names]]
        assert won.count(True) == 1
        assert [row.group for row in self.things(store)] == [names[won.index(True)]]


def _calling(store: Store, call: CallId, steps: list[list[Claim]], ended: dict[str, str]) -> Actor:
    """One call: claims what each step needs, waits for younger calls, gives up for older ones, releases at its end."""

    def standing(wanted: list[Claim]) -> list[ClaimRow]:
        with store.read() as tx:
            return blockers(tx, call, wanted)

    outcome, held = "done", set[Claim]()
    for step in steps:
        wanted = [one for one in step if Claim(one.place, deep=True) not in held]
        yield None
        while outcome == "done":
            with store.write() as tx:
                inway = blockers(tx, call, wanted)
                if not inway:
                    claim(tx, call, wanted)
                    held.update(wanted)
                    break
            if may_wait(call, inway):
                yield lambda wanted=wanted: not standing(wanted) or not may_wait(call, standing(wanted))  # type: ignore[misc]
            else:
                outcome = "died"
    yield None
    with store.write() as tx:
        release(tx, call)
    ended[call] = outcome


def _nobody_clashes(store: Store) -> None:
    with store.read() as tx:
        held = tx.select(CLAIMS)
    assert [(a, b) for a in held for b in held if a.call < b.call and _clash(a, b)] == []
