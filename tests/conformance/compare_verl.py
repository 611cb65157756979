"""Compare mismatchctl with verl's numbers (conformance/verl/README.md), and print a line per version."""

from __future__ import annotations

import json
import lzma
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.core.losses import cispo_loss, ppo_loss, quadratic_penalty
from mismatchctl.core.ratios import Ratios
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import Framework, ReplayOptions
from mismatchctl.frameworks.registry import load_framework
from mismatchctl.frameworks.step import Step
from mismatchctl.frameworks.verl import Verl
from mismatchctl.frameworks.verl.configuration import VerlVersion
from mismatchctl.measure.columns import compute_token_loss

FOLDER = Path(__file__).parent / "verl"
VERSIONS = ("a", "b", "c1", "c2", "d")
Run = Mapping[str, Any]


@dataclass
class Tally:
    compared: int = 0
    differences: list[str] = field(default_factory=list)

    def check(self, same: bool, what: str, wanted: object, found: object) -> None:
        self.compared += 1
        if not same:
            self.differences.append(f"{what} is {wanted!r}, not {found!r}")

    def values(self, expected: Mapping[str, Any], found: Mapping[str, float], dtype: str, where: str) -> None:
        self.check(expected.keys() == found.keys(), f"{where}: names", sorted(expected), sorted(found))
        for name in expected.keys() & found.keys():
            golden, value = float(expected[name]), found[name]
            self.check(agree(name, golden, value, dtype), f"{where}: {name}", golden, value)


def agree(name: str, expected: float, found: float, dtype: str) -> bool:
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
    tally, framework = Tally(), load_framework(f"verl@{version}")
    per_sequence, per_token = _per_sequence(version), _per_token(version)
    for batch, runs in expected(version)["metrics"].items():
        for run in runs:
            rows, dtype, step = table(batch, run["step"]), run["dtype"], run["step"]
            where = f"{batch} {step} {dtype}"
            plain = framework.replay(rows, Correction(), ReplayOptions(dtype=dtype)).logged
            debug = {key: value for key, value in plain.items() if key.startswith("training/")}
            tally.values(run["debug_metrics"], debug, dtype, where)
            if "current_vs_rollout" in run:
                tally.values(run["current_vs_rollout"], _replay_bypass(framework, rows, dtype), dtype, where)
            for name, values in _logged(run):
                out = framework.replay(rows, corrections(version)[name], ReplayOptions(dtype=dtype))
                logged = {key: value for key, value in out.logged.items() if not key.startswith("training/")}
                tally.values(values, logged, dtype, f"{where} {name}")
                _rows(tally, per_sequence[batch, step, dtype, name], out, dtype, f"{where} {name}")
                if dtype == "float32":
                    _tokens(tally, per_token[batch, step, name], out, rows, f"{where} {name}")
    return tally


def _replay_bypass(framework: Framework, rows: pa.Table, dtype: Any) -> Mapping[str, float]:
    """Return the metrics of current_log_probs that a correction in bypass mode logs next to its veto."""
    logged = framework.replay(rows, framework.correction({"bypass_mode": True}), ReplayOptions(dtype=dtype)).logged
    return {name: value for name, value in logged.items() if "rollout_is_" not in name}


