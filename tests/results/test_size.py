"""A result file of 1,000 steps and 10 corrections has at most 5 MB."""

import json
from pathlib import Path

import numpy as np
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.recorder.recorder import Recorder

CORRECTIONS = (
    "none", "token_tis", "seq_is_rs", "seq_mis", "geo_rs", "geo_mis",
    "miles-moe-1", "miles-moe-2", "slime-mis", "decoupled_token_icepop",
)  # fmt: skip


@pytest.mark.slow
def test_each_step_adds_little_to_the_result_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = []
    for steps in (12, 36):
        folder = tmp_path / str(steps)
        with Recorder(folder) as recorder:
            for step in range(steps):
                rollout = [-rng.exponential(0.5, int(n)) for n in rng.integers(20, 60, 32)]
                train = [np.minimum(x + rng.normal(0, 0.03, len(x)), 0) for x in rollout]
                recorder.write(
                    step=step, rollout_log_probs=rollout, train_log_probs=train, current_log_probs=train,
                    advantages=rng.standard_normal(32), reward=rng.random(32), prompt_id=np.arange(32) + 32 * step,
                )  # fmt: skip
        result = json.loads(analyze([str(folder)], [find_preset(name) for name in CORRECTIONS]).to_json())
        (run,) = result["runs"].values()
        sizes.append(
            sum(len(json.dumps(part, separators=(",", ":"))) for part in (run["groups"], result["provenance"]))
        )
    assert run["clusters"]["folded"]  # 36 steps of 32 prompts exceed the number of clusters that a Result keeps
    growing = (sizes[1] - sizes[0]) / 24 * 1000
    bounded = len(json.dumps(run["clusters"], separators=(",", ":"))) + 100_000  # and the rest of the Result
    assert growing + bounded < 5_000_000
