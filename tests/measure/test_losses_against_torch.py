"""The loss and the gradient that `analyze` reports per correction, against torch's automatic differentiation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.recorder.recorder import Recorder

LENGTHS = (5, 9, 1, 7)
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
        return [torch.tensor(rng.normal(0, scale, n)) for n in LENGTHS]

    rollout = [-torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) - 1 for n in LENGTHS]
    train = [a + b for a, b in zip(rollout, noise(0.08), strict=True)]
    current = [a + b for a, b in zip(train, noise(0.25), strict=True)]
    return {"rollout": rollout, "train": train, "current": current, "advantages": noise(1.0)}


def torch_loss(name: str, data: dict[str, Sequences], current: Sequences) -> torch.Tensor:
    """The loss of a correction, spelled out sequence by sequence."""
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


def test_without_current_log_probs_there_is_no_loss(data: dict[str, Sequences], tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        recorder.write(
            step=0, **{f"{name}_log_probs": [values.numpy() for values in data[name]] for name in ("rollout", "train")}
        )
    found = analyze([str(tmp_path / "run")], [CORRECTIONS["none"]]).runs["run"].overall.corrections["none"]
    assert "loss" not in found
