"""The front door of Python: the verbs on paths, tables or tensors, and the mathematics on tensors in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MappingView, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from yaml import YAMLError

from mismatchctl import lint as linting
from mismatchctl.advise import Advice
from mismatchctl.advise import advise as advise_paths
from mismatchctl.analyze import analyze as analyze_paths
from mismatchctl.analyze.diagnose import diagnose as diagnose_paths
from mismatchctl.blas import one_thread
from mismatchctl.compare import Comparison
from mismatchctl.compare import compare as compare_paths
from mismatchctl.correction import Correction, correction_from_mapping, corrections_from_file
from mismatchctl.diagnose import Diagnosis
from mismatchctl.errors import ConfigError, DataError, kind_of
from mismatchctl.frameworks import preset, presets
from mismatchctl.frameworks.lint import LintMessage
from mismatchctl.gate import DEFAULT_RULES, Verdict, judge, open_result, read_against, rules_from_text
from mismatchctl.options import checked, in_python, several, spoken, texts
from mismatchctl.result import Result, read_result
from mismatchctl.sweep import Study, Sweep, ThresholdAxis
from mismatchctl.sweep import sweep as sweep_paths
from mismatchctl.tensors import TensorBatch, TensorLayout, Values, final_weights, groups_of
from mismatchctl.texts.yaml_written import dump_yaml

_COLUMNS = {"rollout": "rollout_log_probs", "train": "train_log_probs", "mask": "response_mask"}
_COLUMNS |= {"current": "current_log_probs"}


def analyze(sources: Any, corrections: Any = (), **options: Any) -> Result:
    """Measure a mismatch and what corrections would do.

    Args:
        sources: a path or several (str or Path); a polars, pandas or Arrow table of one row per sequence; or a mapping
            of columns, which may be tensors (`rollout`, `train`, `mask`, `current` stand for the contract's names).
        corrections: names of presets, Corrections, mappings or files; one or several.
        **options: as `mismatchctl.analyze.analyze` takes them (`by`, `rename`, `on_bad`, `threads`, ...).
    """
    with _Sources() as opened:
        return analyze_paths(opened.paths(sources), corrections_of(corrections), **checked(options))


def sweep(sources: Any, correction: Any, vary: Mapping[str, Iterable[Any]], **options: Any) -> Sweep:
    """What every point of a grid would do, in one pass.

    Args:
        sources: as for `analyze`.
        correction: as one of `analyze`.
        vary: field of the correction (`weight.clip.1`, `gates.0.keep`) -> its values.
        **options: as `mismatchctl.sweep.sweep` takes them.
    """
    if not isinstance(vary, Mapping) or not vary:
        raise ConfigError("vary: give a mapping of a field of the correction to its values")
    texts(vary.keys(), "vary: name fields by texts")
    for path, values in vary.items():
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
            raise ConfigError(f"vary: give {path} several values, not {kind_of(values)}")
    chosen = _one(correction)
    axes = tuple(ThresholdAxis(path, tuple(values)) for path, values in vary.items())
    for axis in axes:
        if not axis.values:
            raise ConfigError(f"vary: {axis.path} has no value")
    with _Sources() as opened:
        return sweep_paths(opened.paths(sources), [Study(chosen, axes)], **checked(options))


def compare(*sources: Any, corrections: Any = (), **options: Any) -> Comparison:
    """Compare dumps or Results with the first of them; each as for `analyze`."""
    if not sources:
        raise ConfigError("compare takes two dumps or Results, or more")
    with _Sources() as opened:
        paths = [path for source in sources for path in opened.paths(source)]
        return compare_paths(paths, corrections=corrections_of(corrections), **checked(options))


def gate(
    sources: Any, baseline: Any = None, rules: str | Iterable[str] = (), corrections: Any = (), **options: Any
) -> Verdict:
    """Whether it got worse than a baseline, by rules.

    Args:
        sources: a Result or dumps, as for `analyze`.
        baseline: a Result, or the file of one.
        rules: one text as `--rule` takes it, or several; none: the usual ones.
        corrections: further ones that rules name.
        **options: as `mismatchctl.gate.judge` takes them (`level`, ...).
    """
    given = texts(rules, "rules are texts, as in 'k3:max=0.1'")
    with _Sources() as opened:
        chosen = [rule for text in given for rule in rules_from_text(text)] or list(DEFAULT_RULES)
        accepted = opened.paths(baseline) if baseline is not None else [None]
        if len(accepted) != 1:
            raise ConfigError(f"one baseline is wanted, not {len(accepted)}")
        against = read_against(accepted[0])
        made = open_result(opened.paths(sources), chosen, corrections_of(corrections))
        verdict: Verdict = spoken(judge(made, chosen, against, **checked(options)), "says", "notes")
    return verdict.model_copy(update={"checks": [spoken(check, "reason", "says") for check in verdict.checks]})


def diagnose(sources: Any, **options: Any) -> Diagnosis:
    """The causes of a mismatch; sources as for `analyze`."""
    with _Sources() as opened:
        return diagnose_paths(opened.paths(sources), **checked(options))


def advise(sources: Any, **options: Any) -> dict[str, Advice]:
    """Which correction to use, or what to fix first, by run; sources as for `analyze`."""
    if "corrections" in options:
        options["corrections"] = corrections_of(options["corrections"])
    with _Sources() as opened:
        advised = advise_paths(opened.paths(sources), **checked(options, framework=str))
    return {run: spoken(advice, "notes") for run, advice in advised.items()}


def lint(config: Any, dumps: Any = (), **options: Any) -> list[LintMessage]:
    """The traps of a configuration in a framework's own keys, a file or a mapping, and on dumps, as of `analyze`."""
    if not isinstance(config, (str, os.PathLike, Mapping)):
        raise ConfigError(f"lint takes a configuration, or the path of one, not {kind_of(config)}")
    with _Sources() as opened:
        path = opened.configuration(config) if isinstance(config, Mapping) else Path(config)
        try:
            return linting.lint(path, opened.paths(dumps), **checked(options, framework=str))[1]
        except ConfigError as error:
            if not isinstance(config, Mapping):
                raise
            raise ConfigError(str(error).replace(str(path), "the mapping")) from None


def corrections_of(given: Any) -> list[Correction]:
    """Corrections from names, mappings, files or themselves; one or several.

    Raises:
        ConfigError: something is none of them.
    """
    if isinstance(given, Correction):
        return [given]
    if isinstance(given, Mapping):
        return [correction_from_mapping(given)]
    if isinstance(given, os.PathLike):
        return corrections_from_file(Path(given))
    if isinstance(given, str):
        return corrections_from_file(given) if Path(given).suffix in (".yaml", ".yml", ".toml") else [preset(given)]
    if isinstance(given, Iterable):
        return [correction for one in several(given) for correction in corrections_of(one)]
    raise ConfigError(f"a correction is a name, a Correction, a mapping or a file, not {kind_of(given)}")


def _one(given: Any) -> Correction:
    """A single correction."""
    found = corrections_of(given)
    if len(found) != 1:
        raise ConfigError(f"one correction is wanted, not {len(found)}")
    return found[0]


_IN_MEMORY, _RESULT = "memory.parquet", "result.json"


class _Sources(ExitStack):
    """Sources as paths; tables become files for as long as it is open, which no error speaks of.

    Each is in a folder of its own with its number, since folders name runs that are called alike.
    """

    _root: Path | None = None
    _folders = 0

    def __enter__(self) -> _Sources:
        self.enter_context(one_thread())
        return super().__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        done = super().__exit__(*raised)
        error = raised[1]
        if isinstance(error, ConfigError):
            raise ConfigError(in_python(self._places(str(error)))) from None
        if isinstance(error, DataError):
            file, remedy = error.file and self._places(error.file), error.remedy and in_python(error.remedy)
            if error.file != file and Path(error.file or "").name == _RESULT:
                remedy = "give the dumps that it was made of"
            problem = in_python(self._places(error.problem))
            raise DataError(problem, file=file, row=error.row, column=error.column, remedy=remedy) from None
        return done

    def _places(self, words: str) -> str:
        """Words that call a file by the table that it holds, by the number that its run is called after."""
        for number in range(self._folders, 0, -1):
            for file, what in ((_IN_MEMORY, "table"), (_RESULT, "Result")):
                which = f"the {what}" if self._folders == 1 else f"{what} {number}"
                words = words.replace(f"{self._root}/{number}/{file}", f"{which} in memory")
        return words

    def paths(self, sources: Any) -> list[str]:
        if isinstance(sources, (str, os.PathLike)):
            return [os.fspath(sources)]
        if isinstance(sources, (Sequence, Set, MappingView, Iterator)) and not isinstance(sources, bytes):
            return [path for source in several(sources) for path in self.paths(source)]
        if isinstance(sources, Result):
            sources.write(place := self._folder() / _RESULT)
        else:
            _table(sources).write_parquet(place := self._folder() / _IN_MEMORY)
        return [str(place)]

    def _folder(self) -> Path:
        if self._root is None:
            self._root = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="mismatchctl-")))
        self._folders += 1
        folder = self._root / str(self._folders)
        folder.mkdir()
        return folder

    def configuration(self, keys: Mapping[Any, Any]) -> Path:
        place = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="mismatchctl-"))) / "config.yaml"
        try:
            place.write_text(dump_yaml(dict(keys)))
        except YAMLError as error:
            held = type(error.args[-1]).__name__
            raise ConfigError(f"the mapping: not what a YAML file can hold: an object of type {held}") from None
        return place


