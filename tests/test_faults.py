"""A short form of the kills, and every fault of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faults import FAULTS

KILLS = 8
"""`reliability.py` makes a thousand."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What became of them, in a process of its own: verbs are forked off it, and threads do not survive a fork."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("faults.py"))]
    place = tmp_path_factory.mktemp("faults")
    done = subprocess.run([*command, str(place), str(KILLS)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_kill_leaves_outputs_whole_or_absent(told: Any) -> None:
    assert len(told["kills"]) == KILLS
    assert [kill for kill in told["kills"] if kill["partial"] or kill["left"]] == []


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_machine(told: Any, name: str) -> None:
    assert told["faults"][name] == ""
