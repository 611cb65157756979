"""Every number of verl (conformance/verl/README.md)."""

import json
from typing import Any

import pyarrow as pa
import pytest

from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import load_framework
from mismatchctl.frameworks.verl import Verl
from tests.conformance.compare_verl import FOLDER, PARTS, VERSIONS, Aggregation, LossInput, measure_loss
from tests.paths import ROOT

pytestmark = pytest.mark.conformance

DOCUMENT = ROOT / "docs/methods/conformance.md"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_verl_matches_its_code(version: str, part: str) -> None:
    tally = PARTS[part](version)
    assert not tally.differences, f"{len(tally.differences)} of {tally.compared}: " + "\n".join(tally.differences[:20])
    title = load_framework(f"verl@{version}").title
    row = next(line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {title} |"))
    assert f" {tally.compared:,} " in row, "docs/methods/conformance.md: run tests/conformance/compare_verl.py"


RELEASES: dict[str, Any] = json.loads((FOLDER / "releases.json").read_text())


@pytest.mark.parametrize(
    ("release", "case"), [(release, case) for release, cases in RELEASES["expected"].items() for case in cases]
)
def test_verl_releases_match_their_code(release: str, case: str) -> None:
    """The expected values come from the released code on a batch of six sequences."""
    rows, own = RELEASES["rows"], load_framework(f"verl@{release}")
    assert isinstance(own, Verl)
    names = {"rollout": "rollout_log_probs", "train": "old_log_probs", "current": "current_log_probs"}
    table = pa.table({names.get(name, "response_mask" if name == "mask" else name): rows[name] for name in rows})
    kind, option = case.split()
    if kind == "gspo":  # its releases before 0.9.1 ignore loss_agg_mode
        mode = option if release == "0.9.1" else "seq-mean-token-mean"
        clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
        tokens = LossInput.read(own, table, {}, "float64", "train", kind)
        found = measure_loss(tokens, kind, clip, Aggregation(mode, max(map(len, rows["mask"]))), own.about)
    else:
        keys = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.2", "rollout_is": kind}
        replay = own.replay(table, own.correction(keys | {"rollout_is_threshold": option}))
        found = {name.removeprefix("rollout_corr/"): value for name, value in replay.logged.items()}
    wanted = RELEASES["expected"][release][case]
    assert {name: found.get(name) for name in wanted} == pytest.approx(wanted, rel=3e-7, abs=1e-9)


@pytest.mark.parametrize(
    ("word", "release", "note"),
    [("0.9.1", "0.9.1", ""), ("v0.8.0", "0.8.0", "losses"), ("0.9.7", "0.9.1", "2026-09-20")],
)
def test_unknown_verl_releases_resolve_to_the_nearest(word: str, release: str, note: str) -> None:
    found = load_framework(f"verl@{word}")
    assert found.title == f"verl@{release}" and note in found.dated
    with pytest.raises(ConfigError, match=r"verl before 0\.6\.1 does not have a rollout correction"):
        load_framework("verl@0.5.0")


def test_verl_releases_refuse_later_options() -> None:
    icepop = {"rollout_is": "token", "rollout_is_threshold": "0.5_2"}
    assert load_framework("verl@0.8.0").correction(icepop).weight
    with pytest.raises(ConfigError, match=r"0\.7\.1 does not support IcePop"):
        load_framework("verl@0.7.1").correction(icepop)
    rejecting = {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_rs": "token", "rollout_rs_threshold": 2.0}
    assert load_framework("verl@0.7.0").correction(rejecting).gates  # since loss_type, rejection acts in bypass mode
