"""Help answers at once: nothing heavy is imported before a verb does its work."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"numpy", "pyarrow", "pydantic", "torch", "polars", "matplotlib", "jinja2", "yaml"}
TIMES_BARE = 40
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
    "words", ["", "analyze", "sweep", "compare", "gate", "report", "schema", "presets", "metrics", "lint"]
)
def test_help_imports_nothing_heavy(words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, *words.split(), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "Usage" in done.stdout
    parsed_by_typer = {"pydantic"} if words else set()  # it reads the name of a verb with it
    assert set(done.stderr.split()) & HEAVY <= parsed_by_typer


def test_help_takes_little_processor_time(tmp_path: Path) -> None:
    def spent(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True, cwd=tmp_path, env=os.environ)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    rounds = [(spent("-m", "mismatchctl", "--help"), spent("-c", "")) for _ in range(3)]
    assert min(help for help, _ in rounds) < TIMES_BARE * min(bare for _, bare in rounds)
