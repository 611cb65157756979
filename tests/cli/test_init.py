"""`mismatchctl init NAME` prints, inserts and patches a snippet, and checks a dump."""

import re
from pathlib import Path

import pytest
import yaml

from mismatchctl.api.integration import read_integration
from tests.cli.command import run
from tests.paths import ROOT
from tests.recorder.integrations.snippet import blocks
from tests.recorder.test_integrations import FRAMEWORKS

SOURCES = {
    "verl/trainer/ppo/ray_trainer.py": """\
class RayPPOTrainer:
    def fit(self):
        self.global_steps = 0

        while True:
            if use_correction:
                if (
                    rollout_corr_config is not None
                    and "rollout_log_probs" in batch.batch
                ):
                    batch, metrics = compute_rollout_correction_and_add_to_batch(batch, rollout_corr_config)
""",
    "verl/trainer/ppo/v1/trainer_base.py": """\
class PPOTrainer:
    def fit(self):
        self.global_steps = 0

    def _compute_advantage(self, batch, metrics):
        data = tq.kv_batch_get(keys=batch.keys)

        batch = tq.kv_batch_put(keys=batch.keys, fields=output)

        return batch
""",
}
"""Lines of verl around the places of the snippets."""
SCRIPT = """\
from trl import (
    GRPOConfig,
    GRPOTrainer,
)


class Mine(GRPOTrainer):
    pass


trainer = GRPOTrainer(model="x", args=GRPOConfig())
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def lines_of(code: str) -> list[str]:
    return [line.strip() for line in code.splitlines() if line.strip()]


def test_every_framework_has_an_integration() -> None:
    places = yaml.safe_load((ROOT / "docs/integrations/places.yaml").read_text())
    assert set(places) == FRAMEWORKS


@pytest.mark.parametrize("name", sorted(FRAMEWORKS))
def test_printed_lines_match_the_page(name: str) -> None:
    printed = run("init", name, code=0).stdout
    code = [line for line in lines_of(printed) if not re.match(r"# (\d+\. |[A-Z]|uses |[a-z-]+: )", line)]
    pages = [lines_of(block) for block in blocks(name)]
    assert all(line in code for page in pages for line in page)
    assert set(code) == {line for page in pages for line in page}
    assert f"checked with {read_integration(name).tried}" in printed
    assert f"mismatchctl init {name} --check dumps/" in printed


@pytest.mark.parametrize("name", sorted(FRAMEWORKS))
def test_the_release_table_matches_the_integrations(name: str) -> None:
    table = (ROOT / "docs/integrations/README.md").read_text(encoding="utf-8")
    assert read_integration(name).tried in table


def test_framework_names_ignore_spelling() -> None:
    assert read_integration("NeMo_RL").name == "nemo-rl"
    assert "did you mean 'slime'" in run("init", "slim", code=2).stderr


def test_init_finds_file_and_line_of_a_checkout(checkout: Path) -> None:
    printed = run("init", "verl", "--root", checkout, code=0).stdout
    trainer = checkout / "verl/trainer/ppo/ray_trainer.py"
    assert f"{trainer}:3, after `self.global_steps = 0`" in printed
    assert f"{trainer}:7, before `if (`" in printed
    trainer.write_text("class RayPPOTrainer:\n    pass\n")
    assert (
        "the place for this code was not found in this version"
        in run("init", "verl", "--root", checkout, code=0).stdout
    )
    assert "not found here" in run("init", "verl", "--root", checkout / "verl", code=0).stdout


def test_write_patches_once_with_a_backup(checkout: Path) -> None:
    run("init", "verl", "--write", "--root", checkout, code=0)
    patched = {name: (checkout / name).read_text() for name in SOURCES}
    for name, text in SOURCES.items():
        assert (checkout / f"{name}.orig").read_text() == text
        compile(patched[name], name, "exec")
        kept = re.sub(r" *# >>> mismatchctl.*?# <<< mismatchctl init\n", "", patched[name], flags=re.DOTALL)
        assert kept == text
    legacy = patched["verl/trainer/ppo/ray_trainer.py"]
    assert legacy.index("self.recorder.write(") < legacy.index("if (\n")
    assert "                self.recorder.write(" in legacy  # with the indentation of the condition
    again = run("init", "verl", "--write", "--root", checkout, code=0)
    assert "already contain the code" in again.stderr
    assert {name: (checkout / name).read_text() for name in SOURCES} == patched


def test_a_patch_of_an_older_version_is_replaced(checkout: Path) -> None:
    run("init", "verl", "--write", "--root", checkout, code=0)
    path = checkout / "verl/trainer/ppo/ray_trainer.py"
    wanted = path.read_text()
    path.write_text(wanted.replace("step=self.global_steps", "step=0"))
    run("init", "verl", "--write", "--root", checkout, code=0)
    assert path.read_text() == wanted
    assert path.with_name("ray_trainer.py.orig").read_text() == SOURCES["verl/trainer/ppo/ray_trainer.py"]


def test_a_failed_patch_changes_no_file(checkout: Path) -> None:
    broken = checkout / "verl/trainer/ppo/v1/trainer_base.py"
    broken.write_text("class PPOTrainer:\n    pass\n")
    done = run("init", "verl", "--write", "--root", checkout, code=2)
    assert "trainer_base.py: the place for the code was not found: no text matches `^ " in done.stderr
    assert (checkout / "verl/trainer/ppo/ray_trainer.py").read_text() == SOURCES["verl/trainer/ppo/ray_trainer.py"]


def test_scripts_get_and_use_the_subclass(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    script.chmod(0o751)
    (tmp_path / "link.py").symlink_to(script)
    run("init", "trl", "--patch", tmp_path / "link.py", code=0)
    assert (tmp_path / "link.py").is_symlink() and script.stat().st_mode & 0o777 == 0o751
    patched = script.read_bytes().decode()
    assert patched.count("\n") == patched.count("\r\n")
    assert "trainer = RecordingTrainer(model" in patched and "class Mine(GRPOTrainer)" in patched
    assert patched.index("GRPOConfig,") < patched.index("class RecordingTrainer(GRPOTrainer)") < patched.index("Mine")
    run("init", "trl", "--patch", script, code=0)
    assert script.read_bytes().decode() == patched
    assert (tmp_path / "train.py.orig").read_bytes() == SCRIPT.replace("\n", "\r\n").encode()


def test_a_separate_module_is_created(tmp_path: Path) -> None:
    run("init", "slime", "--patch", tmp_path / "record.py", code=0)
    assert blocks("slime")[0] in (tmp_path / "record.py").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["record.py"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("init trl --write", "pass that file with --patch FILE"),
        ("init trl --patch other.py", "the place for the code was not found in this file"),
        ("init trl --patch latin.py", "expected a Python file in UTF-8"),
        ("init trl --patch absent/x.py", "the file does not exist; check the path"),
        ("init trl --gitlab", "only work with: mismatchctl init ci"),
        ("init verl --write --root .", "ray_trainer.py: not found"),
        ("init verl --root absent", "--root absent: the folder does not exist; check the path"),
    ],
)
def test_unpatchable_files_give_one_sentence(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.py").write_text("import trl\n")
    Path("latin.py").write_bytes(b"# \xe9\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = run(*words.split(), code=2)
    assert says in done.stderr and done.stderr.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_check_prints_one_line(tmp_path: Path) -> None:
    dump = ROOT / "sample_data/dense"
    done = run("init", "trl", "--check", dump, code=0)
    assert done.stdout == run("analyze", dump, COLUMNS="300").stdout.splitlines()[0] + "\n"
    assert done.stdout.startswith("FAIL   dense: ") and "stale rollout weights" in done.stdout
    (tmp_path / "step_00001.parquet").write_bytes(b"PAR1")
    done = run("init", "trl", "--check", tmp_path, code=4)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
