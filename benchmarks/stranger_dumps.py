"""Dumps of the small models of strangers.py, each with one thing wrong that is known: made once, kept in a folder.

    python benchmarks/stranger_dumps.py FOLDER [MODEL ...]

What samples or scores otherwise does so truly; columns are spoilt afterwards by tests/factories/planted_causes.py.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from stranger_plans import PROMPT, RESPONSE, SEEN, UNSEEN, Architecture, Text  # noqa: E402
from strangers import Model, Numerics, Processors, Rollout, decoded, int8, scored, trained, updated  # noqa: E402

from tests.factories import planted_causes as planted  # noqa: E402
from tests.factories.planted_causes import Planted  # noqa: E402

MANY, SOME = 512, 160
STEPS, WORKERS = 8, 4
ENGINE, TRAINER = Numerics("bfloat16"), Numerics()
PLAIN = Processors()


@dataclass(eq=False)
class World:
    """A trained model with what was done to it.

    Attributes:
        versions: the policy and its next updates; `earlier` is a checkpoint of much before.
        prompts: [MANY, PROMPT].
        clean: what the engine sampled where nothing is wrong, and what the trainer says of it.
    """

    plan: Architecture
    versions: list[Model]
    earlier: Model
    prompts: torch.Tensor
    clean: Rollout
    train: torch.Tensor
    names: list[str]

    @classmethod
    def of(cls, plan: Architecture, folder: Path, rows: int = MANY) -> World:
        """Train the model, or read it from the folder; `rows` prompts are answered with nothing wrong."""
        text, kept = Text.of(plan), folder / f"{plan.name}.pt"
        order = np.random.default_rng(plan.seed + 50).permutation(len(text.pieces))
        prompts = torch.tensor([text.pieces[i][:PROMPT] for i in np.resize(order, MANY)])
        if kept.exists():
            states = torch.load(kept, weights_only=True)
        else:
            model, earlier = trained(plan, text)
            states = [version.state_dict() for version in (*updated(model, prompts[:48], plan.seed), earlier)]
            torch.save(states, kept)
        models = []
        for state in states:
            model = Model(plan, text.vocabulary).eval().requires_grad_(False)
            model.load_state_dict(state)
            models.append(model)
        clean = decoded(models[0], prompts[:rows], ENGINE, PLAIN, 11)
        return cls(plan, models[:-1], models[-1], prompts, clean, scored(models[0], clean, TRAINER), text.names)

    def sampled(
        self,
        how: Numerics = ENGINE,
        process: Processors = PLAIN,
        *,
        model: Model | None = None,
        raw: bool = False,
        trainer: Model | None = None,
        other: Processors | None = None,
        scoring: Numerics = TRAINER,
        rows: int = SOME,
    ) -> Planted:
        """Sampled by an engine that may differ, scored by a trainer that may differ."""
        policy = self.versions[0]
        rollout = decoded(model or policy, self.prompts[:rows], how, process, 12, raw=raw)
        return dump(rollout, scored(trainer or policy, rollout, scoring, other), self.versions[1])

    def rescored(self, how: Numerics, model: Model | None = None) -> Planted:
        """The clean samples before another trainer."""
        return dump(self.clean, scored(model or self.versions[0], self.clean, how), self.versions[1])

    def spoiled(self, spoil: Callable[[Planted], Planted]) -> Planted:
        """The clean dump, changed after it was made."""
        return spoil(dump(self.clean, self.train, self.versions[1]))

    def drafted(self) -> Planted:
        """A smaller model's log-probs stand in the rollout column."""
        draft = scored(self.earlier, self.clean, ENGINE)
        return dump(replace(self.clean, log_probs=draft), self.train, self.versions[1])

    def stale(self, lag: int, *, versions: bool = False, current: bool = False, worker: int | None = None) -> Planted:
        """The engine is `lag` updates behind, or one worker of it."""
        old, new = self.sampled(trainer=self.versions[lag]), self.sampled()
        if worker is not None:
            behind = (old.columns["worker"] == worker)[old.row]
            fresh = self.sampled(model=self.versions[lag], trainer=self.versions[lag])
            chosen = np.flatnonzero(old.columns["worker"] == worker)
            rest = np.flatnonzero(old.columns["worker"] != worker)
            assert behind.any()
            return joined(old.rows(chosen), fresh.rows(rest))
        if versions:
            for found, behind in ((old, lag), (new, 0)):
                found.columns["rollout_version"] = np.full(len(found), 5)
                found.columns["train_version"] = np.full(len(found), 5 + behind)
            half = np.arange(len(old)) % 2 == 0
            return joined(old.rows(np.flatnonzero(half)), new.rows(np.flatnonzero(~half)))
        if current:
            rollout = decoded(self.versions[0], self.prompts[:SOME], ENGINE, PLAIN, 12)
            return dump(rollout, scored(self.versions[lag], rollout, TRAINER), self.versions[lag + 1], current=True)
        return old

    def kept_prefix(self, lag: int) -> Planted:
        """Four responses to each prompt; of half of the prompts the engine has kept the cache over some updates."""
        parts, policy = [], self.versions[lag]
        prompts = self.prompts[: SOME // 4].repeat_interleave(4, 0)
        for seed, cached_by in ((31, None), (32, self.versions[0])):
            rollout = decoded(policy, prompts, ENGINE, PLAIN, seed, cached_by=cached_by)
            parts.append(dump(rollout, scored(policy, rollout, TRAINER), self.versions[-1]))
            prompt = np.arange(SOME) // 4
            parts[-1].columns |= {"prompt_id": prompt, "step": prompt // 5, "worker": np.arange(SOME) % WORKERS}
        kept = prompt % 2 == 0
        return joined(parts[1].rows(np.flatnonzero(kept)), parts[0].rows(np.flatnonzero(~kept)))

    def tokenized_anew(self) -> Planted:
        """Of every third response the trainer sees the same text, one of whose words has become its letters."""
        tokens, train = self.clean.tokens.clone(), self.train.clone()
        for row in range(0, len(tokens), 3):
            length = int(self.clean.lengths[row])
            words = [i for i in range(4, length - 12) if len(self.name(tokens[row, i])) > 1]
            if words:
                i = words[len(words) // 2]
                letters = torch.tensor([ord(letter) for letter in self.name(tokens[row, i])])
                tokens[row] = torch.cat([tokens[row, :i], letters, tokens[row, i + 1 :]])[: tokens.shape[1]]
        train = scored(self.versions[0], replace(self.clean, tokens=tokens), TRAINER)
        return dump(self.clean, train, self.versions[1])

    def name(self, token: torch.Tensor) -> str:
        """The text of a token; nothing for the end of a text."""
        return self.names[int(token)] if int(token) < len(self.names) else ""

    def by_step(self, lags: list[int]) -> Planted:
        """Steps whose engine is so many updates behind."""
        parts = []
        for step, lag in enumerate(lags):
            whole = dump(self.clean, scored(self.versions[lag], self.clean, TRAINER), self.versions[1])
            parts.append(whole.rows(np.arange(step, SOME, len(lags))))
            parts[-1].columns["step"][:] = step
        both = parts[0]
        for part in parts[1:]:
            both = joined(both, part)
        return both

    def adapted(self) -> Model:
        """The policy with a low-rank change that the other side has not."""
        model, generator = deepcopy(self.versions[0]), torch.Generator().manual_seed(5)
        for block in model.blocks:
            for matrix in (block.q.weight, block.out.weight):  # type: ignore[union-attr]
                a, b = torch.randn(2, len(matrix), 4, generator=generator)
                matrix += 0.05 * matrix.std() * a @ b.T
        return model


def dump(rollout: Rollout, train: torch.Tensor, following: Model, *, current: bool = False) -> Planted:
    """Both columns with ids, steps, workers and prompts."""
    inside = np.arange(RESPONSE) < rollout.lengths[:, None]
    count = len(rollout.lengths)
    tokens = {
        "rollout_log_probs": rollout.log_probs.numpy()[inside].astype(np.float32),
        "train_log_probs": train.numpy()[inside].astype(np.float32),
        "token_ids": rollout.tokens.numpy()[inside].astype(np.int32),
        "response_mask": np.ones(inside.sum(), np.bool_),
    }
    if current:
        tokens["current_log_probs"] = scored(following, rollout, TRAINER).numpy()[inside].astype(np.float32)
    columns = {
        "sequence_id": np.arange(count),
        "step": np.arange(count) % STEPS,
        "worker": np.arange(count) // STEPS % WORKERS,
    }
    return Planted(rollout.lengths, tokens, columns)


def joined(first: Planted, second: Planted) -> Planted:
    """The rows of both."""
    return Planted(
        np.concatenate([first.lengths, second.lengths]),
        {name: np.concatenate([values, second.tokens[name]]) for name, values in first.tokens.items()},
        {name: np.concatenate([values, second.columns[name]]) for name, values in first.columns.items()},
    )


@dataclass(frozen=True)
class Plant:
    """One known cause: findings that name it rightly, and how it is made; `listed`: the tool says that it finds it."""

    name: str
    truth: frozenset[str]
    make: Callable[[World], Planted]
    listed: bool = True
    moe: bool = False
    words: bool = False


WEIGHTS = "weights_differ quantized_rollout stale_policy"
NOISE = "numerical_noise moe_routing"


def plants() -> list[Plant]:
    """All of them."""
    found: list[Plant] = []

    def add(name: str, truth: str, make: Callable[[World], Planted], **only: bool) -> None:
        found.append(Plant(name, frozenset(truth.split()), make, **only))

    for t in (0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5):
        add(f"temperature {t}", "temperature", lambda w, t=t: w.sampled(process=Processors(temperature=t)))
    for t in (0.7, 0.85, 1.15, 1.3):
        process = Processors(temperature=t)
        add(f"raw {t}", "raw_logprobs", lambda w, p=process: w.sampled(process=p, raw=True, other=p))
    for name, process in {
        **{f"top-p {p}": Processors(top_p=p) for p in (0.8, 0.9, 0.95, 0.98)},
        **{f"top-k {k}": Processors(top_k=k) for k in (8, 20, 40)},
        **{f"min-p {p}": Processors(min_p=p) for p in (0.02, 0.05, 0.1)},
    }.items():
        add(name, "truncated_sampling other_vocabulary", lambda w, p=process: w.sampled(process=p))
    for name, process, truth in (
        ("repetition 1.1", Processors(repetition=1.1), "logit_penalty"),
        ("repetition 1.3", Processors(repetition=1.3), "logit_penalty"),
        ("presence 0.5", Processors(presence=0.5), "logit_penalty"),
        ("frequency 0.3", Processors(frequency=0.3), "logit_penalty"),
        ("bias 1", Processors(bias=1.0), "logit_bias logit_penalty"),
        ("banned", Processors(banned=True), "other_vocabulary truncated_sampling"),
    ):
        add(name, f"{truth} unexplained", lambda w, p=process: w.sampled(process=p), listed=False)
    add(
        "padded vocabulary",
        "other_vocabulary truncated_sampling unexplained numerical_noise",
        lambda w: w.sampled(scoring=Numerics(spare=True)),
        listed=False,
    )
    add("softcap 8", "logit_softcap unexplained", lambda w: w.sampled(Numerics("bfloat16", cap=8.0)), listed=False)
    add("softcap 15", "logit_softcap unexplained", lambda w: w.sampled(Numerics("bfloat16", cap=15.0)), listed=False)
    add("softcap 8 trainer", "logit_softcap unexplained", lambda w: w.rescored(Numerics(cap=8.0)), listed=False)
    add("int8", f"{WEIGHTS} {NOISE}", lambda w: w.sampled(model=int8(w.versions[0])))
    add("int4", "weights_differ quantized_rollout", lambda w: w.sampled(model=int8(w.versions[0], 4)))
    add("fp8 cache", f"cache_quantization {NOISE}", lambda w: w.sampled(Numerics("bfloat16", fp8_cache=True)))
    for lag in (1, 3):
        add(f"stale {lag}, versions", "stale_policy", lambda w, lag=lag: w.stale(lag, versions=True))
        add(f"stale {lag}, current", "stale_policy weights_differ", lambda w, lag=lag: w.stale(lag, current=True))
        add(f"stale {lag}, bare", "stale_policy weights_differ unexplained", lambda w, lag=lag: w.stale(lag))
    add("stale worker 5", "stale_worker", lambda w: w.stale(5, worker=2))
    add("growing", "growing_mismatch", lambda w: w.by_step([0, 0, 0, 0, 1, 2, 4, 5]))
    add("stale step", "stale_step unexplained", lambda w: w.by_step([0, 0, 0, 5, 0, 0, 0, 0]), listed=False)
    add("wrong checkpoint", "weights_differ unexplained", lambda w: w.sampled(model=w.earlier), listed=False)
    add("adapter", "weights_differ unexplained", lambda w: w.sampled(model=w.adapted()), listed=False)
    add("draft", "other_model unexplained", lambda w: w.drafted(), listed=False)
    for p in (0.02, 0.1):
        add(f"dropout {p}", "random_noise unexplained", lambda w, p=p: w.rescored(Numerics(dropout=p)), listed=False)
    for base in (0.5, 4.0):
        truth = "position_mismatch unexplained"
        add(f"position base {base}", truth, lambda w, b=base: w.rescored(Numerics(rope=b)), listed=False)
    for window in (12, 40):
        truth = "position_mismatch unexplained"
        add(f"window {window}", truth, lambda w, n=window: w.rescored(Numerics(window=n)), listed=False)
    add("half the prompt lost", "context_mismatch", lambda w: w.rescored(Numerics(blanked=PROMPT // 2)))
    add("one prompt token", "context_mismatch unexplained", lambda w: w.rescored(Numerics(blanked=1)), listed=False)
    add("router noise", "moe_routing unexplained", lambda w: w.rescored(Numerics(noise=0.1)), listed=False, moe=True)
    add("kept prefix 0", NOISE, lambda w: w.kept_prefix(0))
    add("kept prefix 5", "stale_prefix", lambda w: w.kept_prefix(5))
    add("retokenized", "retokenized", lambda w: w.tokenized_anew(), words=True)
    for name, truth, listed, spoil in spoils():
        add(name, truth, lambda w, s=spoil: w.spoiled(s), listed=listed)
    return found


def spoils() -> list[tuple[str, str, bool, Callable[[Planted], Planted]]]:
    """What can happen to columns after they were computed."""
    return [
        *((f"shift {k:+d}", "misaligned", True, lambda d, k=k: planted.shifted(d, k)) for k in (-1, 1, 3)),
        ("shift of 5 %", "misaligned", True, lambda d: planted.shifted(d, 1, 0.05)),
        ("edited 30 %", "edited_response", True, lambda d: planted.edited(d, 0.3)),
        ("edited 2 %", "edited_response unexplained", False, lambda d: planted.edited(d, 0.02)),
        ("tools", "unsampled_tokens", True, lambda d: planted.unsampled_tokens(d, 12, 0.3)),
        *(
            (f"stored {kind}", "low_precision_logging", True, lambda d, k=kind: planted.rounded(d, "rollout", k))
            for kind in ("bfloat16", "float16", "3", "2")
        ),
        ("base 2", "wrong_log_base", True, lambda d: planted.other_logarithm(d, "rollout", 1 / math.log(2))),
        ("probabilities", "probabilities_not_logs", True, lambda d: planted.probabilities(d, "rollout")),
        ("duplicates", "duplicated_rows", True, lambda d: planted.duplicated(d, 0.2)),
        ("NaN", "padding_or_sentinel", True, lambda d: planted.placeholder(d, "train", math.nan, 0.01)),
        ("no end", "padding_or_sentinel", True, planted.no_end),
        ("zeros on 1 %", "padding_or_sentinel unsampled_tokens unexplained", False,
         lambda d: planted.placeholder(d, "rollout", 0.0, 0.01)),
        ("-30 on 1 %", "padding_or_sentinel unexplained", False,
         lambda d: planted.placeholder(d, "rollout", -30.0, 0.01)),
        ("10 % wrong ends", "padding_or_sentinel unexplained", False, lambda d: planted.wrong_ends(d, 0.1)),
        ("swapped 5 %", "swapped_rows unexplained", False, lambda d: planted.swapped(d, 0.05)),
        ("swapped all", "swapped_rows unexplained", False, lambda d: planted.swapped(d, 1.0)),
        ("reversed", "reversed_rows unexplained", False, planted.reversed_rows),
        ("cumulative", "cumulative unexplained", False, planted.cumulative),
        ("means", "sequence_means unexplained", False, planted.sequence_means),
        ("clamped", "clamped unexplained", False, lambda d: planted.clamped(d, -3.0)),
    ]  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for plan in (*SEEN, *UNSEEN):
        if len(sys.argv) > 2 and plan.name not in sys.argv[2:]:
            continue
        (folder / plan.name).mkdir(parents=True, exist_ok=True)
        world = World.of(plan, folder)
        for name, make in {
            "clean": lambda w: w.spoiled(lambda d: d),
            "clean float32": lambda w: w.sampled(TRAINER),
            "clean both bfloat16": lambda w: w.rescored(ENGINE),
            "clean greedy": lambda w: w.sampled(process=Processors(temperature=0.02), raw=True),
            **{plant.name: plant.make for plant in plants() if plan.experts > plant.moe and plan.words >= plant.words},
        }.items():
            path = folder / plan.name / f"{name}.parquet"
            if not path.exists():
                torch.manual_seed(1)
                started = time.perf_counter()
                make(world).write(path)
                print(f"{plan.name} {name}  {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
