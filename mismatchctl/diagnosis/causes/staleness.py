"""Tests for old model weights: in all rows, in some steps, at some workers, or in the prefix cache of the engine."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints
from mismatchctl.core.formatting import format_label
from mismatchctl.diagnosis.case import BFLOAT16_NOISE, FLOAT32_NOISE, Case, cached_on_case, quantile_bins
from mismatchctl.diagnosis.detection import Detection, format_list, make_fact, percent
from mismatchctl.diagnosis.evidence import LAG_COLUMN, GroupValue, sum_levels, version_lag
from mismatchctl.diagnosis.evidence import LevelSums as AllCells
from mismatchctl.measure.metrics.metric import normal_z
from mismatchctl.measure.sequence_terms import measure_levels
from mismatchctl.results.growth import fit_growth
from mismatchctl.results.model import Confidence

_LAG_MEANING = "train_version minus rollout_version, as recorded"
_LAG_GROWTH = "factor by which |log ratio| grows per version of lag"
_LAG_Z = 4.0


@cached_on_case
def _lag_of_tokens(case: Case) -> Float64s | None:
    """Return the version lag of each token [N], or `None` if it is unknown or constant within every row."""
    own, train = case.rows.extra_columns.get("rollout_version"), case.token_column("train_version")
    if own is None or train is None:
        return None
    lag = train - np.asarray(own, np.float64)[case.index]
    known = np.isfinite(lag)
    low, high = (case.segments.min(np.where(known, lag, np.inf)), case.segments.max(np.where(known, lag, -np.inf)))
    return lag if known.any() and bool(((high > low) & (case.counts > 0)).any()) else None


def keep_first_version(case: Case) -> Case:
    """In each row, keep only the tokens that were sampled with the same model weights as its first token."""
    lag = _lag_of_tokens(case)
    if lag is None:
        return case
    first = lag[np.minimum(case.starts, len(lag) - 1)]
    return case.without(case.marked(lag != case.each(first)))


def _match_lag_of_tokens(case: Case) -> Detection | None:
    """Find responses whose tokens from older weights have a larger mismatch than their other tokens."""
    lag = _lag_of_tokens(case)
    if lag is None or case.reshaped:
        return None
    used = case.doubtful & np.isfinite(lag)
    lag = np.where(used, lag, 0.0)
    slope, error, rows = case.fit_within_rows(lag, used)
    z = normal_z(slope / error, rows - 1) if error > 0 else 0.0
    if z < _LAG_Z:
        return None
    lags = np.unique(lag[used])
    levels = {value: float(np.median(np.abs(case.scaled[used & (lag == value)]))) for value in lags.tolist()}
    mixed = case.segments.max(np.where(used, lag, -np.inf)) > case.segments.min(np.where(used, lag, np.inf))
    sizes = ", ".join(f"{level:.2g} at lag {value:g}" for value, level in sorted(levels.items())[:6])
    return Detection(
        "high",
        f"in {percent(mixed[case.counts > 0].mean())} of the responses, some tokens were sampled with older weights, "
        f"up to {lags[-1]:g} versions behind the trainer. Tokens of older versions differ more than the other tokens "
        f"of the response (median difference in logits: {sizes})",
        evidence=(
            make_fact("version_lag", _format_lags(lags), _LAG_MEANING),
            make_fact("growth", math.exp(slope), f"{_LAG_GROWTH}, within responses"),
            make_fact("growth_z", z, "this growth, in standard errors"),
        ),
        where={"tokens": f"{percent((lag[used] > lags[0]).mean())}, tokens of older versions"},
        everywhere=True,
    )


def detect_stale_policy(case: Case) -> Detection | None:
    by_token = _match_lag_of_tokens(case)
    if by_token is not None:
        return by_token
    recorded, lags = version_lag(case.rows), defaultdict[float, float](float)
    left = set() if recorded is None else set(recorded[case.counts > 0].tolist())
    cells = {key: sums for key, sums in select_cells(case, LAG_COLUMN).items() if key[1] in left}
    for (_, value), sums in cells.items():
        lags[float(value or 0)] += float(sums[0, 0])
    several = len(lags) > 1
    growth, growth_z = fit_slope(cells) if several else (0.0, 0.0)
    untold = ((0.0, 0.0), (0.0, 0.0))  # log ratios show other weights only at equal temperature
    (shared, shared_z), (along, along_z) = untold if case.reshaped else (case.systematic_share, case.drift_correlation)
    grows, idle = growth_z > _LAG_Z, several and growth_z < 2.0
    weights_differ = shared > 0.02 and shared_z > 6
    learning = along > 0.45 and along_z > _LAG_Z
    newest = min([0.0, *lags])  # version counters may start at different numbers
    behind, ahead = {lag: count for lag, count in lags.items() if lag > newest}, newest < 0
    loud = case.noise > BFLOAT16_NOISE
    confidence: Confidence | None = None
    if grows:
        confidence = "high"
    elif idle or ahead:
        confidence = "low" if behind or ahead else None
    elif several:
        confidence = "medium" if loud or weights_differ or learning else "low"
    elif behind and learning:
        confidence = "high"
    elif behind:
        likely = (weights_differ and case.drift_correlation[1] == 0) or (loud and not case.reshaped)
        confidence = "medium" if likely else "low"
    elif learning and weights_differ:
        confidence = "medium"
    if confidence is None or ("weights_never_updated" in case.explained and not grows):
        return None  # there is already a finding for these old weights
    if behind:
        versions = "version" if {*behind} == {1.0} else "versions"
        summary = f"the rollout's weights were {_format_lags(behind)} {versions} older than the trainer's"
        if idle:
            summary += ", but |log ratio| does not grow with the lag"
        elif grows:
            summary += f". |log ratio| grows {math.exp(growth):.3g}x per version"
    elif ahead:
        summary = (
            f"the rollout's version is {-newest:g} ahead of the trainer's version. Either the counters start at "
            "different numbers, or one version is written after the update. There is no sign of older weights"
        )
    else:
        summary = "the two sides have different weights, because the log ratios follow the policy's next update"
        summary += ". The version columns are equal" if lags else ""
    evidence = []
    if lags:
        evidence.append(make_fact("version_lag", _format_lags(lags), _LAG_MEANING, against=not behind))
    if several:
        evidence.append(make_fact("growth", math.exp(growth), _LAG_GROWTH, against=not grows))
        evidence.append(make_fact("growth_z", growth_z, "this growth, in standard errors", against=not grows))
    evidence.append(make_fact("systematic", shared, against=not weights_differ))
    if along_z:
        evidence.append(make_fact("along_learning", along, against=not learning))
    advantages = case.token_column("advantages")
    if advantages is not None and len(case.x):
        z = case.clustered_z(np.clip(case.standard, -4, 4) * np.nan_to_num(advantages))
        meaning = "mean of log ratio times advantage, in standard errors: above 0 if the trainer has newer weights"
        evidence.append(make_fact("advantage_z", z, meaning, against=z < 2))
    rivals = {}
    if not lags:
        rivals["quantized_rollout"] = "record rollout_version and train_version as the two sides report them"
    elif not (learning or grows):
        rivals["numerical_noise"] = "check whether a step with lag 0 has a smaller mismatch"
    elif not grows:
        rivals["quantized_rollout"] = "compare dtype and weight checksums of the engine and the trainer"
    count = int(sum(behind.values()))
    return Detection(
        confidence,
        summary,
        evidence=tuple(evidence),
        where={"sequences": f"{count:,} with older weights"} if count else {},
        rivals=rivals,
        everywhere=confidence != "low",
    )


def _format_lags(lags: Iterable[float]) -> str:
    known = sorted(int(lag) if float(lag).is_integer() else lag for lag in lags)
    return str(known[0]) if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


_PREFIX_START, _PREFIX_MIN_PROMPTS = 24, 8
_PREFIX_MIN_LOUDNESS = math.log(1.4)
"""In affected prompts, the first tokens have a larger mean log mismatch than later tokens, by at least this value."""


def detect_stale_prefix(case: Case) -> Detection | None:
    prompts = case.rows.columns.get("prompt_id")
    if prompts is None or case.reshaped or case.filled or case.noise < FLOAT32_NOISE:
        return None
    start = case.doubtful & (case.place < _PREFIX_START)
    rest = case.doubtful & ~start
    early, late = _variance_between_prompts(case, start), _variance_between_prompts(case, rest)
    if early is None or late is None:
        return None
    excess, z, levels = early
    # in the first tokens, prompts must differ by more than chance, and by more than in later tokens
    if excess < 0.04 or z < 4.5 or late[0] > 0.4 * excess:
        return None
    known = np.isfinite(levels)
    high = known & (levels > np.median(levels[known]) + math.sqrt(excess))
    mine = high[case.clusters] & (case.counts > 0)
    first, then = (
        case.sums(case.loudness * part)[mine].sum() / max(case.sums(part)[mine].sum(), 1) for part in (start, rest)
    )
    size = float(np.median(np.abs(case.scaled[start & case.each(mine)])))
    # arithmetic, such as different experts in the prompt, causes smaller differences
    if not first - then > _PREFIX_MIN_LOUDNESS or size < 0.005:
        return None
    names = list(dict.fromkeys(prompts[mine].tolist()))
    return Detection(
        "medium",
        f"in the first {_PREFIX_START} tokens of the responses, the size of the difference varies between prompts by a "
        f"factor of {math.exp(math.sqrt(excess)):.3g}, which is more than by chance. In later tokens, it varies less. "
        "For some prompts, the engine kept a cache of older weights, or the two sides have different prompts",
        share=0.0,
        evidence=(
            make_fact("between_prompts", excess, "variance of the log difference between prompts in the first tokens"),
            make_fact("z", z, "variance between prompts, in standard errors"),
            make_fact("size", size, "median difference (in logits) in the first tokens of the affected prompts"),
            make_fact("late", late[0], "variance of the log difference between prompts in later tokens"),
        ),
        where={
            "prompts": f"{format_list(names, 4)} ({percent(mine.mean())} of the sequences)",
            "positions": "the start of responses",
        },
        examples=case.find_loudest(mine, case.sums(np.abs(case.x) * start)),
        rivals={"context_mismatch": "compare the prompt token ids of the two sides. Some may be truncated"},
    )


def _variance_between_prompts(case: Case, part: Bools) -> tuple[float, float, np.ndarray] | None:
    """Return the variance between prompts that chance does not explain, its z-score, and log mismatch per prompt."""
    number = case.sums(part)
    told = number >= 3
    counts = np.bincount(case.clusters, told) if case.size else np.zeros(0)
    many = counts >= 2
    mine = told & many[case.clusters] if case.size else told
    groups, freedom = int(many.sum()) - 1, int(mine.sum() - many.sum())
    if groups < _PREFIX_MIN_PROMPTS - 1 or freedom < _PREFIX_MIN_PROMPTS:
        return None
    level = case.sums(case.loudness * part)[mine] / number[mine]
    ranks = np.argsort(np.argsort(level, kind="stable")).astype(np.float64)

    def split(values: Float64s) -> tuple[float, float, Float64s]:
        """Return the variance of the prompts' means, the variance that chance would cause, and the means."""
        means = np.bincount(case.clusters[mine], values, len(counts)) / np.maximum(counts, 1)
        left = values - means[case.clusters[mine]]
        return float(means[many].var(ddof=1)), float(left @ left) / freedom * float((1 / counts[many]).mean()), means

    (between, chance, means), (ranked, by_chance, _) = split(level), split(ranks)
    if not (chance > 0 and by_chance > 0):
        return None
    z = math.log(max(ranked, 1e-300) / by_chance) / math.sqrt(2 / groups + 2 / freedom)  # z-score of log F
    return between - chance, z, np.where(many, means, np.nan)


