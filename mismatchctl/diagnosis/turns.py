"""Turns of multi-turn responses."""

from __future__ import annotations

import numpy as np

from mismatchctl.core.batch import Bools, Ints
from mismatchctl.diagnosis.case import Case, cached_on_case

_FEWEST, _BESIDE, _MOST = 10, 2, 0.6


@cached_on_case
def turns(case: Case) -> Ints | None:
    """The turn of each sound token within its row, from 0 [N]; None if hardly any row has two.

    Turns are those of the column `turn`, or else parted by masked tokens.
    """
    recorded = case.rows.tokens.get("turn")
    new = np.zeros(len(case.index), np.bool_)
    inside = case.where[1:] == case.where[:-1]
    if recorded is not None and recorded.ndim == 1:
        new[1:] = (np.diff(recorded[case.index].astype(np.float64)) != 0) & inside
    else:
        masked = np.append(0, np.cumsum(~case.rows.mask))
        new[1:] = (np.diff(masked[case.index]) > 0) & inside  # explained tokens are no boundary
    if new.sum() < _FEWEST:
        return None
    running = np.cumsum(new)
    turn: Ints = running - running[np.minimum(case.each(case.starts), len(running) - 1)]
    return turn


def break_at_turns(case: Case, found: Bools, split: Ints) -> bool:
    """Whether most of the rows found [S] change at the start of a turn, by the places where they change [S]."""
    turn = turns(case)
    if turn is None or not found.any():
        return False
    begins = np.append(False, (np.diff(turn) > 0) & (case.where[1:] == case.where[:-1]))
    near = np.zeros(len(begins), np.bool_)
    for by in range(-_BESIDE, _BESIDE + 1):
        near |= np.roll(begins, by)
    at = np.minimum(case.starts + split, len(begins) - 1)[found]
    return bool(near[at].mean() > max(_MOST, 4 * near.mean()))
