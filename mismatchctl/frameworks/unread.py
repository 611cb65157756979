"""Keys of a configuration that nothing reads: they are never passed over in silence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

_OF_CORRECTIONS = re.compile(
    r"rollout_(is|rs|corr|correction|token_veto)(_.*)?|(tis|rs|mis)_.*|use_(tis|rs|mis|mask|rollout_correction)"
    r"|bypass_(mode|old_logprob_for_rollout)"
)


@dataclass(frozen=True)
class Unread:
    """A key that nothing reads.

    Attributes:
        place: the keys that lead to it, and itself.
        hint: what reads it, or what was meant, as a clause to append to a sentence; empty where nobody can tell.
        refused: it would have corrected something: whoever wrote it expects that it does. The rest is only told.
    """

    place: tuple[str, ...]
    hint: str
    refused: bool

    @property
    def key(self) -> str:
        """Its last key."""
        return self.place[-1]


def is_of_corrections(key: str) -> bool:
    """Whether a name can only be meant for a correction, in whatever framework."""
    return _OF_CORRECTIONS.fullmatch(key) is not None


def nearest(key: str, known: Iterable[str]) -> str:
    """The known key that was probably misspelt, as a clause; empty if none is near."""
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.8)
    return f" (did you mean {close[0]!r}?)" if close else ""
