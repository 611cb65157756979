"""Adapter: what a framework's folder provides, and the layout of its dump files."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
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
        missing: what stands for a log-prob that there is none of; such tokens are masked out, and counted.
        duplicates: whether several files may hold the same sequence of a step (tensor-parallel ranks).
        keys: of the dict that torch saved, those by which it is one of these.
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
    missing: tuple[float, ...] = ()
    duplicates: bool = False
    keys: tuple[str, ...] = ()
    recognizes: Callable[[File], bool] = field(default=lambda file: True, repr=False)

    @property
    def rollout_only(self) -> bool:
        """Whether its files hold no train log-probs, so that there is nothing to compare until they are joined."""
        return "train_log_probs" not in self.columns


def to_array(value: Any) -> Any:
    """An array, of half precision as float32; everything else as it is."""
    return value.astype(np.float32) if isinstance(value, np.ndarray) and value.dtype == np.float16 else value


_CORRECTION_KEYS = re.compile(
    r"rollout_(is|rs|corr|correction|token_veto)(_.*)?|(tis|rs|mis)_.*|use_(tis|rs|mis|mask|rollout_correction)"
    r"|bypass_(mode|old_logprob_for_rollout)"
)


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


def is_correction_key(key: str) -> bool:
    """Whether a name can only be meant for a correction, in whatever framework."""
    return _CORRECTION_KEYS.fullmatch(key) is not None


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
        reducer: one of its `reducers`; None: the first.
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
        logged_as: the name under which code logs what only a document calls so; empty: the name itself.
    """

    name: str
    when: str
    quantity: str
    over: str
    reduction: str
    like: Quantity | None = None
    basis: str = "train/rollout"
    logged_as: str = ""

    @property
    def measure(self) -> Measure | None:
        """The meaning in parts, to be held against the registry's."""
        from mismatchctl.measure.metrics.metric import Measure

        return None if self.like is None else Measure(self.like, self.over, self.reduction, self.basis)


class Framework(ABC):
    """One framework at one version.

    Attributes:
        name: as `load` takes it.
        version: what follows the @.
        reducers: how it can sum up a step, the default first, where it has a choice.
        block: the keys that its configuration of corrections stands under in a full one.
        reads_yaml_1_1: whether it reads its files by YAML 1.1, where 1e-4 is text; else by OmegaConf, where `${a.b}`
            stands for another value.
    """

    name: str
    version: str
    reducers: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    reads_yaml_1_1: bool = False

    @property
    def title(self) -> str:
        """Name and version, as `load` takes them."""
        return f"{self.name}@{self.version}"

    @property
    def dated(self) -> str:
        """The title, with the day of that code where the version is no date itself."""
        return self.title

    def with_included(self, native: dict[str, Any], folder: Path) -> dict[str, Any]:
        """A configuration with the files put in that it names, looked for beside it and in the working folder.

        Raises:
            ConfigError: one is not there.
        """
        return native

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
    def lint(self, native: Mapping[str, Any]) -> list[LintMessage]:
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
