"""Writes into docs/methods/accuracy.md how often `side` is right: each fault, on each side of small models.

    python benchmarks/sides.py DUMPS [MODEL ...]            # makes the dumps: a quarter of an hour for each model
    python benchmarks/sides.py DUMPS [MODEL ...] --write    # judges them

DUMPS keeps the trained models and their dumps. What an engine samples and both sides say of it is computed truly; the
reference is float64, one prefill, the trainer's weights and the sampling temperature.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measure import between  # noqa: E402
from stranger_dumps import World, dump, joined  # noqa: E402
from stranger_plans import PROMPT, SEEN, UNSEEN, Architecture  # noqa: E402
from strangers import Model, Numerics, Processors, Rollout, decoded, int8, scored  # noqa: E402

from mismatchctl.api.diagnose import diagnose  # noqa: E402
from mismatchctl.results.model import Sides  # noqa: E402
from tests.factories.planted_causes import Planted  # noqa: E402

ROWS = 64
SIZES = {64: 1}
"""Rows of a dump, and how many are drawn of each."""
LEVELS = ("high", "medium", "low")
TRIED = ("rope-swiglu", "softmax-moe-sure")
DOCUMENT = ROOT / "docs/methods/accuracy.md"
BEGIN, END = "<!-- benchmarks/sides.py writes from here -->", "<!-- to here -->"


@dataclass(frozen=True)
class Way:
    """How one side computes: its weights, its numerics, and what it does to logits."""

    model: Callable[[World], Model] = lambda world: world.versions[0]
    how: Numerics = field(default_factory=Numerics)
    process: Processors = field(default_factory=Processors)


PLAIN = {name: Way(how=Numerics(name)) for name in ("float32", "bfloat16")}
TRUTH = Way(how=Numerics("float64"))


@dataclass(frozen=True)
class Plant:
    """One known fault; `side` is who has it, "reference" where the third column itself is wrong."""

    name: str
    side: str
    make: Callable[[World], Planted]
    experts: bool = False


def made(
    world: World, engine: Way, trainer: Way, reference: Way = TRUTH, *, raw: bool = False, same: bool = False
) -> Planted:
    """A dump of three columns; `same`: the engine's own log-probs stand in the trainer's column too."""
    rollout = _decoded(world, engine, raw)
    train = _scored(world, rollout, trainer)
    found = dump(rollout, rollout.log_probs if same else train, world.versions[1])
    inside = np.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None]
    truth = _scored(world, rollout, reference)
    found.tokens["reference_log_probs"] = truth.numpy()[inside].astype(np.float32)
    return found


@cache
def _decoded(world: World, engine: Way, raw: bool) -> Rollout:
    """Several plants have the same samples."""
    return decoded(engine.model(world), world.prompts[:ROWS], engine.how, engine.process, 12, raw=raw)


@cache
def _scored(world: World, rollout: Rollout, way: Way) -> torch.Tensor:
    """And the same scores of them."""
    return scored(way.model(world), rollout, way.how, way.process)


def parted(world: World, often: Way, seldom: Way, rows: Callable[[np.ndarray], np.ndarray], *, engine: bool) -> Planted:
    """One side computes some rows in another way: by worker, by micro-batch."""
    base = PLAIN[often.how.dtype]
    both = [made(world, way, base) if engine else made(world, base, way) for way in (often, seldom)]
    other = rows(np.arange(ROWS))
    return joined(both[0].rows(np.flatnonzero(~other)), both[1].rows(np.flatnonzero(other)))


def ways(base: str) -> dict[str, tuple[Way, bool]]:
    """What can be wrong with a side of a precision, and whether it needs experts; beside float32 all of it shows."""
    plain, numerics = PLAIN[base], Numerics(base)
    found = {
        "int8 weights": replace(plain, model=lambda world: int8(world.versions[0])),
        "int4 weights": replace(plain, model=lambda world: int8(world.versions[0], 4)),
        "fp8 cache": replace(plain, how=replace(numerics, fp8_cache=True)),
        "half the prompt lost": replace(plain, how=replace(numerics, blanked=PROMPT // 2)),
        "position base 4": replace(plain, how=replace(numerics, rope=4.0)),
        "dropout 0.02": replace(plain, how=replace(numerics, dropout=0.02)),
        "bfloat16 logits": replace(plain, how=replace(numerics, coarse="logits")),
        **{f"{lag} updates apart": replace(plain, model=lambda world, lag=lag: world.versions[lag]) for lag in (1, 5)},
    }
    moe = {
        "bfloat16 router": replace(plain, how=replace(numerics, coarse="router")),
        "router noise 0.05": replace(plain, how=replace(numerics, noise=0.05)),
    }
    kept = found if base == "bfloat16" else {name: found[name] for name in ("int8 weights", "bfloat16 logits")}
    return {name: (way, False) for name, way in kept.items()} | {name: (way, True) for name, way in moe.items()}


def plants() -> Iterator[Plant]:
    """All of them."""
    for base, plain in reversed(PLAIN.items()):
        at = f"{base}: "
        noise = "none" if base == "float32" else "both"
        yield Plant(f"{at}clean", noise, lambda w, p=plain: made(w, p, p))
        yield Plant(f"{at}identical", noise, lambda w, p=plain: made(w, p, p, same=True))
        for name, (way, experts) in ways(base).items():
            yield Plant(f"{at}{name}, rollout", "rollout", lambda w, p=plain, o=way: made(w, o, p), experts)
            yield Plant(f"{at}{name}, trainer", "trainer", lambda w, p=plain, o=way: made(w, p, o), experts)
            if base == "bfloat16" and name in ("int4 weights", "half the prompt lost"):
                yield Plant(f"{at}{name}, identical", "both", lambda w, o=way: made(w, o, o, same=True))
                yield Plant(f"{at}{name}, each by itself", "both", lambda w, o=way: made(w, o, o))
        for t in (0.7, 0.97):
            warm = Processors(temperature=t)
            ours, theirs = replace(plain, process=warm), replace(TRUTH, process=warm)
            yield Plant(f"{at}raw at {t}, rollout", "rollout", lambda w, a=ours, c=theirs: made(w, a, a, c, raw=True))
            yield Plant(
                f"{at}temperature {t}, trainer", "trainer", lambda w, a=ours, b=plain, c=theirs: made(w, a, b, c)
            )
            yield Plant(f"{at}temperature {t}, reference", "reference", lambda w, a=ours: made(w, a, a))
        for k in (-1, 1):
            for side, column in (("rollout", "rollout"), ("trainer", "train"), ("reference", "reference")):
                yield Plant(
                    f"{at}shift {k:+d}, {side}",
                    side,
                    lambda w, p=plain, k=k, c=column: moved(made(w, p, p), f"{c}_log_probs", k),
                )
        stale = replace(plain, model=lambda world: world.versions[6])
        for side in ("rollout", "trainer"):
            yield Plant(
                f"{at}one worker's weights, {side}",
                side,
                lambda w, p=plain, o=stale, s=side: parted(w, p, o, lambda i: i // 8 % 4 == 2, engine=s == "rollout"),
            )
        blank = replace(plain, how=replace(plain.how, blanked=2))
        yield Plant(
            f"{at}padding seen by some, trainer",
            "trainer",
            lambda w, p=plain, o=blank: parted(w, p, o, lambda i: i % 5 == 0, engine=False),
        )
        older = replace(TRUTH, model=lambda world: world.versions[6])
        yield Plant(f"{at}other weights, reference", "reference", lambda w, p=plain, o=older: made(w, p, p, o))
        lost = replace(TRUTH, how=replace(TRUTH.how, blanked=PROMPT // 2))
        yield Plant(f"{at}half the prompt lost, reference", "reference", lambda w, p=plain, o=lost: made(w, p, p, o))
    fine, rough = PLAIN["float32"], PLAIN["bfloat16"]
    yield Plant("float32 rollout, bfloat16 trainer", "trainer", lambda w: made(w, fine, rough))
    yield Plant("bfloat16 rollout, float32 trainer", "rollout", lambda w: made(w, rough, fine))
    yield Plant(
        "trainer in bfloat16 for small batches",
        "trainer",
        lambda w: parted(w, fine, rough, lambda i: i % 16 == 0, engine=False),
    )
    yield Plant(
        "trainer in bfloat16 for half of the batches",
        "trainer",
        lambda w: parted(w, fine, rough, lambda i: i % 16 < 8, engine=False),
    )


def moved(given: Planted, column: str, by: int) -> Planted:
    """One column shifted within its rows."""
    rows = np.split(given.tokens[column], np.cumsum(given.lengths)[:-1])
    given.tokens[column] = np.concatenate([np.roll(row, by) for row in rows])
    return given


def make(plan: Architecture, folder: Path) -> None:
    """Train a model, or read it, and write its dumps that are not there yet."""
    place = folder / "sides" / plan.name
    place.mkdir(parents=True, exist_ok=True)
    wanted = [plant for plant in plants() if not plant.experts or plan.experts > 1]
    missing = [plant for plant in wanted if not (place / f"{plant.name}.parquet").exists()]
    world = World.of(plan, folder, 1) if missing else None
    for plant in missing:
        torch.manual_seed(1)
        plant.make(world).write(place / f"{plant.name}.parquet")
        print(plan.name, plant.name, flush=True)


@dataclass(frozen=True)
class Judged:
    """Some rows of a dump: what is on which side, and what was said; `near`: both sides' errors are within 2."""

    plant: Plant
    near: bool
    rows: int
    found: Sides
    reference: bool

    @property
    def right(self) -> bool:
        """The side that was planted; `both` too where that adds less than as much again to the noise of both."""
        if self.plant.side == "reference":
            return self.found.side == "both"
        return self.found.side == self.plant.side or (self.near and self.found.side == "both")


