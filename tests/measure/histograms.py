"""Compare the histograms of two sums."""

from __future__ import annotations

import numpy as np

from mismatchctl.measure.reduction import Sums


def same_histograms(found: Sums, expected: Sums) -> None:
    for key, sums in expected.cells.items():
        own, other = found.cells[key].pairs["mismatch"].histogram, sums.pairs["mismatch"].histogram
        for name in ("places", "tokens", "bins", "counts", "k3"):
            np.testing.assert_array_equal(getattr(own, name), getattr(other, name))
