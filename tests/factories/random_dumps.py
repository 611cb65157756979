"""Random ragged dumps and Corrections for property tests."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from mismatchctl.corrections.model import Correction

Rows = list[dict[str, Any]]
COLUMNS = {"rollout": "rollout_log_probs", "train": "train_log_probs", "current": "current_log_probs"}
PARTIAL = {"reference": "reference_log_probs"}
"""Columns that can be null in some rows of a file."""
TYPES = {"worker": pa.string(), "prompt_id": pa.int64()}
JUNK = (math.nan, math.inf, -math.inf, 0.0, 7.5, -9999.0)
FLAVOURS = ("noise", "heavy", "extreme", "tiny", "equal", "grid", "constant", "stuck")


@dataclass(frozen=True)
class Shape:
    seed: int
    sequences: int = 8
    longest: int = 10
    steps: int = 2
    prompts: int = 3
    flavours: tuple[str, ...] = FLAVOURS
    float32: bool = False
    named: bool = True
    nameless: bool = False
    current: str = "all"
    reference: str = "none"
    advantages: str = "token"
    reward: str = "some"
    files: int = 2
    row_group: int = 3
    mask_type: str = "bool"
    masks: tuple[str, ...] = ("all", "holes", "left", "right", "none")


@dataclass
class Files:
    """Rows by file, in the order in which they are read."""

    folder: Path
    row_group: int = 3
    float32: bool = False
    mask_type: str = "bool"


def shapes(**fixed: Any) -> st.SearchStrategy[Shape]:
    one_or_all = st.one_of(st.just(FLAVOURS), st.sampled_from(FLAVOURS).map(lambda name: (name,)))
    free: dict[str, st.SearchStrategy[Any]] = {
        "seed": st.integers(0, 2**32 - 1),
        "sequences": st.integers(1, 12),
        "longest": st.sampled_from([1, 2, 6, 14]),
        "steps": st.integers(0, 3),
        "prompts": st.integers(0, 4),
        "flavours": one_or_all,
        "float32": st.booleans(),
        "named": st.booleans(),
        "nameless": st.booleans(),
        "current": st.sampled_from(["all", "all", "some", "none"]),
        "reference": st.sampled_from(["all", "some", *["none"] * 4]),
        "advantages": st.sampled_from(["token", "sequence", "none"]),
        "reward": st.sampled_from(["all", "some", "none"]),
        "files": st.integers(1, 3),
        "row_group": st.sampled_from([1, 3, 100]),
        "mask_type": st.sampled_from(["bool", "int8", "double"]),
    }
    chosen = {key: value for key, value in free.items() if key not in fixed}
    return st.builds(Shape, **chosen, **{key: st.just(value) for key, value in fixed.items()})


def make_rows(shape: Shape) -> Rows:
    rng = random.Random(shape.seed)
    rows = [_sequence(shape, rng, index) for index in range(shape.sequences)]
    if not any(any(row["mask"]) for row in rows):
        rows[-1] = _sequence(shape, rng, len(rows) - 1, mask="all", length=1)
    return rows


def _sequence(shape: Shape, rng: random.Random, index: int, mask: str = "", length: int = -1) -> dict[str, Any]:
    length = rng.randint(0, shape.longest) if length < 0 else length
    row: dict[str, Any] = {"mask": _mask(mask or rng.choice(shape.masks), length, rng)}
    pairs = [_log_probs(rng.choice(shape.flavours), rng) for _ in range(length)]
    flavour = rng.choice(shape.flavours)
    if rng.random() < 0.7:
        pairs = [_log_probs(flavour, rng) for _ in range(length)]
    row["rollout"], row["train"] = [p[0] for p in pairs], [p[1] for p in pairs]
    if shape.current == "all" or (shape.current == "some" and index < shape.sequences // 2):
        drift = rng.choice(("noise", "equal", "grid"))
        row["current"] = [min(0.0, p[1] + _offset(drift, rng)) for p in pairs]
    if shape.reference == "all" or (shape.reference == "some" and index % 2 == 0):
        row["reference"] = [min(0.0, p[1] + _offset(rng.choice(("noise", "equal", "grid")), rng)) for p in pairs]
    if shape.float32:
        for policy in (COLUMNS | PARTIAL).keys() & row.keys():
            row[policy] = [float(np.float32(v)) for v in row[policy]]
    if shape.steps:
        row["step"] = rng.randrange(shape.steps)
        row["micro_batch"] = rng.randrange(3)
    if shape.prompts:
        row["prompt_id"] = rng.choice((None, *range(shape.prompts))) if shape.nameless else rng.randrange(shape.prompts)
    if shape.named:
        row["sequence_id"] = index
    if shape.advantages == "sequence":
        row["advantages"] = rng.choice((-1.5, 0.0, 0.25, rng.gauss(0, 1)))
    elif shape.advantages == "token":
        row["advantages"] = [rng.choice((-1.5, 0.0, 0.25, rng.gauss(0, 1))) for _ in range(length)]
    if shape.reward != "none":
        row["reward"] = None if shape.reward == "some" and rng.random() < 0.3 else rng.choice((0.0, 1.0, rng.random()))
    row["worker"] = rng.choice(("w1", "w2", None))
    return row


def _mask(kind: str, length: int, rng: random.Random) -> list[int]:
    cut = rng.randint(0, length)
    return {
        "all": [1] * length,
        "none": [0] * length,
        "left": [0] * cut + [1] * (length - cut),
        "right": [1] * cut + [0] * (length - cut),
        "holes": [int(rng.random() < 0.6) for _ in range(length)],
    }[kind]


def _offset(flavour: str, rng: random.Random) -> float:
    return {
        "noise": rng.gauss(0, 0.02),
        "heavy": rng.gauss(0, 0.3) ** 3,
        "extreme": rng.uniform(-30, 30),
        "tiny": rng.gauss(0, 1e-9),
        "equal": 0.0,
        "grid": rng.randint(-16, 16) / 16,
        "constant": 0.25,
        "stuck": -0.1,
    }[flavour]


def _log_probs(flavour: str, rng: random.Random) -> tuple[float, float]:
    offset = _offset(flavour, rng)
    rollout = -rng.randint(0, 32) / 16 if flavour in ("grid", "constant", "equal") else -rng.expovariate(1.0)
    rollout = -0.3 if flavour == "stuck" else min(rollout, -offset) if offset > 0 else rollout
    return rollout, min(rollout + offset, 0.0)


def write(rows: Rows, files: Files, split: Sequence[int] = ()) -> Path:
    """Write rows to files of the given lengths, and the rest to a last file."""
    files.folder.mkdir(parents=True, exist_ok=True)
    start, parts = 0, []
    for length in [*split, len(rows)]:
        part = rows[start : start + length]
        parts += [list(alike) for _, alike in groupby(part, key=lambda row: "current" in row)]
        start += length
    for number, part in enumerate(parts):
        path = files.folder / f"part_{number:03d}.parquet"
        pq.write_table(table(part, files), path, row_group_size=files.row_group)
    return files.folder


def table(rows: Rows, files: Files) -> pa.Table:
    """Return the dump's columns, with arbitrary values at masked positions."""
    floats = pa.float32() if files.float32 else pa.float64()
    columns: dict[str, pa.Array] = {}
    for policy, column in COLUMNS.items():
        if policy in rows[0]:
            columns[column] = pa.array([_junk(row[policy], row["mask"]) for row in rows], pa.list_(floats))
    for policy, column in PARTIAL.items():
        if any(policy in row for row in rows):
            given = [_junk(row[policy], row["mask"]) if policy in row else None for row in rows]
            columns[column] = pa.array(given, pa.list_(floats))
    columns["response_mask"] = pa.array([row["mask"] for row in rows], pa.list_(pa.int8())).cast(
        pa.list_(pa.type_for_alias(files.mask_type))
    )
    for name in ("run", "step", "micro_batch", "prompt_id", "sequence_id", "worker"):
        if name in rows[0]:
            columns[name] = pa.array([row[name] for row in rows], TYPES.get(name))
    if "reward" in rows[0]:
        columns["reward"] = pa.array([row["reward"] for row in rows], pa.float64())
    if "advantages" in rows[0]:
        columns["advantages"] = pa.array([row["advantages"] for row in rows])
    return pa.table(columns)


