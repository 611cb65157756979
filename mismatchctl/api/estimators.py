"""Functions for arrays and tensors in memory: importance weights, and estimators of the mismatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar, overload

from mismatchctl.api.inputs import CorrectionLike, Values, check_choice, public_function, single_correction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mismatchctl.core.ratios import Ratios

    FloatT = TypeVar("FloatT", bound=np.floating)
    ValuesT = TypeVar("ValuesT", bound=Values)


@overload
def weights(
    rollout: NDArray[np.generic],
    train: NDArray[FloatT],
    mask: NDArray[np.generic] | None = ...,
    correction: CorrectionLike = ...,
    *,
    current: NDArray[np.generic] | None = ...,
    advantages: Values | None = ...,
    age: Values | float | None = ...,
    micro_batches: int | Values | None = ...,
) -> tuple[NDArray[FloatT], NDArray[np.bool_]]: ...


@overload
def weights(
    rollout: Values,
    train: ValuesT,
    mask: Values | None = ...,
    correction: CorrectionLike = ...,
    *,
    current: Values | None = ...,
    advantages: Values | None = ...,
    age: Values | float | None = ...,
    micro_batches: int | Values | None = ...,
) -> tuple[ValuesT, ValuesT]: ...


@public_function
def weights(
    rollout: Values,
    train: Values,
    mask: Values | None = None,
    correction: CorrectionLike = "token_tis",
    *,
    current: Values | None = None,
    advantages: Values | None = None,
    age: Values | float | None = None,
    micro_batches: int | Values | None = None,
) -> tuple[Values, Values]:
    """Return the importance weight of each token, and a flag that is true if the correction keeps the token.

    A trainer multiplies the loss of each token by its weight and by its flag. No gradient flows through the weights. In
    this example, the ratios are 1 and 4.48, and `token_tis` truncates them at 2:

    >>> mm.weights([[-1.0, -2.0]], [[-1.0, -0.5]], correction="token_tis")
    ([[1.0, 2.0]], [[True, True]])

    Args:
        rollout: Rollout log-probs in nats: an array or tensor [sequences, tokens], a nested tensor, or a list of rows.
        train: Log-probs of the trainer, in the layout of `rollout`.
        mask: 1 for valid tokens and 0 for other tokens, in the layout of `rollout`. Default: all tokens are valid.
        correction: A preset, a file, a mapping or a Correction. Example: `{"weight": {"clip": [0.5, 2.0]}}`.
        current: Log-probs of the policy being updated, if the correction uses them.
        advantages: One advantage per token or per row, if the correction uses them.
        age: Number of weight updates since each row was sampled, or one number for all rows, if the correction uses
            ages.
        micro_batches: The number of rows in each micro-batch, not the number of micro-batches: with 8, the first 8 rows
            are one micro-batch. Or one name per row: rows with the same name are one micro-batch. This only changes
            weights that are normalized within micro-batches. Default: all rows are one micro-batch.

    Returns:
        Weights and flags, in the same library and on the same device as `train`. Weights also have its dtype. Masked
        and rejected tokens have the flag false. Masked tokens have the weight 0, but rejected tokens may not.
    """
    from mismatchctl.corrections.tensors import TensorBatch, list_micro_batches, normalize_weights

    chosen = single_correction(correction)
    tokens = TensorBatch.from_values(rollout, train, mask, current, advantages, age)
    applied = tokens.apply(chosen)
    groups = list_micro_batches(micro_batches if chosen.normalizes_micro_batches else None, len(tokens.batch))
    made = normalize_weights(chosen, applied, groups)
    return tokens.restore(made), tokens.restore(applied.kept.expand())


@overload
def keep(
    rollout: NDArray[np.generic],
    train: NDArray[np.generic],
    mask: NDArray[np.generic] | None = ...,
    correction: CorrectionLike = ...,
    *,
    current: NDArray[np.generic] | None = ...,
    advantages: Values | None = ...,
    age: Values | float | None = ...,
) -> NDArray[np.bool_]: ...


@overload
def keep(
    rollout: Values,
    train: ValuesT,
    mask: Values | None = ...,
    correction: CorrectionLike = ...,
    *,
    current: Values | None = ...,
    advantages: Values | None = ...,
    age: Values | float | None = ...,
) -> ValuesT: ...


@public_function
def keep(
    rollout: Values,
    train: Values,
    mask: Values | None = None,
    correction: CorrectionLike = "seq_mis",
    *,
    current: Values | None = None,
    advantages: Values | None = None,
    age: Values | float | None = None,
) -> Values:
    """Return a flag for each token, which is true if a correction keeps the token.

    In this example, the ratios are 1 and 4.48, and the correction keeps ratios from 0.5 to 2:

    >>> mm.keep([[-1.0, -2.0]], [[-1.0, -0.5]], correction={"gates": [{"keep": [0.5, 2.0]}]})
    [[True, False]]

    Args:
        rollout, train, mask: Log-probs in nats and the mask of valid tokens, as in `mm.weights`.
        correction: A preset, a file, a mapping or a Correction. Example: `{"gates": [{"keep": [0.5, 2.0]}]}`.
        current, advantages, age: Values that some corrections need, as in `mm.weights`.

    Returns:
        Flags in the same library and on the same device as `train`. Masked and rejected tokens are false.
    """
    from mismatchctl.corrections.tensors import TensorBatch

    chosen = single_correction(correction)
    tokens = TensorBatch.from_values(rollout, train, mask, current, advantages, age)
    flags: Values = tokens.restore(tokens.apply(chosen).kept.expand())
    return flags


def _ratios(rollout: Values, train: Values, mask: Values | None) -> Ratios:
    from mismatchctl.corrections.tensors import TensorBatch

    return TensorBatch.from_values(rollout, train, mask).ratios


@public_function
def k1(rollout: Values, train: Values, mask: Values | None = None) -> float:
    """Return the mean over valid tokens of rollout minus train log-prob, in nats. If no token is valid, return NaN.

    >>> round(mm.k1([[-1.0, -2.0]], [[-1.1, -2.0]]), 2)
    0.05

    Args:
        rollout, train, mask: Log-probs in nats and the mask of valid tokens, as in `mm.weights`.
    """
    return _mean_or_nan(-_ratios(rollout, train, mask).log_ratio)


@public_function
def k2(rollout: Values, train: Values, mask: Values | None = None) -> float:
    """Return the mean over valid tokens of half the squared log ratio (train minus rollout log-prob).

    >>> round(mm.k2([[-1.0, -2.0]], [[-1.1, -2.0]]), 4)
    0.0025

    Args:
        rollout, train, mask: Log-probs in nats and the mask of valid tokens, as in `mm.weights`.
    """
    return _mean_or_nan(0.5 * _ratios(rollout, train, mask).log_ratio ** 2)


@public_function
def k3(rollout: Values, train: Values, mask: Values | None = None) -> float:
    """Return the mean over valid tokens of exp(x) - 1 - x, where x is train minus rollout log-prob in nats.

    >>> round(mm.k3([[-1.0, -2.0]], [[-1.1, -2.0]]), 6)
    0.002419

    Args:
        rollout, train, mask: Log-probs in nats and the mask of valid tokens, as in `mm.weights`.
    """
    return _mean_or_nan(_ratios(rollout, train, mask).k3)


@public_function
def ess(
    rollout: Values, train: Values, mask: Values | None = None, level: Literal["token", "sequence"] = "token"
) -> float:
    """Return the effective sample size of the importance ratios, as a share of the number of ratios.

    An importance ratio is the trainer's probability divided by the rollout engine's probability. The effective sample
    size is 1 if all ratios are equal. It is near 0 if a few ratios are much larger than all others.

    >>> round(mm.ess([[-1.0, -2.0]], [[-1.1, -2.0]]), 4)
    0.9975

    Args:
        rollout, train, mask: Log-probs in nats and the mask of valid tokens, as in `mm.weights`.
        level: `"token"` uses one ratio per token. `"sequence"` uses one ratio per sequence: the product of the ratios
            of its tokens, limited to the range from e^-20 to e^20.
    """
    values = _importance_ratios(rollout, train, mask, level)
    return float(values.sum() ** 2 / (len(values) * (values**2).sum())) if len(values) else float("nan")


@public_function
def chi2(
    rollout: Values, train: Values, mask: Values | None = None, level: Literal["token", "sequence"] = "token"
) -> float:
    """Return the mean of the squared importance ratios, minus 1.

    The value estimates the chi-squared divergence of the trainer from the rollout engine. If rollout and train
    log-probs are equal, the value is 0.

    >>> round(mm.chi2([[-1.0, -2.0]], [[-1.1, -2.0]]), 5)
    -0.09063

    Args:
        rollout, train, mask: Log-probs in nats and the mask of valid tokens, as in `mm.weights`.
        level: As in `mm.ess`.
    """
    return _mean_or_nan(_importance_ratios(rollout, train, mask, level) ** 2) - 1


def _importance_ratios(rollout: Values, train: Values, mask: Values | None, level: str) -> NDArray[np.float64]:
    import numpy as np

    ratios = _ratios(rollout, train, mask)
    check_choice("level", level, ("token", "sequence"))
    if level == "token":
        return ratios.excess + 1
    sums = ratios.log_ratio_sum[ratios.segments.nonempty]
    return np.asarray(np.exp(np.clip(sums, -20, 20)), np.float64)


def _mean_or_nan(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")
