"""Compare mismatchctl with verl's own numbers (conformance/verl/README.md); run it to print one line per version."""

from __future__ import annotations

import json
import lzma
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import ReplayOptions
from mismatchctl.frameworks.registry import load_framework

FOLDER = Path(__file__).parent / "verl"
VERSIONS = ("a", "b", "c1", "c2", "d")
Run = Mapping[str, Any]


@dataclass
class Tally:
    """What was compared: how many values, and those that differ."""

    compared: int = 0
    differences: list[str] = field(default_factory=list)

    def check(self, same: bool, what: str, wanted: object, found: object) -> None:
        self.compared += 1
        if not same:
            self.differences.append(f"{what} is {wanted!r}, not {found!r}")

    def values(self, expected: Mapping[str, Any], found: Mapping[str, float], dtype: str, where: str) -> None:
        """The names must be the same, the values within the tolerances of the dtype."""
        self.check(expected.keys() == found.keys(), f"{where}: names", sorted(expected), sorted(found))
        for name in expected.keys() & found.keys():
            golden, value = float(expected[name]), found[name]
            self.check(agree(name, golden, value, dtype), f"{where}: {name}", golden, value)


def agree(name: str, expected: float, found: float, dtype: str) -> bool:
    """Whether two values agree as far as verl's arithmetic lets them."""
    if not (math.isfinite(expected) and math.isfinite(found)):
        return expected == found or (math.isnan(expected) and math.isnan(found))
    distance = abs(expected - found)
    cancels = name.endswith("_std") and not name.endswith("seq_std")  # mean of squares minus square of mean
    if dtype == "float64":
        last_place = "_k3_" in name and distance <= 2.0**-52  # of exp(x) - 1 - x, as processors round
        return distance <= 1e-9 * abs(expected) or last_place or (cancels and abs(expected**2 - found**2) <= 1e-12)
    return distance <= max(6e-4 if cancels else 1e-6, 1.5e-6 * abs(expected))


@cache
def expected(version: str) -> Any:
    with lzma.open(FOLDER / f"expected_{version}.json.xz", "rt") as file:
        return json.load(file)


@cache
def table(batch: str, step: int) -> pa.Table:
    rows = _inputs()
    return rows.filter(pc.and_(pc.equal(rows["batch"], batch), pc.equal(rows["step"], step)))


@cache
def _inputs() -> pa.Table:
    return pq.read_table(FOLDER / "inputs.parquet")


@cache
def corrections(version: str) -> dict[str, Correction]:
    framework = load_framework(f"verl@{version}")
    configs = expected(version)["configs"]["configs"]
    return {name: framework.correction(config["kwargs"]) for name, config in configs.items()}


def compare_logged(version: str) -> Tally:
    """Everything that the helper logs, and the debug metrics; kept tokens, weights, per row and per token."""
    tally, framework = Tally(), load_framework(f"verl@{version}")
    per_sequence, per_token = _per_sequence(version), _per_token(version)
    for batch, runs in expected(version)["metrics"].items():
        for run in runs:
            rows, dtype, step = table(batch, run["step"]), run["dtype"], run["step"]
            where = f"{batch} {step} {dtype}"
            plain = framework.replay(rows, Correction(), ReplayOptions(dtype=dtype)).logged
            debug = {key: value for key, value in plain.items() if key.startswith("training/")}
            tally.values(run["debug_metrics"], debug, dtype, where)
            for name, values in _logged(run):
                out = framework.replay(rows, corrections(version)[name], ReplayOptions(dtype=dtype))
                logged = {key: value for key, value in out.logged.items() if not key.startswith("training/")}
                tally.values(values, logged, dtype, f"{where} {name}")
                _rows(tally, per_sequence[batch, step, dtype, name], out, dtype, f"{where} {name}")
                if dtype == "float32":
                    _tokens(tally, per_token[batch, step, name], out, rows, f"{where} {name}")
    return tally


