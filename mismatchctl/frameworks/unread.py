"""Keys of a configuration that nothing reads: they are never passed over in silence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from mismatchctl.errors import suggestion

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


nearest = partial(suggestion, cutoff=0.8)
"""The known key that was certainly misspelt: many others of a configuration are somebody else's."""
