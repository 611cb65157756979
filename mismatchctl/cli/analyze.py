"""`mismatchctl analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatchctl.cli.output import check_places, console, progress_bar, wrote
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.correction import Correction


class OnBad(str, Enum):
    """What to do with bad rows and files."""

    error = "error"
    skip = "skip"


class Level(str, Enum):
    """Level of a weight or of a rejection."""

    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class Bound(str, Enum):
    """What a bound does to a weight outside it."""

    truncate = "truncate"
    clip = "clip"
    zero = "zero"


class Normalize(str, Enum):
    """Mean that weights are divided by."""

    none = "none"
    token = "token"
    sequence = "sequence"


_RULE = "One more correction, from flags"
_OUT = "Outputs"


def analyze(
    paths: Annotated[list[str], typer.Argument(help="Dumps: files, folders, globs. Each is a run.")],
    correction: Annotated[
        list[str] | None,
        typer.Option("--correction", "-c", help="A preset, a YAML or TOML file, or a YAML mapping; repeat to compare."),
    ] = None,
    by: Annotated[list[str] | None, typer.Option("--by", help="Break metrics down by this column; repeat.")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", help="CANONICAL=NAME: what the files call a column of the contract; repeat."),
    ] = None,
    on_bad: Annotated[
        OnBad, typer.Option(help="Bad rows and files: stop, or leave them out and count them.")
    ] = OnBad.error,
    threads: Annotated[int | None, typer.Option(min=1, help="Units read at once; default: all processors.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the Result on stdout, and nothing else.", rich_help_panel=_OUT)
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the Result (JSON); - is stdout.", rich_help_panel=_OUT),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report.", rich_help_panel=_OUT)] = None,
    sequences: Annotated[
        Path | None,
        typer.Option(help="Write one row per sequence (Parquet).", rich_help_panel=_OUT),
    ] = None,
    join: Annotated[
        Path | None,
        typer.Option(help="Bring the columns of this Parquet file along there.", rich_help_panel=_OUT),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite reports and sequences.", rich_help_panel=_OUT)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Errors only on stderr; no summary.", rich_help_panel=_OUT)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Each file and correction, on stderr.", rich_help_panel=_OUT)
    ] = False,
    is_level: Annotated[
        Level | None, typer.Option(help="Importance weights at this level.", rich_help_panel=_RULE)
    ] = None,
    is_threshold: Annotated[float | None, typer.Option(help="Upper bound of weights.", rich_help_panel=_RULE)] = None,
    is_lower: Annotated[float | None, typer.Option(help="Lower bound of weights.", rich_help_panel=_RULE)] = None,
    is_mode: Annotated[
        Bound | None,
        typer.Option(help="Weights outside: truncate above, clip, or zero.", rich_help_panel=_RULE),
    ] = None,
    normalize: Annotated[
        Normalize, typer.Option(help="Divide weights by their mean.", rich_help_panel=_RULE)
    ] = Normalize.none,
    rs_level: Annotated[
        Level | None, typer.Option(help="Reject by the ratio at this level.", rich_help_panel=_RULE)
    ] = None,
    rs_lower: Annotated[float | None, typer.Option(help="Smallest ratio kept.", rich_help_panel=_RULE)] = None,
    rs_upper: Annotated[float | None, typer.Option(help="Largest ratio kept.", rich_help_panel=_RULE)] = None,
    veto: Annotated[
        float | None,
        typer.Option(help="Reject a sequence with any token ratio below this.", rich_help_panel=_RULE),
    ] = None,
) -> None:
    """Measure the mismatch of dumps and what corrections would do, in one pass."""
    if json and output is not None and str(output) == "-":
        raise ConfigError("--json and -o - both write to stdout: give one of them")
    if sequences is not None and str(sequences) == "-":
        raise ConfigError("--sequences writes Parquet: name a file")
    check_places(html, sequences, force=force)
    check_places(output, force=True)
    flags = _from_flags(is_level, is_threshold, is_lower, is_mode, normalize, rs_level, rs_lower, rs_upper, veto)
    chosen = _corrections(correction or [], flags)

    from mismatchctl.analyze import analyze as run

    with progress_bar(quiet or json) as progress:
        result = run(
            paths,
            chosen,
            rename=_renamed(column or []),
            by=by or [],
            on_bad=on_bad.value,
            threads=threads,
            progress=progress,
            sequences=sequences,
            join=join,
        )
    if verbose:
        for file in result.provenance.inputs:
            typer.echo(f"read {file.path}: run {file.run}, {file.rows:,} rows, {file.tokens:,} tokens", err=True)
        for item in chosen:
            typer.echo(f"correction {item.name}: {item.to_mapping()}", err=True)
    text = result.to_json() if json or output is not None else ""
    if html is not None:
        from mismatchctl.files import write_atomically
        from mismatchctl.render.report import render_report

        page = render_report(result).encode()
        write_atomically(html, page)
        wrote(html, quiet)
    if sequences is not None:
        wrote(sequences, quiet)
    if output is not None and str(output) != "-":
        result.write(output)
        wrote(output, quiet)
    if json or str(output) == "-":
        typer.echo(text, nl=False)
    elif not quiet:
        from mismatchctl.render.terminal import render_summary

        render_summary(result, console())


def _corrections(named: Sequence[str], flags: Correction | None) -> list[Correction]:
    """The corrections to compare: those named, the one from flags, or the default ones."""
    from mismatchctl.frameworks import DEFAULT_CORRECTIONS, preset

    chosen = [found for text in named for found in _named(text)]
    if flags is not None:
        chosen.append(flags)
    return chosen or [preset(name) for name in DEFAULT_CORRECTIONS]


def _named(text: str) -> list[Correction]:
    """What `--correction` names: a YAML mapping, a file, or a preset."""
    from mismatchctl.correction import correction_from_mapping, corrections_from_file
    from mismatchctl.correction.load import CORRECTION_SUFFIXES
    from mismatchctl.frameworks import preset

    if text.lstrip().startswith("{"):
        import yaml

        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--correction {text}: not a YAML mapping: {' '.join(str(error).split())}") from None
        return [correction_from_mapping({"name": "inline"} | data, f"--correction {text}")]
    if Path(text).suffix in CORRECTION_SUFFIXES:
        return corrections_from_file(text)
    return [preset(text)]


def _from_flags(
    is_level: Level | None,
    is_threshold: float | None,
    is_lower: float | None,
    is_mode: Bound | None,
    normalize: Normalize,
    rs_level: Level | None,
    rs_lower: float | None,
    rs_upper: float | None,
    veto: float | None,
) -> Correction | None:
    """The correction called `flags`, if any of its flags was given."""
    data: dict[str, Any] = {}
    gates: list[dict[str, Any]] = []
    if is_level is not None:
        bound = is_mode or (Bound.truncate if is_lower is None else Bound.clip)
        interval = is_threshold if bound is Bound.truncate else [is_lower, is_threshold]
        data["weight"] = {"level": is_level.value, "normalize": normalize.value}
        if is_threshold is not None or is_lower is not None:
            data["weight"][bound.value] = interval
        if bound is Bound.truncate and is_lower is not None:
            raise ConfigError("--is-mode truncate has no lower bound: leave --is-lower out, or clip")
    elif any(given is not None for given in (is_threshold, is_lower, is_mode)) or normalize is not Normalize.none:
        raise ConfigError("--is-threshold, --is-lower, --is-mode and --normalize need --is-level")
    if rs_level is not None:
        gates.append({"statistic": "ratio", "level": rs_level.value, "keep": [rs_lower, rs_upper]})
    elif rs_lower is not None or rs_upper is not None:
        raise ConfigError("--rs-lower and --rs-upper need --rs-level")
    if veto is not None:
        gates.append({"statistic": "ratio", "level": "min", "keep": [veto, None], "clamp": "none"})
    if not data and not gates:
        return None
    from mismatchctl.correction import correction_from_mapping

    return correction_from_mapping({"name": "flags", **data, "gates": gates}, "flags")


def _renamed(columns: Sequence[str]) -> dict[str, str]:
    """`--column canonical=actual` as a mapping."""
    renamed = {}
    for text in columns:
        canonical, equals, actual = text.partition("=")
        if not (canonical and equals and actual):
            raise ConfigError(f"--column {text}: write CANONICAL=NAME, as in train_log_probs=old_log_probs")
        renamed[canonical] = actual
    return renamed