def _table(source: Any) -> pl.DataFrame:
    """A table of one row per sequence."""
    try:
        table = _read_table(source)
    except (NotImplementedError, TypeError, ValueError, pl.exceptions.PolarsError) as error:
        said = error.args[-1] if error.args else type(error).__name__  # pyarrow's last one names the column
        why = str(said).partition("\n")[0]
        raise ConfigError(f"no table can be made of {kind_of(source)}: {why}") from None
    if not isinstance(table, pl.DataFrame):
        wanted = "a path, a table of polars, pandas or Arrow, or a mapping of columns"
        raise ConfigError(f"a source is {wanted}, not {kind_of(source)}")
    odd = next((name for name, kind in table.schema.items() if kind == pl.Object), None)
    if odd is not None:
        raise ConfigError(f"{odd}: holds objects of Python: give numbers, texts or lists of them")
    return table


def _read_table(source: Any) -> Any:
    if isinstance(source, pl.LazyFrame):
        return source.collect()
    kind = type(source).__module__.partition(".")[0]
    if kind == "pandas" and hasattr(source, "columns"):
        _text_names(source.columns)
        levels = [name for name in source.index.names if name is not None and name not in source.columns]
        return pl.from_arrow(pa.Table.from_pandas(source.reset_index(levels), preserve_index=False))
    if kind == "pyarrow":
        return pl.from_arrow(source)
    if isinstance(source, Mapping):
        _text_names(source)
        if twice := [name for name in source if _COLUMNS.get(name, name) != name and _COLUMNS[name] in source]:
            raise ConfigError(f"{twice[0]} stands for {_COLUMNS[twice[0]]}: give one of both")
        columns = {_COLUMNS.get(name, name): _column(values, name) for name, values in source.items()}
        rows = {name: len(column) for name, column in columns.items()}
        if len(set(rows.values())) > 1:
            raise ConfigError(f"columns have the same rows: {', '.join(f'{n} has {k}' for n, k in rows.items())}")
        return pl.DataFrame(columns)
    if hasattr(source, "with_format"):  # of datasets
        return pl.from_arrow(source.with_format("arrow")[:])
    is_table = hasattr(source, "__arrow_c_stream__") and not isinstance(source, pl.Series)
    return pl.DataFrame(source) if is_table else source


