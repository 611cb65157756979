"""The README's commands work as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from mismatchctl.cli.main import app
from tests.cli.command import run
from tests.paths import ROOT

pytestmark = [pytest.mark.process, pytest.mark.slow]

README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def console_commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").split("  # ")[0].strip() for line in lines if line.startswith("$ ")]


def app_verbs() -> list[str]:
    return list(get_command(app).commands)  # type: ignore[attr-defined]


def test_readme_shows_commands_of_every_verb() -> None:
    shown = {words[1] for words in map(shlex.split, console_commands()) if words[0] == "mismatchctl" and len(words) > 1}
    assert set(app_verbs()) <= shown


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README's relative paths exist and outputs may be left."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("sample_data", "tests", "Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_commands_of_the_tool(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one folder: later ones may use what earlier ones wrote. Those that need no shell share a process."""
    monkeypatch.chdir(workplace)
    environment = dict(os.environ, PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", NO_COLOR="1")
    for command in console_commands():
        words = shlex.split(command)
        if words[0] == "mismatchctl" and not {">", "|", "&&"} & set(words):
            run(*words[1:], code=0, NO_COLOR="1")
        elif words[0] == "mismatchctl":
            done = subprocess.run(command, shell=True, cwd=workplace, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_make_demo(workplace: Path) -> None:
    """With the environment at hand in place of a new one: setting one up is what `make test` itself shows."""
    assert "`make demo`" in README
    environment = BIN.parent
    done = subprocess.run(
        ["make", "demo", f"VENV={environment}", "-o", f"{environment}/.installed"],
        cwd=workplace, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The report is in demo/report.html" in done.stderr
    assert (workplace / "demo" / "report.html").stat().st_size > 10_000


def test_make_test_is_what_ci_runs() -> None:
    """`make test` cannot run inside itself; that CI runs this very target is checked instead."""
    assert "`make test`" in README
    assert "make test " in (ROOT / ".ci" / "run").read_text()
