"""`mismatchctl analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatchctl.cli.corrections import Bound, Level, Normalize, RuleFlags, chosen_corrections, replaying
from mismatchctl.cli.figures import FigureFolder, FigureFormat, Picture, check_folder, write_figures
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
    Html,
    Markdown,
    MemoryLimit,
    MicroBatch,
    OnBad,
    OnBadRows,
    Open,
    Paths,
    Quiet,
    Threads,
    chosen_engine,
    renamed,
)
from mismatchctl.cli.output import check_places, console, open_page, or_stdout, outputs, progress_bar, say, write
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.result import Result


class Dtype(str, Enum):
    """What a framework computed in."""

    float64 = "float64"
    float32 = "float32"


class Device(str, Enum):
    """What does the arithmetic over tokens."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Reducer(str, Enum):
    """How a framework sums up a step, where it has a choice."""

    sample_mean = "sample_mean"
    token_mean = "token_mean"


class Kl(str, Enum):
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
_RULE = "One more correction, from flags"

FrameworkName = Annotated[
    str,
    typer.Option(
        "--framework",
        help="Replay what it logs, a step in memory at a time; read --config as its: NAME or NAME@VERSION.",
    ),
]
ReplayDtype = Annotated[Dtype, typer.Option(help="What that framework computed in; ties fall as they fell there.")]
ReplayReducer = Annotated[
    Reducer | None, typer.Option("--reducer", help="How the framework sums up a step, where it has a choice.")
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
    Device,
    typer.Option("--device", help="Where the arithmetic is done; auto: on a GPU where there is one and it pays."),
]
ToJson = Annotated[
    bool, typer.Option("--json", help="Print the Result on stdout, and nothing else.", rich_help_panel=OUTPUTS)
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the Result (JSON); - is stdout.", rich_help_panel=OUTPUTS)
]
Sequences = Annotated[Path | None, typer.Option(help="Write one row per sequence (Parquet).", rich_help_panel=OUTPUTS)]
Join = Annotated[
    Path | None, typer.Option(help="Bring the columns of this Parquet file along there.", rich_help_panel=OUTPUTS)
]
_TOKENS = "Token by token"
Tokens = Annotated[
    Path | None, typer.Option(help="Write a page of sequences, token by token.", rich_help_panel=_TOKENS)
]
Browse = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH:ROW", help="These sequences there, not the worst; repeat.", rich_help_panel=_TOKENS),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="tokenizer.json, a tiktoken encoding, bytes or ids.", rich_help_panel=_TOKENS),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Each file and correction, on stderr.", rich_help_panel=OUTPUTS)
]

Baseline = Annotated[Path | None, typer.Option(help="A Result that was accepted: the answer says how K3 stands to it.")]
Advise = Annotated[
    bool, typer.Option("--advise", help="Ask for a correction with its price, too: reads the dump twice more.")
]

IsLevel = Annotated[Level | None, typer.Option(help="Importance weights at this level.", rich_help_panel=_RULE)]
IsThreshold = Annotated[float | None, typer.Option(help="Upper bound of weights.", rich_help_panel=_RULE)]
IsLower = Annotated[float | None, typer.Option(help="Lower bound of weights.", rich_help_panel=_RULE)]
IsMode = Annotated[
    Bound | None, typer.Option(help="Weights outside: truncate above, clip, or zero.", rich_help_panel=_RULE)
]
Normalized = Annotated[Normalize, typer.Option(help="Divide weights by their mean.", rich_help_panel=_RULE)]
RsLevel = Annotated[Level | None, typer.Option(help="Reject by the ratio at this level.", rich_help_panel=_RULE)]
RsLower = Annotated[float | None, typer.Option(help="Smallest ratio kept.", rich_help_panel=_RULE)]
RsUpper = Annotated[float | None, typer.Option(help="Largest ratio kept.", rich_help_panel=_RULE)]
Veto = Annotated[
    float | None, typer.Option(help="Reject a sequence with any token ratio below this.", rich_help_panel=_RULE)
]


