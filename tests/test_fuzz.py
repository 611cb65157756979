"""A short form of the fuzz harness: `reliability.py` runs 20,000 cases, these are the first of other seeds."""

from __future__ import annotations

import pytest
from fuzz_check import checked

CASES, CHUNKS = 40, 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_case_ends_in_an_answer_or_a_sentence(chunk: int) -> None:
    for seed in range(chunk, CASES, CHUNKS):
        case, wrong = checked(10**9 + seed)
        assert not wrong, f"seed {10**9 + seed}, {case.kind}: {' '.join(case.argv)[:200]}: {wrong}"


def test_a_case_is_its_seed_alone() -> None:
    one, other = checked(7)[0], checked(7)[0]
    assert one == other
