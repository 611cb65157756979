"""verl's own numbers, all of them: see conformance/verl/README.md."""

from __future__ import annotations

import pytest

from mismatchctl.frameworks.registry import load_framework
from tests.conformance.compare_verl import PARTS, VERSIONS
from tests.paths import ROOT

pytestmark = pytest.mark.conformance

DOCUMENT = ROOT / "docs" / "conformance.md"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_verl_at_a_version(version: str, part: str) -> None:
    tally = PARTS[part](version)
    assert not tally.differences, f"{len(tally.differences)} of {tally.compared}: " + "\n".join(tally.differences[:20])
    title = load_framework(f"verl@{version}").title
    row = next(line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {title} |"))
    assert f" {tally.compared:,} " in row, "docs/conformance.md: run tests/conformance/compare_verl.py"
