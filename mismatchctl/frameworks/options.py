"""Base of frameworks that a table of options describes: spelling, defaults, rules, traps and replay."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import PrivateAttr, ValidationError

from mismatchctl.core.batch import Bools
from mismatchctl.core.losses import Array, LossTerm, sum_terms
from mismatchctl.core.validation import explain_error
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.adapter import (
    DEFAULT_REPLAY_OPTIONS,
    NOTHING_HIDDEN,
    Adapter,
    Dtype,
    Framework,
    Hidden,
    Loss,
    Meaning,
    Replay,
    ReplayOptions,
    UnreadKey,
    is_typo_of,
)
from mismatchctl.frameworks.lint import Level, LintMessage, check_bounds
from mismatchctl.frameworks.step import ConfiguredStep, Options, Step
from mismatchctl.io.yaml import read_data

if TYPE_CHECKING:
    import pyarrow as pa

Meant = TypeVar("Meant")
Place = tuple[str, ...]
FoundOption = tuple[Place, str, Any]
"""Where an option stands, its name, its value."""
_NEGATED_FLAG = re.compile(r"--no[-_](.+)", re.DOTALL)


@dataclass(frozen=True)
class Spelling:
    """How a framework spells its options.

    Attributes:
        options: name -> default.
        aliases: its spelling -> name; the first of a name is the one that is written.
        places: of a full configuration, the keys under which options stand; the first is the one that is written.
        signs: what only its configurations have a key like, a dotted place, or one with its value: `loss.type=ipo`.
        shared: options that are blocks in which other things stand too.
        internal: names that options have here only; files write the aliases.
    """

    options: Options
    aliases: Mapping[str, str]
    places: tuple[Place, ...]
    signs: str
    shared: tuple[str, ...] = ()
    internal: frozenset[str] = frozenset()

    def levels(self, native: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
        """What may hold options: a configuration's root, a block alone, one of a full configuration."""
        blocks = (place[start:] for place in self.places for start in range(len(place)))
        for place in dict.fromkeys(((), *blocks)):
            inner: Any = native
            for key in place:
                inner = inner.get(key) if isinstance(inner, Mapping) else None
            if isinstance(inner, Mapping):
                yield place, inner

    def find(self, native: Mapping[str, Any]) -> Iterator[FoundOption]:
        """The options of a configuration."""
        for place, inner in self.levels(native):
            for key, value in inner.items():
                name = self.name_of(key)
                if name is not None:
                    negated = _NEGATED_FLAG.fullmatch(str(key)) is not None and isinstance(value, bool)
                    yield (*place, key), name, not value if negated else value

    def name_of(self, key: object) -> str | None:
        """The option that a key spells, as a flag too."""
        for spelt in (str(key), _option_name(key)):
            name = self.aliases.get(spelt, spelt)
            if name in self.options:
                return name
        return None

    def _home(self, key: object) -> str:
        """The block that a key outside it belongs in, as a clause; empty if there is none."""
        plain = _option_name(key)
        blocks = [
            name
            for name, usual in self.options.items()
            if isinstance(usual, dict) and plain in usual and self.signs and re.fullmatch(self.signs, plain)
        ]
        return f": it belongs in {self._spelt.get(blocks[0], blocks[0])}" if blocks else ""

    @property
    def _spelt(self) -> dict[str, str]:
        """How an option with another spelling is written: as the first of them."""
        return {name: key for key, name in reversed(list(self.aliases.items()))}

    def recognizes(self, native: Mapping[str, Any]) -> bool:
        """Whether a configuration has a sign."""
        return any(re.fullmatch(self.signs, said) for said in _iterate_keys(native))

    def without_internal(self, native: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration without keys that are names of options in mismatchctl only."""
        hidden = (self.internal | set(self.aliases.values())) - self.aliases.keys()
        made = dict(native)
        for place, inner in list(self.levels(native)):
            kept = {key: value for key, value in inner.items() if _option_name(key) not in hidden}
            if len(kept) < len(inner):
                made = _replaced(made, place, kept)
        return made

    def unread(self, native: Mapping[str, Any]) -> list[UnreadKey]:
        """Keys that look like misspelt options. What else stands in a configuration is not judged."""
        found = []
        blocks = {key for place in self.places for key in place}
        spelt = dict.fromkeys([*self.aliases, *(name for name in self.options if name not in self.internal)])
        for place, inner in self.levels(native):
            for key in inner:
                plain = _option_name(key)
                if self.name_of(key) is not None or key in blocks or plain in blocks:
                    continue
                signed = re.fullmatch(self.signs, plain) is not None if self.signs else False
                hint = self._home(key)
                if not hint and (name := is_typo_of(plain, spelt if signed else self._distinct(spelt))):
                    hint = f" (did you mean {name!r}?)"
                if hint:
                    found.append(UnreadKey((*place, str(key)), hint, refused=True))
        return found

    def _distinct(self, spelt: Iterable[str]) -> list[str]:
        """Names that only a correction has: others are near to words that mean something else."""
        return [name for name in spelt if self.signs and re.fullmatch(self.signs, name)]

    def read(self, native: Mapping[str, Any], title: str) -> Options:
        """All options of a configuration.

        Raises:
            ConfigError: an option that there is not.
        """
        for item in self.unread(native):
            if item.refused:
                hint = item.hint or suggestion(item.key, self.options)
                raise ConfigError(f"{title} has no option {'.'.join(item.place)!r}{hint}")
        made = dict(self.options)
        written = set(self._spelt.values())
        for place, name, value in self.find(native):
            if value is None and _option_name(place[-1]) in self.aliases and _option_name(place[-1]) not in written:
                continue  # a deprecated name that is not set
            usual = self.options[name]
            check_flag(value, usual, place, title)
            made[name] = self._block(made[name], name, place, value, title) if isinstance(usual, dict) else value
        return made

    def _block(self, before: Options, name: str, place: Place, value: Any, title: str) -> Options:
        """A block's defaults, with what is given of them."""
        where, usual = ".".join(place), self.options[name]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{title}: {where} takes keys and values, not {value!r}")
        unknown = sorted(str(key) for key in value.keys() - usual.keys()) if usual else []
        for key in unknown:
            if name not in self.shared or is_typo_of(key, usual):
                raise ConfigError(f"{title} has no option {where}.{key}{suggestion(key, usual)}")
        for key, one in value.items():
            check_flag(one, usual.get(key), (*place, str(key)), title)
        return before | {key: one for key, one in value.items() if key not in unknown}

    def written(self, options: Options) -> dict[str, Any]:
        """Options as the framework spells them; those that are null by default and here are left out."""
        spelt = self._spelt
        return {
            spelt.get(name, name): _drop_null_defaults(value, self.options.get(name))
            for name, value in options.items()
            if value is not None or self.options.get(name) is not None
        }


def read_choice(choices: Mapping[str, Meant], options: Options, name: str) -> Meant:
    """What the value of an option stands for.

    Raises:
        ConfigError: it is none of the choices.
    """
    given = options[name]
    if not isinstance(given, str) or given not in choices:
        raise ConfigError(f"{name} takes {', '.join(choices)}, not {given!r}")
    return choices[given]


def check_flag(value: Any, usual: Any, place: Place, title: str) -> None:
    """Refuse text for a flag: frameworks take "false" for true, or for false, each in its own way."""
    if isinstance(usual, bool) and isinstance(value, str):
        raise ConfigError(f"{title}: {'.'.join(place)} takes true or false, not the text {value!r}")


def _drop_null_defaults(value: Any, usual: Any) -> Any:
    """Of a block what is not null by default and here."""
    if isinstance(value, Mapping) and isinstance(usual, Mapping):
        return {key: one for key, one in value.items() if one is not None or usual.get(key) is not None}
    return list(value) if isinstance(value, tuple) else value


def _option_name(key: object) -> str:
    """A flag as the option that it sets, or with `--no-` takes away; another key as it is."""
    negated = _NEGATED_FLAG.fullmatch(str(key))
    return (negated[1] if negated else str(key).lstrip("-")).replace("-", "_")


def _replaced(native: Mapping[str, Any], place: Place, inner: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with another block at a place."""
    if not place:
        return {**inner}
    return {**native, place[0]: _replaced(native[place[0]], place[1:], inner)}


def _iterate_keys(native: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Every key, its dotted place, and the place with its value."""
    for key, value in native.items():
        place = f"{above}{_option_name(key)}"
        yield _option_name(key)
        yield place
        if isinstance(value, Mapping):
            yield from _iterate_keys(value, f"{place}.")
        else:
            yield f"{place}={value}"


def merge_options(parts: Iterable[Options]) -> Options:
    """Options of several parts together: blocks are merged, lists joined."""
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


_BRACES = re.compile(r"\{([^}]*)\}")
_MAX_STACKS = 64
"""Ways to put forms together that are tried."""

Rules = tuple[Weight | None, tuple[Gate, ...]]


class ConfiguredCorrection(Correction):
    """A Correction that remembers the options that it was read from: a loss and its metrics depend on more of them."""

    _options: Options = PrivateAttr(default_factory=dict)


@dataclass(frozen=True)
class Trap:
    """A documented trap: whether options are caught in it, and what a LintMessage then says."""

    caught: Callable[[Options], bool]
    level: Level
    place: str
    consequence: str
    fix: str


@dataclass(frozen=True)
class Switch:
    """An option, off by default, without which nothing is corrected; a block alone is read as if it was on."""

    option: str
    place: str
    consequence: str
    fix: str


class Watched(dict[str, Any]):
    """Options that remember which of them were looked at."""

    def __init__(self, options: Mapping[str, Any], seen: set[tuple[str, ...]] | None = None, above: str = "") -> None:
        super().__init__(options)
        self.seen: set[tuple[str, ...]] = set() if seen is None else seen
        self._above = above

    def __getitem__(self, key: str) -> Any:
        place = (self._above, key) if self._above else (key,)
        self.seen.add(place)
        value = super().__getitem__(key)
        return Watched(value, self.seen, key) if isinstance(value, dict) and not self._above else value

    def get(self, key: str, default: Any = None) -> Any:
        """As `dict.get`."""
        return self[key] if key in self else default  # noqa: SIM401 - `self[key]` notes what was looked at

    def is_block(self, place: tuple[str, ...]) -> bool:
        """Return True if a place is a block of options."""
        return len(place) == 1 and isinstance(dict.get(self, place[0]), dict)


class PlainFramework(Framework):
    """A framework whose options say one weight rule and some gates.

    A subclass gives the tables, `rules`, `terms` and `metrics`.

    Attributes:
        options: name -> default; what is not given has it.
        aliases: other spellings -> name.
        blocks: keys beside `block` under which options stand in a full configuration.
        signs: what only its configurations have a key like, a dotted place, or one with its value: `loss.type=ipo`.
        shared: options that are blocks in which other things stand too.
        internal: names of options that no file contains.
        shipped: files that its `defaults:` name and that contain nothing but its own defaults.
        columns: its name of a column -> the contract's, where that means one thing wherever it is used.
        own_columns: the same in its own step alone: elsewhere these names mean something else too.
        source: of its code, where traps can be looked up.
        traps: documented ones.
        switch: what turns the correction on, where the rest of it says nothing of that.
        forms: ways to write a weight rule and gates between two bounds.
        loss_key: how the loss is logged; None: it is not.
        weighs_always: whether every configuration has weights.
    """

    options: Options
    aliases: Mapping[str, str] = {}
    blocks: tuple[Place, ...] = ()
    signs: str = ""
    shared: tuple[str, ...] = ()
    internal: frozenset[str] = frozenset()
    shipped: str = ""
    columns: Mapping[str, str] = {}
    own_columns: Mapping[str, str] = {}
    source: str = ""
    traps: Sequence[Trap] = ()
    switch: Switch | None = None
    forms: Sequence[Callable[[Any, Any], Options]] = ()
    loss_key: str | None = "loss"
    weighs_always = False

    def __init__(self, version: str) -> None:
        self.version = version

    @cached_property
    def spelling(self) -> Spelling:
        """How its options are spelt."""
        places = (self.block, *self.blocks) if self.block else self.blocks
        return Spelling(self.options, self.aliases, places, self.signs, self.shared, self.internal)

    def read(self, native: Mapping[str, Any]) -> Options:
        """All options of a configuration, of its block, or of a full one.

        Raises:
            ConfigError: an option that there is not.
        """
        return self.spelling.read(native, self.title)

    @classmethod
    def version_of(cls, native: Mapping[str, Any]) -> str:
        """The version that a configuration of this framework was written for; empty: any."""
        return ""

    def holds(self, native: Mapping[str, Any]) -> bool:
        """Whether a key is an option, a common word too."""
        return any(True for _ in self.spelling.find(native))

    def unread(self, native: Mapping[str, Any]) -> list[UnreadKey]:
        """Keys that nothing here reads."""
        return self.spelling.unread(native)

    def known_names(self, native: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration without keys that are names of options in mismatchctl only."""
        return self.spelling.without_internal(native)

    def is_on(self, native: Mapping[str, Any]) -> bool:
        """Return False if a configuration lacks the switch without which nothing is corrected."""
        return self.switch is None or any(name == self.switch.option for _, name, _ in self.spelling.find(native))

    def ships(self, name: str) -> bool:
        """Return True if a file contains nothing but the framework's defaults."""
        return bool(self.shipped) and re.fullmatch(self.shipped, name) is not None

    def reads(self, place: tuple[str, ...], native: Mapping[str, Any]) -> bool:
        """Return True if a value at this place is an option, or stands inside one."""
        return any(place[: len(found)] == tuple(map(str, found)) for found, _, _ in self.spelling.find(native))

    @abstractmethod
    def rules(self, options: Options) -> Rules:
        """Weight rule and gates."""

    @abstractmethod
    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        """Terms of the loss, each with a factor per token."""

    @abstractmethod
    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        """What it logs beside the loss."""

    def prepared(self, step: Step, options: Options, correction: Correction) -> ConfiguredStep:
        """The step as this configuration looks at it."""
        return ConfiguredStep(step, options, correction)

    def correction(self, native: Mapping[str, Any]) -> Correction:
        """A configuration as a Correction."""
        with self._taking_values():
            options = self.read(native)
            weight, gates = self.rules(options)
            made = ConfiguredCorrection(name=self.name, weight=weight, gates=gates, loss=self.anchor(options))
        made._options = options
        return made

    @contextmanager
    def _taking_values(self) -> Iterator[None]:
        """Say of values that options cannot have that they cannot."""
        try:
            yield
        except ValidationError as error:
            raise ConfigError(explain_error(error, Correction)) from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.title} does not take these values: {error}") from error

    def anchor(self, options: Options) -> Any:
        """The loss that the core knows nearest to it."""
        return "ppo"

    def native(self, correction: Correction) -> tuple[dict[str, Any], list[str]]:
        """The options of a Correction that came from some; else what forms of its rules say together."""
        options = self._options_of(correction)
        if options is not None:
            return self.spelling.written(options), []
        rules = ([] if correction.weight is None else ["its weight rule"]) + [gate.title for gate in correction.gates]
        return {}, [f"{self.title} has no options for {' with '.join(rules) or 'no correction at all'}"]

    def _options_of(self, correction: Correction) -> Options | None:
        if isinstance(correction, ConfiguredCorrection) and self._says(correction._options, correction):
            return {name: value for name, value in correction._options.items() if value != self.options.get(name)}
        whole = (form(*bounds) for bounds in _iterate_bounds(correction) for form in self.forms)
        parts = product(*(self._forms_of(rule) for rule in (*correction.gates, correction.weight) if rule is not None))
        stacks = (merge_options(part) for part in islice(parts, _MAX_STACKS))
        return next((said for said in (*whole, *stacks) if self._says(said, correction)), None)

    def _forms_of(self, rule: Weight | Gate) -> list[Options]:
        """What may say one rule among others."""
        bounds = rule.keep if isinstance(rule, Gate) else _weight_bounds(rule)
        alone = Correction(gates=(rule,)) if isinstance(rule, Gate) else Correction(weight=rule)
        said = [form(*bounds) for form in self.forms]
        exact = [one for one in said if self._says(one, alone)]
        return exact or [one for one in said if self._holds(one, rule)]

    def _holds(self, options: Options, rule: Weight | Gate) -> bool:
        """Whether a rule is among those that options say, but for what it sees of earlier ones."""
        weight, gates = self._rules_of(options) or (None, ())
        given = [one.model_copy(update={"sees": rule.sees}) for one in (weight, *gates) if one is not None]
        return rule in given

    def _says(self, options: Options, correction: Correction) -> bool:
        return self._rules_of(options) == (correction.weight, correction.gates)

    def _rules_of(self, options: Options) -> Rules | None:
        """What options say; None where they are refused."""
        try:
            return self.rules(self.read(options))
        except (ValidationError, ConfigError, TypeError, KeyError):
            return None

    def lint(self, native: Mapping[str, Any], hidden: Hidden = NOTHING_HIDDEN) -> list[LintMessage]:
        """Check a configuration. Nothing that depends on a hidden value is reported."""
        watched = Watched({})
        found: list[LintMessage] = []
        try:
            with self._taking_values():
                options = self.read(native)
                watched = Watched(options)
                weight, gates = self.rules(watched)
                made = ConfiguredCorrection(name=self.name, weight=weight, gates=gates, loss=self.anchor(options))
                if not self._depends(watched, native, hidden):
                    found += [*self._off(native, made), *check_bounds(made, "", lambda gate: "", self.title)]
                for trap in self.traps:
                    watched = Watched(options)
                    if trap.caught(watched) and not self._depends(watched, native, hidden):
                        found.append(LintMessage(trap.level, trap.place, trap.consequence, trap.fix, self.source))
        except ConfigError as error:
            if self._depends(watched, native, hidden):
                return []
            return [LintMessage("error", "", str(error), "correct it", self.title)]
        return found

    def _depends(self, watched: Watched, native: Mapping[str, Any], hidden: Hidden) -> bool:
        """Return True if an option that was looked at has a hidden value."""
        if not hidden:
            return False
        given = {tuple(map(str, place)): (name, value) for place, name, value in self.spelling.find(native)}
        named = {(name,) for name, _ in given.values()} | {
            (name, str(key)) for name, value in given.values() if isinstance(value, Mapping) for key in value
        }
        if hidden.rest and any(seen not in named for seen in watched.seen if not watched.is_block(seen)):
            return True
        spelt = {self.spelling.name_of(place.rpartition(".")[2]) or place.rpartition(".")[2] for place in hidden.places}
        return any(seen[-1] in spelt for seen in watched.seen)

    def _off(self, native: Mapping[str, Any], made: Correction) -> list[LintMessage]:
        """That what turns the correction on is missing."""
        switch = self.switch
        given = {name for _, name, _ in self.spelling.find(native)}
        if switch is None or made.weight is None or switch.option in given or not self.recognizes(native):
            return []
        return [LintMessage("warning", switch.place, switch.consequence, switch.fix, self.source)]

    def recognizes(self, native: Mapping[str, Any]) -> bool:
        """Return True if a configuration contains a key that only this framework's corrections have."""
        return self.spelling.recognizes(native)

    def gate_places(self, native: Mapping[str, Any], correction: Correction) -> list[str]:
        """Where each threshold stands: in the keys of the block."""
        return [".".join(self.block)] * len(correction.gates)

    def _run(self, table: pa.Table, correction: Correction, dtype: Dtype, **changes: Any) -> ConfiguredStep:
        said, unsaid = self.native(correction)
        if unsaid:
            raise ConfigError(f"{self.name} cannot do this: {'; '.join(unsaid)}")
        options = self.read(said | changes)
        return self.prepared(Step.read(table, dtype, {**self.columns, **self.own_columns}), options, correction)

    def replay(
        self, table: pa.Table, correction: Correction, options: ReplayOptions = DEFAULT_REPLAY_OPTIONS
    ) -> Replay:
        """A step is one batch on one rank: micro-batches and reducers are not taken."""
        run = self._run(table, correction, options.dtype)
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
        """What the framework multiplies each token's loss with."""
        return run.weights

    def shown_keep(self, run: ConfiguredStep) -> Bools:
        """Which tokens it leaves in its loss."""
        return run.keep

    def loss(self, table: pa.Table, correction: Correction, **options: Any) -> Loss:
        """Value, gradient by each current log-prob, and what is logged beside it.

        Args:
            table: as for `replay`, with `current_log_probs` and `advantages`.
            correction: as from `correction`.
            **options: the framework's own, and `dtype`.
        """
        dtype = options.pop("dtype", "float64")
        run = self._run(table, correction, dtype, **options)
        if not run.has_loss:
            raise ConfigError("the loss needs the columns current_log_probs and advantages")
        with np.errstate(all="ignore"):
            value, gradient = sum_terms(self.terms(run))
            logged = {name: float(number) for name, number in self.metrics(run).items()}
        return Loss(
            value, logged if self.loss_key is None else logged | {self.loss_key: value}, run.step.by_row(gradient)
        )

    def meanings(self) -> list[Meaning]:
        """What each name stands for."""
        return list(_read_meanings(Path(inspect.getfile(type(self))).with_name("names.yaml"), self.version))


@cache
def _read_meanings(place: Path, version: str) -> tuple[Meaning, ...]:
    """What names.yaml says of a version: `{a,b}` in a name stands for each, `{}` in the words for the last of them."""
    said: dict[str, Any] = read_data(place)
    own = {name: words for name, words in said.items() if not name.startswith("@")}
    own |= said.get(f"@{version}", {})
    found = []
    for pattern, (what, over, how, basis) in own.items():
        ends = [part.split(",") for part in _BRACES.findall(pattern)]
        form = _BRACES.sub("{}", pattern)
        for chosen in product(*ends):
            reduction = how.format(chosen[-1]) if chosen else how
            found.append(Meaning(form.format(*chosen), "", what, over, reduction, None, basis))
    return tuple(found)


def make_off_policy_gate(limit: float, **more: Any) -> Gate:
    """OPSM: sequences with a negative advantage that have drifted from the sampler further than a limit are dropped."""
    keep = (None, limit)
    return Gate(statistic="k1", level="mean", source="current/rollout", keep=keep, when="negative_advantage", **more)


def _weight_bounds(weight: Weight) -> tuple[Any, Any]:
    return weight.clip or weight.zero or (None, weight.truncate)


def _iterate_bounds(correction: Correction) -> Iterable[tuple[Any, Any]]:
    """Intervals that a correction holds, of its gates before that of its weight."""
    for gate in correction.gates:
        yield gate.keep
    if correction.weight is not None:
        yield _weight_bounds(correction.weight)
    yield None, None


def make_adapter(kind: type[PlainFramework], versions: tuple[str, ...], default: str = "", **brought: Any) -> Adapter:
    """What one of these brings.

    Args:
        kind: the framework.
        versions: of its code, the newest first.
        default: what the plain name means; empty: the newest.
        **brought: fields of the Shelf besides.
    """

    def load(version: str) -> Framework:
        if version and version not in versions:
            raise ConfigError(f"{kind.name} has no version {version!r}{suggestion(version, versions)}")
        return kind(version or default or versions[0])

    def recognize(native: Mapping[str, Any]) -> str | None:
        return kind.version_of(native) if kind(versions[0]).spelling.recognizes(native) else None

    return Adapter(kind.name, versions, load, recognize, kind.columns, **brought)
