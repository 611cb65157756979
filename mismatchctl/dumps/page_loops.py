"""Compiled loops over the bytes of a Parquet page, whose values and levels `pages` takes."""

from __future__ import annotations

from typing import Any

from numba import int64, uint32

from mismatchctl.measure.kernels.compiling import compiled


@compiled
def zeros(body: Any, at: int, stop: int, count: int, out: Any) -> int:
    """Write the places of zeros among `count` levels of one bit, in runs and groups of eight: how many.

    -1 where the levels are unsound or `out` has no room for all. `stop` is within the body.
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
            for group in range(length):
                gone = ~int64(body[at + group]) & 255
                place = 8 * group
                while gone and place < covered:
                    if gone & 1:
                        if found == len(out):
                            return -1
                        out[found] = done + place
                        found += 1
                    gone, place = gone >> 1, place + 1
            at += length
        else:
            if not 0 < length <= left or at >= stop or body[at] > 1:
                return -1
            if body[at] == 0:
                if length > len(out) - found:
                    return -1
                for place in range(length):
                    out[found + place] = done + place
                found += length
            at += 1
        done += covered
    return found if at == stop else -1


@compiled
def _end_of_levels(body: Any, at: int) -> int:
    """Where levels end that begin with their length; -1 where that is not within the body."""
    if at < 0 or at + 4 > len(body):
        return -1
    end = at + 4
    for place in range(4):
        end += int64(body[at + place]) << (8 * place)
    return end if end <= len(body) else -1


@compiled
def lists(body: Any, count: int, state: Any, offsets: Any, empty: Any) -> int:
    """Write the first value of each list that begins in a page of `count` levels: where the page's own values begin.

    -1 where the levels are unsound, or there is no room for the lists in `offsets`, or for the empty ones in `empty`.
    `state` holds how many lists and values there are before the page, and whether a list may go on in it: not an empty
    one. It becomes that of the next page.
    """
    middle = _end_of_levels(body, 0)
    end = _end_of_levels(body, middle)
    if end < 0:
        return -1
    firsts = offsets[state[0] :]
    made, without = zeros(body, 4, middle, count, firsts), zeros(body, middle + 4, end, count, empty)
    if made < 0 or without < 0 or not (state[2] or (made > 0 and firsts[0] == 0)):
        return -1
    passed = 0
    for i in range(made):
        first = firsts[i]
        firsts[i] = state[1] + first - passed
        if passed < without and empty[passed] == first:  # one level, which begins it, and what follows begins another
            if (firsts[i + 1] if i + 1 < made else count) != first + 1:
                return -1
            passed += 1
    if passed < without:
        return -1
    state[0] += made
    state[1] += count - without
    state[2] = without == 0 or empty[without - 1] < count - 1
    return end


@compiled
def unsplit(body: Any, start: int, count: int, out: Any) -> None:
    """Put values of four bytes together, of which the first, second, ... bytes lie end to end."""
    a, b = body[start : start + count], body[start + count : start + 2 * count]
    c, d = body[start + 2 * count : start + 3 * count], body[start + 3 * count : start + 4 * count]
    for i in range(count):
        out[i] = uint32(a[i]) | uint32(b[i]) << uint32(8) | uint32(c[i]) << uint32(16) | uint32(d[i]) << uint32(24)
