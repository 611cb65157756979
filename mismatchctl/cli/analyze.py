"""`mismatchctl analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mismatchctl.cli import flags
from mismatchctl.cli.corrections import RuleFlags, chosen_corrections, replaying
from mismatchctl.cli.figures import FigureFlags
from mismatchctl.cli.flags import flat, output_option
from mismatchctl.cli.output import (
    open_page,
    outputs,
    page_files,
    page_of,
    print_markdown,
    progress_bar,
    say,
    show,
    warn,
    write,
)
from mismatchctl.cli.places import check_places, or_printed, or_stdout
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.analyze.against import RunLog
    from mismatchctl.render.figures.figure import Figure
    from mismatchctl.result import Result


class Kl(str, Enum):  # typer takes no list of a Literal
    """Estimators of the KL to the reference policy."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    low_var = "low_var"


class LossAgg(str, Enum):
    """How losses of tokens become one number, as configurations name it."""

    token_mean = "token-mean"
    seq_mean_token_sum = "seq-mean-token-sum"
    seq_mean_token_mean = "seq-mean-token-mean"


Objectives = tuple[Sequence[str], Sequence[str]]
"""Estimators of the KL, and aggregations of losses, that are asked for."""

FrameworkName = Annotated[
    str,
    typer.Option(
        "--framework",
        help="Replay what it logs, a step in memory at a time; read --config as its: NAME or NAME@VERSION.",
    ),
]
ReplayDtype = Annotated[
    Literal["float64", "float32"], typer.Option(help="What that framework computed in; ties fall as they fell there.")
]
ReplayReducer = Annotated[
    Literal["sample_mean", "token_mean"] | None,
    typer.Option("--reducer", help="How the framework sums up a step, where it has a choice."),
]
Against = Annotated[
    Path | None,
    typer.Option(help="What the run logged: JSON lines, TensorBoard events, CSV; with lags."),
]

Losses = Annotated[
    list[str] | None,
    typer.Option("--loss", help="Measure corrections with this loss: gspo, sapo, dual_clip:dual=3, ...; repeat."),
]
KlKinds = Annotated[
    list[Kl] | None, typer.Option("--kl", help="Show the KL to ref_log_probs, biased and unbiased; repeat.")
]
LossAggs = Annotated[
    list[LossAgg] | None,
    typer.Option("--loss-agg", help="Show each correction's loss, and --kl, under this aggregation; repeat."),
]
OnDevice = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option("--device", help="Where the arithmetic is done; auto: on a GPU where there is one and it pays."),
]
ToJson = Annotated[bool, output_option("--json", help="Print the Result on stdout, and nothing else.")]
Output = Annotated[Path | None, output_option("--output", "-o", help="Write the Result (JSON); - is stdout.")]
Sequences = Annotated[Path | None, output_option(help="Write one row per sequence (Parquet).")]
Join = Annotated[Path | None, output_option(help="Bring the columns of this Parquet file along there.")]
tokens_option = partial(typer.Option, rich_help_panel="Token by token")
Tokens = Annotated[Path | None, tokens_option(help="Write a page of sequences, token by token.")]
Browse = Annotated[
    list[str] | None, tokens_option(metavar="PATH:ROW", help="These sequences there, not the worst; repeat.")
]
Tokenizer = Annotated[str | None, tokens_option(help="tokenizer.json, a tiktoken encoding, bytes or ids.")]
Verbose = Annotated[bool, output_option("--verbose", "-v", help="Each file and correction, on stderr.")]

Baseline = Annotated[Path | None, typer.Option(help="A Result that was accepted: the answer says how K3 stands to it.")]
Advise = Annotated[
    bool, typer.Option("--advise", help="Ask for a correction with its price, too: reads the dump twice more.")
]