def _logged(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
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
    """The log ratio of a long sequence is known to 2e-6 in float32, and so is its weight."""
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


@dataclass(frozen=True)
class LossInput:
    """The kept tokens of a step in the layout of verl's loss. `batch.train` is verl's old_log_prob."""

    batch: TokenBatch
    weights: Any  # weights of the kept tokens [K], or 1

    @classmethod
    def read(cls, framework: Verl, rows: pa.Table, native: Run, dtype: Any, anchor: str, mode: str) -> LossInput:
        correction = framework.correction(native)
        replay = framework.replay(rows, correction, ReplayOptions(dtype=dtype))
        step = Step.read(rows, dtype, framework.columns)
        kept, weights = np.concatenate(replay.keep)[step.mask], replay.weights
        bypassed_ppo = anchor == "rollout" and correction.loss != "policy_gradient"
        # The first version rejects with weights of 0. Before loss_type, PPO in bypass mode rejects nothing, and the
        # pure loss takes the mask only if rollout_rs is set: a veto alone does nothing.
        no_mask = bypassed_ppo or (mode == "rollout_correction" and not native.get("rollout_rs"))
        if framework.about.zeroes_rejected or (framework.about.dialect == "ratio" and no_mask):
            kept = np.ones_like(kept)
        current, old, rollout, advantages = (
            step.values(name)[kept]
            for name in ("current_log_probs", f"{anchor}_log_probs", f"{anchor}_log_probs", "advantages")
        )
        batch = TokenBatch(Segments.from_lengths(step.segments.sum(kept)), rollout, old, current, None, advantages)
        applied = weights is not None and not bypassed_ppo  # in bypass mode, PPO's ratio is the weight
        return cls(batch, np.concatenate(weights)[step.mask][kept] if applied else 1.0)

    def losses(self, name: str, **numbers: float) -> tuple[Any, Any]:
        found = compute_token_loss(f"{name}:{','.join(f'{key}={value}' for key, value in numbers.items())}", self.batch)
        assert found is not None
        return found.losses, found.clipped

    @property
    def x(self) -> Any:
        """Limited log ratio in the dtype of the run, which decides at a bound that a ratio equals exactly."""
        return np.clip(self.batch.current - self.batch.train, -20, 20)


Losses = Callable[[LossInput, Run], tuple[Any, Any, Any]]
"""Loss of each token, whether the clip decides it, and whether the dual clip does (None: not logged)."""


def _clips(clip: Run) -> dict[str, float]:
    return {"low": 1 - clip["clip_ratio_low"], "high": 1 + clip["clip_ratio_high"]}


def _vanilla(tokens: LossInput, clip: Run) -> tuple[Any, Any, Any]:
    dual = clip["clip_ratio_c"]
    term = ppo_loss(tokens.batch.advantages, tokens.x, **_clips(clip), dual=dual)
    return tokens.losses("dual_clip", **_clips(clip), dual=dual)[0], term.clipped, term.clipped_lower


def _cispo(tokens: LossInput, clip: Run) -> tuple[Any, Any, Any]:
    term = cispo_loss(tokens.batch.advantages, tokens.x, tokens.batch.current, **_clips(clip))
    return tokens.losses("cispo", **_clips(clip))[0], term.clipped, False


def _geo_mean(tokens: LossInput, clip: Run) -> tuple[Any, Any, Any]:
    """verl counts tokens outside of either bound, with opposite signs of the advantage."""
    bounds = {"low": -clip["clip_ratio_low"], "high": clip["clip_ratio_high"]}
    opposite = replace(tokens, batch=replace(tokens.batch, advantages=-tokens.batch.advantages))
    losses, clipped = tokens.losses("gmpo", **bounds)
    outside, rising = clipped | opposite.losses("gmpo", **bounds)[1], tokens.batch.advantages > 0
    return losses, outside & rising, outside & (tokens.batch.advantages < 0)


def _dppo_tv(tokens: LossInput, clip: Run) -> tuple[Any, Any, Any]:
    """REINFORCE with a limited ratio (CISPO) on the tokens that DPPO's gate keeps."""
    dropped = tokens.losses("dppo", low=clip["clip_ratio_low"], high=clip["clip_ratio_high"])[1]
    losses, bounded = tokens.losses("cispo", low=0, high=clip["clip_ratio_c"])
    return losses * ~dropped, dropped, bounded & ~dropped


def _dro(tokens: LossInput, clip: Run) -> tuple[Any, Any, Any]:
    log_ratio = Ratios(tokens.batch.current, tokens.batch.train, tokens.batch.segments).log_ratio
    return tokens.losses("policy_gradient")[0] + quadratic_penalty(log_ratio, 0.05).losses, None, None


def _reinforce(tokens: LossInput, clip: Run) -> tuple[Any, Any, Any]:
    return *tokens.losses("policy_gradient"), False


LOSSES: dict[str, Losses] = {
    "vanilla": _vanilla,
    "gspo": lambda tokens, clip: (*tokens.losses("gspo", **_clips(clip)), False),
    "gpg": _reinforce,
    "rollout_correction": _reinforce,
    "geo_mean": _geo_mean,
    "sapo": lambda tokens, clip: (*tokens.losses("sapo"), False),
    "cispo": _cispo,
    "dppo_tv": _dppo_tv,
    "dro": _dro,
}
"""verl's losses as losses of mismatchctl, which does not have DPPO with a binary KL (dppo_kl)."""
UNKNOWN = {"gpg": {"actor/ppo_kl"}, "dppo_kl": {"loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"}}
"""Values that are not compared: a constant 0, and a loss that mismatchctl does not have."""
UNBOUNDED_KL = ("gspo", "geo_mean", "dro", "rollout_correction")
"""Losses whose ppo_kl is the mean of log ratios without a limit."""


@dataclass(frozen=True)
class Aggregation:
    """verl's reduction of the losses of tokens to one number."""

    mode: str  # loss_agg_mode
    width: float  # padded length
    sizes: tuple[float, float] | None = (
        None  # tokens and sequences by which the trainer divides. None: the kept tokens and sequences.
    )

    @classmethod
    def read(cls, entry: Run, run: Run) -> Aggregation:
        padded = run["padded_length"] if entry["padded_length"] == "batch" else entry["padded_length"]
        sizes = (run["n_valid_tokens"], run["n_sequences"]) if entry["global_batch_info"] else None
        return cls(entry["agg"], float(padded), sizes)

    def value(self, losses: Any, segments: Segments, about: VerlVersion) -> float:
        tokens, sequences = self.sizes or (segments.tokens, segments.nonempty.sum())
        if self.mode == "seq-mean-token-mean":
            losses = segments.mean(losses)
        if self.mode == "seq-mean-token-sum-norm":  # the golden numbers of 2026 divide by a factor of 256 instead
            width = 256.0 if self.sizes else self.width
            divisor = sequences * width if about.dialect == "estimator" else self.width
        else:
            divisor = {"token-mean": tokens, "token-sum": 1}.get(self.mode, sequences)
        if not divisor:  # NaN since 2025-11-25. The golden numbers were computed without sizes.
            return math.nan if about.empty_loss_is_nan or about.dialect == "estimator" else 0.0
        return float(losses.sum() / divisor)


def measure_loss(
    tokens: LossInput, mode: str, clip: Run, aggregation: Aggregation, about: VerlVersion
) -> dict[str, float]:
    batch, segments = tokens.batch, tokens.batch.segments
    distance = -Ratios(batch.current, batch.train, segments).log_ratio
    kl = distance if mode in UNBOUNDED_KL else np.clip(distance, -20, 20)
    found = {} if mode == "gpg" else {"actor/ppo_kl": float(kl.sum() / max(kl.size, 1))}
    if mode not in LOSSES:
        return found
    losses, clipped, dual = LOSSES[mode](tokens, clip)
    for name, share in (("actor/pg_clipfrac", clipped), ("actor/pg_clipfrac_lower", dual)):
        if share is not None:
            found[name] = float(np.sum(share) / max(kl.size, 1))
    if mode == "geo_mean":  # a mean over all sequences, times the geometric mean of their weights
        weights = np.broadcast_to(tokens.weights, losses.shape)
        means = segments.mean(losses) * np.exp(segments.mean(np.log(weights + 1e-10)))
        return found | {"loss": float(means.mean())}
    return found | {"loss": aggregation.value(losses * tokens.weights, segments, about)}


def compare_losses(version: str) -> Tally:
    tally, framework = Tally(), load_framework(f"verl@{version}")
    assert isinstance(framework, Verl)
    losses, configs = expected(version)["losses"], expected(version)["configs"]["configs"]
    described = {meaning.name for meaning in framework.meanings()}
    for run in losses["runs"]:
        rows, dtype = table(run["batch"], run["step"]), run["dtype"]
        inputs: dict[str, LossInput] = {}
        for index, entry in enumerate(losses["entries"]):
            where = f"{run['batch']} {run['step']} {dtype} {entry}"
            native = configs[entry["correction"]]["kwargs"] if entry["correction"] else {}
            native = native | entry.get("overrides", {})
            mode = _find_mode(entry)
            key = f"{native} {entry['anchor']} {mode}"
            if key not in inputs:
                inputs[key] = LossInput.read(framework, rows, native, dtype, entry["anchor"], mode)
            wanted = {"loss": float(run["loss"][index])} | _column(run["metrics"], index)
            aggregation = Aggregation.read(entry, run)
            if mode in ("gspo", "sapo"):  # whatever loss_agg_mode says
                aggregation = replace(aggregation, mode="seq-mean-token-mean")
            clip = losses["clip_settings"][entry["clip"]]
            found = measure_loss(inputs[key], mode, clip, aggregation, framework.about)
            known = wanted.keys() - {"loss"} <= described and wanted.keys() - found.keys() <= UNKNOWN.get(mode, set())
            tally.check(known, f"{where}: names", sorted(wanted), sorted(found))
            for name in wanted.keys() & found.keys():
                same = _losses_agree(name, float(wanted[name]), found[name], run, entry, dtype)
                tally.check(same, f"{where}: {name}", wanted[name], found[name])
        added = run.get("bypass_rollout_corr_metrics", {"keys": ()})
        for index, key in enumerate(added["keys"]):
            name, _, loss_type = key.partition("|")
            override = {"loss_type": loss_type} if loss_type else {"use_policy_gradient": True}
            correction = framework.correction(configs[name]["kwargs"] | {"bypass_mode": True} | override)
            logged = framework.replay(rows, correction, ReplayOptions(dtype=dtype)).logged
            wanted_all = added["common_metrics"] | _column(added["metrics"], index)
            tally.values(wanted_all, logged, dtype, f"{run['batch']} {run['step']} {dtype} {key}")
    return tally


def _find_mode(entry: Run) -> str:
    if entry["loss_mode"] != "bypass_mode":
        return str(entry["loss_mode"])
    return "vanilla" if entry["overrides"]["loss_type"] == "ppo_clip" else "rollout_correction"


def _losses_agree(name: str, wanted: float, found: float, run: Run, entry: Run, dtype: str) -> bool:
    """The terms of a float32 loss cancel, so its error is up to 1e-6 per term."""
    if name.startswith("actor/pg_clipfrac"):  # verl counts in float32 for both dtypes
        return agree(name, wanted, found, "float32")
    if name != "loss" or dtype == "float64" or not math.isfinite(wanted):
        return agree(name, wanted, found, dtype if name != "loss" else "float64")
    terms = {"token-sum": run["n_valid_tokens"], "seq-mean-token-sum": run["n_valid_tokens"] / run["n_sequences"]}
    return abs(wanted - found) <= 3e-6 * abs(wanted) + 1e-6 * terms.get(entry["agg"], 1.0)


def compare_errors(version: str) -> Tally:
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
    "losses": compare_losses,
    "rejected configurations": compare_errors,
}


def line(version: str, tallies: Mapping[str, Tally]) -> str:
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
