"""Traps in slime's and Miles' arguments: the file or command line differs from the code's behavior."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.errors import ConfigError, option
from mismatchctl.frameworks.lint import (
    Level,
    LintMessage,
    check_advice,
    check_bounds,
    find_named_key,
    format_decimal,
    is_text_of_number,
    replace_gate,
)
from mismatchctl.frameworks.slime.arguments import (
    DOCUMENTED_ONLY,
    MIS_FIELDS,
    NUMBER_FIELDS,
    OLD_KEYS,
    Arguments,
    SlimeVersion,
    find_unread_keys,
    make_correction,
    normalize_key,
    read_arguments,
)

_ARGUMENT_NAMES = tuple(field.name for field in fields(Arguments))


@dataclass(frozen=True)
class SlimeConfig:
    """Arguments as written by the user.

    Attributes:
        root: the mapping.
        version: the slime or Miles version.
    """

    root: Mapping[str, Any]
    version: SlimeVersion

    @cached_property
    def keys(self) -> dict[str, str]:
        """Spelling of each argument in the file: `--use-tis` is `use_tis`."""
        return {normalize_key(str(key)): str(key) for key in self.root}

    @cached_property
    def given(self) -> dict[str, Any]:
        """Values by argument name. Numbers in quotes are converted."""
        values = {name: self.root[key] for name, key in self.keys.items() if key in self.root}
        return {name: float(value) if name in self.texts else value for name, value in values.items()}

    @cached_property
    def texts(self) -> list[str]:
        """Arguments whose number is a string in YAML."""
        return [
            name for name, key in self.keys.items() if name in NUMBER_FIELDS and is_text_of_number(self.root.get(key))
        ]

    @cached_property
    def arguments(self) -> Arguments | ConfigError:
        """The Arguments that slime reads, or the error that it raises."""
        ignored = {item.key for item in find_unread_keys(self.root, self.version)}
        try:
            named = {name: value for name, value in self.given.items() if self.keys[name] not in ignored}
            return read_arguments(named, self.version)
        except ConfigError as error:
            return error

    @cached_property
    def correction(self) -> Correction | ConfigError:
        """The arguments as a Correction, or the error."""
        if isinstance(self.arguments, ConfigError):
            return self.arguments
        try:
            return make_correction(self.arguments, self.version.framework, "mask")
        except ConfigError as error:
            return error

    @property
    def is_async(self) -> bool:
        """True if the launch runs the asynchronous training loop."""
        return "train_async" in str(self.root.get("<program>", ""))

    @property
    def weight_place(self) -> str:
        """Place of the upper bound of the weights."""
        mis = isinstance(self.arguments, Arguments) and self.arguments.function == "mis"
        return self.place("tis_upper_bound" if mis else "tis_clip")

    @property
    def weighs_with_mis(self) -> bool:
        """True if mis.py computes weights, judging by the arguments."""
        return bool(self.given.get("use_tis")) and any(name in self.given for name in MIS_FIELDS)

    def place(self, name: str) -> str:
        """Return the spelling of an argument in the file."""
        return self.keys.get(name, name)

    def gate_place(self, gate: Gate) -> str:
        """Return the place of a gate's bounds."""
        if gate.is_veto:
            return self.place("rs_veto_threshold")
        assert isinstance(self.arguments, Arguments)
        masks = self.arguments.tis_mode == "mask" and gate.keep == self.arguments.tis_bounds
        given = any(self.given.get(name) is not None for name in ("rs_lower_bound", "rs_upper_bound"))
        return self.place("tis_upper_bound" if masks or not given else "rs_upper_bound")

    def finding(
        self, level: Level, name: str, consequence: str, fix: str, instead: Correction | None = None
    ) -> LintMessage:
        """Create a finding at an argument."""
        return LintMessage(level, self.place(name), consequence, fix, self.source, instead)

    @property
    def source(self) -> str:
        """The relevant code."""
        return (
            f"{self.version.framework} {self.version.commit[:8]} ({self.version.label}), mis.py, loss.py, arguments.py"
        )


def _check_quoted_numbers(written: SlimeConfig) -> Iterator[LintMessage]:
    for name in written.texts:
        value = written.root[written.keys[name]]
        consequence = f"YAML reads {value} as text, which torch takes for no number: the run stops with an error"
        yield written.finding("error", name, consequence, f"write {format_decimal(value)}, without quotes")


