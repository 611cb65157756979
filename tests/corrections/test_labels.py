"""Labels of corrections and thresholds."""

from typing import Any

import pytest

from mismatchctl.corrections.labels import correction_label, gate_label, short_number, threshold_label
from mismatchctl.corrections.model import Gate
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.frameworks.registry import find_preset, load_presets


@pytest.mark.parametrize(
    ("correction", "label"),
    [
        ({}, "no correction"),
        ({"weight": {"truncate": 2}}, "token weight ≤ 2"),
        ({"weight": {"clip": [None, 2]}}, "token weight ≤ 2"),
        ({"weight": {"level": "sequence"}}, "sequence weight unbounded"),
        ({"weight": {"clip": [0.5, 1.5], "normalize": "token"}}, "token weight clipped to [0.5, 1.5], normalized"),
        ({"weight": {"zero": [0.5, 2]}}, "token weight 0 outside [0.5, 2]"),
        ({"weight": {"zero": [None, 2]}}, "token weight 0 above 2"),
        ({"gates": [{"level": "geometric", "keep": [0.999, 1.001]}]}, "geometric mean within 0.1%"),
        ({"gates": [{"level": "geometric", "keep": [1 / 1.0184, 1.0184]}]}, "geometric mean within 1.84%"),
        ({"gates": [{"level": "geometric", "keep": [0.99, 1.001]}]}, "geometric mean in [0.99, 1.001]"),
        ({"gates": [{"level": "sequence", "keep": [1 / 13, 13]}]}, "product of ratios within 13x"),
        ({"gates": [{"level": "sequence", "keep": [0, 2]}]}, "product of ratios ≤ 2"),
        ({"gates": [{"level": "min", "keep": [1e-4, None]}]}, "veto: any token ratio < 1e-4"),
        ({"gates": [{"statistic": "k3", "level": "max", "keep": [None, 0.05]}]}, "veto: any token K3 > 0.05"),
        ({"gates": [{"statistic": "k1", "level": "mean", "keep": [-0.01, 0.01]}]}, "mean K1 within ±0.01"),
        (
            {"weight": {"truncate": 2}, "gates": [{"level": "geometric", "keep": [0.999, 1.001]}]},
            "token weight ≤ 2; geometric mean within 0.1%",
        ),
    ],
)
def test_labels_describe_the_correction(correction: dict[str, Any], label: str) -> None:
    assert correction_label(parse_correction(correction)) == label


def test_thresholds_of_sweeps_have_the_label_of_their_rule() -> None:
    geo = find_preset("geo_rs")
    assert threshold_label(geo, "gates.0.keep") == "geometric mean within 0.1%"
    assert threshold_label(geo, "gates.1.keep.0") == "veto: any token ratio < 1e-4"
    assert threshold_label(find_preset("token_is"), "weight.truncate") == "token weight ≤ 2"


def test_different_bounds_near_one_have_different_labels() -> None:
    """A bound of 1.0005 is not shown as 1, and an open bound is visible."""
    assert [short_number(value) for value in (1.0005, 0.99901, 13.0, 1e-4, 10000.0)] == [
        "1.0005", "0.99901", "13", "1e-4", "1e4",
    ]  # fmt: skip
    keep = {"level": "min", "keep": [1e-4, None]}
    assert gate_label(Gate.model_validate(keep | {"inclusive": [False, True]})) == "veto: any token ratio ≤ 1e-4"


def test_no_label_contains_a_yaml_path() -> None:
    for name, preset in load_presets().items():
        label = correction_label(preset.correction)
        assert label and not any(word in label for word in ("gates.", "keep", "truncate", "null")), name
