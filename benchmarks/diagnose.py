"""Measure how often findings are right on models that no rule was developed on.

    python benchmarks/stranger_dumps.py DUMPS      # train small models and write their dumps: an hour on one core
    python benchmarks/diagnose.py DUMPS [FOLDER ...]

Each FOLDER contains dumps with a known cause, and a labels.json that names it. Writes the tables of
docs/methods/accuracy.md, and the time of the search for causes into docs/methods/causes.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parent.parent
PAGE, COST_PAGE = ROOT / "docs/methods/accuracy.md", ROOT / "docs/methods/causes.md"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from diagnose_cost import cost_section  # noqa: E402
from measure import format_share, group_rows, replace_section, table  # noqa: E402
from reported_faults import NOISE, QUIET, calibration_table  # noqa: E402
from stranger_dumps import PlantedCause, list_causes  # noqa: E402
from stranger_plans import UNSEEN, Architecture  # noqa: E402

from mismatchctl.api.diagnose import diagnose  # noqa: E402
from mismatchctl.diagnosis.findings import CONFIDENCES  # noqa: E402
from mismatchctl.results.model import Finding  # noqa: E402

SIZES = {8: 2, 32: 1, 128: 1, 512: 1}
"""Number of drawn dumps by number of rows. The draws of one size do not share rows."""
ESTIMATE_SIZES = {8: 6, 32: 4, 128: 1}
"""Number of drawn dumps by number of rows, for planted causes whose estimates have an interval."""
ESTIMATES = {
    "temperature": ("temperature", "temperature", "temperature"),
    "raw": ("raw_logprobs", "temperature", "temperature of raw log-probs"),
    "top-p": ("truncated_sampling", "top_p", "top-p"),
    "top-k": ("truncated_sampling", "top_k", "top-k"),
    "growing": ("growing_mismatch", "onset", "onset of growth"),
    "shift of": ("misaligned", "sequences", "share of shifted responses"),
    "edited": ("edited_response", "sequences", "share of edited responses"),
    "swapped": ("swapped_rows", "sequences", "share of responses with the log-probs of other responses"),
    "retokenized": ("retokenized", "sequences", "share of responses that were tokenized again"),
    "no end": ("padding_or_sentinel", "ends", "share of responses without a log-prob for the last token"),
}
"""Beginnings of the names of planted causes, with the cause, the fact whose interval should contain the true value, and
the title of this value in the table.

