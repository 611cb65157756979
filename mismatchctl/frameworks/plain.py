"""A framework whose options, by name, say one weight rule and some gates: what most shelves are built from."""

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
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import PrivateAttr, ValidationError

from mismatchctl.batch import Bools
from mismatchctl.correction import Correction, Gate, Weight
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.framework import (
    AS_USUAL,
    Dtype,
    Framework,
    Loss,
    Meaning,
    Replay,
    ReplayOptions,
    Shelf,
    UnreadKey,
)
from mismatchctl.frameworks.lint import Level, LintMessage, bound_findings
from mismatchctl.frameworks.options import Place, Spelling, merged
from mismatchctl.frameworks.run import Options, Run, Step
from mismatchctl.surrogates import Array, Term, total
from mismatchctl.texts import read_data
from mismatchctl.validation import explained

if TYPE_CHECKING:
    import pyarrow as pa

_BRACES = re.compile(r"\{([^}]*)\}")
_MOST_STACKS = 64
"""Ways to put forms together that are tried."""

Rules = tuple[Weight | None, tuple[Gate, ...]]


class Configured(Correction):
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


class PlainFramework(Framework):
    """A framework whose options say one weight rule and some gates.

    A subclass gives the tables, `rules`, `terms` and `metrics`.

    Attributes:
        options: name -> default; what is not given has it.
        aliases: other spellings -> name.
        blocks: keys beside `block` under which options stand in a full configuration.
        signs: what only its configurations have a key like, a dotted place, or one with its value: `loss.type=ipo`.
        shared: options that are blocks in which other things stand too.
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
        return Spelling(self.options, self.aliases, places, self.signs, self.shared)

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

    @abstractmethod
    def rules(self, options: Options) -> Rules:
        """Weight rule and gates."""

    @abstractmethod
    def terms(self, run: Run) -> list[tuple[Term, Array]]:
        """Terms of the loss, each with a factor per token."""

    @abstractmethod
    def metrics(self, run: Run) -> dict[str, float]:
        """What it logs beside the loss."""

    def prepared(self, step: Step, options: Options, correction: Correction) -> Run:
        """The step as this configuration looks at it."""
        return Run(step, options, correction)

    def correction(self, native: Mapping[str, Any]) -> Correction:
        """A configuration as a Correction."""
        with self._taking_values():
            options = self.read(native)
            weight, gates = self.rules(options)
            made = Configured(name=self.name, weight=weight, gates=gates, loss=self.anchor(options))
        made._options = options
        return made

    @contextmanager
    def _taking_values(self) -> Iterator[None]:
        """Say of values that options cannot have that they cannot."""
        try:
            yield
        except ValidationError as error:
            raise ConfigError(explained(error, Correction)) from error
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
        if isinstance(correction, Configured) and self._says(correction._options, correction):
            return {name: value for name, value in correction._options.items() if value != self.options.get(name)}
        whole = (form(*bounds) for bounds in _bounds(correction) for form in self.forms)
        parts = product(*(self._forms_of(rule) for rule in (*correction.gates, correction.weight) if rule is not None))
        stacks = (merged(part) for part in islice(parts, _MOST_STACKS))
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

    def lint(self, native: Mapping[str, Any]) -> list[LintMessage]:
        """The traps of a configuration."""
        try:
            made, options = self.correction(native), self.read(native)
            with self._taking_values():
                found = [
                    LintMessage(trap.level, trap.place, trap.consequence, trap.fix, self.source)
                    for trap in self.traps
                    if trap.caught(options)
                ]
        except ConfigError as error:
            return [LintMessage("error", "", str(error), "correct it", self.title)]
        return [*self._off(native, made), *found, *bound_findings(made, "", lambda gate: "", self.title)]

    def _off(self, native: Mapping[str, Any], made: Correction) -> list[LintMessage]:
        """That what turns the correction on is missing."""
        switch = self.switch
        given = {name for _, name, _ in self.spelling.find(native)}
        if switch is None or made.weight is None or switch.option in given:
            return []
        return [LintMessage("warning", switch.place, switch.consequence, switch.fix, self.source)]

    def gate_places(self, native: Mapping[str, Any], correction: Correction) -> list[str]:
        """Where each threshold stands: in the keys of the block."""
        return [".".join(self.block)] * len(correction.gates)

    def _run(self, table: pa.Table, correction: Correction, dtype: Dtype, **changes: Any) -> Run:
        said, unsaid = self.native(correction)
        if unsaid:
            raise ConfigError(f"{self.name} cannot do this: {'; '.join(unsaid)}")
        options = self.read(said | changes)
        return self.prepared(Step.read(table, dtype, {**self.columns, **self.own_columns}), options, correction)

    def replay(self, table: pa.Table, correction: Correction, options: ReplayOptions = AS_USUAL) -> Replay:
        """A step is one batch on one rank: micro-batches and reducers are not taken."""
        run = self._run(table, correction, options.dtype)
        with np.errstate(all="ignore"):
            logged = self.metrics(run)
            if run.has_loss and self.loss_key is not None:
                logged[self.loss_key] = total(self.terms(run))[0]
            by_row = run.step.by_row
            weighs = correction.weight is not None or self.weighs_always
            return Replay(
                {name: float(value) for name, value in logged.items()},
                by_row(self.shown_weights(run)) if weighs else None,
                [flags.astype(np.bool_) for flags in by_row(self.shown_keep(run))],
            )

    def shown_weights(self, run: Run) -> Array:
        """What the framework multiplies each token's loss with."""
        return run.weights

    def shown_keep(self, run: Run) -> Bools:
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
            value, gradient = total(self.terms(run))
            logged = {name: float(number) for name, number in self.metrics(run).items()}
        return Loss(
            value, logged if self.loss_key is None else logged | {self.loss_key: value}, run.step.by_row(gradient)
        )

    def meanings(self) -> list[Meaning]:
        """What each name stands for."""
        return list(_meanings(Path(inspect.getfile(type(self))).with_name("names.yaml"), self.version))


@cache
def _meanings(place: Path, version: str) -> tuple[Meaning, ...]:
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


def off_policy_mask(limit: float, **more: Any) -> Gate:
    """OPSM: sequences with a negative advantage that have drifted from the sampler further than a limit are dropped."""
    keep = (None, limit)
    return Gate(statistic="k1", level="mean", source="current/rollout", keep=keep, when="negative_advantage", **more)


def _weight_bounds(weight: Weight) -> tuple[Any, Any]:
    return weight.clip or weight.zero or (None, weight.truncate)


def _bounds(correction: Correction) -> Iterable[tuple[Any, Any]]:
    """Intervals that a correction holds, of its gates before that of its weight."""
    for gate in correction.gates:
        yield gate.keep
    if correction.weight is not None:
        yield _weight_bounds(correction.weight)
    yield None, None


def shelf_of(kind: type[PlainFramework], versions: tuple[str, ...], default: str = "", **brought: Any) -> Shelf:
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

    return Shelf(kind.name, versions, load, recognize, kind.columns, **brought)
