"""KL to the reference policy and losses with each aggregation compared with loops, and routing compared with sets."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.measure.kernels import choose_kernel
from mismatchctl.measure.metrics.registry import KL_METRICS
from tests.cli.command import run

RNG = np.random.default_rng(11)
LENGTHS = [6, 1, 19, 0, 33, 8]
Rows = list[dict[str, Any]]


def rows_of() -> Rows:
    found = []
    for at, length in enumerate(LENGTHS):
        rollout = -RNG.exponential(1.0, length) - 0.2
        made = {"rollout": rollout, "train": rollout + RNG.normal(0, 0.05, length)}
        made["current"] = made["train"] + RNG.normal(0, 0.1, length)
        made["ref"] = made["train"] + RNG.normal(0, 0.4, length)
        if at == 4:
            made["ref"][3] -= 30.0  # beyond the bound of low_var
        found.append({name: np.minimum(values, 0.0) for name, values in made.items()} | {"advantage": RNG.normal()})
    return found


def write(path: Path, rows: Rows, *names: str, lack: tuple[int, ...] = ()) -> str:
    columns = {
        f"{name}_log_probs": [
            None if name == "ref" and at in lack else row[name].tolist() for at, row in enumerate(rows)
        ]
        for name in ("rollout", "train", *names)
    }
    pq.write_table(pa.table(columns | {"advantages": [row["advantage"] for row in rows]}), path)
    return str(path)


def aggregate(parts: list[list[float]], mode: str) -> float:
    """verl's agg_loss, which does not count a row without a token."""
    filled = [part for part in parts if part]
    if mode == "token-mean":
        return math.fsum(sum(part) for part in filled) / sum(map(len, filled))
    each = [math.fsum(part) / (len(part) if mode == "seq-mean-token-mean" else 1) for part in filled]
    return math.fsum(each) / len(each)


MODES = {"token-mean": "", "seq-mean-token-sum": "_seq_sum", "seq-mean-token-mean": "_seq_mean"}


def kl(policy: float, train: float, ref: float, kind: str, unbiased: bool) -> float:
    x = policy - ref
    value = {"k1": x, "k2": x * x / 2}.get(kind, math.exp(-x) - 1 + x)
    value *= math.exp(policy - train) if unbiased else 1.0
    return max(-10.0, min(10.0, value)) if kind == "low_var" else value


@pytest.mark.parametrize("current", [True, False])
@pytest.mark.parametrize("lack", [(), (2,)])
def test_kl_to_the_reference_matches_formulas(tmp_path: Path, current: bool, lack: tuple[int, ...]) -> None:
    rows = rows_of()
    path = write(tmp_path / "a.parquet", rows, "ref", *(["current"] if current else []), lack=lack)
    metrics = analyze([path], findings=False).runs["a"].overall.metrics
    for kind in ("k1", "k2", "k3", "low_var"):
        for unbiased in (False, True):
            parts = [
                [
                    kl(*token, kind, unbiased)
                    for token in zip(row["current" if current else "train"], row["train"], row["ref"], strict=True)
                ]
                for at, row in enumerate(rows)
                if at not in lack
            ]
            for mode, suffix in MODES.items():
                found = metrics[f"ref_{kind}{'_unbiased' * unbiased}{suffix}"]
                assert found.value == pytest.approx(aggregate(parts, mode), rel=1e-9), (kind, unbiased, mode)
                assert found.se is not None
                assert found.se > 0


CORRECTIONS = (
    Correction(name="plain"),
    Correction(
        name="gated", weight=Weight(level="token", clip=(0.9, 1.1)), gates=(Gate(level="max", keep=(None, 1.1)),)
    ),
    Correction(name="zeroed", gates=(Gate(level="token", keep=(0.95, 1.05), effect="zero"),)),
    Correction(name="normalized", weight=Weight(level="sequence", truncate=1.05, normalize="token")),
)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: correction.name)
def test_losses_match_formulas_for_each_aggregation(tmp_path: Path, correction: Correction) -> None:
    rows = rows_of()
    path = write(tmp_path / "a.parquet", rows, "current")
    found = analyze([path], [correction], findings=False).runs["a"].overall.corrections[correction.name]
    ratios = [np.exp(row["train"] - row["rollout"]) for row in rows]
    weights, kept, counted = [], [], []
    for ratio in ratios:
        own, n = np.ones(len(ratio)), len(ratio)
        keep = np.ones(n, bool)
        if correction.name == "gated":
            own = np.clip(ratio, 0.9, 1.1)
            keep = np.full(n, n == 0 or ratio.max() <= 1.1)
        if correction.name == "zeroed":
            keep = (ratio >= 0.95) & (ratio <= 1.05)
        if correction.name == "normalized":
            own = np.full(n, min(np.prod(ratio), 1.05))
        weights.append(own)
        kept.append(keep)
        counted.append(np.ones(n, bool) if correction.name == "zeroed" else keep)
    if correction.name == "normalized":
        mean = np.concatenate(weights).mean()
        weights = [own / mean for own in weights]
    parts = []
    for row, own, keep, count in zip(rows, weights, kept, counted, strict=True):
        ratio, advantage = np.exp(row["current"] - row["train"]), row["advantage"]
        losses = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 0.8, 1.2)) * own * keep
        parts.append(losses[count].tolist())
    for mode, key in zip(MODES, ("loss", "loss_seq_sum", "loss_seq_mean"), strict=True):
        assert found[key].value == pytest.approx(aggregate(parts, mode), rel=1e-9), mode


