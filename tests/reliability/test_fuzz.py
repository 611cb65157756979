"""A few fuzz cases. `reliability.py` runs 20,000 cases with other seeds."""

import random
from pathlib import Path

import pytest

from tests.reliability.guided import TARGETS
from tests.reliability.harness import found
from tests.reliability.natives import PARTS

pytestmark = pytest.mark.reliability

CASES, NATIVES = 30, 40
ONCE_FAILED = (605, 607, 1605, 1881, 3395, 7667, 8836, 10825, 10**9 + 41, 4002245, 4003547)


def test_every_fuzz_case_ends_with_an_answer_or_an_error() -> None:
    cases = found("fuzz_check", 10**9, CASES, *ONCE_FAILED)
    assert len(cases) == CASES + len(ONCE_FAILED)
    assert [case for case in cases if case["wrong"]] == []


def test_no_bytes_crash_the_process() -> None:
    """The bytes are decoded by C code in the same process."""
    natives = found("natives", 10**9, NATIVES)
    assert [one["part"] for one in natives] == [*PARTS]
    assert [one for one in natives if sum(one["ended"].values()) != NATIVES or one["wrong"]] == []


@pytest.mark.parametrize("name", TARGETS)
def test_random_bytes_raise_only_expected_errors(name: str, tmp_path: Path) -> None:
    take, noise = TARGETS[name](tmp_path), random.Random(0)
    for size in (0, 1, 3, 9, 40, 200) * 4:
        take(noise.randbytes(size))
