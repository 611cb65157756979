"""The gate never passes a dump that is worse or cannot be judged: more than 150 ways, with one seed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.edited_results import try_mutation
from tests.reliability.fail_open import WAYS, Case, make_case, try_way

pytestmark = pytest.mark.reliability

assert len(WAYS) >= 150


@pytest.fixture(scope="module", params=[False, True], ids=["light tails", "heavy tails"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield make_case(tmp_path_factory.mktemp("ways"), 71, heavy=request.param)


@pytest.mark.parametrize("name", WAYS)
def test_the_gate_never_fails_open(name: str, case: Case, tmp_path: Path) -> None:
    found = try_way(name, case, tmp_path)
    assert found["code"] in (2, 3, 4) and not found["error"], found


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edits")


@pytest.mark.parametrize("number", range(10**6, 10**6 + 60))
def test_edited_results_do_not_pass_the_gate(number: int, edits: Path) -> None:
    found = try_mutation(number, edits)
    assert not found["wrong"], found
