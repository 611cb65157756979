"""Run the long form of the fuzz cases, the kills and the faults, and write docs/methods/reliability.md.

`python -m tests.reliability.reliability --cases 20000 --kills 1000 --write docs/methods/reliability.md` runs all.
Results are kept as lines of JSON in a folder (`--log`), and the next run continues from there. Sections of an existing
document for which the log has no results stay as they are, so that one harness can be run again by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow

from tests.paths import ROOT

LIMITS = """
- pyarrow decodes Parquet and Arrow in this process. A forged file could crash the process. The known case is a
  footer that contradicts its schema. mismatchctl therefore parses a footer before pyarrow reads it, and a
  separate process parses footers above 1 MB first. Fuzzing the other bytes of Parquet and Arrow did not find
  another crash. Read untrusted dumps in a process that may crash.
- All tests run on Python 3.11. With the other versions above, a part of the tests was run. Older versions of
  torch were not tried.
- Framework files above 64 MB are mapped. If such a file is truncated while it is read, the process ends.
- pyarrow 26 cannot read lists of flags that it wrote in version 2 pages of a few bytes: such a file is
  refused.
- SIGKILL between the renames of several outputs can leave some of them new and some of them old, each whole.
"""


def logged(folder: Path, name: str) -> list[dict[str, Any]]:
    """What one of the harnesses has found so far."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def extend(folder: Path, name: str, script: str, *words: str) -> None:
    """Run a harness and keep what it finds."""
    with open(folder / f"{name}.jsonl", "a") as file:
        subprocess.run(
            [sys.executable, "-W", "default::RuntimeWarning", "-m", f"tests.reliability.{script}", *words],
            stdout=file,
            check=True,
            cwd=ROOT,
        )


def brief(words: str) -> str:
    """The end of what is wrong, in one line."""
    return " ".join(words.split())[-200:]


def most(found: list[dict[str, Any]], name: str) -> Any:
    """The largest of a number that each has."""
    return max((one[name] for one in found), default=0)


def cases(found: list[dict[str, Any]], earlier: int) -> list[str]:
    """The section of the cases."""
    kinds = Counter(case["kind"] for case in found)
    failures = [
        f"- seed {case['seed']}, {case['kind']}, `{' '.join(case['argv'])[:60]}`: {brief(case['wrong'])}"
        for case in found
        if case["wrong"]
    ]
    return [
        "Each case is generated from a seed (`tests/reliability/fuzzing.py`). A hundred cases run in one process. A",
        "case that fails there is run again in a separate process. For valid dumps (sound), the K3 is checked too. A",
        "warning of a library on stderr counts as a failure. Seeds that failed were run again after a fix.",
        f"{earlier:,} other cases ran on earlier code." if earlier else "",
        "",
        "| input | cases |",
        "|---|---|",
        *(f"| {kind} | {count:,} |" for kind, count in sorted(kinds.items())),
        f"| **all** | **{len(found):,}** |",
        "",
        f"Failures: {len(failures):,}. The slowest case took {most(found, 'seconds'):.1f} s of CPU time, the largest "
        f"{most(found, 'memory') >> 20:,} MB.",
        *(["", *failures] if failures else []),
    ]


def readers(found: list[dict[str, Any]]) -> list[str]:
    """The section of the cases that have the formats of dumps, engines and logs."""
    by_kind = {kind: [one for one in found if one["kind"] == kind] for kind in sorted({one["kind"] for one in found})}
    return [
        "In each case, one value or a few bytes are changed in a dump, in one of two paired files (the responses of an",
        "engine and the trainer's log-probs), or in a log of metrics. Then the commands that read the file are run",
        "(`tests/reliability/fuzzing_formats.py`).",
        "",
        "| reader | cases | exit code 0 or 3 | exit code 2 or 4 | failures |",
        "|---|---|---|---|---|",
        *(
            f"| {kind} | {len(ones):,} | {sum(one['code'] in (0, 3) for one in ones):,} "
            f"| {sum(one['code'] in (2, 4) for one in ones):,} | {sum(bool(one['wrong']) for one in ones):,} |"
            for kind, ones in by_kind.items()
        ),
        "",
        f"The slowest case took {most(found, 'seconds'):.1f} s of CPU time.",
    ]


