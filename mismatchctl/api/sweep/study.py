"""A study is a correction with a list of values for each field that a sweep varies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mismatchctl.core.batch import Ints
from mismatchctl.corrections.model import Correction
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.errors import ConfigError, kind_of, option, suggestion, wording
from mismatchctl.measure.grid.thresholds import CorrectionGrid

AxisValue = float | str | bool | None
MAX_POINTS = 100_000
"""Maximum number of points (combinations of values) of a study. More points are probably a typing error."""

INTERVAL_FIELDS = ("clip", "zero", "keep")
_FIXED_FIELDS = ("name", "about", "loss")
"""Fields of a correction that a sweep cannot vary, because the metrics of a sweep do not depend on them."""
_LITERALS: dict[str, AxisValue] = {"null": None, "none": None, "true": True, "false": False}


@dataclass(frozen=True)
class ThresholdAxis:
    """One field of a correction that a sweep varies, and the values that it tries."""

    # field such as `weight.clip.1`. If the field is a whole interval (`gates.0.keep`), a value x means [1/x, x], or
    # [-x, x] if the gate's statistic is not the ratio.
    path: str
    values: tuple[AxisValue, ...]  # in the order that the user gave
    log: bool = False  # True if charts show the values on a log scale

    @cached_property
    def is_numeric(self) -> bool:
        return all(isinstance(value, float) for value in self.values)

    @classmethod
    def parse(cls, path: str, text: str, where: str = "--vary") -> ThresholdAxis:
        """Parse a list `a,b,c`, or a range `a:b:n` or `a:b:n:log` of n values from a to b."""
        if ":" not in text:
            values = tuple(
                dict.fromkeys(_parse_value(part.strip(), f"{where} {path}={text}") for part in text.split(","))
            )
            if "" in values:
                raise ConfigError(
                    f"{where} {path}={text}: a value is empty; write values, as in 1.5,2,3, or a range, as in 1.1:4:30"
                )
            numbers = [value for value in values if isinstance(value, float)]
            spread = len(numbers) == len(values) > 2 and min(numbers) > 0 and max(numbers) / min(numbers) > 100
            return cls(path, values, log=spread)
        parts = text.split(":")
        try:
            low, high, number = float(parts[0]), float(parts[1]), int(parts[2])
        except (ValueError, IndexError):
            raise ConfigError(
                f"{where} {path}={text}: write a range as START:END:COUNT or START:END:COUNT:log, as in 1.1:4:30"
            ) from None
        if len(parts) > 4 or (len(parts) == 4 and parts[3] != "log"):
            raise ConfigError(f"{where} {path}={text}: after START:END:COUNT, only :log is allowed")
        return cls.over(path, low, high, number, log=len(parts) == 4, where=f"{where} {path}={text}")

    @classmethod
    def over(
        cls, path: str, low: float, high: float, number: int, *, log: bool = False, where: str = "axis"
    ) -> ThresholdAxis:
        if not (math.isfinite(low) and math.isfinite(high)) or number < 2 or number > MAX_POINTS or low == high:
            raise ConfigError(
                f"{where}: write START:END:COUNT, with different START and END, and COUNT from 2 to {MAX_POINTS:,}"
            )
        if log and min(low, high) <= 0:
            raise ConfigError(f"{where}: on a log scale, START and END must be above 0")
        spaced = np.geomspace(low, high, number) if log else np.linspace(low, high, number)
        return cls(path, tuple(float(f"{value:.12g}") for value in spaced), log)  # 1.2, not 1.2000000000000002


@dataclass(frozen=True)
class Study:
    """A correction, and its fields that a sweep varies (`axes`). `points` lists every combination of their values."""

    correction: Correction
    axes: tuple[ThresholdAxis, ...]

    @property
    def name(self) -> str:
        return self.correction.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(axis.values) for axis in self.axes)

    @cached_property
    def points(self) -> tuple[tuple[AxisValue, ...], ...]:
        return tuple(itertools.product(*(axis.values for axis in self.axes)))

    @cached_property
    def grid(self) -> CorrectionGrid:
        try:
            return self._grid()
        except ConfigError:
            for values in self.points:  # the error shows all values of the first invalid point
                self._with_values(dict(zip(self.paths, values, strict=True)))
            raise

    @property
    def paths(self) -> list[str]:
        return [axis.path for axis in self.axes]

    def correction_at(self, point: int) -> Correction:
        return self.grid.correction(point)

    def variants(self, path: str) -> tuple[list[Correction], Ints]:
        """Return a correction for each setting of the rule that contains `path`, and each point's index among them."""
        found, places = self._variants[_rule_of(path)]
        return found, places

    def _grid(self) -> CorrectionGrid:
        rules = ["weight", *(f"gates.{number}" for number in range(len(self.correction.gates)))]
        alone = [self._with_values({})], np.zeros(len(self.points), np.int64)
        weights, *gates = (self._variants.get(rule, alone) for rule in rules)
        return CorrectionGrid(
            weights[0][0],
            tuple(each.weight for each in weights[0]),
            tuple(tuple(each.gates[number] for each in variants) for number, (variants, _) in enumerate(gates)),
            np.stack([places for _, places in (weights, *gates)]),
        )

    @cached_property
    def _variants(self) -> dict[str, tuple[list[Correction], Ints]]:
        axes: dict[str, list[int]] = {}
        for number, path in enumerate(self.paths):
            axes.setdefault(_rule_of(path), []).append(number)
        along = np.indices(self.shape).reshape(len(self.axes), len(self.points))
        found = {}
        for rule, own in axes.items():
            known: dict[Any, tuple[int, Correction]] = {}
            paths, places = [self.paths[number] for number in own], []
            for values in itertools.product(*(self.axes[number].values for number in own)):
                placed = dict(zip(paths, values, strict=True))
                data = self._data(placed)
                key = tuple(str(value_at_path(data, path)) for path in paths)
                if key not in known:
                    known[key] = len(known), self._with_values(placed)
                places.append(known[key][0])
            shape = tuple(self.shape[number] for number in own)
            point = np.ravel_multi_index(tuple(along[own]), shape)
            found[rule] = [each for _, each in known.values()], np.array(places)[point]
        return found

    @cached_property
    def _whole(self) -> dict[str, Any]:
        return self.correction.model_dump(mode="json")

    def _data(self, values: Mapping[str, AxisValue]) -> dict[str, Any]:
        data = {**self._whole}
        for path, value in values.items():
            _set_at_path(data, path, value, self._where)
        return data

    def _with_values(self, values: Mapping[str, AxisValue]) -> Correction:
        shown = ", ".join(f"{path}={value}" for path, value in values.items())
        return parse_correction(self._data(values), f"{self._where} at {shown}")

    @property
    def _where(self) -> str:
        return f"correction {self.name}"


