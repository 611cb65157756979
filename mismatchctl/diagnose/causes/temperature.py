"""Sampled at one temperature, recomputed at another."""

from __future__ import annotations

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.distributions import COLUMNS
from mismatchctl.diagnose.measures import between, fact
from mismatchctl.diagnose.tempering import Tempering, tempering
from mismatchctl.result import Fact


def _test(case: Case) -> Detection | None:
    found = None if {"logit_penalty", "logit_bias"} & {*case.explained} else tempering(case)
    truncated = "truncated_sampling" in case.explained
    if found is None or (found.likelier == "train" and not truncated) or not (found.scaled or truncated):
        return None
    told = found.likelier == "rollout" and not truncated
    rivals = (
        {} if told else {"raw_logprobs": "the engine's logprobs mode, or more tokens: E[ratio] is 1 for a temperature"}
    )
    steep = truncated or found.plainly_scaled
    if not steep:
        rivals["logit_softcap"] = "final_logit_softcapping of both configurations: bounded logits look similar"
    if not found.sure:
        rivals["stale_policy"] = "rollout_version and train_version: a policy that became sharper looks similar"
    return Detection(
        "high" if (found.sure and steep and (told or found.listed)) or truncated else "medium",
        f"the rollout is at temperature {found.temperature:.4g} {between(found.interval)}of the "
        f"trainer's: likely tokens all {'lose' if found.likely < 0 else 'gain'} in the trainer and unlikely ones all "
        f"{'gain' if found.likely < 0 else 'lose'}",
        evidence=(
            fact("temperature", found.temperature, "of the rollout relative to the trainer", interval=found.interval),
            fact(
                "steepness",
                found.steepness,
                "how unlikely tokens are scaled against each other: 1 for a temperature, 0 for a bound or a shift",
                against=not steep,
            ),
            *_fits(found),
            fact("likely", found.likely, "coherence of log ratios of tokens above 0.6; 0 for noise, +-1 all one way"),
            fact("unlikely", found.unlikely, "the same for unlikely tokens; a temperature turns the sign"),
            fact(
                "ratio_mean_minus_one",
                found.excess,
                "E[ratio] - 1: 0 where the rollout column is what sampled",
                against=not told,
            ),
            fact(
                "inverse_ratio_mean_minus_one",
                found.inverse_excess,
                "E[1 / ratio] - 1: 0 where the trainer's column is what sampled",
            ),
        ),
        rivals=rivals,
        leaves=case.relabelled(reshaped=True),
        everywhere=True,
    )


def _fits(found: Tempering) -> list[Fact]:
    """Whether one temperature is right for every context, where that was asked."""
    if not found.misfit_z:
        return []
    meaning = "E[ratio] - 1 in standard errors in the contexts where it is largest: a temperature leaves 0 in all"
    return [fact("worst_context_z", found.misfit_z, meaning, against=found.refuted)]


CAUSE = Cause(
    columns=COLUMNS,
    id="temperature",
    title="Temperature on one side only",
    shows="Likely tokens all move one way, unlikely ones the other; E[ratio] = 1, so the rollout column is what "
    "sampled.",
    test=_test,
    advice="Divide the trainer's logits by the sampling temperature before log_softmax{settings}, or sample at "
    "temperature 1.",
    pointless="importance weights would train the untempered policy on tempered samples, and geometric "
    "rejection drops nearly everything",
)