def natives(found: list[dict[str, Any]]) -> list[str]:
    """The section of bytes that pyarrow decodes."""
    if not found:
        return ["Not tried."]
    return [
        "In each case, a few bytes are changed in a file that C code decodes. The file is decoded in the same process,",
        "as in mismatchctl (`tests/reliability/natives.py`). The formats are Parquet and Arrow with every encoding",
        "that a writer can choose (pages without checksums), torch files, pickles, YAML, TOML, JSON and TensorBoard",
        "events.",
        "",
        "| bytes | files | decoded | refused | crashes and tracebacks |",
        "|---|---|---|---|---|",
        *(
            f"| {one['part']} | {one['files']:,} | {one['ended'].get('decoded', 0):,} "
            f"| {one['ended'].get('refused', 0):,} | {brief(' '.join(one['wrong'])) or 0} |"
            for one in found
        ),
    ]


def guided(found: list[dict[str, Any]]) -> list[str]:
    """The section of the doors that were fuzzed by coverage."""
    if not found:
        return ["Not tried: `make guided`."]
    return [
        "The functions that parse foreign bytes, fuzzed by atheris, which keeps inputs that reach new edges of our",
        "code (`tests/reliability/guided.py`, `make guided`; the other tests do not need atheris).",
        "",
        "| parser | executions | edges | outcome |",
        "|---|---|---|---|",
        *(
            f"| {one['door']} | {one['executions']:,} | {one['edges']:,} | {brief(one['wrong']) or 'no crash'} |"
            for one in found
        ),
    ]


_WAY_KINDS = {
    "repeated": r"cop(y|ies)|links to|saved twice but",
    "missing": "^missing|empty|fully masked",
    "masked": r"^(mask|zero|cut|equal) tokens|a mask hides",
    "skipped": "^skipped",
    "other names of files": "^bad rows in ",
    "too good": "^too good|saved twice",
    "other values": "^values",
    "another model or other tokens": "another|vocabulary|other tokens?|fixed tokens",
    "rules and histories": "rule|history",
    "dilution and worse rows": "",
}
"""Kinds of ways to open the gate by their names, the first that fits."""


def open_gates(found: list[dict[str, Any]]) -> list[str]:
    """The section of ways to make the gate pass with bad data."""
    kinds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _WAY_KINDS}
    for one in found:
        kinds[next(kind for kind, words in _WAY_KINDS.items() if re.search(words, one["way"]))].append(one)
    ways, seeds = len({one["way"] for one in found}), len({one["seed"] for one in found})
    return [
        f"{ways} ways to make the gate pass with a dump that is worse than its baseline or cannot be judged, each with",
        f"{seeds} seeds (`tests/reliability/fail_open.py`). Every second seed has a heavy tail.",
        "",
        "| kind | tries | failed (3) | undecided (4) | refused (2) | passed (0) | tracebacks |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {kind} | {len(own):,} | "
            + " | ".join(f"{sum(one['code'] == code for one in own):,}" for code in (3, 4, 2, 0))
            + f" | {sum(bool(one['error']) for one in own):,} |"
            for kind, own in [*kinds.items(), ("**all**", found)]
        ),
    ]


def edited(found: list[dict[str, Any]]) -> list[str]:
    """The section of edited Results."""
    kinds = {re.sub(r"\.\d+(?=\.|$)", ".*", f"{one['file']}:{one['place']}") for one in found}
    return [
        "In each case, one value is changed in the JSON of the Result of a dump that should fail, or of its baseline:",
        "it is removed, repeated, scaled, or replaced by null, 0, a negative, tiny or huge number, text, a list or a",
        "mapping (`tests/reliability/edited_results.py`).",
        "",
        "| file | mutations | failed (3) | undecided or refused (4) | passed (0) | tracebacks |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {len(own):,} | "
            + " | ".join(f"{sum(one['code'] == code for one in own):,}" for code in (3, 4, 0, 1))
            + " |"
            for name in ("result", "baseline")
            for own in [[one for one in found if one["file"] == name]]
        ),
        "",
        f"They cover {len(kinds):,} kinds of paths in the JSON. Paths that only differ in a list index are one kind.",
    ]


