"""No file gets more phrases that are hard to read than it was recorded with."""

from __future__ import annotations

import json

from tests.docs.english import PHRASES, RECORD, shares


def test_no_file_exceeds_its_recorded_share() -> None:
    """A new file has at most 6%. After an improvement, record it with `python -m tests.docs.english`."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    worse = {name: share for name, share in shares().items() if share > max(recorded.get(name, 0), 6)}
    assert not worse


def test_hard_phrases_are_found() -> None:
    assert PHRASES.search("What an opened file holds.")
    assert not PHRASES.search("Read the contents of an open file.")
