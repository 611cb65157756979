"""Ten frameworks on random thresholds and inputs, compared with a plain transcription of their code."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mismatchctl.frameworks.adapter import ReplayOptions
from mismatchctl.frameworks.registry import load_framework
from tests.oracles import frameworks as oracle_peers
from tests.oracles.frameworks import Config, Made, Row

Rng = np.random.Generator
SCALES = (0.01, 0.2, 3.0)


def step(rng: Rng, dtype: str, *, nonfinite: bool) -> pa.Table:
    """Make rows with masked gaps, an empty row and a row of one token, with noise of three sizes and equal tokens."""
    columns: dict[str, list[Any]] = {name: [] for name in ("rollout", "train", "current", "advantages", "mask")}
    for length in (0, 1, *rng.integers(2, 12, 6).tolist()):
        mu = np.minimum(-rng.exponential(rng.choice([0.3, 2.0]), length), -1e-4)
        scale = rng.choice(SCALES)
        old = np.minimum(np.where(rng.random(length) < 0.2, mu, mu + rng.normal(0, scale, length)), -1e-4)
        cur = np.minimum(old + rng.normal(0, 0.1, length), -1e-4)
        if length and scale == 3.0 and rng.random() < 0.5:
            mu[0] = -60.0  # larger than every clamp
        mask = rng.random(length) < 0.8
        if nonfinite and mask.any():
            place, kind = rng.choice(np.flatnonzero(mask)), rng.integers(4)
            side, value = ((mu, -np.inf), (mu, np.nan), (old, -np.inf), (mu, -9999.0))[kind]
            side[place] = value
        values = (mu, old, cur, np.full(length, rng.normal()), mask)
        for name, own in zip(columns, values, strict=True):
            columns[name].append((own if own.dtype == bool else own.astype(dtype)).tolist())
    kind = pa.list_(pa.float32() if dtype == "float32" else pa.float64())
    names = ("rollout_log_probs", "train_log_probs", "current_log_probs", "advantages")
    arrays = [pa.array(columns[name], kind) for name in ("rollout", "train", "current", "advantages")]
    return pa.table([*arrays, pa.array(columns["mask"], pa.list_(pa.bool_()))], [*names, "response_mask"])


def rows_of(table: pa.Table, dtype: str) -> list[Row]:
    found = []
    for row in table.to_pylist():
        mask = np.array(row["response_mask"], bool)
        names = ("rollout_log_probs", "train_log_probs", "current_log_probs", "advantages")
        found.append(Row(*(np.array(row[name], dtype)[mask] for name in names), np.flatnonzero(mask)))
    return found


def pick(rng: Rng, *values: Any) -> Any:
    return values[rng.integers(len(values))]


def bounds(rng: Rng, *, both: bool = False) -> tuple[float | None, float | None]:
    """Draw bounds of a ratio: near 1 on any scale, exactly 1, or open."""
    reach = float(rng.choice([0.003, 0.05, 0.5, 2.0]))
    low, high = (round(float(np.exp(sign * rng.uniform(0.1, 1.0) * reach)), 4) for sign in (-1, 1))
    low, high = (pick(rng, bound, bound, bound, 1.0) for bound in (low, high))
    return (low, high) if both else pick(rng, (low, high), (low, high), (None, high), (low, None))


def trl(rng: Rng) -> Config:
    mode = pick(rng, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    low, high = bounds(rng)
    return {"mode": mode, "cmin": low, "cmax": high}


def nemo_rl(rng: Rng) -> Config:
    low, high = bounds(rng, both=True)
    kind = pick(rng, None, "tis", "icepop", "seq-mask-tis")
    loss = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": kind}
    if kind:
        loss["truncated_importance_sampling_ratio"] = high
        loss["truncated_importance_sampling_ratio_min"] = pick(rng, low, None) if kind == "tis" else low
    if rng.random() < 0.4:
        loss |= {"sequence_level_importance_ratios": True, "token_level_loss": False}
    limit = round(float(np.exp(rng.uniform(0.005, 1.0))), 4)
    return {"loss": loss} | ({"seq_logprob_error_threshold": limit} if rng.random() < 0.4 else {})


def openrlhf(rng: Rng) -> Config:
    kind = pick(rng, "tis", "icepop", "seq-mask-tis")
    return {"vllm_is_correction_type": kind, "vllm_is_truncated_threshold": list(bounds(rng, both=True))}


def prime_rl(rng: Rng) -> Config:
    limits = [pick(rng, 0.0, *np.round(rng.uniform(0.001, 0.3, 3), 4).tolist()) for _ in range(2)]
    given = {"type": "ipo", "ipo_threshold": limits[0]}
    if rng.random() < 0.6:
        given = {"type": "default", "dppo_mask_low": limits[0], "dppo_mask_high": limits[1]}
    return given | {"adv_tau": pick(rng, 1.0, 0.5)}


def prime_rl_2026_09(rng: Rng) -> Config:
    low, high = bounds(rng, both=True)
    tight = {"type": "ipo", "eps": pick(rng, 0.0, round(rng.uniform(0.001, 0.3), 4))}
    return pick(rng, tight, {"type": "icepop", "ratio_low": low, "ratio_high": high})


def prime_rl_2026_10(rng: Rng) -> Config:
    given = prime_rl_2026_09(rng)
    if given["type"] == "ipo":
        return given | {"max_importance_ratio": pick(rng, 1e4, 1.0, 1.05, 3.0)}
    return given | {"type": pick(rng, "icepop", "cispo")}


def areal(rng: Rng, *metrics: str) -> Config:
    metric = pick(rng, *(metrics or ("ratio", "ratio", "kl_k1", "kl_k2", "kl_k3")))
    level = pick(rng, "token", "sequence")
    low, high = bounds(rng, both=True)
    if metric != "ratio":
        high, low = round(float(np.exp(rng.uniform(-7, 1))), 5), round(float(-np.exp(rng.uniform(-7, 1))), 5)
        low = low if metric == "kl_k1" else min(abs(low), high) / 20
    action = pick(rng, "mask", "clamp") if metric == "ratio" else "mask"
    rule = {"level": level, "action": action, "metric": metric, "agg": pick(rng, "sum", "mean", "max")}
    rule |= {"upper": max(high, 1.0001) if metric == "ratio" else high, "lower": pick(rng, None, low)}
    return {"rejection_sampling": rule} | (
        {"m2_threshold": round(float(np.exp(rng.uniform(-9, 1))), 6)} if rng.random() < 0.4 else {}
    )


def areal_2026_08(rng: Rng) -> Config:
    return areal(rng, "ratio", "kl_k1", "kl_k3", "binary_kl", "binary_kl")


def skyrl(rng: Rng) -> Config:
    own: Config = {}
    if rng.random() < 0.4:
        low, high = bounds(rng)
        own |= {"outlier_token_is_threshold_low": low, "outlier_token_is_threshold_high": high}
    if rng.random() < 0.4:
        low, high = bounds(rng, both=True)
        own |= {"token_mask_is_threshold_low": low, "token_mask_is_threshold_high": high}
    kind, (_, high) = pick(rng, None, "token", "sequence"), bounds(rng, both=True)
    if kind:
        own |= {"tis_ratio_type": kind, f"{kind}_tis_ratio_clip_high": high}
    metric, (low, high) = pick(rng, None, "geometric", "product"), bounds(rng, both=True)
    if metric:
        name = {"geometric": "geo", "product": "product"}[metric]
        own |= {"sequence_mask_metric": metric, f"{name}_mask_low": low, f"{name}_mask_high": high}
    return {"off_policy_correction": own}


def roll(rng: Rng) -> Config:
    given: Config = {}
    levels = ("token", "segment", "geometric", "sequence")
    if rng.random() < 0.6:
        weight = {
            "enabled": True,
            "weight_type": pick(rng, *levels),
            "upper_bound": pick(rng, None, bounds(rng, both=True)[1]),
        }
        given["is_weight"] = weight
    for _ in range(rng.integers(0, 3)):
        (low, high), apart = bounds(rng, both=True), round(float(np.exp(rng.uniform(-6, 0))), 4)
        ratio, diff = pick(rng, (True, False), (False, True), (True, True))
        one = {"enabled": True, "agg_type": pick(rng, *levels), "ratio_enabled": ratio, "diff_enabled": diff}
        one |= {"ratio_low": low, "ratio_high": high, "diff_low": -apart, "diff_high": apart}
        given.setdefault("filters", []).append(one)
    return given


def open_instruct(rng: Rng) -> Config:
    low, high = (bound or 0.0 for bound in bounds(rng))
    sequences, tv = pick(rng, (False, False), (True, False), (False, True))
    if tv:
        low, high = pick(rng, 0.0, 0.003), round(float(np.exp(rng.uniform(-5, 1))), 4)
    clamp = [bound or 0.0 for bound in bounds(rng)]
    return {
        "rho_mask_lower_bound": low, "rho_mask_upper_bound": high, "rho_mask_sequence_level": sequences,
        "rho_mask_tv_divergence": tv, "rho_clamp_lower_bound": clamp[0], "rho_clamp_upper_bound": clamp[1],
    }  # fmt: skip


def ms_swift(rng: Rng) -> Config:
    mode = pick(rng, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    limit = pick(rng, *(bound for bound in bounds(rng, both=True)))
    delta = pick(rng, None, None, round(float(rng.normal(0, 0.05)), 4))
    return {
        "rollout_importance_sampling_mode": mode, "rollout_importance_sampling_threshold": limit,
        "off_policy_sequence_mask_delta": delta,
    }  # fmt: skip


FRAMEWORKS: dict[str, tuple[Callable[[Rng], Config], Callable[[Config, list[Row]], Made]]] = {
    "trl": (trl, oracle_peers.trl),
    "nemo-rl": (nemo_rl, oracle_peers.nemo_rl),
    "openrlhf@0.11": (openrlhf, oracle_peers.openrlhf),
    "prime-rl": (prime_rl, oracle_peers.prime_rl),
    "prime-rl@2026-09": (prime_rl_2026_09, oracle_peers.prime_rl_2026_09),
    "prime-rl@2026-10": (prime_rl_2026_10, oracle_peers.prime_rl_2026_10),
    "areal": (areal, oracle_peers.areal),
    "areal@2026-08": (areal_2026_08, oracle_peers.areal),
    "skyrl": (skyrl, oracle_peers.skyrl),
    "roll": (roll, oracle_peers.roll),
    "open-instruct": (open_instruct, oracle_peers.open_instruct),
    "ms-swift": (ms_swift, oracle_peers.ms_swift),
}


@pytest.mark.slow
@pytest.mark.parametrize("nonfinite", [False, True], ids=["finite", "nonfinite"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_weights_and_masks_match_the_oracle_at_random_thresholds(name: str, nonfinite: bool) -> None:
    rng, own = np.random.default_rng([*name.encode(), nonfinite]), load_framework(name)
    config_of, oracle = FRAMEWORKS[name]
    rejected = changed = 0
    for number in range(26):
        dtype: Any = ("float64", "float32")[number % 2]
        table, config = step(rng, dtype, nonfinite=nonfinite), config_of(rng)
        rows = rows_of(table, dtype)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            wanted = oracle(config, rows)
        replayed = own.replay(table, own.correction(config), ReplayOptions(dtype=dtype))
        assert replayed.weights is not None
        for number_of_row, (row, (weights, keep)) in enumerate(zip(rows, wanted, strict=True)):
            said = f"{config}\nrow {number_of_row} {dtype}: {row}"
            np.testing.assert_array_equal(replayed.keep[number_of_row][row.place], keep, err_msg=said)
            found, relative = replayed.weights[number_of_row][row.place], {"float32": 1e-5, "float64": 1e-11}[dtype]
            np.testing.assert_allclose(found, weights, rtol=relative, err_msg=said)
            rejected, changed = rejected + int((~keep).sum()), changed + int((weights != 1).sum())
    assert rejected > 20 and changed > 20
