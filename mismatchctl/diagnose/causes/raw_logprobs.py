"""The engine reports log-probs of the raw distribution, not of the processed one that it sampled from."""

from __future__ import annotations

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import between, fact
from mismatchctl.diagnose.tempering import tempering


def _test(case: Case) -> Detection | None:
    found = None if {"logit_penalty", "logit_bias"} & {*case.explained} else tempering(case)
    if found is None or found.likelier != "train" or case.reshaped or not found.scaled:
        return None
    ends = None
    if found.interval is not None:
        ends = (1 / max(found.interval[1], 1e-9), 1 / max(found.interval[0], 1e-9))
    return Detection(
        "high" if found.sure and found.plainly_scaled else "medium",
        f"the trainer's log-probs are those that sampled, at temperature {1 / found.temperature:.4g} "
        f"{between(ends)}of the recorded ones: the engine reports log-probs from before its temperature",
        evidence=(
            fact(
                "temperature",
                1 / found.temperature,
                "of the trainer relative to the rollout column",
                interval=ends,
            ),
            fact("ratio_mean_minus_one", found.excess, "E[ratio] - 1: not 0, so the rollout column did not sample"),
            fact(
                "inverse_ratio_mean_minus_one",
                found.inverse_excess,
                "E[1 / ratio] - 1: 0 where the trainer's column sampled",
            ),
            fact("z", found.z, "E[ratio] - 1 in standard errors"),
            fact("inverse_z", found.inverse_z, "E[1 / ratio] - 1 in standard errors"),
        ),
        rivals={
            "temperature": "the engine's logprobs mode; a trainer at the wrong temperature would have E[ratio] = 1"
        },
        leaves=case.relabelled(reshaped=True),
        everywhere=True,
    )


CAUSE = Cause(
    id="raw_logprobs",
    title="Raw log-probs of processed samples",
    shows="As a temperature, but E[1 / ratio] = 1 and E[ratio] is not: the trainer's column is what sampled.",
    test=_test,
    advice="Let the engine report what it sampled from: vLLM logprobs_mode=processed_logprobs (its default, "
    "raw_logprobs, is "
    "from before temperature), SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB. Check after every engine upgrade.",
    pointless="every correction: the denominators of the ratios are not the sampling probabilities",
)
