"""verl's configurations as Corrections: its keys, its threshold syntax, what it rejects and in which words.

Where verl accepts an interval that holds nothing (an upper bound below 1 without a lower one, a negative bound,
nan), so does this: such a gate rejects everything, as it does there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, PrivateAttr, ValidationError

from mismatchctl.correction.model import Correction, Gate, Source, Weight
from mismatchctl.correction.presets import BYPASS, MISMATCH
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.verl.keys import section
from mismatchctl.frameworks.verl.versions import VerlVersion

Loss = Literal["ppo", "ppo_bypass", "policy_gradient"]
Model = TypeVar("Model", bound=BaseModel)

RS_OPTIONS: dict[str, tuple[str, str]] = {
    f"{level}_{statistic}": (statistic, level.removeprefix("seq_"))
    for level in ("seq_max", "seq_mean", "seq_sum", "token")
    for statistic in ("k1", "k2", "k3")
    if (level, statistic) != ("seq_max", "k1")
}
"""rollout_rs of 2026: option -> (statistic, level)."""

_LEVELS = ("token", "sequence", "geometric")
_THRESHOLD_MISSING = (
    "rollout_rs_threshold must be explicitly provided when rollout_rs is enabled. "
    "Set rollout_rs_threshold to the desired threshold value."
)
_NOT_NULL = "'None' is text, which nothing takes for null: write null, in Python None without quotes"


class Unapplied(Correction):
    """A Correction of which verl logs more than its loss takes.

    So it is with `rollout_is: false`, and with PPO in bypass mode, whose ratio is taken to the rollout already.
    """

    _measured: Correction = PrivateAttr()

    @property
    def measured(self) -> Correction:
        """What the helper computes and logs."""
        return self._measured


def read(native: Mapping[str, Any], version: VerlVersion) -> Correction:
    """A configuration of verl as a Correction.

    Args:
        native: the keys themselves, or a full configuration that holds them.
        version: whose keys they are.

    Raises:
        ConfigError: what verl rejects, in its words; a key that nothing reads.
    """
    settings = dict(version.keys) | section(native, version)
    try:
        return {"flat": _flat, "ratio": _ratio, "estimator": _estimator}[version.dialect](settings, version)
    except (ValueError, TypeError) as error:
        hint = f" ({_NOT_NULL})" if "None" in settings.values() else ""
        raise ConfigError(f"{error}{hint}") from None
    except ZeroDivisionError:
        raise ConfigError("float division by zero") from None


def _unapplied(measured: Correction, **left: Any) -> Unapplied:
    """A Correction of which the loss takes what is `left` only."""
    kept = {"name": measured.name, "about": measured.about, "gates": measured.gates, "loss": measured.loss}
    found = _made(Unapplied, **(kept | left))
    found._measured = measured
    return found


def _flat(settings: Mapping[str, Any], version: VerlVersion) -> Correction:
    """2025-10: one ratio with two thresholds that bounds the weights or rejects.

    Before #3915 what is rejected gets weight 0 and stays in the denominators; then it leaves them and keeps its weight.
    """
    upper = _number(settings, "rollout_is_threshold")
    name = f"verl-{version.name}"
    if upper is None:
        return Correction(name=name, about="rollout_is_threshold is null: verl computes nothing.")
    level, mode = settings["rollout_is_level"], settings["rollout_is_mode"]
    if level not in _LEVELS:
        raise ValueError(f"Invalid rollout_is_level: {level}. Must be 'token', 'sequence', or 'geometric'.")
    if mode not in ("truncate", "mask"):
        raise ValueError(f"Invalid rollout_is_mode: {mode}. Must be 'truncate' or 'mask'.")
    given = _number(settings, "rollout_is_threshold_lower")
    lower = 1.0 / upper if given is None else given
    gates = () if mode == "truncate" else (_made(Gate, level=level, keep=(lower, upper), effect=version.effect),)
    weight = (
        _made(Weight, level=level, truncate=upper, watch_low=given)
        if mode == "truncate"
        else _made(Weight, level=level)
    )
    veto = _number(settings, "rollout_is_veto_threshold")
    if veto is not None and veto > 0:  # the logarithm of others is -inf or nan: it never vetoes
        gates = (*gates, _veto(veto, MISMATCH, version))
    found = _made(Correction, name=name, weight=weight, gates=gates)
    if settings["rollout_is"]:
        return found
    about = "rollout_is is false: weights are logged but not applied."
    return _unapplied(found, about=about, **({"gates": ()} if version.zeroes_rejected else {}))


def _ratio(settings: Mapping[str, Any], version: VerlVersion) -> Correction:
    """2025-11: truncated weights, rejection by the ratio at its own level, veto."""
    loss: Loss = "ppo"
    if settings[version.bypass_key]:
        loss = "policy_gradient" if settings[version.pure_key] else "ppo_bypass"
    source = MISMATCH if loss == "ppo" else BYPASS
    weight, gates = None, []
    level, threshold = settings["rollout_is"], _number(settings, "rollout_is_threshold")
    if level is not None and threshold is not None:
        _one_of("rollout_is", level, "sequence", "token")
        _positive("rollout_is_threshold", settings)
        weight = _made(Weight, level=level, truncate=threshold, source=source, normalize=_normalize(settings, level))
    if settings["rollout_rs"] is not None:
        upper = _number(settings, "rollout_rs_threshold")
        if upper is None:
            raise ValueError(_THRESHOLD_MISSING)
        _one_of("rollout_rs", settings["rollout_rs"], "sequence", "geometric", "token")
        lower = _number(settings, "rollout_rs_threshold_lower")
        keep = (1.0 / upper if lower is None else lower, upper)
        gates.append(_made(Gate, level=settings["rollout_rs"], keep=keep, source=source))
    veto = _number(settings, "rollout_token_veto_threshold")
    if veto is not None:
        _positive("rollout_token_veto_threshold", settings)
    if veto is not None and not math.isnan(veto):  # verl takes nan, and nothing is below it
        gates.append(_veto(veto, source, version))
    found = _made(Correction, name=f"verl-{version.name}", weight=weight, gates=tuple(gates), loss=loss)
    # PPO in bypass mode corrects nothing: rollout is compared with itself, every weight is 1 and every token stays.
    return _unapplied(found, gates=()) if loss == "ppo_bypass" and found.sources else found


def _estimator(settings: Mapping[str, Any], version: VerlVersion) -> Correction:
    """2026: truncated or zeroed weights, any number of rejections by k1, k2, k3."""
    loss: Loss = "ppo"
    if settings["bypass_mode"]:
        losses: dict[str, Loss] = {"ppo_clip": "ppo_bypass", "reinforce": "policy_gradient"}
        if settings["loss_type"] not in losses:
            raise ValueError(f"Invalid loss_type: {settings['loss_type']}. Must be 'reinforce' or 'ppo_clip'.")
        loss = losses[settings["loss_type"]]
    source = MISMATCH if loss == "ppo" else BYPASS
    weight = None
    level = settings["rollout_is"]
    if level is not None and settings["rollout_is_threshold"] is not None:
        _one_of("rollout_is", level, "sequence", "token")
        upper, lower = _is_threshold(settings["rollout_is_threshold"])
        bound: dict[str, Any] = {"truncate": upper} if lower is None else {"zero": (lower, upper)}
        weight = _made(Weight, level=level, source=source, normalize=_normalize(settings, level), **bound)
    gates = () if settings["rollout_rs"] is None else _rejections(settings, source)
    found = _made(Correction, name=f"verl-{version.name}", weight=weight, gates=gates, loss=loss)
    # PPO's ratio to the rollout is the importance weight: it is not weighted again.
    return _unapplied(found) if loss == "ppo_bypass" and weight is not None else found


def _is_threshold(value: object) -> tuple[float, float | None]:
    """(upper, lower) from a number, "2.0", or IcePop's "lo_hi"; Python reads "1_000" as 1 to 0."""
    key = "rollout_is_threshold"
    if isinstance(value, bool):
        raise TypeError(f"{key} must be specified as a float or a string threshold specification, not a boolean.")
    if not isinstance(value, int | float | str):
        raise TypeError(f"{key} must be a float or a string threshold specification.")
    text = str(value).strip()
    if not text:
        raise ValueError(f"{key} must not be an empty string.")
    low, separator, high = text.partition("_")
    try:
        upper, lower = (float(high), float(low)) if separator else (float(text), None)
    except ValueError:
        raise ValueError(f"Invalid {key} '{value}'.") from None
    if upper <= 0:
        raise ValueError(f"{key} upper bound must be positive, got {upper}.")
    if lower is not None and lower <= 0:
        raise ValueError(f"{key} lower bound must be positive, got {lower}.")
    if lower is not None and lower > upper:
        raise ValueError(f"{key} lower bound must be <= upper bound.")
    return upper, lower


