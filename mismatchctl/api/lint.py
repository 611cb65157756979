"""Check the configuration of a framework. With dumps, also measure the effect of the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatchctl.corrections.labels import gate_label, short_number
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, option
from mismatchctl.frameworks.adapter import Framework, find_value, is_date
from mismatchctl.frameworks.config_files import NativeConfig, read_native_configs
from mismatchctl.frameworks.lint import LEVELS, Level, LintMessage
from mismatchctl.frameworks.registry import read_file
from mismatchctl.io.yaml import is_text_in_yaml_1_1, parse_scalar

if TYPE_CHECKING:
    from mismatchctl.data.paths import DumpSource
    from mismatchctl.io.yaml import YamlScalar
    from mismatchctl.results.model import RunResult

MUCH_REJECTION = 0.5
"""lint warns if a gate, or all gates together, reject more than this share of a run's tokens."""
_TRUNCATIONS = ("top_p", "top_k", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SETTINGS = (*_TRUNCATIONS, *_PENALTIES, "temperature", "logprobs_mode", "logprobs")
_MASK = "sampling_mask"  # if an option's name contains this text, the engine records which tokens it could sample
_VOCABULARY = 1_000_000
_RAW = ("raw_logprobs", "raw_logits")
_REPLAY = (
    "or replay the engine's sampling mask in the trainer (vLLM's return_sampling_mask, if the framework supports it)"
)


def lint(
    config: str | Path, dumps: Sequence[DumpSource] = (), framework: str = "", rename: Mapping[str, str] | None = None
) -> tuple[Framework, list[LintMessage]]:
    """Return the framework of a configuration, and the findings about the configuration, most severe first."""
    all_written = read_native_configs(config, framework, of_any=True)
    found: list[LintMessage] = []
    for written in all_written:
        chosen, native = written.framework, written.keys
        plain = [one for one in written.scalars if len(one.keys) == 1 and not one.quoted]
        texts = {one.keys[0]: one.text for one in plain if is_text_in_yaml_1_1(one.text)}  # 1e-4 is text in YAML 1.1
        as_read = native | texts if chosen.reads_yaml_1_1 else native
        unknown = [*(place for place, _ in written.unknown), *([""] if written.missing else [])]
        traps = [*_find_digit_traps(written.scalars), *_find_unknown_values(written), *chosen.lint(as_read, unknown)]
        traps += _check_sampling(chosen, native)
        if len(all_written) > 1:
            traps = [replace(trap, place=f"{written.name}: {trap.place}") for trap in traps]
        found += [*traps, *(_measure_findings(chosen, native, dumps, rename or {}) if dumps else ())]
    chosen = all_written[0].framework
    remedy = f"pass a known version, such as {chosen.title}"
    level: Level = "info" if is_date(chosen.unknown) else "warning"
    found += [LintMessage(level, "", text, remedy, chosen.title) for text in chosen.warnings]
    return chosen, sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _find_unknown_values(written: NativeConfig) -> Iterator[LintMessage]:
    """Yield findings about settings whose values are not in the file, such as `${VARIABLE}`."""
    for name in written.missing:
        consequence = f"inherits from {name}, but this file was not found, so its settings are not checked"
        yield LintMessage("unknown", "defaults", consequence, "put the file at this path", name)
    for place, value in written.unknown:
        consequence = f"is {value}. The file does not contain this value, so lint cannot check it"
        fix = "write the value itself into the file"
        yield LintMessage("unknown", place, consequence, fix, "the file")
    if written.descendant:
        consequence = (
            f"{written.descendant} uses keys of {written.framework.name}, so lint reads the file with these keys"
        )
        yield LintMessage(
            "info", "", consequence, f"pass {option('framework')} to read it as another framework", written.descendant
        )


def _find_digit_traps(scalars: Iterable[YamlScalar]) -> Iterator[LintMessage]:
    """Yield findings about unquoted thresholds such as 0.5_5, which YAML reads as the number 0.55."""
    for found in scalars:
        place, value = ".".join(found.keys), None if found.quoted else parse_scalar(found.text)
        if isinstance(value, (int, float)) and "_" in found.text and "threshold" in place:
            consequence = f"YAML ignores _ between digits: {found.text} is the number {value:g}"
            yield LintMessage("error", place, consequence, f'write "{found.text}" in quotes', "YAML 1.1, float and int")


def _measure_findings(
    framework: Framework, native: Mapping[str, Any], dumps: Sequence[DumpSource], rename: Mapping[str, str]
) -> Iterator[LintMessage]:
    from mismatchctl.api.analyze.analyze import analyze
    from mismatchctl.results.summary import changes_loss_scale

    try:
        correction = Correction.model_validate(framework.correction(native).model_dump())
    except (ConfigError, ValueError):  # `Framework.lint` reports invalid configurations
        return
    places = framework.gate_places(native, correction)
    now = correction.model_copy(update={"name": "as it is"})
    alone = [
        (place, Correction(name=f"gate {index}", gates=(gate,)))
        for index, (place, gate) in enumerate(zip(places, correction.gates, strict=True))
    ]
    together = Correction(name="all gates", gates=correction.gates)
    tried = [now, *(gate for _, gate in alone), together]
    for run, measured in analyze(dumps, tried, rename=rename, findings=False).runs.items():
        if changes_loss_scale(measured, now.name):
            scale = measured.overall.corrections[now.name]["loss_scale"].value or 0.0
            consequence = (
                f"{run}: the correction multiplies the loss by {short_number(scale)}, which changes the learning rate"
            )
            fix = "use a rule whose weights average to 1, for example token weights, or normalize the weights"
            yield LintMessage("warning", "", consequence, fix, "sum of the weights / tokens in the denominator")
        found = [
            _rejection_finding(measured, gate, f"{run}: {gate_label(gate.gates[0])}", place) for place, gate in alone
        ]
        if not any(found):
            whole = ", ".join(dict.fromkeys(places))
            found = [_rejection_finding(measured, together, f"{run}: the combination of all gates", whole)]
        yield from filter(None, found)


def _rejection_finding(run: RunResult, correction: Correction, what: str, place: str) -> LintMessage | None:
    share = run.overall.corrections[correction.name]["rejected_tokens"].value
    steps = run.groups.corrections[correction.name]["rejected_tokens"].value
    empty = [label for label, value in zip(run.groups.labels, steps, strict=True) if value == 1]
    fix = "widen the bounds: `mismatchctl analyze` shows the distribution of the ratios"
    if share is None:
        return None
    if empty:
        named = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        count = f"{len(empty)} of {len(steps)} steps" + (f" ({named})" if empty != [None] else "")
        consequence = "rejects everything" if share == 1 else f"rejects all tokens of {count}"
        return LintMessage("error", place, f"{what} {consequence}", fix, "the dumps given")
    if share > MUCH_REJECTION:
        return LintMessage("warning", place, f"{what} rejects {share:.1%} of all tokens", fix, "the dumps given")
    return None


def _check_sampling(framework: Framework, native: Mapping[str, Any]) -> Iterator[LintMessage]:
    """Yield findings about settings that change the sampling distribution but not the trainer's log-probs."""
    try:
        correction, table = framework.correction(native), read_file(framework.name, "sampling.yaml")
    except ConfigError:
        return
    corrects = correction.weight or correction.gates or correction.loss == "ppo_bypass"
    if not (framework.is_on(native) and table and corrects):
        return
    found = dict(_settings(native, table["places"], table["prefix"]))
    source = f"{framework.title}, {table['source']}"
    changes = list(_changes(found))
    for name, place, what in () if _records_mask(native) else changes:
        if name not in table["trainer_applies"]:
            consequence = (
                f"{what}, but not the trainer's log-probs. The correction treats this difference as a mismatch. If "
                "the engine's log-probs lack the setting too, the correction's ratios are wrong"
            )
            fix = f"set a value without effect for training rollouts{', ' + _REPLAY if name in _TRUNCATIONS else ''}"
            yield LintMessage("warning", place, consequence, fix, source)
    place, mode = found.get("logprobs_mode", ("", None))
    if mode in _RAW and changes:
        names = ", ".join(name for name, _, _ in changes)
        consequence = f"the engine returns log-probs from before {names}, not from the sampling distribution"
        yield LintMessage("warning", place, consequence, "set it to processed_logprobs", source)
    place, wanted = found.get("logprobs", ("", 0))
    if wanted is None:
        consequence = "with null, the engine returns no log-probs, but the correction needs log-probs"
        yield LintMessage("info", place, consequence, "set it to 1", source)


def _changes(found: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, str, str]]:
    for name, (place, value) in found.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        number = float(value)
        if name == "temperature" and number not in (0, 1):
            yield name, place, f"temperature {number:g} reshapes the sampler's distribution"
        elif (
            (name == "top_p" and 0 < number < 1)
            or (name == "top_k" and 0 < number < _VOCABULARY)
            or (name == "min_p" and number > 0)
        ):
            yield name, place, f"{name} {number:g} cuts the tail off the sampler's distribution"
        elif name in _PENALTIES and number != (1 if name == "repetition_penalty" else 0):
            yield name, place, f"{name} {number:g} changes the sampler's logits token by token"


def _settings(native: Mapping[str, Any], places: list[str], prefix: str) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield (name, (full key, value)) for each sampling setting, such as ("top_p", ("rollout.top_p", 0.9))."""
    for place in places:
        level = find_value(native, *filter(None, place.split(".")))
        for key, value in level.items() if isinstance(level, Mapping) else ():
            plain = str(key).lstrip("-").replace("-", "_")
            name = plain.removeprefix(prefix)
            if plain.startswith(prefix) and name in _SETTINGS:
                yield name, (".".join(filter(None, (place, str(key)))), value)


def _records_mask(native: Mapping[str, Any]) -> bool:
    """Return True if the engine records which tokens top-k or top-p kept. The trainer can then mask all others."""
    return any(
        (_MASK in str(key).replace("-", "_") and value not in (False, None))
        or (isinstance(value, Mapping) and _records_mask(value))
        for key, value in native.items()
    )