@flat
def analyze(
    *,
    paths: flags.Paths,
    correction: flags.Corrections = None,
    config: flags.Configs = None,
    framework: FrameworkName = "",
    micro_batch_size: flags.MicroBatch = None,
    replay_dtype: ReplayDtype = "float64",
    reducer: ReplayReducer = None,
    against: Against = None,
    loss: Losses = None,
    baseline: Baseline = None,
    advise: Advise = False,
    kl: KlKinds = None,
    loss_agg: LossAggs = None,
    by: flags.By = None,
    column: flags.Columns = None,
    on_bad: flags.OnBadRows = "error",
    engine: flags.EngineFlags,
    device: OnDevice = "auto",
    quiet: flags.Quiet = False,
    verbose: Verbose = False,
    json: ToJson = False,
    output: Output = None,
    html: flags.Html = None,
    markdown: flags.Markdown = None,
    open_: flags.Open = False,
    sequences: Sequences = None,
    join: Join = None,
    figures: FigureFlags,
    tokens: Tokens = None,
    browse: Browse = None,
    tokenizer: Tokenizer = None,
    force: flags.Force = False,
    rule: RuleFlags,
) -> None:
    """Measure the mismatch of dumps and what corrections would do, in one pass."""
    output, json = or_stdout(output, json)
    if not framework and (reducer or replay_dtype != "float64"):
        raise ConfigError("--replay-dtype and --reducer say how --framework is replayed: name one")
    if tokens is None and (browse or tokenizer):
        raise ConfigError("--browse and --tokenizer say what --tokens shows: name its page")
    markdown, printed = or_printed(markdown, json)
    read = [*paths, *(config or []), against, join, baseline]
    check_places(output, html, markdown, sequences, tokens, force=force, inputs=read)
    figures.check(read)
    page = open_page(html, wanted=open_)
    chosen = chosen_corrections(correction, config, rule, framework, quiet=quiet)

    from mismatchctl.analyze import ReplayOptions
    from mismatchctl.analyze import analyze as run
    from mismatchctl.api.defaults import corrections_or_default
    from mismatchctl.result import read_result

    log = None if against is None else _read_log(against)
    accepted = None if baseline is None else (str(baseline), read_result(baseline))
    where = engine.chosen()
    with outputs(quiet):
        with progress_bar(quiet) as progress:
            result = run(
                paths,
                corrections_or_default(chosen or None),
                rename=flags.renamed(column),
                by=by or [],
                on_bad=on_bad,
                engine=where,
                progress=progress,
                sequences=sequences,
                join=join,
                framework=replaying(framework, config or []),
                micro_batch_size=micro_batch_size,
                replay=ReplayOptions(micro_batch_size, replay_dtype, reducer),
                log=log,
                device=device,
                losses=loss or [],
                baseline=accepted,
            )
        if advise:
            _advise(result, paths, flags.renamed(column), quiet)
        if verbose:
            _explain(result)
        kinds, aggregations = [each.value for each in kl or ()], [each.value for each in loss_agg or ()]
        if kinds or aggregations:
            _require_objectives(result, kinds, aggregations)
        objectives = kinds, aggregations
        write(page_files(lambda: page_of("analyze", result, objectives), html))
        write(page_files(lambda: page_of("analyze", result), None, markdown))
        if output is not None:
            write([(output, result.to_json().encode())])
        figures.write(lambda: _figures(result), force=force)
        if tokens is not None:
            _write_tokens(tokens, result, paths, browse or [], tokenizer, flags.renamed(column), on_bad)
    page()
    if printed:
        print_markdown(page_of("analyze", result))
    elif json:
        _print(result, quiet, asked=bool(chosen))
    elif not quiet:
        show(page_of("analyze", result, objectives))


def _read_log(place: Path) -> RunLog:
    from mismatchctl.analyze.against import read_log

    return read_log(place)


def _explain(result: Result) -> None:
    for file in result.provenance.inputs:
        say(f"read {file.path}: run {file.run}, {file.rows:,} rows, {file.tokens:,} tokens")
    for correction in result.corrections:
        say(f"correction {correction.name}: {correction.to_mapping()}")


def _advise(result: Result, paths: Sequence[str], rename: dict[str, str], quiet: bool) -> None:
    """Ask which correction holds, and let that be the answer to what to do."""
    from mismatchctl.advise import advise
    from mismatchctl.advise.words import answer_with

    with progress_bar(quiet) as progress:
        answer_with(result, advise(paths, rename=rename, progress=progress))


def _figures(result: Result) -> dict[str, Figure]:
    from mismatchctl.render.figures.export import figures_of_result

    return figures_of_result(result)


def _require_objectives(result: Result, kinds: Sequence[str], aggregations: Sequence[str]) -> None:
    """Refuse what the dump has no columns for.

    Raises:
        ConfigError: so it is.
    """
    from mismatchctl.measure.metrics.facets import kl_key

    for run in result.runs.values():
        if kinds and kl_key(kinds[0]) not in run.overall.metrics:
            raise ConfigError("--kl needs the column ref_log_probs, which no file has")
        if aggregations and not any("loss" in values for values in run.overall.corrections.values()) and not kinds:
            raise ConfigError("--loss-agg needs the column current_log_probs (or --kl), which no file has")


def _write_tokens(
    place: Path,
    result: Result,
    paths: list[str],
    named: list[str],
    tokenizer: str | None,
    rename: dict[str, str],
    on_bad: flags.OnBad,
) -> None:
    """The page of tokens: the dump is read again where it holds the sequences, and swept once."""
    from mismatchctl.browse import browse, places_of
    from mismatchctl.render.token_page import render_tokens

    places = places_of(named, result)
    found = browse(paths, places, result.corrections, rename=rename, vocabulary=tokenizer, on_bad=on_bad)
    write([(place, render_tokens(found).encode())])


def _print(result: Result, quiet: bool, *, asked: bool) -> None:
    """The Result itself, which is enough of corrections that nobody asked for; what else is to be known, on stderr."""
    from mismatchctl.analyze.micro_batches import UNNAMED
    from mismatchctl.result.notes import data_notes

    warn([note for note in data_notes(result) if asked or UNNAMED not in note], quiet)
    typer.echo(result.to_json(), nl=False)