def analyze(
    paths: Paths,
    correction: Corrections = None,
    config: Configs = None,
    framework: FrameworkName = "",
    micro_batch_size: MicroBatch = None,
    replay_dtype: ReplayDtype = Dtype.float64,
    reducer: ReplayReducer = None,
    against: Against = None,
    loss: Losses = None,
    baseline: Baseline = None,
    advise: Advise = False,
    kl: KlKinds = None,
    loss_agg: LossAggs = None,
    by: By = None,
    column: Columns = None,
    on_bad: OnBadRows = OnBad.error,
    threads: Threads = None,
    device: OnDevice = Device.auto,
    memory_limit: MemoryLimit = None,
    engine: EngineChoice = EngineName.local,
    address: Address = None,
    cache: Cache = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: ToJson = False,
    output: Output = None,
    html: Html = None,
    markdown: Markdown = None,
    open_: Open = False,
    sequences: Sequences = None,
    join: Join = None,
    figures: FigureFolder = None,
    figure_format: FigureFormat = Picture.svg,
    tokens: Tokens = None,
    browse: Browse = None,
    tokenizer: Tokenizer = None,
    force: Force = False,
    is_level: IsLevel = None,
    is_threshold: IsThreshold = None,
    is_lower: IsLower = None,
    is_mode: IsMode = None,
    normalize: Normalized = Normalize.none,
    rs_level: RsLevel = None,
    rs_lower: RsLower = None,
    rs_upper: RsUpper = None,
    veto: Veto = None,
) -> None:
    """Measure the mismatch of dumps and what corrections would do, in one pass."""
    output, json = or_stdout(output, json)
    if not framework and (reducer or replay_dtype is not Dtype.float64):
        raise ConfigError("--replay-dtype and --reducer say how --framework is replayed: name one")
    if tokens is None and (browse or tokenizer):
        raise ConfigError("--browse and --tokenizer say what --tokens shows: name its page")
    text = None if str(markdown) == "-" else markdown
    if json and markdown is not None and text is None:
        raise ConfigError("--json and --markdown - both write to stdout: give one of them")
    read = [*paths, *(config or []), against, join, baseline]
    check_places(output, html, text, sequences, tokens, force=force, inputs=read)
    check_folder(figures, read)
    page = open_page(html, wanted=open_)
    rule = RuleFlags(is_level, is_threshold, is_lower, is_mode, normalize, rs_level, rs_lower, rs_upper, veto)
    chosen = chosen_corrections(correction or [], rule, config or [], framework, quiet=quiet)

    from mismatchctl.analyze import ReplayOptions
    from mismatchctl.analyze import analyze as run
    from mismatchctl.analyze.against import read_log
    from mismatchctl.result import read_result

    log = None if against is None else read_log(against)
    accepted = None if baseline is None else (str(baseline), read_result(baseline))
    where = chosen_engine(threads, memory_limit, engine, address, cache)
    with outputs(quiet):
        with progress_bar(quiet) as progress:
            result = run(
                paths,
                chosen,
                rename=renamed(column),
                by=by or [],
                on_bad=on_bad.value,
                engine=where,
                progress=progress,
                sequences=sequences,
                join=join,
                framework=replaying(framework, config or []),
                micro_batch_size=micro_batch_size,
                replay=ReplayOptions(micro_batch_size, replay_dtype.value, None if reducer is None else reducer.value),
                log=log,
                device=device.value,
                losses=loss or [],
                baseline=accepted,
            )
        if advise:
            _advise(result, paths, renamed(column), quiet)
        if verbose:
            _explain(result)
        kinds, aggregations = [each.value for each in kl or ()], [each.value for each in loss_agg or ()]
        if kinds or aggregations:
            _require_objectives(result, kinds, aggregations)
        _write(result, output, html, text, (kinds, aggregations))
        if figures is not None:
            from mismatchctl.render.figures.export import figures_of_result

            write_figures(figures_of_result(result), figures, figure_format, force=force)
        if tokens is not None:
            _write_tokens(tokens, result, paths, browse or [], tokenizer, renamed(column), on_bad)
    page()
    asked = bool(correction or config or rule != RuleFlags())
    if markdown is not None and text is None:
        typer.echo(_markdown(result), nl=False)
        return
    _show(result, quiet, (kinds, aggregations), as_json=json, asked=asked)


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


def _markdown(result: Result) -> str:
    from mismatchctl.render.pages.analyze import document
    from mismatchctl.render.to.markdown import markdown

    return markdown(document(result))


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


def _write(
    result: Result, output: Path | None, html: Path | None, markdown: Path | None, objectives: Objectives
) -> None:
    files: list[tuple[Path, bytes]] = []
    if html is not None:
        from mismatchctl.render.pages.analyze import document
        from mismatchctl.render.to import html as page

        files.append((html, page.html(document(result, objectives)).encode()))
    if markdown is not None:
        files.append((markdown, _markdown(result).encode()))
    if output is not None:
        files.append((output, result.to_json().encode()))
    write(files)


def _write_tokens(
    place: Path,
    result: Result,
    paths: list[str],
    named: list[str],
    tokenizer: str | None,
    rename: dict[str, str],
    on_bad: OnBad,
) -> None:
    """The page of tokens: the dump is read again where it holds the sequences, and swept once."""
    from mismatchctl.browse import browse, places_of
    from mismatchctl.render.token_page import render_tokens

    places = places_of(named, result)
    found = browse(paths, places, result.corrections, rename=rename, vocabulary=tokenizer, on_bad=on_bad.value)
    write([(place, render_tokens(found).encode())])


def _show(result: Result, quiet: bool, objectives: Objectives, *, as_json: bool, asked: bool) -> None:
    if as_json:
        from mismatchctl.analyze.micro_batches import UNNAMED
        from mismatchctl.result.notes import data_notes

        # Of corrections that nobody asked for the Result itself is enough.
        _warn([note for note in data_notes(result) if asked or UNNAMED not in note], quiet)
        typer.echo(result.to_json(), nl=False)
    elif not quiet:
        from mismatchctl.render.pages.analyze import document
        from mismatchctl.render.to.terminal import show

        show(document(result, objectives), console())


def _warn(sentences: Sequence[str], quiet: bool) -> None:
    for sentence in sentences:
        say(f"warning: {sentence}", quiet)
