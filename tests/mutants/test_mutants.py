"""The table of mutants fits the code: every function, text and test that it names exists."""

from __future__ import annotations

import pytest

from mutants.mutation import ROOT, Mutant, MutantError, all_mutants, missing_test

MUTANTS = all_mutants()


def test_every_mutant_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) > 0


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_each_mutant_changes_a_function_that_exists_and_names_tests_that_exist(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text("utf-8")
    assert mutant.applied_to(source) != source
    assert mutant.tests and [missing_test(test) for test in mutant.tests] == [None] * len(mutant.tests)


def test_a_mutant_whose_text_does_not_stand_exactly_once_is_an_error_that_says_so() -> None:
    mutant = Mutant("twice", "x.py", "act", "one", "two", ("t",))
    with pytest.raises(MutantError):
        mutant.applied_to("def act():\n    x = one + one\n")
    with pytest.raises(MutantError):
        mutant.applied_to("x = 1\n")
