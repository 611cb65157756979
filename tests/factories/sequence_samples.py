"""Collect samples of sequences for predictions, as `sweep` does."""

from collections.abc import Sequence

from mismatchctl.api.predict import SequenceSample, collect_batch, empty_sample
from mismatchctl.api.scan import find_trims
from mismatchctl.corrections.model import Correction
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import open_dump
from mismatchctl.frameworks.registry import column_aliases

COLUMNS = ("current_log_probs", "advantages", "prompt_id", "sequence_id", "step", "run")


def read_sample(paths: Sequence[str], corrections: Sequence[Correction]) -> SequenceSample:
    wanted = sorted({*COLUMNS, *(column for correction in corrections for column in correction.needed_columns)})
    dump = open_dump(paths, rename={}, aliases=column_aliases(), by=(), wanted=tuple(wanted), on_bad="error")
    trims = find_trims(dump, corrections)
    sample = empty_sample(len(corrections))
    for unit in dump.units:
        for batch in dump.read(unit, Problems()):
            sample = sample + collect_batch(trims.add_to(batch, unit.file.run), unit.file.run, corrections)
    return sample
