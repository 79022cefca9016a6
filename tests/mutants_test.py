"""The table of planted faults fits the source."""

from pathlib import Path

import pytest

from tests.mutants import Mutant, mutants

_PACKAGE = Path(__file__).resolve().parents[1] / "dcmdp_jax"


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: f"{mutant.file}: {mutant.old}")
def test_the_text_of_a_planted_fault_stands_once_in_its_file(mutant: Mutant):
    source = (_PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    assert mutant.new != mutant.old
