"""`doctor`: its stored numbers are right, it finds faults, and it names the origin of each setting."""

import json
from decimal import localcontext
from functools import partial
from pathlib import Path

import pytest

from mismatchctl.api import doctor
from mismatchctl.api.doctor import EXPECTED_VALUES, TEST_CORRECTIONS, TEST_ROWS, Dependency
from tests.cli import command
from tests.oracles import metrics as oracle
from tests.oracles.corrections import apply, correction_truths
from tests.oracles.estimates import CONTEXT

run = partial(command.run, "doctor")


def test_stored_numbers_match_the_oracle() -> None:
    with localcontext(CONTEXT):
        truths = dict(oracle.mismatch(TEST_ROWS))
        for correction in TEST_CORRECTIONS:
            applied = [own for step in (0, 1) for own in apply(correction, [r for r in TEST_ROWS if r["step"] == step])]
            found = correction_truths(correction, TEST_ROWS, applied)
            truths |= {f"{correction.name}.{key}": truth for key, truth in found.items()}
        assert {key: float(truths[key].value) for key in EXPECTED_VALUES} == EXPECTED_VALUES  # type: ignore[arg-type]
    assert 0 < EXPECTED_VALUES["rejected.rejected_sequences"] < 1 and EXPECTED_VALUES["truncated.weight_max"] < 4


@pytest.mark.slow
def test_doctor_passes_on_a_working_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("--json", code=0)
    reported = json.loads(done.stdout)
    assert reported["sound"] and reported["settings"] == reported["unread_variables"] == []
    assert {check["part"] for check in reported["self_test"]} >= {"from a file to a Result", "compiled loops"}
    assert all(check["passed"] and check["found"] is not None for check in reported["self_test"])
    assert {"numpy", "polars", "torch", "ray"} <= {package["name"] for package in reported["dependencies"]}
    assert reported["machine"]["threads"] >= 1 and reported["machine"]["memory"] > 1e8
    assert set(reported["machine"]) >= {"version", "python", "platform", "devices", "memory_limit"}
    plain = run("-v", code=0)
    for word in ("numpy", "threads", "memory", "numbers are right"):
        assert word in plain.stdout


def test_settings_are_shown_with_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "run_self_test", list)
    (tmp_path / "mismatchctl.toml").write_text("[analyze]\nby = ['worker']\nthreads = 3\n")
    words = {"MISMATCHCTL_ANALYZE_THREADS": "2", "MISMATCHCTL_ANALYSE_BY": "x"}
    reported = json.loads(run("--json", **words).stdout)
    found = {(own["verb"], own["flag"]): (own["value"], own["where"]) for own in reported["settings"]}
    assert found == {
        ("analyze", "by"): (["worker"], f"{tmp_path}/mismatchctl.toml: analyze.by"),
        ("analyze", "threads"): ("2", "MISMATCHCTL_ANALYZE_THREADS"),  # over the file
    }
    assert reported["unread_variables"] == ["MISMATCHCTL_ANALYSE_BY"]
    plain = run(**words).stdout
    assert "analyze --threads" in plain and "from MISMATCHCTL_ANALYZE_THREADS" in plain
    assert "MISMATCHCTL_ANALYSE_BY" in plain and "is ignored, because no command has this option" in plain


def test_wrong_numbers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPECTED_VALUES, "k3", EXPECTED_VALUES["k3"] * (1 + 1e-8))
    done = run(code=3)
    assert f"should be {EXPECTED_VALUES['k3']!r}" in done.stdout and "17 of 18 numbers are right" in done.stdout
    assert "0 of 1 numbers are right" in done.stdout


def test_broken_parts_are_named_and_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("no place for temporary files")

    monkeypatch.setattr(doctor, "analyze", broken)
    done = run()
    assert done.exit_code == 3 and "OSError: no place for temporary files" in done.stdout
    assert "0 of 18 numbers are right" in done.stdout


@pytest.mark.parametrize(
    ("version", "optional", "fits"),
    [("1.26.0", False, True), ("2.0rc1", False, True), ("1.25.9", False, False), (None, False, False),
     (None, True, True), ("1.0", True, False)],
)  # fmt: skip
def test_dependency_versions_are_checked(
    version: str | None, optional: bool, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Dependency("numpy", ">=1.26", version, optional)
    assert package.fits is fits
    monkeypatch.setattr(doctor, "list_dependencies", lambda: [package])
    monkeypatch.setattr(doctor, "run_self_test", list)
    done = run("--json")
    assert done.exit_code == (0 if fits else 3)
    assert json.loads(done.stdout)["dependencies"][0]["fits"] is fits
