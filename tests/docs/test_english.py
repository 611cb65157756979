"""No file exceeds its recorded share of lines with phrases that are hard to read."""

import json

from tests.docs.english import PHRASES, RECORD, shares


def test_no_file_exceeds_its_recorded_share() -> None:
    """A new file has at most 6%. `python -m tests.docs.english` records a lower share."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    worse = {name: share for name, share in shares().items() if share > max(recorded.get(name, 0), 6)}
    assert not worse


def test_hard_phrases_are_found() -> None:
    assert PHRASES.search("What an opened file holds.")
    assert not PHRASES.search("Read the contents of an open file.")
