"""The snippets on sample files of the frameworks, which were not made for these tests."""

import json
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from tests.paths import FIXTURES
from tests.recorder.integrations.skyrl import TrainingInputBatch
from tests.recorder.integrations.snippet import Snippet
from tests.recorder.integrations.tinker import TensorData

DUMPS = FIXTURES / "framework_dumps"
PEERS = DUMPS / "peers"
REMOVED = 6
"""Sample with remove_sample."""


def truth() -> list[dict[str, Any]]:
    records = []
    tokens = json.loads((PEERS / "canonical_tokens.json").read_text())
    for row, ids in zip(pq.read_table(PEERS / "canonical_input.parquet").to_pylist(), tokens, strict=True):
        mask = np.array(row["response_mask"])
        columns = {"rollout": row["rollout_log_probs"], "train": row["train_log_probs"]}
        record = {name: np.array(values, np.float32)[mask].tolist() for name, values in columns.items()}
        records.append({"step": 1, **record, "token_ids": np.array(ids["response_tokens"])[mask].tolist()})
    return records


def _load(path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(PEERS / path, weights_only=True)
    return loaded


def _lines(path: str) -> Iterator[dict[str, Any]]:
    return map(json.loads, (PEERS / path).read_text().splitlines())


def _inline(snippet: Snippet, names: dict[str, Any]) -> None:
    snippet.setup(names)
    snippet.hook(names)


def trl(snippet: Snippet) -> None:
    batch = _load("trl/generation_batch_step1.pt")

    class GRPOTrainer:
        state, model = SimpleNamespace(global_step=1), SimpleNamespace(training=True)

        def _generate_and_score_completions(self, inputs: list[dict[str, str]]) -> dict[str, Any]:
            return batch

    names: dict[str, Any] = {"GRPOTrainer": GRPOTrainer}
    _inline(snippet, names)
    names["RecordingTrainer"]()._generate_and_score_completions([{"prompt": f"{row}"} for row in range(6)])


def openrlhf(snippet: Snippet) -> None:
    experience = _load("openrlhf/experience_step1.pt") | {"rewards": torch.zeros(6), "index": list(range(6))}
    trainer = SimpleNamespace(args=SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=2)))
    _inline(snippet, {"self": trainer, "global_step": 1, "experiences": [SimpleNamespace(**experience)]})


def roll(snippet: Snippet) -> None:
    batch = SimpleNamespace(batch=_load("roll/batch_tensors_step1.pt"))
    _inline(snippet, {"self": SimpleNamespace(), "global_step": 1, "batch": batch})


def areal(snippet: Snippet) -> None:
    engine = SimpleNamespace(data_parallel_rank=0, is_data_parallel_head=lambda: True, get_version=lambda: 1)
    data = _load("areal/traj_batch_before_advantages.pt")
    _inline(snippet, {"self": SimpleNamespace(engine=engine), "data": data})


def nemo_rl(snippet: Snippet) -> None:
    rows = list(_lines("nemo_rl/logs/exp_001/train_data_step1.jsonl"))
    written = {
        "input_ids": "token_ids",
        "generation_logprobs": "generation_logprobs",
        "prev_logprobs": "prev_logprobs",
        "token_mask": "token_loss_mask",
        "sample_mask": "sample_loss_mask",
    }
    train_data = {name: torch.tensor([row[key][0] for row in rows]) for name, key in written.items()}
    rewards = torch.tensor([row["rewards"][0] for row in rows])
    others = {"total_steps": 0, "rewards": rewards, "repeated_batch": {"idx": [row["idx"] for row in rows]}}
    _inline(snippet, {"train_data": train_data, **others})


def skyrl(snippet: Snippet) -> None:
    from mismatchctl.data.importers.pickles import load_pickle
    from mismatchctl.frameworks.skyrl import PICKLE_CLASSES

    state = load_pickle(PEERS / "skyrl/dumped_data/global_step_1_training_input.pkl", PICKLE_CLASSES)
    data = TrainingInputBatch()
    for name, value in state["batch_dict"].items():
        if value is not None:
            array = np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"])
            data[name] = torch.from_numpy(array.copy())
    rows = len(data["sequences"])
    data["rewards"] = torch.zeros_like(data["advantages"])
    data.metadata = state["metadata"] | {"uids": [f"{row}" for row in range(rows)]}

    class RayPPOTrainer:
        global_step = 1

        def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
            return data

    names: dict[str, Any] = {"RayPPOTrainer": RayPPOTrainer, "torch": torch}
    _inline(snippet, names)
    names["RecordingTrainer"]().compute_advantages_and_returns(data)


def tinker(snippet: Snippet) -> None:
    data, scored = [], []
    for line in _lines("tinker/datums_step1.jsonl"):
        inputs = {name: TensorData(**value) for name, value in line["loss_fn_inputs"].items()}
        data.append(SimpleNamespace(loss_fn_inputs=inputs))
        scored.append(TensorData(**line["loss_fn_outputs"]["logprobs"]).to_torch())
    _inline(snippet, {"i_batch": 1, "data_D": data, "training_logprobs_D": scored})


def megatron_ranks(project: str) -> list[dict[str, Any]]:
    """Return the data of each data-parallel rank of slime or Miles, from the framework's train dump."""
    files = sorted((DUMPS / "slime_miles" / project / "train_data").glob("0_*.pt"))
    ranks = [torch.load(file, weights_only=True, map_location="cpu")["rollout_data"] for file in files]
    for data in ranks:  # the trainer's values are invented, and some of them are above 0
        data["log_probs"] = [values.clamp(max=0) for values in data["log_probs"]]
    return ranks


def megatron_truth(samples: Sequence[int]) -> list[dict[str, Any]]:
    dashboard = pq.read_table(DUMPS / "slime_miles/miles_head/dashboard_columns/rollout_0.parquet").to_pylist()
    records = []
    for row in (next(row for row in dashboard if row["sample_index"] == index) for index in samples):
        mask = np.array(row["loss_mask"] or [1] * row["response_length"], bool)
        mask &= row["sample_index"] != REMOVED
        rollout, ids = np.array(row["rollout_log_probs"], np.float32), np.array(row["tokens"])[-len(mask) :]
        records.append({"rollout": rollout[mask].tolist(), "token_ids": ids[mask].tolist()})
    return records


SAMPLES: dict[str, Callable[[Snippet], None]] = {
    "trl": trl,
    "openrlhf": openrlhf,
    "roll": roll,
    "areal": areal,
    "nemo-rl": nemo_rl,
    "skyrl": skyrl,
    "tinker-cookbook": tinker,
}
