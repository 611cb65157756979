"""A short form of the kills, and every fault of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import FAULTS, kills, prepare

KILLS = 8
"""`reliability.py` makes a thousand."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("faults")
    prepare(place)
    return place


@pytest.mark.filterwarnings("ignore")
def test_a_kill_leaves_outputs_whole_or_absent(folder: Path) -> None:
    for kill in kills(folder, KILLS, seed=1):
        assert not kill.partial and not kill.left, kill


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_machine(folder: Path, name: str) -> None:
    FAULTS[name](folder)
