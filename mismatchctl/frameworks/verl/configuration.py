"""Options of verl for rollout correction, and their conversion to and from a Correction."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, PrivateAttr, ValidationError

from mismatchctl.corrections.labels import gate_label
from mismatchctl.corrections.model import BYPASS_SOURCE, MISMATCH_SOURCE, Correction, Gate, RatioSource, Weight
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.adapter import (
    CLAMP_DIFFERENCE,
    CodeVersion,
    UnreadKey,
    find_dated_version,
    find_newest_patch,
    find_similar,
    find_value,
    fit_rules,
)
from mismatchctl.frameworks.lint import LintMessage, is_text_of_number, make_finding, read_table

Dialect = Literal["flat", "ratio", "estimator"]


@dataclass(frozen=True, kw_only=True)
class VerlVersion(CodeVersion):
    """One version of verl's rollout correction. Its name is a month, a day, or a release such as 0.7.1."""

    dialect: Dialect  # `flat`: keys in `algorithm`, not `rollout_correction`. `estimator`: gates on k1 to k3, not ratio
    keys: Mapping[str, object]  # keys of its configuration, with the defaults in verl's YAML
    prefix: str = "rollout_corr/"  # prefix of the logged names
    zeroes_rejected: bool = False  # True if rejected tokens get weight 0. `rollout_is: false` then disables rejection
    normalizes: bool = False  # True if weights can be normalized over the batch
    normalizes_empty: bool = False  # True if empty sequences count in the mean of the weights
    empty_loss_is_nan: bool = False  # True if the loss of a micro-batch without kept tokens is NaN
    icepop: bool = False  # True if a threshold "lo_hi" sets weights outside of this interval to 0
    measures_applied: bool = False  # True if metrics of weights are computed after the bound, False if before
    fractions_applied: bool = False  # True if rollout_is_seq_fraction_* use bounded weights, False if unbounded
    defaults_to_v1: bool = False  # True if the V1 trainer runs unless `trainer.use_v1` is false
    records_log_probs: bool = False  # default of `rollout.calculate_log_probs`
    note: str = ""  # relation to another version: "its losses are those of 2025-11-25"

    @property
    def effect(self) -> Literal["mask", "zero"]:
        return "zero" if self.zeroes_rejected else "mask"

    @property
    def bypass_key(self) -> str:
        return "bypass_mode" if "bypass_mode" in self.keys else "bypass_old_logprob_for_rollout"

    @property
    def pure_key(self) -> str:
        known = ("use_policy_gradient", "use_pure_rollout_correction", "loss_type")
        return next(key for key in known if key in self.keys)

    @property
    def names_loss(self) -> bool:
        """Return True for versions with the key `loss_type`. Only these apply rejection to PPO in bypass mode."""
        return "loss_type" in self.keys

    def is_pure(self, settings: Mapping[str, object]) -> bool:
        value = settings[self.pure_key]
        return value == "reinforce" if self.names_loss else bool(value)


_DATA = read_table(__file__, "versions.yaml")
VERSIONS = tuple(VerlVersion(name=name, **fields) for name, fields in _DATA["snapshots"].items())
"""All versions, oldest first."""

_BY_NAME = {version.name: version for version in VERSIONS}
RELEASES = {
    name: replace(_BY_NAME[like], name=name, words=(), **fields) for name, (like, fields) in _DATA["releases"].items()
}
"""Releases of verl on PyPI, by name."""

KEYS = frozenset(key for version in VERSIONS for key in version.keys)
"""Keys that at least one version reads."""


def find_version(word: str) -> VerlVersion:
    """Find a version by name, commit, date or release. For an unknown release, return the nearest earlier release."""
    if word.lower() in ("", "head"):
        return VERSIONS[-1]
    if not re.fullmatch(r"v?\d+\.\d+(\.\d+)?\w*", word):
        dated = sorted((*VERSIONS, *RELEASES.values()), key=lambda version: version.date)
        return find_dated_version("verl", dated, word)
    word = word.removeprefix("v")
    if patch := find_newest_patch(RELEASES, word):
        return RELEASES[patch]
    older = [name for name in RELEASES if _numbers(name) <= _numbers(word)]
    if not older:
        raise ConfigError(
            f"verl@{word}: verl before 0.6.1 does not have a rollout correction. For October 2025, use verl@2025-10."
        )
    return replace(RELEASES[older[-1]], unknown=word)


