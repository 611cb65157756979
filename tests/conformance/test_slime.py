"""slime's and Miles' own numbers, all of them: see conformance/slime/README.md."""

from __future__ import annotations

import pytest

from mismatchctl.frameworks.registry import load_framework
from tests.conformance.compare_slime import PARTS, VERSIONS
from tests.paths import ROOT

pytestmark = pytest.mark.conformance

DOCUMENT = ROOT / "docs" / "conformance.md"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("impl", VERSIONS)
def test_slime_at_a_version(impl: str, part: str) -> None:
    tally = PARTS[part](impl)
    assert not tally.differences, f"{len(tally.differences)} of {tally.compared}: " + "\n".join(tally.differences[:20])
    title = load_framework(VERSIONS[impl]).title
    row = next(line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {title} |"))
    assert f" {tally.compared:,} " in row, "docs/conformance.md: run tests/conformance/compare_slime.py"
    if part.startswith("logged"):
        assert int(row.split("|")[-2].replace(",", "")) == _compared(row) - len(tally.last_bit)
    else:
        assert not tally.last_bit


def _compared(row: str) -> int:
    return int(row.split("|")[-3].replace(",", ""))
