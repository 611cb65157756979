"""The interface that every framework adapter implements, and the description of a framework's dump files."""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.application import gate_bounds
from mismatchctl.corrections.labels import correction_label, gate_label, weight_label
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.lint import LintMessage, read_table
from mismatchctl.io.scripts import PythonCall
from mismatchctl.io.yaml import Unknown

if TYPE_CHECKING:
    import pyarrow as pa

    from mismatchctl.measure.metrics.metric import Measure, Quantity

Row = dict[str, Any]


class File(Protocol):
    """A dump file. Reading it never runs code from the file, for example code in a pickle."""

    @property
    def path(self) -> Path: ...

    @property
    def step(self) -> int | None:
        """Return the last number in the name of the file, if there is one."""

    def open(self, path: Path) -> File: ...

    def lines(self) -> Iterator[dict[str, Any]]: ...

    def first_line(self) -> Mapping[str, Any]:
        """Return the first JSON object of a JSONL file, or an empty object."""

    def torch(self, content: Any = None) -> Any:
        """Read an object saved by torch, with tensors as arrays. `content`: bytes to read instead of the whole file."""

    def has_keys(self, *names: str) -> bool: ...

    def batch(self, names: Collection[str]) -> Iterator[Row]:
        """Yield the rows of a dict of padded arrays that `torch.save` wrote. Read only the columns in `names`."""

    def pickle(self, known: Mapping[tuple[str, str], Callable[..., Any] | None]) -> Any:
        """Read a pickle of plain values and arrays. Refuse classes and functions that are not in `known`."""

    def array(self, data: Any, dtype: Any, shape: Any) -> Any: ...


@dataclass(frozen=True)
class FileLayout:
    """Layout of a framework's dump file."""

    framework: str  # name for `--from`
    columns: Mapping[str, str]  # schema column -> name in the raw rows. `step` and `sequence_id` keep their names
    mask: str  # meaning of 1 in the mask
    patterns: tuple[str, ...]  # name patterns of its files, including folders if they identify the file
    rows: Callable[[File], Iterator[Row]] = field(
        repr=False
    )  # reads the rows of one file, with the file's column names
    prompt: bool = False  # True if per-token values also cover the prompt
    padding: Literal["left", "right", "none"] = "none"  # the side on which rows are padded
    next_token: Collection[str] = ()  # schema columns whose entry j is about token j + 1
    weighted: bool = False  # True if the mask contains weights, which are above 0 for valid tokens
    token_versions: tuple[str, ...] = ()  # version columns with one value per token
    missing: tuple[float, ...] = ()  # values that stand for a missing log-prob. Such tokens are masked and counted.
    duplicates: bool = False  # True if several files may contain the same sequence of a step (tensor-parallel ranks)
    keys: tuple[str, ...] = ()  # keys of the saved dict that identify the layout
    remedy: str = ""  # how to get dumps with log-probs, if this layout lacks them
    # checks the content of a file. Only called if the file name and `keys` match
    recognizes: Callable[[File], bool] = field(default=lambda file: True, repr=False)

    @property
    def rollout_only(self) -> bool:
        return "train_log_probs" not in self.columns


def read_layout(
    module: str,
    name: str,
    rows: Callable[[File], Iterator[Row]] | None = None,
    recognizes: Callable[[File], bool] = lambda file: True,
) -> FileLayout:
    """Read the layout `name` from the module's layouts.yaml. Without `rows`, files are read as padded columns."""
    fields: dict[str, Any] = read_table(module, "layouts.yaml")[name]
    padded = {*fields["columns"].values(), "attention_mask"}
    return FileLayout(name, rows=rows or (lambda file: file.batch(padded)), recognizes=recognizes, **fields)


def to_array(value: Any) -> Any:
    """Convert a float16 array to float32. Return any other value unchanged."""
    return value.astype(np.float32) if isinstance(value, np.ndarray) and value.dtype == np.float16 else value


def take_prompt(tokens: Any, width: int, attention: Any) -> Any:
    """Return `tokens` without padding and the last `width` tokens, or `None` if `attention` has another length."""
    if attention is None or len(attention) != len(tokens):
        return None
    prompt = slice(len(tokens) - width)
    return tokens[prompt][attention[prompt] != 0]