def kills(found: list[dict[str, Any]], earlier: int) -> list[str]:
    """The section of the kills."""
    verbs, wrong = Counter(kill["verb"] for kill in found), [kill for kill in found if kill["wrong"]]
    early = sum(kill["code"] != 0 for kill in found)
    return [
        "The commands below and the recorder get SIGKILL, SIGTERM or SIGINT at a random moment. Half of the commands",
        "replace earlier outputs. Each output must equal the output of an undisturbed run, or the earlier file (JSON",
        "contains times, so its length and structure are compared). Outputs of one command must appear together,",
        "except after SIGKILL. The exit code must belong to the signal, or be 0 if the signal came too late. After the",
        "next run no temporary file may remain. After a fix, the failed kills were replaced by new kills of the same",
        "command. `combined` is a report of several Results, and `figures` and `markdown` are outputs of `report`.",
        f"{earlier:,} other kills ran on earlier code." if earlier else "",
        "",
        "| command | kills |",
        "|---|---|",
        *(f"| {verb} | {count:,} |" for verb, count in verbs.items()),
        f"| **all** | **{len(found):,}** |",
        "",
        f"Outputs lost or temporary files left behind: {len(wrong):,}. {early:,} kills came before the command "
        "had ended.",
        *(["", *(f"- {one['verb']}, {one['signal']}: {brief(one['wrong'])}" for one in wrong)]),
    ]


def memory(found: list[dict[str, Any]]) -> list[str]:
    """The section of the files that could exhaust a machine."""
    if not found:
        return ["None was tried."]
    latest = {(one["name"], one["verb"]): one for one in found}
    files = {one["name"]: one["bytes"] for one in found}
    verbs = list(dict.fromkeys(verb for _, verb in latest))
    return [
        "Peak memory of the process, CPU time and exit code of commands on files that `tests/reliability/memory.py`",
        "makes. `analyze` writes a Result, a page and a row per sequence, `compare` compares the file with itself, and",
        "`gate` saves a baseline. Exit code 4 is an error message.",
        "",
        f"| file | bytes | {' | '.join(verbs)} |",
        f"|---|---|{'---|' * len(verbs)}",
        *(
            f"| {name} | {size:,} | {' | '.join(_memory_cell(latest.get((name, verb))) for verb in verbs)} |"
            for name, size in files.items()
        ),
    ]


def _memory_cell(one: dict[str, Any] | None) -> str:
    return "" if one is None else f"{one['mb']:,} MB, {one['cpu']} s, exit {one['code']}"


def faults(found: list[dict[str, Any]]) -> list[str]:
    """The section of the faults of the machine."""
    outcomes = {fault["name"]: brief(fault["wrong"]) or "handled correctly" for fault in found}
    return ["| fault | outcome |", "|---|---|", *(f"| {name} | {outcome} |" for name, outcome in outcomes.items())]


def versions(found: list[dict[str, Any]]) -> list[str]:
    """The section of other versions of Python and of the dependencies."""
    if not found:
        return ["None was tried: `make versions`."]
    names = list(max((one["versions"] for one in found), key=len))
    return [
        "A part of the tests with other versions of Python, and with the oldest of each dependency (`make versions`);",
        "torch, and what needs it, is left out.",
        "",
        f"| Python | {' | '.join(names)} | outcome |",
        f"|---{'|---' * len(names)}|---|",
        *(
            f"| {' | '.join([one['python'], *(one['versions'].get(name, '') for name in names)])} "
            f"| {brief(one['wrong'] or one['tests'])} |"
            for one in found
        ),
    ]


