"""Writes docs/diagnose.md: what each cause looks like, what is told from what, and how much of it must be there.

    python benchmarks/diagnose.py [FOLDER]

FOLDER holds real dumps with a known cause each, and a labels.json that names it; its table is written only with it.
Everything else comes from the healthy steps of sample_data, with causes planted by tests/planted.py.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import planted  # noqa: E402
from planted import Planted, healthy  # noqa: E402

from mismatchctl.diagnose import Collector, diagnose  # noqa: E402
from mismatchctl.diagnose.case import Case  # noqa: E402
from mismatchctl.diagnose.causes import CAUSES  # noqa: E402
from mismatchctl.diagnose.causes.context_mismatch import fading  # noqa: E402
from mismatchctl.diagnose.levels import cells_of, deviations  # noqa: E402
from mismatchctl.diagnose.measures import calibration, systematic  # noqa: E402
from mismatchctl.dumps import Problems, open_dump  # noqa: E402
from mismatchctl.result import Finding  # noqa: E402

KINDS = ("dense", "moe")
SEEDS = range(3)
ROWS = 128
"""Rows of each dump: about 10,000 tokens."""
IDS = tuple(cause.id for cause in CAUSES)
LABELS = {
    "precision_noise": "numerical_noise",
    "temperature_mismatch": "temperature",
    "kv_cache_quantization": "cache_quantization",
}
Plant = Callable[[Planted], Planted]

PLANTED: dict[str, list[Plant]] = {
    "identical": [planted.identical],
    "numerical_noise": [lambda d: d],
    "moe_routing": [lambda d: planted.routing(d, 0.03)],
    "quantized_rollout": [lambda d, s=s: planted.quantized_rollout(d, s) for s in (0.02, 0.05)],
    "cache_quantization": [lambda d, s=s: planted.cache_quantization(d, s) for s in (0.03, 0.08)],
    "temperature": [lambda d, t=t: planted.temperature(d, t) for t in (0.8, 0.9, 1.1, 1.3)],
    "truncated_sampling": [
        *(lambda d, p=p: planted.top_p(d, p) for p in (0.9, 0.95, 0.98)),
        *(lambda d, k=k: planted.top_k(d, k) for k in (4, 8)),
    ],
    "raw_logprobs": [lambda d, t=t: planted.raw_logprobs(d, t) for t in (0.7, 0.8, 1.3)],
    "misaligned": [lambda d, k=k: planted.shifted(d, k) for k in (-3, 1, 2)],
    "unsampled_tokens": [lambda d, n=n: planted.unsampled_tokens(d, n) for n in (5, 20)],
    "edited_response": [lambda d, s=s: planted.edited(d, s) for s in (0.1, 0.3)],
    "context_mismatch": [lambda d, s=s: planted.context_mismatch(d, s) for s in (0.2, 0.5, 1.0)],
    "stale_policy": [lambda d, lag=lag: planted.stale_policy(d, lag) for lag in (1, 3, 5)],
    "stale_worker": [lambda d, lag=lag: planted.stale_worker(d, lag) for lag in (1, 3)],
    "low_precision_logging": [
        lambda d, s=s, k=k: planted.rounded(d, s, k) for s in ("rollout", "train") for k in ("bfloat16", "float16", "3")
    ],
    "padding_or_sentinel": [
        planted.no_end,
        *(lambda d, v=v: planted.placeholder(d, "train", v, 0.01) for v in (math.nan, -9999.0, 1.0)),
    ],
    "duplicated_rows": [lambda d: planted.duplicated(d, 0.2)],
    "mask_wrong": [lambda d: planted.mask_inverted(d, 20), lambda d: planted.mask_covers_prompt(d, 20)],
    "growing_mismatch": [lambda d, lag=lag: planted.growing(d, lag, 5) for lag in (1, 3)],
    "wrong_log_base": [
        lambda d, s=s, f=f: planted.other_logarithm(d, s, f)
        for s in ("rollout", "train")
        for f in (1 / math.log(2), 1 / math.log(10), -1.0)
    ],
    "probabilities_not_logs": [lambda d, s=s: planted.probabilities(d, s) for s in ("rollout", "train")],
}

SEVERITIES: dict[str, tuple[str, tuple[float, ...], Callable[[Planted, float], Planted]]] = {
    "temperature": ("temperature", (0.8, 0.95, 0.98, 0.99, 1.0, 1.01, 1.02, 1.05, 1.3), planted.temperature),
    "truncated_sampling": ("top-p", (0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0), planted.top_p),
    "raw_logprobs": ("temperature", (0.8, 0.9, 0.95, 0.98, 1.0, 1.05, 1.1, 1.3), planted.raw_logprobs),
    "misaligned": ("share of rows shifted", (0.0, 0.01, 0.03, 0.1, 0.3), lambda d, s: planted.shifted(d, 1, s)),
    "unsampled_tokens": ("tokens in a row", (1, 2, 4, 8, 20), lambda d, n: planted.unsampled_tokens(d, int(n), 0.1)),
    "edited_response": ("share of rows edited", (0.0, 0.02, 0.05, 0.1, 0.3), planted.edited),
    "context_mismatch": ("logits off at the start", (0.0, 0.02, 0.05, 0.1, 0.2, 0.5), planted.context_mismatch),
    "stale_policy": (
        "updates behind, not recorded",
        (0, 1, 2, 3, 5),
        lambda d, lag: planted.stale_policy(d, int(lag), recorded=False),
    ),
    "stale_worker": ("updates behind", (0, 0.25, 0.5, 1, 2, 3), lambda d, lag: planted.stale_worker(d, lag)),
    "growing_mismatch": ("updates per step", (0, 0.1, 0.25, 0.5, 1), lambda d, lag: planted.growing(d, lag, 5)),
    "cache_quantization": ("noise in the logits", (0.0, 0.01, 0.02, 0.03, 0.05), planted.cache_quantization),
    "quantized_rollout": ("logits off by token", (0.0, 0.003, 0.006, 0.01, 0.02, 0.05), planted.quantized_rollout),
    "duplicated_rows": ("share of rows repeated", (0.0, 0.01, 0.03, 0.1), planted.duplicated),
}


def some(kind: str, seed: int) -> Planted:
    """Rows of the healthy steps, drawn anew for each seed, in the order of the steps."""
    dump = healthy(kind)
    random = np.random.default_rng(seed)
    dump = dump.rows(np.sort(random.permutation(len(dump))[:ROWS]))
    dump.random = random
    return dump


def findings(dump: Planted) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        (found,) = diagnose([str(dump.write(Path(folder) / "dump.parquet"))], threads=1).runs.values()
    return found


def alarms(found: list[Finding]) -> list[str]:
    return [finding.cause for finding in found if finding.confidence != "low"]


def confusion() -> dict[str, Counter[str]]:
    """Of each planted cause: how often each cause was the first finding, at high or medium confidence."""
    table: dict[str, Counter[str]] = {}
    for cause, plants in PLANTED.items():
        firsts = (alarms(findings(plant(some(kind, seed)))) for plant in plants for kind in KINDS for seed in SEEDS)
        table[cause] = Counter(found[0] if found else "none" for found in firsts)
    return table


def detection(cause: str) -> list[tuple[float, float]]:
    """(severity, share of dumps in which the cause is reported at high or medium confidence)."""
    _, severities, plant = SEVERITIES[cause]
    curve = []
    for severity in severities:
        found = [cause in alarms(findings(plant(some(kind, seed), severity))) for kind in KINDS for seed in SEEDS]
        curve.append((severity, float(np.mean(found))))
    return curve


def false_alarms(dumps: int) -> tuple[Counter[str], dict[str, np.ndarray]]:
    """Healthy dumps: how often each cause is reported beyond low confidence, and the statistics that decide."""
    count: Counter[str] = Counter()
    statistics: dict[str, list[float]] = {name: [] for name in ("worker z", "fading z", "E[ratio] z", "systematic z")}
    for seed in range(100, 100 + dumps):
        dump = some(KINDS[seed % 2], seed)
        dump.columns["worker"] = dump.random.permutation(dump.columns["worker"])
        with tempfile.TemporaryDirectory() as folder:
            path = str(dump.write(Path(folder) / "dump.parquet"))
            count.update(alarms(next(iter(diagnose([path], threads=1).runs.values()))))
            case = case_of(path)
        statistics["worker z"].append(max(abs(row.z) for row in deviations(cells_of(case, "worker"))))
        statistics["fading z"].append(-fading(case, case.place)[1])
        statistics["E[ratio] z"].append(abs(calibration(case)[1]))
        statistics["systematic z"].append(abs(systematic(case)[1]))
    return count, {name: np.array(values) for name, values in statistics.items()}


def case_of(path: str) -> Case:
    dump = open_dump([path], watched=("token_ids", "worker", "current_log_probs"))
    collector = Collector()
    for unit in dump.units:
        for rows in dump.rows(unit, Problems()):
            collector.watch(rows)
    (evidence,) = collector.runs.values()
    assert evidence.sample is not None
    return Case.of(evidence, evidence.sample.rows)


def folders(folder: Path) -> list[str]:
    """A table of real dumps with known causes."""
    labels = json.loads((folder / "labels.json").read_text())
    lines, right = [], 0
    for name, label in sorted(labels.items()):
        cause = LABELS.get(label["cause"], label["cause"])
        (found,) = diagnose([str(folder / name)], threads=1).runs.values()
        good = found[0].cause == cause and found[0].confidence != "low"
        right += good
        others = ", ".join(f"{finding.cause} ({finding.confidence})" for finding in found[1:])
        first = f"{found[0].cause} ({found[0].confidence})"
        lines.append(f"| {name} | {cause} | {'' if good else '**not** '}{first} | {others} |")
    return [
        "## Real dumps with a known cause",
        "",
        f"The cause is the first finding, at high or medium confidence, in {right} of {len(labels)} dumps of two small",
        "language models (byte-level, dense and mixture of experts).",
        "",
        "| dump | cause | first finding | others |",
        "|---|---|---|---|",
        *lines,
        "",
    ]


def matrix(table: dict[str, Counter[str]]) -> list[str]:
    """The confusion matrix; columns are numbered as the rows are."""
    rows = list(table)
    heads = " | ".join(str(number) for number in range(1, len(rows) + 1))
    lines = [f"| planted | {heads} | none |", "|---|" + "---|" * (len(rows) + 1)]
    for number, cause in enumerate(rows, start=1):
        total = sum(table[cause].values())
        cells = [f"{100 * table[cause][other] / total:.0f}" if table[cause][other] else "" for other in [*rows, "none"]]
        lines.append(f"| {number} {cause} | {' | '.join(cells)} |")
    return lines


def curves() -> list[str]:
    """Detection by severity, a table of each cause."""
    lines, drawn = [], {}
    for cause, (what, _, _) in SEVERITIES.items():
        drawn[cause] = detection(cause)
        cells = " | ".join(f"{severity:g}: {100 * share:.0f} %" for severity, share in drawn[cause])
        lines.append(f"- **{cause}** by {what}: {cells.replace(' | ', ', ')}")
    (ROOT / "docs" / "diagnose.svg").write_text(picture(drawn), encoding="utf-8")
    return lines


def picture(drawn: dict[str, list[tuple[float, float]]]) -> str:
    """Small multiples: severity, in the order of the table, against the share of dumps in which it is found."""
    width, height, columns = 190, 120, 4
    panels = []
    for number, (cause, curve) in enumerate(drawn.items()):
        x, y = number % columns * width + 34, number // columns * height + 24
        step = (width - 56) / max(len(curve) - 1, 1)
        points = [(x + index * step, y + 66 * (1 - share)) for index, (_, share) in enumerate(curve)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in points)
        marks = "".join(
            f'<text x="{a:.1f}" y="{y + 80}" class="m">{severity:g}</text>'
            for (a, _), (severity, _) in zip(points, curve, strict=True)
        )
        panels.append(
            f'<text x="{x}" y="{y - 8}" class="t">{cause}</text><path d="M{x} {y}v66h{width - 56}" class="a"/>'
            f'<text x="{x - 4}" y="{y + 4}" class="n">1</text><text x="{x - 4}" y="{y + 69}" class="n">0</text>'
            f'<polyline points="{line}"/>{dots}{marks}'
        )
    rows = -(-len(drawn) // columns)
    style = (
        "text{font:10px sans-serif;fill:#777}.t{font-weight:bold;font-size:11px}.m{text-anchor:middle;font-size:8px}"
        ".n{text-anchor:end}.a{fill:none;stroke:#999}polyline{fill:none;stroke:#2f83c5;stroke-width:1.5}circle{fill:#2f83c5}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * width} {rows * height}">'
        f"<style>{style}</style>{''.join(panels)}</svg>\n"
    )


def thresholds(statistics: dict[str, np.ndarray]) -> list[str]:
    """False alarms against the threshold of each statistic."""
    levels = (2, 3, 4, 5, 6, 8)
    lines = ["| statistic | " + " | ".join(f"> {level}" for level in levels) + " |", "|---|" + "---|" * len(levels)]
    for name, values in statistics.items():
        lines.append(f"| {name} | " + " | ".join(f"{100 * (values > level).mean():.3g} %" for level in levels) + " |")
    return lines


def main() -> None:
    number = 200
    count, statistics = false_alarms(number)
    table = confusion()
    right = sum(table[cause][cause] for cause in table)
    total = sum(sum(row.values()) for row in table.values())
    raised = ", ".join(f"{cause} in {times}" for cause, times in count.most_common() if cause != "numerical_noise")
    lines = [
        "# How causes are told apart",
        "",
        "<!-- Written by benchmarks/diagnose.py; run it again after a change of a test. -->",
        "",
        "`mismatchctl diagnose` looks at the rows of a dump as they are, masked tokens too, and tests one cause "
        "after the",
        "other; what a cause explains is taken out before the next test. Counts and the levels by step and "
        "worker are of all",
        "tokens; everything else is read from a sample of whole rows, chosen by a hash of their content: a 32nd "
        "of the dump,",
        "at least 65,536 tokens and at most 262,144.",
        "",
        "| cause | how it shows |",
        "|---|---|",
        *(f"| `{cause.id}` | {cause.shows} |" for cause in sorted(CAUSES, key=lambda cause: cause.id)),
        "",
        "Two identities decide what no threshold could: if the rollout column is the distribution that sampled, "
        "and the",
        "trainer's has at least its support, E[ratio] = 1; if the trainer's column is what sampled, E[1 / ratio] = 1.",
        "",
        *(folders(Path(sys.argv[1])) if len(sys.argv) > 1 else []),
        "## Confusion",
        "",
        "Causes planted in the healthy steps of `sample_data` at several severities, both models, three draws of",
        f"{ROWS} rows each: the first finding at high or medium confidence, in percent; right in {right} of {total}.",
        "These transformations were at hand when the tests were written: the table shows that causes are told "
        "from each",
        "other where they are there, not what share of a stranger's dumps would be judged rightly.",
        "",
        *matrix(table),
        "",
        "## Detection",
        "",
        f"Share of dumps of {ROWS} rows (about 10,000 tokens) in which the cause is reported at high or medium "
        f"confidence.",
        "",
        "![Severity against detection](diagnose.svg)",
        "",
        *curves(),
        "",
        "## False alarms",
        "",
        f"Of {number} healthy dumps of {ROWS} rows, with workers drawn at random: "
        + (f"{raised} dumps." if raised else "no cause but noise in any."),
        "Share of them beyond a threshold, by statistic; the tests use 5 (worker), 7 (fading), 6 (E[ratio], "
        "with a second",
        "condition), 6 (systematic, with a least size).",
        "",
        *thresholds(statistics),
        "",
        "## Limits",
        "",
        "- int8 weights over bfloat16 leave a trace too small to tell from bfloat16's own: low confidence, or "
        "plain noise.",
        "- The noise that bfloat16 makes (0.022 of the logits, at most) was measured on eight small models. A "
        "larger model",
        "  may make more; a cache in low precision is then reported at medium confidence, with noise as its rival.",
        "- Whatever acts on every token (temperature, truncation) hides small mismatches under it: an older "
        "policy, a context",
        "  that differs, a quantized cache. Fix it, and diagnose again.",
        "- Log-probs that were sampled from a truncated or tempered distribution but recorded raw, with a trainer at",
        "  temperature 1, agree: nothing in these columns shows it.",
        "- k of top-k cannot be told; p of top-p and a temperature can.",
        "- Two wrong columns at once (shifted and in another base) are told as one, or not at all.",
        "",
    ]
    (ROOT / "docs" / "diagnose.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