def _check_unknown_keys(written: SlimeConfig) -> Iterator[LintMessage]:
    for item in find_unread_keys(written.root, written.version):
        name = next(name for name, key in written.keys.items() if key == item.key)
        if name in DOCUMENTED_ONLY:
            consequence = (
                f"is not read by {written.version.framework} of {written.version.label}: {DOCUMENTED_ONLY[name]}"
            )
            yield written.finding("error", name, consequence, "write what the code reads")
        else:
            consequence = f"nothing reads it, and nothing says so{item.hint}"
            yield written.finding("error", name, consequence, "correct the spelling, or leave it out")
    for name, key in written.keys.items():
        if name in MIS_FIELDS and key.startswith("--"):
            consequence = "is no flag of the command line, which refuses it"
            yield written.finding("error", name, consequence, f"write {name} into the file of --custom-config-path")


def _check_old_keys(written: SlimeConfig) -> Iterator[LintMessage]:
    """Check for the names of slime from 2025-10-19 to 2025-11-16."""
    if written.version.old_keys and any(name in OLD_KEYS for name in written.keys):
        consequence = (
            "names of slime from 2025-10-19 to 2025-11-16, read as such: v0.2.0 and later versions read tis_level, "
            "tis_mode and their bounds, and nothing reads these"
        )
        fix = "rename them if your slime is v0.2.0 or later, and add use_rs: true for the veto"
        yield written.finding("warning", "mis_level", consequence, fix)


def _check_refusal(written: SlimeConfig) -> Iterator[LintMessage]:
    if isinstance(written.correction, ConfigError):
        message = str(written.correction)
        name = find_named_key(message.partition(": ")[0], _ARGUMENT_NAMES) or find_named_key(message, _ARGUMENT_NAMES)
        if "tis_batch_normalize" in message and "geometric" in message:
            name = "tis_batch_normalize"
        fix = "write tis_batch_normalize: false" if name == "tis_batch_normalize" else "give what mis.py accepts"
        yield written.finding("error", name, f"{written.version.framework} refuses it: {message}", fix)


def _check_switches(written: SlimeConfig) -> Iterator[LintMessage]:
    given = written.given
    if given.get("true_on_policy_mode"):
        consequence = "the log-probs of both sides are meant to be the same bits, and nothing here holds them to it"
        fix = "check a dump: mismatchctl gate DUMP --expect-bitwise"
        yield written.finding("info", "true_on_policy_mode", consequence, fix)
    if written.weighs_with_mis and given.get("get_mismatch_metrics"):
        consequence = "get_mismatch_metrics alone would only measure, but this turns weights and rejection on"
        yield written.finding("warning", "use_tis", consequence, "write use_tis: false to only measure")
    elif written.weighs_with_mis:
        consequence = "wins over the command line: it corrects even where only --get-mismatch-metrics is passed"
        yield written.finding("info", "use_tis", consequence, "write use_tis: false where you only want to measure")
    if written.weighs_with_mis and given.get("use_rollout_logprobs"):
        consequence = (
            "PPO is anchored on rollout already and weights are multiplied on top: the mismatch is corrected twice. "
            "The check against it sees --use-tis of the command line only"
        )
        yield written.finding("error", "use_rollout_logprobs", consequence, "drop it, or write use_tis: false")
    if given.get("use_rs") and not given.get("use_tis"):
        consequence = "without use_tis nothing runs: no weights, no rejection, no veto, no normalization"
        level: Level = "warning" if "use_tis" in given else "error"  # said, or forgotten
        yield written.finding(level, "use_rs", consequence, "write use_tis: true, or use_rs: false")


def _check_veto(written: SlimeConfig) -> Iterator[LintMessage]:
    threshold = written.given.get("rs_veto_threshold")
    if not isinstance(threshold, int | float) or not written.weighs_with_mis:
        return
    if not written.given.get("use_rs"):
        consequence = "the veto runs only inside rejection, and use_rs is off: it vetoes nothing"
        fix = "write use_rs: true, or rs_veto_threshold: null"
        yield written.finding("error", "rs_veto_threshold", consequence, fix)
    elif threshold <= 0:
        consequence = "ratios are above 0: it vetoes nothing"
        yield written.finding("error", "rs_veto_threshold", consequence, "1.0e-4 is usual; null is off")
    else:
        consequence = (
            f"a token vetoes its sequence when its ratio train/rollout is below {threshold:g}; "
            "the documents say its probability"
        )
        keep = f"[{format_decimal(threshold)}, null]"
        fix = f"for the documents' veto see the gate {{statistic: train_prob, level: min, keep: {keep}}}"
        yield written.finding("warning", "rs_veto_threshold", consequence, fix, _documented_correction(written))


