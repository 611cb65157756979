"""Run the long form of the fuzz cases, the kills and the faults, and write docs/methods/reliability.md.

`python -m tests.reliability.reliability --cases 20000 --kills 1000 --write docs/methods/reliability.md` runs all.
Results are lines of JSON in a folder (`--log`), and the next run appends to them. If the log has no results for a row
of the table, the row of the existing page stays.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow

from tests.paths import ROOT

LIMITS = """
- pyarrow decodes Parquet and Arrow in mismatchctl's process, so a manipulated file could crash mismatchctl. The tests
  found one such file, a Parquet file whose footer and schema contradict each other. Therefore, mismatchctl now checks
  the footer before pyarrow reads the file. Read an untrusted dump in a separate process.
- The whole test suite only runs on Python 3.11. The other Python versions in the table passed a part of the tests.
  Older versions of torch are not tested.
- mismatchctl reads a framework's file above 64 MB through a memory map. If another process truncates the file at the
  same time, mismatchctl crashes.
- mismatchctl reads PyTorch files with its own unpickler, because `torch.load` is slow or needs much memory on some
  manipulated files. For example, `torch.load(weights_only=True, mmap=True)` of torch 2.13 needed more than 60 s for a
  file of 2.3 MB. For a file of 1.2 MB that copies one string 50,000 times, it needed 12 GB.
- If a Parquet file has small data pages of version 2, pyarrow 26 cannot read some lists of booleans in it, even if
  pyarrow wrote the file. A command stops with an error message for a file with such lists.
- Small files can take long. For a file of 36 KB with 2 million sequences of one token each, `compare` needs 50 s. For a
  file of 109 KB with 20 million sequences without tokens, `analyze` needs 45 s.
- If SIGKILL stops a command while it renames several output files, some of these files can be new and others old. Each
  file is still complete.
"""


def logged(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def extend(folder: Path, name: str, script: str, *words: str) -> None:
    with open(folder / f"{name}.jsonl", "a") as file:
        subprocess.run(
            [sys.executable, "-W", "default::RuntimeWarning", "-m", f"tests.reliability.{script}", *words],
            stdout=file,
            check=True,
            cwd=ROOT,
        )


def brief(words: str) -> str:
    return " ".join(words.split())[-200:]


def _wrong(found: list[dict[str, Any]]) -> int:
    return sum(bool(one["wrong"]) for one in found)


ROWS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], tuple[int, int]]]] = {
    "cases": (
        "a command on a damaged or unusual dump, result file, configuration, framework file, log or option",
        lambda found: (len(found), _wrong(found)),
    ),
    "readers": (
        "a command on a CSV, JSON, NPZ, Arrow, PyTorch or safetensors file, engine response or log with changed bytes",
        lambda found: (len(found), _wrong(found)),
    ),
    "natives": (
        "a decoder written in C (Parquet, Arrow, torch, pickle, YAML, JSON, TensorBoard) on a file with changed bytes",
        lambda found: (sum(one["files"] for one in found), _wrong(found)),
    ),
    "guided": (
        "a parser of mismatchctl on inputs that the fuzzer atheris generates",
        lambda found: (sum(one["executions"] for one in found), _wrong(found)),
    ),
    "open": (
        "the gate on a dump that is worse than its baseline or cannot be judged (failure: the gate passes)",
        lambda found: (len(found), sum(one["code"] == 0 or bool(one["error"]) for one in found)),
    ),
    "edited": (
        "the gate on a result file or baseline with one changed value (failure: the gate passes)",
        lambda found: (len(found), sum(one["code"] in (0, 1) for one in found)),
    ),
    "kills": (
        "a command or the recorder stopped by SIGKILL, SIGTERM or SIGINT at a random moment",
        lambda found: (len(found), _wrong(found)),
    ),
    "memory": (
        "a command on a small file that decodes to millions of rows (failure: above 2 GB)",
        lambda found: (len(found), sum(one["mb"] > 2048 for one in found)),
    ),
    "faults": (
        "a command during a fault of the machine, such as a full disk, a closed stdout or a changed clock",
        lambda found: (len(found), _wrong(found)),
    ),
}
"""Title and counts (tries, failures) of each harness."""


def versions(found: list[dict[str, Any]]) -> list[str]:
    names = list(max((one["versions"] for one in found), key=len))
    return [
        f"| Python | {' | '.join(names)} | outcome |",
        f"|---{'|---' * len(names)}|---|",
        *(
            f"| {' | '.join([one['python'], *(one['versions'].get(name, '') for name in names)])} "
            f"| {brief(one['wrong'] or one['tests'])} |"
            for one in found
        ),
    ]


def row(title: str, counts: tuple[int, int] | None, earlier: str) -> str:
    if counts:
        return f"| {title} | {counts[0]:,} | {counts[1]:,} |"
    stood = re.search(rf"^\| {re.escape(title)} \|.*$", earlier, re.MULTILINE)
    return stood[0] if stood else f"| {title} | 0 | |"


def document(folder: Path, earlier: str = "") -> str:
    rows = []
    for name, (title, count) in ROWS.items():
        found = logged(folder, name)
        rows.append(row(title, count(found) if found else None, earlier))
    table = re.search(r"^\| Python .*?(?=\n\n)", earlier, re.MULTILINE | re.DOTALL)
    found = logged(folder, "versions")
    lines = [
        "# Reliability",
        "<!-- Written by tests/reliability/reliability.py; run it again instead of editing. -->",
        "",
        "This page shows how mismatchctl behaves on damaged files, when it is killed, and with other versions of its",
        "dependencies. For every input, a command must end with an answer, or with one error message and exit code",
        "2, 3 or 4. The command must not print a traceback, run longer than 30 s, use more than 2 GB for a file of a",
        "few kilobytes, or leave a partial output file. A try is one run of a test with its own random seed. A try",
        "that breaks one of these rules is a failure. The section [Limits](#limits) lists the known exceptions.",
        "",
        f"The tries ran on Python {platform.python_version()} with pyarrow {pyarrow.__version__}, on several commits "
        "of mismatchctl.",
        "After each repair, the tries that had failed were repeated. `make reliability` repeats all tries.",
        "",
        "| test | tries | failures |",
        "|---|---|---|",
        *rows,
        "",
        "If a command is killed, each of its output files is either complete or unchanged. A command replaces all its",
        "output files or none of them, except after SIGKILL. Temporary files can remain after a kill. The next run of",
        "the command removes them.",
        "",
        "## Versions",
        "",
        "`make versions` runs a part of the tests with other versions of Python, and with the oldest supported version",
        "of each dependency. These runs do not include the tests that need torch.",
        "",
        *(versions(found) if found else [table[0] if table else "Not run."]),
        "",
        "## Limits",
        LIMITS,
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
