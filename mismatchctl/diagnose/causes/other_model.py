"""The rollout column is of another model than the one that sampled: a draft model's log-probs, say."""

from __future__ import annotations

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.numerical_noise import UNRELATED
from mismatchctl.diagnose.measures import calibration, coherence, fact, level, related

_NOISE, _Z, _SURE, _ZERO = 0.1, 6.0, 10.0, 4.0
_ONE_WAY = 0.9


def _test(case: Case) -> Detection | None:
    if case.reshaped or case.filled or case.noise < _NOISE or len(case.x) < 500 or related(case) < UNRELATED:
        return None
    if level(case):
        return None
    excess, z, inverse, inverse_z = calibration(case)
    likely, _, unlikely, _ = coherence(case)
    if z < _Z or abs(inverse_z) > _ZERO or (likely > _ONE_WAY and unlikely < -_ONE_WAY):
        return None
    return Detection(
        "high" if z > _SURE and abs(inverse_z) < 0.3 * z else "medium",
        f"the trainer's column is the distribution that sampled (E[1 / ratio] - 1 = {inverse:.2g}), the rollout's is "
        f"not (E[ratio] - 1 = {excess:.2g}): it holds the log-probs of another model, a noise of {case.noise:.2g} in "
        "the logits away",
        evidence=(
            fact("ratio_mean_minus_one", excess, "E[ratio] - 1: 0 where the rollout column sampled"),
            fact("z", z, "the same in standard errors"),
            fact("inverse_ratio_mean_minus_one", inverse, "E[1 / ratio] - 1: 0 where the trainer's column sampled"),
            fact("inverse_z", inverse_z, "the same in standard errors"),
        ),
        rivals={"raw_logprobs": "a logits processor (penalty, bias, softcap) that acts before sampling and not before "
                "recording: the engine's logprobs mode"},
        everywhere=True,
    )  # fmt: skip


CAUSE = Cause(
    id="other_model",
    title="The rollout column is another model's",
    shows="E[1 / ratio] = 1 and E[ratio] is not, and no temperature: the trainer's column sampled, the recorded one "
    "did not.",
    test=_test,
    advice="With speculative decoding, record the target model's log-probs, not the draft's. Otherwise compare the "
    "names of the models behind both columns: a reference or an old policy in the wrong column looks like this.",
    pointless="every correction: the denominators of the ratios are not the sampling probabilities",
)