def _junk(values: list[float], mask: list[int]) -> list[float]:
    return [v if m else JUNK[i % len(JUNK)] for i, (v, m) in enumerate(zip(values, mask, strict=True))]


RATIO_BOUNDS = (0.0, 1e-4, 0.5, 0.9, 1.0, 1.001, 1.3, 2.0, 1e6, 1e12)
BOUNDS = (-1.0, -0.25, 0.0, 1e-12, 0.01, 0.25, 0.5, 1.0, 3.0, 200.0)


@st.composite
def intervals(draw: st.DrawFn, bounds: Sequence[float], *, positive: bool) -> tuple[float | None, float | None]:
    low, high = sorted((draw(st.sampled_from(bounds)), draw(st.sampled_from(bounds))))
    high = high or 1.0 if positive else high
    return draw(st.sampled_from([(low, high), (None, high), (low, None)]))


@st.composite
def weights(draw: st.DrawFn, sources: Sequence[str]) -> dict[str, Any]:
    bound = draw(st.sampled_from(["none", "truncate", "clip", "zero"]))
    level = draw(st.sampled_from(["token", "sequence", "geometric"]))
    rule: dict[str, Any] = {
        "level": level,
        "over": draw(st.sampled_from(["sequence", "segment"] if level == "geometric" else ["sequence"])),
        "sees": draw(st.sampled_from(["original", "original", "remaining"])),
        "clamp": draw(st.sampled_from(["aggregate", "aggregate", "token"])),
        "normalize": draw(st.sampled_from(["none", "token", "sequence"])),
        "normalize_over": draw(st.sampled_from(["group", "micro_batch"])),
        "normalize_empty": draw(st.sampled_from(["skip", "count"])),
        "source": draw(st.sampled_from(sources)),
    }
    if bound == "truncate":
        rule[bound] = draw(st.sampled_from(RATIO_BOUNDS[1:]))
    elif bound != "none":
        rule[bound] = draw(intervals(RATIO_BOUNDS, positive=True))
    return rule