def _text_names(columns: Iterable[Any]) -> None:
    if odd := [name for name in columns if not isinstance(name, str)]:
        raise ConfigError(f"columns are named by texts, not by {kind_of(odd[0])}")


def _column(values: Any, name: str) -> list[Any]:
    if hasattr(values, "to_pylist"):  # of Arrow
        return list(values.to_pylist())
    nested = getattr(values, "is_nested", False) or len(getattr(values, "shape", (0,))) == 2
    if not nested and isinstance(values, (list, tuple, range)) and values and np.ndim(values[0]) == 0:
        return list(values)
    if not nested and len(getattr(values, "shape", ())) == 1:
        return list((values if hasattr(values, "tolist") else np.asarray(values)).tolist())
    return [row.tolist() for row in TensorLayout.of(values, name).rows]


def weights(
    rollout: Values,
    train: Values,
    mask: Values = None,
    correction: Any = "token_tis",
    *,
    current: Values = None,
    advantages: Values = None,
    age: Any = None,
    micro_batches: Any = None,
) -> tuple[Values, Values]:
    """Final importance weights, as a trainer multiplies its losses with them, and which tokens are kept.

    Takes no gradient: log-probs that require one are detached.

    Args:
        rollout: log-probs of the sampler: an array or tensor [B, T], a nested tensor, or a list of rows.
        train: those of the trainer, in the same layout.
        mask: which positions are valid, in the same layout; None: all.
        correction: a name of a preset, a Correction, a mapping or a file.
        current: log-probs of the policy that is updated, where the correction looks at them.
        advantages: per token or per row, where the correction looks at them.
        age: weight updates since each row was sampled, or since all were, where the correction looks at it.
        micro_batches: rows in each, or a name per row, for weights that are normalized within them; None: all rows.

    Returns:
        Weights (0 where masked) and flags (False where masked or rejected), of the kind, dtype and device of `train`.
    """
    tokens, chosen, applied = _applied(rollout, train, mask, correction, current, advantages, age)
    groups = groups_of(micro_batches if chosen.normalizes_micro_batches else None, len(tokens.batch))
    made = final_weights(chosen, applied, groups)
    return tokens.restored(made), tokens.restored(applied.kept.expanded())


