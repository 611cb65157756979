"""The loss and its gradient per token and correction, compared with formulas, finite differences and torch."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.corrections.model import LOSSES, Correction, Gate, Weight, parse_loss
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.registry import load_framework
from mismatchctl.measure.columns import compute_token_loss
from mismatchctl.measure.kernels.kernel import NUMPY_KERNEL
from mismatchctl.measure.reduction import MeasurePlan, reduce_batch
from mismatchctl.recorder.recorder import Recorder
from tests.cli.command import run
from tests.conformance.compare_peers import framework_loss
from tests.conformance.compare_peers import table as golden_table

Floats = NDArray[np.float64]
LENGTHS = (5, 3, 7, 1)


def batch(current: Floats | None = None) -> TokenBatch:
    rng = np.random.default_rng(7)
    tokens = sum(LENGTHS)
    rollout = -rng.gamma(1.0, 1.0, tokens)
    train = rollout + rng.normal(0, 0.1, tokens)
    own = train + rng.normal(0, 0.3, tokens)
    advantages = np.repeat([1.2, -0.7, 0.4, -1.1], LENGTHS)
    segments = Segments.from_lengths(LENGTHS)
    return TokenBatch(segments, rollout, train, own if current is None else current, None, advantages)


def spread(values: list[float]) -> Floats:
    return np.repeat(values, LENGTHS)


def means(x: Floats) -> Floats:
    return spread([float(part.mean()) for part in np.split(x, np.cumsum(LENGTHS)[:-1])])


def sums(x: Floats) -> Floats:
    return spread([float(part.sum()) for part in np.split(x, np.cumsum(LENGTHS)[:-1])])


def clip_loss(a: Floats, r: Floats, low: float = 0.8, high: float = 1.2) -> Floats:
    return -np.minimum(a * r, a * np.clip(r, low, high))


def dual(a: Floats, r: Floats) -> Floats:
    return np.where(a < 0, np.minimum(clip_loss(a, r), -3.0 * a), clip_loss(a, r))


def gmpo(a: Floats, u: Floats) -> Floats:
    return -a * np.exp(means(np.where(a > 0, np.minimum(u, 0.4), np.maximum(u, -0.4))))


def sapo(a: Floats, r: Floats) -> Floats:
    tau = np.where(a > 0, 1.0, 1.05)
    return -a * 4 / tau / (1 + np.exp(-tau * (r - 1)))


def vespo_factor(a: Floats, v: Floats) -> Floats:
    log_w = sums(v)
    up = np.exp(3.0 + 2.0 * log_w - 3.0 * np.exp(log_w))
    down = np.exp(2.0 + 3.0 * log_w - 2.0 * np.exp(log_w))
    return np.where(a >= 0, up, down)


FORMULAS: dict[str, Callable[[Floats, Floats, Floats, Floats, Floats, Floats], Floats]] = {
    # advantages, u (current over train), v (current over rollout), current, probabilities of current and of rollout
    "ppo": lambda a, u, v, c, p, q: clip_loss(a, np.exp(u)),
    "ppo_bypass": lambda a, u, v, c, p, q: clip_loss(a, np.exp(v)),
    "policy_gradient": lambda a, u, v, c, p, q: -a * c,
    "dual_clip": lambda a, u, v, c, p, q: dual(a, np.exp(u)),
    "two_sided": lambda a, u, v, c, p, q: -np.minimum(a * np.minimum(np.exp(u), 4.0), a * np.clip(np.exp(u), 0.8, 1.2)),
    "gspo": lambda a, u, v, c, p, q: clip_loss(a, np.exp(means(u))),
    "gspo_token": lambda a, u, v, c, p, q: clip_loss(a, np.exp(means(u))),
    "gmpo": lambda a, u, v, c, p, q: gmpo(a, u),
    "sapo": lambda a, u, v, c, p, q: sapo(a, np.exp(u)),
    "cispo": lambda a, u, v, c, p, q: -np.clip(np.exp(u), 0, 5) * a * c,
    "cispo_bypass": lambda a, u, v, c, p, q: -np.clip(np.exp(v), 0, 5) * a * c,
    "vespo": lambda a, u, v, c, p, q: -vespo_factor(a, v) * a * c,
    "topr": lambda a, u, v, c, p, q: -np.where(a < 0, np.clip(np.exp(v), 0, 1), 1.0) * a * c,
    "importance_sampling": lambda a, u, v, c, p, q: -a * np.exp(v),
    "dppo": lambda a, u, v, c, p, q: -a * np.exp(v) * np.where(a > 0, p - q <= 0.2, p - q >= -0.2),
    "ipo": lambda a, u, v, c, p, q: -a * np.exp(v) * (np.abs(p - q) <= 0.1),
    "quadratic": lambda a, u, v, c, p, q: -a * np.exp(v) + 1e-3 * v * v,
}
CONSTANT = {"cispo", "cispo_bypass", "vespo", "topr"}
"""Factors of the log-prob that have no gradient."""
OF_TOKEN = {"gspo_token"}


def value(name: str, current: Floats, held: Floats | None = None) -> Floats:
    """Return the loss of each token. `held` are the log-probs for factors without a gradient."""
    b = batch()
    assert b.advantages is not None
    at = current if held is None else held
    u, v, a = at - b.train, at - b.rollout, b.advantages
    return FORMULAS[name](a, u, v, current, np.exp(at), np.exp(b.rollout))


def test_every_loss_has_a_test_formula() -> None:
    assert set(FORMULAS) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_match_formulas(name: str) -> None:
    b = batch()
    found = compute_token_loss(name, b)
    assert found is not None and b.current is not None
    np.testing.assert_allclose(found.losses, value(name, b.current), rtol=1e-10, atol=1e-12)
    weights = np.linspace(0.5, 1.5, b.tokens)
    kept = np.arange(b.tokens) % 4 != 1
    step, numeric = 1e-6, np.zeros(b.tokens)
    for token in range(b.tokens):
        ends = []
        for sign in (1, -1):
            moved = b.current.copy()
            moved[token] += sign * step
            held = b.current if name in CONSTANT else None
            losses = value(name, moved, held)
            if name in OF_TOKEN:  # the value is the ratio of the sequence, and the gradient belongs to the token
                ratio = np.exp(means(b.current - b.train)) * np.exp(moved - b.current)
                assert b.advantages is not None
                losses = clip_loss(b.advantages, ratio)
            ends.append(float((weights * losses)[kept].sum()))
        numeric[token] = (ends[0] - ends[1]) / (2 * step)
    gradient = found.gradient(np.where(kept, weights, 0.0))
    np.testing.assert_allclose(gradient, numeric, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_a_device_computes_equal_losses(name: str) -> None:
    from mismatchctl.measure.kernels.device_kernel import DeviceKernel

    b = replace(batch(), rows=np.arange(len(LENGTHS)))
    correction = Correction(loss=name, weight=Weight(truncate=1.05), gates=(Gate(level="token", keep=(0.9, 1.1)),))
    tables = []
    for kernel in (NUMPY_KERNEL, DeviceKernel(("cpu",))):
        plan = MeasurePlan(
            (correction,), available_columns=frozenset({"current_log_probs", "advantages"}), kernel=kernel
        )
        (cell,) = reduce_batch(b, "run", plan).cells.values()
        tables.append(cell.table.sums)
    np.testing.assert_allclose(tables[1], tables[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "framework", "config"),
    [
        ("ppo", "trl", {"correct": False}),
        ("cispo", "areal", {"use_cispo_loss": True, "eps_clip": 1.0, "eps_clip_higher": 4.0}),
        ("dual_clip", "areal", {"c_clip": 3.0}),
        ("gspo", "areal", {"importance_sampling_level": "sequence"}),
    ],
)
def test_losses_match_a_framework_with_goldens(
    name: str, framework: str, config: dict[str, object], tmp_path: Path
) -> None:
    rows = golden_table("input_moe.parquet", 0)
    pl.from_arrow(rows).write_parquet(tmp_path / "moe.parquet")  # type: ignore[union-attr]
    (run,) = analyze([str(tmp_path / "moe.parquet")], [Correction()], losses=[name], findings=False).runs.values()
    own = load_framework(framework)
    expected, _ = framework_loss(own, rows, own.correction(config))
    assert run.overall.corrections["correction"]["loss"].value == pytest.approx(expected, rel=1e-9)


def test_weights_and_gates_apply_to_several_losses(tmp_path: Path) -> None:
    pl.from_arrow(golden_table("input_moe.parquet", 0)).write_parquet(tmp_path / "moe.parquet")  # type: ignore[union-attr]
    correction = Correction(name="both", weight=Weight(truncate=1.5), gates=(Gate(level="geometric", keep=(0.9, 1.1)),))
    found = analyze([str(tmp_path / "moe.parquet")], [correction], losses=["sapo", "gspo:low=0.99,high=1.01"])
    (run,) = found.runs.values()
    assert list(run.overall.corrections) == ["both [sapo]", "both [gspo:low=0.99,high=1.01]"]
    cosines = [values["gradient_cosine"].value for values in run.overall.corrections.values()]
    assert len({cosine for cosine in cosines if cosine is not None}) == 2


def test_weights_of_the_ratio_of_the_loss_are_applied_once() -> None:
    weight = Weight(source="current/rollout")
    assert not Correction(weight=weight, loss="dppo").weights_loss
    assert Correction(weight=Weight(), loss="dppo").weights_loss
    assert Correction(weight=weight, loss="gspo").weights_loss
    assert not Correction(weight=Weight(), loss="vespo").weights_loss


def test_loss_parameters_are_parsed() -> None:
    assert parse_loss("dual_clip:dual=2.5") == ("dual_clip", {"low": 0.8, "high": 1.2, "dual": 2.5})
    for text, message in (
        ("gspoo", "did you mean 'gspo'"),
        ("gspo:eps=1", "unknown parameter 'eps'"),
        ("gspo:low=x", "is not a number"),
        ("gspo:low=nan", "not a finite number"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_loss(text)
        with pytest.raises(ConfigError, match=message):
            analyze([], [Correction()], losses=[text])


def test_analyze_reports_losses(tmp_path: Path) -> None:
    rows = pl.from_arrow(golden_table("input_moe.parquet", 0))
    assert isinstance(rows, pl.DataFrame)
    rows.write_parquet(tmp_path / "moe.parquet")
    done = run("analyze", tmp_path / "moe.parquet", "-c", "none", "--loss", "gspo", "--json", code=0)
    assert json.loads(done.stdout)["corrections"][0]["loss"] == "gspo"
    rows.drop("advantages").write_parquet(tmp_path / "bare.parquet")
    done = run("analyze", tmp_path / "bare.parquet", "--loss", "gspo")
    assert done.exit_code == 4 and "advantages" in done.stderr and "the loss gspo needs this column" in done.stderr
    run("analyze", tmp_path / "moe.parquet", "--loss", "x", code=2)
    with pytest.raises(DataError):
        analyze([str(tmp_path / "bare.parquet")], [Correction()], losses=["ppo"])


TORCH_LENGTHS = (5, 9, 1, 7)


CORRECTIONS = {
    "none": Correction(name="none"),
    "truncate": Correction(name="truncate", weight=Weight(truncate=1.1)),
    "normalized": Correction(name="normalized", weight=Weight(clip=(0.8, 1.2), normalize="token")),
    "mask": Correction(name="mask", gates=(Gate(level="geometric", keep=(0.95, 1.05)),)),
    "zero": Correction(name="zero", gates=(Gate(level="token", keep=(0.9, 1.1), effect="zero"),)),
    "bypass": Correction(name="bypass", loss="ppo_bypass"),
    "bypass_weighted": Correction(
        name="bypass_weighted",
        weight=Weight(truncate=1.1, source="current/rollout", normalize="token"),
        loss="ppo_bypass",
    ),
    "reinforce": Correction(
        name="reinforce",
        weight=Weight(level="sequence", truncate=2.0, source="current/rollout"),
        loss="policy_gradient",
    ),
}


Sequences = list[torch.Tensor]


@pytest.fixture(scope="module")
def data() -> dict[str, Sequences]:
    rng = np.random.default_rng(3)

    def noise(scale: float) -> Sequences:
        return [torch.tensor(rng.normal(0, scale, n)) for n in TORCH_LENGTHS]

    rollout = [
        -torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) - 1 for n in TORCH_LENGTHS
    ]
    train = [a + b for a, b in zip(rollout, noise(0.08), strict=True)]
    current = [a + b for a, b in zip(train, noise(0.25), strict=True)]
    return {"rollout": rollout, "train": train, "current": current, "advantages": noise(1.0)}


def torch_loss(name: str, data: dict[str, Sequences], current: Sequences) -> torch.Tensor:
    rule = CORRECTIONS[name]
    kept, counted, weights = [], 0, []
    for rollout, train, now in zip(data["rollout"], data["train"], data["current"], strict=True):
        x, n = train - rollout, len(rollout)
        keep = torch.ones(n, dtype=torch.float64)
        if name == "mask":
            keep *= float(0.95 <= x.mean().exp() <= 1.05)
        if name == "zero":
            keep = ((x.exp() >= 0.9) & (x.exp() <= 1.1)).double()
        ones = torch.ones(n, dtype=torch.float64)
        w = {"truncate": x.exp().clamp(max=1.1), "normalized": x.exp().clamp(0.8, 1.2)}.get(name, ones)
        if name == "reinforce":
            w = (now - rollout).sum().exp().clamp(max=2.0) * ones
        kept.append(keep)
        weights.append(w)
        counted += int(keep.sum()) if name == "mask" else n
    mean = torch.cat(weights).mean() if name == "normalized" else 1.0
    total = torch.zeros((), dtype=torch.float64)
    for i, advantage in enumerate(data["advantages"]):
        if rule.loss == "policy_gradient":
            loss = -advantage * current[i]
        else:
            ratio = (current[i] - data["rollout" if rule.loss == "ppo_bypass" else "train"][i]).exp()
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        total = total + (kept[i] * weights[i] / mean * loss).sum()
    return total / counted


def gradient(name: str, data: dict[str, Sequences]) -> tuple[float, torch.Tensor]:
    current = [values.clone().requires_grad_() for values in data["current"]]
    loss = torch_loss(name, data, current)
    return float(loss.detach()), torch.cat(torch.autograd.grad(loss, current))


def test_loss_and_gradient_agree_with_torch(data: dict[str, Sequences], tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        recorder.write(
            step=0,
            **{
                f"{name}_log_probs": [values.numpy() for values in data[name]]
                for name in ("rollout", "train", "current")
            },
            advantages=[values.numpy() for values in data["advantages"]],
        )
    found = analyze([str(tmp_path / "run")], list(CORRECTIONS.values())).runs["run"].overall.corrections
    plain, plain_gradient = gradient("none", data)
    for name in CORRECTIONS:
        loss, slope = gradient(name, data)
        values = {key: value.value for key, value in found[name].items()}
        assert values["loss"] == pytest.approx(loss, rel=1e-12), name
        assert values["loss_change"] == pytest.approx(loss - plain, rel=1e-10, abs=1e-15), name
        cosine = torch.nn.functional.cosine_similarity(slope, plain_gradient, dim=0)
        assert values["gradient_cosine"] == pytest.approx(float(cosine), rel=1e-12), name
        assert values["gradient_norm"] == pytest.approx(float(slope.norm() / plain_gradient.norm()), rel=1e-12), name
    assert 0 < found["none"]["loss_clip_fraction"].value < 1


def test_losses_need_current_log_probs(data: dict[str, Sequences], tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        recorder.write(
            step=0, **{f"{name}_log_probs": [values.numpy() for values in data[name]] for name in ("rollout", "train")}
        )
    found = analyze([str(tmp_path / "run")], [CORRECTIONS["none"]]).runs["run"].overall.corrections["none"]
    assert "loss" not in found
