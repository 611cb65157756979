"""What advice says in a sentence, and as the fourth answer of a run's story."""

from __future__ import annotations

from collections.abc import Mapping

from mismatchctl.advise.model import Advice, Advised
from mismatchctl.result import Answer, Fact, Result, story_of
from mismatchctl.result.story import Level


def headline(advice: Advice) -> str:
    """The answer in one sentence."""
    until = ""
    if advice.fix_first is not None:
        if not advice.advice:
            return f"fix this first, nothing corrects it: {advice.fix_first.title}"
        until = f"fix this first: {advice.fix_first.title}; until then, "
    if not advice.advice:
        return "nothing can be ranked"
    best = advice.advice[0]
    size = f"at {advice.batch:,} sequences an update"
    if best.name == "none":
        alone = len(advice.front) == 1 + len(advice.yours)
        why = "nothing else is within the limits" if alone else "nothing beats it beyond noise"
        return f"{until}no correction: {why}{'' if alone else f' {size}'}"
    cost = f"rejects {best.rejected_tokens:.1%} of the tokens" if best.rejected_tokens else "rejects nothing"
    gain = f"{best.gain:.0%} less error of the gradient than no correction {size}"
    return "; ".join(filter(None, (f"{until}{best.name}: {gain}", cost, _like_it(advice))))


def called(name: str) -> str:
    """A candidate in a sentence."""
    return "no correction" if name == "none" else name


def _like_it(advice: Advice) -> str:
    """What the first cannot be told from, of all first no correction."""
    ties = sorted((own.name for own in advice.advice[1:] if own.ties), key=lambda name: name != "none")
    more = f" and {len(ties) - 1} more" if len(ties) > 1 else ""
    return f"not told apart from {called(ties[0])}{more}" if ties else ""


def against_yours(own: Advised, best: Advised) -> str:
    """What you have against the first, in one sentence."""
    if own.ties:
        return f"{own.name} cannot be told from {best.name}"
    times = own.mse / best.mse if best.mse else 1.0
    return f"{own.name} has {times:.2g} times the error of the gradient that {best.name} has: {own.why}"


def answer_with(result: Result, found: Mapping[str, Advice]) -> None:
    """Let the advice for each run be the answer to what to do: a correction with its price, or what to fix first."""
    for name, advice in found.items():
        run = result.runs.get(name)
        if run is None:
            continue
        run.story = story_of(run).model_copy()
        run.story.answers = [*run.story.answers[:-1], as_answer(advice)]


def as_answer(advice: Advice) -> Answer:
    """The advice as an answer, with its numbers."""
    if not advice.advice:
        key = "fix_first" if advice.fix_first is not None else "unranked"
        return Answer(question="what to do", key=key, level="bad" if advice.fix_first else "unknown",
                      text=headline(advice))  # fmt: skip
    best = advice.advice[0]
    facts = [
        Fact(name="correction", value=best.name, meaning="what is advised"),
        Fact(name="gain", value=best.gain, meaning="share of the gradient's error that it takes away"),
        Fact(name="rejected_tokens", value=best.rejected_tokens, meaning="its price in tokens"),
        Fact(name="ess", value=best.ess, meaning="effective sample size of the tokens that is left"),
        Fact(name="batch", value=advice.batch, meaning="sequences of one update"),
    ]
    level: Level = "bad" if advice.fix_first else "good" if best.name == "none" else "fair"
    key = "fix" if advice.fix_first else "none" if best.name == "none" else "correct"
    return Answer(question="what to do", key=key, level=level, text=headline(advice), evidence=facts)
