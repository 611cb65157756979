"""What a shelf is built from: options read by name, a Correction that remembers them, and one step under it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import PrivateAttr, ValidationError

from mismatchctl.batch import Bools, Segments, TokenBatch
from mismatchctl.correction import Applied, Correction, Gate, Weight, apply
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.framework import Dtype, Framework, Loss, Meaning, Replay
from mismatchctl.frameworks.lint import Finding, gate_findings, weight_findings
from mismatchctl.frameworks.step import Step
from mismatchctl.ratios import Ratios, SingleRatios
from mismatchctl.surrogates import Array, Term, total

Options = dict[str, Any]
Rules = tuple[Weight | None, tuple[Gate, ...]]


class Configured(Correction):
    """A Correction that remembers the options that it was read from: a loss and its metrics depend on more of them."""

    _options: Options = PrivateAttr(default_factory=dict)


@dataclass(frozen=True)
class Trap:
    """A documented trap: what options it is in, and what to tell.

    Attributes:
        caught: whether options hold it.
        finding: what is said then.
    """

    caught: Callable[[Options], bool]
    finding: Finding


@dataclass
class Run:
    """One step under one configuration, on the valid tokens [T] in the dtype of the training.

    Attributes:
        step: the rows.
        options: all of them, defaults filled in.
        correction: the rules.
        trained: the column that stands for the trainer's recomputation.
        anchored: the column that stands for the sampler.
        unknown: what stands for a log-prob of the sampler that is NaN; None: it stays.
        single: whether statistics are taken in float32 where the training is.
    """

    step: Step
    options: Options
    correction: Correction
    trained: str = "train_log_probs"
    anchored: str = "rollout_log_probs"
    single: bool = True
    unknown: float | None = None

    @cached_property
    def segments(self) -> Segments:
        """One segment per row."""
        return self.step.segments

    @cached_property
    def rollout(self) -> Array:
        """Log-probs of the sampler."""
        values = self.step.values(self.anchored)
        return values if self.unknown is None else np.where(np.isnan(values), self.unknown, values).astype(values.dtype)

    @cached_property
    def train(self) -> Array:
        """Log-probs of the trainer's recomputation."""
        return self.step.values(self.trained)

    @cached_property
    def current(self) -> Array:
        """Log-probs of the policy that is updated; the recomputation's where there are none."""
        return self.step.values("current_log_probs" if self.has_loss else self.trained)

    @cached_property
    def advantages(self) -> Array:
        """Advantages of tokens; zeros where there are none."""
        return self.step.values("advantages") if self.step.has("advantages") else np.zeros_like(self.rollout)

    @property
    def has_loss(self) -> bool:
        """Whether there is what a loss needs."""
        return self.step.has("current_log_probs") and self.step.has("advantages")

    @cached_property
    def d(self) -> Array:
        """Recomputation minus sampler: the mismatch."""
        return self._difference(self.train, self.rollout)

    @cached_property
    def u(self) -> Array:
        """Current minus recomputation: the update."""
        return self._difference(self.current, self.train)

    @cached_property
    def v(self) -> Array:
        """Current minus sampler: both."""
        return self._difference(self.current, self.rollout)

    @staticmethod
    def _difference(a: Array, b: Array) -> Array:
        with np.errstate(invalid="ignore"):
            found: Array = a - b
        return found

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Valid tokens of each row [S]."""
        return self.segments.lengths

    @property
    def tokens(self) -> int:
        """Valid tokens of the step."""
        return self.segments.tokens

    @cached_property
    def width(self) -> int:
        """Positions to which rows are padded."""
        return int(self.step.rows.lengths.max(initial=0))

    @cached_property
    def batch(self) -> TokenBatch:
        """The step as the core has it."""
        mask = self.step.mask
        places = self.step.rows.places[mask]
        return TokenBatch(
            self.segments, self.rollout, self.train, self.current, places.astype(np.int64), self.advantages
        )

    @cached_property
    def applied(self) -> Applied:
        """The correction applied; in float32 its statistics are taken so."""
        single = self.single and self.step.dtype == np.float32
        kind, rules = Ratios, self.correction
        if single:
            kind = SingleRatios
            gates = tuple(gate.model_copy(update={"precision": "float32"}) for gate in rules.gates)
            rules = Correction(name=rules.name, weight=rules.weight, gates=gates, loss=rules.loss)
        policies = {"train": self.train, "rollout": self.rollout, "current": self.current}
        made = {}
        for source in self.correction.sources:
            policy, _, reference = source.partition("/")
            made[source] = kind(policies[policy], policies[reference], self.segments)
        with np.errstate(all="ignore"):
            return apply(rules, made, self.batch)

    @cached_property
    def keep(self) -> Bools:
        """Which tokens no gate rejects."""
        return self.applied.kept.expanded()

    @cached_property
    def counted(self) -> Bools:
        """Which tokens stay in denominators."""
        return self.applied.counted.expanded()

    @cached_property
    def raw_weights(self) -> Array:
        """Weights after their bound, rejected tokens' too; ones without a rule."""
        with np.errstate(all="ignore"):
            return self.applied.token_weights().astype(self.step.dtype)

    @cached_property
    def weights(self) -> Array:
        """What multiplies the loss of each token: 0 where it is rejected."""
        return np.where(self.keep, self.raw_weights, 0).astype(self.step.dtype)

    def mean(self, values: Array, where: Bools | None = None, empty: float = 0.0) -> float:
        """Mean over tokens."""
        chosen = values if where is None else values[where]
        with np.errstate(invalid="ignore", over="ignore"):
            return float(np.mean(chosen, dtype=np.float64)) if len(chosen) else empty

    def row_means(self, values: Array, where: Bools | None = None) -> Array:
        """Mean of each row over some of its tokens [S]; 0 where it has none."""
        where = np.ones(self.tokens, np.bool_) if where is None else where
        with np.errstate(invalid="ignore", over="ignore"):
            totals = self.segments.sum(np.where(where, values, 0.0))
        return totals / np.maximum(self.segments.sum(where), 1)

    def each(self, value: float) -> Array:
        """The same factor for every token."""
        return np.full(self.tokens, value)

    def by_rows(self, rows: float | None = None, where: Bools | None = None) -> Array:
        """Factors that make of losses a mean over rows of the mean over the row's tokens."""
        counts = self.lengths if where is None else self.segments.sum(where)
        return self.segments.spread(1.0 / np.maximum(counts, 1)) / (len(self.step) if rows is None else rows)


