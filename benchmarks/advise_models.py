"""Train small policies with a known true gradient, and measure the gradient under each correction.

    python benchmarks/advise_models.py FOLDER [MODEL | MODEL-MISMATCH ...]

advise_policies.py defines the policies. The true gradient is the mean over many samples of the policy itself. For each
mismatch, the script samples batches of 64 sequences from the rollout engine (16 prompts with 4 responses and
leave-one-out advantages), applies each correction, and compares the gradient of all parameters with the true gradient.

Writes FOLDER/MODEL-MISMATCH/dump.parquet with other sequences, and truth.json, and keeps existing files. For each
correction, truth.json contains the squared bias (`bias2`), the variance of a batch of 64, the `projection` on the true
gradient (1 is the full step), and the squared distance to the true gradient by batch (`squared_errors`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks.advise_policies import (  # noqa: E402
    PLANS,
    PROMPTS,
    RESPONSES,
    STEP,
    Engine,
    Plan,
    Policy,
    Responses,
    every_prompt,
    make_engines,
    rewards,
    sample_responses,
    train_policies,
)  # fmt: skip
from mismatchctl.api.advise.candidates import (  # noqa: E402
    RunSample,
    apply_to_sample,
    default_candidates,
)
from mismatchctl.core.batch import Segments, TokenBatch  # noqa: E402
from mismatchctl.corrections.model import Correction  # noqa: E402
from mismatchctl.frameworks.registry import load_presets  # noqa: E402

DEFAULTS = (
    "decoupled_token_is", "decoupled_seq_is", "decoupled_geo_rs_token_tis", "decoupled_k3_rs_token_tis", "slime-mis",
    "slime-tis", "miles-moe-2", "trl-sequence-mask", "nemo-icepop", "openrlhf-tis", "areal-token-mask",
    "skyrl-sequence-tis", "roll-tis", "open-instruct-rho", "swift-token-truncate",
)  # fmt: skip
"""Default presets of frameworks, or the presets that their documents name first."""


def list_corrections() -> list[Correction]:
    """Return the grid of `advise`, and weights and gates of the frameworks' presets."""
    shipped = [load_presets()[name].correction for name in DEFAULTS]
    plain = [Correction(name=own.name, weight=own.weight, gates=own.gates) for own in shipped]
    return [*default_candidates(), *plain]


@dataclass
class Truth:
    """The true gradient and the squared error of its estimate."""

    gradient: Tensor
    error2: float
    facts: dict[str, float] = field(default_factory=dict)


def flatten(gradients: Any) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([each.flatten() for each in gradients])


