"""`pip install .` gives a working tool: the wheel is built, installed in an empty environment, and run."""

import email
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.paths import ROOT

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


PIP = (sys.executable, "-m", "pip", "--python")
"""The current pip, which installs into other environments."""
INSTALL = ("install", "--quiet", "--no-compile", "--disable-pip-version-check")


def test_the_wheel_contains_templates_and_license(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "mismatchctl/reports_templates/document.html.j2" in names
    assert "mismatchctl/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "mismatchctl/sample_data/moe/step_00015.parquet" in names
    assert not [name for name in names if name.startswith(("tests/", "sample_data/", "docs/"))]


def test_the_wheel_has_valid_metadata(wheel: Path) -> None:
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], check=True, capture_output=True)
    archive = zipfile.ZipFile(wheel)
    metadata = email.message_from_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))))
    assert {line.split(",")[0] for line in metadata.get_all("Project-URL", [])} >= {"Homepage", "Issues", "Changelog"}
    pythons = {line.rpartition(" ")[2] for line in metadata.get_all("Classifier", []) if ":: Python :: 3." in line}
    assert pythons == {"3.10", "3.11", "3.12", "3.13"}
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert required and not [line for line in required if line.startswith(("torch", "transformers", "ray"))]


def test_the_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """The environment contains only the wheel. Its dependencies come from the current environment."""
    environment = tmp_path / "venv"
    venv.create(environment)
    python = environment / "bin" / "python"
    subprocess.run([*PIP, python, *INSTALL, "--no-deps", "--no-index", wheel], check=True)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    lent = dict(os.environ, PYTHONPATH=packages, COLUMNS="120")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [environment / "bin" / "mismatchctl", "demo"], cwd=elsewhere, env=lent, check=True, capture_output=True
    )
    assert b"FAIL" in done.stdout and b"moe" in done.stdout and b"stale rollout weights" in done.stdout
    assert (elsewhere / "demo/report.html").read_text().lstrip().lower().startswith("<!doctype html>")
    for words in (["init", "verl"], ["init", "ci"]):
        subprocess.run([environment / "bin" / "mismatchctl", *words], cwd=elsewhere, env=lent, check=True)
    assert "def score(" in (elsewhere / "ci/record.py").read_text()
    where = subprocess.run(
        [str(python), "-c", "import mismatchctl; print(mismatchctl.__file__)"],
        cwd=elsewhere, env=lent, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert str(environment) in where.stdout


def test_the_recorder_works_with_the_numpy_and_pyarrow_of_an_image(wheel: Path, tmp_path: Path) -> None:
    """The image has old versions and no other dependency of mismatchctl."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [*PIP, python, *INSTALL, "--only-binary", ":all:"]
    old = ["numpy==1.26.4", "pyarrow==15.0.2", "ml_dtypes==0.4.1"]
    image = subprocess.run([*pip, *old], capture_output=True, text=True)
    if image.returncode:
        pytest.skip(f"no numpy 1.26 and pyarrow 15 to be had: {image.stderr.strip()[-200:]}")
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    script = """if True:
        import ml_dtypes, numpy as np
        from mismatchctl.recorder import Recorder
        with Recorder("dumps", run="old", background=1) as recorder:
            rollout = np.array([[0, -0.5, -1.5], [-2.5, -3.5, 0]], ml_dtypes.bfloat16)
            recorder.write(
                step=1, rollout_log_probs=rollout, train_log_probs=rollout.astype(np.float16),
                response_mask=np.array([[0, 1, 1], [1, 1, 0]]), rollout_experts=np.ones((2, 3, 2, 2), np.int64),
                reward=rollout[:, 1], prompt_id=["a", "b"],
            )
        with Recorder("arrow", format="arrow") as recorder:
            recorder.write(step=1, rollout_log_probs=list(rollout), train_log_probs=list(rollout))
    """
    subprocess.run([python, "-c", script], cwd=tmp_path, check=True)
    table = pq.read_table(tmp_path / "dumps" / "step_00001.parquet")
    assert (
        table["rollout_log_probs"].to_pylist() == table["train_log_probs"].to_pylist() == [[-0.5, -1.5], [-2.5, -3.5]]
    )
    assert table.schema.field("rollout_log_probs").metadata == {b"dtype": b"bfloat16"}
    assert table["reward"].to_pylist() == [-0.5, -3.5]
    assert table["rollout_experts"].to_pylist() == [[[1] * 4] * 2] * 2
    with pa.ipc.open_file(tmp_path / "arrow" / "step_00001.arrow") as reader:
        assert reader.read_all()["train_log_probs"].to_pylist() == [[0, -0.5, -1.5], [-2.5, -3.5, 0]]
    done = subprocess.run(
        [sys.executable, "-m", "mismatchctl", "schema", str(tmp_path / "dumps")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