def invoke(*arguments: str, code: int = 0) -> str:
    return run(*arguments, code=code).output


def test_gate_rules_judge_kl_and_routing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", rows_of(), "current", "ref")
    for rule in ("ref_low_var_unbiased_seq_mean:max=100", "loss_seq_mean:correction=token_tis,max=100"):
        invoke("gate", path, "--rule", rule)


def routed(path: Path, layers: int = 3, width: int = 2) -> tuple[str, float, float]:
    """Write the experts of both sides, and count different routing with sets."""
    rows, tokens, differ, k3 = rows_of(), 0, 0, [0.0, 0.0]
    columns: dict[str, list[Any]] = {"rollout_experts": [], "train_experts": []}
    for row in rows:
        n = len(row["rollout"])
        a = (
            np.stack([[RNG.permutation(8)[:width] for _ in range(layers)] for _ in range(n)])
            if n
            else np.zeros((0, 3, 2))
        )
        b = a.copy()
        for token in range(n):
            if RNG.random() < 0.3:
                b[token, 1] = (b[token, 1] + 1) % 8
            elif RNG.random() < 0.3:
                b[token, 2] = b[token, 2][::-1]  # the same set in another order
            x = float(row["train"][token] - row["rollout"][token])
            own = math.expm1(x) - x
            k3[1] += own
            tokens += 1
            if any(set(p) != set(q) for p, q in zip(a[token], b[token], strict=True)):
                differ += 1
                k3[0] += own
        for name, side in (("rollout_experts", a), ("train_experts", b)):
            columns[name].append([token.ravel().astype(int).tolist() for token in side])
    logs = {f"{name}_log_probs": [row[name].tolist() for row in rows] for name in ("rollout", "train")}
    table = pa.table(logs | {name: pa.array(own, pa.list_(pa.list_(pa.int16()))) for name, own in columns.items()})
    pq.write_table(table, path)
    return str(path), differ / tokens, k3[0] / k3[1]


def test_different_routing_is_counted(tmp_path: Path) -> None:
    path, share, of_k3 = routed(tmp_path / "a.parquet")
    metrics = analyze([path], findings=False).runs["a"].overall.metrics
    assert metrics["routing_differs"].value == pytest.approx(share, rel=1e-12)
    assert metrics["routing_k3_share"].value == pytest.approx(of_k3, rel=1e-9)
    assert metrics["routing_differs"].se is not None
    text = invoke("analyze", "-v", path)
    assert "tokens with other experts" in text


def test_routing_with_a_fully_masked_file_is_counted(tmp_path: Path) -> None:
    path, share, _ = routed(tmp_path / "a.parquet")
    masked = pq.read_table(path).slice(0, 1)
    mask = pa.array([[0] * len(masked["train_log_probs"][0])])
    pq.write_table(masked.append_column("response_mask", mask), tmp_path / "b.parquet")
    metrics = analyze([str(tmp_path)], findings=False).runs[tmp_path.name].overall.metrics
    assert metrics["routing_differs"].value == pytest.approx(share, rel=1e-12)


def test_replayed_routing_passes_its_rule(tmp_path: Path) -> None:
    path, _, _ = routed(tmp_path / "a.parquet")
    text = json.loads(invoke("gate", path, "--rule", "routing_differs:max=0", "--json", code=3))
    assert text["checks"][0]["outcome"] == "failed"
    table = pq.read_table(path)
    same = table.set_column(table.schema.get_field_index("train_experts"), "train_experts", table["rollout_experts"])
    pq.write_table(same, tmp_path / "b.parquet")
    invoke("gate", str(tmp_path / "b.parquet"), "--rule", "routing_differs:max=0")


def test_a_device_gives_equal_kl_and_routing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mismatchctl.measure.kernels.device_kernel import DeviceKernel

    rows = rows_of()
    path = write(tmp_path / "a.parquet", rows, "current", "ref", lack=(2,))
    other = routed(tmp_path / "b.parquet")[0]
    found = []
    for kernel in (choose_kernel(1, "cpu"), DeviceKernel(("cpu",))):
        monkeypatch.setattr("mismatchctl.api.analyze.analyze.choose_kernel", lambda *_, kernel=kernel: kernel)
        runs = analyze([path, other], [find_preset("token_tis")], findings=False).runs
        found.append({(name, key): own.value for name, run in runs.items() for key, own in run.overall.metrics.items()})
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert (found[1][key] == value) or found[1][key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_definitions_state_where_the_low_var_bound_applies() -> None:
    known = {metric.key: metric.definition for metric in KL_METRICS}
    assert known["ref_low_var_unbiased"].startswith("mean over all valid tokens of w * (exp(-x) - 1 + x), clipped to")
    assert known["ref_low_var"].startswith("mean over all valid tokens of exp(-x) - 1 + x, clipped to")
