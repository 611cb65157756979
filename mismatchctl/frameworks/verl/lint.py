"""Traps in verl's rollout correction: the configuration differs from verl's behavior."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.lint import (
    LintMessage,
    check_advice,
    check_bounds,
    find_named_key,
    format_decimal,
    replace_gate,
)
from mismatchctl.frameworks.verl.configuration import ACTOR_BLOCK, VerlConfig, find_rs_option, find_unread_keys
from mismatchctl.frameworks.verl.versions import VERSIONS, VerlVersion

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


def _check_rejection_off(written: VerlConfig) -> Iterator[LintMessage]:
    settings = written.settings
    if written.version.dialect == "flat":
        if settings["rollout_is_threshold_lower"] is not None and settings["rollout_is_mode"] == "truncate":
            yield written.trap("no_lower_bound")
    elif settings["rollout_rs"] is None:
        keys = ("rollout_rs_threshold", "rollout_rs_threshold_lower")
        yield from (written.trap("rejects_nothing", key) for key in keys if settings.get(key) is not None)


def _check_bounds(written: VerlConfig) -> Iterator[LintMessage]:
    if isinstance(written.correction, Correction):
        place = written.place("rollout_is_threshold")
        yield from check_bounds(written.correction, place, written.gate_place, written.source)


def _check_direction(written: VerlConfig) -> Iterator[LintMessage]:
    """Check for the direction of k1 (rollout minus train): "lo_hi" bounds rollout/train."""
    if isinstance(written.correction, ConfigError):
        return
    for index, gate in enumerate(written.correction.gates):
        low, high = gate.keep
        if gate.statistic != "k1" or low is None or high is None or not low <= high:
            continue
        kept = f"{math.exp(-high):.6g} to {math.exp(-low):.6g}"
        option = find_rs_option(gate)
        if abs(low + high) <= _NEGLIGIBLE_SHIFT * (high - low):
            yield written.trap("reads_reversed", option=option, kept=kept)
        else:
            swap = replace_gate(written.correction, index, gate.model_copy(update={"keep": (-high, -low)}))
            bounds = [f"{math.exp(bound):.6g}" for bound in (low, high, -high, -low)]
            yield written.trap("reversed", instead=swap, option=option, kept=kept, bounds=bounds)


def _check_documented_lower_bound(written: VerlConfig) -> Iterator[LintMessage]:
    """Check for the lower bound: verl documents 1/threshold, but presets such as seq_mis and geo_mis do not use it."""
    flat = written.version.dialect == "flat"
    key = "rollout_is_threshold_lower" if flat else "rollout_rs_threshold_lower"
    if isinstance(written.correction, ConfigError) or written.settings.get(key) is None:
        return
    for index, gate in enumerate(written.correction.gates):
        low, high = gate.keep
        if gate.is_veto or low is None or high is None or high <= 0 or math.isclose(low * high, 1, rel_tol=1e-9):
            continue
        instead = replace_gate(written.correction, index, gate.model_copy(update={"keep": (1 / high, high)}))
        yield replace(
            written.trap("lower_differs", key, instead=instead, low=low, inverse=1 / high), source=_MATH_SOURCE
        )


def _check_advice(written: VerlConfig) -> Iterator[LintMessage]:
    if isinstance(written.correction, ConfigError):
        return
    newer = next(version for version in VERSIONS if version.normalizes)
    normalizing = f"verl@{written.version.name} cannot: take verl@{newer.name} or later"
    if written.version.normalizes:
        normalizing = "write rollout_is_batch_normalize: true"
    yield from check_advice(written.correction, written.place("rollout_is_threshold"), written.gate_place, normalizing)


def _check_shared_threshold(written: VerlConfig) -> Iterator[LintMessage]:
    if written.version.dialect != "estimator" or isinstance(written.correction, ConfigError):
        return
    statistics = {gate.statistic for gate in written.correction.gates}
    if "k1" in statistics and len(statistics) > 1 and "," not in str(written.settings["rollout_rs_threshold"]):
        yield written.trap("one_threshold")


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
    """Check for bypass mode in the V1 trainer, which only copies the rollout's log-probs.

    `_compute_old_log_prob` in trainer/ppo/v1/trainer_base.py does not call `apply_bypass_mode`. The legacy trainer and
    the asynchronous ones (experimental/separation/ray_trainer.py) do.
    """
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


def _rllm(written: VerlConfig) -> Iterator[LintMessage]:
    """Check for weights in bypass mode, which rLLM refuses (rllm/trainer/verl/verl_backend.py)."""
    given = written.find("rllm", "algorithm", "rollout_correction")
    if isinstance(given, Mapping) and given.get("bypass_mode") and given.get("tis_mode") is not None:
        yield written.trap("rllm_excludes", at="rllm.algorithm.rollout_correction.tis_mode")


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


def _check_log_probs(written: VerlConfig) -> Iterator[LintMessage]:
    """Check for missing rollout log-probs, which corrections require. They are off by default until 0.8.0."""
    rollout, correction = written.find("actor_rollout_ref", "rollout"), written.correction
    if isinstance(correction, ConfigError) or not (correction.weight or correction.gates or written.bypasses):
        return
    if isinstance(rollout, Mapping) and not rollout.get("calculate_log_probs", written.version.records_log_probs):
        yield written.trap("no_log_probs", at="actor_rollout_ref.rollout.calculate_log_probs")


def _check_release(written: VerlConfig) -> Iterator[LintMessage]:
    """Check for bugs of a release that do not depend on settings."""
    version = written.version
    if version.bypass_key == "bypass_old_logprob_for_rollout" and version.dialect == "ratio" and written.given:
        yield written.trap("no_configuration")
    by_sequence = written.settings["rollout_is"] == "sequence"
    if version.normalizes_empty and written.settings.get("rollout_is_batch_normalize") and by_sequence:
        yield written.trap("counts_empty")
    correction = written.correction
    if not isinstance(correction, Correction):
        return
    if version.icepop and by_sequence and correction.weight is not None and correction.weight.zero is not None:
        yield written.trap("divides_by_zero")
    if version.agg_denominators == "global" and correction.gates:
        yield written.trap("nan_loss", at=written.gate_place(correction.gates[0]))


RULES: tuple[Callable[[VerlConfig], Iterator[LintMessage]], ...] = (
    _check_unknown_keys,
    _check_quoted_numbers,
    _check_refusal,
    _check_weights_off,
    _check_rejection_off,
    _check_bounds,
    _check_direction,
    _check_documented_lower_bound,
    _check_shared_threshold,
    _check_bypass,
    _check_v1_trainer,
    _rllm,
    _check_veto,
    _check_log_probs,
    _check_release,
    _check_advice,
)

SURE_RULES = (_check_unknown_keys, _check_quoted_numbers)
"""Rules that only depend on keys in the file, for files that do not contain every value."""
