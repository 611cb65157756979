"""Only files that mismatchctl wrote are replaced without `--force`."""

from pathlib import Path

import polars as pl
import pytest

from mismatchctl.io.files import is_own_output
from mismatchctl.report.figures.matplotlib_backend import figure_content
from mismatchctl.report.figures.runs import run_figures
from tests.cli.command import run
from tests.factories.dumps import write_dump
from tests.factories.results import make_result

KINDS = {
    "r.json": ["analyze", "dump", "-o"],
    "r.html": ["analyze", "dump", "--html"],
    "q.parquet": ["analyze", "dump", "--sequences"],
    "d.json": ["diagnose", "dump", "-o"],
    "a.json": ["advise", "dump", "-o"],
    "s.json": ["sweep", "dump", "--geo", "1.01,1.02", "-o"],
    "s.csv": ["sweep", "dump", "--geo", "1.01,1.02", "-o"],
    "s.parquet": ["sweep", "dump", "--geo", "1.01,1.02", "-o"],
    "j.xml": ["gate", "dump", "--rule", "k3:max=9", "--on-undecided", "pass", "--junit"],
    "g.md": ["gate", "dump", "--rule", "k3:max=9", "--on-undecided", "pass", "--markdown"],
    "c.parquet": ["convert", "dump"],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_dump(tmp_path / "dump")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_only_files_of_the_tool_are_overwritten(here: Path, name: str) -> None:
    words = [*KINDS[name], name]
    for _ in range(2):
        run(*words, code=0)
    (here / name).write_text('{"precious": "mismatchctl"}\n')
    refused = run(*words)
    assert (refused.exit_code, "--force" in refused.stderr) == (2, True), refused.output
    assert (here / name).read_text() == '{"precious": "mismatchctl"}\n'


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_figures_are_recognized_as_own_output(tmp_path: Path, kind: str) -> None:
    figure = run_figures(make_result().runs["run-a"])["trends"][0]
    place = tmp_path / f"a.{kind}"
    place.write_bytes(figure_content(figure, kind))
    assert is_own_output(place)


@pytest.mark.parametrize(
    "content",
    [
        b"<html>mismatchctl",
        b"%PDF-1.4 mismatchctl",
        b"PAR1PAR1",
        b"\x89PNG\r\n\x1a\n",
        b"a,b\n",
        b"# notes on mismatchctl",
    ],
)
def test_other_files_are_not_recognized_as_own_output(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    assert not is_own_output(tmp_path / "x")
    (tmp_path / "p.parquet").unlink(missing_ok=True)
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "p.parquet")
    assert not is_own_output(tmp_path / "p.parquet")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["sweep", "dump", "--geo", "1.001,1.01"], "geo-gates.0.keep-rejected"),
        (["compare", "dump", "dump"], "k3_by_position"),
    ],
)
def test_every_command_with_figures_writes_them(here: Path, words: list[str], name: str) -> None:
    run(*words, "--figures", "figures", "-q", code=0)
    held = {place.name: place.read_text() for place in (here / "figures").iterdir()}
    assert f"{name}.svg" in held and len(held) == 2 * sum(place.endswith(".svg") for place in held) + 1
    captions = held.pop("captions.md")
    assert all(f"({place})" in captions for place in held)


def test_figures_are_overwritten_in_their_folder(here: Path) -> None:
    kind, words = "svg", ["analyze", "dump", "-c", "token_tis", "--figures", "figures", "-q"]
    run(*words, code=0)
    held = {place.name: place.read_bytes() for place in (here / "figures").iterdir()}
    assert {"k3." + kind, "k3.csv", "k3_by_position.csv", "captions.md"} <= held.keys()
    assert held["k3.csv"].startswith(b"step,K3 (nats/token),")
    run(*words, code=0)
    assert {place.name: place.read_bytes() for place in (here / "figures").iterdir()} == held
    (here / "figures" / f"k3.{kind}").write_text("mine")
    refused = run(*words)
    assert (refused.exit_code, "--force" in refused.stderr) == (2, True)
    assert (here / "figures" / "k3.csv").read_bytes() == held["k3.csv"]


def test_baselines_are_never_overwritten_as_own_output(here: Path) -> None:
    saved = ["gate", "dump", "--rule", "k3:max=9", "--save-baseline", "base.json", "--accept"]
    run(*saved, code=0)
    assert not is_own_output(Path("base.json"))
    run("analyze", "dump", "-o", "base.json", code=2)