def _documented_correction(written: SlimeConfig) -> Correction | None:
    """Return the correction with the veto on probabilities that the documentation describes."""
    correction = written.correction
    if isinstance(correction, ConfigError):
        return None
    index = next((index for index, gate in enumerate(correction.gates) if gate.is_veto), None)
    if index is None:
        return None
    veto = correction.gates[index]
    return replace_gate(correction, index, veto.model_copy(update={"statistic": "train_prob"}))


def _check_advice(written: SlimeConfig) -> Iterator[LintMessage]:
    correction, given = written.correction, written.arguments
    if isinstance(correction, ConfigError) or isinstance(given, ConfigError):
        return
    normalizing = ""  # of sequence weights: over a micro-batch of one sequence it cancels them
    yield from check_advice(correction, written.weight_place, written.gate_place, normalizing)


def _check_denominators(written: SlimeConfig) -> Iterator[LintMessage]:
    """Check for rejection since 2026: rejected tokens stay in the denominators, which is undocumented."""
    if written.version.rollout_denominators and isinstance(written.correction, Correction) and written.correction.gates:
        consequence = (
            f"rejected tokens stay in the denominators in {written.version.framework} of {written.version.label}: the "
            "loss shrinks by the share that is rejected. The presets of the articles take them out"
        )
        fix = (
            f"raise the learning rate by that share, or see the other way with {option('framework')} "
            f"{written.version.framework}@2026-01"
        )
        yield written.finding("warning", "use_rs", consequence, fix)


def _check_product(written: SlimeConfig) -> Iterator[LintMessage]:
    given = written.arguments
    if isinstance(given, Arguments) and given.rejects and given.rs_level == "sequence":
        consequence = (
            "slime's page calls it the mean weight of the sequence, but compute_log_ratio in mis.py takes the product "
            "of the ratios, which leaves any interval as responses grow"
        )
        fix = "write rs_level: geometric for a mean"
        yield written.finding("warning", "rs_level", consequence, fix)


_OUTCOMES = {
    (2.0, True, True): ("1", False),
    (1.5, True, True): ("2", True),
    (1.5, False, True): ("3", True),
    (1.5, False, False): ("4", False),
}
"""Upper bound, normalization, geometric rejection within 0.99..1.001 -> number and outcome."""
_ARTICLE = "Let Speed Be With Stability (Training-Inference Mismatch with Miles), LMSYS, 2026-01-16: MoE runs"


def _check_outcome(written: SlimeConfig) -> Iterator[LintMessage]:
    """Check for the four configurations that were tested on a mixture of experts."""
    given = written.arguments
    if not isinstance(given, Arguments) or not given.weighs or given.function != "mis" or given.tis_level != "token":
        return
    rejects = given.rejects and given.rs_level == "geometric" and given.rs_bounds == (0.99, 1.001)
    if given.tis_mode == "mask" or given.rejects is not rejects:
        return
    known = _OUTCOMES.get((given.tis_bounds[1], given.tis_batch_normalize, rejects))
    if known is None:
        return
    number, held = known
    outcome = "held" if held else "collapsed"
    consequence = (
        f"these bounds are configuration {number} of the article on Miles, which {outcome} on a mixture of experts"
    )
    fix = "keep them" if held else "take tis_upper_bound 1.5 with geometric rejection within 0.99..1.001, which held"
    level: Level = "info" if held else "warning"
    yield LintMessage(level, written.place("tis_upper_bound"), consequence, fix, _ARTICLE)


def _check_forward_only(written: SlimeConfig) -> Iterator[LintMessage]:
    """Check Miles' requirements on asynchronous PPO and --skip-actor-forward-only."""
    given = written.given
    if not written.version.finite:
        return
    if given.get("skip_actor_forward_only"):
        others = [name for name in ("keep_old_actor", "true_on_policy_mode") if given.get(name)]
        replays = (
            ("use_indexer_replay", "use_rollout_indexer_replay"),
            ("use_routing_replay", "use_rollout_routing_replay"),
        )
        others += [name for name, rollout in replays if given.get(name) and not given.get(rollout)]
        for name in others:
            consequence = f"validate_skip_actor_forward_only in miles/utils/arguments.py refuses {name}"
            yield written.finding("error", "skip_actor_forward_only", consequence, f"leave one of the two out: {name}")
        if not given.get("use_rollout_logprobs"):
            consequence = "the current policy is its own old policy: the PPO ratio is 1, and nothing is clipped"
            fix = "add --use-rollout-logprobs to anchor PPO on the rollout"
            yield written.finding("info", "skip_actor_forward_only", consequence, fix)
    corrects = any(given.get(name) for name in ("use_rollout_logprobs", "use_tis", "keep_old_actor"))
    if written.is_async and given.get("advantage_estimator") == "ppo" and not corrects:
        consequence = (
            "validate_async_off_policy_correction in miles/utils/arguments.py refuses asynchronous PPO without one"
        )
        fix = "pass --use-rollout-logprobs, --use-tis or --keep-old-actor"
        yield written.finding("error", "advantage_estimator", consequence, fix)


