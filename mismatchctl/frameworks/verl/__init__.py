"""Adapter of verl: configurations, traps, configuration factories and dumps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.frameworks.adapter import (
    DEFAULT_REPLAY_OPTIONS,
    Adapter,
    File,
    Framework,
    LoggedMetric,
    Replay,
    ReplayOptions,
    Row,
    UnreadKey,
    read_layout,
    read_options,
)
from mismatchctl.frameworks.lint import (
    LintMessage,
    check_advice,
    check_bounds,
    find_named_key,
    format_decimal,
    trap_if,
)
from mismatchctl.frameworks.verl.configuration import (
    ACTOR_BLOCK,
    ACTOR_CAP,
    BLOCK,
    KEYS,
    VERSIONS,
    VerlConfig,
    VerlVersion,
    find_path,
    find_rs_option,
    find_unread_keys,
    find_value,
    find_version,
    fit_correction,
    is_shipped,
    make_plan,
    read_correction,
    with_rllm,
    write_keys,
)
from mismatchctl.io.scripts import UNPACKING_NOT_READ, PythonCall
from mismatchctl.io.yaml import read_data

if TYPE_CHECKING:
    import pyarrow as pa


_RLLM_BLOCK = ("rllm", "algorithm", BLOCK)
_MATH_SOURCE = "verl's rollout_corr_math.md (2025-11-03), rejection sampling methods"
_NEGLIGIBLE_SHIFT = 0.01  # a reversed interval whose ends move by less than this share of its width


def _check_unknown_keys(written: VerlConfig) -> Iterator[LintMessage]:
    version = written.version
    if not isinstance(written.block, Mapping | None):
        yield written.trap("no_mapping", block=written.block)
    for item in find_unread_keys(written.root, version):
        what = " does not have this key" + (
            " and does not start" if version.dialect != "flat" else ": nothing reads it"
        )
        yield written.trap("unread", at=".".join(item.place), version=version.name, what=what, hint=item.hint)


def _check_quoted_numbers(written: VerlConfig) -> Iterator[LintMessage]:
    for key in written.texts:
        yield written.trap("quoted_number", key, value=written.section[key])
    for key, usual in written.version.keys.items():
        if isinstance(usual, bool) and isinstance(text := written.section.get(key), str):
            yield written.trap("pointer" if "$" in text else "text_flag", key, text=text)  # a pointer or a variable


def _check_refusal(written: VerlConfig) -> Iterator[LintMessage]:
    if isinstance(written.correction, ConfigError):
        message = str(written.correction)
        key = find_named_key(message, written.version.keys)
        if "option '" in message or message == "float division by zero":
            key = "rollout_rs_threshold"
        if message == "float division by zero" and written.version.dialect == "flat":
            key = "rollout_is_threshold"
        yield written.trap("refused", key, message=message)


def _check_weights_off(written: VerlConfig) -> Iterator[LintMessage]:
    given, threshold = written.given, written.settings["rollout_is_threshold"]
    flat = written.version.dialect == "flat"
    wanted = given.get("rollout_is") if flat else written.settings["rollout_is"]
    if flat and threshold is None and "rollout_is_threshold" not in given and not wanted and given:
        yield written.trap("no_threshold")
    elif wanted and threshold is None:
        yield written.trap("null_threshold", what="everything" if flat else "the weights")
    elif flat and not wanted and threshold is not None:
        how = "is false" if "rollout_is" in given else "is absent, and verl's default is false"
        yield written.trap("not_applied", how=how)
    elif not flat and "rollout_is" not in given:
        yield written.trap("default_differs")


def _check_bounds(written: VerlConfig) -> Iterator[LintMessage]:
    if isinstance(written.correction, Correction):
        place = written.place("rollout_is_threshold")
        yield from check_bounds(written.correction, place, written.gate_place, written.source)


def _check_direction(written: VerlConfig) -> Iterator[LintMessage]:
    """Report that "lo_hi" bounds rollout/train, because k1 is rollout minus train."""
    for index, gate in enumerate(written.gates):
        low, high = gate.keep
        if gate.statistic != "k1" or low is None or high is None or not low <= high:
            continue
        kept = f"{math.exp(-high):.6g} to {math.exp(-low):.6g}"
        option = find_rs_option(gate)
        if abs(low + high) <= _NEGLIGIBLE_SHIFT * (high - low):
            yield written.trap("reads_reversed", option=option, kept=kept)
        else:
            swap = written.with_gate(index, gate.model_copy(update={"keep": (-high, -low)}))
            bounds = [f"{math.exp(bound):.6g}" for bound in (low, high, -high, -low)]
            yield written.trap("reversed", instead=swap, option=option, kept=kept, bounds=bounds)


def _check_documented_lower_bound(written: VerlConfig) -> Iterator[LintMessage]:
    """Report that verl documents a lower bound of 1/threshold, which presets such as seq_mis do not use."""
    flat = written.version.dialect == "flat"
    key = "rollout_is_threshold_lower" if flat else "rollout_rs_threshold_lower"
    if written.settings.get(key) is None:
        return
    for index, gate in enumerate(written.gates):
        low, high = gate.keep
        if gate.is_veto or low is None or high is None or high <= 0 or math.isclose(low * high, 1, rel_tol=1e-9):
            continue
        instead = written.with_gate(index, gate.model_copy(update={"keep": (1 / high, high)}))
        yield replace(
            written.trap("lower_differs", key, instead=instead, low=low, inverse=1 / high), source=_MATH_SOURCE
        )


def _check_advice(written: VerlConfig) -> Iterator[LintMessage]:
    if isinstance(written.correction, ConfigError):
        return
    newer = next(version for version in VERSIONS if version.normalizes)
    normalizing = f"verl@{written.version.name} cannot do this: use verl@{newer.name} or later"
    if written.version.normalizes:
        normalizing = "write rollout_is_batch_normalize: true"
    yield from check_advice(written.correction, written.place("rollout_is_threshold"), written.gate_place, normalizing)


def _check_bypass(written: VerlConfig) -> Iterator[LintMessage]:
    version, settings = written.version, written.settings
    if version.dialect == "flat":
        return
    pure = version.is_pure(settings)
    if not written.bypasses:
        if pure:
            yield written.trap("ignored_loss", version.pure_key, bypass=version.bypass_key)
        return
    if not pure and settings["rollout_is"] is not None:
        trap = "weights_logged_only" if version.names_loss else "weights_of_one"
        yield written.trap(trap, pure=_format_pure_key(version))
    if not pure and not version.names_loss and settings["rollout_rs"] is not None:
        yield written.trap("bypass_rejects_nothing", pure=_format_pure_key(version))


def _format_pure_key(version: VerlVersion) -> str:
    return "loss_type: reinforce" if version.names_loss else f"{version.pure_key}: true"


def _check_v1_trainer(written: VerlConfig) -> Iterator[LintMessage]:
    """Report bypass mode in the V1 trainer, whose `_compute_old_log_prob` does not call `apply_bypass_mode`."""
    if written.is_separate or written.find("trainer", "use_v1") not in (None, True):
        return
    if not written.version.defaults_to_v1 and written.find("trainer", "use_v1") is None:
        return
    actor = ACTOR_BLOCK[:-1]
    block, mode = ".".join(actor), written.find(*actor, "loss_mode")
    if not written.bypasses:
        if mode == "bypass_mode":
            yield written.trap("wrong_old_policy", at=f"{block}.loss_mode", bypass=written.place("bypass_mode"))
        return
    own, place = written.find(*actor, "rollout_correction"), f"{block}.rollout_correction"
    if mode != "bypass_mode":
        lost = [key for key in ("loss_type", "rollout_is", "rollout_rs") if written.settings[key] is not None]
        lost = [key for key in lost if key != "loss_type" or written.settings[key] == "reinforce"]
        if written.settings["loss_type"] == "ppo_clip":
            lost = [key for key in lost if key == "rollout_rs"]  # PPO's ratio is the weight
        if lost:
            found = written.trap("v1_ignores", lost=" and ".join(lost), actor=block, place=place)
            yield found if written.full else replace(found, level="warning")
    elif not isinstance(own, Mapping):
        yield written.trap("v1_defaults", at=place, block=written.place(""))
    else:
        defaults = dict(written.version.keys) | {"rollout_is": "sequence"}
        for key, value in written.settings.items():
            if key != "bypass_mode" and (mine := own.get(key, defaults[key])) != value:
                yield written.trap("v1_differs", at=f"{place}.{key}", mine=mine, value=value, block=written.place(key))


def _check_veto(written: VerlConfig) -> Iterator[LintMessage]:
    key = written.veto_key
    threshold = written.settings[key] if key else None
    if key is None or not isinstance(threshold, int | float) or isinstance(written.correction, ConfigError):
        return
    if not threshold > 0:
        yield written.trap("vetoes_nothing", key)
        return
    if written.correction.loss == "policy_gradient" and written.settings["rollout_rs"] is None:
        yield written.trap("veto_ignored", key)
    elif written.correction.loss == "ppo_bypass":
        yield written.trap("veto_bypassed", key, pure=_format_pure_key(written.version))
    yield written.trap("veto_ratio", key, threshold=threshold, number=format_decimal(threshold))


RULES: tuple[Callable[[VerlConfig], Iterator[LintMessage]], ...] = (
    _check_unknown_keys,
    _check_quoted_numbers,
    _check_refusal,
    _check_weights_off,
    trap_if("no_lower_bound", lambda c: (
        c.version.dialect == "flat" and c.settings["rollout_is_threshold_lower"] is not None
        and c.settings["rollout_is_mode"] == "truncate")),
    trap_if("rejects_nothing", lambda c: c.rejects_without("rollout_rs_threshold"), "rollout_rs_threshold"),
    trap_if("rejects_nothing", lambda c: c.rejects_without("rollout_rs_threshold_lower"), "rollout_rs_threshold_lower"),
    _check_bounds,
    _check_direction,
    _check_documented_lower_bound,
    trap_if("one_threshold", lambda c: (
        c.version.dialect == "estimator" and len({gate.statistic for gate in c.gates}) > 1
        and any(gate.statistic == "k1" for gate in c.gates) and "," not in str(c.settings["rollout_rs_threshold"]))),
    _check_bypass,
    _check_v1_trainer,
    # rLLM refuses weights in bypass mode (rllm/trainer/verl/verl_backend.py).
    trap_if("rllm_excludes", lambda c: (
        c.find(*_RLLM_BLOCK, "bypass_mode") and c.find(*_RLLM_BLOCK, "tis_mode") is not None
        and {"at": ".".join((*_RLLM_BLOCK, "tis_mode"))})),
    _check_veto,
    # Corrections require rollout log-probs, which are off by default until 0.8.0.
    trap_if("no_log_probs", lambda c: (
        isinstance(c.correction, Correction) and (c.correction.weight or c.gates or c.bypasses)
        and isinstance(rollout := c.find("actor_rollout_ref", "rollout"), Mapping)
        and not rollout.get("calculate_log_probs", c.version.records_log_probs)
        and {"at": "actor_rollout_ref.rollout.calculate_log_probs"})),
    # Bugs of a release.
    trap_if("no_configuration", lambda c: (
        c.version.dialect == "ratio" and c.version.bypass_key == "bypass_old_logprob_for_rollout" and c.given)),
    trap_if("counts_empty", lambda c: (
        c.version.normalizes_empty and c.settings.get("rollout_is_batch_normalize")
        and c.settings["rollout_is"] == "sequence")),
    trap_if("divides_by_zero", lambda c: (
        c.version.icepop and c.settings["rollout_is"] == "sequence" and isinstance(c.correction, Correction)
        and c.correction.weight is not None and c.correction.weight.zero is not None)),
    trap_if("nan_loss", lambda c: (
        c.version.empty_loss_is_nan and c.gates and {"at": c.gate_place(c.gates[0])})),
    _check_advice,
)  # fmt: skip

SURE_RULES = (_check_unknown_keys, _check_quoted_numbers)
"""Rules that only depend on keys in the file, for files that do not contain every value."""


class Verl(Framework):
    """verl's rollout correction (volcengine/verl) at one of `VERSIONS`."""

    name = "verl"
    columns: Mapping[str, str] = read_options(Path(__file__).parent)["columns"]

    def __init__(self, version: VerlVersion) -> None:
        self.about = version
        self.version = version.name
        # The section of the flat keys also contains other keys.
        self.block = ("algorithm",) if version.dialect == "flat" else ("algorithm", "rollout_correction")

    @property
    def dated(self) -> str:
        note = f"; {self.about.note}" if self.about.note else ""
        return f"{self.title} ({self.about.date}{note})"

    def accepts_keys(self, native: Mapping[str, Any]) -> bool:
        """Return True if a key at the root is a key of rollout correction."""
        return not self.about.keys.keys().isdisjoint(native)

    def correction(self, native: Mapping[str, Any]) -> Correction:
        return read_correction(native, self.about)

    def native(self, correction: Correction) -> tuple[dict[str, Any], list[str]]:
        return write_keys(correction, self.about)

    def lint(self, native: Mapping[str, Any], unknown: Collection[str] = ()) -> list[LintMessage]:
        written = VerlConfig(native, self.about)
        return [finding for rule in (SURE_RULES if unknown else RULES) for finding in rule(written)]

    def is_default_file(self, name: str) -> bool:
        return is_shipped(name)

    def known_names(self, native: Mapping[str, Any], text: str = "") -> dict[str, Any]:
        return with_rllm(native)

    def reads(self, place: tuple[str, ...], native: Mapping[str, Any]) -> bool:
        return place[:-1] in (find_path(native, self.about), ACTOR_BLOCK) and place[-1] in self.about.keys

    def gate_places(self, native: Mapping[str, Any], correction: Correction) -> list[str]:
        written = VerlConfig(native, self.about)
        return [written.gate_place(gate) for gate in correction.gates]

    def replay(
        self, table: pa.Table, correction: Correction, options: ReplayOptions = DEFAULT_REPLAY_OPTIONS
    ) -> Replay:
        from mismatchctl.frameworks.step import Step
        from mismatchctl.frameworks.verl.metrics import replay_step

        fitted, problems = fit_correction(correction, self.about)
        if problems:
            raise ConfigError(f"{correction.name}: {'; '.join(problems)}")
        step = Step.read(table, options.dtype, self.columns)
        return replay_step(step, make_plan(fitted, self.about), self.about, options.micro_batch_size)

    def meanings(self) -> list[LoggedMetric]:
        from mismatchctl.frameworks.verl.metrics import list_meanings

        return list_meanings(self.about)

    def unread(self, native: Mapping[str, Any]) -> list[UnreadKey]:
        return list(find_unread_keys(native, self.about))