def _rejections(settings: Mapping[str, Any], source: Source) -> tuple[Gate, ...]:
    """Gates from a comma list of options and one threshold for each, or one for all."""
    key, value = "rollout_rs_threshold", settings["rollout_rs_threshold"]
    if value is None:
        raise ValueError(_THRESHOLD_MISSING)
    if not isinstance(settings["rollout_rs"], str):
        raise ValueError("rollout_rs must be a non-empty string (comma separated for multiple options).")
    options = list(dict.fromkeys(_items(settings["rollout_rs"])))
    if not options:
        raise ValueError("rollout_rs must contain at least one valid option.")
    for option in options:
        if option not in RS_OPTIONS:
            raise ValueError(f"Invalid rollout_rs option: {option}. Must be one of {sorted(RS_OPTIONS)}.")
    if not isinstance(value, int | float | str):
        raise TypeError(f"{key} must be a string or numeric value specifying per-option thresholds.")
    thresholds = _items(str(value))
    if not thresholds:
        raise ValueError(f"{key} must contain at least one threshold value.")
    if len(thresholds) not in (1, len(options)):
        raise ValueError(
            f"{key} expects either one threshold shared by all options or exactly "
            f"{len(options)} thresholds to match the provided rollout_rs options."
        )
    if len(thresholds) == 1:
        thresholds *= len(options)
    return tuple(_rejection(option, text, source) for option, text in zip(options, thresholds, strict=True))