def _check_lower_bound(written: SlimeConfig) -> Iterator[LintMessage]:
    given = written.arguments
    if isinstance(given, ConfigError) or given.function != "mis" or not written.weighs_with_mis:
        return
    low, high = given.rs_bounds if given.use_rs else given.tis_bounds
    if given.rejects and given.rs_lower_bound is None:
        origin = "tis_lower_bound" if given.tis_lower_bound is not None else "1 / tis_upper_bound"
        consequence = (
            f"rs_lower_bound is null and falls back to {origin}: rejection keeps {given.rs_level} ratios from {low:g}"
        )
        fix = "write rs_lower_bound: 0 to reject above only, or the bound you mean"
        yield written.finding("warning", "tis_lower_bound", consequence, fix)
    elif given.tis_mode == "truncate" and given.tis_lower_bound is not None:
        consequence = "tis_mode truncate has no lower bound: it does nothing"
        yield written.finding("warning", "tis_lower_bound", consequence, "write null, or tis_mode: clip")
    if given.rejects and given.rs_upper_bound is None:
        consequence = (
            f"rs_upper_bound is null and falls back to tis_upper_bound: {given.rs_level} ratios above {high:g} go"
        )
        fix = "write rs_upper_bound: the bound you mean, or .inf for none"
        yield written.finding("warning", "tis_upper_bound", consequence, fix)


def _check_normalization(written: SlimeConfig) -> Iterator[LintMessage]:
    """Check for normalization: weights are divided by the mean over one micro-batch."""
    given = written.arguments
    if isinstance(given, ConfigError) or not (given.weighs and given.tis_batch_normalize):
        return
    name, size = "tis_batch_normalize", written.given.get("micro_batch_size")
    dynamic = bool(written.given.get("use_dynamic_batch_size"))
    alone = size == 1 and not dynamic
    if given.tis_level == "sequence":
        condition = "" if alone else "with one sequence per micro-batch "
        consequence = f"the mean is taken per micro-batch: {condition}every weight is exactly 1, the correction cancels"
        fix = "write tis_batch_normalize: false, or pack several sequences into a micro-batch"
        yield written.finding("error" if alone else "warning", name, consequence, fix)
    else:
        condition = "" if alone else "; with one sequence in it, every sequence's mean weight is 1"
        mean = "every sequence's mean weight becomes 1" if alone else "it depends on packing"
        consequence = f"the mean is taken per micro-batch, not over the batch as documented: {mean}{condition}"
        fix = "write tis_batch_normalize: false where weights should not depend on packing"
        yield written.finding("warning" if alone else "info", name, consequence, fix)
    if given.tis_mode == "mask":
        consequence = (
            "tis_mode mask leaves raw weights, and rejected tokens are in the mean: one outlier shrinks all others"
        )
        yield written.finding("warning", name, consequence, "write tis_mode: clip, or tis_batch_normalize: false")


def _check_bounds(written: SlimeConfig) -> Iterator[LintMessage]:
    if isinstance(written.correction, Correction):
        yield from check_bounds(written.correction, written.weight_place, written.gate_place, written.source)


def _check_effect(written: SlimeConfig) -> Iterator[LintMessage]:
    given = written.given
    if written.weighs_with_mis:
        for name in ("tis_clip", "tis_clip_low"):
            if name in given:
                consequence = "bounds the built-in weights only: mis.py takes tis_lower_bound and tis_upper_bound"
                yield written.finding("warning", name, consequence, "leave it out")
    if given.get("eps_clip_c") is not None and not written.version.dual_clip:
        consequence = "does not reach the loss in this version: there is no dual clip"
        yield written.finding("error", "eps_clip_c", consequence, "leave it out, or take a version of 2026-08")


RULES: tuple[Callable[[SlimeConfig], Iterator[LintMessage]], ...] = (
    _check_quoted_numbers,
    _check_unknown_keys,
    _check_old_keys,
    _check_refusal,
    _check_switches,
    _check_veto,
    _check_lower_bound,
    _check_denominators,
    _check_product,
    _check_outcome,
    _check_forward_only,
    _check_normalization,
    _check_bounds,
    _check_effect,
    _check_advice,
)

SURE_RULES = (_check_old_keys, _check_quoted_numbers, _check_unknown_keys)
"""Rules that only depend on keys in the file, for files that do not contain every value."""
