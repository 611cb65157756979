"""The snippets of docs/integrations record the right tensors, and no others."""

import importlib
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from mismatchctl.data.problems import Problems
from tests.recorder.integrations import samples, skyrl, slime
from tests.recorder.integrations.canonical import steps, truth
from tests.recorder.integrations.reading import recorded
from tests.recorder.integrations.snippet import PAGES, Case, Snippet, blocks

MODULES = (
    "verl",
    "slime",
    "trl",
    "ms_swift",
    "nemo_rl",
    "openrlhf",
    "areal",
    "prime_rl",
    "skyrl",
    "roll",
    "tinker",
    "open_instruct",
)
CASES: list[Case] = [
    case for name in MODULES for case in importlib.import_module(f"tests.recorder.integrations.{name}").CASES
]
BY_NAME = {case.name: case for case in CASES}
FRAMEWORKS = {
    "verl", "slime", "miles", "trl", "nemo-rl", "openrlhf", "areal", "prime-rl", "skyrl", "roll", "tinker-cookbook",
    "open-instruct", "ms-swift",
}  # fmt: skip
OUTLINE = (
    "Place of the snippet",
    "Snippet",
    "Tensors",
    "Mask",
    "Other columns",
    "Check the dump",
    "Known traps",
)
MOST_LINES, WIDEST = 11, 120


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # snippets record into dumps/


def matches(case: Case) -> bool:
    problems = Problems()
    found = recorded(Path("dumps"), case.columns, problems)
    return found == truth(steps(), case.columns, case.keep)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_snippets_record_the_sampled_and_scored_values(name: str) -> None:
    case = BY_NAME[name]
    case.train(case.snippet, steps())
    assert recorded(Path("dumps"), case.columns) == truth(steps(), case.columns, case.keep)


@pytest.mark.parametrize(("name", "mistake"), [(case.name, mistake[0]) for case in CASES for mistake in case.mistakes])
def test_wrong_snippets_record_wrong_values(name: str, mistake: str) -> None:
    case = BY_NAME[name]
    _, old, new = next(known for known in case.mistakes if known[0] == mistake)
    case.train(case.snippet.changed(old, new), steps())
    assert not matches(case)


@pytest.mark.parametrize("name", [case.name for case in CASES if case.late is not None])
def test_a_snippet_placed_too_late_records_wrong_values(name: str) -> None:
    case = BY_NAME[name]
    assert case.late is not None
    case.late(case.snippet, steps())
    assert not matches(case)


def test_experts_of_nemo_rl_are_recorded_as_documented() -> None:
    case = BY_NAME["nemo-rl"]
    column = 'rollout_experts=train_data["routed_experts"]'
    assert f"`{column}`" in (PAGES / "nemo-rl.md").read_text(encoding="utf-8")
    case.train(case.snippet.changed("reward=rewards", f"reward=rewards, {column}"), steps())
    for row in pq.read_table("dumps").to_pylist():
        flat = [np.ravel(experts).tolist() for experts in row["rollout_experts"]]
        assert flat == [[token, token + 1, token + 2, token + 3] for token in row["token_ids"]]


def test_missing_log_probs_of_skyrl_are_bad_values() -> None:
    case, problems = BY_NAME["skyrl"], Problems()
    skyrl.train(case.snippet, steps(), missing=2)
    found = recorded(Path("dumps"), case.columns, problems)
    expected = truth(steps(), case.columns)
    assert found == [record for row, record in enumerate(expected) if row % 6 != 2]
    assert problems.sequences == 2


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_snippets_read_the_sample_files(name: str) -> None:
    samples.SAMPLES[name](BY_NAME[name].snippet)
    assert recorded(Path("dumps"), ("token_ids",)) == samples.truth()


@pytest.mark.parametrize(("name", "project"), [("slime", "slime_seed"), ("miles", "miles_head")])
def test_snippets_read_data_of_megatron_ranks(name: str, project: str) -> None:
    ranks = samples.megatron_ranks(project)
    run = {"slime": slime.postprocess, "miles": slime.train_actor}[name]
    run(BY_NAME[name].snippet, [(0, ranks)])
    found = recorded(Path("dumps"), ("token_ids",))
    expected = samples.megatron_truth([index for rank in ranks for index in rank["sample_indices"]])
    assert [{"rollout": record["rollout"], "token_ids": record["token_ids"]} for record in found] == expected


def test_every_framework_has_a_page_and_an_index_row() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} - {"README", "releases"} == FRAMEWORKS
    assert {case.page for case in CASES} == FRAMEWORKS
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[[^]]+\]\(([a-z-]+)\.md[^)]*\) \|", index, flags=re.MULTILINE)) == FRAMEWORKS


@pytest.mark.parametrize("page", sorted(FRAMEWORKS))
def test_integration_pages_follow_the_outline(page: str) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^## (.+)$", text, flags=re.MULTILINE)) == OUTLINE
    assert "mismatchctl diagnose dumps/" in text


@pytest.mark.parametrize("page", sorted(FRAMEWORKS))
def test_snippets_are_short_and_covered_by_tests(page: str) -> None:
    assert sorted(case.number for case in CASES if case.page == page) == list(range(len(blocks(page))))
    for code in blocks(page):
        assert len(Snippet(code).lines) <= MOST_LINES
        assert max(map(len, code.splitlines())) <= WIDEST


def test_links_of_integration_pages_exist() -> None:
    for page in PAGES.glob("*.md"):
        links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        assert not [link for link in links if not (PAGES / link).exists()], page.name
