"""Coverage-guided fuzzing of functions that read untrusted bytes. It needs atheris (`pip install -e .[fuzz]`).

`python -m tests.reliability.guided EXECUTIONS [TARGETS]` prints one line of JSON per function: executions, covered
edges and errors. A parser gets the bytes. Other functions get a valid file in which the bytes choose the changes.
"""

import contextlib
import copy
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.paths import ROOT

HERE = Path(__file__).parent
Target = Callable[[Path], Callable[[bytes], None]]
"""A function that reads bytes in a folder. It must return, or raise an error for users."""
TARGETS: dict[str, Target] = {}
LIMITS = ("-timeout=30", "-rss_limit_mb=2048", "-max_len=4096", "-print_final_stats=1", "-verbosity=1")


def target(function: Target) -> Target:
    TARGETS[function.__name__] = function
    return function


@target
def text(folder: Path) -> Callable[[bytes], None]:
    from mismatchctl.api.gate.rules import parse_rules
    from mismatchctl.api.sweep.study import ThresholdAxis
    from mismatchctl.errors import MismatchctlError
    from mismatchctl.io.scripts import find_python_calls, parse_shell
    from mismatchctl.io.yaml import TextError, dump_yaml, parse_json, parse_toml, parse_yaml

    def again(words: str) -> None:
        data = parse_yaml(words)
        if isinstance(data, dict):
            assert parse_yaml(dump_yaml(data)) == data

    takers: list[Callable[[str], Any]] = [
        *(again, parse_json, parse_toml, parse_shell, parse_rules),
        *(lambda words: find_python_calls(words, "f"), lambda words: ThresholdAxis.parse("weight.truncate", words)),
    ]

    def take(data: bytes) -> None:
        words = data[1:].decode(errors="replace").replace("\0", "")
        with contextlib.suppress(TextError, MismatchctlError):
            takers[data[0] % len(takers) if data else 0](words)

    return take


@target
def result(folder: Path) -> Callable[[bytes], None]:
    from mismatchctl.errors import MismatchctlError
    from mismatchctl.results.reader import read_result

    sound, place = json.loads((HERE / "result.json").read_bytes()), folder / "r.json"

    def take(data: bytes) -> None:
        place.write_text(json.dumps(exchanged(sound, data)), encoding="utf-8", errors="surrogatepass")
        with contextlib.suppress(MismatchctlError):
            read_result(place)

    return take


@target
def footer(folder: Path) -> Callable[[bytes], None]:
    from mismatchctl.data.reader import check_files
    from mismatchctl.errors import MismatchctlError
    from tests.factories.dumps import make_dump

    sound, place = make_dump(folder / "a.parquet", rows=8).read_bytes(), folder / "d.parquet"
    start = len(sound) - 8 - struct.unpack_from("<I", sound, len(sound) - 8)[0]

    def take(data: bytes) -> None:
        made = bytearray(sound)
        for at in range(0, len(data) - 2, 3):
            where = start + (data[at] << 8 | data[at + 1]) % (len(sound) - start)
            made[where] = data[at + 2]
        place.write_bytes(made)
        with contextlib.suppress(MismatchctlError):
            check_files([str(place)])

    return take


@target
def events(folder: Path) -> Callable[[bytes], None]:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    from mismatchctl.api.analyze.run_log import read_run_log
    from mismatchctl.errors import MismatchctlError

    place = folder / "events.out.tfevents.1"

    def take(data: bytes) -> None:
        head = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (head, data)]
        place.write_bytes(head + sums[0] + data + sums[1])
        with contextlib.suppress(MismatchctlError):
            read_run_log(place)

    return take


@target
def pickles(folder: Path) -> Callable[[bytes], None]:
    from mismatchctl.data.importers.pickles import load_pickle
    from mismatchctl.errors import MismatchctlError

    place = folder / "a.pkl"

    def take(data: bytes) -> None:
        place.write_bytes(data)
        with contextlib.suppress(MismatchctlError):
            load_pickle(place, {})

    return take


def exchanged(sound: Any, data: bytes) -> Any:
    from tests.reliability.fuzzing import NASTY

    made, numbers = copy.deepcopy(sound), iter(data)
    for number in numbers:
        tree = made
        while True:
            keys = [*tree] if isinstance(tree, dict) else [*range(len(tree))]
            if not keys:
                break
            key = keys[number % len(keys)]
            if isinstance(tree[key], (dict, list)) and tree[key] and (more := next(numbers, None)) is not None:
                tree, number = tree[key], more
                continue
            tree[key] = copy.deepcopy(NASTY[next(numbers, 0) % len(NASTY)])
            break
    return made


@dataclass
class Guided:
    target: str
    executions: int
    edges: int
    wrong: str


def guided(executions: int, names: list[str]) -> Iterator[Guided]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for name in names or TARGETS:
        command = [sys.executable, "-m", "tests.reliability.guided", "--target", name, f"-runs={executions}", *LIMITS]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", cwd=folder, env=environment
            )
        said = done.stderr + done.stdout
        number, edges = (re.findall(form, said) for form in (r"number_of_executed_units: (\d+)", r" cov: (\d+)"))
        wrong = said[-600:] if done.returncode else ""
        yield Guided(name, int(number[-1]) if number else 0, int(edges[-1]) if edges else 0, wrong)


def fuzz(name: str, words: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["mismatchctl", "yaml", "pickle"]):
        take = TARGETS[name](Path(tempfile.mkdtemp(dir=".")))
    atheris.Setup([name, *words], take)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "--target":
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        for one in guided(int(sys.argv[1]), sys.argv[2:]):
            print(json.dumps(asdict(one)), flush=True)
