"""Every number of ten frameworks (conformance/peers/README.md)."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import load_adapters, load_framework
from tests.conformance.compare_peers import FOLDER, FRAMEWORKS, cases, compare, framework, framework_loss, line, table
from tests.paths import ROOT

pytestmark = pytest.mark.conformance

DOCUMENT = ROOT / "docs/methods/conformance.md"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks_match_their_own_code(name: str) -> None:
    tally = compare(name)
    assert not tally.differences, f"{len(tally.differences)}: " + "\n".join(tally.differences[:20])
    assert line(name, tally) in DOCUMENT.read_text().splitlines(), (
        "docs/methods/conformance.md: run tests/conformance/compare_peers.py"
    )


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_options_are_read_back_as_written(name: str) -> None:
    """The written options are read back as the same rules, with and without the original options."""
    own, written = framework(name), 0
    for _, _, case in cases(name):
        correction = own.correction(case["config"])
        said, unsaid = own.native(correction)
        assert not unsaid and own.correction(said) == correction
        plain = Correction(**{field: getattr(correction, field) for field in Correction.model_fields})
        said, unsaid = own.native(plain)
        if not unsaid:
            written += 1
            again = own.correction(said)
            assert (again.weight, again.gates) == (plain.weight, plain.gates)
    assert written


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_logged_metric_has_a_meaning(name: str) -> None:
    own = framework(name)
    assert own.meanings()
    for _, _, case in list(cases(name))[:3]:
        assert all(finding.consequence for finding in own.lint(case["config"]))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_unknown_options_and_rules_are_reported(name: str) -> None:
    own = framework(name)
    assert own.lint({"no_such_option": 1}) == own.lint({})
    stranger = Correction(gates=(Gate(statistic="train_prob", keep=(0.123, None)),))
    assert own.native(stranger)[1]
    with pytest.raises(ConfigError, match="cannot express this correction"):
        own.replay(table("input_moe.parquet", 0), stranger)


@pytest.mark.parametrize(
    ("name", "native", "said"),
    [
        ("trl", {"mode": "sequence_mask"}, "product"),
        ("trl", {"loss_type": "cispo"}, "epsilon_high itself"),
        ("areal", {"use_decoupled_loss": True}, "no weight corrects"),
        ("areal", {"rejection_sampling": {"metric": "binary_kl"}}, "refuses binary_kl"),
        ("roll", {"loss_agg_mode": "token-mean", "filters": [{"enabled": True}]}, "filters have no effect"),
        ("skyrl", {"off_policy_correction": {"token_mask_is_threshold_low": 0.5}}, "two bounds"),
        ("open-instruct", {"rho_mask_sequence_level": True}, "packed row"),
        ("ms-swift", {"rollout_importance_sampling_mode": "sequence_mask"}, "geometric mean"),
        ("openrlhf@0.11", {"type": "seq-mask-tis"}, "does not clamp"),
        ("nemo-rl", {"loss": {"force_on_policy_ratio": True}}, "all zero"),
        ("prime-rl@2026-10", {"type": "default"}, "Use `type: ipo`"),
    ],
)
def test_lint_reports_each_trap(name: str, native: dict[str, Any], said: str) -> None:
    assert said in " ".join(finding.consequence for finding in load_framework(name).lint(native))


@pytest.mark.parametrize("name", ["verl", "slime", "miles"])
def test_fields_another_framework_lacks_are_refused(name: str) -> None:
    for rules in (
        {"weight": {"truncate": 2.0, "limit": 1.0}},
        {"weight": {"truncate": 2.0}, "gates": [{"keep": [0.5, 2.0], "level": "geometric", "seed": 1}]},
        {"weight": {"truncate": 2.0}, "gates": [{"level": "sequence", "over": "prefix", "keep": [0.5, 2.0]}]},
    ):
        assert "instead" in " ".join(load_framework(name).native(Correction.model_validate(rules))[1])


def test_frameworks_list_names_and_versions() -> None:
    assert {"trl", "ms-swift", "verl"} <= {shelf.name for shelf in load_adapters()}
    assert load_framework("prime-rl").version == "2026-08"
    with pytest.raises(ConfigError, match="did you mean '2026-09'"):
        load_framework("prime-rl@2026-9")
    with pytest.raises(ConfigError, match="did you mean 'ms-swift'"):
        load_framework("ms-swif")


RENAMED: dict[str, Any] = json.loads((FOLDER / "openrlhf_0_11_2.json").read_text())


@pytest.mark.parametrize("case", RENAMED)
def test_renamed_options_of_openrlhf_match_its_code(case: str) -> None:
    """The expected values come from PolicyLoss of OpenRLHF 0.11.2 in float64, on the rows of verl's releases.json."""
    rows = json.loads((FOLDER.parent / "verl" / "releases.json").read_text())["rows"]
    names = {"rollout": "rollout_log_probs", "train": "train_log_probs", "current": "current_log_probs"}
    batch = pa.table({names.get(name, "response_mask" if name == "mask" else name): rows[name] for name in rows})
    wanted, own = RENAMED[case], load_framework("openrlhf@0.11.2")
    correction = own.correction(wanted["config"])
    assert own.replay(batch, correction).logged == pytest.approx(wanted["logged"], rel=1e-6)
    gradient = np.concatenate(framework_loss(own, batch, correction)[1])
    assert gradient == pytest.approx(np.array(wanted["gradient"]), rel=1e-6, abs=1e-9)
    again, unsaid = own.native(own.correction(wanted["config"]))
    assert not unsaid and own.correction(again).gates == own.correction(wanted["config"]).gates
