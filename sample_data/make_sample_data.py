"""Make the sample dumps: real (tiny) language models, a real rollout engine, a mismatch with known causes.

    python sample_data/make_sample_data.py            # train, sample, rewrite the dumps and the tables
    python sample_data/make_sample_data.py --check    # prove the cached decoder right; write nothing

Two byte-level transformers, `dense` and `moe` (8 experts, top 2, in every layer), learn to complete short
Python functions from the standard library of the Python that runs this script. Each then goes through 16
steps of reinforcement learning:

1. 8 prompts (the signature of a function), 4 completions each, at temperature 1. The rollout engine decodes
   one token at a time with a KV cache; weights, activations and cache are bfloat16. It records the log-prob
   of what it sampled.
2. The trainer recomputes the same tokens with one float32 prefill: `train_log_probs`.
3. The reward is the share of letters in the completion, the advantage is the reward normalized over the
   prompt's four completions: one number per sequence in `dense`, one per token in `moe`.
4. One policy-gradient update of the float32 weights, over four micro-batches; `current_log_probs` are
   computed after it.
5. The engine gets the new weights, while weight synchronization works.

What goes wrong, and when:

- `dense`: at step 8 the engine gets its last weights, then the synchronization hangs. The engine samples with
  version 8 for good while the trainer moves on: `rollout_version` stays, `train_version` grows, and so does
  the mismatch.
- `moe`: from step 8 on the engine keeps its KV cache in fp8 (e4m3, one scale per head and token), which also
  turns more routing decisions; after step 10 the weight synchronization hangs as well, at version 10.

In `moe`, the last prompt of every step has a tool. When a completion of it finishes its first line, the tool
appends a comment with the line's length. The model reads these bytes but did not sample them: there
`response_mask` is 0, and `rollout_log_probs` and `advantages` are 0.0.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import sysconfig
import time
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from model import CONTEXT, END, LAYERS, MAX_PROMPT, MAX_RESPONSE, Cache, Model
from torch import Tensor, nn

from mismatchctl.recorder.recorder import Recorder

HERE = Path(__file__).resolve().parent
PROMPTS, GROUP, STEPS, MICRO_BATCHES, WORKERS = 8, 4, 16, 4, 4
BREAKS_AT = 8


@dataclass(frozen=True)
class Plan:
    """One run: the model, how long it learns, and what goes wrong when."""

    name: str
    experts: int
    hidden: int
    pretrain_steps: int
    learning_rate: float
    sync_hangs_at: int
    fp8_cache_from: int = STEPS
    tools: bool = False
    advantages_per_token: bool = False


PLANS = (
    Plan("dense", 1, 512, 1100, 1e-4, BREAKS_AT),
    Plan("moe", 8, 192, 900, 1.5e-4, BREAKS_AT + 2, BREAKS_AT, tools=True, advantages_per_token=True),
)


# Text and pre-training.


def stdlib_functions() -> list[tuple[bytes, bytes]]:
    """Signature and body of every short function of the standard library, in a fixed order, each once."""
    found: dict[tuple[bytes, bytes], None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.body[0].lineno == node.lineno + 1:
                text = lines[node.lineno - 1 : node.end_lineno]
                indent = len(text[0]) - len(text[0].lstrip())
                signature, *body = [line[indent:].rstrip() for line in text]
                pair = (signature.encode() + b"\n", "\n".join(body).encode())
                if len(pair[0]) <= MAX_PROMPT and 16 <= len(pair[1]) < MAX_RESPONSE:
                    found[pair] = None
    return list(found)


def pretrain(plan: Plan, functions: list[tuple[bytes, bytes]], steps: int) -> Model:
    """A float32 model that has learned to complete the functions."""
    torch.manual_seed(1)
    model = Model(plan.experts, plan.hidden).train()
    order = np.random.default_rng(1)
    texts = sorted(([*signature, *body, END] for signature, body in functions), key=len)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    started, batch = time.perf_counter(), 32
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * (1.02 - step / steps)
        near = order.integers(len(texts) - 4 * batch) + order.choice(4 * batch, size=batch, replace=False)
        tokens, valid = pad([texts[i] for i in near])  # of similar lengths: little padding
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits[valid[:, 1:]], tokens[:, 1:][valid[:, 1:]]) + 0.01 * model.balance()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(
                f"{plan.name} {step:5d} loss {loss.item():.3f}  {time.perf_counter() - started:.0f} s",
                flush=True,
            )
    return model.eval()


def pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token lists as one right-padded tensor, and which of its places are tokens."""
    length = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return tokens, torch.arange(length) < torch.tensor([len(row) for row in rows])[:, None]


# The rollout engine.


