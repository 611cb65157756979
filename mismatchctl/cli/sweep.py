"""`mismatchctl sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from mismatchctl.api.sweep.result import Sweep
    from mismatchctl.api.sweep.study import Study, ThresholdAxis
    from mismatchctl.api.sweep.targets import TargetValue
    from mismatchctl.report.document import Document

target_option = partial(typer.Option, rich_help_panel="Targets")
forecast_option = partial(typer.Option, rich_help_panel="Predictions")

VaryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        help="Vary a field of each --correction, as in weight.clip.1=1.1:4:30 (30 values), 1.1:4:30:log or 1.5,2,4; "
        "repeat for a grid.",
    ),
]
StudyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--sweep", help="Read corrections and values from YAML: a list of {correction: NAME, vary: {PATH: values}}."
    ),
]
JsonOption = Annotated[bool, opt.output_option("--json", help="Print the sweep as JSON.")]
OutputOption = Annotated[
    Path | None, opt.output_option("--output", "-o", help="Write all points to FILE (.parquet, .csv or .json).")
]
HtmlOption = Annotated[
    Path | None, opt.output_option(help="Write an HTML page with curves, heat maps and an interactive explorer.")
]
TargetRejectionOption = Annotated[
    list[str] | None,
    target_option(
        metavar="SHARE",
        help="Find the thresholds that reject this share of tokens (5%) or sequences (sequences=5%) (repeatable).",
    ),
]
TargetEssOption = Annotated[
    list[str] | None,
    target_option(
        metavar="SHARE", help="Find the thresholds that leave this effective sample size, as in 90% (repeatable)."
    ),
]
BatchOption = Annotated[int | None, forecast_option(min=1, help="Predict the rejection in a batch of N sequences.")]
AtLengthOption = Annotated[
    list[int] | None, forecast_option(min=1, help="Predict rejection and ESS for responses of N tokens (repeatable).")
]
AtStepOption = Annotated[
    float | None,
    forecast_option(metavar="N", help="Predict the rejection N steps after the last step of the dump, as in +100."),
]


GeoOption = Annotated[
    str | None,
    typer.Option(
        "--geo",
        metavar="X",
        help="Sweep the rejection of sequences by geometric mean outside [1/X, X]: a value, 1.001:1.1:20 or a list.",
    ),
]


@opt.flatten_options
def sweep(
    *,
    paths: opt.PathsArgument = None,
    pair: opt.PairOptions,
    correction: opt.CorrectionOption = None,
    config: opt.ConfigOption = None,
    vary: VaryOption = None,
    study_file: StudyFileOption = None,
    by: opt.ByOption = None,
    column: opt.ColumnOption = None,
    on_bad: opt.OnBadOption = "error",
    micro_batch_size: opt.MicroBatchOption = None,
    engine: opt.EngineOptions,
    verbose: opt.VerboseOption = False,
    quiet: opt.QuietOption = False,
    json: JsonOption = False,
    output: OutputOption = None,
    html: HtmlOption = None,
    figures: opt.FigureOptions,
    force: opt.ForceOption = False,
    target_rejection: TargetRejectionOption = None,
    target_ess: TargetEssOption = None,
    batch: BatchOption = None,
    at_length: AtLengthOption = None,
    at_step: AtStepOption = None,
    geo: GeoOption = None,
) -> None:
    """Sweep thresholds: the rejected data, ESS and bias of each.

    If you do not name a correction, it sweeps token truncation, sequence and geometric rejection, and the veto.
    """
    output, json = out.resolve_json_output(output, json)
    paths = paths or []
    inputs = [*paths, *(pair.sides() or ())]
    out.check_output_paths(output, html, force=force, inputs=[*inputs, *(config or []), study_file])
    figures.check(inputs)
    wishes = _parse_targets(target_rejection or [], target_ess or [])
    if output is not None:
        from mismatchctl.api.sweep.serialization import check_suffix

        check_suffix(output)
    chosen = [
        *_build_studies(correction or [], config or [], vary or [], quiet),
        *([] if study_file is None else _read_study_file(study_file)),
        *([] if geo is None else [_geometric_study(geo)]),
    ]

    from mismatchctl.api.sweep.result import ForecastRequest
    from mismatchctl.api.sweep.study import DEFAULT_STUDIES
    from mismatchctl.api.sweep.sweep import price_targets
    from mismatchctl.api.sweep.sweep import sweep as run

    where, sources = engine.build(), pair.sources(paths, quiet)
    with out.progress_bar(quiet) as progress:
        found = run(
            sources,
            chosen or DEFAULT_STUDIES,
            rename=opt.parse_renames(column),
            by=by or [],
            on_bad=on_bad,
            engine=where,
            progress=progress,
            notice=lambda sentence: out.print_warnings([sentence], quiet),
            wishes=wishes,
            outlook=ForecastRequest(batch, tuple(at_length or ()), at_step),
            micro_batch_size=micro_batch_size,
        )
    with out.write_together(quiet):
        if output is not None:
            from mismatchctl.api.sweep.serialization import write_sweep

            write_sweep(found, output)
        figures.write_page(partial(_build_page, found), html, force=force)
    if json:
        from mismatchctl.results.summary import skipped_data_notes

        out.print_warnings((*found.warnings, *skipped_data_notes(found.left_out)), quiet)
        typer.echo(found.to_json(), nl=False)
    elif not quiet:
        from mismatchctl.report.pages.sweep import sweep_screen, target_screen

        if found.targets and not verbose:
            prices = price_targets(
                found, paths, rename=opt.parse_renames(column), on_bad=on_bad, engine=where,
                micro_batch_size=micro_batch_size,
            )  # fmt: skip
            out.print_page(target_screen(found, paths, prices))
        else:
            out.print_page(sweep_screen(found, paths, _build_page(found) if verbose else None))


def _geometric_study(values: str) -> Study:
    """Return the study of a rejection by the geometric mean."""
    from mismatchctl.api.sweep.study import Study, validate_study
    from mismatchctl.corrections.presets import parse_correction

    correction = parse_correction({"name": "geo", "gates": [{"level": "geometric", "keep": [0.5, 2.0]}]})
    return validate_study(Study(correction, (_parse_numeric_axis("gates.0.keep", values, "--geo"),)))


def _build_page(found: Sweep) -> Document:
    from mismatchctl.report.pages.sweep import document

    return document(found)


def _build_studies(named: Sequence[str], configs: Sequence[str], vary: Sequence[str], quiet: bool) -> list[Study]:
    """Return the corrections of `--correction` and `--config` along the axes of `--vary`."""
    if not named and not configs:
        if vary:
            raise ConfigError("--vary needs --correction or --config")
        return []
    chosen = opt.select_corrections(named, configs, quiet=quiet)
    if not vary:
        raise ConfigError("missing --vary, for example --vary weight.truncate=1.5:4:20")
    from mismatchctl.api.sweep.study import make_studies

    return list(make_studies(chosen, [_parse_axis(text) for text in vary]))


def _parse_axis(text: str) -> ThresholdAxis:
    from mismatchctl.api.sweep.study import ThresholdAxis

    path, equals, values = text.partition("=")
    if not (path and equals and values):
        raise ConfigError(f"--vary {text}: write PATH=values, as in weight.clip.1=1.1:4:30")
    return ThresholdAxis.parse(path.strip(), values.strip())


def _read_study_file(path: Path) -> list[Study]:
    """Read the studies of a YAML file. Corrections may be names, as in `--correction`."""
    from mismatchctl.api.sweep.study import studies_from_mapping, study_items
    from mismatchctl.io.yaml import read_data

    data = read_data(path)
    names = {item["correction"] for item in study_items(data, str(path)) if isinstance(item["correction"], str)}
    named: dict[str, Any] = {}
    for name in sorted(names):
        found = opt.load_corrections(name)
        if len(found) != 1:
            raise ConfigError(f"{path}: {name} holds {len(found)} corrections; a study takes one")
        named[name] = found[0]
    return list(studies_from_mapping(data, named, str(path)))


def _parse_numeric_axis(path: str, text: str, flag: str) -> ThresholdAxis:
    """Parse the axis of a shortcut option, which must be numeric."""
    from mismatchctl.api.sweep.study import ThresholdAxis

    axis = ThresholdAxis.parse(path, text, flag)
    if not axis.is_numeric:
        raise ConfigError(f"{flag} {text}: write a number, a list a,b,c or a range a:b:n, as in 1.1:4:30")
    return axis


def _parse_targets(rejections: Sequence[str], sizes: Sequence[str]) -> list[TargetValue]:
    """Parse `--target-rejection` and `--target-ess`."""
    from mismatchctl.api.sweep.targets import ESS_METRIC, TARGET_REJECTIONS

    found: list[TargetValue] = []
    for text in rejections:
        kind, equals, share = text.rpartition("=")
        kind = kind if equals else "tokens"
        if kind not in TARGET_REJECTIONS:
            known = f"write tokens=0.05 or sequences=0.05{suggestion(kind, TARGET_REJECTIONS)}"
            raise ConfigError(f"--target-rejection {text}: {known}")
        value = opt.parse_share("--target-rejection", share, 1, "write a share between 0 and 1, such as 5% or 0.05")
        found.append((TARGET_REJECTIONS[kind], value))
    return list(dict.fromkeys([*found, *((ESS_METRIC, _parse_size(text)) for text in sizes)]))


def _parse_size(text: str) -> float:
    return opt.parse_share("--target-ess", text, 1, "write a share between 0 and 1, such as 90% or 0.9")
