"""Machine, dependencies and a self-test of this installation."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from packaging.requirements import Requirement

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.data.engines import default_threads
from mismatchctl.io import __version__
from mismatchctl.io.process import container_bytes, system_bytes
from mismatchctl.measure.columns import TOKEN_SUMS
from mismatchctl.measure.kernels import find_devices
from mismatchctl.measure.kernels.kernel import PairTables, SequencePlaces
from mismatchctl.results.model import FORMAT

PACKAGE_NAME = "mismatchctl"


@dataclass(frozen=True)
class Dependency:
    """A required or optional package. `wanted` is the range of accepted versions, or "" if any version is accepted."""

    name: str
    wanted: str
    version: str | None
    optional: bool

    @property
    def fits(self) -> bool:
        """Return True if the installed version is supported, or if an optional package is not installed."""
        if self.version is None:
            return self.optional
        return Requirement(f"{self.name}{self.wanted}").specifier.contains(self.version, prereleases=True)


@dataclass(frozen=True)
class Machine:
    """The machine and the Python environment. Memory is in bytes. `devices` contains the names of the GPUs."""

    version: str
    result_format: int
    place: str
    python: str
    executable: str
    platform: str
    threads: int
    processors: int
    memory: int | None
    memory_limit: int | None
    devices: tuple[str, ...]


@dataclass(frozen=True)
class SelfTestCheck:
    """One metric of the self-test: the expected value (`stored`), and the computed value (`found`) or a problem."""

    part: str
    metric: str
    stored: float
    found: float | None
    problem: str = ""

    @property
    def passed(self) -> bool:
        return self.found is not None and math.isclose(self.found, self.stored, rel_tol=1e-9, abs_tol=1e-12)


TEST_ROWS: tuple[dict[str, Any], ...] = (
    {"rollout": [-1.0, -0.5, -2.0, -0.25], "train": [-1.125, -0.4375, -2.5, -0.25], "mask": [1, 1, 1, 1], "step": 0},
    {"rollout": [-0.5, -1.5, -3.0], "train": [-0.5, -1.25, -2.9375], "mask": [1, 1, 1], "step": 0},
    {"rollout": [-0.125, -4.0], "train": [-0.1875, -2.5], "mask": [1, 1], "step": 1},
    {"rollout": [-1.0, -1.0, -0.75, -2.5], "train": [-1.0625, -0.9375, -0.75, -9.0], "mask": [1, 1, 1, 0], "step": 1},
)
"""Data of the self-test. float64 stores these numbers without rounding. One token is masked."""
TEST_CORRECTIONS = (
    Correction(name="truncated", weight=Weight(level="token", truncate=2.0)),
    Correction(name="rejected", gates=(Gate(level="geometric", keep=(1 / 1.001, 1.001)),)),
)
EXPECTED_VALUES = {
    "tokens": 12.0, "k1": -0.09895833333333333, "k2": 0.10823567708333333, "k3": 0.17829596264196376,
    "ratio_mean": 1.277254295975297, "chi2_token": 1.5871147985416927, "chi2_sequence": 4.229580636563053,
    "ess_token": 0.6305783328621245, "ess_sequence": 0.610427007035383, "log_ppl_diff": -0.17057291666666666,
    "prob_diff_mean": 0.03045273084395845, "prob_corr": 0.9894270581257094,
    "truncated.weight_mean": 1.070446873447125, "truncated.weight_max": 2.0,
    "truncated.ess_token": 0.919146026994146, "rejected.rejected_tokens": 0.75, "rejected.rejected_sequences": 0.75,
    "rejected.k3_kept": 0.0013025072437784053,
}  # fmt: skip
"""Metrics of TEST_ROWS and TEST_CORRECTIONS, computed with 60-digit decimals and without code of this package."""


def inspect_machine() -> Machine:
    return Machine(
        version=__version__,
        result_format=FORMAT,
        place=str(Path(__file__).parents[1]),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        executable=sys.executable,
        platform=platform.platform(),
        threads=default_threads(),
        processors=os.cpu_count() or 1,
        memory=system_bytes("SC_PHYS_PAGES"),
        memory_limit=container_bytes(),
        devices=find_devices()[0],
    )


def list_dependencies() -> list[Dependency]:
    try:
        declared = [Requirement(text) for text in importlib.metadata.requires(PACKAGE_NAME) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    found = {}
    for needed in declared:
        extras = [
            extra
            for extra in ("", "torch", "ray", "hf")
            if not needed.marker or needed.marker.evaluate({"extra": extra})
        ]
        version = None
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(needed.name)
        if extras:
            found[needed.name] = Dependency(needed.name, str(needed.specifier), version, optional="" not in extras)
    return list(found.values())


def run_self_test() -> list[SelfTestCheck]:
    """Compute the metrics of the built-in data with each available kernel, and compare them with expected values."""
    checks = _run_checks("from a file to a Result", EXPECTED_VALUES, lambda: _analyze_test_data("cpu"))
    checks += _run_checks("compiled loops", ("k3",), _run_compiled_kernel)
    if find_devices()[0]:
        checks += _run_checks("on the device", EXPECTED_VALUES, lambda: _analyze_test_data("cuda"))
    return checks


def _run_checks(part: str, keys: Iterable[str], compute: Callable[[], dict[str, float]]) -> list[SelfTestCheck]:
    try:
        found, problem = compute(), ""
    except Exception as error:  # the self-test reports every error instead of raising it
        found, problem = {}, f"{type(error).__name__}: {error}"
    return [SelfTestCheck(part, key, EXPECTED_VALUES[key], found.get(key), problem) for key in keys]


def _analyze_test_data(device: Literal["cpu", "cuda"]) -> dict[str, float]:
    columns = {"rollout_log_probs": "rollout", "train_log_probs": "train", "response_mask": "mask", "step": "step"}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "self_test.parquet")
        pq.write_table(pa.table({name: [row[key] for row in TEST_ROWS] for name, key in columns.items()}), path)
        result = analyze([path], TEST_CORRECTIONS, findings=False, device=device)
    (run,) = result.runs.values()
    of = {"": run.overall.metrics} | run.overall.corrections
    places = {key: key.rpartition(".") for key in EXPECTED_VALUES}
    return {key: value for key, (name, _, own) in places.items() if (value := of[name][own].value) is not None}


def _run_compiled_kernel() -> dict[str, float]:
    """Compute K3 of the built-in data with the compiled kernel, which `analyze` only uses for large dumps."""
    from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL

    mask, rollout, train = (np.concatenate([row[name] for row in TEST_ROWS]) for name in ("mask", "rollout", "train"))
    rows, kept = np.arange(len(TEST_ROWS)), mask > 0
    segments = Segments.from_lengths([sum(row["mask"]) for row in TEST_ROWS])
    batch = TokenBatch(segments, rollout[kept], train[kept], rows=rows)
    total = 0.0
    for start, block in COMPILED_KERNEL.split_blocks(batch):
        ratios = COMPILED_KERNEL.compute_ratios(block.train, block.rollout, block.segments)
        own = rows[start : start + len(block)]
        sums, _ = COMPILED_KERNEL.reduce_tokens(ratios, block.position, SequencePlaces(own, own, own), PairTables())
        total += float(sums[TOKEN_SUMS.index("k3")].sum())
    return {"k3": total / batch.tokens}
