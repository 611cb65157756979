"""Base class for frameworks that are described by a table of options."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice, product
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import PrivateAttr, ValidationError

from mismatchctl.core.batch import Bools
from mismatchctl.core.losses import Array, LossTerm, sum_terms
from mismatchctl.core.validation import explain_error
from mismatchctl.corrections.labels import gate_label
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.adapter import (
    REPLAY_DEFAULTS,
    Adapter,
    Dtype,
    Framework,
    LoggedMetric,
    Replay,
    ReplayOptions,
    UnreadKey,
    find_similar,
    find_value,
    read_metrics,
)
from mismatchctl.frameworks.lint import LintMessage, check_bounds, make_finding, read_table
from mismatchctl.frameworks.step import ConfiguredStep, Options, Step
from mismatchctl.io.stores import first_error_line

if TYPE_CHECKING:
    import pyarrow as pa

Meant = TypeVar("Meant")
Place = tuple[str, ...]
FoundOption = tuple[Place, str, Any]
"""An option of a configuration: its place, its name and its value."""
_NEGATED_FLAG = re.compile(r"--no[-_](.+)", re.DOTALL)


def read_choice(choices: Mapping[str, Meant], options: Options, name: str) -> Meant:
    given = options[name]
    if not isinstance(given, str) or given not in choices:
        raise ConfigError(f"{name} takes {', '.join(choices)}, not {given!r}")
    return choices[given]


def check_flag(value: Any, usual: Any, place: Place, title: str) -> None:
    """Raise a ConfigError if a boolean option is a string. Some frameworks read the string "false" as true."""
    if isinstance(usual, bool) and isinstance(value, str):
        raise ConfigError(f"{title}: {'.'.join(place)} must be true or false, found the text {value!r}")


def _option_name(key: object) -> str:
    """Convert a flag or key to the name of its option: `--use-tis` and `--no-use-tis` become `use_tis`."""
    negated = _NEGATED_FLAG.fullmatch(str(key))
    return (negated[1] if negated else str(key).lstrip("-")).replace("-", "_")


def _replaced(native: Mapping[str, Any], place: Place, inner: Mapping[str, Any]) -> dict[str, Any]:
    if not place:
        return {**inner}
    return {**native, place[0]: _replaced(native[place[0]], place[1:], inner)}


def _iterate_keys(native: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield three strings per key: name, dotted path and `path=value`. For a block, omit `path=value`."""
    for key, value in native.items():
        place = f"{above}{_option_name(key)}"
        yield _option_name(key)
        yield place
        if isinstance(value, Mapping):
            yield from _iterate_keys(value, f"{place}.")
        else:
            yield f"{place}={value}"


def merge_options(parts: Iterable[Options]) -> Options:
    """Merge options. Later values replace earlier ones, but dicts are merged (ignoring None) and lists are joined."""
    made: Options = {}
    for part in parts:
        for name, value in part.items():
            before = made.get(name)
            if isinstance(before, dict) and isinstance(value, dict):
                value = before | {key: one for key, one in value.items() if one is not None or key not in before}
            elif isinstance(before, list) and isinstance(value, list):
                value = before + value
            made[name] = value
    return made


FormBound = Callable[[Any, Any], Any]
LOW: FormBound = lambda low, high: low  # noqa: E731
HIGH: FormBound = lambda low, high: high  # noqa: E731
"""Placeholders in a form (template of options). `fill_form` replaces them by the lower and upper bound of a rule."""


def negated(bound: FormBound) -> FormBound:
    return lambda low, high: None if (value := bound(low, high)) is None else -value


def or_zero(bound: FormBound) -> FormBound:
    return lambda low, high: bound(low, high) or 0.0


def fill_form(form: Any, low: Any, high: Any) -> Any:
    if isinstance(form, dict):
        return {name: fill_form(value, low, high) for name, value in form.items()}
    if isinstance(form, (list, tuple)):
        return type(form)(fill_form(value, low, high) for value in form)
    return form(low, high) if callable(form) else form


_MAX_STACKS = 64  # when a Correction is converted to options, at most this number of combinations of `forms` is tried

Rules = tuple[Weight | None, tuple[Gate, ...]]


class ConfiguredCorrection(Correction):
    """A Correction and the framework's options that it was read from. These options also set the loss."""

    _options: Options = PrivateAttr(default_factory=dict)