_SHARED_KEYS = {"loss_type"}
"""Keys that do not identify verl outside of its block, since other frameworks use them too."""


def recognize(native: Mapping[str, Any]) -> str | None:
    """Return the version of a configuration, or `None` without a key of rollout correction.

    Only versions that know most of its keys are considered. The order of preference is: the newest version with an
    effect, the newest version that accepts the keys, the newest version.
    """
    native = with_rllm(native)
    section, versions = _find_section(native)
    elsewhere = isinstance(find_value(native, *ACTOR_BLOCK), Mapping) or find_value(native, *ACTOR_CAP) is not None
    if elsewhere and not section.keys() & KEYS:
        return VERSIONS[-1].name
    if section is native and section.keys() & KEYS <= _SHARED_KEYS:
        return None
    known = {version.name: len(section.keys() & version.keys.keys()) for version in versions}
    most = max(known.values(), default=0)
    if not most and BLOCK not in _find_outer_block(native):
        return None
    candidates = [version for version in reversed(versions) if known[version.name] == most]
    return max(
        candidates, key=lambda version: _rank_version(native, version)
    ).name  # the first of several is the newest


def _rank_version(native: Mapping[str, Any], version: VerlVersion) -> int:
    """Rank a version: 0 if it rejects the configuration, 1 if it accepts it, 2 if the configuration has an effect."""
    try:
        correction = read_correction(native, version)
    except ConfigError:
        return 0
    return 1 + (correction != Correction(name=correction.name, about=correction.about))