def true_gradient(plan: Plan, policy: Policy) -> Truth:
    """Estimate the true gradient from samples of the policy, with the same number of samples per prompt."""
    prompts, parts, lengths, means = every_prompt(plan), [], [], []
    each = 8
    chunk = prompts.repeat_interleave(each, 0)
    for _ in range(plan.truth // each):
        tokens, mask, _ = sample_responses(Engine(policy), chunk)
        reward = rewards(plan, chunk, tokens, mask)
        advantage = _leave_one_out(reward, each)
        total = torch.zeros(sum(p.numel() for p in policy.parameters()))
        for part in torch.arange(len(chunk)).split(max(8, 16384 // tokens.shape[1])):
            log_probs = policy.log_probs(chunk[part], tokens[part]) * mask[part] * advantage[part, None]
            total += flatten(torch.autograd.grad(log_probs.sum(), list(policy.parameters()), materialize_grads=True))
        parts.append(total / len(chunk))
        lengths.append(float(mask.sum()) / len(chunk))
        means.append(float(reward.mean()))
    found = torch.stack(parts).double() / float(np.mean(lengths))
    facts = {
        "reward": float(np.mean(means)),
        "mean_tokens": float(np.mean(lengths)),
        "samples": plan.truth * len(prompts),
    }
    return Truth(found.mean(0), float(found.var(0).sum() / len(found)), facts)


def _leave_one_out(reward: Tensor, each: int) -> Tensor:
    grouped = reward.view(-1, each)
    return (grouped - (grouped.sum(1, keepdim=True) - grouped) / (each - 1)).flatten()


def sequence_gradients(policy: Policy, prompts: Tensor, tokens: Tensor, factors: Tensor) -> Tensor:
    """Return the gradient of the sum of factor x log-prob by sequence, [B, parameters]."""

    def weighted_log_prob(parameters: dict[str, Tensor], prompt: Tensor, own: Tensor, factor: Tensor) -> Tensor:
        logits = functional_call(policy, parameters, (torch.cat([prompt, own[:-1]])[None],))[0, 1:]
        return (logits.log_softmax(-1).gather(1, own[:, None])[:, 0] * factor).sum()

    size = max(4, 6_000_000 // (tokens.shape[1] * (tokens.shape[1] + 400)))
    found = vmap(grad(weighted_log_prob), (None, 0, 0, 0), chunk_size=size)(
        {name: p.detach() for name, p in policy.named_parameters()}, prompts, tokens, factors
    )
    return torch.cat([each.flatten(1) for each in found.values()], 1)


def to_sample(log_probs: Tensor, rollout: Tensor, mask: Tensor) -> RunSample:
    """Return a batch as the sample that `advise` reads."""
    lengths = mask.sum(1).numpy()
    segments = Segments.from_lengths(lengths)
    batch = TokenBatch(segments, rollout[mask].numpy(), log_probs[mask].numpy(), rows=np.arange(len(mask)))
    batch.columns["micro_batch"] = np.zeros(len(mask), np.int64)
    zeros = np.zeros(len(mask), np.int64)
    return RunSample(batch, None, None, zeros, zeros)


def corrected_gradients(
    policy: Policy, prompts: Tensor, responses: Responses, corrections: list[Correction]
) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """Return the gradient of a batch [corrections, parameters] and the share of rejected tokens, by correction.

    Corrections whose weights of a sequence are proportional share one gradient.
    """
    tokens, mask, rollout = responses
    with torch.no_grad():
        sample = to_sample(policy.log_probs(prompts, tokens), rollout, mask)
    advantage = _leave_one_out(rewards(policy.plan, prompts, tokens, mask), RESPONSES).numpy()
    factors = np.zeros((len(corrections), *mask.shape), np.float64)
    counts = np.zeros(len(corrections))
    rejected = np.zeros(len(corrections))
    for index, correction in enumerate(corrections):
        own = apply_to_sample(correction, sample)
        factors[index, mask.numpy()] = own.weights
        counts[index], rejected[index] = own.counted.sum(), 1 - own.kept.sum() / sample.batch.tokens
    scale = np.abs(factors).max(axis=2)
    shape = np.round(factors / np.maximum(scale, 1e-300)[..., None], 7).astype(np.float32)
    which, rows, used = np.zeros(scale.shape, np.int64), [], []
    for sequence in range(len(mask)):
        patterns, place = np.unique(shape[:, sequence], axis=0, return_inverse=True)
        which[:, sequence] = len(used) + place.ravel()
        rows.append(patterns)
        used += [sequence] * len(patterns)
    each = sequence_gradients(policy, prompts[used], tokens[used], torch.tensor(np.concatenate(rows)))
    share = np.zeros((len(corrections), len(used)))
    np.put_along_axis(share, which, scale * advantage / np.maximum(counts, 1)[:, None], axis=1)
    return torch.tensor(share, dtype=torch.float32) @ each, rejected


def write_truth(
    plan: Plan, policy: Policy, engine: Engine, truth: Truth, folder: Path, corrections: list[Correction]
) -> None:
    """Write the dump and the truth of one mismatch."""
    random = np.random.default_rng(plan.seed + 1)
    torch.manual_seed(plan.seed + 2)
    found = torch.zeros(len(corrections), plan.batches, len(truth.gradient))
    rejected = np.zeros(len(corrections))
    for batch, (own, responses) in enumerate(_sample_batches(plan, engine, plan.batches, random)):
        found[:, batch], share = corrected_gradients(policy, own, responses, corrections)
        rejected += share / plan.batches
    dumped = enumerate(_sample_batches(plan, engine, plan.dumped, random))
    rows = [row for batch, (own, responses) in dumped for row in _make_rows(policy, batch, own, responses)]
    table = pa.Table.from_pylist(rows)
    tokens = [np.concatenate([row[f"{side}_log_probs"] for row in rows]) for side in ("train", "rollout")]
    ratio = tokens[0].astype(np.float64) - tokens[1]
    sums = [float((row["train_log_probs"].astype(np.float64) - row["rollout_log_probs"]).sum()) for row in rows]
    truths, norm2 = {}, float(truth.gradient.square().sum()) - truth.error2
    for index, correction in enumerate(corrections):
        errors = found[index].double() - truth.gradient
        gram = (errors @ errors.T).numpy()
        covariance = (gram.sum() - np.trace(gram)) / (len(gram) * (len(gram) - 1))
        truths[correction.name] = {
            "correction": {key: value for key, value in correction.to_mapping().items() if key != "name"},
            "bias2": float(covariance - truth.error2), "variance": float(np.trace(gram) / len(gram) - covariance),
            "bias2_se": _jackknife_error(gram), "rejected_tokens": float(rejected[index]),
            "projection": float(found[index].double().mean(0) @ truth.gradient) / norm2,
            "squared_errors": [float(f"{value:.5g}") for value in np.diag(gram)],
        }  # fmt: skip
    facts = {"model": plan.name, "mismatch": folder.name.rsplit("-", 1)[1],
             "k3": float((np.expm1(ratio) - ratio).mean()),
             "sequence_log_ratio_sd": float(np.std(sums)), "g_star_norm2": float(truth.gradient.square().sum()),
             "g_star_error2": truth.error2, **truth.facts}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "dump.parquet", compression="zstd")
    (folder / "truth.json").write_text(json.dumps({**facts, "corrections": truths}))


def _jackknife_error(gram: np.ndarray[Any, Any]) -> float:
    """Return the jackknife standard error of the squared bias over batches."""
    count, own = len(gram), np.diag(gram)
    without = (gram.sum() - own.sum() - 2 * (gram.sum(1) - own)) / ((count - 1) * (count - 2))
    return float(np.sqrt((count - 1) / count * np.square(without - without.mean()).sum()))


def _sample_batches(
    plan: Plan, engine: Engine, count: int, random: np.random.Generator
) -> Iterator[tuple[Tensor, Responses]]:
    """Yield prompts and sampled responses by batch. Several batches are sampled together to save time."""
    several = max(1, 8192 // plan.most // 8)
    for start in range(0, count, several):
        every = every_prompt(plan)
        chosen = [random.permutation(len(every))[:PROMPTS] for _ in range(min(several, count - start))]
        prompts = every[np.repeat(np.concatenate(chosen), RESPONSES)]
        responses = sample_responses(engine, prompts)
        size = PROMPTS * RESPONSES
        for own in torch.arange(len(prompts)).split(size):
            longest = int(responses[1][own].sum(1).max())
            yield prompts[own], tuple(each[own, :longest] for each in responses)  # type: ignore[misc]


def _make_rows(policy: Policy, batch: int, prompts: Tensor, responses: Responses) -> list[dict[str, Any]]:
    tokens, mask, rollout = responses
    with torch.no_grad():
        log_probs = policy.log_probs(prompts, tokens)
    symbols = policy.plan.symbols
    chosen = (prompts[:, 0] - symbols) * symbols + prompts[:, 1]
    reward = rewards(policy.plan, prompts, tokens, mask)
    advantage = _leave_one_out(reward, RESPONSES)
    return [
        {"step": batch // STEP, "micro_batch": batch % STEP, "sequence_id": batch * len(chosen) + row,
         "prompt_id": int(chosen[row]), "reward": float(reward[row]), "advantages": float(advantage[row]),
         "token_ids": tokens[row, mask[row]].numpy().astype(np.uint8),
         "rollout_log_probs": rollout[row, mask[row]].numpy(), "train_log_probs": log_probs[row, mask[row]].numpy(),
         "response_mask": np.ones(int(mask[row].sum()), bool)}
        for row in range(len(chosen))
    ]  # fmt: skip


def _load_policies(plan: Plan, folder: Path) -> tuple[list[Policy], Truth]:
    """Read the policies of a plan and the true gradient of the last policy from the folder, or compute them."""
    folder.mkdir(parents=True, exist_ok=True)
    policies, truth = folder / f"{plan.name}.pt", folder / f"{plan.name}-truth.pt"
    if not policies.exists():
        _save([own.state_dict() for own in train_policies(plan)], policies)
    versions = []
    for state in torch.load(policies, weights_only=True):
        versions.append(Policy(plan))
        versions[-1].load_state_dict(state)
    if not truth.exists():
        found = true_gradient(plan, versions[-1])
        _save({"gradient": found.gradient, "error2": found.error2, "facts": found.facts}, truth)
    return versions, Truth(**torch.load(truth, weights_only=True))


def _save(content: Any, path: Path) -> None:
    """Save a file completely or not at all, so that an interrupted run can continue."""
    torch.save(content, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def main(folder: Path, names: list[str]) -> None:
    """Write the missing files."""
    torch.set_num_threads(1)
    corrections, start = list_corrections(), time.process_time()

    def log(text: str) -> None:
        print(f"{time.process_time() - start:6.0f} s  {text}", file=sys.stderr, flush=True)

    for plan in PLANS:
        missing = [
            name for name in plan.mismatches
            if not (folder / f"{plan.name}-{name}" / "truth.json").exists()
            and (not names or plan.name in names or f"{plan.name}-{name}" in names)
        ]  # fmt: skip
        if not missing:
            continue
        versions, truth = _load_policies(plan, folder)
        log(f"{plan.name}: {len(truth.gradient)} parameters, {truth.facts}, "
            f"norm2 {float(truth.gradient.square().sum()):.3g}, its error {truth.error2:.2g}")  # fmt: skip
        for name in missing:
            write_truth(
                plan, versions[-1], make_engines(versions)[name], truth, folder / f"{plan.name}-{name}", corrections
            )
            found = json.loads((folder / f"{plan.name}-{name}" / "truth.json").read_text())
            none = found["corrections"]["none"]
            log(f"{plan.name} {name}: K3 {found['k3']:.2g}, sd {found['sequence_log_ratio_sd']:.2g}, bias2 of none "
                f"{none['bias2']:.2g}, variance {none['variance']:.2g}")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
