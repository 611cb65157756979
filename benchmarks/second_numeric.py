"""Dumps whose tokens are truly scored again by a second numeric: small models that no statistic was chosen on.

Usage: python benchmarks/second_numeric.py OUT [MODEL ...] [--prompts 320] [--responses 8]
Trains the models of strangers.py (kept in OUT as MODEL.pt), samples from them in bfloat16 as an engine does, and writes
OUT/MODEL/tokens.parquet: `prompt_id`, `train_log_probs` by one prefill in float32, and what two engines say of the same
tokens, `rollout_log_probs` and `second_log_probs`. Both compute in bfloat16 and differ in nothing but the order in
which the terms of matrix products are added: neither is better than the other. `worse_log_probs` is of a third engine,
which keeps its cache in fp8.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import polars as pl
import torch
from stranger_plans import GATE_HELD_OUT, GATE_TRIED, PROMPT, RESPONSE, SEEN, UNSEEN, Architecture, Text
from strangers import Model, Numerics, Processors, decoded, scored, trained

ENGINES = {
    "rollout_log_probs": Numerics("bfloat16", order=1),
    "second_log_probs": Numerics("bfloat16", order=2),
    "worse_log_probs": Numerics("bfloat16", order=1, fp8_cache=True),
    "train_log_probs": Numerics(),
}


def model_of(plan: Architecture, text: Text, folder: Path) -> Model:
    """The trained model, or the one that is kept."""
    kept = folder / f"{plan.name}.pt"
    if not kept.exists():
        torch.save([trained(plan, text)[0].state_dict()], kept)
    model = Model(plan, text.vocabulary).eval().requires_grad_(False)
    model.load_state_dict(torch.load(kept, weights_only=True)[0])
    return model


def dump(plan: Architecture, folder: Path, prompts: int, responses: int) -> pl.DataFrame:
    """One row per response."""
    text = Text.of(plan)
    model = model_of(plan, text, folder)
    order = np.random.default_rng(plan.seed + 50).permutation(len(text.pieces))
    if len(order) < prompts:
        print(f"{plan.name} has no more than {len(order)} texts", flush=True)
    chosen = np.repeat(order[:prompts], responses)
    given = torch.tensor([text.pieces[i][:PROMPT] for i in chosen])
    rollout = decoded(model, given, Numerics("bfloat16"), Processors(), 21)
    inside = np.arange(RESPONSE) < rollout.lengths[:, None]
    said = {name: scored(model, rollout, how).numpy() for name, how in ENGINES.items()}
    ragged = {
        name: [row[own].astype(np.float32) for row, own in zip(values, inside, strict=True)]
        for name, values in said.items()
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
        found = dump(plan, given.folder, given.prompts, given.responses)
        found.write_parquet(given.folder / plan.name / "tokens.parquet")
        tokens = found["train_log_probs"].list.len().sum()
        print(f"{plan.name}: {found['prompt_id'].n_unique()} prompts, {tokens:,} tokens", flush=True)


if __name__ == "__main__":
    main()