def _find_outer_block(native: Mapping[str, Any]) -> Mapping[str, Any]:
    algorithm = native.get("algorithm")
    return algorithm if isinstance(algorithm, Mapping) else native


def _find_section(native: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[VerlVersion]]:
    """Find the keys of rollout correction, and the versions that read them at this place."""
    outer = _find_outer_block(native)
    blocks = [version for version in VERSIONS if version.dialect != "flat"]
    flat = [version for version in VERSIONS if version.dialect == "flat"]
    if BLOCK in outer:
        block = outer[BLOCK]
        return (block if isinstance(block, Mapping) else {}), blocks
    if outer is not native:
        return outer, flat
    level = native.get("rollout_is", True)  # a switch in the flat keys, a level or null in all others
    return native, [*(flat if isinstance(level, bool) else []), *blocks]


CONFIG_CLASS = "RolloutCorrectionConfig"
Keys = dict[str, Any]


@cache
def _read_factories() -> dict[str, dict[str, list[Any]]]:
    found: dict[str, dict[str, list[Any]]] = read_data(Path(__file__).with_name("factories.yaml"))
    return found


def _expand_factory(factory: list[Any], given: Keys) -> Keys:
    """Return the keys that a factory of factories.yaml sets, given some of its parameters."""
    level, rejection, fixed, parameters = factory
    values = parameters | given
    made: Keys = {"rollout_is": level, "rollout_rs": rejection}
    if level is not None:
        made["rollout_is_threshold"] = values.get("is_threshold", values.get("threshold"))
    if rejection is not None:
        made["rollout_rs_threshold"] = values.get("rs_threshold", values.get("threshold"))
    if "threshold_lower" in values:  # of IcePop
        made["rollout_is_threshold"] = f"{values['threshold_lower']}_{values['threshold']}"
    names = {"rs_threshold_lower": "rollout_rs_threshold_lower", "veto_threshold": "rollout_token_veto_threshold"}
    made |= {key: values[name] for name, key in names.items() if name in values}
    return {**made, **fixed}


