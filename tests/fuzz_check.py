"""Runs cases of the fuzz harness and says what is wrong with how each ended: nothing, or a few words.

`python tests/fuzz_check.py FIRST COUNT [SEEDS]` prints one line of JSON for each seed.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import zygote
from fuzzing import Case
from fuzzing_verbs import VerbMaker, save
from make_dump import make_dump

ENDINGS = (0, 2, 3, 4)
"""Fine, usage, a check that failed, could not judge."""
FRAME = re.compile(r'File "[^"]*?(mismatchctl/[^"]*)", line (\d+)')


@dataclass(frozen=True)
class Checked:
    """A case that was run: CPU seconds, bytes of memory, and what is wrong."""

    seed: int
    kind: str
    argv: list[str]
    seconds: float
    memory: int
    wrong: str


def checked(seeds: Iterable[int]) -> Iterator[Checked]:
    """Run the case of each seed in a fork and a folder of its own."""
    saved_by_verbs()
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        try:
            (folder / "case").mkdir()
            ended = zygote.run(folder / "case", partial(played, seed, folder / "made"))
            if not (folder / "made").exists():
                yield Checked(seed, "?", [], ended.seconds, ended.memory, f"was not made: {ended.stderr[-300:]}")
                continue
            case, given = pickle.loads((folder / "made").read_bytes())
            made = {path.relative_to(folder / "case") for path in (folder / "case").rglob("*")} - given
            wrong = problem(case, ended, made, folder / "case")
            yield Checked(seed, case.kind, case.argv, ended.seconds, ended.memory, wrong)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def saved_by_verbs() -> None:
    """Let every verb write what the cases exchange parts of."""
    folder = Path(tempfile.mkdtemp(prefix="saved-"))  # a TemporaryDirectory would be removed by the forks
    make_dump(folder / "a.parquet")
    make_dump(folder / "b.parquet", seed=1)
    save(lambda place, argv: zygote.run(place, zygote.command(argv)).stdout, folder)
    shutil.rmtree(folder)


def played(seed: int, place: Path) -> None:
    """Make the case of a seed in this folder, say at a place what it is, and run it."""
    folder = Path.cwd()
    case = VerbMaker(seed, folder).case()
    (folder / "out").mkdir(exist_ok=True)
    given = {path.relative_to(folder) for path in folder.rglob("*")}
    place.write_bytes(pickle.dumps((case, given)))
    zygote.command(case.argv)()


def problem(case: Case, ended: zygote.Ended, made: set[Path], folder: Path) -> str:
    """What is wrong with an ending."""
    if ended.hung or ended.seconds > zygote.SLOW:
        return f"hangs or takes too long: {ended.seconds:.0f} s of CPU time"
    if ended.memory > zygote.MEMORY or "there is no memory left" in ended.stderr:
        return f"took {ended.memory >> 20:,} MB"
    if "Traceback" in ended.stderr:
        frames = FRAME.findall(ended.stderr)
        return f"traceback: {ended.stderr.strip().splitlines()[-1][:120]} at {':'.join(frames[-1] if frames else '?')}"
    if ended.code not in ENDINGS:
        return f"exit code {ended.code}: {ended.stderr[-200:]}"
    if "Warning: " in ended.stderr:
        return f"a warning of a library: {ended.stderr[:300]}"
    return of_sentences(case, ended) or of_files(case, ended, made, folder) or of_numbers(case, ended)


def of_sentences(case: Case, ended: zygote.Ended) -> str:
    """What is wrong with what was said."""
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    silent = ended.code in (2, 4) and not sentences and not judges(case) and "Usage" not in ended.stderr
    if len(sentences) > 1 or silent:
        return f"{len(sentences)} sentences for exit code {ended.code}: {ended.stderr[:200]!r}"
    return ""


def of_files(case: Case, ended: zygote.Ended, made: set[Path], folder: Path) -> str:
    """What is wrong with the files that there are now."""
    if any(part.startswith(".") for path in made for part in path.parts):
        return f"left behind: {sorted(map(str, made))}"
    if ended.left:
        return f"temporary files left behind: {ended.left}"
    if ended.code in (2, 4) and made and not judges(case):
        return f"written although it failed: {sorted(map(str, made))}"
    for path in made:
        try:
            if path.suffix == ".json":
                strict((folder / path).read_text(encoding="utf-8"))
        except ValueError as error:
            return f"{path} is no strict JSON: {error}"
    return ""


def of_numbers(case: Case, ended: zygote.Ended) -> str:
    """What is wrong with what was answered."""
    if "--json" in case.argv and ended.stdout.strip() and ended.code != 2:
        try:
            data = strict(ended.stdout)
        except ValueError as error:
            return f"stdout is no strict JSON: {error}"
        return "" if case.k3 is None else _differs(case.k3, data)
    return "" if case.k3 is None else f"a sound dump ended with {ended.code}: {ended.stderr[:200]!r}"


def judges(case: Case) -> bool:
    """Whether the verb has a verdict to give, which is neither fine nor a sentence."""
    return case.argv[0] in ("gate", "lint", "schema", "watch")


def _differs(expected: float, data: Any) -> str:
    (run,) = data["runs"].values()
    found = run["overall"]["metrics"]["k3"]["value"]
    near = found is not None and abs(found - expected) <= 1e-9 * expected + 1e-300
    return "" if near else f"K3 {found}, not {expected}"


def strict(text: str) -> Any:
    """JSON without NaN and Infinity; a ValueError where it is none."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


if __name__ == "__main__":
    zygote.warm()
    start, count, *more = map(int, sys.argv[1:])
    for one in checked((*range(start, start + count), *more)):
        print(json.dumps(asdict(one)), flush=True)
