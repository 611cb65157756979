"""Run fuzz cases and check how each case ends.

`python -m tests.reliability.fuzz_check FIRST COUNT [SEEDS]` prints one line of JSON per seed. Several cases share a
fork. A case that fails or is not reached runs again in its own fork. `--alone` runs every case in its own fork, and
`--readers` makes only cases of common file formats.
"""

import json
import pickle
import re
import resource
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.factories.dumps import make_dump
from tests.reliability import fork_server as zygote
from tests.reliability import fuzzing_formats
from tests.reliability.fuzzing import Case
from tests.reliability.fuzzing_commands import save
from tests.reliability.fuzzing_formats import FormatMaker

ENDINGS = (0, 2, 3, 4)
"""Allowed exit codes."""
TOGETHER = 100
"""Cases per fork."""
FRAME = re.compile(r'File "[^"]*?(mismatchctl/[^"]*)", line (\d+)')


@dataclass(frozen=True)
class Checked:
    seed: int
    kind: str
    argv: list[str]
    seconds: float
    memory: int
    code: int
    said: int
    wrong: str


def checked(seeds: Iterable[int], together: int = 1) -> Iterator[Checked]:
    saved_by_verbs()
    waiting = [*seeds]
    for at in range(0, len(waiting), together):
        group = waiting[at : at + together]
        well = {one.seed: one for one in in_one_fork(group) if not one.wrong} if together > 1 else {}
        for seed in group:
            yield well.get(seed) or alone(seed)


def in_one_fork(seeds: Sequence[int]) -> list[Checked]:
    """Return how the cases of one fork ended, or None for all if the fork failed."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        ended = zygote.run(folder, partial(one_by_one, seeds, folder))
        fine = not (ended.left or ended.hung or ended.memory > zygote.MEMORY)
        found = (folder / "found").read_text().splitlines() if fine and (folder / "found").exists() else []
        return [Checked(**json.loads(line)) for line in found]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def one_by_one(seeds: Sequence[int], folder: Path) -> None:
    with open(folder / "found", "a") as found:
        for seed in seeds:
            own = folder / str(seed)
            (own / "case").mkdir(parents=True)
            begun = time.process_time()
            code = zygote.played(own / "case", partial(played, seed, own / "made"), own)
            used, memory = time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            ended = zygote.Ended(code, *zygote.heard(own), used, memory, [])
            print(json.dumps(asdict(judged(seed, ended, own))), file=found, flush=True)
            shutil.rmtree(own)


def alone(seed: int) -> Checked:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        (folder / "case").mkdir()
        return judged(seed, zygote.run(folder / "case", partial(played, seed, folder / "made")), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judged(seed: int, ended: zygote.Ended, folder: Path) -> Checked:
    if not (folder / "made").exists():
        wrong = f"was not made: {ended.stderr[-300:]}"
        return Checked(seed, "?", [], ended.seconds, ended.memory, ended.code, 0, wrong)
    case, given = pickle.loads((folder / "made").read_bytes())
    made = {path.relative_to(folder / "case") for path in (folder / "case").rglob("*")} - given
    wrong, said = problem(case, ended, made, folder / "case"), zlib.crc32(ended.stdout.encode())
    return Checked(seed, case.kind, case.argv, ended.seconds, ended.memory, ended.code, said, wrong)


def saved_by_verbs() -> None:
    folder = Path(tempfile.mkdtemp(prefix="saved-"))  # a TemporaryDirectory would be removed by the forks
    make_dump(folder / "a.parquet")
    make_dump(folder / "b.parquet", seed=1)
    save(lambda place, argv: zygote.run(place, zygote.command(argv)).stdout, folder)
    shutil.rmtree(folder)


def played(seed: int, place: Path) -> None:
    folder = Path.cwd()
    case = FormatMaker(seed, folder).case()
    (folder / "out").mkdir(exist_ok=True)
    given = {path.relative_to(folder) for path in folder.rglob("*")}
    place.write_bytes(pickle.dumps((case, given)))
    zygote.command(case.argv)()


def problem(case: Case, ended: zygote.Ended, made: set[Path], folder: Path) -> str:
    if ended.hung or ended.seconds > zygote.SLOW:
        return f"hangs or takes too long: {ended.seconds:.0f} s of CPU time"
    if ended.memory > zygote.MEMORY or "out of memory" in ended.stderr:
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
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    silent = ended.code in (2, 4) and not sentences and not judges(case)
    if len(sentences) > 1 or silent:
        return f"{len(sentences)} sentences for exit code {ended.code}: {ended.stderr[:200]!r}"
    return ""


def of_files(case: Case, ended: zygote.Ended, made: set[Path], folder: Path) -> str:
    if any(part.startswith(".") for path in made for part in path.parts):
        return f"left behind: {sorted(map(str, made))}"
    if ended.left:
        return f"temporary files left behind: {ended.left}"
    if ended.code in (2, 4) and made and not judges(case):
        return f"written although it failed: {sorted(map(str, made))}"
    for path in made:
        try:
            content = (folder / path).read_bytes() if (folder / path).is_file() else b""
            other = content.startswith((b"PAR1", b"<"))  # --sequences and --junit take any name
            if path.suffix == ".json" and content and not other:
                strict(content.decode())
        except ValueError as error:
            return f"{path} is no strict JSON: {error}"
    return ""


def of_numbers(case: Case, ended: zygote.Ended) -> str:
    if "--json" in case.argv and ended.stdout.strip() and ended.code != 2:
        try:
            data = strict(ended.stdout)
        except ValueError as error:
            return f"stdout is no strict JSON: {error}"
        return "" if case.k3 is None else _differs(case.k3, data)
    return "" if case.k3 is None else f"a sound dump ended with {ended.code}: {ended.stderr[:200]!r}"


def judges(case: Case) -> bool:
    """Return True if the command gives a verdict, so that exit code 3 is allowed."""
    return case.argv[0] in ("gate", "lint", "schema", "watch")


def _differs(expected: float, data: Any) -> str:
    (run,) = data["runs"].values()
    found = run["overall"]["metrics"]["k3"]["value"]
    near = found is not None and abs(found - expected) <= 1e-9 * expected + 1e-300
    return "" if near else f"K3 {found}, not {expected}"


def strict(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


if __name__ == "__main__":
    zygote.warm()
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    if "--readers" in sys.argv:
        fuzzing_formats.SHARE = 1.0
    start, count, *more = map(int, words)
    for one in checked((*range(start, start + count), *more), 1 if "--alone" in sys.argv else TOGETHER):
        print(json.dumps(asdict(one)), flush=True)
