"""Write dumps of small models whose tokens were scored by three engines, for the gate benchmarks.

    python benchmarks/second_numeric.py FOLDER [MODEL ...] [--prompts 320] [--responses 8]

Trains the models of stranger_plans.py (kept as FOLDER/MODEL.pt), samples responses in bfloat16, and writes
FOLDER/MODEL/tokens.parquet with these columns:

- `train_log_probs`: one prefill in float32.
- `rollout_log_probs`, `second_log_probs`: two engines in bfloat16, which only differ in the order in which the terms of
  matrix products are added.
- `worse_log_probs`: an engine in bfloat16 with an fp8 cache.

gate_calibration.py and gate_power.py read these dumps. Training takes several minutes per model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import polars as pl
import torch
from stranger_plans import GATE_HELD_OUT, GATE_TRIED, PROMPT, RESPONSE, SEEN, UNSEEN, Architecture, Text
from strangers import Model, Numerics, Processors, sample_responses, score_responses, train_model

ENGINES = {
    "rollout_log_probs": Numerics("bfloat16", order=1),
    "second_log_probs": Numerics("bfloat16", order=2),
    "worse_log_probs": Numerics("bfloat16", order=1, fp8_cache=True),
    "train_log_probs": Numerics(),
}


def load_model(plan: Architecture, text: Text, folder: Path) -> Model:
    """Read the trained model from the folder, or train it."""
    kept = folder / f"{plan.name}.pt"
    if not kept.exists():
        torch.save([train_model(plan, text)[0].state_dict()], kept)
    model = Model(plan, text.vocabulary).eval().requires_grad_(False)
    model.load_state_dict(torch.load(kept, weights_only=True)[0])
    return model


def make_dump(plan: Architecture, folder: Path, prompts: int, responses: int) -> pl.DataFrame:
    """Return the log-probs of each engine and of the trainer, one row per response."""
    text = Text.of(plan)
    model = load_model(plan, text, folder)
    order = np.random.default_rng(plan.seed + 50).permutation(len(text.pieces))
    if len(order) < prompts:
        print(f"{plan.name} has only {len(order)} texts", flush=True)
    chosen = np.repeat(order[:prompts], responses)
    given = torch.tensor([text.pieces[i][:PROMPT] for i in chosen])
    rollout = sample_responses(model, given, Numerics("bfloat16"), Processors(), 21)
    inside = np.arange(RESPONSE) < rollout.lengths[:, None]
    log_probs = {name: score_responses(model, rollout, numerics).numpy() for name, numerics in ENGINES.items()}
    ragged = {
        name: [row[own].astype(np.float32) for row, own in zip(values, inside, strict=True)]
        for name, values in log_probs.items()
    }
    return pl.DataFrame({"prompt_id": chosen} | ragged)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("models", nargs="*")
    options.add_argument("--prompts", type=int, default=320)
    options.add_argument("--responses", type=int, default=8)
    given = options.parse_args()
    torch.set_num_threads(1)
    for plan in (*SEEN, *UNSEEN, *GATE_TRIED, *GATE_HELD_OUT):
        if given.models and plan.name not in given.models:
            continue
        (given.folder / plan.name).mkdir(parents=True, exist_ok=True)
        found = make_dump(plan, given.folder, given.prompts, given.responses)
        found.write_parquet(given.folder / plan.name / "tokens.parquet")
        tokens = found["train_log_probs"].list.len().sum()
        print(f"{plan.name}: {found['prompt_id'].n_unique()} prompts, {tokens:,} tokens", flush=True)


if __name__ == "__main__":
    main()
