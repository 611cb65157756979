"""Every fault of the machine, and a few kills. `reliability.py` runs more kills."""

import pytest

from tests.reliability.harness import found
from tests.reliability.memory import FILES, MOST_MB, VERBS

pytestmark = [pytest.mark.reliability, pytest.mark.slow]

KILLS = 6


def test_killed_commands_leave_complete_or_old_outputs() -> None:
    kills = found("kills", 10**9, KILLS)
    assert len(kills) == KILLS
    assert [kill for kill in kills if kill["wrong"]] == []


def test_machine_faults_leave_complete_or_old_outputs() -> None:
    faults = found("faults")
    assert faults and [fault for fault in faults if fault["wrong"]] == []


def test_small_hostile_files_use_little_memory() -> None:
    files = found("memory")
    assert [one for one in files if one["wrong"] or one["mb"] > MOST_MB] == []
    assert len(files) == len(FILES) * len(VERBS)
