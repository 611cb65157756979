"""The public functions of `import mismatchctl as mm`.

Heavy modules are imported inside the functions, so that `import mismatchctl` is fast.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mismatchctl.api.inputs import (
    Corrections,
    Progress,
    Sources,
    StrPath,
    Texts,
    Values,
    check_choice,
    check_columns,
    check_count,
    check_number,
    config_file,
    list_inputs,
    list_sources,
    list_texts,
    parse_corrections,
    public_function,
)
from mismatchctl.errors import ConfigError, kind_of

if TYPE_CHECKING:
    import pyarrow as pa

    from mismatchctl.api.advise.advice import Advice
    from mismatchctl.api.compare.comparison import Comparison
    from mismatchctl.api.gate.verdict import Verdict
    from mismatchctl.api.scan import ReadOptions
    from mismatchctl.api.sweep.result import Sweep
    from mismatchctl.corrections.model import Correction
    from mismatchctl.corrections.presets import Preset
    from mismatchctl.data.engines import Engine
    from mismatchctl.data.paths import DumpSource
    from mismatchctl.diagnosis.diagnosis import Diagnosis
    from mismatchctl.frameworks.adapter import Framework
    from mismatchctl.frameworks.lint import LintMessage
    from mismatchctl.results.model import Result


@public_function
def analyze(
    *sources: Sources,
    rollout: Values | None = None,
    train: Values | None = None,
    mask: Values | None = None,
    current: Values | None = None,
    advantages: Values | None = None,
    corrections: Corrections | None = None,
    losses: Texts = (),
    by: Texts = (),
    columns: Mapping[str, str] | None = None,
    on_bad: Literal["error", "skip", "mask"] = "error",
    micro_batch_size: int | None = None,
    framework: str | Framework | None = None,
    against: StrPath | None = None,
    baseline: StrPath | Result | None = None,
    findings: bool = True,
    presets: bool = False,
    sequences: StrPath | None = None,
    threads: int | None = None,
    engine: Engine | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    progress: Progress | None = None,
) -> Result:
    """Measure the mismatch and the effect of each correction.

    Args:
        *sources: Dumps, one per run. A dump is a path (file, folder or glob), a table of polars, pandas or Arrow with
            one row per sequence, or a mapping of columns. Example: `mm.analyze("bf16/", "fp8/")`.
        rollout: Log-probs of the rollout engine in nats, if you pass no sources: an array or tensor [sequences,
            tokens], or a list of rows.
        train: Log-probs of the trainer, in the layout of `rollout`.
        mask: 1 for valid tokens and 0 for other tokens, in the layout of `rollout`. Default: all tokens are valid.
        current: Log-probs of the policy being updated, for corrections and losses that use them.
        advantages: One advantage per token or per sequence, for corrections and losses that use them.
        corrections: Presets, files, mappings or Corrections to compare. Default: five corrections, as on the command
            line. `()` measures no corrections. Example: `corrections=["token_tis", {"weight": {"clip": [0.5, 2.0]}}]`.
        losses: Measure each correction with each of these losses. Example: `losses="gspo"`.
        by: Columns to break metrics down by. Example: `by="worker"`.
        columns: Column names of the dump format -> names of these columns in your files.
            Example: `columns={"train_log_probs": "old_log_probs"}`.
        on_bad: `"error"` stops at a bad row or file. `"skip"` counts and leaves out bad rows and files. `"mask"` counts
            and leaves out tokens that are NaN or null, and stops at other bad data.
        micro_batch_size: Rows per micro-batch of a step, for corrections that normalize weights within micro-batches.
            Ignored if the dump has the column `micro_batch`. Default: the whole step.
        framework: Also compute the metrics that this framework would log: NAME or NAME@VERSION.
        against: Compare the dump with this metrics log of the same run: JSON lines, TensorBoard events or CSV.
        baseline: An accepted Result, or the path of its file. The summary compares K3 with the K3 of the baseline.
        findings: Also diagnose the causes of the mismatch.
        presets: Also measure every preset, for the chart of corrections in `result.to_html()`. On the command line,
            `--html` also measures the presets.
        sequences: Write one row per sequence to this Parquet file.
        threads: Number of parts of a dump to read at the same time. Default: the number of processors.
        engine: The engine that reads the dumps, one of `mismatchctl.data.engines`. Default: threads of this process.
        device: Device that computes the metrics. `"auto"` uses a GPU for large dumps with many corrections.
        progress: A function that is called with (number of tokens read so far, expected number of tokens).

    Returns:
        A Result. K3 is `result["run"].k3.value`, or `result.k3.value` if there is a single run.
    """
    check_choice("device", device, ("auto", "cpu", "cuda"))
    arrays = {"rollout": rollout, "train": train, "mask": mask, "current": current, "advantages": advantages}

    from mismatchctl.api.analyze.analyze import analyze as analyze_dump
    from mismatchctl.api.analyze.run_log import read_run_log
    from mismatchctl.api.gate.gate import read_baseline
    from mismatchctl.frameworks.registry import default_corrections, load_presets

    accepted = read_baseline(baseline)
    return analyze_dump(
        _list_dumps(sources, arrays),
        default_corrections() if corrections is None else parse_corrections(corrections),
        by=list_texts(by, "by: pass names of columns"),
        sequences=None if sequences is None else os.fspath(sequences),
        framework=_find_framework(framework),
        log=None if against is None else read_run_log(Path(against)),
        findings=findings,
        device=device,
        baseline=None if accepted.result is None else (str(accepted.name), accepted.result),
        losses=list_texts(losses, "losses: pass names of losses"),
        presets=[preset.correction for preset in load_presets().values()] if presets else (),
        **_read_options(columns, threads, engine, progress, micro_batch_size, on_bad),
    )


@public_function
def pair(rollout: StrPath, train: StrPath, on: Texts = ()) -> pa.Table:
    """Join the rollout's file and the trainer's file by an id. Pass the returned table to `analyze` or `gate`.

    Args:
        rollout: File with the responses of an engine, or with the rollout's log-probs.
            Example: `mm.analyze(mm.pair("rollout.jsonl", "train.parquet"))`.
        train: File with the trainer's log-probs of the same sequences.
        on: Columns that identify a row. Default: the id column that the two files share. Example: `on="id"`.

    Returns:
        An Arrow table with one row per sequence and the log-probs of rollout and trainer.
    """
    from mismatchctl.data.conversion import pair as match

    found = match(Path(rollout), Path(train), list_texts(on, "on: pass names of columns"))
    return found.table.replace_schema_metadata({"notes": "\n".join(found.notes)} if found.notes else None)


@public_function
def sweep(
    *sources: Sources,
    correction: Corrections | None = None,
    vary: Mapping[str, str | Iterable[float | str | bool | None]] | None = None,
    target_rejection: float | Mapping[str, float] | None = None,
    target_ess: float | Iterable[float] = (),
    batch: int | None = None,
    at_length: int | Iterable[int] = (),
    at_step: float | None = None,
    by: Texts = (),
    columns: Mapping[str, str] | None = None,
    on_bad: Literal["error", "skip", "mask"] = "error",
    micro_batch_size: int | None = None,
    threads: int | None = None,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Measure rejected data, ESS and bias at every threshold, in one pass over the dump.

    Args:
        *sources: The same dumps that `analyze` takes. Example: `mm.sweep("dumps/")`.
        correction: One or more corrections whose thresholds vary: presets, files, mappings or Corrections. Default:
            token weights, sequence rejection, geometric rejection and veto, each over its usual range of thresholds.
        vary: Field of the correction -> values of the field, or a range `START:END:COUNT` (with `:log` for geometric
            spacing). With several fields, all combinations of their values are measured.
            Example: `vary={"weight.truncate": [1.5, 2.0, 4.0]}` or `vary={"weight.clip.1": "1.1:4:30:log"}`.
        target_rejection: Find the threshold that rejects this share of tokens. Example: `0.05`, or
            `{"sequences": 0.05}`.
        target_ess: Find the cap on token weights that gives this effective sample size, as a share. Example: `0.99`.
        batch: Predict the rejection in a batch of this number of sequences.
        at_length: Predict rejection and ESS at this number of tokens per response.
        at_step: Predict rejection this number of steps after the last step of the dump.
        by: Columns to break metrics down by.
        columns, on_bad, micro_batch_size, threads, engine, progress: As in `mm.analyze`.

    Returns:
        A Sweep. `sweep.to_polars()` has one row per run, correction and combination of thresholds.
    """
    check_count("batch", batch)
    if vary is not None and not (isinstance(vary, Mapping) and vary):
        raise ConfigError("vary: expected a mapping such as {'weight.truncate': '1.5:4:20'}")
    list_texts([*(vary or ())], "vary: fields must be strings")
    lengths = [at_length] if isinstance(at_length, int) else list(at_length)

    from mismatchctl.api.sweep.result import ForecastRequest
    from mismatchctl.api.sweep.study import DEFAULT_STUDIES, parse_studies
    from mismatchctl.api.sweep.sweep import sweep as sweep_dump

    chosen = [] if correction is None else parse_corrections(correction)

    return sweep_dump(
        _list_dumps(sources, {}),
        parse_studies(chosen, list((vary or {}).items())) or DEFAULT_STUDIES,
        by=list_texts(by, "by: pass names of columns"),
        wishes=_list_targets(target_rejection, target_ess),
        outlook=ForecastRequest(batch, tuple(lengths), at_step),
        **_read_options(columns, threads, engine, progress, micro_batch_size, on_bad),
    )


