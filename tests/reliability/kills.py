"""Kill commands at random moments. Every output is complete or unchanged, and the next run removes leftover files.

`python -m tests.reliability.kills SEED COUNT` prints one line of JSON for each kill.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mismatchctl.recorder.recorder import Recorder
from tests.factories.dumps import make_dump
from tests.reliability import fork_server as zygote

SIGNALS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
"""Exit codes by signal."""
BEFORE = b"as it was before"
VERBS: dict[str, list[str]] = {
    "analyze": ["analyze", "a.parquet", "-o", "out/r.json", "--sequences", "out/q.parquet"],
    "recorder": [],
    "convert": ["convert", "a.parquet", "out/c.parquet"],
    "gate": ["gate", "a.parquet", "--rule", "k3:max=1", "--save-baseline", "out/b.json", "--junit", "out/j.xml"],
    "sweep": ["sweep", "a.parquet", "-c", "token_tis", "--vary", "weight.truncate=1:3:5", "-o", "out/s.csv"],
    "compare": ["compare", "a.parquet", "b.parquet", "-o", "out/c.json"],
    "report": ["report", "r.json", "--html", "out/r.html"],
    "diagnose": ["diagnose", "a.parquet", "--json"],
    "advise": ["advise", "a.parquet", "-o", "out/a.json"],
    "combined": ["report", "r.json", "-o", "out/all.json", "--html", "out/all.html"],
    "figures": ["report", "r.json", "--figures", "out/figures"],
    "markdown": ["analyze", "a.parquet", "--markdown", "out/r.md", "--html", "out/r.html"],
    "watch": ["watch", "a.parquet", "--until-idle", "0.1s", "--every", "0.1s", "--html", "out/w.html"],
}
CLOBBERS = ("analyze", "report", "sweep", "compare", "gate", "convert", "markdown")
"""Commands that replace an output with --force."""


def record() -> None:
    noise = np.random.default_rng(0)
    for background, steps in ((0, range(4)), (2, range(4, 8))):
        with Recorder("out", background=background) as recorder:
            for step in steps:
                rollout = -0.5 - noise.random((64, 256))
                recorder.write(step=step, rollout_log_probs=[*rollout], train_log_probs=[*(rollout - 0.01)])


def act(verb: str, clobber: bool) -> Callable[[], None]:
    return zygote.command([*VERBS[verb], *(["--force"] if clobber else [])]) if VERBS[verb] else record


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def litter(names: Iterator[str] | list[str]) -> list[str]:
    return [name for name in names if Path(name).name.startswith(".") or name.endswith((".tmp", ".part"))]


@dataclass
class Kill:
    verb: str
    signal: str
    code: int
    wrong: str


class Killer:
    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, Path(tempfile.mkdtemp(prefix="said-"))
        make_dump(folder / "a.parquet")
        make_dump(folder / "b.parquet", seed=1)
        shutil.copy(zygote.RESULT, folder / "r.json")
        for argv in (["compare", "a.parquet", "b.parquet", "-o", "c.json"], ["advise", "a.parquet", "-o", "v.json"]):
            zygote.run(folder, zygote.command(argv))
        self.expected: dict[str, dict[str, bytes]] = {}
        self.took: dict[str, float] = {}

    def rehearse(self, verb: str) -> None:
        self.empty()
        begun = time.monotonic()
        ended = zygote.wait(zygote.fork(self.folder, act(verb, False), self.said), self.said)
        assert ended.code == 0, (verb, ended)
        self.took[verb], self.expected[verb] = time.monotonic() - begun, contents(self.folder / "out")

    def empty(self) -> None:
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        (self.folder / "out").mkdir()

    def kill(self, verb: str, rng: random.Random) -> Kill:
        if verb not in self.took:
            self.rehearse(verb)
        how, clobber = rng.choice([*SIGNALS]), verb in CLOBBERS and rng.random() < 0.5
        self.empty()
        if clobber:
            for name in self.expected[verb]:
                (self.folder / "out" / name).write_bytes(BEFORE)
        child = zygote.fork(self.folder, act(verb, clobber), self.said)
        time.sleep(rng.uniform(0, 1.1 * self.took[verb]))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, how)
        ended = zygote.wait(child, self.said)
        wrong = self.lost(verb, clobber, how, ended) or self.left(verb, clobber)
        return Kill(verb, how.name, ended.code, wrong)

    def lost(self, verb: str, clobber: bool, how: signal.Signals, ended: zygote.Ended) -> str:
        early = -how  # before the command installs its handlers, the signal ends the process
        if ended.code not in (0, SIGNALS[how], early) and not (verb == "recorder" and how != signal.SIGKILL):
            return f"exit code {ended.code}: {ended.stderr[-300:]}"
        if "Traceback" in ended.stderr and verb != "recorder":
            return f"a traceback: {ended.stderr[-300:]}"
        there = {name: data for name, data in contents(self.folder / "out").items() if not litter([name])}
        expected = self.expected[verb]
        news = [name for name, data in there.items() if whole(data, expected.get(name, b""))]
        olds = [name for name, data in there.items() if clobber and data == BEFORE]
        if partial := [name for name in there if name not in news and name not in olds]:
            return f"partial: {partial}"
        together = verb != "recorder" and how != signal.SIGKILL
        if together and (len(news) not in (0, len(expected)) or (news and olds)):
            return f"not together: {sorted(there)}"
        if clobber and len(there) < len(expected):
            return f"lost: {sorted(set(expected) - set(there))}"
        if verb == "recorder" and news != sorted(expected)[: len(news)]:
            return f"a later file without an earlier one: {news}"
        return ""

    def left(self, verb: str, clobber: bool) -> str:
        if not clobber and verb != "recorder":
            for path in [
                path for path in (self.folder / "out").iterdir() if path.is_file() and not litter([path.name])
            ]:
                path.unlink()
        ended = zygote.wait(zygote.fork(self.folder, act(verb, clobber), self.said), self.said)
        if ended.code != 0:
            return f"the next run ends with {ended.code}: {ended.stderr[-300:]}"
        there = contents(self.folder / "out")
        if left := [*litter([*there]), *ended.left]:
            return f"left behind: {left}"
        missing = [name for name, data in self.expected[verb].items() if not whole(there.get(name, b""), data)]
        return f"missing after the next run: {missing}" if missing else ""


def whole(data: bytes, expected: bytes) -> bool:
    """Return True if an output equals the output of an undisturbed run, except for times."""
    return data == expected or (len(data) == len(expected) and is_json(data))


def is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def kills(seed: int, count: int) -> Iterator[Kill]:
    rng, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="kills-"))
    killer = Killer(folder)
    try:
        for verb in itertools.islice(itertools.cycle(VERBS), count):
            yield killer.kill(verb, rng)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(killer.said)


if __name__ == "__main__":
    zygote.warm()
    for one in kills(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(asdict(one)), flush=True)
