"""First screens of commands on five small dumps, stored as text files.

`python -m tests.cli.screens` writes the files again. Read the difference before you commit it.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.cli.command import run
from tests.factories.screens import write_screen_dumps

FOLDER = Path(__file__).parent / "screens"
WIDTHS = (80, 120)
MAX_LINES = 24
COMMANDS = (
    ("analyze", ()),
    ("diagnose", ()),
    ("sweep", ()),
    ("sweep", ("--target-rejection", "5%")),
    ("advise", ()),
    ("gate", ("--baseline", "ok.json")),
    ("gate", ("--plan", "30%")),
    ("compare healthy.parquet", ()),
    ("watch", ("--until-idle", "0s", "--every", "0.1s")),
    ("schema --check", ()),
    ("convert", ("out.parquet", "--force")),
)
"""Command and options, for each dump."""
REFERENCE = (
    "metrics",
    "metrics k3",
    "presets",
    "presets frameworks",
    "schema",
    "lint verl.yaml",
    "lint slime.yaml healthy.parquet",
    "doctor",
)
"""Commands without a dump."""
VERL = """algorithm:
  rollout_correction:
    rollout_is: token
    rollout_is_threshold: 0.5
    rollout_rs: geometrc
"""
SLIME = """use_tis: true
use_rs: true
rs_level: token
rs_lower_bound: 0.5
rs_upper_bound: 2.0
"""
LINTED = {"verl.yaml": VERL, "slime.yaml": SLIME}
UNSTABLE = ("doctor",)
"""Commands whose output depends on the machine. Only its form is tested."""


@contextlib.contextmanager
def workplace() -> Iterator[dict[str, list[str]]]:
    before, folder = Path.cwd(), Path(tempfile.mkdtemp())
    try:
        dumps = write_screen_dumps(folder)
        for name, text in LINTED.items():
            (folder / name).write_text(text)
        os.chdir(folder)
        run("gate", "healthy.parquet", "--save-baseline", "ok.json", "--accept", "-q")
        yield dumps
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def commands_of(name: str, paths: list[str]) -> Iterator[list[str]]:
    """Yield the commands for a dump, without slow commands that show little more."""
    for verb, options in COMMANDS:
        if name == "runs" and (verb in ("convert", "advise") or {"--target-rejection", "--plan"} & {*options}):
            continue
        if verb.endswith(paths[0]):
            continue
        if name == "padded" and verb in ("sweep", "watch", "convert"):
            continue
        yield [*verb.split(), *paths, *options]


def screen(words: list[str], width: int) -> str:
    done = run(*words, COLUMNS=str(width))
    assert done.exit_code in (0, 3, 4), (words, done.output, done.exception)
    return done.stderr + done.stdout


def transcript(commands: list[list[str]], shown: list[str]) -> str:
    return "\n".join(f"$ mismatchctl {_shown(words)}\n{text}" for words, text in zip(commands, shown, strict=True))


def _shown(words: list[str]) -> str:
    runs = [word for word in words if word.startswith("runs/")]
    return " ".join(dict.fromkeys("runs/*.parquet" if word in runs else word for word in words))


def write_screens() -> None:
    FOLDER.mkdir(exist_ok=True)
    with workplace() as dumps:
        for width in WIDTHS:
            for name, paths in dumps.items():
                _write(name, list(commands_of(name, paths)), width)
            _write("reference", [words.split() for words in REFERENCE if words not in UNSTABLE], width)


def _write(name: str, commands: list[list[str]], width: int) -> None:
    text = transcript(commands, [screen(words, width) for words in commands])
    (FOLDER / f"{name}-{width}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_screens()
