"""Every number of slime and Miles (conformance/slime/README.md)."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import load_framework
from tests.conformance.compare_slime import FOLDER, PARTS, VERSIONS
from tests.paths import ROOT

pytestmark = pytest.mark.conformance

DOCUMENT = ROOT / "docs/methods/conformance.md"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("impl", VERSIONS)
def test_slime_matches_its_code(impl: str, part: str) -> None:
    tally = PARTS[part](impl)
    assert not tally.differences, f"{len(tally.differences)} of {tally.compared}: " + "\n".join(tally.differences[:20])
    title = load_framework(VERSIONS[impl]).title
    row = next(line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {title} |"))
    assert f" {tally.compared:,} " in row, "docs/methods/conformance.md: run tests/conformance/compare_slime.py"
    if part.startswith("logged"):
        assert int(row.split("|")[-2].replace(",", "")) == _compared(row) - len(tally.last_bit)
    else:
        assert not tally.last_bit


def _compared(row: str) -> int:
    return int(row.split("|")[-3].replace(",", ""))


EARLIER: dict[str, Any] = json.loads((FOLDER / "versions_of_2025.json").read_text())


@pytest.mark.parametrize(
    ("version", "case"), [(version, case) for version, cases in EARLIER["expected"].items() for case in cases]
)
def test_slime_of_2025_matches_its_mis_py(version: str, case: str) -> None:
    rows, own, wanted = EARLIER["rows"], load_framework(f"slime@{version}"), EARLIER["expected"][version][case]
    columns = {"rollout_log_probs": rows["rollout"], "train_log_probs": rows["train"], "loss_masks": rows["mask"]}
    replay = own.replay(pa.table(columns), own.correction(wanted["config"]))
    from_mis = {name: value for name, value in replay.logged.items() if name.startswith("mis_")}
    assert from_mis == pytest.approx(wanted["metrics"], rel=3e-7)
    assert replay.weights is not None
    weights = np.concatenate([row * kept for row, kept in zip(replay.weights, replay.keep, strict=True)])
    assert weights == pytest.approx(np.array(wanted["weights"]), rel=1e-9)
    assert {f"train/{name}" for name in replay.logged} <= {meaning.name for meaning in own.meanings()}


def test_configurations_refused_by_slime_of_2025_are_errors() -> None:
    old = {"mis_level": "token", "mis_mode": "clip", "mis_lower_bound": None, "mis_upper_bound": 2.0}
    with pytest.raises(ConfigError, match="cannot unpack"):
        load_framework("slime@2025-11").correction(old | {"mis_veto_threshold": None})
    both = EARLIER["expected"]["v0.2.0"]["geometric mask"]["config"] | {"use_rs": True}
    with pytest.raises(ConfigError, match="list index out of range"):
        load_framework("slime@v0.2.1").correction(both)
    assert load_framework("slime@2026-01").correction(both).gates
