"""`--help` is fast, because commands import heavy modules only when they run."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mismatchctl.cli.help import read_examples
from mismatchctl.cli.main import COMMANDS
from tests.cli.command import run

HEAVY = {"numpy", "pyarrow", "pydantic", "torch", "polars", "matplotlib", "jinja2", "yaml", "numba"}
OVER_TYPER = 1.5
"""Largest CPU time of `--help`, relative to the `--help` of the smallest typer app."""
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


@pytest.mark.process
@pytest.mark.parametrize("words", ["--help", "-h", *(f"{verb} --help" for verb in COMMANDS)])
def test_help_imports_no_heavy_modules(words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "Usage" in done.stdout
    assert set(done.stderr.split()) & HEAVY == set()


@pytest.mark.process
@pytest.mark.parametrize("words", ["--help", "analyze --help"])
def test_help_costs_little_more_than_typer(words: str, tmp_path: Path) -> None:
    def spent(code: str, *arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True, cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    rounds = [(spent(COMMAND, *words.split()), spent(SMALLEST, "--help")) for _ in range(4)]
    assert min(ours for ours, _ in rounds) < OVER_TYPER * min(typer for _, typer in rounds)


@pytest.mark.process
def test_help_is_light(tmp_path: Path) -> None:
    """Help imports no heavy module and takes less than 0.3 s of processor time."""
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


PAGES = [verb for verb in COMMANDS if verb != "init"]
MOST_FIRST_OPTIONS = 25


def help_page(*words: str, width: int = 80) -> str:
    return run(*words, "--help", code=0, COLUMNS=str(width)).stdout


def test_commands_take_one_line() -> None:
    page = help_page().split("Commands:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in page] == list(COMMANDS)
    assert all(line.split()[1].istitle() and not line.split()[1].endswith("s") for line in page), "a verb comes first"


@pytest.mark.parametrize("verb", PAGES)
def test_help_pages_have_plain_value_names_and_three_examples(verb: str) -> None:
    page = help_page(verb)
    assert "<" not in page and "list[" not in page
    assert max(map(len, page.split("Examples:")[0].splitlines())) <= 80
    examples = page.split("Examples:\n")[1].strip().splitlines()
    assert len(examples) == 3 and all(line.strip().startswith(f"$ mismatchctl {verb}") for line in examples)


def test_analyze_groups_expert_options() -> None:
    first, advanced = help_page("analyze").split("\nAdvanced:\n")
    options = [line for line in first.splitlines() if line.startswith("  -")]
    assert len(options) <= MOST_FIRST_OPTIONS
    assert "--threads N " in advanced and "--html FILE" in first


def test_help_accepts_a_command_name() -> None:
    assert run("help", "sweep").stdout == help_page("sweep", width=200).replace("\r", "")
    assert run("help").stdout == run("--help").stdout
    assert run("help", "swep").exit_code == 2


def test_defaults_are_shown() -> None:
    page = help_page("gate", width=100)
    assert "[default: 0.05]" in page and "[default: 1%]" in page


def test_examples_use_known_options() -> None:
    for name in ("mismatchctl", *COMMANDS):
        lines = read_examples(name)
        assert len(lines) == 3, name
        for line in lines:
            verb, *words = line.split()
            shown = help_page() if verb == "help" else help_page(*([verb, "show"] if words[:1] == ["show"] else [verb]))
            unknown = [word for word in words if word.startswith("-") and len(word) > 1 and word not in shown]
            assert not unknown, (name, line)
