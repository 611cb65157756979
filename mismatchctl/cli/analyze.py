"""`mismatchctl analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mismatchctl.cli.help import ADVANCED
from mismatchctl.cli.options import (
    BadDataPolicy,
    ByOption,
    ColumnOption,
    ConfigOption,
    CorrectionOption,
    EngineOptions,
    FigureOptions,
    ForceOption,
    HtmlOption,
    MarkdownOption,
    MicroBatchOption,
    OnBadOption,
    OpenOption,
    PairOptions,
    QuietOption,
    RuleOptions,
    VerboseOption,
    are_logs,
    flatten_options,
    output_option,
    parse_renames,
    replay_framework,
    select_corrections,
)
from mismatchctl.cli.output import (
    check_output_paths,
    page_opener,
    print_json,
    print_markdown,
    print_page,
    print_warnings,
    progress_bar,
    render_page_files,
    resolve_json_output,
    resolve_text_output,
    write_files,
    write_together,
)
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.api.analyze.log_files import RunLog
    from mismatchctl.api.metrics_log import LogAnalysis
    from mismatchctl.data.paths import DumpSource
    from mismatchctl.report.document import Document
    from mismatchctl.report.figures.figure import Figure
    from mismatchctl.results.model import Result


class KlEstimator(str, Enum):  # typer does not support lists of a Literal
    """Estimators of the KL to the reference policy."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    low_var = "low_var"


class LossAggregation(str, Enum):
    """Ways to average losses over tokens, with the names that configurations use."""

    token_mean = "token-mean"
    seq_mean_token_sum = "seq-mean-token-sum"
    seq_mean_token_mean = "seq-mean-token-mean"


Objectives = tuple[Sequence[str], Sequence[str]]
"""KL estimators and loss aggregations to show."""

FrameworkOption = Annotated[
    str,
    typer.Option(
        "--framework",
        help="Replay the metrics that this framework logs, and read --config as its file: NAME or NAME@VERSION.",
    ),
]
RunLogOption = Annotated[
    Path | None,
    typer.Option(help="Compare with the run's log: JSON lines, TensorBoard events or CSV."),
]

LossOption = Annotated[
    list[str] | None,
    typer.Option(
        "--loss",
        rich_help_panel=ADVANCED,
        help="Measure the corrections with this loss: gspo, sapo, dual_clip:dual=3, ...; repeat.",
    ),
]
KlOption = Annotated[
    list[KlEstimator] | None,
    typer.Option("--kl", rich_help_panel=ADVANCED, help="Show the KL to ref_log_probs: k1, k2, k3 or low_var; repeat."),
]
LossAggregationOption = Annotated[
    list[LossAggregation] | None,
    typer.Option(
        "--loss-agg",
        rich_help_panel=ADVANCED,
        help="Aggregate losses and --kl by token-mean, seq-mean-token-sum or seq-mean-token-mean; repeat.",
    ),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(
        "--device", rich_help_panel=ADVANCED, help="Compute on auto, cpu or cuda; auto: on a GPU if it is faster."
    ),
]
JsonOption = Annotated[bool, output_option("--json", help="Print the Result as JSON.")]
OutputOption = Annotated[
    Path | None, output_option("--output", "-o", help="Write the Result as JSON to FILE, or to stdout with -.")
]
SequencesOption = Annotated[Path | None, output_option(help="Write one row per sequence as Parquet.")]
JoinOption = Annotated[
    Path | None, typer.Option(rich_help_panel=ADVANCED, help="Add the columns of this Parquet file to --sequences.")
]
tokens_option = partial(typer.Option, rich_help_panel=ADVANCED)
TokensOption = Annotated[Path | None, output_option(help="Write a page that shows the worst sequences token by token.")]
BrowseOption = Annotated[
    list[str] | None,
    tokens_option(metavar="PATH:ROW", help="Show these sequences in --tokens instead of the worst; repeat."),
]
TokenizerOption = Annotated[
    str | None, tokens_option(help="Decode tokens of --tokens: tokenizer.json, a tiktoken encoding, bytes or ids.")
]

