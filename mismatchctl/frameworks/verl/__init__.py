"""Adapter of verl: configurations, findings of `lint`, and dumps."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mismatchctl.core.formatting import shorten_exponents
from mismatchctl.corrections.labels import short_number
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.frameworks.adapter import (
    REPLAY_DEFAULTS,
    Adapter,
    File,
    Framework,
    LoggedMetric,
    Replay,
    ReplayOptions,
    Row,
    read_layout,
)
from mismatchctl.frameworks.lint import LintMessage, check_bounds, find_named_key, format_decimal, read_table
from mismatchctl.frameworks.verl.configuration import (
    ACTOR_BLOCK,
    BLOCK,
    VERSIONS,
    VerlConfig,
    VerlVersion,
    find_path,
    find_rs_option,
    find_unread_keys,
    find_version,
    fit_correction,
    measured_correction,
    read_correction,
    recognize,
    with_rllm,
    write_keys,
)
from mismatchctl.io.scripts import UNPACKING_NOT_READ, PythonCall

if TYPE_CHECKING:
    import pyarrow as pa


_MATH_SOURCE = "verl's rollout_corr_math.md (2025-11-03), rejection sampling methods"
_NEGLIGIBLE_SHIFT = (
    0.01  # [low, high] and [-high, -low] count as equal if their ends differ by at most this share of the width
)


def _check_keys(written: VerlConfig) -> Iterator[LintMessage]:
    version = written.version
    if not isinstance(written.block, Mapping | None):
        yield written.trap("no_mapping", block=written.block)
    what = " does not have this key" + (", so it does not start" if version.dialect != "flat" else ": no code reads it")
    for place, hint in find_unread_keys(written.root, version):
        yield written.trap("unread", at=".".join(place), version=version.name, what=what, hint=hint)
    for key in written.quoted_numbers:
        yield written.trap("quoted_number", key, value=written.section[key])
    for key, usual in version.keys.items():
        if isinstance(usual, bool) and isinstance(text := written.section.get(key), str):
            yield written.trap("pointer" if "$" in text else "text_flag", key, text=text)  # `$` starts a reference


def _check_weights(written: VerlConfig) -> Iterator[LintMessage]:
    given, settings, flat = written.given, written.settings, written.version.dialect == "flat"
    if isinstance(written.correction, ConfigError):
        message = str(written.correction)
        key = find_named_key(message, written.version.keys)
        if "option '" in message:
            key = "rollout_rs_threshold"
        elif "division by zero" in message:
            key = "rollout_is_threshold" if flat else "rollout_rs_threshold"
        yield written.trap("refused", key, message=message)
    threshold, wanted = settings["rollout_is_threshold"], given.get("rollout_is") if flat else settings["rollout_is"]
    if flat and threshold is None and "rollout_is_threshold" not in given and not wanted and given:
        yield written.trap("no_threshold")
    elif wanted and threshold is None:
        yield written.trap("null_threshold", what="everything" if flat else "the weights")
    elif flat and not wanted and threshold is not None:
        how = "is false" if "rollout_is" in given else "is absent, and verl's default is false"
        yield written.trap("not_applied", how=how)
    elif not flat and "rollout_is" not in given:
        yield written.trap("default_differs")
    if flat and settings["rollout_is_threshold_lower"] is not None and settings["rollout_is_mode"] == "truncate":
        yield written.trap("no_lower_bound")


def _check_rejection(written: VerlConfig) -> Iterator[LintMessage]:
    settings, dialect = written.settings, written.version.dialect
    for key in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
        if dialect != "flat" and settings["rollout_rs"] is None and settings.get(key) is not None:
            yield written.trap("rejects_nothing", key)
    if isinstance(written.correction, Correction):
        place = written.place("rollout_is_threshold")
        yield from check_bounds(written.correction, place, written.gate_place, written.source)
    for gate in written.gates:  # "lo_hi" bounds rollout/train, because k1 is rollout minus train
        low, high = gate.keep
        if gate.statistic == "k1" and low is not None and high is not None and low <= high:
            kept, option = f"{short_number(math.exp(-high))} to {short_number(math.exp(-low))}", find_rs_option(gate)
            if abs(low + high) <= _NEGLIGIBLE_SHIFT * (high - low):
                yield written.trap("reads_reversed", option=option, kept=kept)
            else:
                bounds = [shorten_exponents(f"{math.exp(bound):.6g}") for bound in (low, high, -high, -low)]
                yield written.trap("reversed", option=option, kept=kept, bounds=bounds)
    key = "rollout_is_threshold_lower" if dialect == "flat" else "rollout_rs_threshold_lower"
    for gate in written.gates if settings.get(key) is not None else ():
        low, high = gate.keep  # verl documents the lower bound 1/threshold, but presets such as seq_mis use another
        if gate.is_veto or low is None or high is None or high <= 0 or math.isclose(low * high, 1, rel_tol=1e-9):
            continue
        yield replace(written.trap("lower_differs", key, low=low, inverse=1 / high), source=_MATH_SOURCE)
    statistics = {gate.statistic for gate in written.gates}
    one_threshold = dialect == "estimator" and "," not in str(settings["rollout_rs_threshold"])
    if one_threshold and "k1" in statistics and len(statistics) > 1:
        yield written.trap("one_threshold")


def _check_bypass(written: VerlConfig) -> Iterator[LintMessage]:
    version, settings = written.version, written.settings
    if version.dialect == "flat":
        return
    pure, pure_setting = version.is_pure(settings), _format_pure_key(version)
    if pure and not written.bypasses:
        yield written.trap("ignored_loss", version.pure_key, bypass=version.bypass_key)
    if written.bypasses and not pure:
        if settings["rollout_is"] is not None:
            yield written.trap("weights_logged_only" if version.names_loss else "weights_of_one", pure=pure_setting)
        if settings["rollout_rs"] is not None and not version.names_loss:
            yield written.trap("bypass_rejects_nothing", pure=pure_setting)


def _format_pure_key(version: VerlVersion) -> str:
    return "loss_type: reinforce" if version.names_loss else f"{version.pure_key}: true"


def _check_v1_trainer(written: VerlConfig) -> Iterator[LintMessage]:
    """Yield findings about settings of bypass mode that verl's V1 trainer ignores or reads from another block."""
    root, settings, use_v1 = written.root, written.settings, written.find("trainer", "use_v1")
    # No finding if rollout and trainer run on separate nodes, because verl then applies bypass mode.
    separate = "async_training" in root or (isinstance(root.get("rollout"), Mapping) and "actor_rollout_ref" in root)
    if separate or (written.version.defaults_to_v1 if use_v1 is None else use_v1) is not True:
        return
    actor, place = ".".join(ACTOR_BLOCK[:-1]), ".".join(ACTOR_BLOCK)
    mode, own = written.find(*ACTOR_BLOCK[:-1], "loss_mode"), written.find(*ACTOR_BLOCK)
    if not written.bypasses:
        if mode == "bypass_mode":
            yield written.trap("wrong_old_policy", at=f"{actor}.loss_mode", bypass=written.place("bypass_mode"))
    elif mode != "bypass_mode":
        pure = settings.get("loss_type") == "reinforce"  # otherwise PPO's ratio is the weight
        keys = ("loss_type", "rollout_is", "rollout_rs") if pure else ("rollout_rs",)
        if lost := " and ".join(key for key in keys if settings[key] is not None):
            found = written.trap("v1_ignores", lost=lost, actor=actor, place=place)
            yield found if "trainer" in root or "actor_rollout_ref" in root else replace(found, level="warning")
    elif not isinstance(own, Mapping):
        yield written.trap("v1_defaults", at=place, block=written.place(""))
    else:
        defaults = dict(written.version.keys) | {"rollout_is": "sequence"}
        for key, value in settings.items():
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


