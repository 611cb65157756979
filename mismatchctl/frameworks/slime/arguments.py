"""Versions and arguments of slime and Miles, and their conversion to and from a Correction."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import PrivateAttr, ValidationError

from mismatchctl.core.validation import explain_error
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.adapter import (
    Adapter,
    CodeVersion,
    Framework,
    UnreadKey,
    find_dated_version,
    find_file,
    find_similar,
    fit_rules,
)
from mismatchctl.frameworks.lint import format_decimal, is_text_of_number, read_table
from mismatchctl.io.yaml import Unknown, read_data

Effect = Literal["mask", "zero"]


@dataclass(frozen=True, kw_only=True)
class SlimeVersion(CodeVersion):
    """A version of slime or Miles."""

    framework: str  # slime or Miles
    # True: metrics are divided by all valid tokens of a rollout, also rejected ones. False: by the tokens in their sum.
    rollout_denominators: bool = False
    dual_clip: bool = False  # the loss uses `eps_clip_c`
    cispo: bool = False  # `advantage_estimator: cispo` is supported
    # under `use_rollout_logprobs`, train_rollout_logprob_abs_diff uses the current policy. If False, it is 0.
    bypass_compares_current: bool = False
    finite: bool = False  # Miles: NaN and infinities become 0, the PPO ratio is float32, and more metrics are logged
    old_keys: bool = False  # mis.yaml has one rule for weights and rejection, and the veto does not need `use_rs`
    zeroes_rejected: bool = False  # rejected tokens get weight 0 and stay in the denominators
    one_mask: bool = False  # metrics that other versions compute over all valid tokens use only kept tokens
    # current name of a metric -> its name in this version, or None if it is not logged
    names: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def effect(self) -> Effect:
        """Return "zero" if rejected tokens get weight 0, else "mask"."""
        return "zero" if self.rollout_denominators or self.zeroes_rejected else "mask"


VERSIONS = tuple(SlimeVersion(**fields) for fields in read_table(__file__, "versions.yaml"))
"""All versions, oldest first."""


def make_adapter(framework: str, make: Callable[[SlimeVersion], Framework], **brought: Any) -> Adapter:
    versions = [version for version in VERSIONS if version.framework == framework]
    names = tuple(version.name for version in reversed(versions))
    return Adapter(framework, names, lambda word: make(find_dated_version(framework, versions, word)), **brought)


CorrectionFunction = Literal["none", "vanilla", "icepop", "mis"]

MIS_PATH = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
ICEPOP_PATH = "slime.backends.megatron_utils.loss.icepop_function"

_WEIGHT_KEYS = ("tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "use_rs", "tis_batch_normalize")
_REJECTION_KEYS = ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")
MIS_FIELDS = (*_WEIGHT_KEYS, *_REJECTION_KEYS)

_OPTIONS = read_table(__file__, "options.yaml")
OLD_KEYS: dict[str, str] = _OPTIONS["old_keys"]
DOCUMENTED_ONLY: dict[str, str] = _OPTIONS["documented_only"]
_CHOICES: dict[str, tuple[str, ...]] = _OPTIONS["choices"]

_OWN = re.compile(r"(?:tis|rs|mis)_\w+|use_(?:tis|rs|mis)")
"""Pattern of the keys of mis.yaml. Unknown keys that match are reported, because slime ignores them silently."""
_TYPICAL = (*MIS_FIELDS, "use_tis", "tis_clip", "tis_clip_low", "custom_tis_function_path", "get_mismatch_metrics")
"""Only typos of these arguments are reported. The names of other arguments are too similar to common terms."""
_SIGN_KEYS = {*_TYPICAL, *DOCUMENTED_ONLY, "use_rollout_logprobs", "true_on_policy_mode"}
"""Keys that only a slime configuration has."""

SHIPPED_FILE = "train_infer_mismatch_helper/mis.yaml"
"""A file that slime (unchanged since v0.2.0) and Miles ship. mis.yaml in this folder is a copy."""


@dataclass(frozen=True)
class Arguments:
    """The arguments that slime's loss reads."""

    use_tis: bool = False
    get_mismatch_metrics: bool = False
    use_rollout_logprobs: bool = False
    custom_tis_function_path: str | None = None
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0

    tis_level: str = "token"
    tis_mode: str = "truncate"
    tis_lower_bound: float | None = None
    tis_upper_bound: float | None = None
    tis_batch_normalize: bool = False
    use_rs: bool = False
    rs_level: str = "token"
    rs_lower_bound: float | None = None
    rs_upper_bound: float | None = None
    rs_veto_threshold: float | None = None
    vetoes_alone: bool = False  # not an argument: True for versions whose veto does not need use_rs

    advantage_estimator: str = "grpo"
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k1"
    use_unbiased_kl: bool = False
    calculate_per_token_loss: bool = False

    @property
    def function(self) -> CorrectionFunction:
        if not (self.use_tis or self.get_mismatch_metrics):
            return "none"
        if self.custom_tis_function_path is None:
            return "vanilla"
        return "icepop" if self.custom_tis_function_path == ICEPOP_PATH else "mis"

    @property
    def weighs(self) -> bool:
        """Return True if tokens get importance weights. Without `use_tis`, mis.py only measures the mismatch."""
        return self.function in ("vanilla", "icepop") or (self.function == "mis" and self.use_tis)

    @property
    def rejects(self) -> bool:
        return self.function == "mis" and self.use_tis and self.use_rs

    @property
    def vetoes(self) -> bool:
        """Return True if slime applies the veto. It needs `use_rs` or, with the old keys of mis.yaml, `use_tis`."""
        alone = self.vetoes_alone and self.function == "mis" and self.use_tis
        return (self.rejects or alone) and self.rs_veto_threshold is not None

    @property
    def tis_bounds(self) -> tuple[float, float]:
        upper = self.tis_upper_bound
        assert upper is not None
        return (1.0 / upper if self.tis_lower_bound is None else self.tis_lower_bound), upper

    @property
    def rs_bounds(self) -> tuple[float, float]:
        """Return the bounds of the rejection rule (`rs_level`). A missing bound equals the weights' bound."""
        low, high = self.tis_bounds
        return (
            low if self.rs_lower_bound is None else self.rs_lower_bound,
            high if self.rs_upper_bound is None else self.rs_upper_bound,
        )

    def native(self) -> dict[str, Any]:
        given, defaults = dict(vars(self)), vars(_DEFAULTS)
        del given["vetoes_alone"]
        runs_mis = self.custom_tis_function_path == MIS_PATH
        always = ("use_tis", *MIS_FIELDS) if runs_mis else ()
        written = {key: value for key, value in given.items() if value != defaults[key] or key in always}
        if runs_mis:
            written.pop("custom_tis_function_path")  # the keys of mis.yaml imply this path
        if self.function == "none":
            written = {"use_tis": False} | written
        if self.function in ("vanilla", "icepop"):
            written |= {"tis_clip": self.tis_clip, "tis_clip_low": self.tis_clip_low}
        return written