def document(folder: Path, earlier: str = "") -> str:
    """docs/methods/reliability.md; what is no line in the log is left as it stood."""

    def section(title: str, name: str, told: Callable[[list[dict[str, Any]]], list[str]]) -> list[str]:
        found = logged(folder, name)
        stood = re.search(rf"^## {title}\n\n(.*?)\n(?=\n## )", earlier, re.MULTILINE | re.DOTALL)
        return ["", f"## {title}", "", *(told(found) if found or stood is None else stood[1].splitlines())]

    lines = [
        "# Reliability",
        "<!-- Written by tests/reliability/reliability.py; run it again instead of editing. -->",
        "",
        "For every input, mismatchctl must end with an answer, or with one error message and exit code 2, 3 or 4. It",
        "must not print a traceback, run longer than 30 s, use more than 2 GB for inputs of a few kilobytes, or write",
        "a partial file. Known exceptions are listed under Limits.",
        f"Measured on Python {platform.python_version()}, pyarrow {pyarrow.__version__}.",
        "Cases, kills and faults ran on several commits, some before the last changes.",
        *section("Cases", "cases", lambda found: cases(found, len(logged(folder, "earlier")))),
        *section("Readers", "readers", readers),
        *section("Bytes that a library decodes", "natives", natives),
        *section("Guided by coverage", "guided", guided),
        *section("The gate and bad data", "open", open_gates),
        *section("The gate and edited Results", "edited", edited),
        *section("Kills", "kills", lambda found: kills(found, len(logged(folder, "earlier_kills")))),
        *section("Memory of small hostile files", "memory", memory),
        *section("Faults of the machine", "faults", faults),
        *section("Versions", "versions", versions),
        *("", "## Limits", LIMITS),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000, help="further ones; their seeds follow those of the log")
    parser.add_argument("--readers", type=int, default=10_000, help="further cases of the formats that people have")
    parser.add_argument("--kills", type=int, default=1_000, help="further ones")
    parser.add_argument("--natives", type=int, default=5_000, help="files of each part whose bytes are exchanged")
    parser.add_argument("--gates", type=int, default=3, help="seeds of the ways to make the gate pass")
    parser.add_argument("--edited", type=int, default=6_000, help="mutations of Results and baselines")
    parser.add_argument("--log", type=Path, help="where lines are kept; default: a new temporary folder")
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    asked.log = asked.log or Path(tempfile.mkdtemp(prefix="mismatchctl-reliability-"))
    asked.log.mkdir(parents=True, exist_ok=True)
    first, seed = len(logged(asked.log, "cases")), len(logged(asked.log, "kills"))
    os.environ.setdefault("FAULTS_FILES", "10000")
    with ThreadPoolExecutor(2) as pool:  # its threads only wait for processes
        if asked.cases:
            pool.submit(extend, asked.log, "cases", "fuzz_check", str(first), str(asked.cases)).result()
        if asked.kills:
            pool.submit(extend, asked.log, "kills", "kills", str(seed), str(asked.kills)).result()
    if asked.readers:
        seed = 3_000_000 + len(logged(asked.log, "readers"))
        extend(asked.log, "readers", "fuzz_check", str(seed), str(asked.readers), "--readers")
    if asked.natives:
        extend(asked.log, "natives", "natives", "0", str(asked.natives))
    extend(asked.log, "memory", "memory")
    if asked.gates:
        extend(
            asked.log,
            "open",
            "fail_open",
            str(len({one["seed"] for one in logged(asked.log, "open")})),
            str(asked.gates),
        )
    if asked.edited:
        extend(asked.log, "edited", "edited_results", str(len(logged(asked.log, "edited"))), str(asked.edited))
    extend(asked.log, "faults", "faults")
    earlier = asked.write.read_text(encoding="utf-8") if asked.write and asked.write.exists() else ""
    text = document(asked.log, earlier)
    asked.write.write_text(text, encoding="utf-8") if asked.write else print(text)


if __name__ == "__main__":
    main()