@st.composite
def gates(draw: st.DrawFn, sources: Sequence[str], *, advantages: bool) -> dict[str, Any]:
    ratio = draw(st.booleans())
    statistics = (
        "k1", "k2", "k3", "abs_log_ratio", "mult_error", "prob_diff", "abs_prob_diff", "train_prob", "rollout_prob",
    )  # fmt: skip
    levels = (
        ("token", "sequence", "geometric", "mean", "min", "max") if ratio else ("token", "sum", "mean", "min", "max")
    )
    level = draw(st.sampled_from(levels))
    when = ("always", "positive_advantage", "negative_advantage") if advantages else ("always",)
    keep = draw(intervals(RATIO_BOUNDS, positive=True) if ratio else intervals(BOUNDS, positive=False))
    closed = st.just(True) if keep[0] == keep[1] else st.booleans()
    return {
        "statistic": "ratio" if ratio else draw(st.sampled_from(statistics)),
        "level": level,
        "over": "sequence" if level == "token" else draw(st.sampled_from(["sequence", "segment"])),
        "keep": keep,
        "inclusive": (draw(closed), draw(closed)),
        "source": draw(st.sampled_from(sources)),
        "clamp": draw(st.sampled_from(["aggregate", "token", "none"])),
        "sees": draw(st.sampled_from(["original", "remaining"])),
        "effect": draw(st.sampled_from(["mask", "zero"])),
        "when": draw(st.sampled_from(when)),
    }


@st.composite
def corrections(draw: st.DrawFn, shape: Shape, name: str = "c") -> Correction:
    sources = ["train/rollout", "current/rollout", "current/train"] if shape.current == "all" else ["train/rollout"]
    gate = gates(sources, advantages=shape.advantages != "none")
    return Correction.model_validate(
        {
            "name": name,
            "weight": draw(st.one_of(st.none(), weights(sources))),
            "gates": draw(st.lists(gate, max_size=3)),
        }
    )