def judged(plan: Architecture, folder: Path) -> Iterator[Judged]:
    """Draws of the dumps of one model."""
    for plant in plants():
        path = folder / "sides" / plan.name / f"{plant.name}.parquet"
        if not path.exists():
            continue
        table = pq.read_table(path)
        whole, suspected = asked(table)
        near = 0.5 < whole.rollout_rms / max(whole.train_rms, 1e-300) < 2
        for rows, draws in SIZES.items():
            if rows >= len(table):
                yield Judged(plant, near, rows, whole, suspected)
                continue
            for draw in range(draws):
                chosen = np.sort(np.random.default_rng(100 * draw + rows).permutation(len(table))[:rows])
                yield Judged(plant, near, rows, *asked(table.take(chosen)))


def asked(table: pa.Table) -> tuple[Sides, bool]:
    """Who is wrong, and whether the reference is suspected."""
    with tempfile.TemporaryDirectory() as place:
        pq.write_table(table, f"{place}/dump.parquet")
        found = diagnose([f"{place}/dump.parquet"], threads=1)
    ((sides,), (findings,)) = found.sides.values(), found.runs.values()
    return sides, any(finding.cause == "faulty_reference" for finding in findings)


def tables(rows: list[Judged]) -> list[str]:
    """How often the side is right, by confidence; and what the reference's own faults are told as."""
    lines = ["| rows | high: right | medium: right | low: right |", "|---|---|---|---|"]
    for size in [*SIZES, None]:
        told = {level: [one.right for one in rows if one.rows in (size or one.rows,) and one.found.confidence == level]
                for level in LEVELS}  # fmt: skip
        lines.append(
            f"| {size or 'all'} | " + " | ".join(percent(sum(told[level]), len(told[level])) for level in LEVELS) + " |"
        )
    wrong = Counter(
        f"{one.plant.name} ({one.rows} rows: {one.found.side}, {one.found.confidence})"
        for one in rows
        if not one.right and one.found.confidence != "low"
    )
    said = [f"- {name}" + (f", {count} times" if count > 1 else "") for name, count in wrong.items()]
    faulty = [one for one in rows if one.plant.side == "reference"]
    shared = [
        one for one in rows if one.plant.name.endswith(("identical", "each by itself")) and one.plant.side == "both"
    ]
    sound = [one for one in rows if one not in faulty and one not in shared]
    return [
        *lines, "", "Wrong findings at medium or high confidence:", "", *(said or ["- no cases"]), "",
        f"`faulty_reference` is found in {percent(sum(one.reference for one in faulty), len(faulty))} of the dumps "
        "whose reference is at fault,",
        f"in {percent(sum(one.reference for one in shared), len(shared))} of the dumps whose two sides share a fault "
        "(such a fault looks like a faulty reference), and in",
        f"{percent(sum(one.reference for one in sound), len(sound))} of all other dumps.", "",
    ]  # fmt: skip


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} % ({part:,} of {whole:,})" if whole else "-"


def main() -> None:
    torch.set_num_threads(1)
    folder, names = Path(sys.argv[1]), [name for name in sys.argv[2:] if name != "--write"]
    plans = [plan for plan in (*SEEN, *UNSEEN) if not names or plan.name in names]
    if "--write" not in sys.argv:
        for plan in plans:
            make(plan, folder)
        return
    lines = [""]
    for plan in sorted(plans, key=lambda plan: plan.name in TRIED):
        rows = list(judged(plan, folder)) if (folder / "sides" / plan.name).is_dir() else []
        if rows:
            use = "was" if plan.name in TRIED else "was not"
            lines += [
                f"The table shows {len(rows):,} dumps of the model `{plan.name}` of `benchmarks/strangers.py`, which "
                f"{use} used to develop the",
                "tests.",
                "",
                *tables(rows),
            ]
    between("\n".join(lines), DOCUMENT, BEGIN, END)


if __name__ == "__main__":
    main()
