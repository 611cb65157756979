"""Compiled loops over the bytes of a Parquet page, whose values and levels `pages` takes."""

from __future__ import annotations

from typing import Any

from numba import int64, uint32

from mismatchctl.measure.kernels.compiling import compiled


@compiled
def zeros(body: Any, at: int, stop: int, count: int, out: Any) -> int:
    """Write the places of zeros among `count` levels of one bit, in runs and groups of eight: how many, -1 if unsound.

    `stop` is within the body, and there is room for `count` places.
    """
    done = found = 0
    while done < count:
        header: Any = int64(0)
        shift, more = 0, True
        while more:
            if at >= stop or shift > 28:
                return -1
            byte = int64(body[at])
            header |= (byte & 127) << shift
            at, shift, more = at + 1, shift + 7, byte > 127
        length, left = header >> 1, count - done
        covered = length
        if header & 1:
            if not 0 < length <= stop - at or 8 * length - left > 7:
                return -1
            covered = min(8 * length, left)
            for place in range(covered):
                if not (body[at + (place >> 3)] >> (place & 7)) & 1:
                    out[found] = done + place
                    found += 1
            at += length
        else:
            if not 0 < length <= left or at >= stop or body[at] > 1:
                return -1
            if body[at] == 0:
                for place in range(length):
                    out[found + place] = done + place
                found += length
            at += 1
        done += covered
    return found if at == stop else -1


@compiled
def unsplit(body: Any, start: int, count: int, out: Any) -> None:
    """Put values of four bytes together, of which the first, second, ... bytes lie end to end."""
    a, b = body[start : start + count], body[start + count : start + 2 * count]
    c, d = body[start + 2 * count : start + 3 * count], body[start + 3 * count : start + 4 * count]
    for i in range(count):
        out[i] = uint32(a[i]) | uint32(b[i]) << uint32(8) | uint32(c[i]) << uint32(16) | uint32(d[i]) << uint32(24)
