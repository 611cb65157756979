"""Small policies whose true gradient is known, and what each correction makes of it: made once, kept in a folder.

    python benchmarks/advise_models.py FOLDER [MODEL ...]

The trainer's policy continues a sequence in steps that its prompt names; the reward is the share of right steps. Its
true gradient is the mean over many samples of its own. For each mismatch, batches of 64 sequences of the rollout's
policy (16 prompts, 4 responses each, each reward less the mean of the others) are corrected in every way, and gradients
in the space of all parameters, by autograd, are held against the true one. FOLDER/MODEL-MISMATCH gets dump.parquet,
other sequences than those of the truth, and truth.json: of each correction bias2, the variance of a batch of 64, and
`squared_errors`, the squared distance to the true gradient by batch. What is in FOLDER already is left as it is.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from mismatchctl.advise.candidates import usual  # noqa: E402
from mismatchctl.advise.sample import Sample, correct  # noqa: E402
from mismatchctl.batch import Segments, TokenBatch  # noqa: E402
from mismatchctl.correction import Correction  # noqa: E402
from mismatchctl.frameworks import presets  # noqa: E402

Drawn = tuple[Tensor, Tensor, Tensor]
"""Tokens, where they are, and the log-probs that they were drawn with [B, T]."""
PROMPTS, RESPONSES, STEP = 16, 4, 8
"""Prompts of a batch, responses to each, and batches of a step of the dump."""
SYMBOLS, STRIDES = 24, 5
END = SYMBOLS + STRIDES
SLIPS, BACKWARD = 0.06, 0.1


@dataclass(frozen=True)
class Plan:
    """A model and how much of it is measured; `mean` tokens of a response, at most `most`."""

    name: str
    seed: int
    experts: int
    mean: int
    most: int
    batches: int
    dumped: int
    truth: int
    mismatches: tuple[str, ...]
    width: int = 32
    layers: int = 2
    heads: int = 2
    hidden: int = 64
    taught: int = 200
    updates: int = 18


SHORT = ("stale_16", "int4", "flips", "top_p", "bf16", "temperature")
LONG = ("stale_16", "int8", "flips", "kv")
PLANS = (
    Plan("dense-32", 3, 1, 28, 40, 32, 40, 80, SHORT),
    Plan("moe-64", 17, 4, 60, 80, 24, 40, 40, SHORT, hidden=128),
    Plan("dense-128", 29, 1, 120, 160, 20, 30, 24, LONG),
    Plan("moe-512", 41, 4, 440, 512, 10, 15, 8, LONG[:3], hidden=128, taught=100, updates=17),
)


@dataclass(frozen=True)
class Engine:
    """How a rollout differs from the policy that samples in it."""

    policy: Policy
    temperature: float = 1.0
    top_p: float = 1.0
    flips: float = 0.0
    fp8_cache: bool = False


class Policy(nn.Module):
    """A transformer, dense or a mixture of experts of which each token takes two."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        width, self.heads, self.experts = plan.width, plan.heads, plan.experts
        self.embedding = nn.Embedding(END + 1, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width),
                    "mix": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "between": nn.LayerNorm(width),
                    "router": nn.Linear(width, plan.experts),
                    "up": nn.Linear(width, plan.hidden),
                    "down": nn.Linear(plan.hidden, width),
                }
            )
            for _ in range(plan.layers)
        )
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, END + 1)
        place = torch.arange(plan.most + 2)[:, None] / 10.0 ** (torch.arange(0, width, 2) * (4 / width))
        self.register_buffer("places", 0.3 * torch.cat([place.sin(), place.cos()], 1))

    def forward(self, x: Tensor, cache: list[Tensor] | None = None, at: int = 0, flipped: Tensor | None = None,
                fp8_cache: bool = False) -> Tensor:  # fmt: skip
        """Logits [B, T, V] of what follows x [B, T], whose first place is `at`; `flipped` ones are routed otherwise."""
        y = self.embedding(x) + self.places[at : at + x.shape[1]].to(self.head.weight.dtype)
        for index, block in enumerate(self.blocks):
            qkv = block["mix"](block["before"](y)).unflatten(-1, (3, self.heads, -1))
            q, k, v = (qkv[:, :, each].transpose(1, 2) for each in range(3))
            if fp8_cache:
                k, v = (each.to(torch.float8_e4m3fn).to(q.dtype) for each in (k, v))
            if cache is not None:
                kept = cache[index]
                kept[0, :, :, at : at + x.shape[1]], kept[1, :, :, at : at + x.shape[1]] = k, v
                k, v = kept[0, :, :, : at + x.shape[1]], kept[1, :, :, : at + x.shape[1]]
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            if x.shape[1] > 1:
                later = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).triu(1 + at)
                scores = scores.masked_fill(later, -torch.inf)
            y = y + block["out"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            y = y + self._feed(block, block["between"](y), flipped)
        logits: Tensor = self.head(self.last(y)).float()
        return logits

    def _feed(self, block: Any, y: Tensor, flipped: Tensor | None) -> Tensor:
        hidden = torch.nn.functional.gelu(block["up"](y)).unflatten(-1, (self.experts, -1))
        if self.experts > 1:
            route = block["router"](y)
            best = route.topk(3, -1).values
            taken = route >= best[..., 1:2]
            if flipped is not None:  # the third in place of the second
                other = (route >= best[..., :1]) | (route == best[..., 2:])
                taken = torch.where(flipped[..., None], other, taken)
            hidden = hidden * route.masked_fill(~taken, -torch.inf).softmax(-1)[..., None]
        elif flipped is not None:  # a quarter of the hidden units is lost
            lost = torch.arange(hidden.shape[-1]) % 4 == 0
            hidden = hidden.masked_fill(flipped[..., None, None] & lost, 0.0)
        fed: Tensor = block["down"](hidden.flatten(-2))
        return fed

    def log_probs(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Of response tokens [B, T] after prompts [B, 2]."""
        logits = self(torch.cat([prompts, tokens[:, :-1]], 1))[:, prompts.shape[1] - 1 :]
        return logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]


def every_prompt() -> Tensor:
    """A stride and a start [120, 2]."""
    pairs = torch.cartesian_prod(torch.arange(STRIDES), torch.arange(SYMBOLS))
    return pairs + torch.tensor([SYMBOLS, 0])


def taught(plan: Plan, prompts: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """What a careless teacher writes [B, most], and where [B, most]: it slips, and steps backward."""
    count, stride = len(prompts), prompts[:, 0].numpy() - SYMBOLS + 1
    rows, last = [], prompts[:, 1].numpy()
    for _ in range(plan.most):
        chance = random.random(count)
        last = (last + np.where(chance < BACKWARD, -stride, stride)) % SYMBOLS
        last = np.where(chance > 1 - SLIPS, random.integers(SYMBOLS, size=count), last)
        rows.append(last)
    least = plan.mean // 2
    length = np.minimum(least + random.geometric(1 / (plan.mean - least), count), plan.most)
    places = np.arange(plan.most)
    tokens = np.where(places[None] == length[:, None] - 1, END, np.stack(rows, 1))
    return torch.tensor(tokens), torch.tensor(places[None] < length[:, None])


def rewards(prompts: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Share of right steps [B]."""
    stride = prompts[:, :1] - SYMBOLS + 1
    before = torch.cat([prompts[:, 1:], tokens[:, :-1]], 1)
    written = mask & (tokens < SYMBOLS)
    right = written & ((before + stride) % SYMBOLS == tokens)
    return right.sum(1) / written.sum(1).clamp(min=1)


@torch.no_grad()
def sampled(engine: Engine, prompts: Tensor, most: int) -> Drawn:
    """What an engine writes after prompts [B, 2], with a cache of keys and values."""
    policy, count = engine.policy, len(prompts)
    weight = policy.head.weight
    shape = (2, count, policy.heads, most + 2, weight.shape[1] // policy.heads)
    cache = [torch.zeros(shape, dtype=weight.dtype) for _ in policy.blocks]
    x, at, alive, rows = prompts, 0, torch.ones(count, dtype=torch.bool), []
    for _ in range(most):
        flipped = torch.rand(x.shape) < engine.flips if engine.flips else None
        logits = policy(x, cache, at, flipped, engine.fp8_cache)[:, -1] / engine.temperature
        if engine.top_p < 1:
            p, order = logits.softmax(-1).sort(-1, descending=True)
            beyond = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, p.cumsum(-1) - p >= engine.top_p)
            logits = logits.masked_fill(beyond, -torch.inf)
        log_probs = logits.log_softmax(-1)
        drawn = torch.multinomial(log_probs.exp(), 1)
        rows.append((drawn[:, 0], alive, log_probs.gather(1, drawn)[:, 0]))
        at, x, alive = at + x.shape[1], drawn, alive & (drawn[:, 0] != END)
        if not alive.any():
            break
    tokens, mask, told = (torch.stack(column, 1) for column in zip(*rows, strict=True))
    return tokens.masked_fill(~mask, END), mask, told.masked_fill(~mask, 0.0)


def trained(plan: Plan) -> list[Policy]:
    """The policy of the teacher's writing, and each of its updates by REINFORCE."""
    torch.manual_seed(plan.seed)
    random, prompts = np.random.default_rng(plan.seed), every_prompt()
    policy = Policy(plan)
    optimizer = torch.optim.AdamW(policy.parameters(), 4e-3)
    count = max(12, 2560 // plan.most)
    for update in range(plan.taught):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1, (update + 1) / 30, (plan.taught - update) / 100)
        chosen = prompts[random.integers(len(prompts), size=count)]
        tokens, mask = taught(plan, chosen, random)
        _descend(optimizer, -(policy.log_probs(chosen, tokens) * mask).sum() / mask.sum())
    optimizer, versions = torch.optim.Adam(policy.parameters(), 2e-4), [copy.deepcopy(policy)]
    for _ in range(plan.updates):
        chosen = prompts[random.permutation(len(prompts))[:PROMPTS]].repeat_interleave(8, 0)
        tokens, mask, _ = sampled(Engine(policy), chosen, plan.most)
        reward = rewards(chosen, tokens, mask).view(-1, 8)
        advantage = ((reward - reward.mean(1, keepdim=True)) / reward.std(1).mean()).flatten()
        _descend(optimizer, -(policy.log_probs(chosen, tokens) * mask * advantage[:, None]).sum() / mask.sum())
        versions.append(copy.deepcopy(policy))
    return versions


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def rounded(policy: Policy, cast: Callable[[Tensor], Tensor]) -> Policy:
    """A copy with the weights of its linear layers on a grid of one scale per row."""
    policy = copy.deepcopy(policy)
    for layer in policy.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = cast(layer.weight.data)
    return policy


def _integers(bits: int) -> Callable[[Tensor], Tensor]:
    def cast(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return (weight / scale).round() * scale

    return cast


def _fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def engines(versions: list[Policy]) -> dict[str, Engine]:
    """One for each mismatch."""
    policy = versions[-1]
    same = Engine(policy)
    return {
        "on_policy": same,
        "bf16": Engine(copy.deepcopy(policy).bfloat16()),
        "fp8": Engine(rounded(policy, _fp8)),
        "int8": Engine(rounded(policy, _integers(8))),
        "int4": Engine(rounded(policy, _integers(4))),
        **{f"stale_{count}": Engine(versions[-1 - count]) for count in (1, 4, 16)},
        "temperature": replace(same, temperature=0.9),
        "top_p": replace(same, top_p=0.95),
        "kv": replace(same, fp8_cache=True),
        "flips": replace(same, flips=0.05 if policy.experts > 1 else 0.02),
    }


DEFAULTS = (
    "decoupled_token_is", "decoupled_seq_is", "decoupled_geo_rs_token_tis", "decoupled_k3_rs_token_tis", "slime-mis",
    "slime-tis", "miles-moe-2", "trl-sequence-mask", "nemo-icepop", "openrlhf-tis", "areal-token-mask",
    "skyrl-sequence-tis", "roll-tis", "open-instruct-rho", "swift-token-truncate",
)  # fmt: skip
"""What frameworks ship first, or their documents name first."""


def candidates() -> list[Correction]:
    """The grid of `advise` and what frameworks ship, whatever its loss."""
    shipped = [presets()[name].correction for name in DEFAULTS]
    plain = [Correction(name=own.name, weight=own.weight, gates=own.gates) for own in shipped]
    return [*usual(), *plain]


@dataclass
class Truth:
    """The true gradient, and its squared error."""

    gradient: Tensor
    error2: float
    facts: dict[str, float] = field(default_factory=dict)


def flat(gradients: Any) -> Tensor:
    """All parameters in a row."""
    return torch.cat([each.flatten() for each in gradients])


def true_gradient(plan: Plan, policy: Policy) -> Truth:
    """From samples of the policy, every prompt equally often, rewards less the mean of the prompt's others."""
    prompts, parts, lengths, means = every_prompt(), [], [], []
    each = 8
    chunk = prompts.repeat_interleave(each, 0)
    for _ in range(plan.truth // each):
        tokens, mask, _ = sampled(Engine(policy), chunk, plan.most)
        reward = rewards(chunk, tokens, mask)
        advantage = _against_others(reward, each)
        total = torch.zeros(sum(p.numel() for p in policy.parameters()))
        for part in torch.arange(len(chunk)).split(max(8, 16384 // tokens.shape[1])):
            told = policy.log_probs(chunk[part], tokens[part]) * mask[part] * advantage[part, None]
            total += flat(torch.autograd.grad(told.sum(), list(policy.parameters()), materialize_grads=True))
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


def _against_others(reward: Tensor, each: int) -> Tensor:
    grouped = reward.view(-1, each)
    return (grouped - (grouped.sum(1, keepdim=True) - grouped) / (each - 1)).flatten()


def sequence_gradients(policy: Policy, prompts: Tensor, tokens: Tensor, factors: Tensor) -> Tensor:
    """Gradient of the sum of factor x log-prob of each sequence [B, parameters]."""

    def told(parameters: dict[str, Tensor], prompt: Tensor, own: Tensor, factor: Tensor) -> Tensor:
        logits = functional_call(policy, parameters, (torch.cat([prompt, own[:-1]])[None],))[0, 1:]
        return (logits.log_softmax(-1).gather(1, own[:, None])[:, 0] * factor).sum()

    size = max(4, 6_000_000 // (tokens.shape[1] * (tokens.shape[1] + 400)))
    found = vmap(grad(told), (None, 0, 0, 0), chunk_size=size)(
        {name: p.detach() for name, p in policy.named_parameters()}, prompts, tokens, factors
    )
    return torch.cat([each.flatten(1) for each in found.values()], 1)


def as_sample(told: Tensor, rollout: Tensor, mask: Tensor) -> Sample:
    """A batch as the tool sees it."""
    lengths = mask.sum(1).numpy()
    segments = Segments(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    batch = TokenBatch(segments, rollout[mask].numpy(), told[mask].numpy(), rows=np.arange(len(mask)))
    batch.columns["micro_batch"] = np.zeros(len(mask), np.int64)
    zeros = np.zeros(len(mask), np.int64)
    return Sample(batch, None, None, zeros, zeros)


def corrected_gradients(
    policy: Policy, prompts: Tensor, drawn: Drawn, corrections: list[Correction]
) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """The gradient of a batch by correction [corrections, parameters], and the share of tokens each rejects.

    Where the tokens of a sequence have the same weights up to a factor, one gradient does for both.
    """
    tokens, mask, rollout = drawn
    with torch.no_grad():
        sample = as_sample(policy.log_probs(prompts, tokens), rollout, mask)
    advantage = _against_others(rewards(prompts, tokens, mask), RESPONSES).numpy()
    factors = np.zeros((len(corrections), *mask.shape), np.float64)
    counts = np.zeros(len(corrections))
    rejected = np.zeros(len(corrections))
    for index, correction in enumerate(corrections):
        own = correct(correction, sample)
        factors[index, mask.numpy()] = np.where(own.kept, own.weights, 0.0)
        counts[index], rejected[index] = own.counted.sum(), 1 - own.kept.mean()
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


def measured(
    plan: Plan, policy: Policy, engine: Engine, truth: Truth, folder: Path, corrections: list[Correction]
) -> None:
    """Write the dump and the truth of one mismatch."""
    random = np.random.default_rng(plan.seed + 1)
    torch.manual_seed(plan.seed + 2)
    found = torch.zeros(len(corrections), plan.batches, len(truth.gradient))
    rejected = np.zeros(len(corrections))
    for batch, (own, drawn) in enumerate(_batches(plan, engine, plan.batches, random)):
        found[:, batch], gone = corrected_gradients(policy, own, drawn, corrections)
        rejected += gone / plan.batches
    dumped = enumerate(_batches(plan, engine, plan.dumped, random))
    rows = [row for batch, (own, drawn) in dumped for row in _rows(policy, batch, own, drawn)]
    table = pa.Table.from_pylist(rows)
    tokens = [np.concatenate([row[f"{side}_log_probs"] for row in rows]) for side in ("train", "rollout")]
    ratio = tokens[0].astype(np.float64) - tokens[1]
    sums = [float((row["train_log_probs"].astype(np.float64) - row["rollout_log_probs"]).sum()) for row in rows]
    of = {}
    for index, correction in enumerate(corrections):
        away = found[index].double() - truth.gradient
        gram = (away @ away.T).numpy()
        off = (gram.sum() - np.trace(gram)) / (len(gram) * (len(gram) - 1))
        of[correction.name] = {
            "correction": {key: value for key, value in correction.to_mapping().items() if key != "name"},
            "bias2": float(off - truth.error2), "variance": float(np.trace(gram) / len(gram) - off),
            "bias2_se": _left_out(gram), "rejected_tokens": float(rejected[index]),
            "squared_errors": [float(f"{value:.5g}") for value in np.diag(gram)],
        }  # fmt: skip
    facts = {"model": plan.name, "mismatch": folder.name.rsplit("-", 1)[1],
             "k3": float((np.expm1(ratio) - ratio).mean()),
             "sequence_log_ratio_sd": float(np.std(sums)), "g_star_norm2": float(truth.gradient.square().sum()),
             "g_star_error2": truth.error2, **truth.facts}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "dump.parquet", compression="zstd")
    (folder / "truth.json").write_text(json.dumps({**facts, "corrections": of}))


def _left_out(gram: np.ndarray[Any, Any]) -> float:
    """Standard error of the squared bias, leaving out a batch at a time."""
    count, own = len(gram), np.diag(gram)
    without = (gram.sum() - own.sum() - 2 * (gram.sum(1) - own)) / ((count - 1) * (count - 2))
    return float(np.sqrt((count - 1) / count * np.square(without - without.mean()).sum()))


def _batches(plan: Plan, engine: Engine, count: int, random: np.random.Generator) -> Iterator[tuple[Tensor, Drawn]]:
    """Prompts of so many batches, and what an engine samples, many at a time: a step of many costs little more."""
    several = max(1, 8192 // plan.most // 8)
    for start in range(0, count, several):
        chosen = [random.permutation(STRIDES * SYMBOLS)[:PROMPTS] for _ in range(min(several, count - start))]
        prompts = every_prompt()[np.repeat(np.concatenate(chosen), RESPONSES)]
        drawn = sampled(engine, prompts, plan.most)
        size = PROMPTS * RESPONSES
        for own in torch.arange(len(prompts)).split(size):
            longest = int(drawn[1][own].sum(1).max())
            yield prompts[own], tuple(each[own, :longest] for each in drawn)  # type: ignore[misc]


def _rows(policy: Policy, batch: int, prompts: Tensor, drawn: Drawn) -> list[dict[str, Any]]:
    tokens, mask, rollout = drawn
    with torch.no_grad():
        told = policy.log_probs(prompts, tokens)
    chosen = (prompts[:, 0] - SYMBOLS) * SYMBOLS + prompts[:, 1]
    reward = rewards(prompts, tokens, mask)
    advantage = _against_others(reward, RESPONSES)
    return [
        {"step": batch // STEP, "micro_batch": batch % STEP, "sequence_id": batch * len(chosen) + row,
         "prompt_id": int(chosen[row]), "reward": float(reward[row]), "advantages": float(advantage[row]),
         "token_ids": tokens[row, mask[row]].numpy().astype(np.uint8),
         "rollout_log_probs": rollout[row, mask[row]].numpy(), "train_log_probs": told[row, mask[row]].numpy(),
         "response_mask": np.ones(int(mask[row].sum()), bool)}
        for row in range(len(chosen))
    ]  # fmt: skip


def _prepared(plan: Plan, folder: Path) -> tuple[list[Policy], Truth]:
    """The policies of a plan and the truth of the last: from the folder, where they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    policies, truth = folder / f"{plan.name}.pt", folder / f"{plan.name}-truth.pt"
    if not policies.exists():
        _save([own.state_dict() for own in trained(plan)], policies)
    versions = []
    for state in torch.load(policies, weights_only=True):
        versions.append(Policy(plan))
        versions[-1].load_state_dict(state)
    if not truth.exists():
        found = true_gradient(plan, versions[-1])
        _save({"gradient": found.gradient, "error2": found.error2, "facts": found.facts}, truth)
    return versions, Truth(**torch.load(truth, weights_only=True))


def _save(what: Any, path: Path) -> None:
    """Whole or not at all: what is cut off starts there again."""
    torch.save(what, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def main(folder: Path, names: list[str]) -> None:
    """Make what is missing."""
    torch.set_num_threads(1)
    corrections, start = candidates(), time.process_time()

    def say(text: str) -> None:
        print(f"{time.process_time() - start:6.0f} s  {text}", file=sys.stderr, flush=True)

    for plan in PLANS:
        missing = [name for name in plan.mismatches if not (folder / f"{plan.name}-{name}" / "truth.json").exists()]
        if not missing or (names and plan.name not in names):
            continue
        versions, truth = _prepared(plan, folder)
        say(f"{plan.name}: {len(truth.gradient)} parameters, {truth.facts}, "
            f"norm2 {float(truth.gradient.square().sum()):.3g}, its error {truth.error2:.2g}")  # fmt: skip
        for name in missing:
            measured(plan, versions[-1], engines(versions)[name], truth, folder / f"{plan.name}-{name}", corrections)
            found = json.loads((folder / f"{plan.name}-{name}" / "truth.json").read_text())
            none = found["corrections"]["none"]
            say(f"{plan.name} {name}: K3 {found['k3']:.2g}, sd {found['sequence_log_ratio_sd']:.2g}, bias2 of none "
                f"{none['bias2']:.2g}, variance {none['variance']:.2g}")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