class PlainFramework(Framework):
    """A framework whose options (options.yaml) set one weight rule and some gates."""

    # Values from options.yaml, unless a subclass defines them. The section `@VERSION` changes values for one version.
    options: Options = {}  # name -> default
    aliases: Mapping[str, str] = {}  # other spelling of an option -> its name in `options`
    blocks: tuple[Place, ...] = ()  # paths of more blocks with options, besides `block`
    signs: str = ""  # pattern of a key, a dotted path or `path=value` that only files of this framework contain
    shared: Collection[str] = ()  # options that are blocks, and may contain keys unrelated to corrections
    internal: Collection[str] = ()  # names in `options` that the framework does not have, so files cannot set them
    own_columns: Mapping[str, str] = {}  # like `columns`, for names that mean something else in other frameworks
    source: str = ""  # repository and commit that findings name as their source
    switch: str = ""  # the option that enables the correction, if it is separate from the rules
    loss_key: str | None = "loss"  # logged name of the loss that `terms` define, or None
    weighs_always: bool = False  # True if every configuration has weights

    traps: Mapping[str, Callable[[Options], bool]] = {}  # name in traps.yaml -> condition for reporting this trap
    forms: Sequence[Options] = ()  # options for one weight rule or gate, with LOW and HIGH as its bounds

    def __init_subclass__(cls) -> None:
        for key, value in read_table(inspect.getfile(cls), "options.yaml").items():
            if not key.startswith("@"):
                setattr(cls, key, value)

    def __init__(self, version: str) -> None:
        self.version = version
        for key, value in read_table(self._module, "options.yaml").get(f"@{version}", {}).items():
            setattr(self, key, self.options | value if key == "options" else value)

    @property
    def _module(self) -> str:
        return inspect.getfile(type(self))

    @property
    def _places(self) -> tuple[Place, ...]:
        return (self.block, *self.blocks) if self.block else self.blocks

    def levels(self, native: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
        """Find the YAML blocks that contain options, and yield (path, block). A file may omit the outer blocks."""
        blocks = (place[start:] for place in self._places for start in range(len(place)))
        for place in dict.fromkeys(((), *blocks)):
            if isinstance(inner := find_value(native, *place), Mapping):
                yield place, inner

    def find(self, native: Mapping[str, Any]) -> Iterator[FoundOption]:
        for place, inner in self.levels(native):
            for key, value in inner.items():
                name = self.name_of(key)
                if name is not None:
                    negated = _NEGATED_FLAG.fullmatch(str(key)) is not None and isinstance(value, bool)
                    yield (*place, key), name, not value if negated else value

    def name_of(self, key: object) -> str | None:
        for spelt in (str(key), _option_name(key)):
            name = self.aliases.get(spelt, spelt)
            if name in self.options:
                return name
        return None

    @property
    def _spelt(self) -> dict[str, str]:
        return {name: key for key, name in reversed(list(self.aliases.items()))}

    def recognizes(self, native: Mapping[str, Any]) -> bool:
        return any(re.fullmatch(self.signs, said) for said in _iterate_keys(native))

    def known_names(self, native: Mapping[str, Any], text: str = "") -> dict[str, Any]:
        hidden = {*self.internal, *self.aliases.values()} - self.aliases.keys()
        made = dict(native)
        for place, inner in list(self.levels(native)):
            kept = {key: value for key, value in inner.items() if _option_name(key) not in hidden}
            if len(kept) < len(inner):
                made = _replaced(made, place, kept)
        return made

    def unread(self, native: Mapping[str, Any]) -> Iterator[UnreadKey]:
        """Yield misspelled options, and options outside of their block, each with a hint. Ignore other unknown keys."""
        above = {key for place in self._places for key in place}
        spelt = dict.fromkeys([*self.aliases, *(name for name in self.options if name not in self.internal)])
        for place, inner in self.levels(native):
            for key in inner:
                plain = _option_name(key)
                if self.name_of(key) is not None or key in above or plain in above:
                    continue
                signed = re.fullmatch(self.signs, plain) is not None
                blocks = [name for name, usual in self.options.items() if isinstance(usual, dict) and plain in usual]
                if signed and blocks:
                    yield (*place, str(key)), f": it belongs in {self._spelt.get(blocks[0], blocks[0])}"
                # Keys that do not match `signs` are only compared with names that do. Other names resemble common keys.
                elif name := find_similar(plain, spelt if signed else filter(re.compile(self.signs).fullmatch, spelt)):
                    yield (*place, str(key)), f" (did you mean {name!r}?)"

    def read(self, native: Mapping[str, Any]) -> Options:
        for place, hint in self.unread(native):
            raise ConfigError(f"{self.title}: unknown option {'.'.join(place)!r}{hint}")
        made = dict(self.options)
        written = set(self._spelt.values())
        for place, name, value in self.find(native):
            if value is None and _option_name(place[-1]) in self.aliases and _option_name(place[-1]) not in written:
                continue  # null under a deprecated name does not set the option
            usual = self.options[name]
            check_flag(value, usual, place, self.title)
            made[name] = self._merge_block(made[name], name, place, value) if isinstance(usual, dict) else value
        return made

    def _merge_block(self, before: Options, name: str, place: Place, value: Any) -> Options:
        where, usual = ".".join(place), self.options[name]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.title}: {where} must be a mapping of keys and values, found {value!r}")
        unknown = sorted(str(key) for key in value.keys() - usual.keys()) if usual else []
        for key in unknown:
            if name not in self.shared or find_similar(key, usual):
                raise ConfigError(f"{self.title}: unknown option {where}.{key}{suggestion(key, usual)}")
        for key, one in value.items():
            check_flag(one, usual.get(key), (*place, str(key)), self.title)
        return before | {key: one for key, one in value.items() if key not in unknown}

    def written(self, options: Options) -> dict[str, Any]:
        """Rename options to the framework's spelling. Leave out nulls, unless the option's default is not null."""

        def drop_nulls(values: Mapping[str, Any], usual: Mapping[str, Any]) -> Options:
            return {key: one for key, one in values.items() if one is not None or usual.get(key) is not None}

        found: Options = {}
        for name, value in drop_nulls(options, self.options).items():
            usual = self.options.get(name)
            if isinstance(value, Mapping) and isinstance(usual, Mapping):
                value = drop_nulls(value, usual)
            found[self._spelt.get(name, name)] = list(value) if isinstance(value, tuple) else value
        return found

    @classmethod
    def version_of(cls, native: Mapping[str, Any]) -> str:
        return ""

    def accepts_keys(self, native: Mapping[str, Any]) -> bool:
        return any(True for _ in self.find(native))

    def is_on(self, native: Mapping[str, Any]) -> bool:
        return not self.switch or any(name == self.switch for _, name, _ in self.find(native))

    def reads(self, place: tuple[str, ...], native: Mapping[str, Any]) -> bool:
        return any(place[: len(found)] == tuple(map(str, found)) for found, _, _ in self.find(native))

    @abstractmethod
    def rules(self, options: Options) -> Rules: ...

    @abstractmethod
    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        """Return the terms of the loss, and the factors per token [T] of each term."""

    @abstractmethod
    def metrics(self, run: ConfiguredStep) -> dict[str, float]: ...

    def prepared(self, step: Step, options: Options, correction: Correction) -> ConfiguredStep:
        """Return the step as this configuration reads it, for example with another column as `train` or `rollout`."""
        return ConfiguredStep(step, options, correction)

    def correction(self, native: Mapping[str, Any]) -> Correction:
        with self._raise_config_errors():
            options = self.read(native)
            weight, gates = self.rules(options)
            made = ConfiguredCorrection(name=self.name, weight=weight, gates=gates)
        made._options = options
        return made

    @contextmanager
    def _raise_config_errors(self) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            raise ConfigError(explain_error(error, Correction)) from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.title}: the value of an option has the wrong type: {first_error_line(error)}"
            ) from error

    def native(self, correction: Correction) -> tuple[dict[str, Any], list[str]]:
        """Return the options that a Correction was read from, or else options with the same effect."""
        options = self._options_of(correction)
        if options is not None:
            return self.written(options), []
        weights = [] if correction.weight is None else ["the weight rule"]
        rules = weights + [gate_label(gate) for gate in correction.gates]
        return {}, [f"{self.title} has no options for {' with '.join(rules) or 'no correction at all'}"]

    def _options_of(self, correction: Correction) -> Options | None:
        if isinstance(correction, ConfiguredCorrection) and self._says(correction._options, correction):
            return {name: value for name, value in correction._options.items() if value != self.options.get(name)}
        rules = [rule for rule in (*correction.gates, correction.weight) if rule is not None]
        whole = (fill_form(form, *bounds) for bounds in [*map(_bounds_of, rules), (None, None)] for form in self.forms)
        stacks = map(merge_options, self._stacks_of(rules))
        return next((said for said in chain(whole, stacks) if self._says(said, correction)), None)

    def _stacks_of(self, rules: Sequence[Weight | Gate]) -> Iterator[tuple[Options, ...]]:
        yield from islice(product(*map(self._forms_of, rules)), _MAX_STACKS)

    def _forms_of(self, rule: Weight | Gate) -> list[Options]:
        alone: Rules = (None, (rule,)) if isinstance(rule, Gate) else (rule, ())
        said = [(one, self._rules_of(one)) for one in (fill_form(form, *_bounds_of(rule)) for form in self.forms)]
        return [one for one, rules in said if rules == alone] or [
            one
            for one, (weight, gates) in ((one, rules or (None, ())) for one, rules in said)
            if any(other and rule == other.model_copy(update={"sees": rule.sees}) for other in (weight, *gates))
        ]

    def _says(self, options: Options, correction: Correction) -> bool:
        return self._rules_of(options) == (correction.weight, correction.gates)

    def _rules_of(self, options: Options) -> Rules | None:
        try:
            return self.rules(self.read(options))
        except (ValidationError, ConfigError, TypeError, KeyError):
            return None

    def lint(self, native: Mapping[str, Any], unknown: Collection[str] = ()) -> list[LintMessage]:
        """Return the findings. If some keys have `unknown` values, only check that the options can be read."""
        found: list[LintMessage] = []
        try:
            with self._raise_config_errors():
                options = self.read(native)
                if unknown:
                    return []
                caught = [name for name, is_caught in self.traps.items() if is_caught(options)]
                found += [make_finding(self._module, name, self.source) for name in caught]
                made = self.correction(native)
                if made.weight is not None and not self.is_on(native) and self.recognizes(native):
                    found.append(make_finding(self._module, "switched_off", self.source))
                found += check_bounds(made, "", lambda gate: "", self.title)
        except ConfigError as error:
            if not any(one.level == "error" for one in found):
                return [LintMessage("error", "", str(error), "correct the configuration", self.title)]
        return found

    def gate_places(self, native: Mapping[str, Any], correction: Correction) -> list[str]:
        return [".".join(self.block)] * len(correction.gates)

    def configure(self, table: pa.Table, correction: Correction, dtype: Dtype) -> ConfiguredStep:
        said, unsaid = self.native(correction)
        if unsaid:
            raise ConfigError(f"{self.name} cannot express this correction: {'; '.join(unsaid)}")
        step = Step.read(table, dtype, {**self.columns, **self.own_columns})
        return self.prepared(step, self.read(said), correction)

    def replay(self, table: pa.Table, correction: Correction, options: ReplayOptions = REPLAY_DEFAULTS) -> Replay:
        """Compute the framework's results for a step as if all its rows were one batch on one rank."""
        run = self.configure(table, correction, options.dtype)
        with np.errstate(all="ignore"):
            logged = self.metrics(run)
            if run.has_loss and self.loss_key is not None:
                logged[self.loss_key] = sum_terms(self.terms(run))[0]
            by_row = run.step.by_row
            weighs = correction.weight is not None or self.weighs_always
            return Replay(
                {name: float(value) for name, value in logged.items()},
                by_row(self.shown_weights(run)) if weighs else None,
                [flags.astype(np.bool_) for flags in by_row(self.shown_keep(run))],
            )

    def shown_weights(self, run: ConfiguredStep) -> Array:
        return run.weights

    def shown_keep(self, run: ConfiguredStep) -> Bools:
        return run.keep

    def meanings(self) -> list[LoggedMetric]:
        sections = read_metrics(self._module)
        return [*sections[""], *sections.get(f"@{self.version}", ())]


def make_off_policy_gate(limit: float, **more: Any) -> Gate:
    """Create the gate of OPSM. It drops a sequence if its advantage is < 0 and its mean K1 above `limit`."""
    keep = (None, limit)
    return Gate(statistic="k1", level="mean", source="current/rollout", keep=keep, when="negative_advantage", **more)


def _bounds_of(rule: Weight | Gate) -> tuple[Any, Any]:
    return rule.keep if isinstance(rule, Gate) else rule.clip or rule.zero or (None, rule.truncate)


def make_adapter(kind: type[PlainFramework], versions: tuple[str, ...], default: str = "", **brought: Any) -> Adapter:
    def load(version: str) -> Framework:
        if version and version not in versions:
            known = f"use one of {', '.join(versions)}"
            raise ConfigError(f"unknown {kind.name} version {version!r}{suggestion(version, versions)}: {known}")
        return kind(version or default or versions[0])

    def recognize(native: Mapping[str, Any]) -> str | None:
        return kind.version_of(native) if kind(versions[0]).recognizes(native) else None

    return Adapter(kind.name, versions, load, recognize, **brought)
