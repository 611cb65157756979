"""`mismatchctl gate`: exit codes, written files, and the shell code in docs/guides/ci.md."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import xmlschema
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatchctl.api.gate.verdict import Check, Verdict, format_apart
from mismatchctl.recorder.recorder import Recorder
from mismatchctl.report.markdown import junit_xml, workflow_commands
from mismatchctl.report.markdown import render_markdown as as_markdown
from mismatchctl.report.pages.gate import document
from tests.cli import command
from tests.paths import FIXTURES, ROOT

HOSTILE = "a\n::error::b|`<script>alert(1)</script>`\x1b[31m"


run = partial(command.run, GITHUB_ACTIONS="", GITHUB_STEP_SUMMARY="")


def write_dump(folder: Path, *, noise: float, seed: int, prompts: int = 16, dtype: type = np.float64) -> Path:
    rng = np.random.default_rng(seed)
    with Recorder(folder) as recorder:
        for step in range(2):
            rollout = [-rng.exponential(1.0, 30) for _ in range(2 * prompts)]
            train = [np.minimum(x + rng.normal(0, noise, len(x)), 0).astype(dtype) for x in rollout]
            recorder.write(
                step=step, rollout_log_probs=rollout, train_log_probs=train, prompt_id=np.arange(2 * prompts) // 2,
                worker=np.arange(2 * prompts) % 2,
            )  # fmt: skip
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("data", ["dense", "moe"])
def test_dumps_pass_against_their_own_result(data: str, tmp_path: Path) -> None:
    """The rounding in a saved Result must not make the verdict undecided."""
    dump, saved = ROOT / "sample_data" / data, tmp_path / "saved.json"
    run("analyze", dump, "-q", "-c", "none", "-o", saved, code=0)
    rules = ["k3:increase=0%", "abs_diff_mean:increase=0%", "ppl_ratio:increase=0%", "ess_sequence:decrease=0%"]
    for judged in (dump, saved):
        done = run("gate", judged, "--baseline", saved, *(word for rule in rules for word in ("--rule", rule)))
        assert done.exit_code == 0 and "a few tokens alone" not in done.stdout, done.stdout


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("gate")
    found = {
        "good": write_dump(home / "good", noise=0.05, seed=0),
        "same": write_dump(home / "same", noise=0.05, seed=1),
        "worse": write_dump(home / "worse", noise=0.1, seed=2),
        "tiny": write_dump(home / "tiny", noise=0.1, seed=2, prompts=3),
        "equal": write_dump(home / "equal", noise=0.0, seed=3),
        "baseline": home / "baseline.json",
        "result": home / "result.json",
        "empty": home / "empty",
    }
    found["empty"].mkdir()
    run("gate", found["good"], "--rule", "k3", "--rule", "k3:increase=30%,per=worker",
               "--save-baseline", found["baseline"], "--accept", "-q", code=0)  # fmt: skip
    run("analyze", found["worse"], "-o", found["result"], "-q", code=0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("{same} --baseline {baseline}", 0),
        ("{worse} --baseline {baseline}", 3),
        ("{result} --baseline {baseline}", 3),
        ("{result} --baseline {result}", 0),
        ("{worse} --baseline {baseline} --on-undecided pass", 3),
        ("{tiny} --baseline {baseline}", 4),
        ("{tiny} --baseline {baseline} --on-undecided fail", 4),
        ("{tiny} --baseline {baseline} --on-undecided warn", 0),
        ("{tiny} --baseline {baseline} --on-undecided pass", 0),
        ("{same}", 4),
        ("{same} --rule k3:max=0.1", 0),
        ("{same} --rule k3:max=1e-6", 3),
        ("{worse} --baseline {baseline} --rule k3:increase=1000%", 0),
        ("{worse} --baseline {baseline} --rule k3:increase=30%,per=worker", 3),
        ("{same} --baseline {baseline} --rule k3:increase=30%,per=worker", 0),
        ("{result} --baseline {baseline} --rule k3:increase=30%,per=worker", 4),
        ("{result} --baseline {baseline} --rule k3:increase=30%,per=step", 3),
        ("{worse} --rule rejected_tokens:correction=geo_rs,max=1%", 3),
        ("{result} --rule rejected_tokens:correction=geo_rs,max=1%", 4),
        ("{same} --baseline {baseline} --rule k3:sequences=1000", 4),
        ("{equal} --expect-bitwise", 0),
        ("{same} --expect-bitwise", 3),
        ("{equal} --baseline {baseline}", 3),
        ("{equal} --rule k3:min=1e-12", 3),
        ("{same} --plan 20%", 0),
        ("{same} --plan much", 2),
        ("{same} --plan 20% --junit new.xml", 2),
        ("{result} --correction none", 2),
        ("{same} --rule k3:maxx=1", 2),
        ("{same} --rule loss:correction=nonsense,max=1", 2),
        ("{result} --rule kept_tokens:correction=nonsense,max=1", 2),
        ("{same} --accept", 2),
        ("{same} --json --markdown -", 2),
        ("{result} {same}", 2),
        ("{same} --junit {baseline}", 2),
        ("{same} --baseline absent.json", 4),
        ("{same} --baseline {empty}", 4),
        ("{empty}", 4),
        ("absent.json", 4),
        ("", 2),
    ],
)
def test_verdicts_have_their_exit_codes(places: dict[str, Path], words: str, code: int) -> None:
    done = run("gate", *(word.format(**places) for word in words.split()), code=code)
    if code == 2:
        assert done.stdout == ""
    assert "Traceback" not in done.output


def test_verdicts_are_explained_in_sentences(places: dict[str, Path]) -> None:
    done = run("gate", places["worse"], "--baseline", places["baseline"], "--rule", "k3:increase=25%")
    assert re.match(r"FAIL   K3 is 3\.\d\dx the baseline \(limit 25% above\)\n", done.stdout)
    assert re.search(r"K3 within 25% of baseline +failed +0\.00\d+ +0\.00\d+ +0\.00\d+\n", done.stdout)
    assert " prompts, the same as in the baseline" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Details: -v   Next: mismatchctl diagnose ")
    full = run("gate", places["worse"], "--baseline", places["baseline"], "--rule", "k3:increase=25%", "-v").stdout
    assert full.splitlines()[0] == done.stdout.splitlines()[0]
    passed = run("gate", places["worse"], "--baseline", places["baseline"], "--rule", "k3:increase=900%", "-v").stdout
    assert "in at least 4 of 5 dumps" in " ".join(passed.split())
    assert re.search(
        r"K3 = 0\.00\d+ nats/token \(limit 0\.00\d+, 25% above the baseline's 0\.00\d+\)", " ".join(full.split())
    )
    assert run("gate", places["worse"], "--baseline", places["baseline"], "--quiet").output == ""
    narrow = run("gate", places["worse"], "--baseline", places["baseline"], COLUMNS="60").stdout.splitlines()
    assert max(map(len, narrow[:-1])) <= 60 and "Next: mismatchctl diagnose" in narrow[-1]


def test_json_is_strict_and_the_only_output(places: dict[str, Path]) -> None:
    done = run("gate", places["worse"], "--baseline", places["baseline"], "--json")
    found = Verdict.model_validate(json.loads(done.stdout, parse_constant=pytest.fail))
    assert (found.outcome, done.exit_code) == ("failed", 3)


def test_only_passed_or_accepted_results_become_baselines(places: dict[str, Path], tmp_path: Path) -> None:
    place = tmp_path / "next.json"
    refused = run("gate", places["worse"], "--baseline", places["baseline"], "--save-baseline", place)
    assert (refused.exit_code, place.exists()) == (3, False)
    assert "not written" in refused.stderr
    run("gate", places["same"], "--baseline", places["baseline"], "--save-baseline", place, code=0)
    first = place.read_bytes()
    assert json.loads(first)["provenance"]["accepted"]["verdict"] == "passed"
    run("gate", places["worse"], "--baseline", place, "--save-baseline", place, "--accept", code=0)
    assert json.loads(place.read_bytes())["provenance"]["accepted"] == {
        "by_hand": True, "rules": ["k3:increase=25%", "bitwise_all:max=0"], "verdict": "failed",
    }  # fmt: skip
    shutil.copytree(places["same"], tmp_path / "same")
    run("gate", tmp_path / "same", "--baseline", places["baseline"], "--save-baseline", place, "--force")
    assert place.read_bytes() == first
    run("report", place, code=0)
    run("gate", places["same"], "--rule", "k3:max=1", "--save-baseline", tmp_path, code=0)
    assert (tmp_path / "0001.json").exists()


def test_first_baselines_are_reported_as_recorded(places: dict[str, Path], tmp_path: Path) -> None:
    done = run("gate", places["same"], "--save-baseline", tmp_path / "first.json", "--accept")
    assert done.exit_code == 0 and "wrote" in done.stderr
    said = " ".join(done.stdout.split())
    assert said.startswith("OK baseline recorded. Commit the file, so that later dumps are compared with it")
    assert (
        "undecided" not in said
        and "K3 within 25% of baseline recorded 0." in said
        and f"--baseline {tmp_path / 'first.json'}" in done.stdout.splitlines()[-1]
    )
    page = run("gate", places["same"], "--save-baseline", tmp_path / "page.json", "--accept", "--markdown", "-").stdout
    assert page.startswith("### mismatchctl gate: baseline recorded") and "**recorded** K3" in page
    assert "🟡" not in page
    written = ["--junit", tmp_path / "j.xml", "--markdown", tmp_path / "m.md", "--json"]
    done = run("gate", places["same"], "--save-baseline", tmp_path / "json.json", "--accept", *written,
               GITHUB_ACTIONS="true")  # fmt: skip
    verdict = json.loads(done.stdout)
    assert verdict["says"] == "baseline recorded. Commit the file, so that later dumps are compared with it"
    assert [check["says"].partition(": ")[2].partition(",")[0] for check in verdict["checks"]] == ["recorded", "passed"]
    assert "::error" not in done.stderr and "::warning" not in done.stderr
    junit = (tmp_path / "j.xml").read_text()
    assert 'failures="0" errors="0"' in junit and "<error" not in junit and "recorded, no baseline existed" in junit
    assert "undecided" not in junit + (tmp_path / "m.md").read_text()
    again = run("gate", places["same"], "--baseline", tmp_path / "first.json",
                "--save-baseline", tmp_path / "next.json", "--accept")  # fmt: skip
    assert again.exit_code == 0 and "saved as" not in again.stdout, "a passed verdict needs no message"


def test_the_accept_option_is_named_once(places: dict[str, Path], tmp_path: Path) -> None:
    """stderr names the option only if the screen does not."""
    open_ = run("gate", places["same"], "--save-baseline", tmp_path / "a.json", code=4)
    assert open_.stderr.endswith("a.json: not written, because the verdict is undecided\n")
    assert "save one with --save-baseline FILE --accept" in open_.stdout
    quiet = run("gate", places["same"], "--save-baseline", tmp_path / "a.json", "-q", code=4)
    assert quiet.stderr.endswith("because the verdict is undecided. Add --accept to save the baseline regardless\n")
    assert not (tmp_path / "a.json").exists()


def test_github_actions_get_annotations_and_a_summary(places: dict[str, Path], tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    failed = run("gate", places["worse"], "--baseline", places["baseline"], **github)
    lines = [line for line in failed.stdout.splitlines() if line.startswith("::")]
    assert len(lines) == 1 and lines[0].startswith(
        "::error title=mismatch%3A K3 within 25%25 of baseline::worse: K3 = "
    )
    written = summary.read_text()
    assert written.startswith("before\n### mismatchctl gate: failed") and "**failed** K3 = " in written
    undecided = run("gate", places["tiny"], "--baseline", places["baseline"], "--quiet", **github)
    assert undecided.stdout.startswith("::warning ")
    passed = run("gate", places["same"], "--baseline", places["baseline"], **github)
    assert "::" not in passed.stdout
    as_json = run("gate", places["worse"], "--baseline", places["baseline"], "--json", **github)
    assert json.loads(as_json.stdout)["outcome"] == "failed"
    assert "::error" in as_json.stderr


def test_junit_is_valid_and_counts(places: dict[str, Path], tmp_path: Path) -> None:
    place = tmp_path / "junit.xml"
    rules = ["--rule", "k3:increase=25%", "--rule", "k3:max=1,per=step", "--rule", "abs_diff_max:increase=5%"]
    run("gate", places["worse"], "--baseline", places["baseline"], *rules, "--junit", place)
    xmlschema.XMLSchema(FIXTURES / "junit.xsd").validate(place)
    root = ElementTree.parse(place).getroot()
    assert [root.get(name) for name in ("tests", "failures", "errors")] == ["4", "1", "1"]
    assert [case.get("name") for case in root.iter("testcase")] == [
        "K3 within 25% of baseline", "K3 at most 1 in step 0", "K3 at most 1 in step 1",
        "abs_diff_max within 5% of baseline",
    ]  # fmt: skip


def test_notes_appear_in_every_report_format(places: dict[str, Path], tmp_path: Path) -> None:
    place, markdown = tmp_path / "junit.xml", tmp_path / "gate.md"
    words = "gate", places["tiny"], "--baseline", places["baseline"], "--max-missing", "100%"
    done = run(*words, "--junit", place, "--markdown", markdown, GITHUB_ACTIONS="true")
    note = "run tiny has 12 sequences, and the baseline has 64"
    assert f"::warning title=mismatch::{note}" in done.stdout.splitlines()
    assert note in markdown.read_text()
    xmlschema.XMLSchema(FIXTURES / "junit.xsd").validate(place)
    first = next(ElementTree.parse(place).getroot().iter("testcase"))
    assert f"warning: {note}" in (first.findtext("system-err") or "").splitlines()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("words", "start"),
    [
        ("{same} --baseline {baseline}", "OK     K3 within 25% of baseline and 1 more check passed"),
        ("{worse} --baseline {baseline}", "FAIL   K3 is 3.79x the baseline (limit 25% above)"),
        ("{tiny} --baseline {baseline}", "CHECK  undecided: "),
        ("{same}", "CHECK  undecided: no baseline: save one"),
        ("{same} --rule k3:max=1e-6", "FAIL   K3 is 0.0013 nats/token (max 1e-6)"),
        ("{worse} --baseline {baseline} --rule k3:increase=5%,per=step --rule k2:max=9,per=step", "FAIL   K3 in step "),
        ("{equal} --baseline {baseline}", "FAIL   all log-probs are bit-identical, as if one column was saved twice"),
        ("{equal} --expect-bitwise", "OK     all log-probs identical"),
        ("{same} --expect-bitwise", "FAIL   not all log-probs are bit-identical: 1,9"),
    ],
)
def test_the_first_screen_answers(places: dict[str, Path], words: str, start: str, width: int) -> None:
    """There are at most 24 lines, and the last line is the next command, which is not wrapped."""
    done = run("gate", *(word.format(**places) for word in words.split()), COLUMNS=str(width))
    lines = done.stdout.splitlines()
    assert lines[0].startswith(start[: width - 8]), lines[0]
    assert len(lines) <= 24 and max(map(len, lines[:-1])) <= width and all(line == line.rstrip() for line in lines)
    assert "Next: mismatchctl" in lines[-1]


def test_hostile_names_stay_text() -> None:
    check = Check(
        rule="k3:max=1", run=HOSTILE, place=f"worker {HOSTILE}", metric="k3", title="K3 KL", unit="nats/token",
        kind="max", value=2.0, limit=1.0, outcome="failed",
    )  # fmt: skip
    verdict = Verdict(outcome="failed", level=0.05, baseline=HOSTILE, checks=[check])
    commands = "\n".join(workflow_commands(verdict))
    assert len(commands.splitlines()) == 1
    markdown = as_markdown(document(verdict))
    assert "<script>" not in markdown and "\x1b" not in markdown
    assert len(markdown.splitlines()) == 5
    xmlschema.XMLSchema(FIXTURES / "junit.xsd").validate(junit_xml(verdict).decode().partition("?>")[2])


@settings(max_examples=100, derandomize=True)
@given(
    st.floats(-1e9, 1e9, allow_subnormal=False),
    st.one_of(st.floats(-1e9, 1e9, allow_subnormal=False), st.floats(-1e-12, 1e-12)),
    st.sampled_from(["nats/token", "fraction", "ratio", "tokens"]),
    st.booleans(),
)
def test_shown_values_do_not_round_across_the_limit(value: float, other: float, unit: str, near: bool) -> None:
    limit = value * (1 + other / 1e9) if near else other
    shown = [float(text.removesuffix("%").replace(",", "")) for text in format_apart(value, limit, unit)]
    scale = 100 if unit == "fraction" else 1
    if scale * value != scale * limit:
        assert (value > limit) == (shown[0] > shown[1])
        assert (value < limit) == (shown[0] < shown[1])
    elif value == limit:
        assert shown[0] == shown[1]


def test_settings_files_set_options_and_rules(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.mismatchctl.gate]\nbaseline = "{places["baseline"]}"\non-undecided = "warn"\n'
        'rule = ["k3:increase=500%", {metric = "k2", max = 0.01}]\n'
    )
    found = json.loads(run("gate", places["worse"], "--json").stdout)
    assert [check["rule"] for check in found["checks"]] == ["k3:increase=500%", "k2:max=0.01"]
    run("gate", places["worse"], "--rule", "k3:increase=10%", code=3)
    (tmp_path / "pyproject.toml").write_text('[tool.mismatchctl.gate]\nrules = ["k3"]\n')
    wrong = run("gate", places["worse"])
    assert wrong.exit_code == 2 and "'rule'" in wrong.stderr
    (tmp_path / "pyproject.toml").write_text('[tool.mismatchctl.gate]\nrule = [{metric = "k3", maxx = 1}]\n')
    wrong = run("gate", places["worse"])
    assert wrong.exit_code == 2 and "'max'" in wrong.stderr


def scripts() -> list[str]:
    """Yield the shell code that calls the gate in docs/guides/ci.md and in the templates."""
    text = (ROOT / "docs/guides/ci.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```yaml\n(.*?)```", text, re.S):
        data = yaml.safe_load(block)
        steps = [step for job in data.get("jobs", {}).values() for step in job["steps"]]
        found += [step["run"] for step in steps if "run" in step]
        found += [line for job in data.values() if isinstance(job, dict) for line in job.get("script", ())]
    found += [
        line[2:]
        for block in re.findall(r"```console\n(.*?)```", text, re.S)
        for line in block.splitlines()
        if line.startswith("$ ") and "dumps-next" not in line
    ]  # test_record_in_ci.py runs this command
    found += re.findall(r"`(mismatchctl gate [^`]+)`", text)
    found += yaml.safe_load((ROOT / "templates" / "mismatch.yml").read_text(encoding="utf-8"))[".mismatch"]["script"]
    return [script for script in found if "mismatchctl gate" in script]


@pytest.mark.process
@pytest.mark.parametrize("script", scripts())
def test_documented_shell_commands_work(script: str, places: dict[str, Path], tmp_path: Path) -> None:
    command = tmp_path / "bin" / "mismatchctl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mismatchctl "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    here = tmp_path / "repository"
    (here / "ci" / "accepted").mkdir(parents=True)
    for name in ("dumps", "probe", "second"):
        shutil.copytree(places["equal" if "bitwise" in script else "good"], here / name)
    for name in ("ci/mismatch.json", "ci/probe.json", "ci/accepted/0001.json", "first.json"):
        shutil.copy(places["baseline"], here / name)
    path = f"{command.parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    environment |= {"MISMATCH_PATH": "dumps/", "MISMATCH_BASELINE": "ci/mismatch.json", "MISMATCH_OPTIONS": ""}
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script], cwd=here, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_plans_within_the_tolerance_name_the_rule(places: dict[str, Path]) -> None:
    """The default rule allows a rise of 25%, so no number of sequences can detect a rise of 20%."""
    reported = run("gate", places["same"], "--plan", "20%", code=0).stdout
    assert "same k3: the rule already allows a rise of 25%" in reported
    assert "--rule k3:increase=10% --plan 20%" in reported
    planned = run("gate", places["same"], "--rule", "k3:increase=10%", "--plan", "20%", code=0).stdout
    assert re.match(
        r"with [\d,]+ sequences in each dump, the gate finds a rise of 20% in at least 4 of 5 cases\n", planned
    )