def detect_stale_step(case: Case) -> Detection | None:
    steps, level, errors, counts, freedom = measure_steps(case)
    number = len(steps)
    if number < 4 or freedom < number:
        return None
    away = level - np.median(level)
    usual = (np.median(np.abs(away)) / 0.6745) ** 2
    extra = max(0.0, float(usual - np.median(errors**2)))
    error = np.sqrt(errors**2 * (1 + 1.6 / number) + extra)
    z = np.array([correct_for_tests(normal_z(float(t), freedom), number) for t in away / error])
    out = (z > 5.0) & (away > math.log(1.35)) & (counts >= MIN_ROWS)
    count = int(out.sum())
    if not count or count > 0.26 * number or out[-2:].all():
        return None  # too many steps, or the last two, which may be a lasting change
    names = [steps[i] for i in np.flatnonzero(out)]
    mine = np.array([step in names for step in case.column("step").tolist()], np.bool_)
    factor, last = math.exp(float(away[out].mean())), bool(out[-1])
    return Detection(
        "high" if z.max() > 7.0 and not last else "medium",
        f"the mismatch at step{'s' * (count > 1)} {format_list(names)} is {factor:.3g} times larger than at the other "
        "steps. The fault did not last",
        tokens=mine[case.sequence],
        evidence=(
            make_fact("factor", factor, "|log ratio| divided by the |log ratio| of the median step"),
            make_fact("z", float(z.max()), "difference from the median step, in standard errors"),
            make_fact("steps", number, "number of compared steps"),
        ),
        where={"steps": format_list(names)},
        examples=case.find_loudest(mine),
        rivals={"growing_mismatch": "check whether the difference stays in the following steps"} if last else {},
    )


