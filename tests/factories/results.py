"""Make synthetic Results with realistic numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mismatchctl.corrections.model import Correction
from mismatchctl.measure.metrics.evaluation import other_metrics
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.measure.metrics.registry import MISMATCH_METRICS, correction_metrics
from mismatchctl.results.model import (
    Breakdown,
    Clusters,
    Distribution,
    Groups,
    InputFile,
    JointDistribution,
    OverallMetrics,
    Provenance,
    Result,
    RunResult,
    Series,
    SkippedData,
    Value,
    WorstSequence,
    WorstToken,
)

HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</style></title></details>",
    "\x1b[31mred\x1b[0m\x07",
    "abc\u202egnp.exe",
    "$\\frac{1}{0}$ {{ 7*7 }} {% raw %}",
    "שלום\u2066 عربى",
    "https://example.com/\u0000\u200b",
]
"""Hostile strings for names in a dump."""

UNDEFINED = {"khat_sequence": "fewer than five different ratios in the tail"}
_TEXT = b"    def step(self):\n        return <b>'x'</b>  # \xc3\xa9"


def make_corrections(count: int = 5, names: Sequence[str] = ()) -> list[Correction]:
    """Make `count` different corrections. The first has no effect."""
    rules: list[dict[str, object]] = [
        {"name": "none"},
        {"name": "token_tis", "weight": {"truncate": 2.0}},
        {"name": "seq_mis", "weight": {"level": "sequence"}, "gates": [{"level": "sequence", "keep": [0, 2.0]}]},
        {
            "name": "geo_rs",
            "gates": [{"level": "geometric", "keep": [None, 1.001]}, {"level": "min", "keep": [1e-4, None]}],
        },
        {
            "name": "miles-moe-2",
            "weight": {"clip": [0.5, 1.5], "normalize": "token"},
            "gates": [{"level": "geometric", "keep": [0.99, 1.001], "effect": "zero"}],
        },
    ]
    made = []
    for index in range(count):
        rule = rules[index % len(rules)] | ({"name": f"correction-{index}"} if index >= len(rules) else {})
        made.append(Correction.model_validate(rule | ({"name": names[index]} if index < len(names) else {})))
    return made


def make_result(
    *,
    runs: Sequence[str] = ("run-a",),
    steps: Sequence[str | int | float | bool | None] = tuple(range(16)),
    corrections: Sequence[Correction] | None = None,
    by: Sequence[str] = ("worker",),
    hostile: bool = False,
    drift: bool = True,
    level: float = 1e-4,
) -> Result:
    """Make a Result of runs whose K3 grows fivefold from `level`."""
    made = make_corrections() if corrections is None else list(corrections)
    text = HOSTILE if hostile else ["plain"]
    return Result(
        provenance=Provenance(
            inputs=[
                InputFile(
                    path=f"dumps/{run}/{text[index % len(text)]}.parquet", run=run, size=66_183, rows=32, tokens=4025,
                    layout="wide", dtypes={"rollout_log_probs": "list<float>", text[-1]: "int64"},
                )
                for run in runs
                for index in range(2)
            ],
            left_out=[
                SkippedData(file=text[0], reason="NaN log-prob", count=3, example=f"row 7: {text[1% len(text)]}")
            ],
            by=list(by),
        ),
        corrections=made,
        warnings=[f"run {run}: geo_rs leaves nothing of 1 of 16 groups" for run in runs] if hostile else [],
        runs={run: _run(index, steps, made, by, text, level, drift) for index, run in enumerate(runs)},
    )  # fmt: skip


def _run(
    seed: int,
    steps: Sequence[str | int | float | bool | None],
    corrections: Sequence[Correction],
    by: Sequence[str],
    text: Sequence[str],
    level: float,
    drift: bool,
) -> RunResult:
    noise = np.random.default_rng(seed)
    metrics = [*MISMATCH_METRICS, *(other_metrics() if drift else ())]
    sizes = [
        level * 5 ** float(np.clip((i - len(steps) * 0.4) / max(len(steps) * 0.3, 1), 0, 1)) for i in range(len(steps))
    ]
    values = {c.name: _effects(c, level, noise) for c in corrections}
    return RunResult(
        overall=OverallMetrics(metrics={m.key: _value(m, 2 * level, noise) for m in metrics}, corrections=values),
        groups=_groups(steps, sizes, metrics, corrections, noise),
        by={column: _groups([0, None, text[0]], [level] * 3, metrics, corrections, noise) for column in by},
        distribution=_distribution(level),
        breakdowns={name: _breakdown(name, level) for name in ("position", "surprisal", "length")},
        joint=_joint(),
        worst_tokens=[_worst_token(index, text) for index in range(30)],
        worst_sequences=[_worst_sequence(index, text) for index in range(30)],
        clusters=Clusters(by="prompt", columns=["tokens"], hashes=["0" * 16], sums=[[1.0]]),
    )


def _effects(correction: Correction, level: float, noise: np.random.Generator) -> dict[str, Value]:
    values = {metric.key: _value(metric, level, noise) for metric in correction_metrics(correction)}
    if correction.weight is None or correction.weight.normalize == "none":
        values["normalization_factor"] = Value(value=None, status="weights are not normalized")
    return values


class _Cell(NamedTuple):
    """A value without validation, since a Result of many runs has hundreds of thousands of values."""

    value: float | None
    se: float | None = None
    interval: tuple[float, float] | None = None
    status: str = "ok"


def _value(metric: Metric, k3: float, noise: np.random.Generator) -> Value:
    return Value(**_cell(metric, k3, noise)._asdict())


def _cell(metric: Metric, k3: float, noise: np.random.Generator) -> _Cell:
    if metric.key.removeprefix("drift_") in UNDEFINED:
        return _Cell(None, status=UNDEFINED[metric.key.removeprefix("drift_")])
    wobble = float(np.exp(noise.normal(0, 0.1)))
    sizes = {
        "tokens": 4025.0, "sequences": 32.0, "clusters": 8.0, "fraction": 0.1, "ratio": 1.0, "correlation": 0.9998,
        "nats/token": k3, "nats": math.sqrt(k3), "0/1": 0.0, "-": 10 * k3,
    }  # fmt: skip
    value = sizes.get(metric.unit, 1.0)
    if metric.unit in ("nats/token", "nats", "fraction", "-"):
        value *= wobble
    if metric.unit == "ratio":
        value += 0.001 * float(noise.normal())
    interval = (0.9 * value, 1.1 * value) if metric.quantile is not None else None
    uncertain = metric.formula is not None and metric.has_error
    return _Cell(
        value=value,
        se=0.1 * abs(value) * (0.001 if metric.unit in ("ratio", "correlation") else 1) if uncertain else None,
        interval=interval,
    )


def _groups(
    labels: Sequence[str | int | float | bool | None],
    sizes: Sequence[float],
    metrics: Iterable[Metric],
    corrections: Sequence[Correction],
    noise: np.random.Generator,
) -> Groups:
    return Groups(
        labels=list(labels),
        metrics={m.key: _series([_cell(m, size, noise) for size in sizes]) for m in metrics},
        corrections={
            c.name: {m.key: _series([_cell(m, size, noise) for size in sizes]) for m in correction_metrics(c)}
            for c in corrections
        },
    )


def _series(values: Sequence[_Cell]) -> Series:
    intervals = [value.interval for value in values]
    reasons = dict.fromkeys(value.status for value in values if value.status != "ok")
    return Series(
        value=[None if v.value is None else float(f"{v.value:.9g}") for v in values],
        se=[None if v.se is None else float(f"{v.se:.3g}") for v in values],
        interval=intervals if any(intervals) else None,
        status={reason: [i for i, v in enumerate(values) if v.status == reason] for reason in reasons},
    )


def _distribution(level: float) -> Distribution:
    scale = math.sqrt(2 * level)
    half = np.concatenate([[0.0], scale * 2.0 ** (np.arange(-80, 32) / 8)])
    edges = np.concatenate([-half[:0:-1], half])
    middles = (edges[1:] + edges[:-1]) / 2
    tokens = np.round(1e5 * np.exp(-((middles / scale) ** 2) / 2) * np.diff(edges) / scale).astype(int)
    return Distribution(edges=edges.tolist(), tokens=tokens.tolist(), k3=(tokens * middles**2 / 2).tolist())


def _breakdown(name: str, level: float) -> Breakdown:
    low = [2.0**octave for octave in (range(-6, 4) if name == "surprisal" else range(9))]
    high: list[float | None] = [2 * edge for edge in low]
    k3: list[float | None] = [level * (1 + 0.1 * index) for index in range(len(low))]
    se: list[float | None] = [None, *([0.1 * level] * (len(low) - 1))]
    return Breakdown(
        quantity=name, low=low, high=high, tokens=[100] * len(low), k3=k3, k3_se=se, abs_diff=k3, abs_diff_se=se
    )


def _joint() -> JointDistribution:
    width = 1 / 36
    x = [width * index for index in range(37)]
    return JointDistribution(width=width, x=x, y=x, tokens=[1 + index * index for index in range(37)])


def _worst_token(index: int, text: Sequence[str]) -> WorstToken:
    return WorstToken(
        file=f"dumps/{text[index % len(text)]}.parquet",
        row=index,
        position=7,
        step=index,
        sequence_id=text[index % len(text)],
        prompt_id=index,
        token_id=_TEXT[index % len(_TEXT)],
        context_ids=list(_TEXT[:24]),
        rollout_log_prob=-1.0,
        train_log_prob=-2.5,
        log_ratio=-1.5,
    )


def _worst_sequence(index: int, text: Sequence[str]) -> WorstSequence:
    return WorstSequence(
        file="dumps/a.parquet",
        row=index,
        step=index,
        sequence_id=text[index % len(text)],
        tokens=120,
        log_ratio_sum=-3.0,
        k3=0.002,
        abs_diff_mean=0.05,
        token_ids=[*_TEXT, 256],
    )
