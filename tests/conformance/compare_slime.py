"""Compare mismatchctl with the numbers of slime and Miles (conformance/slime/README.md), and print a line for each."""

import json
import lzma
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.core.losses import off_policy_mask
from mismatchctl.core.ratios import LOG_RATIO_BOUND, Ratios
from mismatchctl.corrections.application import Selection, apply_correction
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import Framework, Replay, ReplayOptions
from mismatchctl.frameworks.registry import load_framework
from mismatchctl.frameworks.slime import Slime
from mismatchctl.frameworks.slime.arguments import SlimeVersion
from mismatchctl.frameworks.step import Step
from mismatchctl.measure.columns import compute_token_loss

FOLDER = Path(__file__).parent / "slime"
VERSIONS = {"slime_seed": "slime@seed", "slime_head": "slime@head", "miles_head": "miles@head"}
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"

IN_FLOAT32 = {"kl_loss": 2e-5, "train_rollout_kl": 2e-5, "ess_ratio": 1e-6, "pg_loss": 1e-6, "loss": 1e-6}
"""Relative tolerance, in float64 runs, of values that slime or Miles computes in float32."""

CANCELLING = {
    "mis_k3_kl": (2e-5, 0.0),
    "train_rollout_kl": (2e-5, 0.0),
    "kl_loss": (2e-5, 0.0),
    "mis_log_ppl_diff": (2e-5, 0.0),
    "mis_log_ppl_abs_diff": (2e-5, 0.0),
    "mis_chi2_token": (1e-6, 2e-8),
    "ppo_kl": (1e-6, 1e-9),
    "pg_loss": (1e-6, 1e-7),
    "loss": (1e-6, 1e-7),
}
"""Relative and absolute tolerance, in float32 runs, of sums whose terms cancel. The tolerance of other values is
1e-6.
"""

LAST_BIT = {("dense", "float32", name) for name in ("incl-mask-token-lo1", "incl-rs-token-lo1")}
"""Configurations with a lower bound of exactly 1, whose decision depends on the last bit of exp
(docs/methods/conformance.md).
"""

Config = Mapping[str, Any]


@dataclass
class Tally:
    """Number of compared values, values that differ, and values that depend on the last bit of exp."""

    compared: int = 0
    differences: list[str] = field(default_factory=list)
    last_bit: list[str] = field(default_factory=list)

    def check(self, same: Any, where: Any, what: Any, wanted: Any, found: Any, last_bit: bool = False) -> None:
        self.compared += 1
        if not same:
            (self.last_bit if last_bit else self.differences).append(f"{where}: {what} {wanted!r}, not {found!r}")


def agree(name: str, expected: float, found: float, dtype: str) -> bool:
    relative, absolute = CANCELLING.get(name, (1e-6, 0.0))
    if dtype == "float64":
        relative, absolute = IN_FLOAT32.get(name, 1e-9), 0.0
    return abs(expected - found) <= relative * abs(expected) + absolute


def _weights_agree(expected: Any, found: Any, dtype: str) -> Any:
    """The log ratio of a long sequence is known to 2e-6 in float32, and so is its weight."""
    return np.isclose(found, expected, rtol=1e-9 if dtype == "float64" else 4e-6, atol=0)


@cache
def goldens() -> Any:
    with lzma.open(FOLDER / "configs.json.xz", "rt") as file:
        return json.load(file)


@cache
def configs() -> dict[str, Config]:
    return {config["id"]: config for config in goldens()["configs"]}


@cache
def table(batch: str, step: int, groups: bool = False) -> pa.Table:
    rows = _inputs()
    rows = rows.filter(pc.and_(pc.equal(rows["batch"], batch), pc.equal(rows["step"], step)))
    return rows if groups else rows.drop_columns(["rollout_ids"])


@cache
def _inputs() -> pa.Table:
    return pq.read_table(FOLDER / "inputs.parquet")


