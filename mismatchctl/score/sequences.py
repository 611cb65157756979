"""The sequences of a dump with all of their columns, in pieces, in the order of its files and rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatchctl.batch import Bools, Float64s, Ints, Segments
from mismatchctl.contract import REFERENCE
from mismatchctl.dumps import DumpFile
from mismatchctl.dumps.arrays import Lists, numbers
from mismatchctl.dumps.convert.rewrite import open_parquet, parquet_batches
from mismatchctl.errors import DataError

PROMPT, RESPONSE, MASK = "prompt_token_ids", "token_ids", "response_mask"
TOP_IDS, REFERENCE_TOP = "rollout_top_ids", "reference_top_log_probs"
ROWS = 128
"""Sequences of a piece: what an interrupted run loses at most."""
_REMEDIES = {
    PROMPT: "record the prompt's tokens, or take them from another file with `mismatchctl convert --join`",
    RESPONSE: "record the sampled tokens, or take them from another file with `mismatchctl convert --join`",
    REFERENCE: "score it anew with --force",
}


@dataclass(frozen=True)
class Piece:
    """Some sequences of one file.

    Attributes:
        file: the file.
        number: which piece of it.
        first: its first row there.
        batch: their columns, those of the contract under their own names.
    """

    file: DumpFile
    number: int
    first: int
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.batch)

    def tokens(self, row: int, vocabulary: int) -> tuple[Ints, Ints]:
        """The prompt and the response of a sequence.

        Raises:
            DataError: an id that a vocabulary of this size lacks, no prompt, or as many ids as there are no log-probs.
        """
        prompt, response = self._ids(PROMPT, row, vocabulary), self._ids(RESPONSE, row, vocabulary)
        if not len(prompt):
            raise self.bad(PROMPT, row, "is empty, so nothing says how likely the first token was", _BEGIN)
        expected = int(self.log_ratios[0].lengths[row])
        if len(response) != expected:
            raise self.bad(RESPONSE, row, f"has {len(response)} ids for {expected} log-probs", "correct the dump")
        return prompt, response

    def top_ids(self, row: int, vocabulary: int) -> Ints | None:
        """The ids of the rollout's most likely tokens at each place of a sequence [T, k]; None where it has none.

        Raises:
            DataError: an id that a vocabulary of this size lacks, or lists of several lengths.
        """
        if TOP_IDS not in self.batch.schema.names or not self.batch[TOP_IDS][row].is_valid:
            return None
        lists, count = self.batch[TOP_IDS][row].values, int(self.log_ratios[0].lengths[row])
        lengths = pc.list_value_length(lists).unique()
        if len(lists) != count or len(lengths) > 1 or lists.null_count:
            raise self.bad(TOP_IDS, row, "is not one list for each token, all of one length", "correct the dump")
        ids = self._known(TOP_IDS, row, lists.flatten(), vocabulary)
        return ids.reshape(count, -1) if count else ids.reshape(0, 0)

    def _ids(self, column: str, row: int, vocabulary: int) -> Ints:
        lists = self._lists[column]
        if lists.null is not None and lists.null[row]:
            raise self.bad(column, row, "is null", "correct the dump")
        return self._known(column, row, lists.values.slice(int(lists.starts[row]), int(lists.lengths[row])), vocabulary)

    def _known(self, column: str, row: int, values: pa.Array, vocabulary: int) -> Ints:
        ids: Ints = numbers(values).astype(np.int64, copy=False)
        strange = ids[(ids < 0) | (ids >= vocabulary)]
        if len(strange):
            problem = f"has the id {strange[0]}, and the model knows {vocabulary:,}"
            raise self.bad(column, row, problem, "name the checkpoint that sampled these tokens")
        return ids

    def bad(self, column: str, row: int, problem: str, remedy: str) -> DataError:
        """The error about a value of a sequence."""
        return DataError(problem, file=self.file.path, row=self.first + row, column=column, remedy=remedy)

    @cached_property
    def _lists(self) -> dict[str, Lists]:
        return {name: Lists.of(self.batch[name]) for name in (PROMPT, RESPONSE)}

    @cached_property
    def log_ratios(self) -> tuple[Segments, Float64s, Bools]:
        """Train minus rollout of all tokens [T], the sequences that they are of, and which of them are valid [T]."""
        train, rollout = (self.batch[name] for name in ("train_log_probs", "rollout_log_probs"))
        segments = Segments.of(Lists.of(rollout).lengths)
        x = numbers(train.flatten()).astype(np.float64) - numbers(rollout.flatten()).astype(np.float64)
        masked = MASK in self.batch.schema.names
        mask = self.batch[MASK].flatten().cast(pa.int8()).to_numpy() == 1 if masked else np.ones(len(x), np.bool_)
        return segments, x, mask


_BEGIN = "record the token that begins every text as the prompt's"


def open_sequences(place: str, *, but: Sequence[str] = ()) -> Sequence[DumpFile]:
    """The files of a dump whose tokens can be scored.

    Raises:
        DataError: it cannot be read, has one row per token or no ids of them, or has one of the columns `but`.
    """
    files = open_parquet(place).files
    for file in files:
        if file.layout == "long":
            raise DataError("has one row per token, and scoring is by sequence", file=file.path)
        for column in (PROMPT, RESPONSE):
            if column not in file.columns:
                raise DataError("there is no such column", file=file.path, column=column, remedy=_REMEDIES[column])
        for column in but:
            if column in file.columns:
                raise DataError("is there already", file=file.path, column=column, remedy=_REMEDIES[column])
    return files


def pieces(file: DumpFile) -> Iterator[Piece]:
    """The sequences of a file."""
    first = 0
    for number, batch in enumerate(parquet_batches(file, ROWS)):
        yield Piece(file, number, first, batch)
        first += len(batch)
