"""Importance weights and estimators of the mismatch on arrays and tensors in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar, overload

from mismatchctl.api.inputs import CorrectionLike, TorchTensor, Values, check_choice, public_function, single_correction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatT = TypeVar("FloatT", bound=np.floating)
    TensorT = TypeVar("TensorT", bound=TorchTensor)


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
    rollout: TensorT,
    train: TensorT,
    mask: TensorT | None = ...,
    correction: CorrectionLike = ...,
    *,
    current: TensorT | None = ...,
    advantages: Values | None = ...,
    age: Values | float | None = ...,
    micro_batches: int | Values | None = ...,
) -> tuple[TensorT, TensorT]: ...


@overload
def weights(
    rollout: Sequence[Sequence[float]],
    train: Sequence[Sequence[float]],
    mask: Sequence[Sequence[float]] | None = ...,
    correction: CorrectionLike = ...,
    *,
    current: Sequence[Sequence[float]] | None = ...,
    advantages: Values | None = ...,
    age: Values | float | None = ...,
    micro_batches: int | Values | None = ...,
) -> tuple[list[list[float]], list[list[bool]]]: ...


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
    """Return importance weights, and flags of the tokens that a correction keeps.

    A trainer multiplies the loss of each token by the weight of the token. The weights are detached from the gradient
    of the log-probs.

    >>> mm.weights([[-1.0, -2.0]], [[-1.0, -0.5]], correction="token_tis")
    ([[1.0, 2.0]], [[True, True]])

    Args:
        rollout: Log-probs of the rollout engine in nats: an array or tensor [B, T], a nested tensor, or a list of rows.
        train: Log-probs of the trainer, in the layout of `rollout`.
        mask: 1 for valid tokens and 0 for other tokens, in the layout of `rollout`. Default: all tokens are valid.
        correction: A preset, a file, a mapping or a Correction. Example: `{"weight": {"clip": [0.5, 2.0]}}`.
        current: Log-probs of the policy being updated, if the correction uses them.
        advantages: One advantage per token or per row, if the correction uses them.
        age: Number of weight updates since each row was sampled, or one number for all rows, if the correction uses
            ages.
        micro_batches: Rows per micro-batch, or one name per row, for weights that are normalized within micro-batches.
            Default: all rows are one micro-batch.

    Returns:
        Weights, and flags of the kept tokens, in the library, dtype and device of `train`. The weight of a masked token
        is 0. The flag of a masked or rejected token is false.

    Raises:
        DataError: The values are not log-probs, or differ in shape.
        ConfigError: An argument is wrong or missing.
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
    rollout: TensorT,
    train: TensorT,
    mask: TensorT | None = ...,
    correction: CorrectionLike = ...,
    *,
    current: TensorT | None = ...,
    advantages: Values | None = ...,
    age: Values | float | None = ...,
) -> TensorT: ...


@overload
def keep(
    rollout: Sequence[Sequence[float]],
    train: Sequence[Sequence[float]],
    mask: Sequence[Sequence[float]] | None = ...,
    correction: CorrectionLike = ...,
    *,
    current: Sequence[Sequence[float]] | None = ...,
    advantages: Values | None = ...,
    age: Values | float | None = ...,
) -> list[list[bool]]: ...


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
    """Return flags of the tokens that a correction keeps.

    >>> mm.keep([[-1.0, -2.0]], [[-1.0, -0.5]], correction={"gates": [{"keep": [0.5, 2.0]}]})
    [[True, False]]

    Args:
        rollout: Log-probs of the rollout engine in nats: an array or tensor [B, T], a nested tensor, or a list of rows.
        train: Log-probs of the trainer, in the layout of `rollout`.
        mask: 1 for valid tokens and 0 for other tokens, in the layout of `rollout`. Default: all tokens are valid.
        correction: A preset, a file, a mapping or a Correction. Example: `{"gates": [{"keep": [0.5, 2.0]}]}`.
        current: Log-probs of the policy being updated, if the correction uses them.
        advantages: One advantage per token or per row, if the correction uses them.
        age: Number of weight updates since each row was sampled, or one number for all rows, if the correction uses
            ages.

    Returns:
        Flags in the library and on the device of `train`. Masked and rejected tokens are false.

    Raises:
        DataError: The values are not log-probs, or differ in shape.
        ConfigError: An argument is wrong or missing.
    """
    from mismatchctl.corrections.tensors import TensorBatch

    chosen = single_correction(correction)
    tokens = TensorBatch.from_values(rollout, train, mask, current, advantages, age)
    flags: Values = tokens.restore(tokens.apply(chosen).kept.expand())
    return flags


@public_function
def k1(rollout: Values, train: Values, mask: Values | None = None) -> float:
    """Return the mean of rollout minus train log-prob over the valid tokens, in nats.

    >>> round(mm.k1([[-1.0, -2.0]], [[-1.1, -2.0]]), 2)
    0.05

    Args:
        rollout: Log-probs of the rollout engine in nats: an array or tensor [B, T], a nested tensor, or a list of rows.
        train: Log-probs of the trainer, in the layout of `rollout`.
        mask: 1 for valid tokens and 0 for other tokens, in the layout of `rollout`. Default: all tokens are valid.

    Returns:
        A number, or NaN if no token is valid.

    Raises:
        DataError: The values are not log-probs, or differ in shape.
        ConfigError: An argument is wrong.
    """
    from mismatchctl.corrections.tensors import TensorBatch

    return _mean_or_nan(-TensorBatch.from_values(rollout, train, mask).ratios.log_ratio)


