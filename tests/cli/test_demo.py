"""`mismatchctl demo`, and every command if torch is missing or broken."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from tests.cli.command import run
from tests.cli.test_no_network import VERBS, place  # noqa: F401 (a fixture)
from tests.paths import ROOT


def test_demo_prints_the_summary_and_names_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("demo", code=0)
    assert done.stdout.startswith("FAIL   2 of 2 runs need attention\n")
    assert "The report is in demo/report.html" in done.stderr
    assert (tmp_path / "demo/report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    assert set(json.loads((tmp_path / "demo/result.json").read_text())["runs"]) == {"dense", "moe"}
    run("demo", "-q", code=0)  # the command may replace its own output


def test_demo_does_not_overwrite_other_files(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    assert "report.html: this file already exists" in run("demo", "--out", tmp_path, code=2).stderr
    assert (tmp_path / "report.html").read_text() == "mine"


def test_copy_writes_the_runs_of_the_readme(tmp_path: Path) -> None:
    run("demo", "--copy", tmp_path / "sample_data", code=0)
    for name in ("dense", "moe"):
        copied = sorted((tmp_path / "sample_data" / name).iterdir())
        assert [path.read_bytes() for path in copied] == [
            path.read_bytes() for path in sorted((ROOT / "sample_data" / name).glob("*.parquet"))
        ]
    first = tmp_path / "sample_data/dense/step_00000.parquet"
    pq.write_table(pq.read_table(first).slice(0, 1), first)
    mine = first.read_bytes()
    assert "another file has this name" in run("demo", "--copy", tmp_path / "sample_data", code=2).stderr
    assert first.read_bytes() == mine


def test_impossible_output_folders_give_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for flag in ("--out", "--copy"):
        done = run("demo", flag, tmp_path / "file" / "inside", code=2)
        assert done.stderr.count("\n") == 1 and "cannot be created" in done.stderr


def test_samples_are_small(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "samples.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (ROOT / "sample_data").glob("*/*.parquet"):
            archive.write(path)
    assert sum(one.compress_size for one in zipfile.ZipFile(tmp_path / "samples.zip").infolist()) < 1_000_000


HIDE_TORCH = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Hide())
"""
BREAK_TORCH = 'import sys; sys.path.insert(0, "broken")\n'
RUN = """
import json, sys
from tests.cli.command import run
print(json.dumps([[done.exit_code, done.stderr, repr(done.exception)] for done in
    (run(*words.split()) for words in json.loads(sys.argv[1]))]))
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("prepare", [HIDE_TORCH, BREAK_TORCH], ids=["missing", "broken"])
def test_only_two_commands_need_torch(prepare: str, place: Path) -> None:  # noqa: F811
    needing = ["score tiny tokens -o scored", "analyze moe --device cuda"]
    working = ["demo", "analyze padded.safetensors", *(words for verb, words in VERBS.items() if verb != "score")]
    (place / "broken/torch").mkdir(parents=True, exist_ok=True)
    (place / "broken/torch/__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    columns = {name: np.full((2, 3), -0.5, np.float16) for name in ("rollout_log_probs", "train_log_probs")}
    save_file(columns | {"response_mask": np.ones((2, 3), np.int64)}, place / "padded.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", prepare + RUN, json.dumps(needing + working)],
        cwd=place, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    for words, (code, stderr, error) in zip(needing + working, found, strict=True):
        if words in needing:
            assert (code, stderr.count("\n")) == (2, 1) and "torch" in stderr, (words, stderr, error)
        else:
            assert code in (0, 3), (words, stderr, error)
            assert "torch" not in stderr
