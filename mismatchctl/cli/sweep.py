"""`mismatchctl sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatchctl.cli.corrections import Level, RuleFlags, chosen_corrections, named_corrections
from mismatchctl.cli.figures import FigureFolder, FigureFormat, Picture, check_folder, write_page
from mismatchctl.cli.flags import (
    OUTPUTS,
    Address,
    By,
    Cache,
    Columns,
    Configs,
    Corrections,
    EngineChoice,
    EngineName,
    Force,
    MemoryLimit,
    MicroBatch,
    OnBad,
    OnBadRows,
    Paths,
    Quiet,
    Threads,
    chosen_engine,
    renamed,
)
from mismatchctl.cli.output import check_places, console, or_stdout, outputs, progress_bar, say
from mismatchctl.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from mismatchctl.sweep import Axis, Study, Sweep
    from mismatchctl.sweep.targets import Wish

_SHORT = "One correction, from flags; each takes a value, a range or a list"
_ASK = "Targets"
_AHEAD = "Predictions, each with its interval, model and check"

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
ToJson = Annotated[
    bool, typer.Option("--json", help="Print the sweep on stdout, and nothing else.", rich_help_panel=OUTPUTS)
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write all rows (.parquet, .csv, .json).", rich_help_panel=OUTPUTS),
]
Html = Annotated[
    Path | None, typer.Option(help="Write a page: curves, maps, the front, an explorer.", rich_help_panel=OUTPUTS)
]
Front = Annotated[bool, typer.Option("--pareto", help="Show the whole front of each correction.", rich_help_panel=_ASK)]
TargetRejection = Annotated[
    list[str] | None,
    typer.Option(help="Solve for 0.05 rejected tokens; sequences=0.05 for sequences; repeat.", rich_help_panel=_ASK),
]
TargetEss = Annotated[
    list[float] | None,
    typer.Option(min=0, max=1, help="Solve for this effective sample size of tokens; repeat.", rich_help_panel=_ASK),
]
Batch = Annotated[
    int | None, typer.Option(min=1, help="What a batch of so many sequences would lose.", rich_help_panel=_AHEAD)
]
AtLength = Annotated[
    list[int] | None,
    typer.Option(min=1, help="Rejection and ESS at so many tokens a response; repeat.", rich_help_panel=_AHEAD),
]
AtStep = Annotated[
    float | None, typer.Option(help="Rejection so many steps after the last, as in +100.", rich_help_panel=_AHEAD)
]
IsLevel = Annotated[Level, typer.Option(help="Level of the weights.", rich_help_panel=_SHORT)]
IsThreshold = Annotated[str | None, typer.Option(help="Upper bound of weights.", rich_help_panel=_SHORT)]
RsLevel = Annotated[Level, typer.Option(help="Level of --rs-upper and --rs-lower.", rich_help_panel=_SHORT)]
RsUpper = Annotated[str | None, typer.Option(help="Largest ratio kept.", rich_help_panel=_SHORT)]
RsLower = Annotated[str | None, typer.Option(help="Smallest ratio kept.", rich_help_panel=_SHORT)]
Geo = Annotated[str | None, typer.Option(help="x: geometric mean ratio kept within 1/x and x.", rich_help_panel=_SHORT)]
Veto = Annotated[
    str | None, typer.Option(help="Reject a sequence with any token ratio below this.", rich_help_panel=_SHORT)
]


def sweep(
    paths: Paths,
    correction: Corrections = None,
    config: Configs = None,
    vary: Vary = None,
    study_file: StudyFile = None,
    by: By = None,
    column: Columns = None,
    on_bad: OnBadRows = OnBad.error,
    micro_batch_size: MicroBatch = None,
    threads: Threads = None,
    memory_limit: MemoryLimit = None,
    engine: EngineChoice = EngineName.local,
    address: Address = None,
    cache: Cache = None,
    quiet: Quiet = False,
    json: ToJson = False,
    output: Output = None,
    html: Html = None,
    figures: FigureFolder = None,
    figure_format: FigureFormat = Picture.svg,
    force: Force = False,
    pareto: Front = False,
    target_rejection: TargetRejection = None,
    target_ess: TargetEss = None,
    batch: Batch = None,
    at_length: AtLength = None,
    at_step: AtStep = None,
    is_level: IsLevel = Level.token,
    is_threshold: IsThreshold = None,
    rs_level: RsLevel = Level.sequence,
    rs_upper: RsUpper = None,
    rs_lower: RsLower = None,
    geo: Geo = None,
    veto: Veto = None,
) -> None:
    """Draw what thresholds cost and give, all of them in one pass.

    Without --correction, --sweep or a shortcut: token weights, sequence and geometric rejection, and the veto.
    """
    output, json = or_stdout(output, json)
    check_places(output, html, force=force, inputs=[*paths, *(config or []), study_file])
    check_folder(figures, paths)
    wishes = _wishes(target_rejection or [], target_ess or [])
    flags = {"is_threshold": is_threshold, "rs_upper": rs_upper, "rs_lower": rs_lower, "geo": geo, "veto": veto}
    named = {name: text for name, text in flags.items() if text is not None}
    if output is not None:
        from mismatchctl.sweep.export import check_suffix

        check_suffix(output)
    chosen = [
        *_varied(correction or [], config or [], vary or [], quiet),
        *([] if study_file is None else _from_file(study_file)),
        *([_shortcut(named, is_level.value, rs_level.value)] if named else []),
    ]

    from mismatchctl.sweep import USUAL, Outlook
    from mismatchctl.sweep import sweep as run

    where = chosen_engine(threads, memory_limit, engine, address, cache)
    with progress_bar(quiet) as progress:
        found = run(
            paths,
            chosen or USUAL,
            rename=renamed(column),
            by=by or [],
            on_bad=on_bad.value,
            engine=where,
            progress=progress,
            notice=lambda sentence: say(f"warning: {sentence}", quiet),
            wishes=wishes,
            outlook=Outlook(batch, tuple(at_length or ()), at_step),
            micro_batch_size=micro_batch_size,
        )
    with outputs(quiet):
        if output is not None:
            from mismatchctl.sweep import export

            export.write(found, output)
        if html is not None or figures is not None:
            from mismatchctl.render.pages.sweep import document

            write_page(document(found), html, figures, figure_format, force=force)
    _show(found, quiet, as_json=json, front=pareto)


def _show(found: Sweep, quiet: bool, *, as_json: bool, front: bool) -> None:
    if as_json:
        from mismatchctl.result.notes import left_out_notes
        from mismatchctl.sweep.export import to_json

        for sentence in (*found.warnings, *left_out_notes(found.left_out)):
            say(f"warning: {sentence}", quiet)
        typer.echo(to_json(found), nl=False)
    elif not quiet:
        from mismatchctl.render.pages.sweep import document
        from mismatchctl.render.to.terminal import show

        show(document(found, front=front), console())


def _varied(named: Sequence[str], configs: Sequence[str], vary: Sequence[str], quiet: bool) -> list[Study]:
    """The corrections of `--correction` and `--config`, along the axes of `--vary`."""
    if not named and not configs:
        if vary:
            raise ConfigError("--vary needs --correction or --config: which one varies?")
        return []
    if not vary:
        raise ConfigError("nothing varies: say what, as in --vary weight.truncate=1.5:4:20")
    from mismatchctl.sweep import studies

    return list(studies(chosen_corrections(named, RuleFlags(), configs, quiet=quiet), [_axis(text) for text in vary]))


def _axis(text: str) -> Axis:
    from mismatchctl.sweep import Axis

    path, equals, values = text.partition("=")
    if not (path and equals and values):
        raise ConfigError(f"--vary {text}: write PATH=values, as in weight.clip.1=1.1:4:30")
    return Axis.parse(path.strip(), values.strip())


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


def _shortcut(flags: dict[str, str], is_level: str, rs_level: str) -> Study:
    """The correction that the shortcuts spell; those with more than one value vary."""
    from mismatchctl.correction import correction_from_mapping
    from mismatchctl.sweep import Study
    from mismatchctl.sweep.study import checked

    weight, gates, axes = None, [], []
    if "is_threshold" in flags:
        weight = {"level": is_level, "truncate": 1.0}
        axes.append(_numbers("weight.truncate", flags["is_threshold"], "--is-threshold"))
    sides = [(index, name) for index, name in enumerate(("rs_lower", "rs_upper")) if name in flags]
    if sides:
        gates.append({"level": rs_level, "keep": [0.0 if "rs_lower" in flags else None, None]})
        flag = {name: f"--{name.replace('_', '-')}" for _, name in sides}
        axes += [_numbers(f"gates.0.keep.{index}", flags[name], flag[name]) for index, name in sides]
    if "geo" in flags:
        gates.append({"level": "geometric", "keep": [0.5, 2.0]})
        axes.append(_numbers(f"gates.{len(gates) - 1}.keep", flags["geo"], "--geo"))
    if "veto" in flags:
        gates.append({"level": "min", "keep": [1e-4, None], "clamp": "none"})
        axes.append(_numbers(f"gates.{len(gates) - 1}.keep.0", flags["veto"], "--veto"))
    if "rs_upper" in flags and "rs_lower" not in flags:
        gates[0] = {"level": rs_level, "keep": [None, 1.0]}
    return checked(Study(correction_from_mapping({"name": "flags", "weight": weight, "gates": gates}), tuple(axes)))


def _numbers(path: str, text: str, flag: str) -> Axis:
    """The axis of a shortcut, which takes numbers alone."""
    from mismatchctl.sweep import Axis

    axis = Axis.parse(path, text, flag)
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