BaselineOption = Annotated[Path | None, typer.Option(help="Compare K3 with this accepted Result.")]
AdviseOption = Annotated[
    bool, typer.Option("--advise", help="Recommend a correction too, which reads the dump two more times.")
]


@flatten_options
def analyze(
    *,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DUMPS...",
            help="Files, folders or globs of any supported format, or a metrics log (W&B, TensorBoard). Each is a run.",
        ),
    ] = None,
    pair: PairOptions,
    correction: CorrectionOption = None,
    config: ConfigOption = None,
    framework: FrameworkOption = "",
    micro_batch_size: MicroBatchOption = None,
    against: RunLogOption = None,
    loss: LossOption = None,
    baseline: BaselineOption = None,
    advise: AdviseOption = False,
    kl: KlOption = None,
    loss_agg: LossAggregationOption = None,
    by: ByOption = None,
    column: ColumnOption = None,
    on_bad: OnBadOption = "error",
    engine: EngineOptions,
    device: DeviceOption = "auto",
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
    output: OutputOption = None,
    html: HtmlOption = None,
    markdown: MarkdownOption = None,
    open_: OpenOption = False,
    sequences: SequencesOption = None,
    join: JoinOption = None,
    figures: FigureOptions,
    tokens: TokensOption = None,
    browse: BrowseOption = None,
    tokenizer: TokenizerOption = None,
    force: ForceOption = False,
    rule: RuleOptions,
) -> None:
    """Measure the mismatch and compare corrections."""
    output, json = resolve_json_output(output, json)
    if tokens is None and (browse or tokenizer):
        raise ConfigError("--browse and --tokenizer need --tokens FILE")
    markdown, printed = resolve_text_output(markdown, json)
    paths, sides = paths or [], pair.sides()
    read = [*paths, *(sides or ()), *(config or []), against, join, baseline]
    check_output_paths(output, html, markdown, sequences, tokens, force=force, inputs=read)
    figures.check(read)
    page = page_opener(html, wanted=open_)
    if sides is None and are_logs(paths):
        given = {
            "--correction": correction, "--config": config, "--framework": framework, "--against": against,
            "--baseline": baseline, "--advise": advise, "--sequences": sequences, "--tokens": tokens, "--by": by,
        }  # fmt: skip
        if needless := [name for name, value in given.items() if value]:
            raise ConfigError(f"{paths[0]}: is a metrics log without tokens; leave out {', '.join(needless)}")
        _analyze_logs(paths, output, html, markdown, printed=printed, json=json, quiet=quiet)
        page()
        return
    chosen = select_corrections(correction, config, rule, framework, quiet=quiet)
    sources = pair.sources(paths, quiet)

    from mismatchctl.api.analyze.analyze import analyze as run
    from mismatchctl.api.defaults import corrections_or_default
    from mismatchctl.frameworks.adapter import ReplayOptions
    from mismatchctl.results.reader import read_result

    log = None if against is None else _read_run_log(against)
    accepted = None if baseline is None else (str(baseline), read_result(baseline))
    where = engine.build()
    with write_together(quiet):
        with progress_bar(quiet) as progress:
            result = run(
                sources,
                corrections_or_default(chosen or None),
                rename=parse_renames(column),
                by=by or [],
                on_bad=on_bad,
                engine=where,
                progress=progress,
                sequences=sequences,
                join=join,
                framework=replay_framework(framework, config or []),
                micro_batch_size=micro_batch_size,
                replay=ReplayOptions(micro_batch_size),
                log=log,
                device=device,
                losses=loss or [],
                baseline=accepted,
            )
        if advise:
            _add_advice(result, sources, parse_renames(column), quiet)
        kinds, aggregations = [each.value for each in kl or ()], [each.value for each in loss_agg or ()]
        if kinds or aggregations:
            _require_objectives(result, kinds, aggregations)
        objectives = kinds, aggregations
        write_files(render_page_files(lambda: _build_page(result, objectives), html))
        write_files(render_page_files(lambda: _build_page(result), None, markdown))
        if output is not None:
            write_files([(output, result.to_json().encode())])
        figures.write(lambda: _result_figures(result), force=force)
        if tokens is not None:
            _write_token_page(tokens, result, sources, browse or [], tokenizer, parse_renames(column), on_bad)
    page()
    if printed:
        print_markdown(_build_page(result))
    elif json:
        _print_result(result, quiet, asked=bool(chosen))
    elif not quiet:
        screen = _build_screen(result, pair.words(paths), objectives, asked=bool(chosen), full=verbose)
        print_page(screen, whole=verbose)


