"""Sequences token by token: both sides, what a correction does to each token, and what moving its bound would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mismatchctl.browse.read import OnBad, SequenceRow, rows_of
from mismatchctl.browse.thresholds import Threshold, thresholds_of
from mismatchctl.correction import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.result import Result
from mismatchctl.vocabulary import Vocabulary, vocabulary_of

__all__ = ["Browsed", "SequenceRow", "Threshold", "Vocabulary", "browse", "places_of", "vocabulary_of"]

MOST_SEQUENCES = 20
"""Sequences that are shown where nobody names any: the worst."""
Place = tuple[str, int]
"""(path as named, row)."""


@dataclass(frozen=True)
class Browsed:
    """What a page of tokens shows.

    Attributes:
        rows: the sequences.
        thresholds: bounds of the corrections that can move, with what every value of them does.
        vocabulary: what token ids read as.
    """

    rows: tuple[SequenceRow, ...]
    thresholds: tuple[Threshold, ...]
    vocabulary: Vocabulary


def places_of(texts: Sequence[str], result: Result) -> list[Place]:
    """The sequences that `PATH:ROW` names; without any, the worst of a Result, by the sum of their log ratios.

    Raises:
        ConfigError: a text is no such place.
    """
    if not texts:
        worst = [
            (one.file, one.row, abs(one.log_ratio_sum)) for run in result.runs.values() for one in run.worst_sequences
        ]
        ordered = sorted(worst, key=lambda one: -one[2])[:MOST_SEQUENCES]
        return [(file, row) for file, row, _ in ordered]
    found = []
    for text in texts:
        path, colon, row = text.rpartition(":")
        if not (colon and path and row.isdecimal()):
            raise ConfigError(f"--browse {text}: write PATH:ROW, rows counted from 0, as in dump/step_3.parquet:17")
        found.append((path, int(row)))
    return found


def browse(
    paths: Sequence[str],
    places: Sequence[Place],
    corrections: Sequence[Correction],
    *,
    rename: Mapping[str, str] | None = None,
    vocabulary: str | Path | None = None,
    on_bad: OnBad = "error",
) -> Browsed:
    """Read some sequences of a dump with all that is known of their tokens.

    Args:
        paths: the dump, as of `analyze`.
        places: file (as its path ends) and row of each sequence.
        corrections: whose bounds can move; the dump is swept once for what they do to all of it.
        rename: canonical column -> name in the files.
        vocabulary: a tokenizer.json, the name of an encoding of tiktoken, `bytes` or `ids`; None: as the ids look.
        on_bad: as of `analyze`.

    Raises:
        DataError: the dump cannot be read, or has no such row.
        ConfigError: there is no such vocabulary.
    """
    rows = rows_of(paths, places, rename or {}, on_bad)
    found = vocabulary_of(vocabulary, [row.ids for row in rows])
    moved = thresholds_of(paths, corrections, rows, rename or {}, on_bad)
    named = [replace(row, texts=found.texts(row.ids)) for row in rows]
    return Browsed(tuple(named), tuple(moved), found)
