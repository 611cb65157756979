"""Every capability in the documents has a command (tests/docs/mission.toml), which runs here on small data."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from mismatchctl.io.yaml import read_data
from mismatchctl.recorder.recorder import Recorder
from tests.cli.command import run
from tests.paths import ROOT

SHOWN = [
    (command, *code)
    for document in read_data(ROOT / "tests/docs/mission.toml")["documents"]
    for _, command, *code in document["shown"]
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mission")
    (folder / "tests").symlink_to(ROOT / "tests")
    (folder / "log.jsonl").write_text('{"step": 0, "rollout_corr/k3_kl": 2e-4, "reward": 0.5}')
    for seed, (name, noise) in enumerate([("dense", 0.02), ("moe", 0.1)]):
        rng = np.random.default_rng(seed)
        with Recorder(folder / "sample_data" / name) as recorder:
            for step in range(3):
                rollout = [-rng.exponential(1.0, int(n)) - 0.7 for n in rng.integers(8, 40, 16)]
                moved = [[row + rng.normal(0, noise, len(row)).clip(-0.6, 0.6) for row in rollout] for _ in range(2)]
                recorder.write(
                    step=step, rollout_log_probs=rollout, train_log_probs=moved[0], current_log_probs=moved[1],
                    sequence_id=np.arange(16), prompt_id=np.arange(16) // 2, reward=rng.random(16),
                    advantages=[np.full(len(row), rng.normal()) for row in rollout],
                )  # fmt: skip
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("command", "code"), [(command, *(code or (0,))) for command, *code in SHOWN])
def test_commands_of_the_mission_work(
    command: str, code: int, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    done = run(*shlex.split(command)[1:], code=code, COLUMNS="160")
    assert done.stdout
