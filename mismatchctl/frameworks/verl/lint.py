"""Traps in verl's rollout correction: the configuration differs from verl's behavior."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

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
        reason = f"must hold keys and values, found {written.block!r}"
        yield written.finding("error", "", reason, "write rollout_is and the rest under it")
    for item in find_unread_keys(written.root, version):
        what = "does not have this key" + (" and does not start" if version.dialect != "flat" else ": nothing reads it")
        fix = f"leave it out{item.hint}"
        if item.refused:
            yield written.finding("error", "", f"verl@{version.name} {what}", fix, ".".join(item.place))


def _check_quoted_numbers(written: VerlConfig) -> Iterator[LintMessage]:
    for key in written.texts:
        consequence = "the quotes make it text, which verl compares with numbers: it stops with a TypeError"
        yield written.finding("error", key, consequence, f"write {written.section[key]} without quotes")
    for key, usual in written.version.keys.items():
        if not (isinstance(usual, bool) and isinstance(text := written.section.get(key), str)):
            continue
        if "$" in text:  # a pointer or a variable
            consequence = f"stands for what this file does not say, {text}: it is taken for true here"
            yield written.finding("warning", key, consequence, "give the configuration that the training prints")
        else:
            consequence = f"is the text {text!r}, and any text is true to verl"
            yield written.finding("error", key, consequence, "write true or false without quotes")


def _check_refusal(written: VerlConfig) -> Iterator[LintMessage]:
    if isinstance(written.correction, ConfigError):
        message = str(written.correction)
        key = find_named_key(message, written.version.keys)
        if "option '" in message or message == "float division by zero":
            key = "rollout_rs_threshold"
        if message == "float division by zero" and written.version.dialect == "flat":
            key = "rollout_is_threshold"
        yield written.finding("error", key, f"verl refuses it: {message}", "give a value that verl accepts")


def _check_weights_off(written: VerlConfig) -> Iterator[LintMessage]:
    given, settings = written.given, written.settings
    flat = written.version.dialect == "flat"
    wanted = given.get("rollout_is") if flat else settings["rollout_is"]
    if (
        flat
        and settings["rollout_is_threshold"] is None
        and "rollout_is_threshold" not in given
        and not wanted
        and given
    ):
        consequence = "is not here: where verl's default, null, stands, nothing is computed, rejected or vetoed"
        yield written.finding("warning", "rollout_is_threshold", consequence, "give a number; 2.0 is usual")
    elif wanted and settings["rollout_is_threshold"] is None:
        consequence = "null switches everything off in silence" if flat else "null switches the weights off in silence"
        yield written.finding("error", "rollout_is_threshold", consequence, "give a number; 2.0 is usual")
    elif flat and not wanted and settings["rollout_is_threshold"] is not None:
        how = "is false" if "rollout_is" in given else "is absent, and verl's default is false"
        consequence = f"{how}: weights are logged but not applied, while rejection and veto are"
        yield written.finding("warning", "rollout_is", consequence, "write rollout_is: true to apply them")
    elif not flat and "rollout_is" not in given:
        consequence = (
            'the default is null in verl\'s YAML, but "sequence" where RolloutCorrectionConfig is made in Python'
        )
        yield written.finding("info", "rollout_is", consequence, "say it: rollout_is: null, token or sequence")


def _check_rejection_off(written: VerlConfig) -> Iterator[LintMessage]:
    settings = written.settings
    if written.version.dialect == "flat":
        if settings["rollout_is_threshold_lower"] is not None and settings["rollout_is_mode"] == "truncate":
            consequence = "mode truncate has no lower bound: only statistics look at it"
            fix = "leave it out, or write rollout_is_mode: mask"
            yield written.finding("warning", "rollout_is_threshold_lower", consequence, fix)
    elif settings["rollout_rs"] is None:
        for key in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
            if settings.get(key) is not None:
                fix = "name what to reject by: rollout_rs"
                yield written.finding("error", key, "without rollout_rs it rejects nothing", fix)


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
        if abs(low + high) <= _NEGLIGIBLE_SHIFT * (high - low):
            consequence = (
                f"{find_rs_option(gate)} is log rollout/train: train/rollout is kept in {kept}, "
                f"and rollout_rs_{find_rs_option(gate)}_fraction_high counts ratios below it"
            )
            yield written.finding("info", "rollout_rs_threshold", consequence, "read those metrics the other way round")
        else:
            consequence = (
                f'"lo_hi" of {find_rs_option(gate)} bounds rollout/train, the reverse of what the documents say: '
                f"train/rollout is kept in {kept}"
            )
            swapped = f'"{math.exp(-high):.6g}_{math.exp(-low):.6g}"'
            fix = f"for train/rollout in {math.exp(low):.6g} to {math.exp(high):.6g} write {swapped}"
            swap = gate.model_copy(update={"keep": (-high, -low)})
            instead = replace_gate(written.correction, index, swap)
            yield written.finding("warning", "rollout_rs_threshold", consequence, fix, instead=instead)


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
        consequence = f"keeps ratios from {low:g}, where verl's document has 1/threshold, {1 / high:g}"
        instead = replace_gate(written.correction, index, gate.model_copy(update={"keep": (1 / high, high)}))
        fix = "write null for the document's bound, or keep it as the code has it"
        yield LintMessage("info", written.place(key), consequence, fix, _MATH_SOURCE, instead)


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
        consequence = "one threshold for all options: for k1 it bounds a ratio, for k2 and k3 a divergence"
        yield written.finding("warning", "rollout_rs_threshold", consequence, "give one for each option, with commas")


def _check_bypass(written: VerlConfig) -> Iterator[LintMessage]:
    version, settings = written.version, written.settings
    if version.dialect == "flat":
        return
    pure = version.is_pure(settings)
    if not written.bypasses:
        if pure:
            key = version.pure_key
            consequence = f"without {version.bypass_key} verl ignores it: the loss stays PPO anchored on train"
            yield written.finding("error", key, consequence, f"write {version.bypass_key}: true")
        return
    if not pure and settings["rollout_is"] is not None:
        why = (
            "PPO's own ratio is taken to rollout, weights are only logged"
            if version.names_loss
            else "all weights are exactly 1"
        )
        consequence = f"in bypass mode with PPO it changes nothing: {why}"
        yield written.finding(
            "warning", "rollout_is", consequence, f"leave it out, or train with {_format_pure_key(version)}"
        )
    if not pure and not version.names_loss and settings["rollout_rs"] is not None:
        consequence = "in bypass mode with PPO nothing is rejected: rollout is compared with itself, or not at all"
        yield written.finding(
            "error", "rollout_rs", consequence, f"leave it out, or train with {_format_pure_key(version)}"
        )


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
    actor, function = ACTOR_BLOCK[:-1], "PPOTrainer._compute_old_log_prob (trainer/ppo/v1/trainer_base.py)"
    if not written.bypasses:
        if written.find(*actor, "loss_mode") == "bypass_mode":
            consequence = "takes the recomputed log-probs for the rollout's: nothing of the mismatch is corrected"
            fix = f"write {written.place('bypass_mode')}: true, or another loss_mode"
            yield written.finding("error", "", consequence, fix, ".".join((*actor, "loss_mode")))
        return
    own = written.find(*actor, "rollout_correction")
    place = ".".join((*actor, "rollout_correction"))
    if written.find(*actor, "loss_mode") != "bypass_mode":
        lost = [key for key in ("loss_type", "rollout_is", "rollout_rs") if written.settings[key] is not None]
        lost = [key for key in lost if key != "loss_type" or written.settings[key] == "reinforce"]
        if written.settings["loss_type"] == "ppo_clip":
            lost = [key for key in lost if key == "rollout_rs"]  # PPO's ratio is the weight
        if not lost:
            return
        consequence = (
            f"the V1 trainer (verl's default) ignores {' and '.join(lost)}: {function} only copies the rollout's "
            "log-probs, and the loss stays vanilla PPO"
        )
        fix = (
            f"set {'.'.join(actor)}.loss_mode: bypass_mode and repeat these settings in {place}, "
            "or take the legacy trainer with trainer.use_v1: false"
        )
        yield written.finding("error" if written.full else "warning", "bypass_mode", consequence, fix)
    elif not isinstance(own, Mapping):
        consequence = "the V1 trainer reads these settings here; absent, they are sequence weights truncated at 2, PPO"
        yield written.finding("error", "", consequence, f"repeat {written.place('')} here", place)
    else:
        defaults = dict(written.version.keys) | {"rollout_is": "sequence"}
        for key, value in written.settings.items():
            if key != "bypass_mode" and (mine := own.get(key, defaults[key])) != value:
                consequence = f"the V1 trainer takes {mine!r} from here, not {value!r} from {written.place(key)}"
                yield written.finding("error", "", consequence, "write the same in both places", f"{place}.{key}")


def _rllm(written: VerlConfig) -> Iterator[LintMessage]:
    """Check for weights in bypass mode, which rLLM refuses (rllm/trainer/verl/verl_backend.py)."""
    given = written.find("rllm", "algorithm", "rollout_correction")
    if isinstance(given, Mapping) and given.get("bypass_mode") and given.get("tis_mode") is not None:
        consequence = "rLLM's verl backend raises ValueError: bypass_mode and tis_mode exclude each other"
        place = "rllm.algorithm.rollout_correction.tis_mode"
        yield written.finding("error", "", consequence, "set bypass_mode: false, or leave tis_mode out", place)


def _check_veto(written: VerlConfig) -> Iterator[LintMessage]:
    key = written.veto_key
    threshold = written.settings[key] if key else None
    if key is None or not isinstance(threshold, int | float) or isinstance(written.correction, ConfigError):
        return
    if not threshold > 0:
        yield written.finding(
            "error", key, "nothing is below it, ratios are above 0: it vetoes nothing", "1.0e-4 is usual; null is off"
        )
        return
    if written.correction.loss == "policy_gradient" and written.settings["rollout_rs"] is None:
        consequence = "the policy-gradient loss takes the mask of rejection only with rollout_rs: the veto is ignored"
        yield written.finding("error", key, consequence, "set rollout_rs too, with a threshold as wide as you like")
    elif written.correction.loss == "ppo_bypass":
        consequence = "in bypass mode with PPO nothing is vetoed"
        yield written.finding(
            "error", key, consequence, f"leave it out, or train with {_format_pure_key(written.version)}"
        )
    consequence = (
        f"a token vetoes its sequence when its ratio train/rollout, not its probability, is below {threshold:g}"
    )
    gate = f"{{statistic: train_prob, level: min, keep: [{format_decimal(threshold)}, null]}}"
    fix = f"for the probability see the gate {gate}"
    yield written.finding("info", key, consequence, fix)


def _check_log_probs(written: VerlConfig) -> Iterator[LintMessage]:
    """Check for missing rollout log-probs, which corrections require. They are off by default until 0.8.0."""
    rollout, correction = written.find("actor_rollout_ref", "rollout"), written.correction
    if isinstance(correction, ConfigError) or not (correction.weight or correction.gates or written.bypasses):
        return
    if isinstance(rollout, Mapping) and not rollout.get("calculate_log_probs", written.version.records_log_probs):
        place = "actor_rollout_ref.rollout.calculate_log_probs"
        consequence = "the engine returns no log-probs: nothing is corrected, nothing is logged"
        yield written.finding("error", "", consequence, "write calculate_log_probs: true", place)


def _check_release(written: VerlConfig) -> Iterator[LintMessage]:
    """Check for bugs of a release that do not depend on settings."""
    version = written.version
    if version.bypass_key == "bypass_old_logprob_for_rollout" and version.dialect == "ratio" and written.given:
        consequence = (
            "between 2025-11-07 and 2025-11-11 the trainer calls the correction without its configuration: TypeError"
        )
        yield written.finding("warning", "", consequence, "take c281ea779 (2025-11-11) or a later verl")
    normalizes = written.settings.get("rollout_is_batch_normalize") and written.settings["rollout_is"] == "sequence"
    if version.normalizes_empty and normalizes:
        consequence = "sequences without a valid token count as weight 0 in the mean: all others are scaled up"
        fix = "take verl of 2025-11-25 or later"
        yield written.finding("warning", "rollout_is_batch_normalize", consequence, fix)
    correction = written.correction
    weight = correction.weight if isinstance(correction, Correction) else None
    zeroes = weight is not None and weight.zero is not None
    if version.icepop and zeroes and written.settings["rollout_is"] == "sequence":
        consequence = (
            "if the bounds set the weights of all sequences of a batch to 0, compute_is_metrics divides by zero and "
            "the run stops (ZeroDivisionError): the ratio of a long sequence is easily outside them"
        )
        fix = "use rollout_is: token with these bounds, or one upper bound"
        yield written.finding("warning", "rollout_is_threshold", consequence, fix)
    if version.agg_denominators == "global" and not isinstance(correction, ConfigError) and correction.gates:
        consequence = "one micro-batch that is rejected whole makes the loss nan (FSDP actor)"
        fix = "reject less, or take a later verl"
        yield LintMessage("warning", written.gate_place(correction.gates[0]), consequence, fix, written.source)


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