@public_function
def compare(
    *sources: Sources | Result,
    corrections: Corrections = (),
    by: Texts = (),
    columns: Mapping[str, str] | None = None,
    on_bad: Literal["error", "skip", "mask"] = "error",
    micro_batch_size: int | None = None,
    threads: int | None = None,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the first run with each of the other runs.

    Args:
        *sources: Two or more runs: dumps that `analyze` takes, Results, or paths of Results.
            Example: `mm.compare("bf16/", "fp8/")`.
        corrections: Corrections to measure on the dumps. A Result already contains its corrections.
        by: Columns of the dumps to break metrics down by.
        columns, on_bad, micro_batch_size, threads, engine, progress: As in `mm.analyze`.

    Returns:
        A Comparison: changes of metrics with intervals and p-values, and the tokens or steps that changed K3 most.
    """
    given = list_inputs(sources)
    if not given:
        raise ConfigError("compare needs at least two dumps or Results")

    from mismatchctl.api.compare.compare import compare as compare_sources

    return compare_sources(
        given,
        corrections=parse_corrections(corrections),
        by=list_texts(by, "by: pass names of columns"),
        **_read_options(columns, threads, engine, progress, micro_batch_size, on_bad),
    )


@public_function
def gate(
    sources: Sources | Result,
    baseline: StrPath | Result | None = None,
    *,
    rule: Texts = (),
    rules: Texts = (),
    expect_bitwise: bool = False,
    corrections: Corrections = (),
    columns: Mapping[str, str] | None = None,
    micro_batch_size: int | None = None,
    level: float = 0.05,
    max_skipped: float = 0.01,
    max_missing: float = 0.05,
    allow_different_model: bool = False,
    fixed_tokens: bool = False,
    threads: int | None = None,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Judge whether the mismatch got worse. `assert mm.gate(...)` passes only if the mismatch did not get worse.

    Args:
        sources: A Result, the path of its file, or the dumps that `analyze` takes. Pass several sources in a list.
        baseline: The Result of a good run, or the path of its file. Example: `mm.gate("dumps/", "baseline.json")`.
        rule: A rule, as METRIC:KEY=VALUE,... or a file of rules. The keys increase and decrease compare with
            the baseline. The other keys are max, min, per, correction, framework and sequences.
            Example: `rule="k3:max=0.01,increase=20%,per=step"`.
        rules: More rules. Default: fail if K3 rose by more than 25%, or if all log-probs are bit-identical.
        expect_bitwise: Fail unless the rollout and train log-probs of each token are bit-identical.
        corrections: Your own corrections, if a rule names them (`correction=NAME`). Presets need no entry here.
        level: Accepted probability that any rule fails without a real change. It is above 0, and at most 0.5.
        max_skipped: Largest accepted share of bad sequences, tokens or files, and of repeated sequences. Above this
            share, the verdict is undecided.
        max_missing: Largest share of the baseline's steps, or of its responses, that the dump may lack.
        allow_different_model: Allow another model or inference engine than in the baseline.
        fixed_tokens: Require the dump to contain the same tokens as the baseline, with new log-probs.
        columns, micro_batch_size, threads, engine, progress: As in `mm.analyze`.

    Returns:
        A Verdict. It is true if every check passed, and false if a check failed or could not be judged.
    """
    check_number("level", level)
    check_number("max_skipped", max_skipped)
    check_number("max_missing", max_missing)
    wanted = "rules are strings, as in 'k3:max=0.1'"
    texts = [*list_texts(rule, wanted), *list_texts(rules, wanted)]
    if not (baseline is None or isinstance(baseline, (str, os.PathLike)) or hasattr(baseline, "runs")):
        raise ConfigError(f"baseline: expected a Result or the path of a Result, found {kind_of(baseline)}")

    from mismatchctl.api.gate.coverage import Tolerances
    from mismatchctl.api.gate.gate import judge, load_result, read_baseline
    from mismatchctl.api.gate.rules import BITWISE_RULE, DEFAULT_RULES, parse_rules

    chosen = [one for text in texts for one in parse_rules(text)] + ([BITWISE_RULE] if expect_bitwise else [])
    chosen = chosen or list(DEFAULT_RULES)
    against = read_baseline(baseline, fixed_tokens=fixed_tokens)
    options = _read_options(columns, threads, engine, progress, micro_batch_size)
    result = load_result(list_inputs(sources), chosen, parse_corrections(corrections), **options)
    limits = Tolerances(max_skipped, max_missing, allow_different_model)
    return judge(result, chosen, against, level, limits)


@public_function
def diagnose(
    *sources: Sources,
    by: Texts = (),
    columns: Mapping[str, str] | None = None,
    threads: int | None = None,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Find the causes of the mismatch, with evidence and remedies.

    Args:
        *sources: The same dumps that `analyze` takes. Example: `mm.diagnose("dumps/")`.
        by: Columns with the worker, rank or data source of each sequence. The diagnosis finds the workers, ranks and
            sources with an unusual mismatch. Example: `by="rank"`.
        columns, threads, engine, progress: As in `mm.analyze`.

    Returns:
        A Diagnosis. `diagnosis["run"]` contains the findings of a run, strongest first.
    """
    from mismatchctl.api.diagnose import diagnose as diagnose_dump

    return diagnose_dump(
        _list_dumps(sources, {}),
        by=list_texts(by, "by: pass names of columns"),
        **_read_options(columns, threads, engine, progress),
    )


@public_function
def advise(
    *sources: Sources,
    framework: str | Framework = "",
    corrections: Corrections = (),
    configs: Corrections = (),
    batch: int | None = None,
    max_rejection: float = 1.0,
    min_ess: float = 0.0,
    no_rejection: bool = False,
    columns: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Recommend a correction and its threshold, or report a bug to fix first.

    Args:
        *sources: The same dumps that `analyze` takes. Example: `mm.advise("dumps/", batch=512)`.
        framework: Only recommend corrections that this framework supports: NAME or NAME@VERSION.
        corrections: Corrections to rank. Default: all common corrections, each with several thresholds.
        configs: Corrections in use now, to compare with the recommendation. Example:
            `configs=mm.read_config("trainer.yaml")`.
        batch: Number of sequences per update. Default: the number of sequences per step of the dump.
        max_rejection: Only recommend corrections that reject at most this share of tokens, and never over 0.9.
        min_ess: Only recommend corrections with at least this effective sample size of tokens, 0 to 1.
        no_rejection: Only recommend importance weights, no rejection.
        columns, progress: As in `mm.analyze`.

    Returns:
        An Advice. `advice["run"]` contains the ranking of a run, best first.
    """
    check_count("batch", batch)
    check_number("max_rejection", max_rejection)
    check_number("min_ess", min_ess)
    named = _find_framework(framework or None)
    from mismatchctl.api.advise.advise import advise as advise_dump
    from mismatchctl.api.advise.candidates import Limits

    return advise_dump(
        _list_dumps(sources, {}),
        framework="" if named is None else str(framework if isinstance(framework, str) else framework.title),
        corrections=parse_corrections(corrections),
        yours=parse_corrections(configs),
        batch=batch,
        limits=Limits(max_rejection, min_ess, no_rejection),
        rename=check_columns(columns),
        progress=progress,
    )


@public_function
def lint(
    config: StrPath | Mapping[str, object],
    *dumps: Sources,
    framework: str | Framework = "",
    columns: Mapping[str, str] | None = None,
) -> list[LintMessage]:
    """Check a framework's configuration, and return a message about each problem.

    Args:
        config: A file (YAML, JSON, TOML, a launch script, Python) or a mapping, in the framework's own keys.
            Example: `mm.lint("trainer.yaml")`.
        *dumps: Measure the effect of the configuration on these dumps.
        framework: Framework of the configuration: NAME or NAME@VERSION. Default: detected from the keys.
        columns: As in `mm.analyze`.

    Returns:
        Messages, most severe first. `message.level` is `"error"` (the framework does not start, or ignores a setting),
        `"warning"` (a documented trap), `"unknown"` (a value is not in the file) or `"info"`. `message.place` is the
        key, and `message.fix` the suggested configuration.
    """
    if not isinstance(config, (str, os.PathLike, Mapping)):
        raise ConfigError(f"config: expected a mapping or the path of a configuration, found {kind_of(config)}")
    _find_framework(framework or None)
    name = framework if isinstance(framework, str) else framework.title
    from mismatchctl.api.lint import lint as lint_config

    given = list_sources(dumps) if dumps else []
    with config_file(config) as path:
        return lint_config(path, given, name, check_columns(columns))[1]


def _list_dumps(sources: tuple[Sources, ...], arrays: Mapping[str, Values | None]) -> list[DumpSource]:
    given = {name: values for name, values in arrays.items() if values is not None}
    if sources and given:
        raise ConfigError(f"{next(iter(given))}: pass dumps or arrays, not both")
    for name in ("rollout", "train") if given else ():
        if name not in given:
            raise ConfigError(f"missing {name}: rollout and train are required, mask is optional")
    if given:
        return list_sources([given])
    found = list_sources(sources)
    if not found:
        raise ConfigError("no dump given: pass a path, a table or a mapping of columns")
    for source in found:
        if isinstance(source, str) and "/" not in source and not os.path.exists(source):
            from mismatchctl.frameworks.registry import load_presets

            if source in load_presets():
                raise ConfigError(f"{source} is a preset, not a dump; pass it as corrections or correction")
    return found


def _find_framework(given: str | Framework | None) -> Framework | None:
    from mismatchctl.frameworks.adapter import Framework
    from mismatchctl.frameworks.registry import load_framework

    if isinstance(given, str) and given:
        return load_framework(given)
    if given is None or isinstance(given, Framework):
        return given
    raise ConfigError(f"framework: expected the name of a framework, found {kind_of(given)}")


def _read_options(
    columns: Mapping[str, str] | None,
    threads: int | None,
    engine: Engine | None,
    progress: Progress | None,
    micro_batch_size: int | None = None,
    on_bad: Literal["error", "skip", "mask"] = "error",
) -> ReadOptions:
    check_count("threads", threads)
    check_count("micro_batch_size", micro_batch_size)
    check_choice("on_bad", on_bad, ("error", "skip", "mask"))
    if engine is not None and not hasattr(engine, "map"):
        raise ConfigError(f"engine: expected an engine such as LocalEngine(), found {engine!r}")
    return {
        "rename": check_columns(columns), "on_bad": on_bad, "micro_batch_size": micro_batch_size,
        "threads": threads, "engine": engine, "progress": progress,
    }  # fmt: skip


def _list_targets(
    rejection: float | Mapping[str, float] | None, sizes: float | Iterable[float]
) -> list[tuple[str, float]]:
    """Return the targets for rejection and ESS as pairs (metric, wanted share)."""
    from mismatchctl.api.sweep.sweep import ESS_METRIC, TARGET_REJECTIONS

    shares = {} if rejection is None else rejection if isinstance(rejection, Mapping) else {"tokens": rejection}
    found = []
    for kind, share in shares.items():
        check_choice("target_rejection", kind, tuple(TARGET_REJECTIONS))
        found.append((TARGET_REJECTIONS[kind], share))
    found += [(ESS_METRIC, size) for size in ([sizes] if isinstance(sizes, (int, float)) else sizes)]
    for _, share in found:
        check_number("a target", share)
        if not 0 <= share <= 1:
            raise ConfigError(f"target: expected a share from 0 to 1, found {share:g}")
    return list(dict.fromkeys(found))


@public_function
def metrics(rollout: Values, train: Values, mask: Values | None = None) -> dict[str, float | None]:
    """Compute all mismatch metrics of `analyze` from log-probs.

    >>> round(mm.metrics([[-1.0, -2.0]], [[-1.1, -2.0]])["k3"], 6)
    0.002419

    Args:
        rollout, train, mask: Log-probs in nats and the mask of valid tokens, as in `mm.weights`.

    Returns:
        The value of each metric by its name. An undefined value is `None`. The command `mismatchctl metrics` explains
        the metrics.
    """
    result = analyze(rollout=rollout, train=train, mask=mask, corrections=(), findings=False)
    (run,) = result.runs.values()
    return {name: value.value for name, value in run.overall.metrics.items()}


@public_function
def preset(name: str) -> Correction:
    """Return the correction of a preset.

    >>> mm.preset("token_tis").weight.truncate
    2.0

    Args:
        name: One of `mm.presets()`.
    """
    from mismatchctl.frameworks.registry import find_preset as preset_of

    return preset_of(name)


@public_function
def presets() -> dict[str, Preset]:
    """Return all presets by name: first the generic presets, then the presets of each framework.

    A preset has a `correction`. Its fields `framework`, `version` and `source` name its origin.

    >>> mm.presets()["token_tis"].correction.about
    'Token importance weights, truncated at 2.'
    """
    from mismatchctl.frameworks.registry import load_presets as all_presets

    return dict(all_presets())


@public_function
def read_config(config: StrPath | Mapping[str, object], framework: str = "") -> list[Correction]:
    """Return the corrections that a framework's configuration sets.

    Args:
        config: A file (YAML, JSON, TOML, a launch script, Python) or a mapping, in the framework's own keys.
            Example: `mm.analyze("dumps/", corrections=mm.read_config("trainer.yaml"))`.
        framework: Framework of the configuration: NAME or NAME@VERSION. Default: detected from the keys.

    Returns:
        A list with one correction, or one per training if a launch script starts several trainings.
    """
    from mismatchctl.frameworks.config_files import read_configurations

    with config_file(config) as path:
        return [correction for _, correction in read_configurations(path, framework)]


@public_function
def read_result(path: StrPath) -> Result:
    """Read a Result that `result.save` or `mismatchctl analyze -o` wrote.

    Args:
        path: The JSON file, local or in an object store. Example: `mm.read_result("result.json").k3.value`.
    """
    from mismatchctl.results.reader import read_result as read

    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"expected the path of a result, found {kind_of(path)}")
    return read(os.fspath(path))
