"""Measure how often `diagnose` names the side that has the fault.

    python benchmarks/sides.py DUMPS [MODEL ...]            # write the dumps: 15 minutes per model
    python benchmarks/sides.py DUMPS [MODEL ...] --write    # write the tables of "The wrong side" in accuracy.md

DUMPS contains the trained models and their dumps. Each dump has one fault in the engine, in the trainer or in the
reference, and the fault is really computed. The reference log-probs are one prefill in float64 with the trainer's
weights at the sampling temperature. The tables are in docs/methods/accuracy.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measure import format_share, replace_section, table  # noqa: E402
from stranger_dumps import TrainedModel, build_dump, concatenate  # noqa: E402
from stranger_plans import PROMPT, SEEN, UNSEEN, Architecture  # noqa: E402
from strangers import Model, Numerics, Processors, Rollout, quantize, sample_responses, score_responses  # noqa: E402

from mismatchctl.api.diagnose import diagnose  # noqa: E402
from mismatchctl.results.model import Sides  # noqa: E402
from tests.factories.planted_causes import Planted  # noqa: E402

ROWS = 64
LEVELS = ("high", "medium", "low")
DEVELOPED_ON = ("rope-swiglu", "softmax-moe-sure")
DOCUMENT = ROOT / "docs/methods/accuracy.md"
BEGIN, END = "<!-- benchmarks/sides.py writes from here -->", "<!-- to here -->"


@dataclass(frozen=True)
class Computation:
    """Weights, numerics and logit processors of one side."""

    model: Callable[[TrainedModel], Model] = lambda trained: trained.versions[0]
    numerics: Numerics = field(default_factory=Numerics)
    process: Processors = field(default_factory=Processors)


PLAIN = {name: Computation(numerics=Numerics(name)) for name in ("float32", "bfloat16")}
TRUTH = Computation(numerics=Numerics("float64"))


@dataclass(frozen=True)
class PlantedFault:
    """A known fault, and the side that has it: "rollout", "trainer", "both", "none" or "reference"."""

    name: str
    side: str
    make: Callable[[TrainedModel], Planted]
    experts: bool = False


def make_dump(
    trained: TrainedModel,
    engine: Computation,
    trainer: Computation,
    reference: Computation = TRUTH,
    *,
    raw: bool = False,
    same: bool = False,
) -> Planted:
    """Make a dump with reference log-probs. With `same`, the trainer's column contains the engine's log-probs."""
    rollout = _sample(trained, engine, raw)
    train = _score(trained, rollout, trainer)
    dump = build_dump(rollout, rollout.log_probs if same else train, trained.versions[1])
    inside = np.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None]
    truth = _score(trained, rollout, reference)
    dump.tokens["reference_log_probs"] = truth.numpy()[inside].astype(np.float32)
    return dump


@cache
def _sample(trained: TrainedModel, engine: Computation, raw: bool) -> Rollout:
    """Sample responses, cached because several faults need the same responses."""
    return sample_responses(engine.model(trained), trained.prompts[:ROWS], engine.numerics, engine.process, 12, raw=raw)


@cache
def _score(trained: TrainedModel, rollout: Rollout, computation: Computation) -> torch.Tensor:
    """Score responses, cached because several faults need the same scores."""
    return score_responses(computation.model(trained), rollout, computation.numerics, computation.process)


def mix_rows(
    trained: TrainedModel,
    usual: Computation,
    rare: Computation,
    rows: Callable[[np.ndarray], np.ndarray],
    *,
    engine: bool,
) -> Planted:
    """Make a dump in which one side computes some rows differently, for example by worker or by micro-batch."""
    base = PLAIN[usual.numerics.dtype]
    first, second = (
        make_dump(trained, computation, base) if engine else make_dump(trained, base, computation)
        for computation in (usual, rare)
    )
    other = rows(np.arange(ROWS))
    return concatenate(first.rows(np.flatnonzero(~other)), second.rows(np.flatnonzero(other)))


def list_computations(base: str) -> dict[str, tuple[Computation, bool]]:
    """Return the faulty computations of one side, and whether each needs experts."""
    plain, numerics = PLAIN[base], Numerics(base)
    found = {
        "int8 weights": replace(plain, model=lambda trained: quantize(trained.versions[0])),
        "int4 weights": replace(plain, model=lambda trained: quantize(trained.versions[0], 4)),
        "fp8 cache": replace(plain, numerics=replace(numerics, fp8_cache=True)),
        "half the prompt lost": replace(plain, numerics=replace(numerics, lost_tokens=PROMPT // 2)),
        "position base 4": replace(plain, numerics=replace(numerics, rope=4.0)),
        "dropout 0.02": replace(plain, numerics=replace(numerics, dropout=0.02)),
        "bfloat16 logits": replace(plain, numerics=replace(numerics, bfloat16_part="logits")),
        **{
            f"{lag} updates apart": replace(plain, model=lambda trained, lag=lag: trained.versions[lag])
            for lag in (1, 5)
        },
    }
    moe = {
        "bfloat16 router": replace(plain, numerics=replace(numerics, bfloat16_part="router")),
        "router noise 0.05": replace(plain, numerics=replace(numerics, noise=0.05)),
    }
    kept = found if base == "bfloat16" else {name: found[name] for name in ("int8 weights", "bfloat16 logits")}
    return {name: (computation, False) for name, computation in kept.items()} | {
        name: (computation, True) for name, computation in moe.items()
    }


def list_faults() -> Iterator[PlantedFault]:
    """Yield all faults."""
    for base, plain in reversed(PLAIN.items()):
        at = f"{base}: "
        noise = "none" if base == "float32" else "both"
        yield PlantedFault(f"{at}clean", noise, lambda w, p=plain: make_dump(w, p, p))
        yield PlantedFault(f"{at}identical", noise, lambda w, p=plain: make_dump(w, p, p, same=True))
        for name, (computation, experts) in list_computations(base).items():
            yield PlantedFault(
                f"{at}{name}, rollout", "rollout", lambda w, p=plain, o=computation: make_dump(w, o, p), experts
            )
            yield PlantedFault(
                f"{at}{name}, trainer", "trainer", lambda w, p=plain, o=computation: make_dump(w, p, o), experts
            )
            if base == "bfloat16" and name in ("int4 weights", "half the prompt lost"):
                yield PlantedFault(
                    f"{at}{name}, identical", "both", lambda w, o=computation: make_dump(w, o, o, same=True)
                )
                yield PlantedFault(f"{at}{name}, each by itself", "both", lambda w, o=computation: make_dump(w, o, o))
        for t in (0.7, 0.97):
            tempered = Processors(temperature=t)
            ours, theirs = replace(plain, process=tempered), replace(TRUTH, process=tempered)
            yield PlantedFault(
                f"{at}raw at {t}, rollout", "rollout", lambda w, a=ours, c=theirs: make_dump(w, a, a, c, raw=True)
            )
            yield PlantedFault(
                f"{at}temperature {t}, trainer", "trainer", lambda w, a=ours, b=plain, c=theirs: make_dump(w, a, b, c)
            )
            yield PlantedFault(f"{at}temperature {t}, reference", "reference", lambda w, a=ours: make_dump(w, a, a))
        for k in (-1, 1):
            for side, column in (("rollout", "rollout"), ("trainer", "train"), ("reference", "reference")):
                yield PlantedFault(
                    f"{at}shift {k:+d}, {side}",
                    side,
                    lambda w, p=plain, k=k, c=column: shift_column(make_dump(w, p, p), f"{c}_log_probs", k),
                )
        stale = replace(plain, model=lambda trained: trained.versions[6])
        for side in ("rollout", "trainer"):
            yield PlantedFault(
                f"{at}one worker's weights, {side}",
                side,
                lambda w, p=plain, o=stale, s=side: mix_rows(w, p, o, lambda i: i // 8 % 4 == 2, engine=s == "rollout"),
            )
        blank = replace(plain, numerics=replace(plain.numerics, lost_tokens=2))
        yield PlantedFault(
            f"{at}padding seen by some, trainer",
            "trainer",
            lambda w, p=plain, o=blank: mix_rows(w, p, o, lambda i: i % 5 == 0, engine=False),
        )
        older = replace(TRUTH, model=lambda trained: trained.versions[6])
        yield PlantedFault(
            f"{at}other weights, reference", "reference", lambda w, p=plain, o=older: make_dump(w, p, p, o)
        )
        lost = replace(TRUTH, numerics=replace(TRUTH.numerics, lost_tokens=PROMPT // 2))
        yield PlantedFault(
            f"{at}half the prompt lost, reference", "reference", lambda w, p=plain, o=lost: make_dump(w, p, p, o)
        )
    fine, rough = PLAIN["float32"], PLAIN["bfloat16"]
    yield PlantedFault("float32 rollout, bfloat16 trainer", "trainer", lambda w: make_dump(w, fine, rough))
    yield PlantedFault("bfloat16 rollout, float32 trainer", "rollout", lambda w: make_dump(w, rough, fine))
    yield PlantedFault(
        "trainer in bfloat16 for small batches",
        "trainer",
        lambda w: mix_rows(w, fine, rough, lambda i: i % 16 == 0, engine=False),
    )
    yield PlantedFault(
        "trainer in bfloat16 for half of the batches",
        "trainer",
        lambda w: mix_rows(w, fine, rough, lambda i: i % 16 < 8, engine=False),
    )


def shift_column(given: Planted, column: str, by: int) -> Planted:
    """Shift a column within its rows."""
    rows = np.split(given.tokens[column], np.cumsum(given.lengths)[:-1])
    given.tokens[column] = np.concatenate([np.roll(row, by) for row in rows])
    return given


def write_dumps(plan: Architecture, folder: Path) -> None:
    """Train a model or read it, and write its missing dumps."""
    place = folder / "sides" / plan.name
    place.mkdir(parents=True, exist_ok=True)
    wanted = [fault for fault in list_faults() if not fault.experts or plan.experts > 1]
    missing = [fault for fault in wanted if not (place / f"{fault.name}.parquet").exists()]
    trained = TrainedModel.load(plan, folder, 1) if missing else None
    for fault in missing:
        torch.manual_seed(1)
        fault.make(trained).write(place / f"{fault.name}.parquet")
        print(plan.name, fault.name, flush=True)


@dataclass(frozen=True)
class Verdict:
    """The finding for one dump. `near` is true if the errors of the two sides are within a factor of 2."""

    fault: PlantedFault
    near: bool
    found: Sides
    reference: bool

    @property
    def right(self) -> bool:
        """Return True if the finding names the planted side. If the errors are near, `both` is also right."""
        if self.fault.side == "reference":
            return self.found.side == "both"
        return self.found.side == self.fault.side or (self.near and self.found.side == "both")


def judge_dumps(plan: Architecture, folder: Path) -> Iterator[Verdict]:
    """Yield the verdict for each dump of one model."""
    for fault in list_faults():
        path = folder / "sides" / plan.name / f"{fault.name}.parquet"
        if not path.exists():
            continue
        found, suspected = diagnose_sides(path)
        near = 0.5 < found.rollout_rms / max(found.train_rms, 1e-300) < 2
        yield Verdict(fault, near, found, suspected)


def diagnose_sides(path: Path) -> tuple[Sides, bool]:
    """Return the sides found, and whether the reference is suspected."""
    found = diagnose([str(path)], threads=1)
    ((sides,), (findings,)) = found.sides.values(), found.runs.values()
    return sides, any(finding.cause == "faulty_reference" for finding in findings)


def format_sides(rows: list[Verdict]) -> tuple[str, ...]:
    """Format the share of right sides by confidence."""
    right = {level: [one.right for one in rows if one.found.confidence == level] for level in LEVELS}
    return tuple(format_share(sum(right[level]), len(right[level])) for level in LEVELS)


def list_errors(rows: list[Verdict]) -> Counter[str]:
    """Describe the wrong findings above low confidence."""
    return Counter(
        f"{one.fault.name} ({one.found.side}, {one.found.confidence})"
        for one in rows
        if not one.right and one.found.confidence != "low"
    )


def format_references(rows: list[Verdict]) -> tuple[str, ...]:
    """Format the share of suspected references, by the part of the dump that has the fault."""
    faulty = [one for one in rows if one.fault.side == "reference"]
    shared = [
        one for one in rows if one.fault.name.endswith(("identical", "each by itself")) and one.fault.side == "both"
    ]
    sound = [one for one in rows if one not in faulty and one not in shared]
    return tuple(format_share(sum(one.reference for one in group), len(group)) for group in (faulty, shared, sound))


def main() -> None:
    torch.set_num_threads(1)
    folder, names = Path(sys.argv[1]), [name for name in sys.argv[2:] if name != "--write"]
    plans = [plan for plan in (*SEEN, *UNSEEN) if not names or plan.name in names]
    if "--write" not in sys.argv:
        for plan in plans:
            write_dumps(plan, folder)
        return
    sides, references, wrong = [], [], Counter[str]()
    for plan in sorted(plans, key=lambda plan: plan.name in DEVELOPED_ON):
        rows = list(judge_dumps(plan, folder)) if (folder / "sides" / plan.name).is_dir() else []
        if rows:
            title = f"`{plan.name}`" + (", used to develop `diagnose`" if plan.name in DEVELOPED_ON else "")
            sides.append((title, len(rows), *format_sides(rows)))
            references.append((title, *format_references(rows)))
            wrong += list_errors(rows)
    errors = [f"- {name}" + (f", {count} times" if count > 1 else "") for name, count in wrong.items()]
    lines = [
        "",
        table(("model", "dumps", *(f"right side at {level} confidence" for level in LEVELS)), sides),
        *(["Wrong sides at medium or high confidence:", "", *errors, ""] if errors else []),
        "The next table shows how often `diagnose` reports that the reference is wrong (`faulty_reference`). This",
        "report is right if the fault is in the reference. Otherwise, the report is wrong. If rollout and trainer have",
        "the same fault, the correct reference looks wrong, because it differs from the other two columns.",
        "",
        table(("model", "fault in the reference", "same fault on both sides", "another fault, or none"), references),
    ]
    replace_section("\n".join(lines), DOCUMENT, BEGIN, END)


if __name__ == "__main__":
    main()
