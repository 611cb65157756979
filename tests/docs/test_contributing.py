"""The short recipes of CONTRIBUTING.md work on a copy of the package."""

import json
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
import yaml

from tests.paths import ROOT

METRIC = """
  k3_sequence_mean:
    title: K3 per sequence
    unit: nats
    definition: mean over sequences of the sum of K3
    meaning: The same, for whole responses.
    formula: k3 / sequences
"""


@pytest.mark.process
def test_the_recipe_for_a_metric_works(tmp_path: Path) -> None:
    copytree(ROOT / "mismatchctl", tmp_path / "mismatchctl", ignore=lambda *_: ["__pycache__"])
    registry = tmp_path / "mismatchctl/measure/metrics/metrics.yaml"
    table, rest = registry.read_text().split("\npair:")
    registry.write_text(f"{table}{METRIC}pair:{rest}")
    code = (
        "import json, mismatchctl as mm; r = mm.metrics([[-1.0, -2.0]], [[-1.1, -1.8]]);"
        "print(json.dumps([r['k3_sequence_mean'], r['k3']]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    summed, k3 = json.loads(done.stdout)
    assert abs(summed - 2 * k3) < 1e-12 and k3 > 0


def test_paths_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = {place for place in re.findall(r"`([\w.]+/[\w./-]*)`", text) if "NAME" not in place}
    assert len(named) > 40
    folders = (ROOT, ROOT / "tests", ROOT / "mismatchctl", ROOT / "mismatchctl/measure", ROOT / "mismatchctl/data")
    folders += (ROOT / "mismatchctl/diagnosis", ROOT / "mismatchctl/report")
    assert [place for place in named if not any((folder / place).exists() for folder in folders)] == []


def test_hosted_runner_and_pre_commit_run_the_make_targets() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    steps = [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
    assert "make test" in steps
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    asked = {hook["entry"].removeprefix(".venv/bin/").split()[0] for hook in repo["hooks"]}
    assert {"ruff", "mypy"} <= asked