def keep(
    rollout: Values,
    train: Values,
    mask: Values = None,
    correction: Any = "seq_mis",
    *,
    current: Values = None,
    advantages: Values = None,
    age: Any = None,
) -> Values:
    """Which tokens a correction keeps; arguments as of `weights`."""
    tokens, _, applied = _applied(rollout, train, mask, correction, current, advantages, age)
    return tokens.restored(applied.kept.expanded())


def _applied(rollout: Values, train: Values, mask: Values, correction: Any, *beside: Any) -> Any:
    chosen = _one(correction)
    tokens = TensorBatch.of(rollout, train, mask, *beside)
    return tokens, chosen, tokens.applied(chosen)


def k1(rollout: Values, train: Values, mask: Values = None) -> float:
    """Mean of rollout minus train log-prob over the valid tokens, nats."""
    return _mean(-TensorBatch.of(rollout, train, mask).ratios.log_ratio)


def k2(rollout: Values, train: Values, mask: Values = None) -> float:
    """Mean of half the squared log ratio over the valid tokens, nats."""
    return _mean(0.5 * TensorBatch.of(rollout, train, mask).ratios.log_ratio ** 2)


def k3(rollout: Values, train: Values, mask: Values = None) -> float:
    """Mean of exp(x) - 1 - x over the valid tokens, x train minus rollout log-prob; nats."""
    return _mean(TensorBatch.of(rollout, train, mask).ratios.k3)


def ess(rollout: Values, train: Values, mask: Values = None, level: str = "token") -> float:
    """Effective sample size of the ratios as a share of their number: of tokens, or of sequences' products."""
    values = _ratios(rollout, train, mask, level)
    return float(values.sum() ** 2 / (len(values) * (values**2).sum())) if len(values) else float("nan")


def chi2(rollout: Values, train: Values, mask: Values = None, level: str = "token") -> float:
    """Mean squared ratio minus 1: of tokens, or of sequences' products."""
    return _mean(_ratios(rollout, train, mask, level) ** 2) - 1


def metrics(rollout: Values, train: Values, mask: Values = None) -> dict[str, float | None]:
    """Every metric of the mismatch that `analyze` knows, by name; None where it has no value."""
    columns = {"rollout": rollout, "train": train} | ({} if mask is None else {"mask": mask})
    (run,) = analyze(columns, findings=False).runs.values()
    return {name: value.value for name, value in run.overall.metrics.items()}


def _ratios(rollout: Values, train: Values, mask: Values, level: str) -> Any:
    ratios = TensorBatch.of(rollout, train, mask).ratios
    if level not in ("token", "sequence"):
        raise ConfigError(f"level is token or sequence, not {level!r}")
    return (
        ratios.excess + 1
        if level == "token"
        else np.exp(np.clip(ratios.log_ratio_sum[ratios.segments.nonempty], -20, 20))
    )


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