def _check_release(written: VerlConfig) -> Iterator[LintMessage]:
    """Yield findings about required settings that are missing, and about bugs in this version of verl."""
    version, settings, correction = written.version, written.settings, written.correction
    # Corrections require rollout log-probs. Up to 0.8.0, verl does not record them by default.
    corrects = isinstance(correction, Correction) and (correction.weight or correction.gates or written.bypasses)
    rollout = written.find("actor_rollout_ref", "rollout")
    records = not isinstance(rollout, Mapping) or rollout.get("calculate_log_probs", version.records_log_probs)
    if corrects and not records:
        yield written.trap("no_log_probs", at="actor_rollout_ref.rollout.calculate_log_probs")
    if "bypass_old_logprob_for_rollout" in version.keys and written.given:
        yield written.trap("no_configuration")
    sequence = settings.get("rollout_is") == "sequence"
    if version.normalizes_empty and settings.get("rollout_is_batch_normalize") and sequence:
        yield written.trap("counts_empty")
    weight = correction.weight if isinstance(correction, Correction) else None
    if version.icepop and sequence and weight is not None and weight.zero is not None:
        yield written.trap("divides_by_zero")
    if version.empty_loss_is_nan and written.gates:
        yield written.trap("nan_loss", at=written.gate_place(written.gates[0]))


def find_traps(written: VerlConfig, *, keys_only: bool) -> Iterator[LintMessage]:
    """Yield the findings. `keys_only`: check only the keys, because some values are not in the file."""
    yield from _check_keys(written)
    if keys_only:
        return
    for check in (_check_weights, _check_rejection, _check_bypass, _check_v1_trainer):
        yield from check(written)
    rllm = written.find("rllm", "algorithm", BLOCK)  # rLLM's verl_backend.py refuses weights in bypass mode
    if isinstance(rllm, Mapping) and rllm.get("bypass_mode") and rllm.get("tis_mode") is not None:
        yield written.trap("rllm_excludes", at=f"rllm.algorithm.{BLOCK}.tis_mode")
    for check in (_check_veto, _check_release):
        yield from check(written)


