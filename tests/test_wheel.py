"""`pip install .` gives a tool that works anywhere: the wheel is built, installed in an empty environment, and run."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


def test_wheel_holds_templates_and_license(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "mismatchctl/reports_templates/report.html.j2" in names
    assert "mismatchctl/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "sample_data/", "docs/"))]


def test_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """The environment is empty but for the wheel; what it depends on is lent by this one, as pip would bring it."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    lent = dict(os.environ, PYTHONPATH=packages)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [str(environment / "bin" / "mismatchctl"), "analyze", str(ROOT / "sample_data" / "dense")]
    done = subprocess.run(
        [*command, "--html", "report.html", "--json"],
        cwd=elsewhere,
        env=lent,
        check=True,
        capture_output=True,
    )
    assert b'"k3"' in done.stdout
    assert (elsewhere / "report.html").read_text().lstrip().lower().startswith("<!doctype html>")
    where = subprocess.run(
        [str(python), "-c", "import mismatchctl; print(mismatchctl.__file__)"],
        cwd=elsewhere, env=lent, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert str(environment) in where.stdout
