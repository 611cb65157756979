"""Losses compared with torch: values and decisions per token, and sums over sequences."""

import numpy as np
import pytest
import torch

from mismatchctl.core.batch import Segments
from mismatchctl.core.losses import cispo_loss, factor_loss, kl_estimate, low_variance_kl, off_policy_mask, ppo_loss

LENGTHS = [4, 1, 0, 7, 12]
SEGMENTS = Segments.from_lengths(LENGTHS)
TOKENS = sum(LENGTHS)
RNG = np.random.default_rng(8)
CURRENT, ANCHOR = (-RNG.exponential(1.0, TOKENS) for _ in range(2))
ADVANTAGES = RNG.normal(0, 1, TOKENS)


def t(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("dual", [None, 1.5])
def test_ppo_loss_matches_torch_autograd(dual: float | None) -> None:
    found = ppo_loss(ADVANTAGES, CURRENT - ANCHOR, 0.9, 1.3, dual=dual)
    current = t(CURRENT).requires_grad_()
    ratio = (current - t(ANCHOR)).exp()
    plain, clipped = -t(ADVANTAGES) * ratio, -t(ADVANTAGES) * ratio.clamp(0.9, 1.3)
    loss = torch.maximum(plain, clipped)
    if dual is not None:
        loss = torch.where(t(ADVANTAGES) < 0, torch.minimum(loss, -t(ADVANTAGES) * dual), loss)
    (slope,) = torch.autograd.grad(loss.sum(), current)
    np.testing.assert_allclose(found.losses, loss.detach().numpy(), rtol=1e-12)
    # The gradient is 0 exactly where a clip decides.
    np.testing.assert_allclose(found.slope, slope.numpy(), rtol=1e-12)
    assert found.clipped is not None
    lower = np.zeros(TOKENS, np.bool_) if found.clipped_lower is None else found.clipped_lower
    np.testing.assert_array_equal(found.clipped | lower, slope.numpy() == 0)
    assert found.clipped.any()
    assert lower.any() == (dual is not None)


@pytest.mark.parametrize("cap", [0.95, 1.1, 1.3, 2.0])
def test_a_ratio_cap_stops_the_gradient_where_it_applies(cap: float) -> None:
    """This includes ratios within the bounds but above the cap."""
    found = ppo_loss(ADVANTAGES, CURRENT - ANCHOR, 0.9, 1.3, cap=cap)
    current = t(CURRENT).requires_grad_()
    ratio = (current - t(ANCHOR)).exp()
    loss = torch.maximum(-t(ADVANTAGES) * ratio.clamp(max=cap), -t(ADVANTAGES) * ratio.clamp(0.9, 1.3))
    (slope,) = torch.autograd.grad(loss.sum(), current)
    np.testing.assert_allclose(found.losses, loss.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(found.slope, slope.numpy(), rtol=1e-12)
    np.testing.assert_array_equal(found.clipped, slope.numpy() == 0)


def test_cispo_weights_reinforce_with_the_clipped_ratio() -> None:
    found = cispo_loss(ADVANTAGES, CURRENT - ANCHOR, CURRENT, 0.9, 1.3)
    current = t(CURRENT).requires_grad_()
    weight = (current - t(ANCHOR)).exp().clamp(0.9, 1.3).detach()
    loss = -weight * t(ADVANTAGES) * current
    (slope,) = torch.autograd.grad(loss.sum(), current)
    np.testing.assert_allclose(found.losses, loss.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(found.slope, slope.numpy(), rtol=1e-12)
    np.testing.assert_array_equal(found.clipped, weight.numpy() != np.exp(CURRENT - ANCHOR))


def test_the_unbiased_kl_estimates_value_and_gradient() -> None:
    """The mean over samples of another policy is KL(current, reference), for value and gradient."""
    generator = torch.Generator().manual_seed(3)
    sampler, reference, current = (
        torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0) for _ in "abc"
    )
    current.requires_grad_()
    log_ratio, importance = current - reference, (current - sampler).exp()
    values = low_variance_kl(log_ratio.detach().numpy(), importance.detach().numpy())
    by_torch = importance * ((-log_ratio).exp() - 1 + log_ratio)
    np.testing.assert_allclose(values, by_torch.detach().numpy(), rtol=1e-12)
    expectation = (sampler.exp() * by_torch).sum()
    kl = torch.nn.functional.kl_div(reference, current, log_target=True, reduction="sum")
    assert float(expectation.detach()) == pytest.approx(float(kl.detach()))
    slopes = [torch.autograd.grad(value, current, retain_graph=True)[0] for value in (expectation, kl)]
    # A softmax does not depend on a shift of all logits.
    probabilities = current.detach().exp()
    project = [slope - probabilities * slope.sum() for slope in slopes]
    np.testing.assert_allclose(project[0].numpy(), project[1].numpy(), atol=1e-12)


def test_low_variance_kl_is_bounded_after_weighting() -> None:
    log_ratio = np.array([-4.0, 0.0, 0.5])
    assert low_variance_kl(log_ratio).tolist() == [10.0, 0.0, pytest.approx(np.exp(-0.5) - 0.5)]
    assert low_variance_kl(log_ratio, np.array([1e-3, 9.0, 1e9])).tolist() == [
        pytest.approx(1e-3 * (np.exp(4) - 5)),
        0.0,
        10.0,
    ]
    assert kl_estimate(log_ratio, "k2").tolist() == [8.0, 0.0, 0.125]


def test_opsm_masks_negative_tokens_of_drifted_sequences() -> None:
    drift = SEGMENTS.mean(ANCHOR - CURRENT)
    masked = off_policy_mask(ADVANTAGES, drift, SEGMENTS, 0.1)
    by_hand = [
        advantage < 0 and drift[sequence] > 0.1
        for advantage, sequence in zip(ADVANTAGES, np.repeat(np.arange(5), LENGTHS), strict=True)
    ]
    assert masked.tolist() == by_hand
    assert 0 < masked.sum() < TOKENS


def test_a_constant_factor_scales_reinforce() -> None:
    assert factor_loss(ADVANTAGES, CURRENT, 0.5).losses == pytest.approx(-0.5 * ADVANTAGES * CURRENT)
