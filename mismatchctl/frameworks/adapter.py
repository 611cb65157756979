"""Adapter: what a framework's folder provides, and the layout of its dump files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mismatchctl.corrections.model import Correction
from mismatchctl.errors import suggestion
from mismatchctl.frameworks.lint import LintMessage
from mismatchctl.io.scripts import PythonCall
from mismatchctl.io.yaml import Unknown

if TYPE_CHECKING:
    import pyarrow as pa

    from mismatchctl.measure.metrics.metric import Measure, Quantity

Row = dict[str, Any]


class File(Protocol):
    """A file that is opened as data: nothing that it names is ever run."""

    @property
    def path(self) -> Path:
        """Where it lies."""

    @property
    def step(self) -> int | None:
        """The step that its name tells: the last number in it."""

    def at(self, path: Path) -> File:
        """Another file, opened the same way."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """JSON objects, one per line."""

    def first_line(self) -> Mapping[str, Any]:
        """The first JSON object of a file of lines; an empty one if there is none."""

    def torch(self, content: Any = None) -> Any:
        """What torch saved, tensors as arrays; `content`: bytes of a torch file that lie within it."""

    def holds(self, *names: str) -> bool:
        """Whether torch saved a dict that has these keys."""

    def batch(self, names: Collection[str]) -> Iterator[Row]:
        """Rows of the dict of padded columns that torch saved; of other columns than `names` nothing."""

    def pickle(self, known: Mapping[tuple[str, str], Callable[..., Any] | None]) -> Any:
        """What a pickle holds: plain values and arrays.

        Args:
            known: what else it may ask for, by module and name: what stands for calling it; None: for naming it.
        """

    def array(self, data: Any, dtype: Any, shape: Any) -> Any:
        """An array from its bytes.

        Raises:
            ValueError: they are not as many as that takes.
        """


@dataclass(frozen=True)
class FileLayout:
    """One framework's file.

    A layout that declares no `train_log_probs` is of rollout-only files, which need them joined.

    Attributes:
        framework: its name, as `--from` takes it.
        columns: column of the contract -> name in the raw rows; what is not declared is not converted. `step` and
            `sequence_id` are taken under these names, and need no declaration.
        mask: what the mask's ones mean.
        weighted: whether the mask holds weights, of which those above 0 are of valid tokens; else it is 0 or 1.
        patterns: names of its files, with folders above them where these belong to the name.
        rows: what reads one file, as values of the file's own names.
        prompt: whether the token axis begins with the prompt.
        padding: the side that rows are padded on.
        next_token: columns of the contract whose entry j is about token j + 1; the others are unshifted.
        token_versions: columns of versions that have one value per token.
        missing: what stands for a log-prob that there is none of; such tokens are masked out, and counted.
        duplicates: whether several files may hold the same sequence of a step (tensor-parallel ranks).
        keys: of the dict that torch saved, those by which it is one of these.
        remedy: how to get log-probs, for a layout that has none.
        recognizes: whether a file whose name fits one of `patterns`, and that has `keys`, is one of these.
    """

    framework: str
    columns: Mapping[str, str]
    mask: str
    patterns: tuple[str, ...]
    rows: Callable[[File], Iterator[Row]] = field(repr=False)
    prompt: bool = False
    padding: Literal["left", "right", "none"] = "none"
    next_token: frozenset[str] = frozenset()
    weighted: bool = False
    token_versions: tuple[str, ...] = ()
    missing: tuple[float, ...] = ()
    duplicates: bool = False
    keys: tuple[str, ...] = ()
    remedy: str = ""
    recognizes: Callable[[File], bool] = field(default=lambda file: True, repr=False)

    @property
    def rollout_only(self) -> bool:
        """Whether its files hold no train log-probs, so that there is nothing to compare until they are joined."""
        return "train_log_probs" not in self.columns


def to_array(value: Any) -> Any:
    """An array, of half precision as float32; everything else as it is."""
    return value.astype(np.float32) if isinstance(value, np.ndarray) and value.dtype == np.float16 else value


@dataclass(frozen=True)
class UnreadKey:
    """A key that nothing reads.

    Attributes:
        place: the keys that lead to it, and itself.
        hint: what reads it, or what was meant, as a clause to append to a sentence; empty where nobody can tell.
        refused: it would have corrected something: whoever wrote it expects that it does. The rest is only told.
    """

    place: tuple[str, ...]
    hint: str
    refused: bool

    @property
    def key(self) -> str:
        """Its last key."""
        return self.place[-1]


def mark_unknown(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Mark interpolations that could not be resolved, and OmegaConf's `???`, as Unknown."""
    return {key: _marked(value) for key, value in keys.items()}


