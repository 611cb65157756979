"""Compare mismatchctl with ten more frameworks' own numbers (conformance/peers/README.md); run it for one line each."""

from __future__ import annotations

import json
import lzma
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatchctl.core.losses import sum_terms
from mismatchctl.corrections.model import Correction
from mismatchctl.frameworks.adapter import Dtype, Framework, ReplayOptions
from mismatchctl.frameworks.options import PlainFramework
from mismatchctl.frameworks.registry import load_framework

FOLDER = Path(__file__).parent / "peers"
FRAMEWORKS = {
    "trl": "trl",
    "nemo": "nemo-rl",
    "openrlhf": "openrlhf@0.11",
    "prime": "prime-rl",
    "prime_2026_09": "prime-rl@2026-09",
    "prime_2026_10": "prime-rl@2026-10",
    "areal": "areal",
    "areal_2026_08": "areal@2026-08",
    "skyrl": "skyrl",
    "roll": "roll",
    "tinker": "tinker-cookbook",
    "openinstruct": "open-instruct",
    "swift": "ms-swift",
}
VALUE, WEIGHT, GRADIENT = 2e-5, 3e-6, 2e-4
"""Relative tolerances: of a value (or of what it is the mean of), of a weight, of the largest gradient of a step."""
UNEQUAL: dict[tuple[str, str, str], str] = {
    **{
        ("openrlhf nonfinite", kind, what): "weights were recovered from a gradient that PPO's clip had made 0"
        for kind in ("tis", "tis_default", "tis_seq_mean")
        for what in ("weights", "keep")
    },
}
"""(goldens, configuration, what) -> why it cannot agree: docs/methods/conformance.md."""


@dataclass
class Tally:
    """What was compared, and what differs."""

    compared: dict[str, int] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)

    def check(self, kind: str, same: Any, where: tuple[str, str, Any], what: Any, wanted: Any, found: Any) -> None:
        self.compared[kind] = self.compared.get(kind, 0) + 1
        if not same:
            known = any((where[0], where[1], item) in UNEQUAL for item in (what, "*"))
            line = f"{where}: {what} {wanted!r}, not {found!r}"
            (self.excused if known else self.differences).append(line)


@cache
def goldens() -> dict[str, Any]:
    with lzma.open(FOLDER / "expected.json.xz", "rt") as file:
        found: dict[str, Any] = json.load(file)
    return found


@cache
def table(name: str, step: int) -> pa.Table:
    rows = pq.read_table(FOLDER / name)
    return rows.filter(pc.equal(rows["step"], step))


@cache
def framework(name: str) -> Framework:
    return load_framework(FRAMEWORKS[name])


def number(value: Any) -> float:
    return float(value)


def close(wanted: float, found: float, scale: float = 0.0, relative: float = VALUE) -> bool:
    if math.isnan(wanted) or math.isinf(wanted):
        return math.isnan(found) if math.isnan(wanted) else wanted == found
    return abs(wanted - found) <= relative * max(abs(wanted), scale) + 2e-7


def cases(name: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Batch, configuration and what is expected of it."""
    for key, golden in goldens().items():
        if key.rpartition("_")[0] == name:
            for config, case in golden["configs"].items():
                yield golden["input"], config, case


def compare(name: str) -> Tally:
    """Every value, weight, kept token and gradient."""
    tally, own = Tally(), framework(name)
    for batch, config, case in cases(name):
        correction = own.correction(case["config"])
        steps = case["per_step"]
        for step, wanted in steps.items():
            rows = table(batch, int(step))
            where = (f"{name} {batch[6:-8]}", config, int(step))
            replay = own.replay(rows, correction, ReplayOptions(dtype="float32"))
            _values(tally, where, wanted, replay.logged)
            _rows(tally, where, case, rows, replay, own, correction)
    return tally


def loss_gradient(own: Framework, rows: pa.Table, correction: Correction, dtype: Dtype) -> list[Any]:
    """The derivative of the logged loss by each current log-prob, per row."""
    assert isinstance(own, PlainFramework)
    run = own.configure(rows, correction, dtype)
    with np.errstate(all="ignore"):
        return run.step.by_row(sum_terms(own.terms(run))[1])


def _values(tally: Tally, where: Any, wanted: Mapping[str, Any], found: Mapping[str, float]) -> None:
    plain = {metric: value for metric, value in wanted.items() if not isinstance(value, list)}
    for metric in sorted(plain.keys() - found.keys()):
        tally.check("values", False, where, metric, plain[metric], "nothing")
    for metric in sorted(found.keys() - plain.keys()):
        tally.check("values", False, where, metric, "nothing", found[metric])
    for metric in sorted(plain.keys() & found.keys()):
        golden, value = number(plain[metric]), found[metric]
        tally.check("values", close(golden, value), where, metric, golden, value)


def _rows(tally: Tally, where: Any, case: Any, rows: pa.Table, replay: Any, own: Framework, correction: Any) -> None:
    gradient: list[Any] = []
    for row, sequence in enumerate(rows["sequence_id"].to_pylist()):
        golden = case["per_sequence"].get(sequence)
        if golden is None:
            continue
        for kind, values in (("weights", replay.weights), ("keep", replay.keep)):
            if golden.get(kind) is None:
                continue
            if values is None:
                tally.check(kind, False, where, kind, golden[kind], None)
                continue
            for place, wanted in enumerate(golden[kind]):
                if wanted is None:
                    continue
                found = float(values[row][place])
                same = (
                    close(number(wanted), found, relative=WEIGHT) if kind == "weights" else bool(wanted) == bool(found)
                )
                tally.check(kind, same, where, f"{kind}", wanted, (sequence, place, found))
        if golden.get("grad") is not None:
            gradient = gradient or loss_gradient(own, rows, correction, "float32")
            wanted_grads = np.array([number(value) if value is not None else 0.0 for value in golden["grad"]])
            every = [
                abs(number(value))
                for other in rows["sequence_id"].to_pylist()
                for value in case["per_sequence"][other].get("grad") or []
                if value is not None
            ]
            scale = max((value for value in every if math.isfinite(value)), default=0.0)
            for place, wanted in enumerate(wanted_grads):
                found = float(gradient[row][place])
                same = close(wanted, found, scale, GRADIENT)
                tally.check("gradients", same, where, "gradient", wanted, (sequence, place, found))


KINDS = ("values", "weights", "keep", "gradients")


def line(name: str, tally: Tally) -> str:
    """A row of the table in docs/methods/conformance.md."""
    cells = " | ".join(f"{tally.compared.get(kind, 0):,}" for kind in KINDS)
    compared = sum(tally.compared.values())
    equal = compared - len(tally.differences) - len(tally.excused)
    return f"| {FRAMEWORKS[name]} | {cells} | {compared:,} | {equal:,} |"


if __name__ == "__main__":
    limit = 20
    for chosen in sys.argv[1:] or FRAMEWORKS:
        made = compare(chosen)
        print(line(chosen, made))
        print(*made.differences[:limit], sep="\n")