def _numbers(version: str) -> list[int]:
    """Return the three numbers of a release: 0.10 becomes [0, 10, 0]."""
    return [*map(int, re.findall(r"\d+", version)), 0, 0][:3]


BLOCK = "rollout_correction"
ACTOR_BLOCK = ("actor_rollout_ref", "actor", "policy_loss", BLOCK)
"""Path of a second `rollout_correction` block with the same keys, which verl's V1 trainer of 2026 reads."""
ACTOR_CAP = ("actor_rollout_ref", "actor", "tis_imp_ratio_cap")
"""Path of the option that bounded weights before verl had rollout corrections. Values of 0 or less disabled it."""

_FULL_CONFIG_SECTIONS = frozenset({"actor_rollout_ref", "trainer"})  # sections that only a full verl configuration has
_COMMON = frozenset({"loss_type", "bypass_mode"})  # keys of `rollout_correction` that also exist in other sections
_RLLM = {"tis_mode": "rollout_is", "tis_cap": "rollout_is_threshold"}  # rLLM's name of a key -> verl's name

_REPLACEMENTS = read_table(__file__, "options.yaml")["replacements"]  # removed key -> advice on what to write instead


def find_path(native: Mapping[str, Any], version: VerlVersion) -> tuple[str, ...]:
    alone = BLOCK in native or not KEYS.isdisjoint(native)
    full = isinstance(native.get("algorithm"), Mapping) or not (alone or _FULL_CONFIG_SECTIONS.isdisjoint(native))
    path: tuple[str, ...] = ("algorithm",) if full else ()  # a full configuration may lack all keys of `algorithm`
    outer = find_value(native, *path) or {}
    nested = version.dialect != "flat" and (BLOCK in outer or bool(path))
    return (*path, BLOCK) if nested else path


_HYDRA_KEYS = ("_target_", "_recursive_", "_convert_", "_partial_")  # Hydra's own keys, which may be in any section


def find_unread_keys(native: Mapping[str, Any], version: VerlVersion) -> Iterator[UnreadKey]:
    """Yield unknown keys of `rollout_correction`, and unread keys elsewhere that look like correction keys."""
    path = find_path(native, version)
    names = [key for key in (*version.keys, BLOCK) if key not in _COMMON]
    for depth in range(len(path) + 1):
        inside, level = depth == len(path), find_value(native, *path[:depth])
        read = version.keys if inside else path[depth : depth + 1]
        for word in map(str, level) if isinstance(level, Mapping) else ():
            if word in read or word in _HYDRA_KEYS:
                continue
            known = word in _REPLACEMENTS or (word in KEYS and word not in _COMMON)
            if BLOCK in path[:depth] or ((inside or depth == 1) and (known or find_similar(word, names))):
                yield (*path[:depth], word), _explain_key(word, version)
    cap = find_value(native, *ACTOR_CAP)
    if cap is not None and not (isinstance(cap, (int, float)) and cap <= 0):
        yield ACTOR_CAP, f": {_REPLACEMENTS[ACTOR_CAP[-1]]}"