def _rule_of(path: str) -> str:
    """Return the rule that contains a field: `weight` for `weight.clip.1`, `gates.0` for `gates.0.keep`."""
    first, _, rest = path.partition(".")
    number = rest.partition(".")[0]
    return f"gates.{int(number)}" if first == "gates" and number.isdecimal() else first


def value_at_path(data: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data


def make_studies(corrections: Sequence[Correction], axes: Sequence[ThresholdAxis]) -> tuple[Study, ...]:
    return tuple(validate_study(Study(correction, tuple(axes))) for correction in corrections)


def parse_studies(corrections: Sequence[Correction], vary: Sequence[tuple[str, object]]) -> list[Study]:
    """Return one study per correction. `vary`: (field, values). Values: a list, or `1:4:30` (30 values from 1 to 4)."""
    if vary and not corrections:
        needed = wording(python="a correction to vary", command="--correction or --config")
        raise ConfigError(f"{option('vary')} needs {needed}")
    if corrections and not vary:
        raise ConfigError(f"missing {option('vary')}, for example {option('vary', {'weight.truncate': '1.5:4:20'})}")
    axes = []
    for path, values in vary:
        if isinstance(values, str):
            axes.append(ThresholdAxis.parse(path, values, option("vary")))
        elif isinstance(values, Iterable) and not isinstance(values, (bytes, Mapping)):
            axes.append(ThresholdAxis(path, tuple(values)))
        else:
            raise ConfigError(f"vary: expected several values for {path}, found {kind_of(values)}")
        if not axes[-1].values:
            raise ConfigError(f"vary: the list of values for {path} is empty")
    return list(make_studies(corrections, axes))


def validate_study(study: Study) -> Study:
    """Return the study. Raises ConfigError for a repeated field, too many points, or a point that is not valid."""
    paths = [axis.path for axis in study.axes]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ConfigError(f"correction {study.name}: {twice} varies twice; write one list of values for this field")
    if math.prod(study.shape) > MAX_POINTS:
        raise ConfigError(
            f"correction {study.name}: the grid has {math.prod(study.shape):,} points; write at most {MAX_POINTS:,}"
        )
    assert study.grid
    return study


def _set_at_path(data: dict[str, Any], path: str, value: AxisValue, where: str) -> None:
    """Set the field `path` of `data`. Copy lists and mappings on this path, because other points use them too."""
    parts = path.split(".")
    holder: Any = data
    for depth, part in enumerate(parts):
        so_far = ".".join(parts[:depth])
        if isinstance(holder, list):
            if not part.isdecimal() or int(part) >= len(holder):
                entries = f"0 to {len(holder) - 1}" if len(holder) > 1 else "0 only" if holder else "none"
                raise ConfigError(f"{where}: {so_far} has no entry {part}. Its entries: {entries}")
            key: Any = int(part)
        elif isinstance(holder, dict):
            if part in _FIXED_FIELDS and not depth:
                raise ConfigError(f"{where}: {path} cannot vary, because no metric of a sweep depends on the {part}")
            if part not in holder:
                known = [name for name in holder if name not in _FIXED_FIELDS]
                hint = suggestion(part, known) or f"; its fields are {', '.join(known)}"
                raise ConfigError(f"{where}: {path}: a correction has no field {part!r}{hint}")
            key = part
        else:
            missing = "the correction has no weight rule" if so_far == "weight" else f"{so_far} is not set"
            raise ConfigError(f"{where}: {path} cannot vary, because {missing}")
        if depth == len(parts) - 1:
            both = part in INTERVAL_FIELDS and isinstance(value, (int, float))
            holder[key] = _symmetric_interval(holder, float(value)) if both and value is not None else value
            return
        if holder[key] is None and part in INTERVAL_FIELDS:
            holder[key] = [None, None]
        holder[key] = holder = copy(holder[key])


def _symmetric_interval(rule: Mapping[str, Any], value: float) -> list[float]:
    if rule.get("statistic", "ratio") != "ratio":
        return sorted((-value, value))
    return sorted((1 / value, value)) if value > 0 else [value, value]


def _parse_value(text: str, where: str) -> AxisValue:
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value):
        raise ConfigError(f"{where}: {text} is not a finite number; to set no bound, write none")
    return value


