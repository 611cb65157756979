"""One worker, rank or data source that differs from the others."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.evidence import LAG
from mismatchctl.diagnose.levels import cells_of, deviations
from mismatchctl.diagnose.measures import fact, listed, loudest, percent

_Z, _SURE, _FACTOR = 5.0, 7.0, 1.25


def _test(case: Case) -> Detection | None:
    columns = dict.fromkeys(name for name, _, _ in case.evidence.cells if name not in ("", LAG, "run", "step"))
    for column in columns:
        found = _of_column(case, column)
        if found is not None:
            return found
    return None


def _of_column(case: Case, column: str) -> Detection | None:
    rows = deviations(cells_of(case, column))
    high = [row for row in rows if row.z > _Z and row.difference > math.log(_FACTOR)]
    if not high or len(high) > len(rows) / 2 or len(rows) < 2:
        return None
    worst = high[0]
    names = [row.value for row in high]
    mine = np.array([value in names for value in case.column(column).tolist()], np.bool_)
    tokens = mine[case.sequence]
    others = [row for row in rows if row not in high]
    return Detection(
        "high" if worst.z > _SURE else "medium",
        f"{column} {listed(names)} differs {math.exp(worst.difference):.3g} times as much from the trainer as the "
        "others of the same steps: its weights or settings are its own",
        share=case.share(tokens),
        evidence=(
            fact(
                "factor", math.exp(worst.difference), "its level of |log ratio| over that of the others, geometric mean"
            ),
            fact("z", worst.z, "the difference in standard errors, from the scatter between sequences"),
            fact("sequences", sum(row.sequences for row in high), f"sequences of {column} {listed(names)}"),
            fact(
                "others_z",
                max((abs(row.z) for row in others), default=0.0),
                "the largest |z| among the others, which compares them with all the rest",
                against=True,
            ),
        ),
        where={column: listed(names), "sequences": percent(float(mine.mean()))},
        examples=loudest(case, mine),
        rivals=_rivals(case, column),
        leaves=case.without(tokens).relabelled(left_out=case.left_out | {column: frozenset(names)}),
    )


def _rivals(case: Case, column: str) -> dict[str, str]:
    if len({value for name, _, value in case.evidence.cells if name == LAG}) > 1:
        return {}
    return {"quantized_rollout": f"the weight version and the settings (dtype, kernels, cache) that {column} reports"}


CAUSE = Cause(
    id="stale_worker",
    title="One worker differs from the others",
    shows="The level of one value of a column stands out from the others of the same steps.",
    test=_test,
    advice="Look at that worker's log: a weight update that timed out, another engine version, dtype or GPU. Compare "
    "weight checksums after a sync (SGLang /get_weights_by_name, vLLM collective_rpc), and restart it. Where all "
    "engines of a step are updated at once, one that missed NCCL's broadcast stays behind without an error{settings}.",
    pointless="thresholds for the whole batch: they would reject this worker's data and hide that it is broken",
    columns=("worker",),
)
