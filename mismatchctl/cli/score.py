"""`mismatchctl score`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mismatchctl.cli import output as out
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.api.checkpoint import Checkpoint


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
    """Score a dump in high precision, to find which side is wrong.

    Adds the column reference_log_probs. Sequences are scored one by one. After an interruption, the same command
    continues. MODEL is a folder written by save_pretrained. Needs the extra `score`.
    """
    from mismatchctl.api.score import ScoreSettings, SequenceChoice, hash_checkpoint, write_replay
    from mismatchctl.api.score import score as run

    if worst is not None and sample is not None:
        raise ConfigError("use either --worst or --sample")
    count = worst or sample
    choice = None if count is None else SequenceChoice(count, worst=worst is not None)
    if replay is not None:
        if output is not None or len(named) != 1:
            raise ConfigError("--replay takes one dump, without MODEL and -o")
        out.check_output_paths(replay, force=force, inputs=named)
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

        place = out.require_local_path(output)
        with out.progress_bar(quiet, unit="sequences") as progress:
            scored = run(named[1], place, settings, load, choice=choice, force=force, progress=progress)
        kept = f", {scored.kept:,} of them from an earlier run" if scored.kept else ""
        rest = f"; {scored.left_out:,} sequences were not selected" if scored.left_out else ""
        summary = f"{scored.sequences:,} sequences with {scored.tokens:,} tokens have reference log-probs{kept}{rest}"
        done = asdict(scored)
    if json:
        out.print_json({"out": str(replay or output), **done})
        return
    out.print_message(f"wrote {replay or output}: {summary}", quiet)
    if replay is None:
        out.print_message(f"Next: mismatchctl diagnose {output}", quiet)