def _build_page(result: Result, objectives: Objectives = ((), ())) -> Document:
    from mismatchctl.report.pages.analyze import document

    return document(result, objectives)


def _build_screen(result: Result, paths: Sequence[str], objectives: Objectives, *, asked: bool, full: bool) -> Document:
    """Return the first screen, or the whole page."""
    from mismatchctl.report.pages.screens import analyze_screen

    page = _build_page(result, objectives) if full or any(objectives) else None
    return analyze_screen(result, paths, asked=asked, page=page)


def _build_log_page(found: LogAnalysis) -> Document:
    from mismatchctl.report.pages.metrics_log import document

    return document(found)


def _analyze_logs(
    paths: Sequence[str], output: Path | None, html: Path | None, markdown: Path | None, *,
    printed: bool, json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Analyze metrics logs without a dump."""
    from mismatchctl.api.metrics_log import analyze_logs

    found = analyze_logs(paths)
    with write_together(quiet):
        write_files(render_page_files(lambda: _build_log_page(found), html, markdown))
        if output is not None:
            write_files([(output, found.to_json().encode())])
    if printed:
        print_markdown(_build_log_page(found))
    elif json:
        print_json(found.to_data())
    elif not quiet:
        print_page(_build_log_page(found))


def _read_run_log(place: Path) -> RunLog:
    from mismatchctl.api.analyze.log_files import read_run_log

    return read_run_log(place)


def _add_advice(result: Result, paths: Sequence[DumpSource], rename: dict[str, str], quiet: bool) -> None:
    """Run advise and add its answers to the summary."""
    from mismatchctl.api.advise.advice import set_advice_answers
    from mismatchctl.api.advise.advise import advise

    with progress_bar(quiet) as progress:
        set_advice_answers(result, advise(paths, rename=rename, progress=progress))


def _result_figures(result: Result) -> dict[str, Figure]:
    from mismatchctl.report.figures.files import figures_of_result

    return figures_of_result(result)


def _require_objectives(result: Result, kinds: Sequence[str], aggregations: Sequence[str]) -> None:
    """Check that the dump has the columns for the objectives.

    Raises:
        ConfigError: a column is missing.
    """
    from mismatchctl.measure.metrics.facets import kl_key

    for run in result.runs.values():
        if kinds and kl_key(kinds[0]) not in run.overall.metrics:
            raise ConfigError("--kl needs the column ref_log_probs, which no file has")
        if aggregations and not any("loss" in values for values in run.overall.corrections.values()) and not kinds:
            raise ConfigError("--loss-agg needs the column current_log_probs (or --kl), which no file has")


def _write_token_page(
    place: Path,
    result: Result,
    paths: Sequence[DumpSource],
    named: list[str],
    tokenizer: str | None,
    rename: dict[str, str],
    on_bad: BadDataPolicy,
) -> None:
    """Write the page of `--tokens`. The dump is read again."""
    from mismatchctl.api.browse import browse, parse_places
    from mismatchctl.report.pages.tokens import render_tokens

    places = parse_places(named, result)
    found = browse(paths, places, result.corrections, rename=rename, vocabulary=tokenizer, on_bad=on_bad)
    write_files([(place, render_tokens(found).encode())])


def _print_result(result: Result, quiet: bool, *, asked: bool) -> None:
    """Print the Result as JSON, and its warnings on stderr."""
    from mismatchctl.api.scan import NO_MICRO_BATCHES
    from mismatchctl.results.summary import data_notes

    print_warnings([note for note in data_notes(result) if asked or NO_MICRO_BATCHES not in note], quiet)
    typer.echo(result.to_json(), nl=False)