def correcting(config: Config) -> dict[str, Any]:
    return {"custom_tis_function_path": ICEPOP} if config["correction"] == "icepop" else dict(config.get("mis", {}))


@cache
def correction(impl: str, name: str, per_token: bool = False) -> Correction:
    loss = configs()[name]["loss"] | ({"calculate_per_token_loss": True} if per_token else {})
    return framework(impl).correction(correcting(configs()[name]) | loss)


@cache
def framework(impl: str) -> Framework:
    return load_framework(VERSIONS[impl])


@cache
def _metrics(impl: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """Return the logged values by (batch, step, configuration, dtype, reducer)."""
    rows = pl.read_parquet(FOLDER / "metrics.parquet").filter(pl.col("impl") == impl)
    found: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in rows.iter_rows():
        found[row[1:6]][row[6]] = row[7]
    return found


@cache
def _sequences() -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = pl.read_parquet(FOLDER / "sequences.parquet").iter_rows(named=True)
    return {(row["batch"], row["step"], row["config"], row["dtype"]): row for row in rows}


@cache
def _tokens() -> dict[tuple[Any, ...], dict[int, Any]]:
    found: dict[tuple[Any, ...], dict[int, Any]] = defaultdict(dict)
    for row in pl.read_parquet(FOLDER / "tokens.parquet").iter_rows(named=True):
        found[row["batch"], row["step"], row["config"], row["dtype"]][row["sequence_id"]] = row
    return found


def compare_logged(impl: str) -> Tally:
    tally = Tally()
    for key, expected in _metrics(impl).items():
        batch, step, name, dtype, reducer = key
        config = configs()[name]
        rows = table(batch, step, "rollout_groups" in config)
        out = framework(impl).replay(
            rows,
            correction(impl, name, reducer == "token_mean"),
            ReplayOptions(config.get("micro_batches"), dtype),
        )
        _values(tally, expected, out.logged, key)
        if reducer == "sample_mean":
            _rows(tally, key[:4], impl, out)
            if impl == "slime_head":
                _each_token(tally, key[:4], rows, out)
    return tally


def _values(tally: Tally, expected: Mapping[str, float], found: Mapping[str, float], key: tuple[Any, ...]) -> None:
    batch, _, name, dtype, _ = key
    last_bit = (batch, dtype, name) in LAST_BIT
    tally.check(expected.keys() == found.keys(), key, "names", sorted(expected), sorted(found))
    for metric in sorted(expected.keys() & found.keys()):
        golden, value = expected[metric], found[metric]
        tally.check(agree(metric, golden, value, dtype), key, metric, golden, value, last_bit)


def _rows(tally: Tally, key: tuple[Any, ...], impl: str, out: Replay) -> None:
    golden = _sequences().get(key)
    if golden is None or impl not in golden["impls"]:
        return
    assert out.weights is not None
    batch, _, name, dtype = key
    last_bit = (batch, dtype, name) in LAST_BIT
    kept = [int(keep.sum()) for keep in out.keep]
    for wanted, count in zip(golden["kept_tokens"], kept, strict=True):
        tally.check(wanted == count, key, "kept tokens", wanted, count, last_bit)
    for column, chosen in (("weight_sum", [slice(None)] * len(kept)), ("kept_weight_sum", out.keep)):
        sums = [weights[keep].sum(dtype=np.float64) for weights, keep in zip(out.weights, chosen, strict=True)]
        same = _weights_agree(golden[column], sums, dtype)
        for agrees, wanted, total in zip(same, golden[column], sums, strict=True):
            tally.check(agrees, key, column, wanted, total, last_bit)


def _each_token(tally: Tally, key: tuple[Any, ...], rows: pa.Table, out: Replay) -> None:
    goldens_of_rows = _tokens().get(key)
    if goldens_of_rows is None:
        return
    assert out.weights is not None
    last_bit = (key[0], key[3], key[2]) in LAST_BIT
    for row, sequence in enumerate(rows["sequence_id"].to_pylist()):
        golden = goldens_of_rows[sequence]
        same = _weights_agree(golden["weights"], out.weights[row], key[3])
        tally.compared += 2 * len(same) - 2
        tally.check(same.all(), key, f"weights of {sequence}", golden["weights"], out.weights[row], last_bit)
        keep = out.keep[row].tolist()
        tally.check(golden["mask"] == keep, key, f"kept tokens of {sequence}", golden["mask"], keep, last_bit)


def compare_losses(impl: str) -> Tally:
    """Compare the losses of `analyze`, with the replayed weights and kept tokens.

    The configurations of `LAST_BIT` and ratios beyond exp(20), which slime does not limit, are left out.
    """
    tally, own = Tally(), framework(impl)
    assert isinstance(own, Slime)
    for key, expected in _metrics(impl).items():
        batch, step, name, dtype, reducer = key
        config = configs()[name]
        if (batch, dtype, name) in LAST_BIT:
            continue
        rows = table(batch, step, "rollout_groups" in config)
        per_token = reducer == "token_mean"
        out = own.replay(rows, correction(impl, name, per_token), ReplayOptions(config.get("micro_batches"), dtype))
        taken = Step.read(rows, dtype, own.columns | {"log_probs": "train_log_probs"})
        kept, segments, given = np.concatenate(out.keep)[taken.mask], taken.segments, config["loss"]
        old = taken.values(f"{'rollout' if given.get('use_rollout_logprobs') else 'train'}_log_probs")
        tokens = TokenBatch(segments, old, old, taken.values("current_log_probs"), None, taken.values("advantages"))
        beyond = not own.about.finite and np.abs(tokens.current - old).max() > LOG_RATIO_BOUND
        losses, clipped = _policy_loss(given, tokens, own.about)
        if out.weights is not None:
            losses = losses * np.concatenate(out.weights)[taken.mask]
        for metric, values in (("pg_loss", losses), ("pg_clipfrac", clipped)):
            found = _reduce(values * kept, rows, segments, kept, own.about, per_token)
            if metric == "pg_loss" and beyond:
                continue
            same = agree(metric, expected[metric], found, "float32" if metric == "pg_clipfrac" else dtype)
            tally.check(same, key, metric, expected[metric], found)
    return tally


def _policy_loss(given: Mapping[str, Any], tokens: TokenBatch, about: SlimeVersion) -> tuple[Any, Any]:
    """Return the loss of each token, and whether the clip decides it."""
    low = given.get("eps_clip", 0.2)
    numbers = f"low={1 - low},high={1 + given.get('eps_clip_high', low)}"
    estimator, dual = given.get("advantage_estimator"), given.get("eps_clip_c") if about.dual_clip else None
    name = {"gspo": "gspo", "cispo": "cispo"}.get(str(estimator), "ppo")
    found = compute_token_loss(f"{name}:{numbers}", tokens)
    assert found is not None and tokens.current is not None and tokens.advantages is not None
    losses, clipped = found.losses, found.clipped
    if dual:  # the share counts only the clip
        found = compute_token_loss(f"dual_clip:{numbers},dual={dual}", tokens)
        assert found is not None
        losses = found.losses
    if given.get("use_opsm"):
        drift = tokens.segments.mean(tokens.train - tokens.current)
        masked = off_policy_mask(tokens.advantages, drift, tokens.segments, given["opsm_delta"])
        losses = np.where(masked, 0, losses)
    return losses, clipped


def _reduce(values: Any, rows: pa.Table, segments: Segments, kept: Any, about: SlimeVersion, per_token: bool) -> float:
    """Reduce a metric of kept tokens over tokens, sequences, or (since 2026-08) rollouts."""
    sums = segments.sum(values)
    if per_token:  # rejected tokens count, and an empty sequence is one
        return float(sums.sum() / np.maximum(segments.lengths, 1).sum())
    if not about.rollout_denominators:
        return float((sums / np.maximum(segments.sum(kept), 1)).mean())
    ids = rows["rollout_ids"].to_pylist() if "rollout_ids" in rows.column_names else range(len(rows))
    names, index = np.unique(ids, return_inverse=True)
    totals, lengths = (np.bincount(index, weights=each) for each in (sums, segments.lengths))
    return float((totals / np.maximum(lengths, 1)).sum() / len(names))


def compare_errors(impl: str) -> Tally:
    tally = Tally()
    errors = {case["config"]: case for case in goldens()["errors"] if case["impl"] == impl}
    for name in sorted(errors.keys() | {key[2] for key in _metrics(impl)}):
        wanted = errors.get(name)
        try:
            correction(impl, name)
        except ConfigError as error:
            message = str(error)
            same = wanted is not None and bool(message) and message.startswith(wanted["message"])
            tally.check(same, name, "error", wanted, message)
            continue
        tally.check(wanted is None, name, "error", wanted, None)
    return tally


def compare_corrections(impl: str) -> Tally:
    """Compare corrections in float64: kept tokens, and weights without a normalization."""
    tally = Tally()
    for key, golden in _sequences().items():
        batch, step, name, dtype = key
        if dtype != "float64" or impl not in golden["impls"]:
            continue
        own, sequences = correction(impl, name), _batch(batch, step)
        assert own.weight is not None
        ratios = {own.weight.source: Ratios(sequences.train, sequences.rollout, sequences.segments)}
        applied = apply_correction(own, ratios, sequences)
        kept, everything = applied.kept.counts, Selection.everything(sequences.segments)
        for wanted, count, tied in zip(golden["kept_tokens"], kept, _on_a_veto(own, sequences), strict=True):
            tally.check(wanted == count or tied, key, "kept tokens", wanted, count)
        if own.weight.normalize == "none":
            sums = everything.sum(applied.token_weights())
            for wanted, found in zip(golden["weight_sum"], sums, strict=True):
                tally.check(_weights_agree(wanted, found, dtype), key, "weight", wanted, found)
    return tally


@cache
def _batch(batch: str, step: int) -> TokenBatch:
    rows = table(batch, step).to_pylist()
    masks = [np.array(row["response_mask"], np.bool_) for row in rows]

    def valid(column: str) -> Any:
        return np.concatenate([np.array(row[column], np.float32)[mask] for row, mask in zip(rows, masks, strict=True)])

    segments = Segments.from_lengths([int(mask.sum()) for mask in masks])
    return TokenBatch(segments, valid("rollout_log_probs"), valid("train_log_probs"))


def _on_a_veto(own: Correction, sequences: TokenBatch) -> Any:
    """Return the sequences with a token so close to the veto that float32 rounding decides."""
    log_ratio = np.subtract(sequences.train, sequences.rollout, dtype=np.float64)
    near = np.zeros(len(log_ratio), np.bool_)
    for gate in own.gates:
        if gate.is_veto and gate.keep[0]:
            near |= np.abs(log_ratio - np.log(gate.keep[0])) < 5e-7
    return sequences.segments.sum(near) > 0


PARTS: dict[str, Callable[[str], Tally]] = {
    "logged values, masks, weights": compare_logged,
    "losses": compare_losses,
    "rejected configurations": compare_errors,
    "as corrections": compare_corrections,
}


def line(impl: str, tallies: Mapping[str, Tally]) -> str:
    cells = " | ".join(f"{tally.compared:,}" for tally in tallies.values())
    compared = sum(tally.compared for tally in tallies.values())
    unequal = sum(len(tally.differences) + len(tally.last_bit) for tally in tallies.values())
    return f"| {load_framework(VERSIONS[impl]).title} | {cells} | {compared:,} | {compared - unequal:,} |"


if __name__ == "__main__":
    for chosen in sys.argv[1:] or VERSIONS:
        made = {part: compare(chosen) for part, compare in PARTS.items()}
        print(line(chosen, made))
        for part in made.values():
            print(*part.differences[:20], sep="\n")
            print(*part.last_bit, sep="\n")
