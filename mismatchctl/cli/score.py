"""`mismatchctl score`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mismatchctl.cli.options import ForceOption, JsonOption, QuietOption
from mismatchctl.cli.output import check_output_paths, print_json, print_message, progress_bar, require_local_path
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.api.checkpoint import Checkpoint
    from mismatchctl.api.score import ScoreSummary


PrecisionName = Literal["float32", "float64"]


def score(
    named: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] DUMPS", help="A folder with a checkpoint, then the dump to score.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder to write: the dump with reference_log_probs.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Write the sequences as JSON lines instead, to be scored elsewhere; no MODEL.")
    ] = None,
    dtype: Annotated[PrecisionName, typer.Option(help="Of weights and products.")] = "float32",
    temperature: Annotated[float, typer.Option(help="Logits are divided by it, as the rollout's were.")] = 1.0,
    version: Annotated[
        int | None, typer.Option("--model-version", help="Weight version of MODEL, kept as reference_version.")
    ] = None,
    worst: Annotated[
        int | None, typer.Option(min=1, help="Only so many sequences: those whose log ratios sum up to the most.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Only so many sequences: a sample by the hash of their ids.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one.")] = "auto",
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Score the tokens of a dump once more in high precision: a third column, which says which side is wrong.

    One sequence at a time, so that its numbers do not depend on others. What an interrupted run has written is kept:
    give the same command again. MODEL is read from the disk as save_pretrained wrote it; needs the extra `score`.
    """
    from mismatchctl.api.score import ScoreSettings, SequenceChoice, hash_checkpoint, write_replay
    from mismatchctl.api.score import score as run

    if worst is not None and sample is not None:
        raise ConfigError("--worst and --sample both choose sequences: give one of them")
    count = worst or sample
    choice = None if count is None else SequenceChoice(count, worst=worst is not None)
    if replay is not None:
        if out is not None or len(named) != 1:
            raise ConfigError("--replay writes the sequences of one dump and scores none: name DUMPS alone, and no -o")
        check_output_paths(replay, force=force, inputs=named)
        written = write_replay(named[0], replay, choice=choice)
        done, summary = {"sequences": written}, f"{written:,} sequences"
    else:
        if out is None or len(named) != 2:
            raise ConfigError("score takes a checkpoint, one dump and a folder: mismatchctl score MODEL DUMPS -o OUT")
        if not 0 < temperature < float("inf"):
            raise ConfigError(f"--temperature {temperature}: must be above 0 and finite")
        settings = ScoreSettings(hash_checkpoint(Path(named[0])), dtype, temperature, version)
        with progress_bar(quiet, unit="sequences") as progress:
            scored = run(
                named[1], require_local_path(out), settings, _checkpoint_loader(Path(named[0]), dtype, device),
                choice=choice, force=force, progress=progress,
            )  # fmt: skip
        done, summary = asdict(scored), _describe_scored(scored)
    if json:
        print_json({"out": str(replay or out), **done})
    else:
        print_message(f"wrote {replay or out}: {summary}", quiet)


def _checkpoint_loader(model: Path, dtype: PrecisionName, device: str) -> Callable[[], Checkpoint]:
    def load() -> Checkpoint:
        from mismatchctl.api.checkpoint import Checkpoint

        return Checkpoint(model, dtype, device)

    return load


def _describe_scored(scored: ScoreSummary) -> str:
    kept = f", {scored.kept:,} of them by an earlier run" if scored.kept else ""
    rest = f"; {scored.left_out:,} without, which were not chosen" if scored.left_out else ""
    return f"{scored.sequences:,} sequences of {scored.tokens:,} tokens have a reference{kept}{rest}"
