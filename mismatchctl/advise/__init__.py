"""The verb `advise`: which correction at which threshold, or what to fix first, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mismatchctl.advise.candidates import distinct, expressible, usual
from mismatchctl.advise.limits import Limits, parse_fixed
from mismatchctl.advise.model import Advice, Advised, Ahead
from mismatchctl.advise.rank import rank
from mismatchctl.advise.sample import read
from mismatchctl.analyze.diagnose import diagnose
from mismatchctl.correction import Correction, correction_from_mapping
from mismatchctl.dumps import DumpSource
from mismatchctl.frameworks import load
from mismatchctl.predict.batch import batch_rejection
from mismatchctl.predict.length import at_length
from mismatchctl.predict.prediction import Prediction
from mismatchctl.predict.sample import sample_of
from mismatchctl.result.story import is_hopeless, to_fix

__all__ = ["Advice", "Advised", "Ahead", "Limits", "advise", "parse_fixed"]


def advise(
    paths: Sequence[DumpSource],
    *,
    framework: str = "",
    corrections: Sequence[Correction] = (),
    yours: Sequence[Correction] = (),
    batch: int | None = None,
    limits: Limits | None = None,
    rename: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Advice]:
    """Which correction gives the least error of one update's gradient, by run, or what to fix first.

    Args:
        paths: files, folders, globs; each is a run unless a `run` column says otherwise.
        framework: whose corrections and whose syntax; empty: all that is known here.
        corrections: the candidates; empty: what the framework can do, over grids of thresholds.
        yours: what is held against the ranking.
        batch: sequences of one update; None: those of the dump per step.
        limits: what is out of the question.
        rename: canonical column -> name in the files.
        progress: called with (tokens read, tokens expected).

    Raises:
        DataError: a dump that cannot be read or used.
        ConfigError: a framework that does not exist.
    """
    known = load(framework) if framework else None
    candidates = distinct(corrections or (expressible(framework) if framework else usual()))
    fixes = {run: to_fix(found) for run, found in diagnose(paths, rename=rename).runs.items()}
    result = {run: Advice(fix_first=finding) for run, finding in fixes.items() if finding and is_hopeless(finding)}
    if len(result) < len(fixes):
        for run, sample in read(paths, rename, progress).items():
            if run not in result:
                advice = rank(sample, candidates, batch, limits or Limits(), known, yours)
                result[run] = advice.model_copy(update={"fix_first": fixes[run]})
        _look_ahead(result, paths, rename)
    return {run: result[run] for run in fixes}


def _look_ahead(result: Mapping[str, Advice], paths: Sequence[DumpSource], rename: Mapping[str, str] | None) -> None:
    """What each advised correction would reject of the next batch, and at twice the length."""
    named = {own.name: own.correction for advice in result.values() for own in (*advice.advice, *advice.yours)}
    if not named:
        return
    corrections = [correction_from_mapping({**mapping, "name": name}) for name, mapping in named.items()]
    whole = sample_of(paths, corrections, rename=rename)
    for run, advice in result.items():
        sample = whole.of_run(run)
        twice = 2 * round(float(sample.tokens.mean())) if len(sample) else 0
        for own in (*advice.advice, *advice.yours):
            place = list(named).index(own.name)
            own.next_batch = _ahead(batch_rejection(sample, place, advice.batch))
            own.twice_the_length = _ahead(at_length(sample, corrections[place], twice)[0])


def _ahead(prediction: Prediction) -> Ahead:
    return Ahead(value=prediction.value, interval=prediction.interval, status=prediction.status)
