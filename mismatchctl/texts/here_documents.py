"""Here-documents of a shell script: what it writes into files is no command of it."""

from __future__ import annotations

import re
from bisect import bisect_right

_BEGINS = re.compile(r"(?<!<)<<-?\s*([\"']?)([A-Za-z_]\w*)\1")
_COMMENT = re.compile(r"(?:^|\s)#.*")
_COMMAND = re.compile(r"[;|&(]|\b(?:then|do|else)\b")
"""What stands before a command on its line."""
_KEEPS = re.compile(r"cat|tee|python[\d.]*")
"""Commands for which a here-document is content, or another language."""
_LAUNCHED = re.compile(r"\$\(\s*cat\b|\.(?:sh|bash|sbatch|slurm)\b|\|.*\b(?:(?:ba|z|s)?sh|sbatch)\b")
"""On the first line: its content becomes arguments, a script, or what a shell is given."""


def without_files(text: str) -> str:
    """A script without the here-documents that are content of files; their lines are left empty.

    One that a shell, a remote one or a batch system is given, that becomes arguments or a script, is read as commands.
    """
    lines = text.split("\n")
    places: dict[str, list[int]] = {}
    for place, line in enumerate(lines):
        for form in {line, line.lstrip("\t")}:
            places.setdefault(form, []).append(place)
    place = 0
    while place < len(lines):
        first = lines[place]
        for begin in _BEGINS.finditer(_COMMENT.sub("", first)):
            ends = places.get(begin[2], [])
            found = bisect_right(ends, place)
            if found == len(ends):  # a shift of bits, say
                continue
            command = _COMMAND.split(first[: begin.start()])[-1].split()
            if any(map(_KEEPS.fullmatch, command)) and not _is_launched(first, lines[place + 1]):
                lines[place + 1 : ends[found] + 1] = [""] * (ends[found] - place)
            place = ends[found]
        place += 1
    return "\n".join(lines)


def _is_launched(first: str, content: str) -> bool:
    return bool(_LAUNCHED.search(first)) or bool(re.match(r"#!.*sh\b", content))
