"""Help answers at once: nothing heavy is imported before a verb does its work."""

from __future__ import annotations

import os
import resource
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from mismatchctl import opening

ROOT = Path(__file__).parent.parent
COMMAND = "import sys; sys.argv[0] = 'mismatchctl'; from mismatchctl.__main__ import main; main()"
"""What the installed script does."""
HEAVY = {"numpy", "pyarrow", "pydantic", "torch", "polars", "matplotlib", "jinja2", "yaml"}
TIMES_BARE = 10
"""Processor time of `--help` against that of an interpreter that does nothing: a ratio, as machines are shared."""
CODE = """
import sys
sys.argv = ["mismatchctl", *sys.argv[1:]]
from mismatchctl.cli.main import main
try:
    main()
except SystemExit:
    pass
print(*sorted(module for module in sys.modules if "." not in module), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words", ["", "analyze", "sweep", "compare", "gate", "report", "schema", "presets", "metrics", "lint", "doctor"]
)
def test_help_imports_nothing_heavy(words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, *words.split(), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "Usage" in done.stdout
    parsed_by_typer = {"pydantic"} if words else set()  # it reads the name of a verb with it
    assert set(done.stderr.split()) & HEAVY <= parsed_by_typer


def test_help_takes_little_processor_time(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in opening.CHANGES}

    def spent(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True, cwd=tmp_path, env=plain)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    rounds = [(spent("-c", COMMAND, "--help"), spent("-c", "")) for _ in range(3)]
    assert min(help for help, _ in rounds) < TIMES_BARE * min(bare for _, bare in rounds)


@pytest.mark.parametrize("name", [opening.PLAIN, opening.COLOURED])
def test_stored_help_is_the_help(name: str) -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))["first_help"](name)
    assert (opening.FOLDER / name).read_text(encoding="utf-8") == made, "run `make docs`"


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["-h"], 0), ([], 2)])
def test_stored_help_is_what_a_pipe_gets(arguments: list[str], code: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in opening.CHANGES}
    environment["PYTHONUTF8"] = "1"
    command = [sys.executable, "-c", COMMAND, *arguments]
    stored, made = (
        subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment | more)
        for more in ({}, {"TERMINAL_WIDTH": "80"})
    )
    assert stored.stdout == made.stdout
    assert stored.returncode == made.returncode == code
    assert stored.stderr == made.stderr == b""
