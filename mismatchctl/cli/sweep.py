"""`mismatchctl sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatchctl.cli import flags
from mismatchctl.cli.corrections import Level, chosen_corrections, named_corrections
from mismatchctl.cli.figures import FigureFlags
from mismatchctl.cli.flags import flat, output_option
from mismatchctl.cli.output import outputs, page_of, progress_bar, show, warn
from mismatchctl.cli.places import check_places, or_stdout
from mismatchctl.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from mismatchctl.sweep import Study, ThresholdAxis
    from mismatchctl.sweep.targets import Wish

shortcut_option = partial(
    typer.Option, rich_help_panel="One correction, from flags; each takes a value, a range or a list"
)
target_option = partial(typer.Option, rich_help_panel="Targets")
ahead_option = partial(typer.Option, rich_help_panel="Predictions, each with its interval, model and check")

Vary = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        help="PATH=values: a field of every --correction, as in weight.clip.1=1.1:4:30 (30 values), 1.1:4:30:log or "
        "1.5,2,4; repeat for a grid.",
    ),
]
StudyFile = Annotated[
    Path | None, typer.Option("--sweep", help="A YAML file: a list of {correction: NAME, vary: {PATH: values}}.")
]
ToJson = Annotated[bool, output_option("--json", help="Print the sweep on stdout, and nothing else.")]
Output = Annotated[Path | None, output_option("--output", "-o", help="Write all rows (.parquet, .csv, .json).")]
Html = Annotated[Path | None, output_option(help="Write a page: curves, maps, the front, an explorer.")]
Front = Annotated[bool, target_option("--pareto", help="Show the whole front of each correction.")]
TargetRejection = Annotated[
    list[str] | None, target_option(help="Solve for 0.05 rejected tokens; sequences=0.05 for sequences; repeat.")
]
TargetEss = Annotated[
    list[float] | None, target_option(min=0, max=1, help="Solve for this effective sample size of tokens; repeat.")
]
Batch = Annotated[int | None, ahead_option(min=1, help="What a batch of so many sequences would lose.")]
AtLength = Annotated[
    list[int] | None, ahead_option(min=1, help="Rejection and ESS at so many tokens a response; repeat.")
]
AtStep = Annotated[float | None, ahead_option(help="Rejection so many steps after the last, as in +100.")]


@dataclass(frozen=True)
class Shortcuts:
    """The flags that spell one correction; those with more than one value vary."""

    is_level: Annotated[Level, shortcut_option(help="Level of the weights.")] = "token"
    is_threshold: Annotated[str | None, shortcut_option(help="Upper bound of weights.")] = None
    rs_level: Annotated[Level, shortcut_option(help="Level of --rs-upper and --rs-lower.")] = "sequence"
    rs_upper: Annotated[str | None, shortcut_option(help="Largest ratio kept.")] = None
    rs_lower: Annotated[str | None, shortcut_option(help="Smallest ratio kept.")] = None
    geo: Annotated[str | None, shortcut_option(help="x: geometric mean ratio kept within 1/x and x.")] = None
    veto: Annotated[str | None, shortcut_option(help="Reject a sequence with any token ratio below this.")] = None

    def studies(self) -> list[Study]:
        """The study of that correction, if any of its bounds was given."""
        from mismatchctl.correction import correction_from_mapping
        from mismatchctl.sweep import Study
        from mismatchctl.sweep.study import checked

        weight: dict[str, Any] | None = None
        gates: list[dict[str, Any]] = []
        axes: list[ThresholdAxis] = []
        if self.is_threshold is not None:
            weight = {"level": self.is_level, "truncate": 1.0}
            axes.append(_numbers("weight.truncate", self.is_threshold, "--is-threshold"))
        if self.rs_lower is not None or self.rs_upper is not None:
            keep = [None, 1.0] if self.rs_lower is None else [0.0, None]
            gates.append({"level": self.rs_level, "keep": keep})
        if self.rs_lower is not None:
            axes.append(_numbers("gates.0.keep.0", self.rs_lower, "--rs-lower"))
        if self.rs_upper is not None:
            axes.append(_numbers("gates.0.keep.1", self.rs_upper, "--rs-upper"))
        if self.geo is not None:
            gates.append({"level": "geometric", "keep": [0.5, 2.0]})
            axes.append(_numbers(f"gates.{len(gates) - 1}.keep", self.geo, "--geo"))
        if self.veto is not None:
            gates.append({"level": "min", "keep": [1e-4, None], "clamp": "none"})
            axes.append(_numbers(f"gates.{len(gates) - 1}.keep.0", self.veto, "--veto"))
        if not axes:
            return []
        correction = correction_from_mapping({"name": "flags", "weight": weight, "gates": gates})
        return [checked(Study(correction, tuple(axes)))]


@flat
def sweep(
    *,
    paths: flags.Paths,
    correction: flags.Corrections = None,
    config: flags.Configs = None,
    vary: Vary = None,
    study_file: StudyFile = None,
    by: flags.By = None,
    column: flags.Columns = None,
    on_bad: flags.OnBadRows = "error",
    micro_batch_size: flags.MicroBatch = None,
    engine: flags.EngineFlags,
    quiet: flags.Quiet = False,
    json: ToJson = False,
    output: Output = None,
    html: Html = None,
    figures: FigureFlags,
    force: flags.Force = False,
    pareto: Front = False,
    target_rejection: TargetRejection = None,
    target_ess: TargetEss = None,
    batch: Batch = None,
    at_length: AtLength = None,
    at_step: AtStep = None,
    shortcuts: Shortcuts,
) -> None:
    """Draw what thresholds cost and give, all of them in one pass.

    Without --correction, --sweep or a shortcut: token weights, sequence and geometric rejection, and the veto.
    """
    output, json = or_stdout(output, json)
    check_places(output, html, force=force, inputs=[*paths, *(config or []), study_file])
    figures.check(paths)
    wishes = _wishes(target_rejection or [], target_ess or [])
    if output is not None:
        from mismatchctl.sweep.export import check_suffix

        check_suffix(output)
    chosen = [
        *_varied(correction or [], config or [], vary or [], quiet),
        *([] if study_file is None else _from_file(study_file)),
        *shortcuts.studies(),
    ]

    from mismatchctl.api.defaults import studies_or_default
    from mismatchctl.sweep import ForecastRequest
    from mismatchctl.sweep import sweep as run

    where = engine.chosen()
    with progress_bar(quiet) as progress:
        found = run(
            paths,
            studies_or_default(chosen),
            rename=flags.renamed(column),
            by=by or [],
            on_bad=on_bad,
            engine=where,
            progress=progress,
            notice=lambda sentence: warn([sentence], quiet),
            wishes=wishes,
            outlook=ForecastRequest(batch, tuple(at_length or ()), at_step),
            micro_batch_size=micro_batch_size,
        )
    with outputs(quiet):
        if output is not None:
            from mismatchctl.sweep import export

            export.write(found, output)
        figures.write_page(partial(page_of, "sweep", found), html, force=force)
    if json:
        from mismatchctl.result.notes import left_out_notes
        from mismatchctl.sweep.export import to_json

        warn((*found.warnings, *left_out_notes(found.left_out)), quiet)
        typer.echo(to_json(found), nl=False)
    elif not quiet:
        show(page_of("sweep", found, front=pareto))


def _varied(named: Sequence[str], configs: Sequence[str], vary: Sequence[str], quiet: bool) -> list[Study]:
    """The corrections of `--correction` and `--config`, along the axes of `--vary`."""
    if not named and not configs:
        if vary:
            raise ConfigError("--vary needs --correction or --config: which one varies?")
        return []
    chosen = chosen_corrections(named, configs, quiet=quiet)
    if not vary:
        raise ConfigError("nothing varies: say what, as in --vary weight.truncate=1.5:4:20")
    from mismatchctl.sweep import studies

    return list(studies(chosen, [_axis(text) for text in vary]))


def _axis(text: str) -> ThresholdAxis:
    from mismatchctl.sweep import ThresholdAxis

    path, equals, values = text.partition("=")
    if not (path and equals and values):
        raise ConfigError(f"--vary {text}: write PATH=values, as in weight.clip.1=1.1:4:30")
    return ThresholdAxis.parse(path.strip(), values.strip())


def _from_file(path: Path) -> list[Study]:
    """The studies of a YAML file; a correction may be named as `--correction` takes it."""
    from mismatchctl.sweep.study import studies_from_mapping, study_items
    from mismatchctl.texts import read_data

    data = read_data(path)
    names = {item["correction"] for item in study_items(data, str(path)) if isinstance(item["correction"], str)}
    named: dict[str, Any] = {}
    for name in sorted(names):
        found = named_corrections(name)
        if len(found) != 1:
            raise ConfigError(f"{path}: {name} holds {len(found)} corrections; a study takes one")
        named[name] = found[0]
    return list(studies_from_mapping(data, named, str(path)))


def _numbers(path: str, text: str, flag: str) -> ThresholdAxis:
    """The axis of a shortcut, which takes numbers alone."""
    from mismatchctl.sweep import ThresholdAxis

    axis = ThresholdAxis.parse(path, text, flag)
    if not axis.is_numeric:
        raise ConfigError(f"{flag} {text}: write a number, a list a,b,c or a range a:b:n, as in 1.1:4:30")
    return axis


def _wishes(rejections: Sequence[str], sizes: Sequence[float]) -> list[Wish]:
    """What `--target-rejection` and `--target-ess` ask for."""
    from mismatchctl.sweep.targets import ESS, REJECTIONS

    found: list[Wish] = []
    for text in rejections:
        kind, equals, share = text.rpartition("=")
        kind = kind if equals else "tokens"
        if kind not in REJECTIONS:
            known = f"write tokens=0.05 or sequences=0.05{suggestion(kind, REJECTIONS)}"
            raise ConfigError(f"--target-rejection {text}: {known}")
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1:
            raise ConfigError(f"--target-rejection {text}: a share lies between 0 and 1, as in 0.05")
        found.append((REJECTIONS[kind], value))
    return list(dict.fromkeys([*found, *((ESS, value) for value in sizes)]))