The true share of faulty rows is that of the whole dump, not of the drawn rows.
"""
TITLES = {
    **{f"raw {t}": f"log-probs recorded without the sampling temperature {t}" for t in (0.7, 0.85, 1.15, 1.3)},
    "repetition 1.1": "repetition penalty 1.1",
    "repetition 1.3": "repetition penalty 1.3",
    "presence 0.5": "presence penalty 0.5",
    "frequency 0.3": "frequency penalty 0.3",
    "bias 1": "engine with a logit bias of 1",
    "banned": "some tokens banned in the engine only",
    "padded vocabulary": "trainer's softmax includes the padding of the vocabulary",
    "softcap 8": "engine with logit soft cap 8",
    "softcap 15": "engine with logit soft cap 15",
    "softcap 8 trainer": "trainer with logit soft cap 8",
    "int8": "engine with int8 weights",
    "int4": "engine with int4 weights",
    "fp8 cache": "engine with an fp8 cache",
    **{
        f"stale {lag}, {columns}": f"engine {lag} update{'s' if lag > 1 else ''} behind, dump {recorded}"
        for lag in (1, 3)
        for columns, recorded in {
            "versions": "with version columns",
            "current": "with current log-probs",
            "bare": "without version columns or current log-probs",
        }.items()
    },
    "stale worker 5": "one worker 5 updates behind",
    "growing": "version lag that grows over the steps",
    "stale step": "engine 5 updates behind at one step",
    "wrong checkpoint": "engine with an earlier checkpoint",
    "adapter": "adapter in the engine only",
    "draft": "rollout column with the log-probs of a draft model",
    "dropout 0.02": "trainer with dropout 0.02",
    "dropout 0.1": "trainer with dropout 0.1",
    "position base 0.5": "trainer with a position base (RoPE, ALiBi) multiplied by 0.5",
    "position base 4.0": "trainer with a position base (RoPE, ALiBi) multiplied by 4",
    "window 12": "trainer with attention window 12",
    "window 40": "trainer with attention window 40",
    "half the prompt lost": "trainer does not see half of the prompt",
    "one prompt token": "trainer does not see one token of the prompt",
    "kept prefix 0": "prompt cache computed with the current weights",
    "kept prefix 5": "prompt cache computed with weights 5 updates old",
    "retokenized": "trainer reads one word of the response as single letters",
    "shift -1": "rollout column shifted by -1",
    "shift +1": "rollout column shifted by 1",
    "shift +3": "rollout column shifted by 3",
    "shift of 5 %": "rollout column shifted in 5% of the responses",
    "edited 30 %": "30% of the responses edited after sampling",
    "edited 2 %": "2% of the responses edited after sampling",
    "tools": "tool output not masked",
    "stored bfloat16": "rollout column stored in bfloat16",
    "stored float16": "rollout column stored in float16",
    "stored 3": "rollout column stored with 3 decimals",
    "stored 2": "rollout column stored with 2 decimals",
    "base 2": "rollout log-probs to base 2",
    "probabilities": "probabilities in the rollout column",
    "duplicates": "20% of the responses repeated",
    "NaN": "NaN in the trainer column at 1% of the tokens",
    "no end": "no rollout log-prob for the last token",
    "zeros on 1 %": "rollout log-prob 0 at 1% of the tokens",
    "-30 on 1 %": "rollout log-prob -30 at 1% of the tokens",
    "10 % wrong ends": "wrong trainer log-prob for the last token in 10% of the responses",
    "swapped 5 %": "rollout log-probs of other responses in 5% of the responses",
    "swapped all": "rollout log-probs of other responses in all responses",
    "reversed": "rollout log-probs in reverse order",
    "cumulative": "running sums of the log-probs in the rollout column",
    "means": "sequence means of the log-probs in the rollout column",
    "clamped": "rollout log-probs below -3 replaced by -3",
    "router noise": "trainer with router noise",
}
"""Titles of planted causes in the table. Other causes are printed with their names."""
ONSET, LEAST_TOKENS = 4.0, 12
"""The planted onset of `growing`, and the minimum length of rows that count for the share of faulty rows."""
LISTED = {cause.name for cause in list_causes() if cause.listed}
CLEAN = ("clean", "clean float32", "clean both bfloat16", "clean greedy")
DRAWS = 12
NAMES = {"none": "no positions"}
NOISE_FACTOR = 1.5
"""K3 of a visible fault, relative to the K3 of the clean dump."""
LABELS = {  # causes of the labels.json files under their names in mismatchctl
    "precision_noise": "numerical_noise",
    "temperature_mismatch": "temperature",
    "kv_cache_quantization": "cache_quantization",
    "float32_noise": "numerical_noise",
}


@dataclass(frozen=True)
class Verdict:
    """The findings for a drawn dump with a planted cause.

    Attributes:
        truth: Causes of findings that count as right.
        share: Share of faulty rows in the whole dump.
        exceeds_noise: Whether the drawn rows contain a fault with more K3 than the engine's noise.
    """

    model: str
    cause: str
    rows: int
    truth: frozenset[str]
    share: float
    exceeds_noise: bool
    found: list[Finding]

    @property
    def alarms(self) -> list[Finding]:
        return [finding for finding in self.found if finding.confidence != "low"]

    @property
    def right(self) -> bool:
        """Return True if the first finding, above low confidence, is the planted cause."""
        return bool(self.alarms) and self.alarms[0].cause in self.truth


def judge_causes(plans: Iterable[Architecture], folder: Path) -> Iterator[Verdict]:
    """Yield verdicts on random draws of the dumps with planted causes."""
    jobs = [
        (plan, cause.name, folder)
        for plan in plans
        for cause in list_causes()
        if (folder / plan.name / f"{cause.name}.parquet").exists()
    ]
    with ProcessPoolExecutor() as pool:
        for rows in pool.map(_judge_cause, *zip(*jobs, strict=True)):
            yield from rows


def _judge_cause(plan: Architecture, name: str, folder: Path) -> list[Verdict]:
    tables = [pq.read_table(folder / plan.name / f"{one}.parquet") for one in (name, "clean")]
    return list(_judge_draws(plan, next(cause for cause in list_causes() if cause.name == name), *tables))


def _exceeds_noise(table: pa.Table, clean: pa.Table) -> bool:
    """Return True if the fault has more K3 than the engine's noise. Some faults have no effect on some models."""
    return _k3(table) > NOISE_FACTOR * _k3(clean)