def _study(name: str, about: str, rule: Mapping[str, Any], path: str, ends: tuple[float, float], usual: float) -> Study:
    """Return a study with 40 thresholds between `ends`, plus `usual`: the threshold that frameworks usually set."""
    axis = ThresholdAxis.over(path, *ends, 40, log=True)
    values = sorted({*(value for value in axis.values if isinstance(value, float)), usual})
    return Study(parse_correction({"name": name, "about": about, **rule}), (replace(axis, values=tuple(values)),))


_SEQUENCE, _GEOMETRIC = {"level": "sequence", "keep": (0.5, 2.0)}, {"level": "geometric", "keep": (1 / 1.001, 1.001)}
_VETO = {"level": "min", "keep": (1e-4, None), "clamp": "none"}
DEFAULT_STUDIES = (
    _study("token_truncate", "truncates token weights at x", {"weight": {"truncate": 2.0}},
           "weight.truncate", (1.05, 10.0), 2.0),
    _study("seq_reject", "rejects by product of ratios", {"gates": [_SEQUENCE]}, "gates.0.keep", (1.05, 100.0), 2.0),
    _study("geo", "rejects by geometric mean", {"gates": [_GEOMETRIC]}, "gates.0.keep", (1.0001, 1.1), 1.001),
    _study("veto", "rejects if any ratio is below x", {"gates": [_VETO]}, "gates.0.keep.0", (1e-7, 0.1), 1e-4),
)  # fmt: skip
"""The studies of a sweep if the user chooses no correction. They do not depend on the data. Their ranges include the
thresholds in papers, framework documentation and presets: weights truncated at 1.5 to 10, sequence ratios rejected
above 1.5 to tens, geometric means rejected 0.0002 to 0.01 away from 1, and token ratios vetoed below 1e-6 to 1e-2."""