def _marked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return mark_unknown(value)
    if isinstance(value, list):
        return [_marked(one) for one in value]
    if isinstance(value, str) and not isinstance(value, Unknown) and ("${" in value or value == "???"):
        return Unknown(value)
    return value


def _unknown(keys: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in keys.items():
        place = (*above, str(key))
        if isinstance(value, Mapping):
            yield from _unknown(value, place)
        elif isinstance(value, Unknown):
            yield place, value
        elif isinstance(value, list):
            for number, one in enumerate(value):
                inner = one if isinstance(one, Mapping) else {str(number): one}
                yield from _unknown(inner, place)


def without_unknown(keys: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without its Unknown values."""
    made: dict[str, Any] = {}
    for key, value in keys.items():
        if isinstance(value, Mapping):
            made[key] = without_unknown(value)
        elif isinstance(value, list):
            made[key] = [without_unknown(one) if isinstance(one, Mapping) else one for one in value]
        elif not isinstance(value, Unknown):
            made[key] = value
    return made


def is_typo_of(key: str, names: Iterable[str]) -> str:
    """The name that a key misspells by one or two letters, or an empty string."""
    plain = _letters(key)
    for name in names:
        other = _letters(name)
        most = 1 if min(len(plain), len(other)) < 9 else 2
        if abs(len(plain) - len(other)) <= most and 0 < _distance(plain, other, most) <= most:
            return name
        if plain == other and key != name:
            return name
    return ""


def _letters(key: str) -> str:
    return key.lower().replace("-", "").replace("_", "")


def _distance(one: str, other: str, most: int) -> int:
    """Edits between two words, with swapped neighbours as one edit; `most + 1` if there are more."""
    before, last = list(range(len(other) + 1)), [0] * (len(other) + 1)
    for row, letter in enumerate(one, 1):
        current = [row]
        for column, opposite in enumerate(other, 1):
            best = min(before[column] + 1, current[-1] + 1, before[column - 1] + (letter != opposite))
            if row > 1 and column > 1 and letter == other[column - 2] and one[row - 2] == opposite:
                best = min(best, last[column - 2] + 1)
            current.append(best)
        if min(current) > most:
            return most + 1
        last, before = before, current
    return before[-1]


suggest_key = partial(suggestion, cutoff=0.8)
"""The known key that was certainly misspelt: many others of a configuration are somebody else's."""


Dtype = Literal["float32", "float64"]


@dataclass(frozen=True)
class ReplayOptions:
    """How a step is replayed.

    Attributes:
        micro_batch_size: consecutive rows per micro-batch, where no column `micro_batch` names them; None: all of a
            step.
        dtype: what the framework computed in; most train in float32.
        reducer: `sample_mean` or `token_mean`, for slime and Miles; None: the default.
    """

    micro_batch_size: int | None = None
    dtype: Dtype = "float64"
    reducer: str | None = None

    @property
    def given(self) -> dict[str, str | int] | None:
        """What is not left to the default; None if nothing is."""
        return {name: value for name, value in asdict(self).items() if value != getattr(ReplayOptions, name)} or None


DEFAULT_REPLAY_OPTIONS = ReplayOptions()


@dataclass(frozen=True)
class Replay:
    """What a framework would compute for one training step.

    Attributes:
        logged: exactly the names that it logs for that step and configuration.
        weights: importance weights of each row over all its tokens, 0 where masked; None when weights are off.
        keep: which tokens of each row remain after rejection.
    """

    logged: dict[str, float]
    weights: list[NDArray[np.floating[Any]]] | None
    keep: list[NDArray[np.bool_]]


@dataclass(frozen=True)
class Loss:
    """Value of a framework's policy loss for one training step, and what it logs beside it.

    Attributes:
        value: the loss.
        metrics: logged names and values.
        gradient: derivative by each current log-prob, of each row over all its tokens, 0 where masked; None where it
            is not known.
    """

    value: float
    metrics: dict[str, float]
    gradient: list[NDArray[np.floating[Any]]] | None = None


@dataclass(frozen=True)
class Meaning:
    """One name under one configuration.

    Attributes:
        name: as logged, with all prefixes.
        when: the configuration that logs it so; empty: every one.
        quantity: what is measured, in words.
        over: which tokens or sequences it is taken over.
        reduction: how it becomes one number.
        like: the same in the words that the registry of metrics has for it; None where it knows nothing like it.
        basis: what it looks at: the two policies, or weights at a stage.
        logged_as: the name under which this version logs what documents or earlier versions call so; empty: the name.
        until: the last version that logged it under this name; empty: this one does, or none ever did.
    """

    name: str
    when: str
    quantity: str
    over: str
    reduction: str
    like: Quantity | None = None
    basis: str = "train/rollout"
    logged_as: str = ""
    until: str = ""

    @property
    def measure(self) -> Measure | None:
        """The meaning in parts, to be held against the registry's."""
        from mismatchctl.measure.metrics.metric import Measure

        return None if self.like is None else Measure(self.like, self.over, self.reduction, self.basis)


@dataclass(frozen=True)
class Hidden:
    """What a file does not say about a configuration.

    Attributes:
        places: dotted places whose value comes from elsewhere.
        rest: whether everything that is not in the file may be set by another file.
    """

    places: tuple[str, ...] = ()
    rest: bool = False

    def __bool__(self) -> bool:
        return bool(self.places) or self.rest


NOTHING_HIDDEN = Hidden()


class Framework(ABC):
    """One framework at one version.

    Attributes:
        name: as `load` takes it.
        version: what follows the @.
        block: the keys that its configuration of corrections stands under in a full one.
        log_step_offset: by how much the step of a batch in its log is above the step at which the batch was generated.
        reads_yaml_1_1: whether it reads its files by YAML 1.1, where 1e-4 is text; else by OmegaConf, where `${a.b}`
            stands for another value.
    """

    name: str
    version: str
    block: tuple[str, ...] = ()
    reads_yaml_1_1: bool = False
    log_step_offset: int = 0

    @property
    def title(self) -> str:
        """Name and version, as `load` takes them."""
        return f"{self.name}@{self.version}"

    @property
    def dated(self) -> str:
        """The title, with the day of that code where the version is no date itself."""
        return self.title

    def with_included(self, native: dict[str, Any], folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Merge the files that a configuration names in its own way, and return the names of those not found."""
        return native, ()

    def known_names(self, native: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration without keys that mean something in mismatchctl only."""
        return dict(native)

    def is_on(self, native: Mapping[str, Any]) -> bool:
        """Return False if a configuration lacks the switch without which nothing is corrected."""
        return True

    def ships(self, name: str) -> bool:
        """Return True if a file comes with the framework and contains nothing but its defaults."""
        return False

    def reads(self, place: tuple[str, ...], native: Mapping[str, Any]) -> bool:
        """Return True if a value at this place bears on the correction."""
        return True

    def unknown_values(self, native: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
        """Places that bear on the correction and whose value is not in the file, with what they are set to."""
        return tuple((".".join(place), text) for place, text in _unknown(native) if self.reads(place, native))

    @abstractmethod
    def correction(self, native: Mapping[str, Any]) -> Correction:
        """A configuration in the framework's own keys as a Correction.

        Raises:
            ConfigError: what the framework itself rejects, with its reason.
        """

    @abstractmethod
    def native(self, correction: Correction) -> tuple[dict[str, Any], list[str]]:
        """A Correction in the framework's own keys, as far as it can be said there; and what cannot."""

    def holds(self, native: Mapping[str, Any]) -> bool:
        """Whether a configuration that is said to be its own may be: one by which nobody is recognized."""
        return False

    def unread(self, native: Mapping[str, Any]) -> list[UnreadKey]:
        """Keys of a configuration that nothing reads; `correction` refuses those that are of a correction."""
        return []

    @abstractmethod
    def lint(self, native: Mapping[str, Any], hidden: Hidden = NOTHING_HIDDEN) -> list[LintMessage]:
        """The traps of a configuration in the framework's own keys, one it rejects included."""

    @abstractmethod
    def gate_places(self, native: Mapping[str, Any], correction: Correction) -> list[str]:
        """Where in a configuration the threshold of each gate of its correction stands."""

    @abstractmethod
    def replay(
        self, table: pa.Table, correction: Correction, options: ReplayOptions = DEFAULT_REPLAY_OPTIONS
    ) -> Replay:
        """What the framework computes for the rows of one training step, in their order.

        Args:
            table: one row per sequence, under the contract's names or the framework's; without `current_log_probs` and
                `advantages` nothing of the loss is logged.
            correction: as from `correction`.
            options: how it was computed.

        Raises:
            ConfigError: the framework cannot do that.
            DataError: a column is missing, or there is no token where it needs one.
        """

    def logged_beside(self, table: pa.Table, correction: Correction, dtype: Dtype = "float64") -> dict[str, float]:
        """What it logs of those rows apart from its correction; nothing unless a framework says otherwise."""
        return {}

    def untold(self, correction: Correction) -> frozenset[str]:
        """Names of `Replay.logged` that need more than the valid tokens of rollout, train and current policy."""
        return frozenset()

    @abstractmethod
    def meanings(self) -> list[Meaning]:
        """What each name that this version logs stands for."""

    def logged_key(self, name: str) -> str:
        """A name of `meanings` as `Replay.logged` has it."""
        return name

    @abstractmethod
    def loss(self, table: pa.Table, correction: Correction, **options: Any) -> Loss:
        """The framework's policy loss on those rows, with its own options."""


@dataclass(frozen=True)
class Adapter:
    """What one framework brings: everything of it that stands in its folder.

    Attributes:
        name: as `load` takes it.
        versions: of its code, the newest first.
        load: the framework at a version; empty: what the plain name means. ConfigError: there is no such version.
        recognize: the version that a configuration was written for (empty: any), None where it is of another one.
        columns: its name of a column of the contract, where that means one thing wherever it is used.
        layouts: its files of dumps.
        classes: classes whose calls in Python say a configuration: the keys of one, None where it is no such call.
        factory: the keys that a factory of such a class sets at a version, for presets that are named after it.
    """

    name: str
    versions: tuple[str, ...]
    load: Callable[[str], Framework]
    recognize: Callable[[Mapping[str, Any]], str | None]
    columns: Mapping[str, str] = field(default_factory=dict)
    layouts: tuple[FileLayout, ...] = ()
    classes: Mapping[str, Callable[[PythonCall], dict[str, Any] | None]] = field(default_factory=dict)
    factory: Callable[[str, str], Mapping[str, Any]] = lambda version, name: {}

    @property
    def titles(self) -> list[str]:
        """Its name at each version, the newest first."""
        return [f"{self.name}@{version}" for version in self.versions]
