"""The table of mutants fits the code: every function, text and test that it names exists, and no test is slow."""

from __future__ import annotations

import pytest

from tests.mutants.mutation import ROOT, Mutant, MutantError, all_mutants, fault_of_test

MUTANTS = all_mutants()
SURVIVED_ONCE = {
    "large bodies are not synced in power mode",
    "the sync mark is set without syncing the store",
    "a forked child keeps its parent's locks",
    "the call of a living process is recovered",
    "two processes recover one call",
    "a stamp ignores times",
}
"""Nothing noticed these when outsiders made them."""


@pytest.mark.req("D19.mutants")
def test_there_are_at_least_forty_mutants_each_with_a_name_of_its_own() -> None:
    names = {mutant.name for mutant in MUTANTS}
    assert len(names) == len(MUTANTS) >= 40
    assert names > SURVIVED_ONCE


@pytest.mark.req("D19.mutants")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_each_mutant_changes_a_function_that_exists_and_names_tests_of_the_fast_lane(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text("utf-8")
    assert mutant.applied_to(source) != source
    assert mutant.tests
    assert [fault for test in mutant.tests if (fault := fault_of_test(test)) is not None] == []


def test_a_mutant_whose_text_is_not_exactly_once_in_its_function_is_an_error() -> None:
    mutant = Mutant("twice", "x.py", "act", "one", "two", ("t",))
    with pytest.raises(MutantError):
        mutant.applied_to("def act():\n    x = one + one\n")
    with pytest.raises(MutantError):
        mutant.applied_to("x = 1\n")


@pytest.mark.parametrize(
    "test",
    [
        "tests/store/test_processes.py",
        "tests/store/test_no_such_file.py::test_a",
        "tests/store/test_processes.py::test_no_such_test",
        "tests/store/test_processes.py::test_no_child_hangs_in_a_thousand_runs_of_threads_that_fork",
    ],
)
def test_a_whole_file_a_missing_test_and_a_slow_test_are_refused(test: str) -> None:
    assert fault_of_test(test) is not None
