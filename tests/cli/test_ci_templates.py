"""The GitHub Action and the GitLab template: as far as they can be run without the service."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from mismatchctl.api.gate.gate import make_baseline, write_baseline
from mismatchctl.api.gate.judgement import judge
from mismatchctl.api.gate.rules import parse_rules
from mismatchctl.cli.main import app
from tests.factories.cluster_results import noisy, result
from tests.paths import ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


def step(name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in ACTION["runs"]["steps"] if each["name"] == name)
    return found


def run(folder: Path, level: float, **inputs: str) -> tuple[dict[str, str], Path]:
    """What the step `Gate` says of a Result whose K3 is at a level; the baseline's is at 1e-3."""
    rules = parse_rules("k3:increase=25%")
    base = result(noisy(24, 1e-3, 0))
    write_baseline(make_baseline(base, judge(base, rules), rules, by_hand=True), folder / "base.json")
    result(noisy(24, level, 1, first=100)).save(folder / "new result.json".replace(" ", "_"))
    output = folder / "output"
    given = {"PATHS": "new_result.json", "BASELINE": "base.json", "RULES": "", "FIXED_TOKENS": "false"}
    given |= {"ON_UNDECIDED": "fail", "GITHUB_OUTPUT": str(output)} | inputs
    shim = folder / "bin"
    shim.mkdir()
    tool = shim / "mismatchctl"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mismatchctl "$@"\n')
    tool.chmod(0o755)
    (shim / "python").symlink_to(sys.executable)
    environment = os.environ | given | {"PATH": f"{shim}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step("Gate")["run"]]
    subprocess.run(script, cwd=folder, env=environment, check=True, capture_output=True)
    return dict(line.split("=", 1) for line in output.read_text().splitlines()), folder / "mismatch"


@pytest.mark.process
def test_what_fails_is_told_after_everything_is_written(tmp_path: Path) -> None:
    said, written = run(tmp_path, 4e-3, RULES="k3:increase=25%\nk3:max=1\n")
    assert said == {"code": "3", "verdict": "failed"}
    assert sorted(path.name for path in written.iterdir()) == [
        "report.html", "verdict.json", "verdict.md", "verdict.xml",
    ]  # fmt: skip
    assert "k3:max=1" in (written / "verdict.md").read_text()


@pytest.mark.process
def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    said, _ = run(tmp_path, 1e-3, BASELINE="absent.json")
    assert said == {"code": "4", "verdict": "error"}


def test_no_input_is_pasted_into_a_script() -> None:
    for each in ACTION["runs"]["steps"]:
        assert "${{" not in each.get("run", "")
    assert {each.get("shell") for each in ACTION["runs"]["steps"] if "run" in each} == {"bash"}


@pytest.mark.parametrize("path", ["action.yml", "templates/mismatch.yml"])
def test_every_option_exists(path: str) -> None:
    known = {name for each in get_command(app).commands["gate"].params for name in each.opts}  # type: ignore[attr-defined]
    text = (ROOT / path).read_text(encoding="utf-8")
    for option in ("--baseline", "--junit", "--markdown", "--force", "--on-undecided", "--rule", "--fixed-tokens"):
        assert option not in text or option in known
    yaml.safe_load(text)