@public_function
def k2(rollout: Values, train: Values, mask: Values | None = None) -> float:
    """Return the mean of half the squared log ratio over the valid tokens, in nats.

    The log ratio is train minus rollout log-prob.

    >>> round(mm.k2([[-1.0, -2.0]], [[-1.1, -2.0]]), 4)
    0.0025

    Args:
        rollout: Log-probs of the rollout engine in nats: an array or tensor [B, T], a nested tensor, or a list of rows.
        train: Log-probs of the trainer, in the layout of `rollout`.
        mask: 1 for valid tokens and 0 for other tokens, in the layout of `rollout`. Default: all tokens are valid.

    Returns:
        A number, or NaN if no token is valid.

    Raises:
        DataError: The values are not log-probs, or differ in shape.
        ConfigError: An argument is wrong.
    """
    from mismatchctl.corrections.tensors import TensorBatch

    return _mean_or_nan(0.5 * TensorBatch.from_values(rollout, train, mask).ratios.log_ratio ** 2)


@public_function
def k3(rollout: Values, train: Values, mask: Values | None = None) -> float:
    """Return the mean of exp(x) - 1 - x over the valid tokens in nats, where x is train minus rollout log-prob.

    >>> round(mm.k3([[-1.0, -2.0]], [[-1.1, -2.0]]), 6)
    0.002419

    Args:
        rollout: Log-probs of the rollout engine in nats: an array or tensor [B, T], a nested tensor, or a list of rows.
        train: Log-probs of the trainer, in the layout of `rollout`.
        mask: 1 for valid tokens and 0 for other tokens, in the layout of `rollout`. Default: all tokens are valid.

    Returns:
        A number, or NaN if no token is valid.

    Raises:
        DataError: The values are not log-probs, or differ in shape.
        ConfigError: An argument is wrong.
    """
    from mismatchctl.corrections.tensors import TensorBatch

    return _mean_or_nan(TensorBatch.from_values(rollout, train, mask).ratios.k3)


@public_function
def ess(
    rollout: Values, train: Values, mask: Values | None = None, level: Literal["token", "sequence"] = "token"
) -> float:
    """Return the effective sample size of the importance ratios, as a share of the number of ratios.

    An importance ratio is the trainer's probability divided by the rollout engine's probability. The effective sample
    size is 1 if all ratios are equal, and falls to 0 as few ratios dominate.

    >>> round(mm.ess([[-1.0, -2.0]], [[-1.1, -2.0]]), 4)
    0.9975

    Args:
        rollout: Log-probs of the rollout engine in nats: an array or tensor [B, T], a nested tensor, or a list of rows.
        train: Log-probs of the trainer, in the layout of `rollout`.
        mask: 1 for valid tokens and 0 for other tokens, in the layout of `rollout`. Default: all tokens are valid.
        level: `"token"` for the ratios of tokens, `"sequence"` for their products over sequences (clamped to e^-20 and
            e^20).

    Returns:
        A number, or NaN if no token is valid.

    Raises:
        DataError: The values are not log-probs, or differ in shape.
        ConfigError: An argument is wrong.
    """
    values = _importance_ratios(rollout, train, mask, level)
    return float(values.sum() ** 2 / (len(values) * (values**2).sum())) if len(values) else float("nan")


@public_function
def chi2(
    rollout: Values, train: Values, mask: Values | None = None, level: Literal["token", "sequence"] = "token"
) -> float:
    """Return the mean squared importance ratio minus 1.

    An importance ratio is the trainer's probability divided by the rollout engine's probability. The value is 0 if the
    two policies are equal. It estimates the chi-squared divergence of the trainer from the rollout engine.

    >>> round(mm.chi2([[-1.0, -2.0]], [[-1.1, -2.0]]), 5)
    -0.09063

    Args:
        rollout: Log-probs of the rollout engine in nats: an array or tensor [B, T], a nested tensor, or a list of rows.
        train: Log-probs of the trainer, in the layout of `rollout`.
        mask: 1 for valid tokens and 0 for other tokens, in the layout of `rollout`. Default: all tokens are valid.
        level: `"token"` for the ratios of tokens, `"sequence"` for their products over sequences (clamped to e^-20 and
            e^20).

    Returns:
        A number, or NaN if no token is valid.

    Raises:
        DataError: The values are not log-probs, or differ in shape.
        ConfigError: An argument is wrong.
    """
    return _mean_or_nan(_importance_ratios(rollout, train, mask, level) ** 2) - 1


def _importance_ratios(rollout: Values, train: Values, mask: Values | None, level: str) -> NDArray[np.float64]:
    import numpy as np

    from mismatchctl.corrections.tensors import TensorBatch

    ratios = TensorBatch.from_values(rollout, train, mask).ratios
    check_choice("level", level, ("token", "sequence"))
    if level == "token":
        return ratios.excess + 1
    sums = ratios.log_ratio_sum[ratios.segments.nonempty]
    return np.asarray(np.exp(np.clip(sums, -20, 20)), np.float64)


def _mean_or_nan(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")