def _rejection(option: str, text: str, source: Source) -> Gate:
    """One option. "lo_hi" of k1 bounds rollout/train, since k1 is rollout minus train (verl's documents reverse it)."""
    statistic, level = RS_OPTIONS[option]
    if statistic == "k1":
        low, separator, high = text.partition("_")
        if not separator:
            low, high = str(1.0 / float(text)), text
        keep = _floats(option, text, low, high)
        if keep[0] <= 0 or keep[1] <= 0:
            raise ValueError(f"Thresholds for option '{option}' must be positive, got {text}.")
        if keep[0] > keep[1]:
            raise ValueError(f"Thresholds for option '{option}' must be lower <= upper, got {text}.")
        bounds: tuple[float | None, float] = (math.log(keep[0]), math.log(keep[1]))
    else:
        if "_" in text:
            raise ValueError(
                f"rollout_rs_threshold for option '{option}' must provide a single upper bound "
                f"without '_'. Received '{text}'."
            )
        (upper,) = _floats(option, text, text)
        if upper <= 0:
            raise ValueError(f"Threshold for option '{option}' must be positive, got {text}.")
        bounds = (None, upper)
    return _made(Gate, statistic=statistic, level=level, keep=bounds, clamp="token", source=source)


def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _floats(option: str, text: str, *parts: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in parts)
    except ValueError:
        raise ValueError(f"Invalid numeric threshold '{text}' for option '{option}'.") from None


def _number(settings: Mapping[str, Any], key: str) -> float | None:
    value = settings[key]
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    hint = " (write it without quotes)" if isinstance(value, str) else ""
    raise TypeError(f"{key} must be a number, found {value!r}{hint}")


def _one_of(key: str, value: object, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"Invalid {key}: {value}. Must be one of {{{str(allowed)[1:-1]}}}.")


def _positive(key: str, settings: Mapping[str, Any]) -> None:
    if settings[key] <= 0:
        raise ValueError(f"{key} must be positive, got {settings[key]}.")


def _normalize(settings: Mapping[str, Any], level: str) -> str:
    return level if settings.get("rollout_is_batch_normalize") else "none"


def _made(kind: type[Model], **fields: Any) -> Model:
    """A rule, unvalidated where verl accepts what nobody should write: an interval that holds nothing, nan."""
    try:
        return kind(**fields)
    except ValidationError:
        return kind.model_construct(**fields)


def _veto(threshold: float, source: Source, version: VerlVersion) -> Gate:
    return _made(Gate, level="min", keep=(threshold, None), clamp="none", source=source, effect=version.effect)
