"""`mismatchctl analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.cli.help import ADVANCED
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.api.analyze.log_files import RunLog
    from mismatchctl.data.paths import DumpSource
    from mismatchctl.frameworks.adapter import Framework
    from mismatchctl.report.document import Document
    from mismatchctl.results.model import Result

Objectives = tuple[Sequence[str], Sequence[str]]
"""KL estimators and loss aggregations to show."""
advanced_option = partial(typer.Option, rich_help_panel=ADVANCED)


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


@opt.flatten_options
def analyze(
    *,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DUMPS...",
            help="Files, folders or globs of any supported format, or a metrics log (W&B, TensorBoard). Each is a run.",
        ),
    ] = None,
    pair: opt.PairOptions,
    correction: opt.CorrectionOption = None,
    config: opt.ConfigOption = None,
    framework: Annotated[
        str,
        typer.Option(
            help="Compute the metrics that this framework logs, and read --config as its file: NAME or NAME@VERSION."
        ),
    ] = "",
    micro_batch_size: opt.MicroBatchOption = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Compare the metrics with the run's log: JSON lines, TensorBoard events or CSV."),
    ] = None,
    loss: Annotated[
        list[str] | None,
        advanced_option(
            help="Combine each correction with this policy loss: gspo, sapo, dual_clip:dual=3, ... (repeatable)."
        ),
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="Compare K3 with this accepted Result.")] = None,
    advise: Annotated[
        bool, typer.Option("--advise", help="Also recommend a correction. This reads the dump two more times.")
    ] = False,
    kl: Annotated[
        list[KlEstimator] | None,
        advanced_option(
            help="Estimate the KL to the reference policy (ref_log_probs) by k1, k2, k3 or low_var (repeatable)."
        ),
    ] = None,
    loss_agg: Annotated[
        list[LossAggregation] | None,
        advanced_option(
            help="Average losses and --kl by token-mean, seq-mean-token-sum or seq-mean-token-mean (repeatable)."
        ),
    ] = None,
    by: opt.ByOption = None,
    column: opt.ColumnOption = None,
    on_bad: opt.OnBadOption = "error",
    engine: opt.EngineOptions,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        advanced_option(help="Device that computes: auto, cpu or cuda. auto takes a GPU if it is faster."),
    ] = "auto",
    verbose: opt.VerboseOption = False,
    quiet: opt.QuietOption = False,
    json: Annotated[bool, opt.output_option("--json", help="Print the Result as JSON.")] = False,
    output: Annotated[
        Path | None, opt.output_option("--output", "-o", help="Write the Result as JSON to FILE, or to stdout with -.")
    ] = None,
    html: opt.HtmlOption = None,
    markdown: opt.MarkdownOption = None,
    open_: opt.OpenOption = False,
    sequences: Annotated[Path | None, opt.output_option(help="Write one row per sequence as Parquet.")] = None,
    join: Annotated[
        Path | None,
        advanced_option(help="Add the columns of this Parquet file to the --sequences file."),
    ] = None,
    figures: opt.FigureOptions,
    tokens: Annotated[
        Path | None, opt.output_option(help="Write a page that shows the worst sequences token by token.")
    ] = None,
    browse: Annotated[
        list[str] | None,
        advanced_option(
            metavar="PATH:ROW", help="Show this sequence on the --tokens page instead of the worst ones (repeatable)."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        advanced_option(
            help="Decode the tokens of the --tokens page with a tokenizer.json, a tiktoken encoding, bytes or ids."
        ),
    ] = None,
    force: opt.ForceOption = False,
) -> None:
    """Measure the mismatch and compare corrections."""
    output, json = out.resolve_json_output(output, json)
    if tokens is None and (browse or tokenizer):
        raise ConfigError("--browse and --tokenizer need --tokens FILE")
    markdown, printed = out.resolve_text_output(markdown, json)
    paths, sides = paths or [], pair.sides()
    read = [*paths, *(sides or ()), *(config or []), against, join, baseline]
    out.check_output_paths(output, html, markdown, sequences, tokens, force=force, inputs=read)
    figures.check(read)
    open_page = out.page_opener(html, wanted=open_)
    if sides is None and opt.are_logs(paths):
        given = {
            "--correction": correction, "--config": config, "--framework": framework, "--against": against,
            "--baseline": baseline, "--advise": advise, "--sequences": sequences, "--tokens": tokens, "--by": by,
        }  # fmt: skip
        if needless := [name for name, value in given.items() if value]:
            raise ConfigError(f"{paths[0]}: is a metrics log without tokens; leave out {', '.join(needless)}")
        _analyze_logs(paths, output, html, markdown, printed=printed, json=json, quiet=quiet, verbose=verbose)
        open_page()
        return
    chosen = opt.select_corrections(correction, config, framework, quiet=quiet)
    sources, rename, where = pair.sources(paths, quiet), opt.parse_renames(column), engine.build()

    from mismatchctl.api.analyze.analyze import analyze as run
    from mismatchctl.frameworks.adapter import ReplayOptions
    from mismatchctl.frameworks.registry import default_corrections
    from mismatchctl.results.reader import read_result

    log = None if against is None else _read_log(against)
    accepted = None if baseline is None else (str(baseline), read_result(baseline))
    objectives = [each.value for each in kl or ()], [each.value for each in loss_agg or ()]
    with out.write_together(quiet):
        with out.progress_bar(quiet) as progress:
            result = run(
                sources,
                chosen or default_corrections(),
                rename=rename,
                by=by or [],
                on_bad=on_bad,
                engine=where,
                progress=progress,
                sequences=sequences,
                join=join,
                framework=_replayed_framework(framework, config or []) if framework else None,
                micro_batch_size=micro_batch_size,
                replay=ReplayOptions(micro_batch_size),
                log=log,
                device=device,
                losses=loss or [],
                baseline=accepted,
            )
        if advise:
            from mismatchctl.api.advise.advice import set_advice_answers
            from mismatchctl.api.advise.advise import advise as advise_runs

            with out.progress_bar(quiet) as progress:
                set_advice_answers(result, advise_runs(sources, rename=rename, progress=progress))
        _require_objectives(result, *objectives)
        out.write_files(out.render_page_files(lambda: _build_page(result, objectives), html))
        out.write_files(out.render_page_files(lambda: _build_page(result), None, markdown))
        if output is not None:
            out.write_files([(output, result.to_json().encode())])
        if figures.figures is not None:
            from mismatchctl.report.figures.files import figures_of_result

            figures.write(lambda: figures_of_result(result), force=force)
        if tokens is not None:
            out.write_files([(tokens, _token_page(result, sources, browse or [], tokenizer, rename, on_bad))])
    open_page()
    if printed:
        out.print_markdown(_build_page(result))
    elif json:
        from mismatchctl.api.scan import NO_MICRO_BATCHES
        from mismatchctl.results.summary import data_notes

        out.print_warnings([note for note in data_notes(result) if chosen or NO_MICRO_BATCHES not in note], quiet)
        typer.echo(result.to_json(), nl=False)
    elif not quiet:
        from mismatchctl.report.pages.analyze import analyze_screen

        page = _build_page(result, objectives) if verbose or any(objectives) else None
        out.print_page(analyze_screen(result, pair.words(paths), asked=bool(chosen), page=page), whole=verbose)


def _read_log(place: Path) -> RunLog:
    from mismatchctl.api.analyze.log_files import read_run_log

    return read_run_log(place)


def _build_page(result: Result, objectives: Objectives = ((), ())) -> Document:
    from mismatchctl.report.pages.analyze import document

    return document(result, objectives)


def _replayed_framework(name: str, configs: Sequence[str]) -> Framework:
    """Return the framework at the version of the configurations, if they agree."""
    from mismatchctl.frameworks.config_files import read_native_configs
    from mismatchctl.frameworks.registry import load_framework

    found = [written.framework for path in configs for written in read_native_configs(path, name)]
    return found[0] if len({source.title for source in found}) == 1 else load_framework(name)


def _analyze_logs(
    paths: Sequence[str], output: Path | None, html: Path | None, markdown: Path | None, *,
    printed: bool, json: bool, quiet: bool, verbose: bool,
) -> None:  # fmt: skip
    """Analyze metrics logs without a dump."""
    from mismatchctl.api.metrics_log import analyze_logs
    from mismatchctl.report.pages.metrics_log import document

    found = analyze_logs(paths)
    with out.write_together(quiet):
        out.write_files(out.render_page_files(lambda: document(found), html, markdown))
        if output is not None:
            out.write_files([(output, found.to_json().encode())])
    if printed:
        out.print_markdown(document(found))
    elif json:
        out.print_json(found.to_data())
    elif not quiet:
        out.print_page(document(found, whole=verbose), whole=verbose)


def _require_objectives(result: Result, kinds: Sequence[str], aggregations: Sequence[str]) -> None:
    """Check that the dump has the columns for `--kl` and `--loss-agg`."""
    from mismatchctl.measure.metrics.facets import kl_key

    for run in result.runs.values():
        if kinds and kl_key(kinds[0]) not in run.overall.metrics:
            raise ConfigError("--kl needs the column ref_log_probs, which no file has")
        if aggregations and not any("loss" in values for values in run.overall.corrections.values()) and not kinds:
            raise ConfigError("--loss-agg needs the column current_log_probs (or --kl), which no file has")


def _token_page(
    result: Result, paths: Sequence[DumpSource], named: list[str], tokenizer: str | None, rename: dict[str, str],
    on_bad: opt.BadDataPolicy,
) -> bytes:  # fmt: skip
    """Return the page of `--tokens`. The dump is read again."""
    from mismatchctl.api.browse import browse, parse_places
    from mismatchctl.report.pages.tokens import render_tokens

    places = parse_places(named, result)
    found = browse(paths, places, result.corrections, rename=rename, vocabulary=tokenizer, on_bad=on_bad)
    return render_tokens(found).encode()