def detect_stale_worker(case: Case) -> Detection | None:
    for column in dict.fromkeys(name for name, _, _ in case.evidence.cells):
        rows = [] if column in ("", LAG_COLUMN, "run", "step") else find_deviations(select_cells(case, column))
        high = [row for row in rows if row.z > 5.0 and row.difference > math.log(1.25)]
        if high and len(high) <= len(rows) / 2:
            break
    else:
        return None
    values, factor, z = [row.value for row in high], math.exp(high[0].difference), high[0].z
    names = format_list(values)
    mine = np.array([value in values for value in case.column(column).tolist()], np.bool_)
    tokens = mine[case.sequence]
    others = max((abs(row.z) for row in rows if row not in high), default=0.0)
    several_lags = len({value for name, _, value in case.evidence.cells if name == LAG_COLUMN}) > 1
    rival = {"quantized_rollout": f"compare weight version, dtype, kernels and cache of this {column} with the others"}
    return Detection(
        "high" if z > 7.0 else "medium",
        f"in the rows of {column} {names}, the two sides differ {factor:.3g} times more than in other rows of the same "
        "steps. These rows come from other weights or settings",
        evidence=(
            make_fact("factor", factor, "|log ratio| of these rows divided by |log ratio| of the other rows"),
            make_fact("z", z, "logarithm of this factor, in standard errors"),
            make_fact("sequences", sum(row.sequences for row in high), f"number of sequences of {column} {names}"),
            make_fact("others_z", others, f"the largest |z| among the other values of {column}", against=True),
        ),
        where={column: names, "sequences": percent(mine.mean())},
        examples=case.find_loudest(mine),
        rivals={} if several_lags else rival,
        tokens=tokens,
        leaves=case.without(tokens).with_fields(left_out=case.left_out | {column: frozenset(values)}),
    )


