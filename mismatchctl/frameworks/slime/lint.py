"""Traps in slime's and Miles' arguments: the file or command line differs from the code's behavior."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.errors import ConfigError, option
from mismatchctl.frameworks.lint import (
    LintMessage,
    check_advice,
    check_bounds,
    find_named_key,
    format_decimal,
    is_text_of_number,
    load_traps,
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
    """Arguments as written by the user."""

    root: Mapping[str, Any]  # the mapping
    version: SlimeVersion  # the slime or Miles version

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
        ignored = {item.key for item in find_unread_keys(self.root, self.version)}
        try:
            named = {name: value for name, value in self.given.items() if self.keys[name] not in ignored}
            return read_arguments(named, self.version)
        except ConfigError as error:
            return error

    @cached_property
    def correction(self) -> Correction | ConfigError:
        if isinstance(self.arguments, ConfigError):
            return self.arguments
        try:
            return make_correction(self.arguments, self.version.framework, "mask")
        except ConfigError as error:
            return error

    @property
    def is_async(self) -> bool:
        return "train_async" in str(self.root.get("<program>", ""))

    @property
    def weight_place(self) -> str:
        mis = isinstance(self.arguments, Arguments) and self.arguments.function == "mis"
        return self.place("tis_upper_bound" if mis else "tis_clip")

    @property
    def weighs_with_mis(self) -> bool:
        """True if mis.py computes weights, judging by the arguments."""
        return bool(self.given.get("use_tis")) and any(name in self.given for name in MIS_FIELDS)

    def place(self, name: str) -> str:
        return self.keys.get(name, name)

    def gate_place(self, gate: Gate) -> str:
        if gate.is_veto:
            return self.place("rs_veto_threshold")
        assert isinstance(self.arguments, Arguments)
        masks = self.arguments.tis_mode == "mask" and gate.keep == self.arguments.tis_bounds
        given = any(self.given.get(name) is not None for name in ("rs_lower_bound", "rs_upper_bound"))
        return self.place("tis_upper_bound" if masks or not given else "rs_upper_bound")

    def trap(self, name: str, place: str = "", /, *, instead: Correction | None = None, **values: Any) -> LintMessage:
        """Create the finding of traps.yaml with this name, at an argument."""
        made = load_traps(__file__)[name].message(self.source, instead, **values)
        return replace(made, place=self.place(place or made.place))

    @property
    def source(self) -> str:
        return (
            f"{self.version.framework} {self.version.commit[:8]} ({self.version.label}), mis.py, loss.py, arguments.py"
        )


def _check_quoted_numbers(written: SlimeConfig) -> Iterator[LintMessage]:
    for name in written.texts:
        value = written.root[written.keys[name]]
        yield written.trap("quoted_number", name, value=value, number=format_decimal(value))


def _check_unknown_keys(written: SlimeConfig) -> Iterator[LintMessage]:
    version = written.version
    for item in find_unread_keys(written.root, version):
        name = next(name for name, key in written.keys.items() if key == item.key)
        if name in DOCUMENTED_ONLY:
            why = DOCUMENTED_ONLY[name]
            yield written.trap("documented_only", name, framework=version.framework, label=version.label, why=why)
        else:
            yield written.trap("unread", name, hint=item.hint)
    for name, key in written.keys.items():
        if name in MIS_FIELDS and key.startswith("--"):
            yield written.trap("no_flag", name, name=name)


def _check_old_keys(written: SlimeConfig) -> Iterator[LintMessage]:
    """Check for the names of slime from 2025-10-19 to 2025-11-16."""
    if written.version.old_keys and any(name in OLD_KEYS for name in written.keys):
        yield written.trap("old_keys")


def _check_refusal(written: SlimeConfig) -> Iterator[LintMessage]:
    if isinstance(written.correction, ConfigError):
        message = str(written.correction)
        name = find_named_key(message.partition(": ")[0], _ARGUMENT_NAMES) or find_named_key(message, _ARGUMENT_NAMES)
        if "tis_batch_normalize" in message and "geometric" in message:
            name = "tis_batch_normalize"
        trap = "refused_normalization" if name == "tis_batch_normalize" else "refused"
        yield written.trap(trap, name, framework=written.version.framework, message=message)


def _check_switches(written: SlimeConfig) -> Iterator[LintMessage]:
    given = written.given
    if given.get("true_on_policy_mode"):
        yield written.trap("true_on_policy")
    if written.weighs_with_mis:
        yield written.trap("measures_only" if given.get("get_mismatch_metrics") else "wins")
    if written.weighs_with_mis and given.get("use_rollout_logprobs"):
        yield written.trap("corrects_twice")
    if given.get("use_rs") and not given.get("use_tis"):
        found = written.trap("rejection_off")
        yield replace(found, level="warning") if "use_tis" in given else found  # said, or forgotten


def _check_veto(written: SlimeConfig) -> Iterator[LintMessage]:
    threshold = written.given.get("rs_veto_threshold")
    if not isinstance(threshold, int | float) or not written.weighs_with_mis:
        return
    if not written.given.get("use_rs"):
        yield written.trap("veto_off")
    elif threshold <= 0:
        yield written.trap("veto_nothing")
    else:
        instead, number = _documented_correction(written), format_decimal(threshold)
        yield written.trap("veto_ratio", instead=instead, threshold=threshold, number=number)


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
    version = written.version
    if version.rollout_denominators and isinstance(written.correction, Correction) and written.correction.gates:
        switch = option("framework")
        yield written.trap("denominators", option=switch, framework=version.framework, label=version.label)


def _check_product(written: SlimeConfig) -> Iterator[LintMessage]:
    given = written.arguments
    if isinstance(given, Arguments) and given.rejects and given.rs_level == "sequence":
        yield written.trap("product")


_OUTCOMES = {
    (2.0, True, True): ("1", False),
    (1.5, True, True): ("2", True),
    (1.5, False, True): ("3", True),
    (1.5, False, False): ("4", False),
}
"""Upper bound, normalization, geometric rejection within 0.99..1.001 -> number and outcome."""
_ARTICLE = "Let Speed Be With Stability (Training-Inference Mismatch with Miles), LMSYS, 2026-01-16: MoE runs"


def _find_published_run(correction: Correction) -> tuple[str, bool] | None:
    """Return the number and the outcome of the published configuration with these weights and gates."""
    weight, gates = correction.weight, correction.gates
    if weight is None or weight.level != "token" or weight.zero is not None:
        return None
    rejects = [(gate.statistic, gate.level, gate.keep) for gate in gates] == [("ratio", "geometric", (0.99, 1.001))]
    if bool(gates) is not rejects:
        return None
    return _OUTCOMES.get((weight.bounds[1], weight.normalize == "token", rejects))


def published_outcome(correction: Correction) -> str:
    """Describe the outcome of the published run with this correction, "" if there is none."""
    known = _find_published_run(correction)
    if known is None:
        return ""
    number, held = known
    return f"published MoE run (Miles article, configuration {number}): {'no collapse' if held else 'collapsed'}"


def _check_outcome(written: SlimeConfig) -> Iterator[LintMessage]:
    """Check for the four configurations that were tested on a mixture of experts."""
    given = written.arguments
    if not isinstance(given, Arguments) or given.function != "mis" or isinstance(written.correction, ConfigError):
        return
    known = _find_published_run(written.correction)
    if known is not None:
        number, held = known
        yield replace(written.trap("held" if held else "collapsed", number=number), source=_ARTICLE)


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
            yield written.trap("skip_refuses", name=name)
        if not given.get("use_rollout_logprobs"):
            yield written.trap("own_old_policy")
    corrects = any(given.get(name) for name in ("use_rollout_logprobs", "use_tis", "keep_old_actor"))
    if written.is_async and given.get("advantage_estimator") == "ppo" and not corrects:
        yield written.trap("async_ppo")


def _check_lower_bound(written: SlimeConfig) -> Iterator[LintMessage]:
    given = written.arguments
    if isinstance(given, ConfigError) or given.function != "mis" or not written.weighs_with_mis:
        return
    low, high = given.rs_bounds if given.use_rs else given.tis_bounds
    if given.rejects and given.rs_lower_bound is None:
        origin = "tis_lower_bound" if given.tis_lower_bound is not None else "1 / tis_upper_bound"
        yield written.trap("lower_falls_back", origin=origin, level_name=given.rs_level, low=low)
    elif given.tis_mode == "truncate" and given.tis_lower_bound is not None:
        yield written.trap("no_lower_bound")
    if given.rejects and given.rs_upper_bound is None:
        yield written.trap("upper_falls_back", level_name=given.rs_level, high=high)


def _check_normalization(written: SlimeConfig) -> Iterator[LintMessage]:
    """Check for normalization: weights are divided by the mean over one micro-batch."""
    given = written.arguments
    if isinstance(given, ConfigError) or not (given.weighs and given.tis_batch_normalize):
        return
    alone = written.given.get("micro_batch_size") == 1 and not written.given.get("use_dynamic_batch_size")
    if given.tis_level == "sequence":
        yield written.trap("cancels" if alone else "may_cancel")
    else:
        yield written.trap("per_sequence_mean" if alone else "depends_on_packing")
    if given.tis_mode == "mask":
        yield written.trap("raw_mean")


def _check_bounds(written: SlimeConfig) -> Iterator[LintMessage]:
    if isinstance(written.correction, Correction):
        yield from check_bounds(written.correction, written.weight_place, written.gate_place, written.source)


def _check_effect(written: SlimeConfig) -> Iterator[LintMessage]:
    given = written.given
    if written.weighs_with_mis:
        yield from (written.trap("built_in_only", name) for name in ("tis_clip", "tis_clip_low") if name in given)
    if given.get("eps_clip_c") is not None and not written.version.dual_clip:
        yield written.trap("no_dual_clip")


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