_DEFAULTS = Arguments()
_FIELDS = {field.name: str(field.type) for field in fields(Arguments) if field.name != "vetoes_alone"}
KNOWN_KEYS = {*_FIELDS, "custom_config_path", "micro_batch_size", "use_dynamic_batch_size", "true_on_policy_mode"}
"""Arguments that affect the correction, the loss, or the findings of `lint`."""

_FLAG_FIELDS = {name for name, kind in _FIELDS.items() if kind == "bool"}
NUMBER_FIELDS = {name for name, kind in _FIELDS.items() if kind.startswith("float")}
_NON_NULL_KEYS = {name for name, kind in _FIELDS.items() if kind in ("bool", "float")}


class ArgumentError(ConfigError):
    """A value that slime refuses. `argument` is the argument to change."""

    def __init__(self, message: str, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


def read_arguments(native: Mapping[str, Any], version: SlimeVersion) -> Arguments:
    """Read the keys of mis.yaml and the flags in `native`. Ignore other keys. Refuse misspelled keys and bad values."""
    for (key,), hint in find_unread_keys(native, version):
        raise ConfigError(f"no code reads {key!r}{hint}")
    named = _normalize_keys(native)
    old = version.old_keys and not OLD_KEYS.keys().isdisjoint(named)
    if old:
        named = _from_old_keys(named)
    known = {key: _check_value(key, value) for key, value in named.items() if key in _FIELDS}
    path = known["custom_tis_function_path"] = _find_function_path(known.get("custom_tis_function_path"), named)
    if path == MIS_PATH:
        # Without use_tis, slime only calls mis.py if this flag is set. So keys of mis.yaml without use_tis imply it.
        known.setdefault("get_mismatch_metrics", not known.get("use_tis", False))
    wanted = [*_WEIGHT_KEYS, *(_REJECTION_KEYS if known.get("use_rs") else ())] if known.get("use_tis") else []
    missing = [key for key in wanted if key not in known]
    if old:
        known["vetoes_alone"] = True
    found = Arguments(**{key: value for key, value in known.items() if value is not None or key not in _NON_NULL_KEYS})
    if found.function == "mis":
        _refuse_missing(missing)
    for argument, refusal in _list_refusals(found):
        raise ArgumentError(refusal, argument)
    if found.rejects and found.tis_mode == "mask" and version.name in ("v0.2.0", "v0.2.1"):
        raise ArgumentError(
            "slime before 2025-12-21 does not support tis_mode: mask with use_rs, and stops with 'list index out "
            "of range'. Use only one of the two options, or update slime", "tis_mode",
        )  # fmt: skip
    return found


def _refuse_missing(missing: list[str]) -> None:
    if missing:
        raise ArgumentError(
            f"mis.py would stop with an AttributeError at {missing[0]!r}: mis.py has no defaults. "
            f"Set {', '.join(missing)}", missing[0],
        )  # fmt: skip


def _from_old_keys(named: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_missing([key for key in OLD_KEYS if key not in named])
    if named["mis_lower_bound"] is None:
        raise ArgumentError(
            "mis_lower_bound is null: slime would stop with a TypeError, because compute_mis_weights returns a number "
            "that slime cannot unpack. Set mis_lower_bound", "mis_lower_bound",
        )  # fmt: skip
    made = {OLD_KEYS.get(key, key): value for key, value in named.items()}
    return {"use_tis": True, "use_rs": False, "tis_batch_normalize": False} | made


def write_old_keys(said: Arguments) -> dict[str, Any]:
    written = said.native()
    if said.function != "mis" or said.tis_upper_bound is None:  # without mis.py, or if it only measures
        return written
    low, high = said.tis_bounds
    values = (said.tis_level, said.tis_mode, low, high, said.rs_veto_threshold)
    others = {key: value for key, value in written.items() if key not in MIS_FIELDS}
    return others | dict(zip(OLD_KEYS, values, strict=True))


def include_custom_config(native: dict[str, Any], folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Merge the file of `custom_config_path`. The file overrides flags of the same name."""
    named = _normalize_keys(native).get("custom_config_path")
    if not isinstance(named, str) or isinstance(named, Unknown):
        return native, ()
    place = find_file(named, folder, above=True)
    if place is None and named.endswith(SHIPPED_FILE):
        place = Path(__file__).with_name("mis.yaml")
    if place is None:
        return native, (named,)
    given = read_data(place)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{place}: expected keys and values")
    kept = {key: value for key, value in native.items() if normalize_key(str(key)) not in given}
    return kept | dict(given), ()


def recognize(native: Mapping[str, Any]) -> str | None:
    """Return the slime version of a configuration: "" if any version fits, `None` if it is not for slime."""
    named = _normalize_keys(native)
    if "mis_mode" in named and "mis_level" in named and named.keys().isdisjoint(MIS_FIELDS):
        return "2025-11"
    return None if _SIGN_KEYS.isdisjoint(named) else ""


def find_unread_keys(native: Mapping[str, Any], version: SlimeVersion) -> Iterator[UnreadKey]:
    """Yield misspelled or only documented correction arguments, each with a hint. Other arguments are not checked."""
    for key in map(str, native):
        name = normalize_key(key)
        if version.old_keys and (name in OLD_KEYS or name == "use_mis"):
            continue
        if name in DOCUMENTED_ONLY:
            yield (key,), f": {DOCUMENTED_ONLY[name]}"
        elif name not in KNOWN_KEYS:
            near = find_similar(name, _TYPICAL)
            if near or _OWN.fullmatch(key):
                yield (key,), f" (did you mean {near!r}?)" if near else ""


def normalize_key(key: str) -> str:
    """Convert a flag to the name of its argument: `--use-tis` becomes `use_tis`."""
    return key.lstrip("-").replace("-", "_")


def _normalize_keys(native: Mapping[str, Any]) -> dict[str, Any]:
    return {normalize_key(str(key)): value for key, value in native.items()}


def _find_function_path(given: str | None, named: Mapping[str, Any]) -> str | None:
    """Return the path of the correction function, or `None`. If fields of mis.yaml are set without a path: mis.py."""
    if given is None:
        return MIS_PATH if any(key in named for key in MIS_FIELDS) else None
    function = str(given).rpartition(".")[2]
    if "icepop" in function:
        return ICEPOP_PATH
    if "mis" in function:
        return MIS_PATH
    key = "custom_tis_function_path"
    raise ArgumentError(f"{key} {given}: only mis.py and icepop_function are supported", key)


def _check_value(key: str, value: Any) -> Any:
    """Check the value of an argument, and convert numbers to float."""
    if key in _FLAG_FIELDS:
        if value is not None and not isinstance(value, bool):
            raise ArgumentError(f"{key} must be true or false, not {value!r}", key)
    elif key in NUMBER_FIELDS and value is not None:
        if isinstance(value, str):
            write = f": write {format_decimal(value)} without quotes" if is_text_of_number(value) else ""
            raise ArgumentError(f"{key} is the string {value!r}, which torch does not read as a number{write}", key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentError(f"{key} must be a number, not {value!r}", key)
        return float(value)
    elif key == "advantage_estimator" and isinstance(value, str) and not find_similar(value, _CHOICES[key]):
        return value  # an estimator that a fork of slime may add
    elif key in ("advantage_estimator", "kl_loss_type") and value not in _CHOICES[key]:
        raise ArgumentError(f"invalid choice {value!r} for {key}{suggestion(str(value), _CHOICES[key])}", key)
    return value


def _list_refusals(given: Arguments) -> Iterator[tuple[str, str]]:
    """Yield (argument to change, error) for each error that slime's argument parser and mis.py would raise."""
    if given.function == "vanilla" and given.get_mismatch_metrics:
        key = "custom_tis_function_path"
        yield key, f"get_mismatch_metrics needs {key}: the built-in function does not measure the mismatch"
    if given.function == "vanilla" and given.use_rollout_logprobs:
        yield (
            "use_rollout_logprobs",
            (
                "use_rollout_logprobs and use_tis cannot be set at the same time: with the rollout's "
                "log-probs as anchor there is nothing left to correct"
            ),
        )
    if given.eps_clip_c is not None and given.eps_clip_c <= 1:
        yield (
            "eps_clip_c",
            (
                f"The lower bound of the clip_ratio_c for dual-clip PPO should be greater than 1.0, "
                f"but get the value: {given.eps_clip_c}."
            ),
        )
    if given.function != "mis" or not given.use_tis:
        return
    if given.tis_upper_bound is None and given.tis_lower_bound is None:
        yield (
            "tis_lower_bound",
            (
                "unsupported operand type(s) for /: 'float' and 'NoneType': mis.py would stop with this error, "
                "because tis_lower_bound falls back to 1 / tis_upper_bound, and that is null"
            ),
        )
    if given.tis_upper_bound is None:
        yield "tis_upper_bound", "tis_upper_bound is null: mis.py asserts that this value is given"
    if not given.tis_upper_bound and given.tis_lower_bound is None:
        fallback = "tis_lower_bound falls back to 1 / tis_upper_bound = 1 / 0"
        yield "tis_lower_bound", f"float division by zero: mis.py would stop, as {fallback}"
    levels, modes = _CHOICES["level"], _CHOICES["tis_mode"]
    for name in ("tis_level", *(["rs_level"] if given.use_rs else [])):
        if (level := getattr(given, name)) not in levels:
            yield name, f"Invalid level: {level}{suggestion(str(level), levels)}"
    if given.tis_mode not in modes:
        yield "tis_mode", f"Unsupported tis_mode: {given.tis_mode}{suggestion(str(given.tis_mode), modes)}"
    checked = ([("tis", given.tis_bounds)] if given.tis_mode != "truncate" else []) + (
        [("rs", given.rs_bounds)] if given.use_rs else []
    )
    for name, (low, high) in checked:
        if not low < high:
            key = f"{name}_lower_bound"
            yield key, f"{key} {low:g} must be below {name}_upper_bound {high:g} (mis.py asserts it)"
    if given.tis_batch_normalize and given.tis_level == "geometric":
        yield (
            "tis_batch_normalize",
            (
                "Unsupported tis_level: geometric: tis_batch_normalize only supports token and sequence weights, "
                "although slime's documents recommend it for geometric weights. Turn tis_batch_normalize off"
            ),
        )


class SlimeCorrection(Correction):
    """A Correction that keeps the arguments it was read from. The logged metrics depend on these arguments."""

    _arguments: Arguments = PrivateAttr()


def make_correction(arguments: Arguments, name: str, effect: Effect) -> SlimeCorrection:
    weight: dict[str, Any] | None = None
    gates: list[dict[str, Any]] = []
    level, mode = arguments.tis_level, arguments.tis_mode
    if arguments.weighs and arguments.function == "mis":
        bounds = arguments.tis_bounds
        weight = {"level": level, "normalize": level if arguments.tis_batch_normalize else "none"}
        weight |= {"normalize_over": "micro_batch", "normalize_empty": "count"}
        weight |= {"truncate": bounds[1]} if mode == "truncate" else {"clip": bounds} if mode == "clip" else {}
        gates += [{"level": level, "keep": bounds}] if mode == "mask" else []
    elif arguments.weighs:
        bound = "clip" if arguments.function == "vanilla" else "zero"
        weight = {bound: (arguments.tis_clip_low, arguments.tis_clip)}
    if arguments.rejects:
        gates.append({"level": arguments.rs_level, "keep": arguments.rs_bounds})
    if arguments.vetoes and arguments.rs_veto_threshold > 0:  # type: ignore[operator]  # 0 never fires
        gates.append({"level": "min", "keep": (arguments.rs_veto_threshold, None), "clamp": "none"})
    try:
        correction = SlimeCorrection(
            name=name,
            weight=None if weight is None else Weight.model_validate(weight),
            gates=tuple(Gate.model_validate({**gate, "effect": effect}) for gate in gates),
            loss="ppo_bypass" if arguments.use_rollout_logprobs else "ppo",
        )
    except ValidationError as error:
        raise ConfigError(explain_error(error, Correction)) from error
    correction._arguments = arguments
    return correction


def make_arguments(correction: Correction, version: SlimeVersion) -> tuple[Arguments, list[str], list[str]]:
    """Return slime's arguments for a Correction, the rules that slime lacks, and how slime changes the other rules."""
    effect = version.effect
    known = correction._arguments if isinstance(correction, SlimeCorrection) else Arguments()
    if isinstance(correction, SlimeCorrection):
        again = make_correction(known, correction.name, effect)
        if (again.weight, again.gates, again.loss) == (correction.weight, correction.gates, correction.loss):
            return known, [], []
    wanted, notes = _nearest(correction, effect)

    def read(said: Arguments) -> Correction:
        keys = write_old_keys(said) if version.old_keys else said.native()
        return make_correction(read_arguments(keys, version), correction.name, effect)

    fitted, problems = fit_rules(wanted, lambda one: _write_rules(one, known), read, version.framework)
    return _write_rules(fitted, known), problems, notes


def _nearest(correction: Correction, effect: Effect) -> tuple[Correction, list[str]]:
    """Set fields that slime cannot change, such as `effect`, to slime's values. Return notes about the changes, too."""
    notes, weight = [], correction.weight
    if any(gate.effect != effect for gate in correction.gates):
        notes.append(
            f"in this version all rejected tokens {'stay in' if effect == 'zero' else 'leave'} the denominators"
        )
    if weight is not None and weight.normalize != "none":
        if weight.normalize_over == "group":
            notes.append("weights normalized over the group: slime normalizes each micro-batch alone")
        if weight.normalize == "sequence" and weight.normalize_empty == "skip":
            notes.append("normalization without empty sequences: slime counts them as 0")
        weight = weight.model_copy(update={"normalize_over": "micro_batch", "normalize_empty": "count"})
    gates = tuple(gate.model_copy(update={"effect": effect}) for gate in correction.gates)
    return correction.model_copy(update={"weight": weight, "gates": gates}), notes


def _write_rules(correction: Correction, known: Arguments) -> Arguments:
    """Return arguments for a Correction. Replace rules that slime does not support by similar rules."""
    weight = correction.weight
    correcting: dict[str, Any] = {"use_tis": weight is not None, "get_mismatch_metrics": False}
    correcting |= {"custom_tis_function_path": None, "use_rollout_logprobs": correction.loss == "ppo_bypass"}
    if weight is not None:
        low, high = weight.bounds
        # True if slime's built-in clip is enough. Corrections from mis.yaml have normalize_over `micro_batch`.
        plain = weight.clip is not None and weight.normalize_over == "group" and not correction.gates
        if weight.zero is not None or (plain and weight.level == "token"):
            path = None if weight.zero is None else ICEPOP_PATH
            correcting |= {"custom_tis_function_path": path, "tis_clip_low": low, "tis_clip": high}
        else:
            correcting |= _write_mis(weight, list(correction.gates))
    return replace(known, **correcting)


def _write_mis(weight: Weight, gates: list[Gate]) -> dict[str, Any]:
    low, high = weight.bounds
    veto = next((gate for gate in gates if gate.is_veto), None)
    gates = [gate for gate in gates if gate is not veto]
    mode, lower = ("clip", low) if weight.clip else ("truncate", None)
    if weight.clip is None and weight.truncate is None and gates and gates[0].level == weight.level:
        mode, (lower, high) = "mask", gates.pop(0).bounds
    rejects = bool(gates or veto)
    rs_low, rs_high = gates[0].bounds if gates else (0.0, math.inf)
    return {
        "custom_tis_function_path": MIS_PATH,
        "tis_level": weight.level,
        "tis_mode": mode,
        "tis_lower_bound": lower,
        "tis_upper_bound": high,
        "tis_batch_normalize": weight.normalize != "none",
        "use_rs": rejects,
        "rs_level": gates[0].level if gates else "token",
        "rs_lower_bound": rs_low if rejects else None,
        "rs_upper_bound": rs_high if rejects else None,
        "rs_veto_threshold": veto.keep[0] if veto else None,
    }
