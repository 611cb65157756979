"""The two sides see positions or distances differently: noise at the start, growing or setting in with the distance."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case, once
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.numerical_noise import BFLOAT16_NOISE
from mismatchctl.diagnose.levels import as_normal
from mismatchctl.diagnose.measures import calibration, fact, loudest

_FACTOR, _SURE, _Z, _SURE_Z = 2.0, 4.0, 5.0, 8.0
_LONG, _ROWS = 24, 6
_LARGE, _START = 3.0, 4


@once
def rising(case: Case) -> tuple[float, float, tuple[float, float]]:
    """Median difference of the last quarter of responses over that of their first tokens, the z of the rise, and both.

    1 and 0 where there are too few long responses.
    """
    long = case.counts >= _LONG
    share = case.place / np.maximum(case.each(case.counts), 1)
    early, late = (case.doubtful & part for part in ((share < 0.1) | (case.place < _START), share >= 0.75))
    levels = [case.sums(case.loudness * part) / np.maximum(case.sums(part), 1) for part in (early, late)]
    known = long & (case.sums(early) >= 2) & (case.sums(late) >= 2)
    rise = (levels[1] - levels[0])[known]
    if len(rise) < _ROWS:
        return 1.0, 0.0, (0.0, 0.0)
    z = float(rise.mean() / (rise.std(ddof=1) / np.sqrt(len(rise)) + 1e-12))
    size = [float(np.median(np.abs(case.scaled[part & case.each(known)]))) for part in (early, late)]
    return size[1] / max(size[0], 1e-12), as_normal(z, len(rise) - 1), (size[0], size[1])


def _test(case: Case) -> Detection | None:
    if case.reshaped or case.filled or case.spread < _LARGE * BFLOAT16_NOISE:
        return None
    factor, z, size = rising(case)
    if z < _Z or factor < _FACTOR or size[1] / 0.6745 < _LARGE * BFLOAT16_NOISE:
        return None
    _, ratio_z, _, _ = calibration(case)
    return Detection(
        "high" if factor > _SURE and z > _SURE_Z and abs(ratio_z) < 5 else "medium",
        f"the difference grows {factor:.3g}-fold from the first tokens to the last quarter of the responses (from "
        f"{size[0]:.2g} to {size[1]:.2g} in the logits): both sides agree near the start and not far from it, as "
        "where positions or the reach of attention differ",
        evidence=(
            fact("late_over_early", factor, "median difference (in logits) of the last quarter over the first tokens"),
            fact("z", z, "rise of the loudness within responses, in standard errors"),
            fact("late", size[1], f"median difference late; bfloat16 makes less than {BFLOAT16_NOISE:g}"),
        ),
        where={"positions": "late in the response"},
        examples=loudest(case, case.counts >= _LONG, case.means(np.abs(case.scaled))),
        rivals={
            "cache_quantization": "the same prompts with the cache in bfloat16: errors of a cache pile up too",
            "edited_response": "token ids of both sides from the middle of the response on",
        },
        everywhere=True,
    )


CAUSE = Cause(
    id="position_mismatch",
    title="Positions or the reach of attention differ",
    shows="Within responses the difference rises several times from the start to the end, beyond what low precision "
    "makes.",
    test=_test,
    advice="Compare rope_theta, rope scaling (YaRN factor, original_max_position_embeddings), sliding_window and "
    "position_ids of both sides (packed rows restart at 0, left padding does not count), and the attention mask.",
    pointless="importance weights: late tokens of every response would lose theirs",
    in_layers=True,
)
