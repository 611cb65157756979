"""`mismatchctl convert` and `score`: commands that write dumps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mismatchctl.cli.options import PairOptions
from mismatchctl.cli.output import check_output_paths, print_json, print_message, progress_bar, require_local_path
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.api.checkpoint import Checkpoint


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

    Other commands can also read SOURCE directly, but reading the Parquet file is faster. Code in pickle files is not
    executed.

    docs/reference/framework-files.md lists the formats.
    """
    from mismatchctl.data.conversion import convert_dump as run
    from mismatchctl.data.conversion import convert_pair

    sides = pair.sides()
    if sides is not None:
        if out is not None:
            raise ConfigError("with --rollout and --train, pass only one argument: the file to write")
        if framework or join is not None:
            raise ConfigError("--from and --join do not work with --rollout and --train")
        out = Path(source)
        _check_output(out, force, list(sides))
        done = convert_pair(*sides, out, pair.keys)
    elif out is None:
        raise ConfigError("missing OUT: add the file to write, as in mismatchctl convert SOURCE dump.parquet")
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
        raise ConfigError(f"{out}: convert writes Parquet; choose a file name that ends in .parquet")


def score(
    named: list[str],
    output: Path | None = None,
    replay: Path | None = None,
    dtype: Literal["float32", "float64"] = "float32",
    temperature: float = 1.0,
    version: int | None = None,
    worst: int | None = None,
    sample: int | None = None,
    device: str = "auto",
    force: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Recompute log-probs in high precision, as a reference.

    `mismatchctl diagnose` then finds out whether the rollout's or the trainer's log-probs are wrong. score runs MODEL
    on the tokens of DUMP, one sequence at a time, and adds the column reference_log_probs. To continue after an
    interruption, run the same command again. First install the model libraries: pip install 'mismatchctl[score]'.
    """
    from mismatchctl.api.score import ScoreSettings, SequenceChoice, hash_checkpoint, write_replay
    from mismatchctl.api.score import score as run

    if worst is not None and sample is not None:
        raise ConfigError("use --worst or --sample, not both")
    count = worst or sample
    choice = None if count is None else SequenceChoice(count, worst=worst is not None)
    if replay is not None:
        if output is not None or len(named) != 1:
            raise ConfigError("--replay needs one dump; leave out MODEL and -o")
        check_output_paths(replay, force=force, inputs=named)
        written = write_replay(named[0], replay, choice=choice)
        done, summary = {"sequences": written}, f"{written:,} sequences"
    else:
        if output is None or len(named) != 2:
            raise ConfigError("score takes a checkpoint, one dump and a folder: mismatchctl score MODEL DUMP -o OUT")
        if not 0 < temperature < float("inf"):
            raise ConfigError(f"--temperature {temperature}: must be above 0 and finite")
        model = Path(named[0])
        settings = ScoreSettings(hash_checkpoint(model), dtype, temperature, version)

        def load() -> Checkpoint:
            from mismatchctl.api.checkpoint import Checkpoint

            return Checkpoint(model, dtype, device)

        place = require_local_path(output)
        with progress_bar(quiet, unit="sequences") as progress:
            scored = run(named[1], place, settings, load, choice=choice, force=force, progress=progress)
        kept = f", {scored.kept:,} of them from an earlier run" if scored.kept else ""
        rest = f"; {scored.left_out:,} sequences were not selected" if scored.left_out else ""
        summary = f"{scored.sequences:,} sequences with {scored.tokens:,} tokens have reference log-probs{kept}{rest}"
        done = asdict(scored)
    if json:
        print_json({"out": str(replay or output), **done})
        return
    print_message(f"wrote {replay or output}: {summary}", quiet)
    if replay is None:
        print_message(f"Next: mismatchctl diagnose {output}", quiet)