def _k3(table: pa.Table) -> float:
    sides = [np.asarray(table[f"{side}_log_probs"].combine_chunks().values) for side in ("train", "rollout")]
    x = np.clip(np.nan_to_num(sides[0].astype(np.float64) - sides[1], nan=20.0), -20, 20)
    return float((np.expm1(x) - x).mean())


def _judge_draws(plan: Architecture, cause: PlantedCause, table: pa.Table, clean: pa.Table) -> Iterator[Verdict]:
    visible = cause.truth.isdisjoint(NOISE) and _exceeds_noise(table, clean)
    has_estimate = any(cause.name.startswith(kind) for kind in ESTIMATES)
    long = np.array([len(row) >= LEAST_TOKENS for row in table["token_ids"].to_pylist()])
    share = float(_find_changed_rows(table, clean)[long].mean())
    for rows, draws in SIZES.items():
        order = np.random.default_rng(rows).permutation(table.num_rows)
        for draw in range(min(ESTIMATE_SIZES.get(rows, draws) if has_estimate else draws, table.num_rows // rows)):
            chosen = np.sort(order[draw * rows : (draw + 1) * rows])
            part, truth, exceeds_noise = table.take(chosen), cause.truth, visible
            if not _find_changed_rows(part, clean).any():  # the fault is in few rows, and none was drawn
                truth, exceeds_noise = NOISE, False
            elif not (cause.listed or visible):
                truth |= NOISE
            yield Verdict(plan.name, cause.name, rows, truth, share, exceeds_noise, diagnose_table(part))


def _find_changed_rows(part: pa.Table, clean: pa.Table) -> np.ndarray:
    """Return a mask [S] of the rows that differ from the clean dump, and of repeated rows."""
    ids = part["sequence_id"].to_numpy()
    changed = ids >= clean.num_rows
    changed[np.setdiff1d(np.arange(len(ids)), np.unique(ids, return_index=True)[1])] = True
    same = clean.take(np.minimum(ids, clean.num_rows - 1))
    for name in ("rollout_log_probs", "train_log_probs"):
        rows = zip(part[name].to_pylist(), same[name].to_pylist(), strict=True)
        changed |= np.array([one != other for one, other in rows])
    return changed


def diagnose_table(table: pa.Table) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(table, f"{folder}/dump.parquet")
        (found,) = diagnose([f"{folder}/dump.parquet"], threads=1).runs.values()
    return found


def judge_clean(plans: Iterable[Architecture], folder: Path) -> Iterator[Verdict]:
    """Yield verdicts on draws of clean dumps with random workers, steps and version lags."""
    jobs = [
        (plan, name, folder) for plan in plans for name in CLEAN if (folder / plan.name / f"{name}.parquet").exists()
    ]
    with ProcessPoolExecutor() as pool:
        for rows in pool.map(_judge_clean_dump, *zip(*jobs, strict=True)):
            yield from rows


def _judge_clean_dump(plan: Architecture, name: str, folder: Path) -> list[Verdict]:
    whole = pq.read_table(folder / plan.name / f"{name}.parquet")
    drawn = [(rows, draw) for rows in SIZES for draw in range(DRAWS if rows <= whole.num_rows else 0)]
    return [
        Verdict(plan.name, name, rows, NOISE | QUIET, 0.0, False,
               diagnose_table(_draw_clean_dump(whole, rows, np.random.default_rng(1000 * draw + rows))))
        for rows, draw in drawn
    ]  # fmt: skip


def alarm_table(rows: list[Verdict]) -> Iterator[str]:
    """Count clean dumps with a finding other than noise, by number of rows."""
    yield "| responses per dump | dumps with a false alarm | dumps with a false alarm at high confidence |"
    yield "|---|---|---|"
    for size in SIZES:
        right = [[one for one in row.found if one.cause not in QUIET] for row in rows if row.rows == size]
        cells = (
            format_share(sum(any(one.confidence in levels for one in found) for found in right), len(right))
            for levels in (("medium", "high"), ("high",))
        )
        yield f"| {size} | {' | '.join(cells)} |"


def _draw_clean_dump(table: pa.Table, rows: int, random: np.random.Generator) -> pa.Table:
    part = table.take(np.sort(random.permutation(table.num_rows)[:rows])).drop_columns(["worker", "step"])
    worker = random.integers(0, random.choice([2, 4, 8, rows]), rows)
    step = np.sort(random.integers(0, random.choice([1, 4, 8, rows]), rows))
    lag = random.integers(0, 3, rows) * int(random.random() < 0.5)
    columns = {"worker": worker, "step": step, "rollout_version": 9 + 0 * lag, "train_version": 9 + lag}
    for name, values in columns.items():
        part = part.append_column(name, pa.array(values))
    return part


def detection_table(rows: list[Verdict]) -> list[str]:
    """Return the percentage of right first findings by cause and number of rows, and frequent wrong findings."""
    found = []
    for name in dict.fromkeys(row.cause for row in rows):
        own = [row for row in rows if row.cause == name]
        cells = []
        for size in SIZES:
            right = [row.right for row in own if row.rows == size]
            cells.append(f"{100 * np.mean(right):.0f}" if right else "")
        others = Counter(row.alarms[0].cause if row.alarms else "no finding" for row in own if not row.right)
        wrong = ", ".join(f"{cause} {count}" for cause, count in others.most_common(3))
        found.append((TITLES.get(name, name), (*cells, wrong)))
    heads = ("planted faults", *(f"{size} responses" for size in SIZES), "wrong first findings")
    return table(heads, group_rows(found)).splitlines()


def coverage_table(rows: list[Verdict]) -> list[str]:
    """Return the share of intervals that contain the true value, and count missing intervals."""
    lines = []
    for kind, (cause, name, title) in ESTIMATES.items():
        contained: list[bool] = []
        without_interval = 0
        for row in rows:
            found = [finding for finding in row.found if finding.cause == cause]
            if not f"{row.cause} ".startswith(f"{kind} ") or not found:
                continue
            value = _planted_value(row, name)
            ends = [fact.interval for fact in found[0].evidence if fact.name == name and fact.interval is not None]
            without_interval += not ends
            contained += [low <= value <= high for low, high in ends]
        if contained or without_interval:
            lines.append((title, format_share(sum(contained), len(contained)), without_interval))
    return table(
        ("estimate", "interval contains the planted value", "findings without an interval"), lines
    ).splitlines()


def _planted_value(row: Verdict, name: str) -> float:
    """Return the value that the interval of a fact should contain."""
    if name in ("sequences", "ends"):
        return row.share
    return ONSET if name == "onset" else float(row.cause.split(" ")[1])


def known_table(folders: Iterable[Path]) -> Iterator[str]:
    """Yield a table of the first findings in folders of dumps with known causes, and a table of the wrong ones."""
    wrong = []
    heads = (
        "first finding right",
        "right, high confidence",
        "right, medium confidence",
        "wrong later findings, high confidence",
    )
    yield f"| dumps | {' | '.join(heads)} |"
    yield "|---|---|---|---|---|"
    for folder in folders:
        counts: Counter[tuple[str, bool]] = Counter()
        more = 0
        for name, label in sorted(json.loads((folder / "labels.json").read_text()).items()):
            causes = [label["cause"]] if "cause" in label else label.get("causes_accepted") or label.get("first") or []
            truth = {LABELS.get(cause, cause) for cause in causes}
            if not truth:
                continue
            (found,) = diagnose([str(folder / name)], threads=1).runs.values()
            right = found[0].cause in truth
            counts[found[0].confidence, right] += 1
            also = truth | ({"truncated_sampling"} if "top_p" in label else set())  # a second planted cause
            more += sum(one.confidence == "high" and one.cause not in also for one in found[1:])
            if not right:
                rivals = {rival.cause for rival in found[0].rivals} & truth
                planted = " or ".join(f"`{cause}`" for cause in sorted(truth))
                finding = f"`{found[0].cause}`, {found[0].confidence} confidence"
                wrong.append((Path(name).stem, planted, finding, "yes" if rivals else "no"))
        cells = [
            format_share(counts[level, True], counts[level, True] + counts[level, False]) for level in CONFIDENCES[:2]
        ]
        right = sum(count for (_, good), count in counts.items() if good)
        title = folder.name.replace("_", " ")
        yield f"| {title} | {format_share(right, counts.total())} | {' | '.join(cells)} | {more} |"
    heads = ("dump", "planted fault", "first finding", "first finding lists the planted fault as a possible cause")
    yield from ["", "The first finding is wrong in these dumps:", "", table(heads, wrong)] if wrong else []


def describe_models(plans: Iterable[Architecture], folder: Path) -> list[str]:
    rows = [
        (
            f"`{plan.name}`",
            "words" if plan.words else "bytes",
            f"{plan.layers} of width {plan.width}",
            f"{plan.heads} heads"
            + (f", {plan.shared} per key-value head" if plan.shared > 1 else "")
            + (", convolutions in turn with attention" if plan.convolved else ""),
            NAMES.get(plan.positions, plan.positions),
            ("squared ReLU parallel to attention" if plan.parallel else "SwiGLU")
            + (f", {plan.experts} experts, {plan.chosen} per token by {plan.router}" if plan.experts > 1 else ""),
            f"{plan.steps} steps, at most {plan.texts:,} texts",
        )
        for plan in plans
        if (folder / plan.name / "clean.parquet").exists()
    ]
    heads = ("model", "tokens", "layers", "attention", "positions", "feed-forward", "training")
    return table(heads, rows).splitlines()


def section(plans: tuple[Architecture, ...], folder: Path) -> list[str]:
    """Return all tables for the given models."""
    rows, clean = list(judge_causes(plans, folder)), list(judge_clean(plans, folder))
    groups = {f"{size} responses": [row for row in (*rows, *clean) if row.rows == size] for size in SIZES}
    groups |= {f"`{plan.name}`": [row for row in (*rows, *clean) if row.model == plan.name] for plan in plans}
    groups["all"] = [*rows, *clean]
    right = {listed: [row.right for row in rows if (row.cause in LISTED) == listed] for listed in (True, False)}
    others = len(list_causes()) - len(LISTED)
    return [
        *describe_models(plans, folder),
        "",
        f"The test uses {len(rows):,} dumps with a planted fault and {len(clean):,} clean dumps.",
        "The table shows the percentage of findings that are true, by confidence and [kind of finding](#confidence):",
        "",
        *calibration_table(
            {name: [(row.found, row.truth, row.exceeds_noise) for row in own] for name, own in groups.items()}
        ),
        "",
        f"`diagnose` is designed to recognize {len(LISTED)} of the {len(list_causes())} planted faults. "
        f"In {format_share(sum(right[True]), len(right[True]))} of the dumps with these faults, the first finding "
        f"names the fault. For the other {others} faults, `unexplained` also counts as a right finding. "
        f"In {format_share(sum(right[False]), len(right[False]))} of the dumps with these faults, the first finding "
        "is right.",
        "",
        "Any finding in a clean dump is a false alarm, except a noise finding. The table counts clean dumps with a",
        "false alarm of medium or high confidence. In the clean dumps, the columns for the worker, the step and the",
        "weight version contain random values. A false alarm can therefore also blame a worker, a step or a version.",
        "",
        *alarm_table(clean),
        "",
        "The next table shows the percentage of dumps in which the first finding is right. Faults with the same result",
        "share a row. The last column lists the wrong first findings, each with its number of dumps. The column",
        '"512 responses" is empty if no such dump was made. A noise finding counts as right in two cases:',
        "",
        "- The dump is a random part of a larger dump, and no response in this part has the fault.",
        f"- The fault is one of the {others} faults that `diagnose` is not designed to recognize, and it raises K3 to",
        f"  at most {NOISE_FACTOR} times the K3 of a clean dump of the same model.",
        "",
        *detection_table(rows),
        "",
        "The next table shows how often the 95% interval of an estimate contains the planted value:",
        "",
        *coverage_table(rows),
        "",
    ]


def main() -> None:
    dumps, folders = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    model = next(plan.name for plan in UNSEEN[::-1] if (dumps / plan.name).exists())
    blocks = {
        "known": (PAGE, known_table(folders)),
        "strangers": (PAGE, section(UNSEEN, dumps)),
        "cost": (COST_PAGE, cost_section(dumps, model)),
    }
    for name, (page, lines) in blocks.items():
        if name != "known" or folders:
            replace_section("\n".join(lines), page, f"<!-- {name} -->", f"<!-- end of {name} -->")


if __name__ == "__main__":
    main()