def detect_growing_mismatch(case: Case) -> Detection | None:
    if "weights_never_updated" in case.explained:
        return None  # that cause already explains the growth
    steps, level, error, _, freedom = measure_steps(case)
    if len(steps) < 6 or freedom < len(steps):
        return None  # too few steps, or too few rows per step
    own = fit_growth(steps, np.exp(level).tolist(), (np.exp(level) * error).tolist(), "abs_log_ratio")
    z = own.z or 0.0
    if own.verdict != "grew" or z < 5.0 or (own.factor or 0.0) < 1.25:
        return None
    growth = case.growth and case.growth()
    if growth is None or growth.verdict != "grew":
        growth = own  # |log ratio| has a smaller error than K3
    onset, ends = growth.onset, growth.onset_interval
    if not isinstance(onset, (int, float)) or ends is None:
        return None
    lag = _mean_lag_by_step(case, steps)
    recorded = lag is not None and lag.max() > lag.min()
    if lag is not None and recorded and lag[-1] <= lag[len(lag) // 2]:
        return None  # the lag no longer grows: the cause is a stale policy
    numbers = [step if isinstance(step, (int, float)) else -math.inf for step in case.column("step").tolist()]
    later = np.array([step >= onset for step in numbers], np.bool_)
    tell = "record rollout_version as the engine reports it, and check whether the weight syncs arrived"
    what = "K3" if growth.metric == "k3" else "|log ratio|"
    return Detection(
        "medium" if recorded or z < 7.0 else "high",
        f"{what} {growth.text}",
        tokens=later[case.sequence],
        evidence=(
            make_fact("onset", onset, "first step of the larger mismatch", interval=(float(ends[0]), float(ends[1]))),
            make_fact("factor", growth.factor or 1.0, f"{what} after / before the onset", interval=growth.interval),
            make_fact("z", z, "change of |log ratio| at the onset, in standard errors"),
        ),
        where={"steps": f"{format_label(onset)} to {steps[-1]}"},
        examples=case.find_loudest(later),
        rivals={"stale_policy": tell},
        symptom_of="stale_policy",
    )


def _mean_lag_by_step(case: Case, steps: list[Any]) -> Float64s | None:
    sums = {step: [0.0, 0.0] for step in steps}
    for (step, lag), row in select_cells(case, LAG_COLUMN).items():
        if step in sums and isinstance(lag, float) and not math.isnan(lag):
            sums[step][0] += row[0, 0]
            sums[step][1] += row[0, 0] * lag
    if not sums or any(count == 0 for count, _ in sums.values()):
        return None
    return np.array([total / count for count, total in sums.values()])


def detect_weights_never_updated(case: Case) -> Detection | None:
    lag = version_lag(case.rows)
    if lag is None or case.reshaped or "growing_mismatch" in case.explained:
        return None
    train = np.asarray(case.rows.columns["train_version"], np.float64)
    known = np.flatnonzero((case.counts >= 5) & np.isfinite(lag))
    train, lag = train[known], lag[known]
    rollout, ages, lags = train - lag, np.unique(train), np.unique(lag)
    if len(known) < 12 or len(ages) < 4 or len(np.unique(rollout)) < 2:
        return None
    level, age = np.log(case.means(np.abs(case.scaled))[known] + 1e-12), train - ages[0]
    means = np.array([level[train == value].mean() for value in ages])
    half = len(ages) // 2
    factor, early = (float(np.exp(part.mean() - means[0])) for part in (means[-2:], means[half - 1 : half + 1]))
    rise, rise_z, own_z = _regress_on_age_and_lag(level, np.log1p(age), lag)
    pairs = [np.sign(later - means[i]) for i in range(len(means)) for later in means[i + 1 :]]
    steady = float(np.mean(pairs))  # Kendall's tau: 1 if the mean rises with each version
    first, then = level[train == ages[0]], level[(train == ages[1]) | (train == ages[2])]
    error = [part.var(ddof=1) / len(part) if len(part) > 1 else math.inf for part in (first, then)]
    if then.mean() - first.mean() < 3.0 * max(math.sqrt(sum(error)), 1e-12):
        return None  # no rise at first: updates stopped later
    if rise_z < 6.0 or steady < 0.7 or own_z > 3.0 or factor < 1.5 or early < max(1.15, factor**0.25):
        return None
    if len(lags) > 1 and abs(np.corrcoef(lag, age)[0, 1]) > 0.7:
        return None  # the recorded lag also grows and explains the rise
    (shared, shared_z), (along, along_z) = case.systematic_share, case.drift_correlation
    tied = (shared > 0.02 and shared_z > 6) or (along > 0.45 and along_z > 4)
    return Detection(
        "high" if tied and len(ages) >= 6 and steady > 0.8 else "medium",
        f"the mismatch grows {factor:.3g} times from the first step to version {ages[-1]:g}, but the recorded lag "
        f"stays at {_format_lags(lags)}. The rollout seems to use its first weights throughout. The versions that it "
        f"records ({rollout.min():g} to {rollout.max():g}) never took effect",
        evidence=(
            make_fact("factor", factor, "mean difference (in logits) of the last two versions / of the first"),
            make_fact("halfway", early, "mean difference of the middle version / of the first: above 1 if steady"),
            make_fact("growth_z", rise_z, "growth with the trainer's version at equal lag, in standard errors"),
            make_fact("growth_by_version", rise, "exponent p if the difference grows as version^p"),
            make_fact("lag_z", own_z, "growth with the recorded lag, in standard errors: 0 if this lag is wrong"),
            make_fact("systematic", shared, against=not tied),
        ),
        where={"steps": "all, from the first on"},
        rivals={
            "growing_mismatch": "compare checksums of the engine's weights at two steps. They must change",
            "stale_policy": "check the engine's own version counter after each sync (vLLM, SGLang /get_model_info)",
        },
        everywhere=True,
    )


def _regress_on_age_and_lag(level: Float64s, age: Float64s, lag: Float64s) -> tuple[float, float, float]:
    """Fit the log mismatch by the trainer's age (updates) and the lag. Return age slope, age z-score, lag z-score."""
    terms = [np.ones(len(level)), age]
    if np.ptp(lag) > 0:
        terms.append(lag)
    design = np.stack(terms, axis=1)
    inverse = np.linalg.pinv(design.T @ design)
    slopes = inverse @ design.T @ level
    scores = design * (level - design @ slopes)[:, None]
    errors = np.sqrt(np.maximum(np.diag(inverse @ (scores.T @ scores) @ inverse), 1e-30))
    z = [normal_z(float(t), len(level) - 3) for t in slopes / errors]
    return float(slopes[1]), z[1], z[2] if len(z) > 2 else 0.0


_MIN_FREEDOM = 12
_KNOWN_STEPS, _USUAL_SCATTER = 8, 0.1
"""The mismatch is assumed to vary by 10% between steps. This assumption has the same weight as 8 measured steps."""
MIN_ROWS = 4  # A step or column value with fewer sequences is not tested for an unusual mismatch
StepKey = tuple[GroupValue, GroupValue]
StepCells = dict[StepKey, Float64s]
"""(step, value of a column) -> sums [4, 4] that `sum_levels` returns for the sequences with this step and value."""


@dataclass(frozen=True)
class Levels:
    """Sums of the log mismatch per group of sequences, adjusted for sequence length and uncertainty of tokens."""

    counts: Float64s  # number of sequences per group [K]
    sums: Float64s  # log mismatch, summed over the sequences of a group [K]
    variance: float  # variance of the log mismatch between sequences of one group
    freedom: float  # degrees of freedom of the variance

    @classmethod
    def of(cls, cells: Mapping[StepKey, Float64s]) -> Levels:
        table, groups = np.array([*cells.values()]), np.arange(len(cells))
        counts, sums = table[:, 0, 0], table[:, 0, 1:]
        if counts.sum() - len(cells) < max(_MIN_FREEDOM, 0.5 * len(cells)):
            groups = _number(step for step, _ in cells)
        within, freedom = _sum_within_groups(table, groups)
        slopes = np.zeros(len(within) - 1)
        if freedom >= _MIN_FREEDOM:
            used = np.diag(within)[1:] > 1e-9 * counts.sum()
            chosen = np.flatnonzero(used) + 1
            slopes[used] = np.linalg.lstsq(within[np.ix_(chosen, chosen)], within[chosen, 0], rcond=1e-6)[0]
            freedom -= int(used.sum())
        left = within[0, 0] - 2 * slopes @ within[1:, 0] + slopes @ within[1:, 1:] @ slopes
        variance = max(float(left), 1e-12) / max(freedom, 1)
        return cls(counts, sums[:, 0] - sums[:, 1:] @ slopes, variance, max(freedom, 0))


def _number(names: Iterable[GroupValue]) -> Ints:
    known: dict[GroupValue, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)


def _sum_within_groups(table: Float64s, groups: Ints) -> tuple[Float64s, float]:
    summed = np.zeros((int(groups.max()) + 1, *table.shape[1:]))
    np.add.at(summed, groups, table)
    sums = summed[:, 0, 1:]
    within = summed[:, 1:, 1:] - sums[:, :, None] * sums[:, None] / summed[:, :1, :1]
    return within.sum(axis=0), float(summed[:, 0, 0].sum() - len(summed))


@dataclass(frozen=True)
class Deviation:
    """Difference in log mismatch between one column value, such as a worker, and other values in the same steps."""

    value: GroupValue
    difference: float
    z: float
    sequences: int


def correct_for_tests(z: float, tests: int) -> float:
    """Reduce the largest of several z-scores, because the largest of many is high even by chance (Bonferroni)."""
    return math.copysign(math.sqrt(max(z * z - 2 * math.log(max(tests, 1)), 0.0)), z)


def select_cells(case: Case, column: str) -> StepCells:
    """Return sums of the log mismatch by (step, value of `column`). Skip values that `case.left_out` contains."""
    gone = case.left_out.get(column, frozenset())
    cells = _sum_sample(case, case.reshaped) if case.complete else case.evidence.cells
    return {(step, value): sums for (name, step, value), sums in cells.items() if name == column and value not in gone}


def _sum_sample(case: Case, reshaped: bool) -> AllCells:
    """Sum the mismatch of the sampled rows. If `reshaped`, first undo the effect of a temperature or truncation."""
    rollout = case.rollout
    if reshaped:
        rollout, bins = rollout.copy(), quantile_bins(case.t, 32)
        for number in np.unique(bins):
            rollout[case.index[bins == number]] += np.median(case.x[bins == number])
    columns = dict.fromkeys(name for name, _, _ in case.evidence.cells)
    return sum_levels(case.rows, measure_levels(case.rows.segments, rollout, case.train, case.sound), columns)


def find_deviations(cells: StepCells) -> list[Deviation]:
    """For each value of a column, compare the log mismatch with other rows of the same steps. Highest z-score first."""
    if not cells:
        return []
    levels, steps, index = Levels.of(cells), _number(step for step, _ in cells), _number(value for _, value in cells)
    counts, sums = levels.counts, levels.sums
    rest, rest_sums = (np.bincount(steps, own)[steps] - own for own in (counts, sums))
    some = rest > 0
    rest = np.where(some, rest, 1.0)
    pairs = np.where(some, 1 / (1 / counts + 1 / rest), 0.0)
    weights, number = np.bincount(index, pairs), np.bincount(index, counts * some)
    total = np.bincount(index, pairs * (sums / counts - rest_sums / rest))
    tests, rows = int((number >= MIN_ROWS).sum()), []
    for at, value in enumerate(dict.fromkeys(value for _, value in cells)):
        if number[at]:
            difference = float(total[at] / weights[at])
            t = difference * math.sqrt(weights[at] / levels.variance)
            z = correct_for_tests(normal_z(t, levels.freedom), tests) if number[at] >= MIN_ROWS else 0.0
            rows.append(Deviation(value, difference, z, int(number[at])))
    return sorted(rows, key=lambda row: -row.z)


def measure_steps(case: Case) -> tuple[list[Any], Float64s, Float64s, Float64s, float]:
    """Return the steps, each step's mean log mismatch, standard error and row count, and the degrees of freedom."""
    column = "" if case.complete else next((name for name, gone in case.left_out.items() if gone), "")
    cells = {key: sums for key, sums in select_cells(case, column).items() if isinstance(key[0], (int, float))}
    if not cells:
        return [], np.zeros(0), np.zeros(0), np.zeros(0), 0.0
    levels, steps = Levels.of(cells), sorted({step for step, _ in cells}, key=lambda step: float(step or 0))
    place = {step: at for at, step in enumerate(steps)}
    index = [place[step] for step, _ in cells]
    counts = np.maximum(np.bincount(index, levels.counts), 1)
    error = np.sqrt(levels.variance / counts)
    return [*steps], np.bincount(index, levels.sums) / counts, error, counts, levels.freedom


def fit_slope(cells: Mapping[StepKey, Float64s]) -> tuple[float, float]:
    """Return slope and z-score of the log mismatch as a function of a column, such as the version lag."""
    groups = _number(step for step, _ in cells)
    table, at = np.array([*cells.values()]), np.array([float(value or 0.0) for _, value in cells])
    counts = table[:, 0, 0]
    at -= np.average(at, weights=counts)
    own, sums = counts * at * at, table[:, 0] * at[:, None]
    wide = np.concatenate([table, sums[:, None]], axis=1)
    wide = np.concatenate([wide, np.column_stack([sums, own])[:, :, None]], axis=2)
    products, freedom = _sum_within_groups(wide, groups)
    if products[-1, -1] > 0.02 * own.sum():
        value, z = _regress(products, freedom)
        ways = sum(map(math.lgamma, np.bincount(groups, counts) + 1)) - sum(map(math.lgamma, counts + 1))
        most = -NormalDist().inv_cdf(math.exp(-ways)) if ways < 500.0 else math.inf
        return value, math.copysign(min(abs(z), most), z)  # with few permutations (log: `ways`), z cannot be large
    levels = Levels.of(cells)
    y, error = levels.sums / levels.counts, levels.variance / levels.counts
    shapes = [_fit_across_steps(form, y, error, levels.freedom) for form in (at, np.minimum(at - at.min(), 1.0))]
    (value, z), (_, any_z) = shapes
    return value, max(z, correct_for_tests(any_z, 2), key=abs)


def _regress(products: Float64s, freedom: float) -> tuple[float, float]:
    """Regress log mismatch on the last variable (with enough data, also on the others). Return slope and z-score."""
    last = len(products) - 1
    others = np.arange(1, last) if freedom >= _MIN_FREEDOM else np.zeros(0, np.int64)
    ends = np.array([0, last])
    taken = np.linalg.lstsq(products[np.ix_(others, others)], products[np.ix_(others, ends)], rcond=1e-6)[0]
    left = products[np.ix_(ends, ends)] - products[np.ix_(ends, others)] @ taken
    freedom -= len(others) + 1
    if freedom <= 0 or left[1, 1] <= 1e-6 * products[last, last]:
        return 0.0, 0.0
    value = float(left[0, 1] / left[1, 1])
    variance = max(float(left[0, 0]) - value * float(left[0, 1]), 1e-12) / freedom
    return value, normal_z(value * math.sqrt(float(left[1, 1]) / variance), freedom)


def _fit_across_steps(at: Float64s, y: Float64s, error: Float64s, freedom: float) -> tuple[float, float]:
    """Fit a line to the log mismatch `y` of each step over `at`. Steps may vary by 10%. Return slope and z-score."""
    weights = 1 / error
    across = at - np.average(at, weights=weights)
    if len(at) < 3 or not (weights * across * across).sum() > 0:
        return 0.0, 0.0
    value = float((weights * across * y).sum() / (weights * across * across).sum())
    left = y - np.average(y, weights=weights) - value * across
    between = float(len(at) - 2)
    scatter = float((left * left).sum()) / between
    extra = max(0.0, scatter - float(error.mean())) * between
    known: float = _KNOWN_STEPS + between
    if freedom < between:
        weights, known = np.full(len(at), 1 / max(scatter, 1e-12)), between
    else:
        weights, known = 1 / (error + (extra + _KNOWN_STEPS * _USUAL_SCATTER**2) / known), min(known, freedom)
    across = at - np.average(at, weights=weights)
    spread = float((weights * across * across).sum())
    value = float((weights * across * y).sum()) / spread
    return value, normal_z(value * math.sqrt(spread), known)