class Verl(Framework):
    """verl (volcengine/verl) at one of `VERSIONS` or `RELEASES`."""

    name = "verl"
    columns: Mapping[str, str] = read_table(__file__, "options.yaml")["columns"]

    def __init__(self, version: VerlVersion) -> None:
        self.about = version
        self.version, self.unknown = version.name, version.unknown
        self.note = f"{version.date}; {version.note}" if version.note else version.date
        self.block = ("algorithm",) if version.dialect == "flat" else ("algorithm", "rollout_correction")

    def accepts_keys(self, native: Mapping[str, Any]) -> bool:
        return not self.about.keys.keys().isdisjoint(native)

    def correction(self, native: Mapping[str, Any]) -> Correction:
        return read_correction(native, self.about)

    def native(self, correction: Correction) -> tuple[dict[str, Any], list[str]]:
        return write_keys(correction, self.about)

    def lint(self, native: Mapping[str, Any], unknown: Collection[str] = ()) -> list[LintMessage]:
        return list(find_traps(VerlConfig(native, self.about), keys_only=bool(unknown)))

    def is_default_file(self, name: str) -> bool:
        group, _, last = name.rpartition("/")
        if BLOCK in group or group == "algorithm":
            return last in (BLOCK, "null")
        return bool(group) or re.fullmatch(r"ppo_\w*trainer|_generated_\w+|rollout_correction", last) is not None

    def known_names(self, native: Mapping[str, Any], text: str = "") -> dict[str, Any]:
        return with_rllm(native)

    def reads(self, place: tuple[str, ...], native: Mapping[str, Any]) -> bool:
        return place[:-1] in (find_path(native, self.about), ACTOR_BLOCK) and place[-1] in self.about.keys

    def gate_places(self, native: Mapping[str, Any], correction: Correction) -> list[str]:
        written = VerlConfig(native, self.about)
        return [written.gate_place(gate) for gate in correction.gates]

    def replay(self, table: pa.Table, correction: Correction, options: ReplayOptions = REPLAY_DEFAULTS) -> Replay:
        from mismatchctl.frameworks.step import Step
        from mismatchctl.frameworks.verl.metrics import replay_step

        fitted, problems = fit_correction(correction, self.about)
        if problems:
            raise ConfigError(f"{correction.name}: {'; '.join(problems)}")
        step = Step.read(table, options.dtype, self.columns)
        applied = self.about.dialect != "flat" or measured_correction(correction) is correction
        return replay_step(step, fitted, self.about, options.micro_batch_size, applied=applied)

    def meanings(self) -> list[LoggedMetric]:
        from mismatchctl.frameworks.verl.metrics import list_meanings

        return list_meanings(self.about)


CONFIG_CLASS = "RolloutCorrectionConfig"
Keys = dict[str, Any]


def _expand_factory(factory: Sequence[Any], given: Keys) -> Keys:
    """Return the keys that a method of verl's RolloutCorrectionConfig sets. `factory`: its entry in factories.yaml."""
    level, rejection, fixed, parameters = factory
    values = parameters | given
    made: Keys = {"rollout_is": level, "rollout_rs": rejection}
    if level is not None:
        made["rollout_is_threshold"] = values.get("is_threshold", values.get("threshold"))
    if rejection is not None:
        made["rollout_rs_threshold"] = values.get("rs_threshold", values.get("threshold"))
    if "threshold_lower" in values:  # a class method for IcePop
        made["rollout_is_threshold"] = f"{values['threshold_lower']}_{values['threshold']}"
    names = {"rs_threshold_lower": "rollout_rs_threshold_lower", "veto_threshold": "rollout_token_veto_threshold"}
    made |= {key: values[name] for name, key in names.items() if name in values}
    return {**made, **fixed}


def read_call(call: PythonCall) -> Keys:
    if call.computed:
        raise ConfigError(f"line {call.line}: in the call of {CONFIG_CLASS}, write {call.computed[0]} as KEY=CONSTANT")
    if call.brings_more:
        raise ConfigError(f"line {call.line}: {UNPACKING_NOT_READ}")
    if not call.function:  # a call of the class itself. Its default of rollout_is differs from the YAML
        return {BLOCK: call.given if call.partial else {"rollout_is": "sequence"} | call.given}
    every = read_table(__file__, "factories.yaml").values()
    known = [factories[call.function] for factories in every if call.function in factories]
    if not known:
        hint = suggestion(call.function, {name for factories in every for name in factories})
        raise ConfigError(f"line {call.line}: {CONFIG_CLASS}: unknown function {call.function}{hint}")
    fitting = [factory for factory in known if call.given.keys() <= factory[-1].keys()]
    if not fitting:
        accepted = ", ".join(known[0][-1]) or "no arguments"
        raise ConfigError(f"line {call.line}: {CONFIG_CLASS}.{call.function} only accepts {accepted}")
    return {BLOCK: _expand_factory(fitting[0], call.given)}


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
    layouts=(LAYOUT, TEXT_LAYOUT),
    classes={CONFIG_CLASS: read_call},
    factory=lambda version, name: {
        "rollout_correction": _expand_factory(read_table(__file__, "factories.yaml")[version][name], {})
    },
)