@dataclass
class Sequence:
    """One completion as the engine made it; `mask` is false on the bytes that a tool wrote."""

    prompt: list[int]
    uses_tool: bool = False
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    tool_bytes: list[int] = field(default_factory=list)
    done: bool = False

    def next_forced(self, position: int) -> int | None:
        """The token at `position` if it comes from the prompt or from a tool."""
        if position < len(self.prompt):
            return self.prompt[position]
        if self.done:
            return END
        return self.tool_bytes[0] if self.tool_bytes else None

    def take(self, token: int, log_prob: float, sampled: bool) -> None:
        """Append a token of the response."""
        self.tokens.append(token)
        self.log_probs.append(log_prob if sampled else 0.0)
        self.mask.append(sampled)
        if not sampled:
            self.tool_bytes.pop(0)
        elif self.uses_tool and token == ord("\n") and all(self.mask) and len(self.tokens) > 1:
            self.tool_bytes = list(f"    # {len(self.tokens) - 1} columns\n".encode())
        self.done = token == END or (len(self.tokens) >= MAX_RESPONSE and not self.tool_bytes)


@torch.inference_mode()
def rollout(engine: Model, sequences: list[Sequence], generator: torch.Generator, fp8: bool) -> None:
    """Complete the sequences together, token by token, with a KV cache in the engine's own precision."""
    dtype = engine.head.weight.dtype
    caches = [Cache(len(sequences), dtype, fp8) for _ in range(LAYERS)]
    tokens = torch.tensor([[sequence.prompt[0]] for sequence in sequences])
    for position in range(1, CONTEXT):
        log_probs = engine(tokens, caches)[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(log_probs.exp(), 1, generator=generator)
        for i, sequence in enumerate(sequences):
            forced = sequence.next_forced(position)
            token = int(drawn[i]) if forced is None else forced
            if position >= len(sequence.prompt) and not sequence.done:
                sequence.take(token, log_probs[i, token].item(), forced is None)
            tokens[i] = token
        if all(sequence.done for sequence in sequences):
            break


# The trainer.


def prefill_log_probs(model: Model, sequences: list[Sequence]) -> list[Tensor]:
    """The trainer's log-probs of each response, from one pass over whole sequences."""
    tokens, _ = pad([sequence.prompt + sequence.tokens for sequence in sequences])
    log_probs = model(tokens[:, :-1]).float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    starts = [len(sequence.prompt) - 1 for sequence in sequences]
    return [
        row[start : start + len(sequence.tokens)]
        for row, start, sequence in zip(log_probs, starts, sequences, strict=True)
    ]


def reward(sequence: Sequence) -> float:
    """The share of ASCII letters among the sampled bytes."""
    sampled = [token for token, valid in zip(sequence.tokens, sequence.mask, strict=True) if valid and token != END]
    return sum(chr(token).isalpha() for token in sampled) / max(1, len(sampled))


def update(model: Model, optimizer: torch.optim.Optimizer, sequences: list[Sequence], advantages: Tensor) -> None:
    """One policy-gradient update, accumulated over micro-batches; every sampled token weighs the same."""
    total = sum(sum(sequence.mask) for sequence in sequences)
    optimizer.zero_grad()
    for part, values in zip(chunks(sequences), advantages.chunk(MICRO_BATCHES), strict=True):
        log_probs = prefill_log_probs(model, part)
        gains = [
            value * row[torch.tensor(sequence.mask)].sum()
            for value, row, sequence in zip(values, log_probs, part, strict=True)
        ]
        (-torch.stack(gains).sum() / total).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def chunks(sequences: list[Sequence]) -> Iterator[list[Sequence]]:
    """The sequences in micro-batches."""
    size = len(sequences) // MICRO_BATCHES
    return (sequences[i : i + size] for i in range(0, len(sequences), size))


def train(plan: Plan, model: Model, prompts: list[bytes]) -> list[tuple[float, ...]]:
    """Run the steps of one plan, record them, and return the rows of its table."""
    folder = HERE / plan.name
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(7)
    optimizer = torch.optim.Adam(model.parameters(), lr=plan.learning_rate)
    engine, rollout_version = deepcopy(model).bfloat16(), 0
    table = []
    with Recorder(folder) as recorder:
        for step in range(STEPS):
            if step <= plan.sync_hangs_at:
                engine, rollout_version = deepcopy(model).bfloat16(), step
            chosen = [(step * PROMPTS + i) % len(prompts) for i in range(PROMPTS) for _ in range(GROUP)]
            sequences = [
                Sequence(list(prompts[prompt]), plan.tools and i >= (PROMPTS - 1) * GROUP)
                for i, prompt in enumerate(chosen)
            ]
            rollout(engine, sequences, generator, fp8=step >= plan.fp8_cache_from)
            with torch.no_grad():
                before = prefill_log_probs(model, sequences)
            rewards = torch.tensor([reward(sequence) for sequence in sequences])
            groups = rewards.view(PROMPTS, GROUP)
            spread = groups.std(1, keepdim=True) + 1e-6
            advantages = ((groups - groups.mean(1, keepdim=True)) / spread).flatten()
            update(model, optimizer, sequences, advantages)
            with torch.no_grad():
                after = prefill_log_probs(model, sequences)
            masks = [np.array(sequence.mask) for sequence in sequences]
            per_token = [advantage.item() * mask for advantage, mask in zip(advantages, masks, strict=True)]
            count = len(sequences)
            recorder.write(
                step=step,
                sequence_id=np.arange(step * count, (step + 1) * count),
                prompt_id=chosen,
                rollout_version=rollout_version,
                train_version=step,
                worker=np.arange(count) % WORKERS,
                micro_batch=np.arange(count) // (count // MICRO_BATCHES),
                reward=rewards,
                advantages=[row.astype(np.float32) for row in per_token] if plan.advantages_per_token else advantages,
                token_ids=[sequence.tokens for sequence in sequences],
                rollout_log_probs=[sequence.log_probs for sequence in sequences],
                train_log_probs=before,
                current_log_probs=after,
                response_mask=masks,
            )
            row = (step, rollout_version, *measure(sequences, before), rewards.mean().item())
            table.append(row)
            print(plan.name, format_row(row), flush=True)
    return table


# Measurements.


def measure(sequences: list[Sequence], train_log_probs: list[Tensor]) -> tuple[float, float, float, float]:
    """Tokens, K3, mean and largest absolute log-prob difference over the sampled tokens, in float64."""
    mask = np.concatenate([sequence.mask for sequence in sequences])
    rollout_log_probs = np.concatenate([np.float32(sequence.log_probs) for sequence in sequences])
    difference = torch.cat(train_log_probs).double().numpy()[mask] - rollout_log_probs.astype(np.float64)[mask]
    k3 = np.expm1(difference) - difference
    return float(mask.sum()), k3.mean(), np.abs(difference).mean(), np.abs(difference).max()


HEAD = """| step | rollout_version | tokens | K3 | mean abs. difference | largest | mean reward |
|---:|---:|---:|---:|---:|---:|---:|"""


def format_row(row: tuple[float, ...]) -> str:
    """One line of the table, in Markdown."""
    step, version, tokens, k3, mean, largest, mean_reward = row
    return f"| {step} | {version} | {tokens:.0f} | {k3:.2e} | {mean:.2e} | {largest:.3f} | {mean_reward:.3f} |"


def write_tables(tables: dict[str, list[tuple[float, ...]]]) -> None:
    """Replace the measured tables in the README, between its two markers."""
    readme = HERE / "README.md"
    start, end = "<!-- measured -->\n", "<!-- end -->"
    before, _, rest = readme.read_text().partition(start)
    _, _, after = rest.partition(end)
    text = "\n".join("\n".join([f"### {name}\n", HEAD, *map(format_row, rows), ""]) for name, rows in tables.items())
    readme.write_text(before + start + text + end + after)


def check(plan: Plan, model: Model, prompts: list[bytes]) -> None:
    """Hold the cached decoder to the prefill in float32: the same arithmetic must give the same log-probs."""
    for label, engine in (("float32", model), ("bfloat16", deepcopy(model).bfloat16())):
        sequences = [Sequence(list(prompt), plan.tools) for prompt in prompts[: PROMPTS * GROUP]]
        rollout(engine, sequences, torch.Generator().manual_seed(3), fp8=False)
        with torch.no_grad():
            tokens, k3, mean, largest = measure(sequences, prefill_log_probs(model, sequences))
        figures = f"{tokens:.0f} tokens, K3 {k3:.2e}, mean {mean:.1e}, largest {largest:.1e}"
        print(f"{plan.name} {label} decode: {figures}", flush=True)
        if label == "float32" and largest > 1e-4:
            raise SystemExit(f"{plan.name}: the decoder with the KV cache disagrees with the prefill")


def main() -> None:
    """Make everything, or only check the decoder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only hold the cached decoder to the prefill")
    parser.add_argument("--pretrain-steps", type=int, help="learn for fewer steps (for trying out)")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a check that costs a sixth of the time
    functions = stdlib_functions()
    held_out = functions[::40]
    prompts = [signature for signature, _ in held_out][: PROMPTS * 8]
    functions = [pair for i, pair in enumerate(functions) if i % 40]
    size = sum(len(signature) + len(body) for signature, body in functions)
    print(f"{len(functions)} functions, {size} bytes, {len(prompts)} prompts")
    tables = {}
    for plan in PLANS:
        steps = arguments.pretrain_steps or (300 if arguments.check else plan.pretrain_steps)
        model = pretrain(plan, functions, steps)
        check(plan, model, prompts)
        if not arguments.check:
            tables[plan.name] = train(plan, model, prompts)
    if tables:
        write_tables(tables)


if __name__ == "__main__":
    main()