UnreadKey = tuple[tuple[str, ...], str]
"""(path of a key that the framework does not read, hint). A hint may be "" or " (did you mean 'tis_cap'?)"."""


def split_unknown(
    keys: Mapping[str, Any], *, interpolations: bool
) -> tuple[dict[str, Any], list[tuple[tuple[str, ...], str]]]:
    """Return known values, and (path, text) of unknown values. `interpolations`: `${name}` and `???` are unknown."""
    unknown: list[tuple[tuple[str, ...], str]] = []

    def keep(value: Any, place: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            found = ((key, keep(one, (*place, str(key)))) for key, one in value.items())
            return {key: one for key, one in found if one is not _UNKNOWN}
        if isinstance(value, list):
            kept = [keep(one, (*place, str(number))) for number, one in enumerate(value)]
            return [one if made is _UNKNOWN else made for one, made in zip(value, kept, strict=True)]
        text = isinstance(value, str) and interpolations and ("${" in value or value == "???")
        if text or isinstance(value, Unknown):
            unknown.append((place, value))
            return _UNKNOWN
        return value

    return keep(keys, ()), unknown


def find_value(native: Mapping[str, Any], *keys: str) -> Any:
    found: Any = native
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


_UNKNOWN = object()


def find_similar(key: str, names: Iterable[str]) -> str:
    """Return the first of `names` within 2 edits of `key` (1 in short names), or "". Case, - and _ do not count."""
    plain = _letters(key)
    for name in names:
        other = _letters(name)
        if key != name and _is_near(plain, other, 1 if min(len(plain), len(other)) < 9 else 2):
            return name
    return ""


def _letters(key: str) -> str:
    return key.lower().replace("-", "").replace("_", "")


def _is_near(one: str, other: str, most: int) -> bool:
    """Return True if at most `most` edits turn one name into the other. Swapping two adjacent letters is one edit."""
    if one == other or not most or abs(len(one) - len(other)) > most:
        return one == other
    if one[:1] == other[:1]:
        return _is_near(one[1:], other[1:], most)
    swapped = len(one) > 1 and one[:2] == other[1::-1] and _is_near(one[2:], other[2:], most - 1)
    edited = ((one[1:], other[1:]), (one[1:], other), (one, other[1:]))
    return swapped or any(_is_near(*rest, most - 1) for rest in edited)


def is_same(one: Correction, other: Correction, rounding: float = 0.0) -> bool:
    """Return True if two Corrections give the same weights and rejections. `rounding`: tolerance for bounds."""
    (ours, our_bounds), (theirs, their_bounds) = _comparable_rules(one), _comparable_rules(other)
    pairs = zip(our_bounds, their_bounds, strict=False)
    return ours == theirs and all(a == b or math.isclose(a, b, rel_tol=rounding, abs_tol=rounding) for a, b in pairs)


def _comparable_rules(correction: Correction) -> tuple[Any, list[float]]:
    rules, bounds = [], list[float]()
    for rule in _list_rules(correction):
        fields = _relevant_fields(rule)
        bounds += gate_bounds(rule) if isinstance(rule, Gate) else rule.bounds
        zeroes = fields.pop("zero", None) is not None
        rules.append({name: fields[name] for name in fields if name not in ("keep", "truncate", "clip")} | {"": zeroes})
    return (rules, correction.loss), bounds


def _list_rules(correction: Correction) -> list[Weight | Gate]:
    return [rule for rule in (correction.weight, *correction.gates) if rule is not None]


def _relevant_fields(rule: Weight | Gate) -> dict[str, Any]:
    fields = rule.model_dump()
    if fields.get("normalize") == "none":
        del fields["normalize_over"]
    if fields.get("normalize") in ("none", "token"):
        del fields["normalize_empty"]
    return fields


def fit_rules(
    correction: Correction, write: Callable[[Correction], Any], read: Callable[[Any], Correction], title: str
) -> tuple[Correction, list[str]]:
    """Drop each rule that changes if it is written and read again. Return the other rules, and the reasons."""

    def refusal(tried: Correction) -> str:
        try:
            found = read(write(tried))
        except ConfigError as error:
            return f"refuses this rule: {error}"
        except LookupError:
            return "has no such rule"
        if is_same(tried, found, 1e-12):
            return ""
        ours, theirs = _list_rules(tried), _list_rules(found)
        if len(ours) != len(theirs) or found.loss != tried.loss:
            return "has no such rule" if found.loss == tried.loss else f"has the loss {found.loss} instead"
        wanted, has = _relevant_fields(ours[-1]), _relevant_fields(theirs[-1])
        fields = [f"{name} {value}" for name, value in has.items() if value is not None and wanted.get(name) != value]
        return f"has {', '.join(fields)} instead" if fields else f"reads {correction_label(found)} instead"

    kept, problems = Correction(), list[str]()
    if not refusal(correction):
        return correction, []
    rules: list[tuple[str, str, Any]] = [("loss", f"loss {correction.loss}", correction.loss)]
    if correction.weight is not None:
        rules.append(("weight", weight_label(correction.weight), correction.weight))
    for field_name, label, rule in [*rules, *(("gates", gate_label(gate), gate) for gate in correction.gates)]:
        tried = kept.model_copy(update={field_name: (*kept.gates, rule) if field_name == "gates" else rule})
        if problem := refusal(tried):
            problems.append(f"{label}: {title} {problem}")
        else:
            kept = tried
    return kept, problems


_MOST_PARENTS = 8


def find_file(name: str, folder: Path, *, above: bool = False) -> Path | None:
    """Find the file `name` in `folder` (with `above`, also in the working folder and, if `name` has a /, parents)."""
    relative = name.removeprefix("file://")
    parents = list(folder.resolve().parents)[:_MOST_PARENTS] if "/" in relative else []
    folders: Sequence[Path] = [folder, *parents, Path()] if above else [folder]
    # If `relative` is an absolute path, `place / relative` ignores `place`.
    found = (place / f"{relative}{suffix}" for place in folders for suffix in ("", ".yaml", ".yml"))
    return next((candidate for candidate in found if os.path.isfile(candidate)), None)


Dtype = Literal["float32", "float64"]


@dataclass(frozen=True)
class ReplayOptions:
    """Options of a replay. A replay repeats the framework's computation on the rows of a dump."""

    micro_batch_size: int | None = None  # rows per micro-batch if there is no column `micro_batch`. None: all rows
    dtype: Dtype = "float64"  # dtype of the computation. Most frameworks themselves use float32.

    @property
    def given(self) -> dict[str, str | int] | None:
        """Return the options that differ from the default, if there are any."""
        return {name: value for name, value in asdict(self).items() if value != getattr(ReplayOptions, name)} or None


CLAMP_DIFFERENCE = f"a token's log ratio is above {LOG_RATIO_BOUND:g}"
"""When a framework's nearest rule differs from a Correction (text for notes). Tokens of real dumps do not meet this."""
REPLAY_DEFAULTS = ReplayOptions()


@dataclass(frozen=True)
class Replay:
    """Results of a framework for one training step: logged metrics, weights and kept tokens."""

    logged: dict[str, float]  # metric name -> value, as the framework logs them for this step
    weights: list[NDArray[np.floating[Any]]] | None  # per row, a weight per token, 0 if masked. None: none apply
    keep: list[NDArray[np.bool_]]  # per row, True for each token that rejection keeps


@dataclass(frozen=True)
class LoggedMetric:
    """One number that a framework logs: a quantity and a reduction, such as the maximum of all token ratios."""

    name: str  # the name as logged. In names.yaml, names lack prefixes that depend on the version or rule
    when: str  # the configurations that log it. Empty: all.
    quantity: str  # description of the quantity
    over: str  # the tokens or sequences over which the quantity is reduced
    reduction: str  # the reduction, such as mean or maximum
    like: Quantity | None = None  # the same quantity among mismatchctl's own metrics, or `None`
    basis: str = "train/rollout"  # two policies, or a stage of the weights, such as "final weights"
    logged_as: str = ""  # what this version logs instead, if `name` is from documents or an earlier version
    until: str = ""  # the last version that logged `name`. Empty if this version logs it, or if no version did
    values: str = ""  # name of the computed values in the adapter's replay code. Empty if not needed there

    @property
    def measure(self) -> Measure | None:
        """Return the definition for a comparison with mismatchctl's own metrics, if one of them is similar."""
        from mismatchctl.measure.metrics.metric import Measure

        return None if self.like is None else Measure(self.like, self.over, self.reduction, self.basis)


_BRACES = re.compile(r"\{([^}]*)\}")
_OPTIONAL_COLUMNS: list[Any] = [None, "", ""]


@cache
def read_metrics(module: str) -> dict[str, tuple[LoggedMetric, ...]]:
    """Read a framework's names.yaml. Return its metrics by section, and metrics without a section under "".

    A row is `name: [quantity, over, reduction, basis, like, values, when]`, as in LoggedMetric. The last three are
    optional. A name such as `kl_{min,max}` is short for two rows. In these rows, `{}` in the reduction or in `values`
    becomes `min` or `max`.
    """
    from mismatchctl.measure.metrics.metric import Quantity

    tables: dict[str, dict[str, list[Any]]] = {"": {}}
    for name, row in read_table(module, "names.yaml").items():
        tables |= {name: row} if isinstance(row, dict) else {"": tables[""] | {name: row}}
    found: dict[str, tuple[LoggedMetric, ...]] = {}
    for section, rows in tables.items():
        metrics = []
        for pattern, row in rows.items():
            quantity, over, reduction, basis, like, values, when = [*row, *_OPTIONAL_COLUMNS[len(row) - 4 :]]
            for chosen in product(*(part.split(",") for part in _BRACES.findall(pattern))):
                how, of = (text.format(*chosen[-1:]) for text in (reduction, values))
                name = _BRACES.sub("{}", pattern).format(*chosen)
                metrics.append(LoggedMetric(
                    name, when, quantity, over, how, Quantity[like] if like else None, basis, values=of
                ))  # fmt: skip
        found[section] = tuple(metrics)
    return found


class Framework(ABC):
    """One framework at one version."""

    name: str  # the part before the @ in `NAME@2026-08`
    version: str  # the part after the @ in `NAME@2026-08`
    block: tuple[str, ...] = ()  # keys above the correction in a full file: ("trainer", "loss")
    reads_yaml_1_1: bool = False  # True: PyYAML (reads 1e-4 as a string). False: OmegaConf (resolves `${a.b}`)
    log_step_offset: int = 0  # step at which a batch is logged, minus the step at which it was generated
    note: str = ""  # date or commit of the code, if the version is not a date
    unknown: str = ""  # the version that the user asked for, if mismatchctl does not know it and uses `version` instead
    columns: Mapping[str, str] = {}  # its column -> schema column. Only names with one meaning in all frameworks

    @property
    def title(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def dated(self) -> str:
        return f"{self.title} ({self.note})" if self.note else self.title

    @property
    def warnings(self) -> list[str]:
        if not self.unknown:
            return []
        asked, dated = f"{self.name}@{self.unknown}", is_date(self.unknown)
        before = f"{asked} is read as {self.title}, the last known version before that date"
        return [before if dated else f"{asked} is not known, so it is read as {self.title}"]

    def as_it(self, reason: str) -> str:
        """Write "it" for the framework in a reason: "NAME@2026-08 refuses this rule" becomes "it refuses this rule"."""
        return re.sub(rf"(?<![\w-]){re.escape(self.name)}(@[\w.-]+)? (?=has|reads|refuses)", "it ", reason)

    def with_included(self, native: dict[str, Any], folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Merge the files that a configuration includes. Return the merged keys, and the names of missing files."""
        return native, ()

    def known_names(self, native: Mapping[str, Any], text: str = "") -> dict[str, Any]:
        """Return `native` as the framework reads it, for example with renamed keys. `text`: text of the file."""
        return dict(native)

    def published_outcome(self, correction: Correction) -> str:
        """Describe how a published training run with this correction ended, for example that it collapsed, or ""."""
        return ""

    def remarks(self, correction: Correction) -> list[str]:
        """Return notes for users, which are shown next to the results of a correction."""
        return []

    def is_on(self, native: Mapping[str, Any]) -> bool:
        """Return True, or False if the configuration lacks the option that enables corrections."""
        return True

    def is_default_file(self, name: str) -> bool:
        """Return True if a file with this name contains only defaults of the framework."""
        return False

    def reads(self, place: tuple[str, ...], native: Mapping[str, Any]) -> bool:
        """Return True if the value of this key affects the correction."""
        return True

    @abstractmethod
    def correction(self, native: Mapping[str, Any]) -> Correction:
        """Convert a configuration in the framework's keys to a Correction."""

    @abstractmethod
    def native(self, correction: Correction) -> tuple[dict[str, Any], list[str]]:
        """Convert a Correction to the framework's keys, and list the rules that are not supported."""

    def accepts_keys(self, native: Mapping[str, Any]) -> bool:
        """Return True if a configuration can belong to this framework."""
        return False

    @abstractmethod
    def lint(self, native: Mapping[str, Any], unknown: Collection[str] = ()) -> list[LintMessage]:
        """Return findings. `unknown`: keys whose value is not in the file, and "" if files or keys were not read."""

    @abstractmethod
    def gate_places(self, native: Mapping[str, Any], correction: Correction) -> list[str]:
        """For each gate of `correction`, return the key in `native` (with dots) that sets the gate's threshold."""

    @abstractmethod
    def replay(self, table: pa.Table, correction: Correction, options: ReplayOptions = REPLAY_DEFAULTS) -> Replay:
        """Compute the framework's results for the rows of one training step."""

    def unavailable_names(self, correction: Correction, columns: Collection[str]) -> dict[str, str]:
        """Return {logged name: data that `replay` lacks to compute it}. If the data is "", users get no warning."""
        return {}

    @abstractmethod
    def meanings(self) -> list[LoggedMetric]: ...


@dataclass(frozen=True, kw_only=True)
class CodeVersion:
    """One version of a framework's code."""

    name: str  # the part after the @ in `NAME@2026-08`: a date or a release
    date: str  # year-month-day of the commit, or year-month
    commit: str = ""  # commit of the repository. Empty if it is unknown.
    words: Sequence[str] = ()  # other names
    unknown: str = ""  # the version that the user asked for, if mismatchctl uses this one instead


def is_date(word: str) -> bool:
    """Return True if a version is a date such as 2026-07, not a number such as 0.5.1."""
    return word[:4].isdecimal() and word[4:5] == "-"


def find_newest_patch(names: Iterable[str], word: str) -> str:
    """Return the last of `names` that equals `word` or is a patch release of it (0.7.1 for 0.7), or else ""."""
    plain = word.removeprefix("v")
    found = [name for name in names if f"{name.removeprefix('v')}.".startswith(f"{plain}.")]
    return found[-1] if "." in plain and found else ""


Version = TypeVar("Version", bound=CodeVersion)


def find_dated_version(framework: str, versions: Sequence[Version], word: str) -> Version:
    """Find a version by name, commit or date (newest until then). "" is the newest of all. `versions`: oldest first."""
    if word.lower() in ("", "head"):
        return versions[-1]
    for version in versions:
        same_commit = len(word) >= 7 and version.commit and version.commit.startswith(word[: len(version.commit)])
        if word in (version.name, *version.words) or same_commit:
            return version
    if is_date(word):
        older = [version for version in versions if version.date[: len(word)] <= word]
        if older:
            return older[-1] if older[-1].date.startswith(word) else replace(older[-1], unknown=word)
        raise ConfigError(f"{framework}@{word}: versions before {versions[0].date} are not supported")
    names = [version.name for version in versions]
    if patch := find_newest_patch(names, word):
        return versions[names.index(patch)]
    hint = suggestion(word, [*names, *(other for version in versions for other in version.words)])
    raise ConfigError(f"unknown {framework} version {word!r}{hint}: use one of {', '.join(names)}")


@dataclass(frozen=True)
class Adapter:
    """All code for one framework: its versions, configurations and dump files."""

    name: str  # the part before the @ in `NAME@2026-08`
    versions: tuple[str, ...]  # versions of its code, newest first
    load: Callable[[str], Framework]  # returns the framework at a version ("": default version)
    recognize: Callable[[Mapping[str, Any]], str | None]  # returns the version ("": any), or None for another framework
    layouts: tuple[FileLayout, ...] = ()  # layouts of its dump files
    # class whose calls set a configuration -> function that returns the keys of a call (None: not about corrections)
    classes: Mapping[str, Callable[[PythonCall], dict[str, Any] | None]] = field(default_factory=dict)
    # given a version and the name of a class method that creates a configuration, returns the keys that the method sets
    factory: Callable[[str, str], Mapping[str, Any]] = lambda version, name: {}

    @property
    def titles(self) -> list[str]:
        return [f"{self.name}@{version}" for version in self.versions]
