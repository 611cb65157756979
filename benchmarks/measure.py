"""Shared code of the benchmarks: synthetic dumps, measurements in fresh processes, tables and page sections."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

STEPS, PER_PROMPT, LONGEST = 16, 8, 16384
COLUMNS = ("rollout_log_probs", "train_log_probs")


def make_dump(folder: Path, tokens: int, mean: int) -> int:
    """Write a dump of about `tokens` tokens, one file per training step, and return the exact number of tokens.

    Lengths are log-normal with mean `mean`. The log ratios are small and have heavy tails. Each step has at least one
    prompt.
    """
    rng, made = np.random.default_rng(0), 0
    for step in range(STEPS):
        lengths: list[int] = []
        while sum(lengths) < tokens // STEPS or len(lengths) < PER_PROMPT:
            lengths.append(int(np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0), 16, LONGEST)))
        count = len(lengths) // PER_PROMPT * PER_PROMPT
        known = np.array(lengths[:count], np.int64)
        write_lists(folder / f"step_{step:05d}.parquet", known, rng, step, row_group_size=512)
        made += int(known.sum())
    return made


@contextmanager
def temporary_dump(tokens: float, mean: int) -> Iterator[Path]:
    """Yield the temporary folder of a synthetic dump."""
    with tempfile.TemporaryDirectory() as place:
        make_dump(Path(place), int(tokens), mean)
        yield Path(place)


def write_lists(path: Path, lengths: NDArray[np.int64], rng: np.random.Generator, step: int, **options: int) -> None:
    """Write a file with the recorder's Parquet settings and one sequence per length."""
    count, offsets = len(lengths), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rollout = -rng.exponential(0.5, offsets[-1]).astype(np.float32)
    train = np.minimum(rollout + 0.01 * rng.standard_t(3, offsets[-1]).astype(np.float32), 0).astype(np.float32)
    element = pa.field("element", pa.float32(), nullable=False)
    lists = [
        pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values), type=pa.large_list(element))
        for values in (rollout, train)
    ]
    columns = {
        "step": pa.array(np.full(count, step)),
        "prompt_id": pa.array(np.arange(count) // PER_PROMPT),
        "sequence_id": pa.array(np.arange(count)),
        "reward": pa.array(rng.random(count)),
        **dict(zip(COLUMNS, lists, strict=True)),
    }
    required = pa.schema([pa.field(name, values.type, nullable=False) for name, values in columns.items()])
    pq.write_table(
        pa.table(columns, schema=required), path, compression="zstd", compression_level=1, use_dictionary=False,
        use_byte_stream_split=[f"{name}.list.element" for name in COLUMNS], write_statistics=["step"],
        write_page_checksum=True, **options,
    )  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """The cost of a process: wall-clock seconds, seconds of processor time, and peak resident memory in MB."""

    wall: float
    processor: float
    memory: float


def measure(script: str, *words: str) -> Cost:
    """Run one case of a script in a fresh process, and return the cost that the process prints with `report`."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    paths = (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run([sys.executable, script, *words], check=True, capture_output=True, text=True, env=environment)
    wall, processor, memory = map(float, done.stdout.split()[-3:])
    return Cost(wall, processor, memory)


@dataclass(frozen=True)
class Rounds:
    """Costs of all cases by round. `what` names a field of `Cost`, `relative_to` a case to divide by."""

    costs: list[dict[str, Cost]]

    def values(self, what: str, case: str, relative_to: str = "") -> list[float]:
        """Return one number per round."""
        return [
            getattr(one[case], what) / (getattr(one[relative_to], what) if relative_to else 1) for one in self.costs
        ]

    def median(self, what: str, case: str, relative_to: str = "") -> float:
        """Return the median over the rounds."""
        return statistics.median(self.values(what, case, relative_to))

    def spread(self, what: str, case: str, relative_to: str = "") -> str:
        """Return the median, with the minimum and the maximum."""
        values = self.values(what, case, relative_to)
        return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def measure_rounds(script: str, cases: Mapping[str, Iterable[object]], rounds: int) -> Rounds:
    """Measure all cases in each round. `cases` contains the command line of each case.

    Every second round runs in reverse order, because a case can slow down the next case.
    """
    words = {case: [str(word) for word in given] for case, given in cases.items()}
    orders = [[*words][:: -1 if number % 2 else 1] for number in range(rounds)]
    return Rounds([{case: measure(script, *words[case]) for case in order} for order in orders])


def report(wall: float, processor: float) -> None:
    """Print the cost of a case and the peak memory of this process, VmHWM, which excludes the parent process."""
    status = Path("/proc/self/status").read_text()
    memory = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1000
    print(wall, processor, memory)


@contextmanager
def report_cost() -> Iterator[None]:
    """Print the cost of the code in the block."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    report(time.perf_counter() - wall, time.process_time() - processor)


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table that ends with a blank line."""
    lines = [[*heads], *(map(str, row) for row in rows)]
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body]) + "\n"


def format_share(part: int, whole: int) -> str:
    """Format a share as a percentage with the two counts."""
    return f"{100 * part / whole:.3g}% ({part:,} of {whole:,})" if whole else "-"


def group_rows(rows: Iterable[tuple[str, tuple[object, ...]]]) -> list[list[object]]:
    """Join the names of all rows with the same cells. Names that differ only in a last number share their words."""
    found: dict[tuple[object, ...], dict[str, list[str]]] = {}
    for name, cells in rows:
        match = re.fullmatch(r"(.*) (-?[\d.]+%?)", name)
        title, number = (match[1], [match[2]]) if match else (name, [])
        found.setdefault(cells, {}).setdefault(title, []).extend(number)
    return [
        ["; ".join(f"{t} {', '.join(n)}".strip() for t, n in titles.items()), *cells] for cells, titles in found.items()
    ]


def publish(text: str, page: Path | None, name: str = Path(sys.argv[0]).stem) -> None:
    """Print a section, or write it between the markers of its name if a page is given."""
    if page is None:
        print(text)
    else:
        replace_section(text, page, f"<!-- {name} -->", f"<!-- end of {name} -->")


def wrap_prose(text: str) -> str:
    """Wrap the paragraphs and list items of a Markdown text at 120 characters. Code spans stay in one line."""
    lines: list[str] = []
    paragraph = ""

    def end_paragraph() -> None:
        indent = "  " if paragraph.startswith("- ") else ""
        joined = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), paragraph)
        wrapped = textwrap.wrap(joined, 120, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)
        lines.extend(line.replace("\0", " ") for line in wrapped)

    for line in text.split("\n"):
        fixed = line[:1] in ("", "|", "#", "<")
        if fixed or line.startswith("- "):
            end_paragraph()
            paragraph = ""
        if fixed:
            lines.append(line)
        else:
            paragraph += f" {line.strip()}" if paragraph else line
    end_paragraph()
    return "\n".join(lines)


def replace_section(text: str, page: Path | None, begin: str, end: str) -> None:
    """Print a text, and write it between two markers of a page if a page is given."""
    text = wrap_prose(text)
    print(text, flush=True)
    if page is None:
        return
    before, start, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        sys.exit(f"{page}: no section from {begin} to {end}. Add the two markers")
    page.write_text(f"{before}{start}\n{text}\n{found}{after}", encoding="utf-8")


def make_parser(about: str | None, tokens: float, repeat: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all speed benchmarks. Only `measure` passes `--case` and `--folder`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=tokens)
    parser.add_argument("--repeat", type=int, default=repeat)
    parser.add_argument("--write", type=Path, help="page to write the tables to")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser
