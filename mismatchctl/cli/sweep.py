"""`mismatchctl sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatchctl.cli.options import (
    ByOption,
    ColumnOption,
    ConfigOption,
    CorrectionOption,
    EngineOptions,
    FigureOptions,
    ForceOption,
    Level,
    MicroBatchOption,
    OnBadOption,
    PathsArgument,
    QuietOption,
    flatten_options,
    load_corrections,
    output_option,
    parse_renames,
    select_corrections,
)
from mismatchctl.cli.output import (
    check_output_paths,
    print_page,
    print_warnings,
    progress_bar,
    resolve_json_output,
    write_together,
)
from mismatchctl.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from mismatchctl.api.sweep.result import Sweep
    from mismatchctl.api.sweep.study import Study, ThresholdAxis
    from mismatchctl.api.sweep.targets import TargetValue
    from mismatchctl.report.document import Document

shortcut_option = partial(
    typer.Option, rich_help_panel="One correction, from flags; each takes a value, a range or a list"
)
target_option = partial(typer.Option, rich_help_panel="Targets")
forecast_option = partial(typer.Option, rich_help_panel="Predictions, each with its interval, model and check")

VaryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        help="PATH=values: a field of every --correction, as in weight.clip.1=1.1:4:30 (30 values), 1.1:4:30:log or "
        "1.5,2,4; repeat for a grid.",
    ),
]
StudyFileOption = Annotated[
    Path | None, typer.Option("--sweep", help="A YAML file: a list of {correction: NAME, vary: {PATH: values}}.")
]
JsonOption = Annotated[bool, output_option("--json", help="Print the sweep on stdout, and nothing else.")]
OutputOption = Annotated[Path | None, output_option("--output", "-o", help="Write all rows (.parquet, .csv, .json).")]
HtmlOption = Annotated[Path | None, output_option(help="Write a page: curves, maps, the front, an explorer.")]
TargetRejectionOption = Annotated[
    list[str] | None, target_option(help="Solve for 0.05 rejected tokens; sequences=0.05 for sequences; repeat.")
]
TargetEssOption = Annotated[
    list[float] | None, target_option(min=0, max=1, help="Solve for this effective sample size of tokens; repeat.")
]
BatchOption = Annotated[int | None, forecast_option(min=1, help="What a batch of so many sequences would lose.")]
AtLengthOption = Annotated[
    list[int] | None, forecast_option(min=1, help="Rejection and ESS at so many tokens a response; repeat.")
]
AtStepOption = Annotated[float | None, forecast_option(help="Rejection so many steps after the last, as in +100.")]


@dataclass(frozen=True)
class ShortcutOptions:
    """The options of one correction. Options with several values are the axes of the sweep."""

    is_level: Annotated[Level, shortcut_option(help="Level of the weights.")] = "token"
    is_threshold: Annotated[str | None, shortcut_option(help="Upper bound of weights.")] = None
    rs_level: Annotated[Level, shortcut_option(help="Level of --rs-upper and --rs-lower.")] = "sequence"
    rs_upper: Annotated[str | None, shortcut_option(help="Largest ratio kept.")] = None
    rs_lower: Annotated[str | None, shortcut_option(help="Smallest ratio kept.")] = None
    geo: Annotated[str | None, shortcut_option(help="x: geometric mean ratio kept within 1/x and x.")] = None
    veto: Annotated[str | None, shortcut_option(help="Reject a sequence with any token ratio below this.")] = None

    def studies(self) -> list[Study]:
        """Return the study of the correction, if any bound is given."""
        from mismatchctl.api.sweep.study import Study, validate_study
        from mismatchctl.corrections.presets import parse_correction

        weight: dict[str, Any] | None = None
        gates: list[dict[str, Any]] = []
        axes: list[ThresholdAxis] = []
        if self.is_threshold is not None:
            weight = {"level": self.is_level, "truncate": 1.0}
            axes.append(_parse_numeric_axis("weight.truncate", self.is_threshold, "--is-threshold"))
        if self.rs_lower is not None or self.rs_upper is not None:
            keep = [None, 1.0] if self.rs_lower is None else [0.0, None]
            gates.append({"level": self.rs_level, "keep": keep})
        if self.rs_lower is not None:
            axes.append(_parse_numeric_axis("gates.0.keep.0", self.rs_lower, "--rs-lower"))
        if self.rs_upper is not None:
            axes.append(_parse_numeric_axis("gates.0.keep.1", self.rs_upper, "--rs-upper"))
        if self.geo is not None:
            gates.append({"level": "geometric", "keep": [0.5, 2.0]})
            axes.append(_parse_numeric_axis(f"gates.{len(gates) - 1}.keep", self.geo, "--geo"))
        if self.veto is not None:
            gates.append({"level": "min", "keep": [1e-4, None], "clamp": "none"})
            axes.append(_parse_numeric_axis(f"gates.{len(gates) - 1}.keep.0", self.veto, "--veto"))
        if not axes:
            return []
        correction = parse_correction({"name": "flags", "weight": weight, "gates": gates})
        return [validate_study(Study(correction, tuple(axes)))]


@flatten_options
def sweep(
    *,
    paths: PathsArgument,
    correction: CorrectionOption = None,
    config: ConfigOption = None,
    vary: VaryOption = None,
    study_file: StudyFileOption = None,
    by: ByOption = None,
    column: ColumnOption = None,
    on_bad: OnBadOption = "error",
    micro_batch_size: MicroBatchOption = None,
    engine: EngineOptions,
    quiet: QuietOption = False,
    json: JsonOption = False,
    output: OutputOption = None,
    html: HtmlOption = None,
    figures: FigureOptions,
    force: ForceOption = False,
    target_rejection: TargetRejectionOption = None,
    target_ess: TargetEssOption = None,
    batch: BatchOption = None,
    at_length: AtLengthOption = None,
    at_step: AtStepOption = None,
    shortcuts: ShortcutOptions,
) -> None:
    """Draw what thresholds cost and give, all of them in one pass.

    Without --correction, --sweep or a shortcut: token weights, sequence and geometric rejection, and the veto.
    """
    output, json = resolve_json_output(output, json)
    check_output_paths(output, html, force=force, inputs=[*paths, *(config or []), study_file])
    figures.check(paths)
    wishes = _parse_targets(target_rejection or [], target_ess or [])
    if output is not None:
        from mismatchctl.api.sweep.serialization import check_suffix

        check_suffix(output)
    chosen = [
        *_build_studies(correction or [], config or [], vary or [], quiet),
        *([] if study_file is None else _read_study_file(study_file)),
        *shortcuts.studies(),
    ]

    from mismatchctl.api.defaults import studies_or_default
    from mismatchctl.api.sweep.result import ForecastRequest
    from mismatchctl.api.sweep.sweep import sweep as run

    where = engine.build()
    with progress_bar(quiet) as progress:
        found = run(
            paths,
            studies_or_default(chosen),
            rename=parse_renames(column),
            by=by or [],
            on_bad=on_bad,
            engine=where,
            progress=progress,
            notice=lambda sentence: print_warnings([sentence], quiet),
            wishes=wishes,
            outlook=ForecastRequest(batch, tuple(at_length or ()), at_step),
            micro_batch_size=micro_batch_size,
        )
    with write_together(quiet):
        if output is not None:
            from mismatchctl.api.sweep.serialization import write_sweep

            write_sweep(found, output)
        figures.write_page(partial(_build_page, found), html, force=force)
    if json:
        from mismatchctl.results.summary import skipped_data_notes

        print_warnings((*found.warnings, *skipped_data_notes(found.left_out)), quiet)
        typer.echo(found.to_json(), nl=False)
    elif not quiet:
        print_page(_build_page(found))


def _build_page(found: Sweep) -> Document:
    from mismatchctl.report.pages.sweep import document

    return document(found)


def _build_studies(named: Sequence[str], configs: Sequence[str], vary: Sequence[str], quiet: bool) -> list[Study]:
    """Return the corrections of `--correction` and `--config` along the axes of `--vary`."""
    if not named and not configs:
        if vary:
            raise ConfigError("--vary needs --correction or --config: which one varies?")
        return []
    chosen = select_corrections(named, configs, quiet=quiet)
    if not vary:
        raise ConfigError("nothing varies: say what, as in --vary weight.truncate=1.5:4:20")
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
        found = load_corrections(name)
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


def _parse_targets(rejections: Sequence[str], sizes: Sequence[float]) -> list[TargetValue]:
    """Parse `--target-rejection` and `--target-ess`."""
    from mismatchctl.api.sweep.targets import ESS_METRIC, TARGET_REJECTIONS

    found: list[TargetValue] = []
    for text in rejections:
        kind, equals, share = text.rpartition("=")
        kind = kind if equals else "tokens"
        if kind not in TARGET_REJECTIONS:
            known = f"write tokens=0.05 or sequences=0.05{suggestion(kind, TARGET_REJECTIONS)}"
            raise ConfigError(f"--target-rejection {text}: {known}")
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1:
            raise ConfigError(f"--target-rejection {text}: a share lies between 0 and 1, as in 0.05")
        found.append((TARGET_REJECTIONS[kind], value))
    return list(dict.fromkeys([*found, *((ESS_METRIC, value) for value in sizes)]))