def read_call(call: PythonCall) -> Keys:
    if call.computed:
        raise ConfigError(f"line {call.line}: {call.computed[0]} is not a constant keyword argument")
    if call.brings_more:
        raise ConfigError(f"line {call.line}: {UNPACKING_NOT_READ}")
    return {"rollout_correction": _expand_call(call)}


def _expand_call(call: PythonCall) -> Keys:
    if not call.function:
        return call.given if call.partial else {"rollout_is": "sequence"} | call.given  # the default in Python
    every = _read_factories().values()
    known = [factories[call.function] for factories in every if call.function in factories]
    if not known:
        hint = suggestion(call.function, {name for factories in every for name in factories})
        raise ConfigError(f"line {call.line}: {CONFIG_CLASS}: unknown function {call.function}{hint}")
    for factory in known:
        if call.given.keys() <= factory[-1].keys():
            return _expand_factory(factory, call.given)
    wanted = ", ".join(known[0][-1])
    raise ConfigError(f"line {call.line}: {CONFIG_CLASS}.{call.function} takes {wanted or 'nothing'}")


def _read_rows(file: File) -> Iterator[Row]:
    raise DataError(
        "this file is a pickle with classes of verl and tensordict. mismatchctl does not load such pickles, because "
        "loading would execute code",
        file=str(file.path),
        remedy="convert the file with docs/integrations/verl_to_parquet.py, in an environment with verl",
    )


LAYOUT = read_layout(__file__, "verl", _read_rows)
TEXT_LAYOUT = read_layout(
    __file__,
    "verl-rollout-data",
    lambda file: iter(()),
    lambda file: {"input", "output", "score", "step"} <= file.first_line().keys(),
)


ADAPTER = Adapter(
    name="verl",
    versions=tuple(version.name for version in reversed(VERSIONS)),
    load=lambda version: Verl(find_version(version)),
    recognize=recognize,
    columns=Verl.columns,
    layouts=(LAYOUT, TEXT_LAYOUT),
    classes={CONFIG_CLASS: read_call},
    factory=lambda version, name: {"rollout_correction": _expand_factory(_read_factories()[version][name], {})},
)
