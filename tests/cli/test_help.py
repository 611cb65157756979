"""Help answers quickly: a command imports its heavy modules when it runs."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mismatchctl.cli.main import COMMANDS

pytestmark = pytest.mark.process

HEAVY = {"numpy", "pyarrow", "pydantic", "torch", "polars", "matplotlib", "jinja2", "yaml", "numba"}
OVER_TYPER = 1.5
"""CPU time of `--help` relative to the smallest typer app's: a ratio, because machines are shared."""
SMALLEST = """
import typer
app = typer.Typer()
@app.command()
def first(number: int = 1) -> None: ...
@app.command()
def second(number: int = 1) -> None: ...
app()
"""
COMMAND = """
import sys
sys.argv = ["mismatchctl", *sys.argv[1:]]
from mismatchctl.__main__ import main
try:
    main()
except SystemExit:
    pass
print(*sorted(module for module in sys.modules if "." not in module), file=sys.stderr)
"""


@pytest.mark.parametrize("words", ["--help", "-h", *(f"{verb} --help" for verb in COMMANDS)])
def test_help_imports_nothing_heavy(words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "Usage" in done.stdout
    assert set(done.stderr.split()) & HEAVY == set()


@pytest.mark.parametrize("words", ["--help", "analyze --help"])
def test_help_takes_little_more_than_typer_itself(words: str, tmp_path: Path) -> None:
    def spent(code: str, *arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True, cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    rounds = [(spent(COMMAND, *words.split()), spent(SMALLEST, "--help")) for _ in range(4)]
    assert min(ours for ours, _ in rounds) < OVER_TYPER * min(typer for _, typer in rounds)


@pytest.mark.process
def test_help_is_light(tmp_path: Path) -> None:
    """Nothing heavy is imported, and help costs less than 0.3 s of processor time."""
    code = (
        "import sys, time, resource\n"
        "sys.argv = ['mismatchctl', '--help']\n"
        "from mismatchctl.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "analyze" in done.stdout
    assert done.stderr.strip() == "[]"
