"""Sequences written as lines of JSON, for whoever can score them: the engine, or the trainer itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mismatchctl.files import replaced_when_done
from mismatchctl.score.choose import Choice, chosen
from mismatchctl.score.sequences import MASK, PROMPT, RESPONSE, open_sequences, pieces

NAMES = ("run", "step", "sequence_id", PROMPT, RESPONSE, MASK)
"""What a line holds, of what the dump has, beside its file and row."""


def write_replay(place: str, out: Path, *, choice: Choice | None = None) -> int:
    """Write the sequences of a dump, one line each, in order; how many there are.

    Args:
        place: a dump, one row per sequence, with `prompt_token_ids` and `token_ids`.
        out: the file.
        choice: which sequences; None: all.

    Raises:
        DataError: the dump cannot be read, or has no ids.
    """
    files, written = open_sequences(place), 0
    with replaced_when_done(out) as temporary, temporary.open("w", encoding="utf-8") as lines:
        for file, rows in zip(files, chosen(files, choice), strict=True):
            for piece in pieces(file):
                names = [name for name in NAMES if name in piece.batch.schema.names]
                for row in np.flatnonzero(rows[piece.first : piece.first + len(piece)]).tolist():
                    line = {"file": file.path, "row": piece.first + row}
                    line |= {name: piece.batch[name][row].as_py() for name in names}
                    lines.write(json.dumps(line, ensure_ascii=False, allow_nan=False, default=str) + "\n")
                    written += 1
    return written
