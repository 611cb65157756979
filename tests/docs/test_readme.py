"""The README is short, and its two commands for a checkout work."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = [pytest.mark.process, pytest.mark.slow]

README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    for name in ("sample_data", "tests", "Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 700


def test_make_demo_works(workplace: Path) -> None:
    """The test uses the current environment, because `make test` shows the set-up."""
    assert "`make demo`" in README
    environment = BIN.parent
    done = subprocess.run(
        ["make", "demo", f"VENV={environment}", "-o", f"{environment}/.installed"],
        cwd=workplace, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The report is in demo/report.html" in done.stderr
    assert (workplace / "demo" / "report.html").stat().st_size > 10_000


def test_ci_runs_make_test() -> None:
    """`make test` cannot run inside itself, so the test only checks that CI runs it."""
    assert "`make test`" in README
    assert "make test " in (ROOT / ".ci" / "run").read_text()
