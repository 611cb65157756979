"""`--memory-limit`: how many units may be in flight at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from mismatchctl.dumps import Dump, Unit
from mismatchctl.dumps.wide import BATCH_TOKENS
from mismatchctl.errors import ConfigError

PROCESS_BYTES = 450_000_000
"""What the process takes beside the units in flight: the interpreter, its libraries, the sums of open groups."""
BYTES_PER_TOKEN = 90
"""What a token of a unit in flight takes on its way from the file to its sums, measured at its peak."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(|k|m|g|t)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size as 2GB, 1.5g or 800 MB (powers of 1000).

    Raises:
        ConfigError: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--memory-limit {text}: write a size such as 2GB or 800MB")
    return int(float(found[1]) * 1000 ** ["", "k", "m", "g", "t"].index(found[2].lower()))


def unit_bytes(unit: Unit) -> int:
    """What a unit takes while it is read, about: a large one is decoded in pieces."""
    return min(unit.tokens, BATCH_TOKENS * 3 // 2) * BYTES_PER_TOKEN


def fitting(units: Iterable[Unit], memory: int) -> Iterator[Unit]:
    """The units; small files that cannot be read together within `memory` bytes are read one by one."""
    for unit in units:
        if unit.along and PROCESS_BYTES + unit_bytes(unit) > memory:
            yield from unit.along
        else:
            yield unit


def fewer_threads(threads: int, memory: int, dump: Dump) -> int:
    """At most `threads`, as many as keep the process within `memory` bytes, about.

    Raises:
        ConfigError: one is too many.
    """
    largest = max(fitting(dump.readings, memory), key=unit_bytes, default=None)
    if largest is None:  # nothing to read
        return threads
    each = unit_bytes(largest)
    possible = (memory - PROCESS_BYTES) // max(each, 1)
    if possible < 1:
        group = f"row group {largest.row_group} of {largest.file.path}, {largest.tokens:,} tokens"
        least = -(-(PROCESS_BYTES + each) // 1_000_000)
        raise ConfigError(
            f"--memory-limit {-(-memory // 1_000_000):,}MB is too little for {group}; allow {least:,}MB, or "
            "write smaller row groups"
        )
    return min(threads, possible)
