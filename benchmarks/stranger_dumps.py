"""Write dumps of small trained models, each with one known cause, for benchmarks/diagnose.py.

    python benchmarks/stranger_dumps.py FOLDER [MODEL ...]

Trains each model, which takes several minutes, and writes FOLDER/MODEL.pt and FOLDER/MODEL/CAUSE.parquet. Existing
files are kept. A cause in the engine or in the trainer is really computed, for example with int8 weights. A cause in
the recorded columns is added afterwards by tests/factories/planted_causes.py.
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
from strangers import (  # noqa: E402
    Model,
    Numerics,
    Processors,
    Rollout,
    quantize,
    sample_responses,
    score_responses,
    train_model,
    update_policy,
)

from tests.factories import planted_causes as planted  # noqa: E402
from tests.factories.planted_causes import Planted  # noqa: E402

MANY, SOME = 512, 160
"""Number of rows of the clean dump and of dumps that are sampled again."""
STEPS, WORKERS = 8, 4
ENGINE, TRAINER = Numerics("bfloat16"), Numerics()
PLAIN = Processors()


@dataclass(eq=False)
class TrainedModel:
    """A trained model, its updates, and a clean rollout.

    Attributes:
        versions: The policy and its next updates.
        earlier: A checkpoint from the middle of the training.
        prompts: Token ids, [MANY, PROMPT].
        clean: Responses that the engine sampled without a fault.
        train: The trainer's log-probs of the clean responses, [MANY, RESPONSE].
        names: The text of each token.
    """

    plan: Architecture
    versions: list[Model]
    earlier: Model
    prompts: torch.Tensor
    clean: Rollout
    train: torch.Tensor
    names: list[str]

    @classmethod
    def load(cls, plan: Architecture, folder: Path, rows: int = MANY) -> TrainedModel:
        """Train the model or read it from the folder, and sample `rows` clean responses."""
        text, kept = Text.of(plan), folder / f"{plan.name}.pt"
        order = np.random.default_rng(plan.seed + 50).permutation(len(text.pieces))
        prompts = torch.tensor([text.pieces[i][:PROMPT] for i in np.resize(order, MANY)])
        if kept.exists():
            states = torch.load(kept, weights_only=True)
        else:
            model, earlier = train_model(plan, text)
            states = [version.state_dict() for version in (*update_policy(model, prompts[:48], plan.seed), earlier)]
            torch.save(states, kept)
        models = []
        for state in states:
            model = Model(plan, text.vocabulary).eval().requires_grad_(False)
            model.load_state_dict(state)
            models.append(model)
        clean = sample_responses(models[0], prompts[:rows], ENGINE, PLAIN, 11)
        return cls(
            plan, models[:-1], models[-1], prompts, clean, score_responses(models[0], clean, TRAINER), text.names
        )

    def sample(
        self,
        numerics: Numerics = ENGINE,
        process: Processors = PLAIN,
        *,
        model: Model | None = None,
        raw: bool = False,
        trainer: Model | None = None,
        other: Processors | None = None,
        scoring: Numerics = TRAINER,
        rows: int = SOME,
    ) -> Planted:
        """Sample responses with one engine and score them with one trainer. `other` are the trainer's processors."""
        policy = self.versions[0]
        rollout = sample_responses(model or policy, self.prompts[:rows], numerics, process, 12, raw=raw)
        return build_dump(rollout, score_responses(trainer or policy, rollout, scoring, other), self.versions[1])

    def rescore(self, numerics: Numerics, model: Model | None = None) -> Planted:
        """Score the clean responses with another trainer."""
        return build_dump(
            self.clean, score_responses(model or self.versions[0], self.clean, numerics), self.versions[1]
        )

    def corrupt(self, corrupt: Callable[[Planted], Planted]) -> Planted:
        """Change the columns of the clean dump."""
        return corrupt(build_dump(self.clean, self.train, self.versions[1]))

    def use_draft_log_probs(self) -> Planted:
        """Record the log-probs of a draft model in the rollout column."""
        draft = score_responses(self.earlier, self.clean, ENGINE)
        return build_dump(replace(self.clean, log_probs=draft), self.train, self.versions[1])

    def make_stale(
        self, lag: int, *, versions: bool = False, current: bool = False, worker: int | None = None
    ) -> Planted:
        """Make a dump whose engine, or one worker of the engine, is `lag` updates behind."""
        old, new = self.sample(trainer=self.versions[lag]), self.sample()
        if worker is not None:
            behind = (old.columns["worker"] == worker)[old.row]
            fresh = self.sample(model=self.versions[lag], trainer=self.versions[lag])
            chosen = np.flatnonzero(old.columns["worker"] == worker)
            rest = np.flatnonzero(old.columns["worker"] != worker)
            assert behind.any()
            return concatenate(old.rows(chosen), fresh.rows(rest))
        if versions:
            for found, behind in ((old, lag), (new, 0)):
                found.columns["rollout_version"] = np.full(len(found), 5)
                found.columns["train_version"] = np.full(len(found), 5 + behind)
            half = np.arange(len(old)) % 2 == 0
            return concatenate(old.rows(np.flatnonzero(half)), new.rows(np.flatnonzero(~half)))
        if current:
            rollout = sample_responses(self.versions[0], self.prompts[:SOME], ENGINE, PLAIN, 12)
            return build_dump(
                rollout, score_responses(self.versions[lag], rollout, TRAINER), self.versions[lag + 1], current=True
            )
        return old

    def reuse_prefix(self, lag: int) -> Planted:
        """Sample four responses per prompt. For half of the prompts, the reused cache is `lag` updates old."""
        parts, policy = [], self.versions[lag]
        prompts = self.prompts[: SOME // 4].repeat_interleave(4, 0)
        for seed, cached_by in ((31, None), (32, self.versions[0])):
            rollout = sample_responses(policy, prompts, ENGINE, PLAIN, seed, cached_by=cached_by)
            parts.append(build_dump(rollout, score_responses(policy, rollout, TRAINER), self.versions[-1]))
            prompt = np.arange(SOME) // 4
            parts[-1].columns |= {"prompt_id": prompt, "step": prompt // 5, "worker": np.arange(SOME) % WORKERS}
        kept = prompt % 2 == 0
        return concatenate(parts[1].rows(np.flatnonzero(kept)), parts[0].rows(np.flatnonzero(~kept)))

    def retokenize(self) -> Planted:
        """Score every third response after one of its words was split into letters."""
        tokens, train = self.clean.tokens.clone(), self.train.clone()
        for row in range(0, len(tokens), 3):
            length = int(self.clean.lengths[row])
            words = [i for i in range(4, length - 12) if len(self.token_text(tokens[row, i])) > 1]
            if words:
                i = words[len(words) // 2]
                letters = torch.tensor([ord(letter) for letter in self.token_text(tokens[row, i])])
                tokens[row] = torch.cat([tokens[row, :i], letters, tokens[row, i + 1 :]])[: tokens.shape[1]]
        train = score_responses(self.versions[0], replace(self.clean, tokens=tokens), TRAINER)
        return build_dump(self.clean, train, self.versions[1])

    def token_text(self, token: torch.Tensor) -> str:
        """Return the text of a token, or an empty string for the end of the text."""
        return self.names[int(token)] if int(token) < len(self.names) else ""

    def vary_lag(self, lags: list[int]) -> Planted:
        """Make one step per lag, whose engine is this number of updates behind."""
        parts = []
        for step, lag in enumerate(lags):
            whole = build_dump(self.clean, score_responses(self.versions[lag], self.clean, TRAINER), self.versions[1])
            parts.append(whole.rows(np.arange(step, SOME, len(lags))))
            parts[-1].columns["step"][:] = step
        both = parts[0]
        for part in parts[1:]:
            both = concatenate(both, part)
        return both

    def add_adapter(self) -> Model:
        """Return the policy with a low-rank adapter."""
        model, generator = deepcopy(self.versions[0]), torch.Generator().manual_seed(5)
        for block in model.blocks:
            for matrix in (block.q.weight, block.out.weight):  # type: ignore[union-attr]
                a, b = torch.randn(2, len(matrix), 4, generator=generator)
                matrix += 0.05 * matrix.std() * a @ b.T
        return model


def build_dump(rollout: Rollout, train: torch.Tensor, following: Model, *, current: bool = False) -> Planted:
    """Return a dump of both log-probs with ids, steps and workers."""
    inside = np.arange(RESPONSE) < rollout.lengths[:, None]
    count = len(rollout.lengths)
    tokens = {
        "rollout_log_probs": rollout.log_probs.numpy()[inside].astype(np.float32),
        "train_log_probs": train.numpy()[inside].astype(np.float32),
        "token_ids": rollout.tokens.numpy()[inside].astype(np.int32),
        "response_mask": np.ones(inside.sum(), np.bool_),
    }
    if current:
        tokens["current_log_probs"] = score_responses(following, rollout, TRAINER).numpy()[inside].astype(np.float32)
    columns = {
        "sequence_id": np.arange(count),
        "step": np.arange(count) % STEPS,
        "worker": np.arange(count) // STEPS % WORKERS,
    }
    return Planted(rollout.lengths, tokens, columns)


def concatenate(first: Planted, second: Planted) -> Planted:
    """Return a dump with the rows of two dumps."""
    return Planted(
        np.concatenate([first.lengths, second.lengths]),
        {name: np.concatenate([values, second.tokens[name]]) for name, values in first.tokens.items()},
        {name: np.concatenate([values, second.columns[name]]) for name, values in first.columns.items()},
    )


@dataclass(frozen=True)
class PlantedCause:
    """A known cause and the function that makes its dump.

    Attributes:
        truth: Causes of findings that count as right.
        listed: Whether `diagnose` claims to identify the cause.
        moe: Whether the cause needs a mixture of experts.
        words: Whether the cause needs tokens that are words.
    """

    name: str
    truth: frozenset[str]
    make: Callable[[TrainedModel], Planted]
    listed: bool = True
    moe: bool = False
    words: bool = False


WEIGHTS = "weights_differ quantized_rollout stale_policy"
NOISE = "numerical_noise moe_routing"


def list_causes() -> list[PlantedCause]:
    """Return all planted causes."""
    causes: list[PlantedCause] = []

    def add(name: str, truth: str, make: Callable[[TrainedModel], Planted], **only: bool) -> None:
        causes.append(PlantedCause(name, frozenset(truth.split()), make, **only))

    for t in (0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5):
        add(f"temperature {t}", "temperature", lambda w, t=t: w.sample(process=Processors(temperature=t)))
    for t in (0.7, 0.85, 1.15, 1.3):
        process = Processors(temperature=t)
        add(f"raw {t}", "raw_logprobs", lambda w, p=process: w.sample(process=p, raw=True, other=p))
    for name, process in {
        **{f"top-p {p}": Processors(top_p=p) for p in (0.8, 0.9, 0.95, 0.98)},
        **{f"top-k {k}": Processors(top_k=k) for k in (8, 20, 40)},
        **{f"min-p {p}": Processors(min_p=p) for p in (0.02, 0.05, 0.1)},
    }.items():
        add(name, "truncated_sampling other_vocabulary", lambda w, p=process: w.sample(process=p))
    for name, process, truth in (
        ("repetition 1.1", Processors(repetition=1.1), "logit_penalty"),
        ("repetition 1.3", Processors(repetition=1.3), "logit_penalty"),
        ("presence 0.5", Processors(presence=0.5), "logit_penalty"),
        ("frequency 0.3", Processors(frequency=0.3), "logit_penalty"),
        ("bias 1", Processors(bias=1.0), "logit_bias logit_penalty"),
        ("banned", Processors(banned=True), "other_vocabulary truncated_sampling"),
    ):
        add(name, f"{truth} unexplained", lambda w, p=process: w.sample(process=p), listed=False)
    add(
        "padded vocabulary",
        "other_vocabulary truncated_sampling unexplained numerical_noise",
        lambda w: w.sample(scoring=Numerics(spare=True)),
        listed=False,
    )
    add("softcap 8", "logit_softcap unexplained", lambda w: w.sample(Numerics("bfloat16", cap=8.0)), listed=False)
    add("softcap 15", "logit_softcap unexplained", lambda w: w.sample(Numerics("bfloat16", cap=15.0)), listed=False)
    add("softcap 8 trainer", "logit_softcap unexplained", lambda w: w.rescore(Numerics(cap=8.0)), listed=False)
    add("int8", f"{WEIGHTS} {NOISE}", lambda w: w.sample(model=quantize(w.versions[0])))
    add("int4", "weights_differ quantized_rollout", lambda w: w.sample(model=quantize(w.versions[0], 4)))
    add("fp8 cache", f"cache_quantization {NOISE}", lambda w: w.sample(Numerics("bfloat16", fp8_cache=True)))
    for lag in (1, 3):
        add(f"stale {lag}, versions", "stale_policy", lambda w, lag=lag: w.make_stale(lag, versions=True))
        add(f"stale {lag}, current", "stale_policy weights_differ", lambda w, lag=lag: w.make_stale(lag, current=True))
        add(f"stale {lag}, bare", "stale_policy weights_differ unexplained", lambda w, lag=lag: w.make_stale(lag))
    add("stale worker 5", "stale_worker", lambda w: w.make_stale(5, worker=2))
    add("growing", "growing_mismatch", lambda w: w.vary_lag([0, 0, 0, 0, 1, 2, 4, 5]))
    add("stale step", "stale_step unexplained", lambda w: w.vary_lag([0, 0, 0, 5, 0, 0, 0, 0]), listed=False)
    add("wrong checkpoint", "weights_differ unexplained", lambda w: w.sample(model=w.earlier), listed=False)
    add("adapter", "weights_differ unexplained", lambda w: w.sample(model=w.add_adapter()), listed=False)
    add("draft", "other_model unexplained", lambda w: w.use_draft_log_probs(), listed=False)
    for p in (0.02, 0.1):
        add(f"dropout {p}", "random_noise unexplained", lambda w, p=p: w.rescore(Numerics(dropout=p)), listed=False)
    for base in (0.5, 4.0):
        truth = "position_mismatch unexplained"
        add(f"position base {base}", truth, lambda w, b=base: w.rescore(Numerics(rope=b)), listed=False)
    for window in (12, 40):
        truth = "position_mismatch unexplained"
        add(f"window {window}", truth, lambda w, n=window: w.rescore(Numerics(window=n)), listed=False)
    add("half the prompt lost", "context_mismatch", lambda w: w.rescore(Numerics(lost_tokens=PROMPT // 2)))
    add("one prompt token", "context_mismatch unexplained", lambda w: w.rescore(Numerics(lost_tokens=1)), listed=False)
    add("router noise", "moe_routing unexplained", lambda w: w.rescore(Numerics(noise=0.1)), listed=False, moe=True)
    add("kept prefix 0", NOISE, lambda w: w.reuse_prefix(0))
    add("kept prefix 5", "stale_prefix", lambda w: w.reuse_prefix(5))
    add("retokenized", "retokenized", lambda w: w.retokenize(), words=True)
    for name, truth, listed, corrupt in list_corruptions():
        add(name, truth, lambda w, s=corrupt: w.corrupt(s), listed=listed)
    return causes


def list_corruptions() -> list[tuple[str, str, bool, Callable[[Planted], Planted]]]:
    """Return changes of recorded columns: name, right causes, whether `diagnose` claims to find it, and function."""
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
        trained = TrainedModel.load(plan, folder)
        for name, make in {
            "clean": lambda w: w.corrupt(lambda d: d),
            "clean float32": lambda w: w.sample(TRAINER),
            "clean both bfloat16": lambda w: w.rescore(ENGINE),
            "clean greedy": lambda w: w.sample(process=Processors(temperature=0.02), raw=True),
            **{
                plant.name: plant.make
                for plant in list_causes()
                if plan.experts > plant.moe and plan.words >= plant.words
            },
        }.items():
            path = folder / plan.name / f"{name}.parquet"
            if not path.exists():
                torch.manual_seed(1)
                started = time.perf_counter()
                make(trained).write(path)
                print(f"{plan.name} {name}  {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
