"""`--sequences`: one row per sequence with its statistics and what each correction does to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.dumps import DumpFile
from mismatchctl.errors import ConfigError, DataError, option
from mismatchctl.files import remove, replaced_when_done, scratch_folder
from mismatchctl.finite import finite_table
from mismatchctl.marks import PARQUET
from mismatchctl.measure import MeasurePlan
from mismatchctl.measure.accumulate import Factors
from mismatchctl.measure.columns import MISMATCH

if TYPE_CHECKING:
    import polars as pl

_NAMES = ("run", "file", "row", "step", "sequence_id", "prompt_id", "reward")
_KEYS = ("_run", "_step", "_scope")


class SequenceFile:
    """Collects rows in the order of the input and writes them at the end; does nothing without a path."""

    def __init__(
        self, path: str | Path | None, join: str | Path | None, plan: MeasurePlan, files: Sequence[DumpFile]
    ) -> None:
        if join is not None and path is None:
            raise ConfigError(f"{option('join')} needs {option('sequences')}: it adds columns to that file")
        self._path, self._join, self._plan, self._files = path, join, plan, files
        self._folder: Path | None = None
        self._parts = 0

    def __enter__(self) -> SequenceFile:
        if self._path is not None:
            if self._join is not None:
                self._joined_keys(self._scan(self._join))  # a wrong --join should not cost a pass
            self._folder = scratch_folder()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            remove(self._folder)

    def write(self, tables: Iterable[dict[str, NDArray[Any]]]) -> None:
        """Add the sequences of the next unit."""
        if self._folder is None:
            return
        import polars as pl

        frames = [
            pl.DataFrame({name: _column(values) for name, values in self._row_columns(columns).items()})
            for columns in tables
        ]
        if frames:  # cells were gathered; within a unit, file and row tell the order of the input
            unit = pl.concat(frames, how="diagonal_relaxed").sort("_file", "row", maintain_order=True)
            unit.drop("_file").write_parquet(self._folder / f"{self._parts:08d}.parquet", compression="lz4")
            self._parts += 1

    def finish(self, factors: Factors) -> None:
        """Divide weights by the factors of their groups, join, and write the file whole."""
        if self._folder is None or self._path is None:
            return
        import polars as pl

        parts = [pl.scan_parquet(self._folder / f"{part:08d}.parquet") for part in range(self._parts)]
        frame = pl.concat(parts, how="diagonal_relaxed")
        frame = finite_table(self._normalized(frame, factors).drop(_KEYS))
        if self._join is not None:
            frame = self._joined(frame, self._scan(self._join))
        with replaced_when_done(self._path) as temporary:
            frame.sink_parquet(temporary, metadata=PARQUET)

    def _row_columns(self, columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        paths = np.array([file.path for file in self._files], object)
        number = len(columns["row"])
        sums, largest = self._plan.of_sequences, self._plan.maxima

        def of(name: str, owner: str | int = MISMATCH) -> NDArray[Any]:
            return columns["_sums"][:, sums.place(owner, name)]

        farthest = (columns["_maxima"][:, largest.place(MISMATCH, name)] for name in ("log_ratio", "-log_ratio"))
        named = columns | {"file": paths[columns["file"]]}
        rows = {name: named[name] for name in (*_NAMES, *self._plan.by) if name in named}
        tokens = np.maximum(of("tokens"), 1)
        rows |= {
            "tokens": of("tokens").astype(np.int64),
            "log_ratio_sum": of("log_ratio"),
            "k1": -of("log_ratio") / tokens,
            "k2": of("square") / tokens / 2,
            "k3": of("k3") / tokens,
            "abs_diff_mean": of("abs") / tokens,
            "abs_diff_max": np.maximum(np.maximum(*farthest), 0),
            "sequence_ratio": np.where(of("tokens") > 0, of("product"), 1.0),
            "train_log_ppl": of("policy_log_ppl"),
            "rollout_log_ppl": of("reference_log_ppl"),
        }
        for index, correction in enumerate(self._plan.corrections):
            rows[f"{correction.name}.kept_tokens"] = of("kept", index).astype(np.int64)
            rows[f"{correction.name}.weight"] = 1.0 + of("mean_excess", index)
        step = columns.get("_step", np.full(number, "None", object))
        return rows | {"_run": columns["run"], "_step": step, "_scope": columns["_scope"], "_file": columns["file"]}

    def _normalized(self, frame: pl.LazyFrame, factors: Factors) -> pl.LazyFrame:
        import polars as pl

        named = {
            f"_factor{index}": f"{correction.name}.weight"
            for index, correction in enumerate(self._plan.corrections)
            if correction.weight is not None and correction.weight.normalize != "none"
        }
        if not named:
            return frame
        columns: dict[str, Any] = {key: [row[place] for row in factors] for place, key in enumerate(_KEYS)}
        columns |= {name: [row[3][int(name.removeprefix("_factor"))] for row in factors] for name in named}
        table = pl.LazyFrame(columns, schema_overrides={"_scope": pl.UInt64})
        joined = frame.join(table, on=list(_KEYS), how="left", maintain_order="left")
        scaled = [pl.col(weight) / pl.col(factor) for factor, weight in named.items()]
        return joined.with_columns(scaled).drop(list(named))

    def _joined(self, frame: pl.LazyFrame, other: pl.LazyFrame) -> pl.LazyFrame:
        import polars as pl

        keys = self._joined_keys(other)
        ours = frame.collect_schema()
        theirs = other.collect_schema()
        cast = [pl.col(key).cast(ours[key]) for key in keys if ours[key] != theirs[key]]
        return frame.join(other.with_columns(cast), on=keys, how="left", suffix="_joined", maintain_order="left")

    def _joined_keys(self, other: pl.LazyFrame) -> list[str]:
        theirs = other.collect_schema().names()
        keys: list[str] = [name for name in ("run", "step", "sequence_id") if name in theirs]
        if "sequence_id" not in keys:
            raise DataError(
                "no column sequence_id to join on",
                file=str(self._join),
                remedy="give it sequence_id (and step and run where they tell sequences apart)",
            )
        return keys

    @staticmethod
    def _scan(path: str | Path) -> pl.LazyFrame:
        import polars as pl

        try:
            frame = pl.scan_parquet(path)
            frame.collect_schema()
        except (OSError, pl.exceptions.PolarsError) as error:
            problem = str(error).splitlines()[0]
            raise DataError(problem, file=str(path), remedy=f"{option('join')} takes a Parquet file") from None
        return frame


def _column(values: NDArray[Any]) -> Any:
    """Values as a column; ids of several kinds (a dictionary beside what stands for a missing one) are texts."""
    if values.dtype != object:
        return values
    found = values.tolist()
    kinds = {type(value) for value in found} - {type(None)}
    return found if len(kinds) < 2 else [None if value is None else str(value) for value in found]
