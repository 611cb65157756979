"""The verb `gate`: did it get worse than the baseline, and may it pass?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from mismatchctl.analyze import analyze
from mismatchctl.correction import Correction
from mismatchctl.dumps import DumpSource
from mismatchctl.engines import Engine
from mismatchctl.errors import ConfigError, DataError, option, wording
from mismatchctl.frameworks import Framework, load, preset
from mismatchctl.gate.baseline import as_baseline, read_history, write_baseline
from mismatchctl.gate.comparable import matching_run
from mismatchctl.gate.judge import LEVEL, AcceptedResults, judge
from mismatchctl.gate.measure import places
from mismatchctl.gate.names import PLAINEST, find_target
from mismatchctl.gate.need import Need, needed
from mismatchctl.gate.rules import (
    BITWISE,
    DEFAULT_RULES,
    TOLERANCE,
    Allowance,
    Rule,
    rules_from_text,
    target_of,
)
from mismatchctl.gate.verdict import Check, Verdict
from mismatchctl.resample import sample_of_run
from mismatchctl.result import Result, is_result, read_result
from mismatchctl.stores import normal, remote

__all__ = [
    "BITWISE",
    "DEFAULT_RULES",
    "LEVEL",
    "TOLERANCE",
    "AcceptedResults",
    "Allowance",
    "Check",
    "Need",
    "Rule",
    "Verdict",
    "as_baseline",
    "judge",
    "open_result",
    "plan",
    "read_against",
    "rules_from_text",
    "write_baseline",
]


IN_MEMORY = "the Result in memory"


def open_result(
    paths: Sequence[DumpSource | Result],
    rules: Sequence[Rule],
    corrections: Sequence[Correction] = (),
    *,
    rename: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
    on_bad: Literal["error", "skip"] = "error",
    micro_batch_size: int | None = None,
) -> Result:
    """The Result to judge: read where one is named, else made of dumps, with all that the rules look at.

    Args:
        paths: one Result, or dumps; told apart by content.
        rules: their columns and corrections are analyzed; a correction that is not given is a preset.
        corrections: further ones, for rules to name.
        rename: canonical column -> name in the dumps.
        progress: called with (tokens read, tokens expected).
        engine: where dumps are read.
        on_bad: whether bad rows and files stop it or are left out and counted.
        micro_batch_size: rows of a step in each micro-batch, where no column names them.

    Raises:
        DataError: what is named cannot be read or used.
        ConfigError: a Result among other paths, or a correction that does not exist.
    """
    dumps: list[DumpSource] = [source for source in paths if not isinstance(source, Result) and not _is_saved(source)]
    if len(dumps) < len(paths):
        given = next(source for source in paths if isinstance(source, Result) or _is_saved(source))
        name = IN_MEMORY if isinstance(given, Result) else given
        if len(paths) > 1:
            raise ConfigError(f"{name}: name one Result, or dumps")
        if corrections or rename:
            unused = f"{option('corrections')} and {option('columns')}"
            raise ConfigError(f"{name}: a Result was analyzed already: leave {unused} out")
        return given if isinstance(given, Result) else read_result(str(given))
    by = dict.fromkeys(rule.per for rule in rules if rule.per not in ("overall", "step"))
    named = {correction.name: correction for correction in corrections}
    for rule in rules:
        if rule.correction is not None and rule.correction not in named:
            named[rule.correction] = preset(rule.correction)
    framework = _logged_by(rules, named)
    return analyze(
        dumps,
        list(named.values()),
        rename=rename,
        by=[*by],
        progress=progress,
        framework=framework,
        every_cluster=True,
        micro_batch_size=micro_batch_size,
        engine=engine,
        on_bad=on_bad,
    )


def _is_saved(source: DumpSource) -> bool:
    return isinstance(source, str) and is_result(source)


def _logged_by(rules: Sequence[Rule], named: dict[str, Correction]) -> Framework | None:
    """The framework whose logged numbers are asked for; the plainest corrections are added where a rule names none.

    Raises:
        ConfigError: there are several.
    """
    found: dict[str, Rule] = {}
    for rule in rules:
        target = find_target(rule.name, rule.framework, named[rule.correction] if rule.correction else None)
        if target.logged_by:
            found.setdefault(target.logged_by, rule)
            if rule.correction is None:
                named.update((name, preset(name)) for name in PLAINEST if name not in named)
    if len(found) > 1:
        one, other = list(found.items())[:2]
        raise ConfigError(
            f"rule {one[1].text} is of {one[0]}, rule {other[1].text} of {other[0]}: one gate replays one framework; "
            f"framework={one[0]} in a rule says whose name is meant"
        )
    return load(next(iter(found))) if found else None


def read_against(
    baseline: str | Path | Result | None,
    history: str | Path | None = None,
    last: int = 10,
    nights: int | None = None,
    *,
    fixed_tokens: bool = False,
) -> AcceptedResults:
    """What to compare with: the last accepted Results of a folder, and after them the baseline, if any is named.

    Args:
        baseline: a Result, or the path of one, also in an object store.
        history: a folder of accepted Results.
        last: how many of them count.
        nights: how many verdicts in a row share the level; with a history, as many as count unless it says so.
        fixed_tokens: whether the same tokens must have been scored again.

    Raises:
        DataError: a file that is no Result, or a folder that holds none that was accepted.
    """
    if baseline is None or isinstance(baseline, Result):
        pass
    elif remote(str(baseline)):
        baseline = normal(str(baseline))
    elif not Path(baseline).exists():
        remedy = wording(
            python="save a Result there with result.save(FILE)",
            command="save the first one with --save-baseline FILE --accept",
        )
        raise DataError("there is no such baseline", file=str(baseline), remedy=remedy)
    accepted = {} if history is None else read_history(Path(history), last)
    if isinstance(baseline, Result):
        accepted[IN_MEMORY] = baseline
        baseline = IN_MEMORY
    elif baseline is not None:
        accepted[str(baseline)] = read_result(baseline)
    name = baseline if baseline is not None else history
    shared = nights or (1 if history is None else last)
    return AcceptedResults(None if name is None else str(name), [*accepted.values()], [*accepted], shared, fixed_tokens)


def plan(
    result: Result, rules: Sequence[Rule], regression: float, against: AcceptedResults, level: float = LEVEL
) -> list[Need]:
    """How many sequences it takes to find a relative rise, for each rule that one can break."""
    found = []
    level /= against.nights * max(sum(len(rule.bounds) for rule in rules) * len(result.runs), 1)
    for rule in rules:
        target = target_of(rule, result)
        if target.logged_by or not target.table.is_resampled or (rule.increase is None and rule.max is None):
            continue
        allowance = rule.increase or Allowance()
        for name, run in result.runs.items():
            matching = matching_run(name, against.results[-1]) if against.results else None
            baseline = None if matching is None else sample_of_run(matching[1])
            for place in list(places(rule, target, run))[:1]:
                found.append(needed(name, target.table, place.sample(), baseline, regression, allowance, level))
    return found