def with_rllm(native: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the correction keys of rLLM to verl's keys (rllm/trainer/verl/utils.py)."""
    given = find_value(native, "rllm", "algorithm", BLOCK)
    for path in ((BLOCK,), ("algorithm", BLOCK)):  # rLLM's file of defaults has no section `rllm`
        block = find_value(native, *path)
        if given is None and isinstance(block, Mapping) and not _RLLM.keys().isdisjoint(block):
            given = block
            native = {key: value for key, value in native.items() if key != BLOCK}
    if not isinstance(given, Mapping):
        return dict(native)
    outer, block = find_value(native, "algorithm"), find_value(native, "algorithm", BLOCK)
    own = {key: value for key, value in (block if isinstance(block, Mapping) else {}).items() if key not in _RLLM}
    own |= {_RLLM.get(key, key): value for key, value in given.items()}
    if own.get("bypass_mode") is None:
        own.pop("bypass_mode", None)  # in rLLM, null means the backend's default
    return {**native, "algorithm": {**(outer if isinstance(outer, Mapping) else {}), BLOCK: own}}


def _explain_key(key: str, version: VerlVersion) -> str:
    names = [other.name for other in VERSIONS if key in other.keys]
    clauses = (
        [f"verl@{names[0]} does" if len(names) == 1 else f"verl@{names[0]} to verl@{names[-1]} do"] if names else []
    )
    if key in _REPLACEMENTS and (not names or names[-1] < version.name):
        clauses.append(_REPLACEMENTS[key])
    return f": {'; '.join(clauses)}" if clauses else suggestion(key, version.keys, cutoff=0.8)


LossName = Literal["ppo", "ppo_bypass", "policy_gradient"]
Model = TypeVar("Model", bound=BaseModel)

RS_OPTIONS: dict[str, tuple[str, str]] = {
    f"{level}_{statistic}": (statistic, level.removeprefix("seq_"))
    for level in ("seq_max", "seq_mean", "seq_sum", "token")
    for statistic in ("k1", "k2", "k3")
    if (level, statistic) != ("seq_max", "k1")
}
"""Value of `rollout_rs` in verl since 0.7.1 -> (statistic, level): `seq_mean_k1` -> ("k1", "mean")."""

_RATIO_REJECTION_LEVELS = ("token", "sequence", "geometric")
_MISSING_THRESHOLD_MESSAGE = (
    "rollout_rs_threshold must be explicitly provided when rollout_rs is enabled. "
    "Set rollout_rs_threshold to the desired threshold value."
)
_NONE_TEXT_MESSAGE = "'None' is a string, which verl does not read as null: write null, or None without quotes (Python)"


class UnappliedCorrection(Correction):
    """A Correction that verl logs but applies only in part, for example with `rollout_is: false`."""

    _measured: Correction = PrivateAttr()  # the full correction, which verl computes and logs


def read_correction(native: Mapping[str, Any], version: VerlVersion) -> Correction:
    found = find_value(native, *find_path(native, version))
    if not isinstance(found, Mapping | None):
        raise ConfigError(f"{BLOCK} must contain keys and values, found {found!r}")
    for place, hint in find_unread_keys(native, version):
        raise ConfigError(f"verl@{version.name}: unknown key {place[-1]!r}{hint}")
    settings = dict(version.keys) | {key: value for key, value in (found or {}).items() if key in version.keys}
    try:
        return (_read_flat if version.dialect == "flat" else _read_block)(settings, version)
    except (ValueError, TypeError, OverflowError) as error:
        hint = f" ({_NONE_TEXT_MESSAGE})" if "None" in settings.values() else ""
        raise ConfigError(f"{error}{hint}") from None
    except ZeroDivisionError:
        raise ConfigError("float division by zero") from None


def _make_unapplied(measured: Correction, **left: Any) -> UnappliedCorrection:
    """Return the part of `measured` that verl applies: no weights. `left` replaces more fields, such as `gates`."""
    kept = {"name": measured.name, "about": measured.about, "gates": measured.gates, "loss": measured.loss}
    found = _build_rule(UnappliedCorrection, **(kept | left))
    found._measured = measured
    return found


def _read_flat(settings: Mapping[str, Any], version: VerlVersion) -> Correction:
    """Read the keys of verl 2025-10. Before PR #3915, rejected tokens get weight 0, but count in means."""
    upper = _read_number(settings, "rollout_is_threshold")
    name = f"verl-{version.name}"
    if upper is None:
        return Correction(name=name, about="rollout_is_threshold is null: verl computes nothing.")
    level, mode = settings["rollout_is_level"], settings["rollout_is_mode"]
    if level not in _RATIO_REJECTION_LEVELS:
        raise ValueError(f"Invalid rollout_is_level: {level}. Must be 'token', 'sequence', or 'geometric'.")
    if mode not in ("truncate", "mask"):
        raise ValueError(f"Invalid rollout_is_mode: {mode}. Must be 'truncate' or 'mask'.")
    given = _read_number(settings, "rollout_is_threshold_lower")
    lower = 1.0 / upper if given is None else given
    gates = () if mode == "truncate" else (_build_rule(Gate, level=level, keep=(lower, upper), effect=version.effect),)
    weight = (
        _build_rule(Weight, level=level, truncate=upper, watch_low=given)
        if mode == "truncate"
        else _build_rule(Weight, level=level)
    )
    veto = _read_number(settings, "rollout_is_veto_threshold")
    if veto is not None and veto > 0:  # no ratio is below a threshold of 0 or less
        gates = (*gates, _make_veto(veto, MISMATCH_SOURCE, version))
    found = _build_rule(Correction, name=name, weight=weight, gates=gates)
    if settings["rollout_is"]:
        return found
    about = "rollout_is is false: weights are logged but not applied."
    return _make_unapplied(found, about=about, **({"gates": ()} if version.zeroes_rejected else {}))


def _read_block(settings: Mapping[str, Any], version: VerlVersion) -> Correction:
    """Read the keys of `rollout_correction`. Since 0.7.1, verl rejects by k1, k2 or k3, older versions by the ratio."""
    loss, source = _read_loss(settings, version)
    weight, by_ratio = None, version.dialect == "ratio"
    key, level = "rollout_is_threshold", settings["rollout_is"]
    threshold = _read_number(settings, key) if by_ratio else settings[key]
    if level is not None and threshold is not None:
        _check_choice("rollout_is", level, "sequence", "token")
        bound: dict[str, Any] = {"truncate": threshold}
        if by_ratio:
            _check_positive(key, settings)
        else:
            upper, lower = _parse_weight_threshold(threshold)
            if lower is not None and not version.icepop:
                raise ValueError(f"{key} must be a number: verl {version.name} does not support IcePop.")
            bound = {"truncate": upper} if lower is None else {"zero": (lower, upper)}
        if settings.get("rollout_is_batch_normalize"):
            bound |= {"normalize": level, "normalize_empty": "count" if version.normalizes_empty else "skip"}
        weight = _build_rule(Weight, level=level, source=source, **bound)
    gates = _read_ratio_gates(settings, source, version) if by_ratio else _parse_rejections(settings, source)
    found = _build_rule(Correction, name=f"verl-{version.name}", weight=weight, gates=gates, loss=loss)
    # In bypass mode, PPO's ratio to the rollout policy is the importance weight, so verl applies no other weight.
    left: dict[str, Any] = {} if version.names_loss else {"gates": ()}
    unapplied = loss == "ppo_bypass" and (weight is not None or (gates and left))
    return _make_unapplied(found, **left) if unapplied else found


def _read_ratio_gates(settings: Mapping[str, Any], source: RatioSource, version: VerlVersion) -> tuple[Gate, ...]:
    gates = []
    if settings["rollout_rs"] is not None:
        upper = _read_number(settings, "rollout_rs_threshold")
        if upper is None:
            raise ValueError(_MISSING_THRESHOLD_MESSAGE)
        _check_choice("rollout_rs", settings["rollout_rs"], "sequence", "geometric", "token")
        lower = _read_number(settings, "rollout_rs_threshold_lower")
        keep = (1.0 / upper if lower is None else lower, upper)
        gates.append(_build_rule(Gate, level=settings["rollout_rs"], keep=keep, source=source))
    veto = _read_number(settings, "rollout_token_veto_threshold")
    if veto is not None:
        _check_positive("rollout_token_veto_threshold", settings)
    if veto is not None and not math.isnan(veto):  # verl accepts nan, which never vetoes
        gates.append(_make_veto(veto, source, version))
    return tuple(gates)


def _read_loss(settings: Mapping[str, Any], version: VerlVersion) -> tuple[LossName, RatioSource]:
    if not settings[version.bypass_key]:
        return "ppo", MISMATCH_SOURCE
    if version.names_loss and settings["loss_type"] not in ("ppo_clip", "reinforce"):
        raise ValueError(f"Invalid loss_type: {settings['loss_type']}. Must be 'reinforce' or 'ppo_clip'.")
    return "policy_gradient" if version.is_pure(settings) else "ppo_bypass", BYPASS_SOURCE


def _parse_weight_threshold(value: object) -> tuple[float, float | None]:
    """Return (upper, lower) for "lower_upper" (IcePop), or (upper, `None`) for a number or a string such as "2.0"."""
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


def _parse_rejections(settings: Mapping[str, Any], source: RatioSource) -> tuple[Gate, ...]:
    """Parse the options in `rollout_rs` into gates. `rollout_rs_threshold` has a bound for each option, or for all."""
    key, value = "rollout_rs_threshold", settings["rollout_rs_threshold"]
    if settings["rollout_rs"] is None:
        return ()
    if value is None:
        raise ValueError(_MISSING_THRESHOLD_MESSAGE)
    if not isinstance(settings["rollout_rs"], str):
        raise ValueError("rollout_rs must be a non-empty string (comma separated for multiple options).")
    options = list(dict.fromkeys(_split_items(settings["rollout_rs"])))
    if not options:
        raise ValueError("rollout_rs must contain at least one valid option.")
    for option in options:
        if option not in RS_OPTIONS:
            raise ValueError(f"Invalid rollout_rs option: {option}. Must be one of {sorted(RS_OPTIONS)}.")
    if not isinstance(value, int | float | str):
        raise TypeError(f"{key} must be a string or numeric value specifying per-option thresholds.")
    thresholds = _split_items(str(value))
    if not thresholds:
        raise ValueError(f"{key} must contain at least one threshold value.")
    if len(thresholds) not in (1, len(options)):
        raise ValueError(
            f"{key} expects either one threshold shared by all options or exactly "
            f"{len(options)} thresholds to match the provided rollout_rs options."
        )
    if len(thresholds) == 1:
        thresholds *= len(options)
    return tuple(_parse_rejection(option, text, source) for option, text in zip(options, thresholds, strict=True))


def _parse_rejection(option: str, text: str, source: RatioSource) -> Gate:
    """Parse one option. For k1, "0.5_3" bounds the ratio rollout/train to [0.5, 3], because k1 is its logarithm."""
    statistic, level = RS_OPTIONS[option]
    if statistic == "k1":
        low, separator, high = text.partition("_")
        if not separator:
            low, high = str(1.0 / float(text)), text
        keep = _parse_floats(option, text, low, high)
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
        (upper,) = _parse_floats(option, text, text)
        if upper <= 0:
            raise ValueError(f"Threshold for option '{option}' must be positive, got {text}.")
        bounds = (None, upper)
    return _build_rule(Gate, statistic=statistic, level=level, keep=bounds, clamp="token", source=source)


def _split_items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_floats(option: str, text: str, *parts: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in parts)
    except ValueError:
        raise ValueError(f"Invalid numeric threshold '{text}' for option '{option}'.") from None


def _read_number(settings: Mapping[str, Any], key: str) -> float | None:
    value = settings[key]
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    hint = " (write it without quotes)" if isinstance(value, str) else ""
    raise TypeError(f"{key} must be a number, found {value!r}{hint}")


def _check_choice(key: str, value: object, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"Invalid {key}: {value}. Must be one of {{{str(allowed)[1:-1]}}}.")


def _check_positive(key: str, settings: Mapping[str, Any]) -> None:
    if settings[key] <= 0:
        raise ValueError(f"{key} must be positive, got {settings[key]}.")


def _build_rule(kind: type[Model], **fields: Any) -> Model:
    """Create a rule even if it is not valid, because verl accepts empty intervals and nan."""
    try:
        return kind(**fields)
    except ValidationError:
        return kind.model_construct(**fields)


def _make_veto(threshold: float, source: RatioSource, version: VerlVersion) -> Gate:
    return _build_rule(Gate, level="min", keep=(threshold, None), clamp="none", source=source, effect=version.effect)


@dataclass(frozen=True)
class VerlConfig:
    """The contents of a user's configuration file, and the verl version that reads it."""

    root: Mapping[str, Any]  # the whole configuration
    version: VerlVersion  # the version that reads it

    @cached_property
    def _path(self) -> tuple[str, ...]:
        return find_path(self.root, self.version)

    @cached_property
    def block(self) -> Any:
        return self.find(*self._path)

    @cached_property
    def section(self) -> Mapping[str, Any]:
        return self.block if isinstance(self.block, Mapping) else {}

    @cached_property
    def given(self) -> dict[str, Any]:
        """Return the keys that this version knows, with their values in the file. `quoted_numbers` become floats."""
        known = {key: value for key, value in self.section.items() if key in self.version.keys}
        return {key: float(known[key]) if key in self.quoted_numbers else known[key] for key in known}

    @cached_property
    def quoted_numbers(self) -> list[str]:
        """Return the keys whose threshold is in quotes. Return [] for verl since 0.7.1, which allows quotes."""
        if self.version.dialect == "estimator":
            return []
        return [key for key, value in self.section.items() if "threshold" in str(key) and is_text_of_number(value)]

    @cached_property
    def settings(self) -> dict[str, Any]:
        return dict(self.version.keys) | self.given

    @cached_property
    def correction(self) -> Correction | ConfigError:
        try:
            return read_correction(self.given, self.version)
        except ConfigError as error:
            return error

    @property
    def gates(self) -> tuple[Gate, ...]:
        return self.correction.gates if isinstance(self.correction, Correction) else ()

    @property
    def veto_key(self) -> str | None:
        return next((key for key in self.version.keys if "veto" in key), None)

    @property
    def bypasses(self) -> bool:
        return self.version.dialect != "flat" and bool(self.settings[self.version.bypass_key])

    def find(self, *keys: str) -> Any:
        return find_value(self.root, *keys)

    def place(self, key: str) -> str:
        return ".".join((*self._path, key) if key else self._path)

    def gate_place(self, gate: Gate) -> str:
        if gate.is_veto and self.veto_key:
            return self.place(self.veto_key)
        return self.place("rollout_is_threshold" if self.version.dialect == "flat" else "rollout_rs_threshold")

    def trap(self, name: str, key: str = "", /, *, at: str | None = None, **values: Any) -> LintMessage:
        made = make_finding(__file__, name, self.source, **values)
        return replace(made, place=self.place(key or made.place) if at is None else at)

    @property
    def source(self) -> str:
        file = "mismatch_helper.py" if self.version.dialect == "flat" else "rollout_corr_helper.py"
        return f"verl {self.version.commit} ({self.version.date}), {file} and its trainers"


_RS_OPTION_NAMES = {rule: option for option, rule in RS_OPTIONS.items()}
_K1_LEVELS = {"token": "token", "sequence": "sum", "geometric": "mean"}


def find_rs_option(gate: Gate) -> str:
    return _RS_OPTION_NAMES[gate.statistic, gate.level]


def split_gates(correction: Correction) -> tuple[tuple[Gate, ...], float | None]:
    """Return the gates for `rollout_rs`, and the threshold of the veto, if there is a veto."""
    vetoes = [gate.keep[0] or 0.0 for gate in correction.gates if gate.level == "min"]
    return tuple(gate for gate in correction.gates if gate.level != "min"), max(vetoes, default=None)


def measured_correction(correction: Correction) -> Correction:
    """Return the full correction, which verl computes and logs. verl may apply only a part of it to the loss."""
    return correction._measured if isinstance(correction, UnappliedCorrection) else correction


def fit_correction(correction: Correction, version: VerlVersion) -> tuple[Correction, list[str]]:
    return fit_rules(
        measured_correction(correction),
        lambda one: _write(one, version),
        lambda keys: measured_correction(read_correction(keys, version)),
        f"verl@{version.name}",
    )


def write_keys(correction: Correction, version: VerlVersion) -> tuple[dict[str, Any], list[str]]:
    """Convert a Correction to verl's keys, and list rules without an exact equivalent."""
    measured = measured_correction(correction)
    gates = tuple(_convert_gate(gate, version) for gate in measured.gates)
    notes = [
        f"{gate_label(gate)}: written as {gate_label(other)}, which differs if {CLAMP_DIFFERENCE}"
        for gate, other in zip(measured.gates, gates, strict=True)
        if other is not gate
    ]
    fitted, problems = fit_correction(measured.model_copy(update={"gates": gates}), version)
    keys = _write(fitted, version)
    if version.dialect == "flat" and fitted.weight is not None:
        keys["rollout_is"] = measured is correction
    return keys, [*notes, *problems]


def _convert_gate(gate: Gate, version: VerlVersion) -> Gate:
    """Convert a gate from ratio to k1 or from k1 to ratio, if this version only supports the other statistic."""
    low, high = gate.keep
    if version.dialect == "estimator" and gate.statistic == "ratio" and gate.level in _K1_LEVELS and high:
        keep = (-math.log(high), -math.log(low) if low else math.inf)
        level = _K1_LEVELS[gate.level]
        return gate.model_copy(update={"statistic": "k1", "level": level, "keep": keep, "clamp": "token"})
    if version.dialect != "estimator" and gate.statistic == "k1" and low is not None and high is not None:
        levels = {k1: ratio for ratio, k1 in _K1_LEVELS.items()}
        if gate.level in levels:
            keep = (math.exp(-high), math.exp(-low))
            level, clamp = levels[gate.level], "aggregate"
            return gate.model_copy(update={"statistic": "ratio", "level": level, "keep": keep, "clamp": clamp})
    return gate


def _write(correction: Correction, version: VerlVersion) -> dict[str, Any]:
    """Return the verl keys that come closest to a Correction. Raise a LookupError if verl lacks a key for a rule."""
    weight, loss, (rejections, veto) = correction.weight, correction.loss, split_gates(correction)
    if version.dialect == "flat":
        if weight is None:
            return {"rollout_is_threshold": None}
        keep = rejections[0].keep if rejections else (weight.watch_low, weight.truncate)
        return {
            "rollout_is": True,
            "rollout_is_threshold": keep[1],
            "rollout_is_threshold_lower": keep[0],
            "rollout_is_level": weight.level,
            "rollout_is_mode": "mask" if rejections else "truncate",
            "rollout_is_veto_threshold": veto,
        }
    if version.dialect == "ratio" and len(rejections) > 1:
        raise LookupError
    keys: dict[str, Any] = {"rollout_is": None if weight is None else weight.level}
    if weight is not None:
        low, high = weight.bounds
        keys["rollout_is_threshold"] = high if weight.zero is None else f"{low!r}_{high!r}"
        keys |= {"rollout_is_batch_normalize": True} if weight.normalize != "none" else {}
    if rejections and version.dialect == "ratio":
        keys |= {"rollout_rs": rejections[0].level, "rollout_rs_threshold": rejections[0].keep[1]}
        keys["rollout_rs_threshold_lower"] = rejections[0].keep[0] or 0.0
    elif rejections:
        keys["rollout_rs"] = ",".join(map(find_rs_option, rejections))
        keys["rollout_rs_threshold"] = ",".join(map(_format_threshold, rejections))
    if veto is not None and version.dialect == "ratio":
        keys["rollout_token_veto_threshold"] = veto
    if loss != "ppo":
        pure = loss == "policy_gradient"
        named = "reinforce" if pure else "ppo_clip"
        keys |= {version.bypass_key: True, version.pure_key: named if version.names_loss else pure}
    return keys


def _format_threshold(gate: Gate) -> str:
    low, high = gate.keep
    if gate.statistic != "k1" or low is None or high is None:
        return repr(high)
    return f"{_format_exp(low)}_{_format_exp(high)}"


def _format_exp(logarithm: float) -> str:
    value = math.exp(logarithm)
    digits = (f"{value:.{count}g}" for count in range(1, 17))
    return next((text for text in digits if math.log(float(text)) == logarithm), repr(value))


def recognize(native: Mapping[str, Any]) -> str | None:
    """If a configuration has a key for corrections, return the newest of the versions that fit it best."""
    native = with_rllm(native)
    outer = find_value(native, "algorithm")
    nested = BLOCK in (outer if isinstance(outer, Mapping) else native)
    versions = [version for version in reversed(VERSIONS) if not nested or version.dialect != "flat"]
    ranks = {version.name: _rank_version(native, version) for version in versions}
    best = max(ranks, key=lambda name: ranks[name])  # of equal ranks, max returns the first, the newest version
    if ranks[best][0] or nested:
        return best
    elsewhere = isinstance(find_value(native, *ACTOR_BLOCK), Mapping) or find_value(native, *ACTOR_CAP) is not None
    return VERSIONS[-1].name if elsewhere else None


def _rank_version(native: Mapping[str, Any], version: VerlVersion) -> tuple[int, int]:
    """Return (number of keys that verl `version` knows, rank). Rank 0: invalid. 1: no correction. 2: a correction."""
    section = find_value(native, *find_path(native, version))
    known = section.keys() & version.keys.keys() if isinstance(section, Mapping) else set()
    if section is native:  # `loss_type` also exists in other frameworks. A flat `rollout_is` must be a boolean
        not_flat = version.dialect == "flat" and not isinstance(native.get("rollout_is", True), bool)
        if known <= {"loss_type"} or not_flat:
            return 0, 0
    try:
        correction = read_correction(native, version)
    except ConfigError:
        return len(known), 0
    return len(known), 1 + (correction != Correction(name=correction.name, about=correction.about))
