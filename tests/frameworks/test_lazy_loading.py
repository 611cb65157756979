"""`lint` imports only the modules that it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from mismatchctl.frameworks.registry import ADAPTER_MODULES

pytestmark = pytest.mark.process

MOST_MODULES = 60
"""Largest number of our modules."""
COMMAND = """
import sys
sys.argv = ["mismatchctl", *sys.argv[1:]]
from mismatchctl.__main__ import main
try:
    main()
except SystemExit:
    pass
print(*sys.modules, file=sys.stderr)
"""
PARSES = """
import sys
import yaml
compose, parsed = yaml.compose, []
yaml.compose = lambda text, loader: parsed.append(text) or compose(text, loader)
from mismatchctl.api.lint import lint
lint(sys.argv[1], framework="verl")
assert parsed.count(open(sys.argv[1]).read()) == 1, parsed
"""
FILES = {
    "verl": "algorithm:\n  rollout_correction:\n    rollout_is: token\n    rollout_is_threshold: 2.0\n",
    "slime": "use_tis: true\ntis_mode: truncate\n",
    "trl": "vllm_importance_sampling_mode: token_mask\n",
    "roll": "train_infer_correction:\n  is_weight: {enabled: true}\n",
}


def imported(code: str, *arguments: object) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


def frameworks_among(modules: set[str]) -> set[str]:
    return {name for name, module in ADAPTER_MODULES.items() if module in modules}


@pytest.mark.parametrize("framework", FILES)
def test_lint_imports_only_its_framework(framework: str, tmp_path: Path) -> None:
    place = tmp_path / "config.yaml"
    place.write_text(FILES[framework])
    modules = imported(COMMAND, "lint", place, "--framework", framework)
    assert frameworks_among(modules) == {framework}
    assert len([name for name in modules if name.partition(".")[0] == "mismatchctl"]) <= MOST_MODULES
    heavy = {"api.advise", "api.analyze", "data", "diagnosis", "measure", "stats"}
    assert not modules & {f"mismatchctl.{name}" for name in heavy}
    assert not modules & {"pyarrow", "polars", "torch", "matplotlib", "numba"}


def test_lint_parses_its_file_once(tmp_path: Path) -> None:
    place = tmp_path / "config.yaml"
    place.write_text(FILES["verl"])
    imported(PARSES, place)