def _logged(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configuration and its logged values, of both kinds."""
    for kind in ("decoupled", "bypass"):
        made = run.get(kind, {"config_ids": ()})
        for index, name in enumerate(made["config_ids"]):
            silent = name in made["silent_config_ids"]
            yield name, {} if silent else made["common_metrics"] | _column(made["metrics"], index)


def _column(metrics: Mapping[str, list[Any]], index: int) -> dict[str, Any]:
    return {name: values[index] for name, values in metrics.items() if values[index] is not None}


@cache
def _per_sequence(version: str) -> Mapping[Any, Any]:
    rows = pq.read_table(FOLDER / f"per_sequence_{version}.parquet").to_pylist()
    return {(row["batch"], row["step"], row["dtype"], row["config_id"]): row for row in rows}


@cache
def _per_token(version: str) -> Mapping[Any, Any]:
    found: dict[Any, dict[int, Any]] = defaultdict(dict)
    for row in pq.read_table(FOLDER / f"per_token_{version}.parquet").to_pylist():
        found[row["batch"], row["step"], row["config_id"]][row["sequence_id"]] = row
    return found


def _rows(tally: Tally, golden: Run, out: Any, dtype: str, where: str) -> None:
    """Kept tokens exactly; sums of weights."""
    kept = [int(keep.sum()) for keep in out.keep]
    for expected_count, count in zip(golden["kept_tokens"], kept, strict=True):
        tally.check(expected_count == count, f"{where}: kept tokens", golden["kept_tokens"], kept)
    if golden["sum_w_valid"] is None or out.weights is None:
        tally.check(
            golden["sum_w_valid"] is out.weights is None, f"{where}: weights", golden["sum_w_valid"], out.weights
        )
        return
    for column, keeps in (("sum_w_valid", [slice(None)] * len(kept)), ("sum_w_kept", out.keep)):
        for row, (weights, keep) in enumerate(zip(out.weights, keeps, strict=True)):
            total, wanted = float(weights[keep].sum(dtype=np.float64)), golden[column][row]
            tally.check(_weights_agree(wanted, total, dtype), f"{where}: {column}[{row}]", wanted, total)


def _weights_agree(wanted: Any, found: Any, dtype: str) -> Any:
    """A float32 log ratio of tens is known to 2e-6, and so is the weight that it makes."""
    return np.allclose(found, wanted, rtol=1e-9 if dtype == "float64" else 4e-6, atol=0)


def _tokens(tally: Tally, golden: Mapping[int, Any], out: Any, rows: pa.Table, where: str) -> None:
    for row, sequence in enumerate(rows["sequence_id"].to_pylist()):
        if sequence not in golden:
            continue
        wanted = golden[sequence]
        tally.compared += 2 * len(wanted["keep"]) - 2
        keep = out.keep[row].tolist()
        tally.check(wanted["keep"] == keep, f"{where}: kept tokens of {sequence}", wanted["keep"], keep)
        same = (
            out.weights is None
            if wanted["weights"] is None
            else _weights_agree(wanted["weights"], out.weights[row], "float32")
        )
        tally.check(same, f"{where}: weights of {sequence}", wanted["weights"], out.weights)


def compare_errors(version: str) -> Tally:
    """What verl rejects, in its words; what it accepts although nobody should write it."""
    tally, framework = Tally(), load_framework(f"verl@{version}")
    for case in expected(version)["configs"]["error_cases"]:
        try:
            correction = framework.correction(case["kwargs"])
        except ConfigError as error:
            found = str(error)
            wanted = str(case.get("message"))
            set_valued = "{" in wanted and found.split("{")[0] == wanted.split("{")[0]  # in no fixed order
            tally.check(found == wanted or set_valued, f"{case['kwargs']}: error", wanted, found)
            continue
        tally.check(case["raises"] is None, f"{case['kwargs']}: error", case["raises"], None)
        if case["raises"] is None:
            out = framework.replay(table("dense", 3), correction, ReplayOptions(dtype="float32"))
            logged = [key for key in out.logged if not key.startswith("training/")]
            found_all = (sum(int(keep.sum()) for keep in out.keep), out.weights is None, len(logged))
            wanted_all = (case["n_kept"], case["weights_none"], case["n_metrics"])
            tally.check(found_all == wanted_all, f"{case['kwargs']}: kept, weights off, names", wanted_all, found_all)
    return tally


PARTS: dict[str, Callable[[str], Tally]] = {
    "logged values, masks, weights": compare_logged,
    "rejected configurations": compare_errors,
}


def line(version: str, tallies: Mapping[str, Tally]) -> str:
    """A row of the table in docs/methods/conformance.md."""
    cells = " | ".join(f"{tally.compared:,}" for tally in tallies.values())
    compared = sum(tally.compared for tally in tallies.values())
    different = sum(len(tally.differences) for tally in tallies.values())
    return f"| {load_framework(f'verl@{version}').title} | {cells} | {compared:,} | {compared - different:,} |"


if __name__ == "__main__":
    for name in sys.argv[1:] or VERSIONS:
        made = {part: compare(name) for part, compare in PARTS.items()}
        print(line(name, made))
        for tally in made.values():
            print("".join(f"    {difference}\n" for difference in tally.differences[:20]), end="")
