"""The long form of the fuzz harness, the kills and the faults; writes docs/reliability.md with what it found.

Run `python tests/reliability.py --cases 20000 --kills 1000 --write docs/reliability.md`. Cases run in a process that is
watched: one that takes longer than 30 s, takes more than 2 GB or dies is a failure, and the next one goes on after it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import resource
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

LONGEST, MOST_MEMORY = 30.0, 2 << 30
ENDS = 60
"""Words of a failure that are kept."""


def serve(pipe: Connection) -> None:
    """Run the cases whose seeds come through the pipe, and answer each: its kind, its CPU time, what is wrong."""
    warnings.simplefilter("ignore")
    from fuzz_check import checked

    while (seed := pipe.recv()) is not None:
        begun = time.process_time()
        case, wrong = checked(seed)
        taken = time.process_time() - begun
        if taken > LONGEST:
            wrong = wrong or f"took {taken:.0f} s of CPU time"
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MOST_MEMORY:
            wrong = wrong or "took more than 2 GB"
        pipe.send((case.kind, taken, f"{wrong} ({' '.join(case.argv)[:ENDS]})" if wrong else ""))


def fuzz(first: int, cases: int, until: float) -> Iterator[tuple[int, str, float, str]]:
    """Seed, kind, CPU seconds and what is wrong with each case, as many as there is time for."""
    context = multiprocessing.get_context("spawn")
    process = None
    for seed in range(first, first + cases):
        if time.time() > until:
            break
        if process is None:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there,), daemon=True)
            process.start()
            there.close()
        here.send(seed)
        try:
            # Wall time on a machine that others use is no measure: a case that hangs uses none of its own either.
            if not here.poll(10 * LONGEST):
                raise TimeoutError
            yield seed, *here.recv()
        except (EOFError, ConnectionError, TimeoutError) as error:
            words = "hangs" if isinstance(error, TimeoutError) else f"died with {process.exitcode}"
            process.kill()
            process = None
            yield seed, "?", 0.0, words
    if process is not None:
        process.kill()


def counted(first: int, cases: int, until: float) -> tuple[Counter[str], list[str], float]:
    """How many cases there were of each kind, what failed, and the longest CPU time of one."""
    kinds: Counter[str] = Counter()
    failures: list[str] = []
    slowest = 0.0
    for seed, kind, taken, wrong in fuzz(first, cases, until):
        kinds[kind] += 1
        slowest = max(slowest, taken)
        if wrong:
            failures.append(f"seed {seed}, {kind}: {wrong}")
            print(failures[-1], flush=True)
    return kinds, failures, slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--minutes", type=float, default=600, help="of cases and kills, at most")
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    until = time.time() + 60 * asked.minutes
    with ThreadPoolExecutor(1) as beside:  # it only waits for the process that runs the cases
        cases = beside.submit(counted, asked.first, asked.cases, until)
        killed, lost = killing(asked.kills, until)
        kinds, failures, slowest = cases.result()
    faults = faulty()
    text = document(kinds, failures, slowest, killed, lost, faults)
    if asked.write:
        asked.write.write_text(text, encoding="utf-8")
    else:
        print(text)


def killing(count: int, until: float) -> tuple[Counter[str], list[str]]:
    """How many kills there were of each verb, and what was lost or left behind."""
    import faults

    killed: Counter[str] = Counter()
    lost: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        faults.prepare(folder)
        for kill in faults.kills(folder, count, seed=0):
            killed[kill.verb] += 1
            if kill.partial or kill.left:
                lost.append(f"{kill.verb}, {kill.signal}: {[*kill.partial, *kill.left]}")
                print(lost[-1], flush=True)
            if time.time() > until:
                break
    finally:
        shutil.rmtree(folder)
    return killed, lost


def faulty() -> dict[str, str]:
    """What became of each fault: nothing, or what went wrong."""
    import faults

    os.environ.setdefault("FAULTS_FILES", "10000")
    found = {}
    for name, fault in faults.FAULTS.items():
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        faults.prepare(folder)
        try:
            fault(folder)
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(name, "|", found[name] or "as it should be", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    return found


def document(
    kinds: Counter[str],
    failures: list[str],
    slowest: float,
    killed: Counter[str],
    lost: list[str],
    faults: dict[str, str],
) -> str:
    """docs/reliability.md."""
    import pyarrow

    lines = [
        "# Reliability",
        "<!-- Written by tests/reliability.py; run it again instead of editing. -->",
        "",
        "Whatever it is given, mismatchctl ends in a right answer, or in one sentence and exit code 2, 3 or 4: no",
        "traceback, no hang beyond 30 s, no more than 2 GB for inputs of a few kilobytes, no output that is there in",
        "part.",
        f"Measured on Python {platform.python_version()}, pyarrow {pyarrow.__version__}.",
        "",
        "## Cases",
        "",
        "Each case follows from its seed (`tests/fuzzing.py`); sound dumps are held to their K3.",
        "",
        "| input | cases |",
        "|---|---|",
        *(f"| {kind} | {count:,} |" for kind, count in sorted(kinds.items())),
        f"| **all** | **{sum(kinds.values()):,}** |",
        "",
        f"Failures: {len(failures):,}. The slowest case took {slowest:.1f} s of CPU time.",
        *(["", *(f"- {failure}" for failure in failures)] if failures else []),
        "",
        "## Kills",
        "",
        "SIGKILL, SIGTERM and SIGINT at random moments of each verb and of the recorder. An output is as an",
        "undisturbed run writes it or not there; after the next run no other file is.",
        "",
        "| verb | kills |",
        "|---|---|",
        *(f"| {verb} | {count:,} |" for verb, count in killed.items()),
        f"| **all** | **{sum(killed.values()):,}** |",
        "",
        f"Lost or left behind: {len(lost):,}.",
        *(["", *(f"- {one}" for one in lost)] if lost else []),
        "",
        "## Faults of the machine",
        "",
        "| fault | outcome |",
        "|---|---|",
        *(f"| {name} | {wrong or 'as it should be'} |" for name, wrong in faults.items()),
        "",
        "## Limits",
        "",
        "- pyarrow decodes Parquet and Arrow in this process. A file that was forged to break it could end the",
        "  process; the cases found none that does. Read dumps of strangers where a crash does no harm.",
        "- Files of frameworks above 64 MB are mapped: one that is cut short while it is read ends the process.",
        "- pyarrow 26 cannot read lists of flags that it wrote in version 2 pages of a few bytes: such a file is",
        "  refused.",
        "- Nobody else should be able to write into the folder of `--cache`: its parts are checked against damage and",
        "  against standing under another's name, not against forgery.",
        "- Cases are random and structure-aware, not guided by coverage.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
