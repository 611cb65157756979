"""`mismatchctl convert`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mismatchctl.cli.options import PairOptions
from mismatchctl.cli.output import check_output_paths, print_json, print_message, progress_bar
from mismatchctl.errors import ConfigError


def convert(
    source: str,
    out: Path | None = None,
    *,
    pair: PairOptions,
    framework: str = "",
    join: Path | None = None,
    force: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Convert files of a framework or an engine to one Parquet file.

    Other commands can also read SOURCE directly, but a converted file is faster to read. No code in SOURCE is executed.

    docs/reference/framework-files.md lists the formats.
    """
    from mismatchctl.data.conversion import convert_dump as run
    from mismatchctl.data.conversion import convert_pair

    sides = pair.sides()
    if sides is not None:
        if out is not None:
            raise ConfigError("with --rollout and --train, the only argument is the file to write")
        if framework or join is not None:
            raise ConfigError("--from and --join do not work with --rollout and --train")
        out = Path(source)
        _check_output(out, force, list(sides))
        done = convert_pair(*sides, out, pair.keys)
    elif out is None:
        raise ConfigError(
            "missing OUT: write the name of the output file, as in mismatchctl convert SOURCE dump.parquet"
        )
    else:
        _check_output(out, force, [source, join])
        with progress_bar(quiet, unit="bytes") as progress:
            done = run(source, out, framework, join=join, progress=progress)
    if json:
        print_json({"out": str(out), **asdict(done)})
        return
    print_message(f"wrote {out}: {done.rows:,} sequences, {done.tokens:,} valid tokens", quiet)
    for note in done.notes:
        print_message(note, quiet)
    print_message(f"Next: mismatchctl analyze {out}", quiet)


def _check_output(out: Path, force: bool, inputs: Sequence[str | Path | None]) -> None:
    check_output_paths(out, force=force, inputs=inputs)
    if out.suffix.lower() not in ("", ".parquet", ".pq"):
        raise ConfigError(f"{out}: convert writes Parquet; use the suffix .parquet")