class Shelf(Framework):
    """A framework whose options say one weight rule and some gates.

    A subclass gives the tables, `rules`, `terms` and `metrics`.

    Attributes:
        options: name -> default; what is not given has it.
        aliases: other spellings -> name.
        places: of a full configuration, the keys under which options stand.
        columns: its name of a column -> the contract's.
        names: logged name -> (what it measures, over what, how it becomes one number, what it looks at).
        traps: documented ones.
        forms: ways to write a weight rule and gates between two bounds.
        loss_key: how the loss is logged; None: it is not.
        weighs_always: whether every configuration has weights.
    """

    options: Options
    aliases: Mapping[str, str] = {}
    places: tuple[str, ...] = ()
    columns: Mapping[str, str] = {}
    names: Mapping[str, tuple[str, str, str, str]] = {}
    traps: Sequence[Trap] = ()
    forms: Sequence[Callable[[Any, Any], Options]] = ()
    loss_key: str | None = "loss"
    weighs_always = False

    def __init__(self, version: str) -> None:
        self.version = version

    @property
    def block(self) -> tuple[str, ...]:
        """The keys that its options stand under in a full configuration."""
        return self.places

    def read(self, native: Mapping[str, Any]) -> Options:
        """All options of a configuration.

        Raises:
            ConfigError: an option that there is not.
        """
        found = dict(self.options)
        for key, value in native.items():
            name = self.aliases.get(key, key)
            if name not in self.options:
                raise ConfigError(f"{self.title} has no option {key!r}{suggestion(key, self.options)}")
            if isinstance(self.options[name], dict) and isinstance(value, Mapping):
                unknown = sorted(set(value) - set(self.options[name])) if self.options[name] else []
                if unknown:
                    near = suggestion(unknown[0], self.options[name])
                    raise ConfigError(f"{self.title} has no option {key}.{unknown[0]}{near}")
                value = self.options[name] | dict(value)
            found[name] = value
        return found

    def recognizes(self, native: Mapping[str, Any]) -> bool:
        """Whether a configuration names an option of its own."""
        return bool(set(native) & (set(self.options) | set(self.aliases)))

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
        options = self.read(native)
        try:
            weight, gates = self.rules(options)
            made = Configured(name=self.name, weight=weight, gates=gates, loss=self.anchor(options))
        except ValidationError as error:
            raise ConfigError("; ".join(str(item["msg"]) for item in error.errors())) from error
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{self.title} does not take these values: {error}") from error
        made._options = options
        return made

    def anchor(self, options: Options) -> Any:
        """The loss that the core knows nearest to it."""
        return "ppo"

    def native(self, correction: Correction) -> tuple[dict[str, Any], list[str]]:
        """The options of a Correction that came from some; else the first form that says the same."""
        if isinstance(correction, Configured) and self._says(correction._options, correction):
            return {key: value for key, value in correction._options.items() if value != self.options.get(key)}, []
        for low, high in _bounds(correction):
            for form in self.forms:
                said = form(low, high)
                if self._says(said, correction):
                    return said, []
        rules = ([] if correction.weight is None else ["its weight rule"]) + [gate.title for gate in correction.gates]
        return {}, [f"{self.title} has no options for {' with '.join(rules) or 'no correction at all'}"]

    def _says(self, options: Options, correction: Correction) -> bool:
        try:
            return self.rules(self.read(options)) == (correction.weight, correction.gates)
        except (ValidationError, ConfigError, TypeError, KeyError):
            return False

    def lint(self, native: Mapping[str, Any]) -> list[Finding]:
        """The traps of a configuration."""
        try:
            made = self.correction(native)
        except ConfigError as error:
            return [Finding("error", "", str(error), "correct it", self.title)]
        options = self.read(native)
        found = [trap.finding for trap in self.traps if trap.caught(options)]
        if made.weight is not None:
            found += weight_findings(made.weight, "", self.title)
        for gate in made.gates:
            found += gate_findings(gate, "", self.title)
        return found

    def gate_places(self, native: Mapping[str, Any], correction: Correction) -> list[str]:
        """Where each threshold stands: in the keys of the block."""
        return [".".join(self.places)] * len(correction.gates)

    def _run(self, table: pa.Table, correction: Correction, dtype: Dtype, **changes: Any) -> Run:
        said, unsaid = self.native(correction)
        if unsaid:
            raise ConfigError(f"{self.name} cannot do this: {'; '.join(unsaid)}")
        options = self.read(said | changes)
        return self.prepared(Step.read(table, dtype, self.columns), options, correction)

    def replay(
        self,
        table: pa.Table,
        correction: Correction,
        dtype: Dtype = "float64",
        micro_batch_size: int | None = None,
        reducer: str | None = None,
    ) -> Replay:
        """What it computes for the rows of one step, in their order, as one batch on one rank.

        Args:
            table: one row per sequence, contract columns or the framework's.
            correction: as from `correction`.
            dtype: what the training computed in; all of these train in float32.
            micro_batch_size: not taken: a step is one batch.
            reducer: not taken.
        """
        run = self._run(table, correction, dtype)
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
        return [
            Meaning(name, "", what, over, how, None, basis) for name, (what, over, how, basis) in self.names.items()
        ]

    def measure(
        self, table: pa.Table, name: str, correction: Correction | None = None, dtype: Dtype = "float64"
    ) -> float:
        """One number by its name."""
        given = correction if correction is not None else self.correction({})
        logged = self.replay(table, given, dtype).logged
        if name not in logged:
            raise ConfigError(f"{self.title} logs no {name!r} for this correction{suggestion(name, logged)}")
        return logged[name]


def _bounds(correction: Correction) -> Iterable[tuple[Any, Any]]:
    """Intervals that a correction holds, of its gates before that of its weight."""
    for gate in correction.gates:
        yield gate.keep
    if correction.weight is not None:
        weight = correction.weight
        yield weight.clip or weight.zero or (None, weight.truncate)
    yield None, None


def exp(values: Array) -> Array:
    """Exponential in the values' dtype, correctly rounded."""
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = np.exp(values.astype(np.float64)).astype(values.dtype)
    return found


def k3(x: Array) -> Array:
    """e^x - 1 - x [T], as frameworks compute it."""
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = np.expm1(x.astype(np.float64)) - x
    return found
