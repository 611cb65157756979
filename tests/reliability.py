"""The long form of the fuzz harness, of the kills and of the faults; writes docs/reliability.md with what they found.

`python tests/reliability.py --cases 20000 --kills 1000 --write docs/reliability.md` does it all. What was found is kept
as lines of JSON in a folder (`--log`), and a further run goes on where it ended; `--cases 0 --kills 0` only writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow

HERE = Path(__file__).parent
LIMITS = """
- pyarrow decodes Parquet and Arrow in this process. A file that was forged to break it could end the
  process; the cases found none that does. Read dumps of strangers where a crash does no harm.
- Files of frameworks above 64 MB are mapped: one that is cut short while it is read ends the process.
- pyarrow 26 cannot read lists of flags that it wrote in version 2 pages of a few bytes: such a file is
  refused.
- Nobody else should be able to write into the folder of `--cache`: its parts are checked against damage and
  against standing under another's name, not against forgery.
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
            [sys.executable, "-W", "default::RuntimeWarning", str(HERE / script), *words], stdout=file, check=True
        )


def brief(words: str) -> str:
    """The end of what is wrong, in one line."""
    return " ".join(words.split())[-200:]


def most(found: list[dict[str, Any]], name: str) -> Any:
    """The largest of a number that each has."""
    return max((one[name] for one in found), default=0)


def cases(found: list[dict[str, Any]]) -> list[str]:
    """The section of the cases."""
    kinds = Counter(case["kind"] for case in found)
    failures = [
        f"- seed {case['seed']}, {case['kind']}, `{' '.join(case['argv'])[:60]}`: {brief(case['wrong'])}"
        for case in found
        if case["wrong"]
    ]
    return [
        "Each case follows from its seed (`tests/fuzzing.py`) and is a process of its own; sound dumps are held to",
        "their K3. A warning of a library on stderr is a failure too.",
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


def kills(found: list[dict[str, Any]]) -> list[str]:
    """The section of the kills."""
    verbs, wrong = Counter(kill["verb"] for kill in found), [kill for kill in found if kill["wrong"]]
    early = sum(kill["code"] != 0 for kill in found)
    return [
        "SIGKILL, SIGTERM and SIGINT at random moments of each verb and of the recorder, half of them with earlier",
        "outputs in place. Each output is as an undisturbed run writes it or as it was before; those of one command",
        "appear together; the exit code is the signal's; after the next run no other file is there, temporary folders",
        "included.",
        "",
        "| verb | kills |",
        "|---|---|",
        *(f"| {verb} | {count:,} |" for verb, count in verbs.items()),
        f"| **all** | **{len(found):,}** |",
        "",
        f"Lost or left behind: {len(wrong):,}. {early:,} came before the command had ended.",
        *(["", *(f"- {one['verb']}, {one['signal']}: {brief(one['wrong'])}" for one in wrong)]),
    ]


def faults(found: list[dict[str, Any]]) -> list[str]:
    """The section of the faults of the machine."""
    outcomes = {fault["name"]: brief(fault["wrong"]) or "as it should be" for fault in found}
    return ["| fault | outcome |", "|---|---|", *(f"| {name} | {outcome} |" for name, outcome in outcomes.items())]


def document(folder: Path) -> str:
    """docs/reliability.md."""
    lines = [
        "# Reliability",
        "<!-- Written by tests/reliability.py; run it again instead of editing. -->",
        "",
        "Whatever it is given, mismatchctl ends in a right answer, or in one sentence and exit code 2, 3 or 4: no",
        "traceback, no hang beyond 30 s, no more than 2 GB for inputs of a few kilobytes, no output that is there in",
        "part.",
        f"Measured on Python {platform.python_version()}, pyarrow {pyarrow.__version__}.",
        *("", "## Cases", "", *cases(logged(folder, "cases"))),
        *("", "## Kills", "", *kills(logged(folder, "kills"))),
        *("", "## Faults of the machine", "", *faults(logged(folder, "faults"))),
        *("", "## Limits", LIMITS),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000, help="further ones; their seeds follow those of the log")
    parser.add_argument("--kills", type=int, default=1_000, help="further ones")
    parser.add_argument("--log", type=Path, default=Path("/tmp/mismatchctl-reliability"), help="where lines are kept")
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    asked.log.mkdir(parents=True, exist_ok=True)
    first, seed = len(logged(asked.log, "cases")), len(logged(asked.log, "kills"))
    os.environ.setdefault("FAULTS_FILES", "10000")
    with ThreadPoolExecutor(2) as pool:  # its threads only wait for processes
        pool.submit(extend, asked.log, "cases", "fuzz_check.py", str(first), str(asked.cases)).result()
        pool.submit(extend, asked.log, "kills", "kills.py", str(seed), str(asked.kills)).result()
    extend(asked.log, "faults", "faults.py")
    text = document(asked.log)
    asked.write.write_text(text, encoding="utf-8") if asked.write else print(text)


if __name__ == "__main__":
    main()
