"""Links, anchors and commands of the pages in docs/."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.main import get_command

from mismatchctl.cli.main import app
from mismatchctl.diagnosis.causes.registry import CAUSES
from tests.cli.command import run
from tests.factories import format_files
from tests.paths import ROOT

DOCS = ROOT / "docs"
OTHERS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*DOCS.rglob("*.md"), *OTHERS))
ELSEWHERE = (
    "s3://",
    "hf://",
    "/shared/",
    "--device cuda",
    "checkpoints/",
    "--replay",
    "--layers",
    "train_data",
    "--join",
    "scored/",
    "dumps-next/",
)
"""Parts of commands that need a network, a cluster, a GPU, a model, a framework's own files, or another page."""
FAILS = {"gate wandb_export.csv": 3, "--expect-bitwise": 3, "per=step,sequences=32": 4}
"""Exit codes of commands that must fail on the sample data."""


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_point_to_files_and_headings(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), target


def test_the_site_lists_every_page() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]  # type: ignore[attr-defined]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def shown(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").split("  # ")[0].strip() for line in lines if line.startswith("$ mismatchctl")]


def commands(page: str) -> list[str]:
    return [line for line in shown(page) if not any(part in line for part in ELSEWHERE)]


WITH_COMMANDS = [page for page in PAGES if "integrations/" not in page and commands(page)]


def test_docs_show_every_command() -> None:
    verbs = {shlex.split(command)[1] for page in PAGES for command in shown(page)}
    assert set(get_command(app).commands) <= verbs  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "sample_data").symlink_to(ROOT / "sample_data")
    (folder / "dumps").symlink_to(ROOT / "sample_data" / "moe")
    rows = format_files.make_rows()
    format_files._jsonl(folder / "dump.jsonl", rows)
    ids = [{"id": row["sequence_id"], "rollout_log_probs": row["rollout_log_probs"]} for row in rows]
    format_files._jsonl(folder / "responses.jsonl", ids)
    padded = format_files._padded(rows)
    trainer = {name: padded[name] for name in ("train_log_probs", "response_mask")}
    np.savez(folder / "trainer.npz", id=[row["sequence_id"] for row in rows], **trainer)
    np.savez(folder / "dump.npz", **padded)
    log = [f"{step},{2e-4 * (100 if step > 20 else 1)},{0.5 + step / 100}" for step in range(40)]
    (folder / "wandb_export.csv").write_text("\n".join(["Step,rollout_corr/k3_kl,reward", *log]) + "\n")
    (folder / "mine.yaml").write_text("name: mine\nweight: {truncate: 3}\n")
    configs = ROOT / "tests/fixtures/framework_configs"
    (folder / "run.sh").write_text((configs / "slime-true-on-policy.sh").read_text())
    (folder / "trainer.yaml").write_text(
        "algorithm:\n  rollout_correction: {rollout_is: token, rollout_is_threshold: 2.0}\n"
    )
    (folder / "ci" / "accepted").mkdir(parents=True)
    run("gate", folder / "dumps", "--save-baseline", folder / "ci" / "mismatch.json", "--accept", code=0)
    (folder / "ci" / "accepted" / "0001.json").write_bytes((folder / "ci" / "mismatch.json").read_bytes())
    (folder / "ok.json").write_bytes((folder / "ci" / "mismatch.json").read_bytes())
    (folder / "config.yaml").write_bytes((folder / "trainer.yaml").read_bytes())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_of_a_page_work(page: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in order in one folder, so later ones can use earlier outputs."""
    monkeypatch.chdir(workplace)
    for command in commands(page):
        words, _, output = command.partition(" > ")
        shutil.rmtree(workplace / "figures", ignore_errors=True)
        done = run(*shlex.split(words)[1:])
        wanted = next((code for part, code in FAILS.items() if part in command), 0)
        assert done.exit_code == wanted, f"{command}: exit code {done.exit_code}\n{done.output}"
        if output:
            (workplace / output).write_text(done.stdout)


def test_the_guide_on_causes_says_more_than_where_to_look() -> None:
    rows = re.findall(
        r"^\| [^|]+<br>`(\w+)` \| [^|]+ \| ([^|]+) \|$", (DOCS / "guides/causes.md").read_text(), re.MULTILINE
    )
    assert {cause.id for cause in CAUSES} == {key for key, _ in rows}
    assert all(len(advice.split()) > 8 for _, advice in rows)
