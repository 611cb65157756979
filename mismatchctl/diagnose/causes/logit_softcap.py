"""Logits are bounded by a soft cap on one side."""

from __future__ import annotations

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import fact
from mismatchctl.diagnose.tempering import tempering


def _test(case: Case) -> Detection | None:
    if {"logit_penalty", "logit_bias", "truncated_sampling"} & {*case.explained} or case.reshaped:
        return None
    found = tempering(case)
    if found is None or not found.bounded or not found.sure:
        return None
    side = "rollout" if found.likely > 0 else "trainer"
    why = (
        "no temperature fits all contexts" if found.refuted else "unlikely tokens keep their distances from each other"
    )
    return Detection(
        "medium",
        f"likely tokens all lose on the side of the {side} and unlikely ones gain, as at another temperature, but "
        f"{why}: large logits are bounded there, and not on the other side",
        evidence=(
            fact(
                "steepness",
                found.steepness,
                "how unlikely tokens are scaled against each other: 1 for a temperature, 0 for a bound",
            ),
            fact("steepness_error", found.steepness_error, "its standard error"),
            fact(
                "worst_context_z",
                found.misfit_z,
                "E[ratio] - 1 in standard errors where it is largest, at the best temperature: 0 for a temperature",
            ),
            fact("likely", found.likely, "coherence of log ratios of tokens above 0.6; 0 for noise, +-1 all one way"),
            fact("unlikely", found.unlikely, "the same for unlikely tokens"),
        ),
        where={"tokens": "all", "side": side},
        rivals={
            "temperature": "the sampling temperature of both sides",
            "weights_differ": "checksums of the weights: a sharper policy looks similar",
        },
        leaves=case.relabelled(reshaped=True),
        everywhere=True,
    )


CAUSE = Cause(
    id="logit_softcap",
    title="Logits are capped on one side",
    shows="As a temperature, but unlikely tokens are not scaled against each other: only the largest logits lose.",
    test=_test,
    advice="Compare final_logit_softcapping (Gemma 2: 30) and attention softcapping of both sides: kernels and "
    "engines that do not know them leave them out in silence.",
    pointless="importance weights: they would train the model without its cap",
)
