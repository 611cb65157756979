"""Measure how often findings are true on models that no rule was built on.

Writes the tables of docs/methods/accuracy.md, and the time of the search into docs/methods/causes.md.

    python benchmarks/stranger_dumps.py DUMPS      # trains small models and makes their dumps: an hour of one core
    python benchmarks/diagnose.py DUMPS [FOLDER ...]

Each FOLDER contains dumps with a known cause, and a labels.json that names it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter, defaultdict
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
from measure import between  # noqa: E402
from reported_faults import NOISE, QUIET, calibration, percent  # noqa: E402
from stranger_dumps import Plant, plants  # noqa: E402
from stranger_plans import UNSEEN, Architecture  # noqa: E402

from mismatchctl.api.diagnose import diagnose  # noqa: E402
from mismatchctl.diagnosis.findings import CONFIDENCES  # noqa: E402
from mismatchctl.results.model import Finding  # noqa: E402

SIZES = {8: 2, 32: 1, 128: 1, 512: 1}
"""Number of rows of a dump -> number of dumps that are drawn with this number of rows. No row is drawn twice."""
OFTEN = {8: 6, 32: 4, 128: 1}
"""The same numbers for planted causes whose estimates have an interval."""
ESTIMATES = {
    "temperature": ("temperature", "temperature"),
    "raw": ("raw_logprobs", "temperature"),
    "top-p": ("truncated_sampling", "top_p"),
    "top-k": ("truncated_sampling", "top_k"),
    "growing": ("growing_mismatch", "onset"),
    "shift of": ("misaligned", "sequences"),
    "edited": ("edited_response", "sequences"),
    "swapped": ("swapped_rows", "sequences"),
    "retokenized": ("retokenized", "sequences"),
    "no end": ("padding_or_sentinel", "ends"),
}
"""Plants by the beginning of their names: the cause, and the fact of it whose interval should hold what was planted.

Shares of rows are those of the whole dump that the rows were drawn of.
"""
ONSET, LEAST_TOKENS = 4.0, 12
"""Where `growing` was planted, and tokens of a row that a share is of."""
LISTED = {plant.name for plant in plants() if plant.listed}
CLEAN = ("clean", "clean float32", "clean both bfloat16", "clean greedy")
DRAWS = 12
NAMES = {"none": "no positions"}
_FELT = 1.5
LABELS = {
    "precision_noise": "numerical_noise",
    "temperature_mismatch": "temperature",
    "kv_cache_quantization": "cache_quantization",
    "float32_noise": "numerical_noise",
}


@dataclass(frozen=True)
class Judged:
    """A dump that was diagnosed: the plant, its rows, and what was found.

    `truth` are the right names, `share` the rows of the whole dump that were changed, and `felt` is whether the rows
    contain a fault that makes more K3 than the engine's noise.
    """

    model: str
    plant: str
    rows: int
    truth: frozenset[str]
    share: float
    felt: bool
    found: list[Finding]

    @property
    def alarms(self) -> list[Finding]:
        return [finding for finding in self.found if finding.confidence != "low"]

    @property
    def right(self) -> bool:
        """Return True if the first finding, above low confidence, is the planted cause."""
        return bool(self.alarms) and self.alarms[0].cause in self.truth


def judged(plans: Iterable[Architecture], folder: Path) -> Iterator[Judged]:
    """Yield random draws of the dumps of some models."""
    there = [
        (plan, plant.name, folder)
        for plan in plans
        for plant in plants()
        if (folder / plan.name / f"{plant.name}.parquet").exists()
    ]
    with ProcessPoolExecutor() as pool:
        for rows in pool.map(_of_plant, *zip(*there, strict=True)):
            yield from rows


def _of_plant(plan: Architecture, name: str, folder: Path) -> list[Judged]:
    tables = [pq.read_table(folder / plan.name / f"{one}.parquet") for one in (name, "clean")]
    return list(_draws(plan, next(plant for plant in plants() if plant.name == name), *tables))


def _shows(table: pa.Table, clean: pa.Table) -> bool:
    """Whether a plant makes more K3 than the engine's noise: a model that hardly attends does not feel a window."""
    return _k3(table) > _FELT * _k3(clean)


def _k3(table: pa.Table) -> float:
    sides = [np.asarray(table[f"{side}_log_probs"].combine_chunks().values) for side in ("train", "rollout")]
    x = np.clip(np.nan_to_num(sides[0].astype(np.float64) - sides[1], nan=20.0), -20, 20)
    return float((np.expm1(x) - x).mean())


def _draws(plan: Architecture, plant: Plant, table: pa.Table, clean: pa.Table) -> Iterator[Judged]:
    shows = plant.truth.isdisjoint(NOISE) and _shows(table, clean)
    often = any(plant.name.startswith(kind) for kind in ESTIMATES)
    long = np.array([len(row) >= LEAST_TOKENS for row in table["token_ids"].to_pylist()])
    share = float(_changed(table, clean)[long].mean())
    for rows, draws in SIZES.items():
        order = np.random.default_rng(rows).permutation(table.num_rows)
        for draw in range(min(OFTEN.get(rows, draws) if often else draws, table.num_rows // rows)):
            chosen = np.sort(order[draw * rows : (draw + 1) * rows])
            part, truth, felt = table.take(chosen), plant.truth, shows
            if not _changed(part, clean).any():  # a plant in few rows, none of which was drawn
                truth, felt = NOISE, False
            elif not (plant.listed or shows):
                truth |= NOISE
            yield Judged(plan.name, plant.name, rows, truth, share, felt, findings(part))


def _changed(part: pa.Table, clean: pa.Table) -> np.ndarray:
    """Rows [S] that are not as they were before something was planted; duplicates: those that are there again."""
    ids = part["sequence_id"].to_numpy()
    changed = ids >= clean.num_rows
    changed[np.setdiff1d(np.arange(len(ids)), np.unique(ids, return_index=True)[1])] = True
    same = clean.take(np.minimum(ids, clean.num_rows - 1))
    for name in ("rollout_log_probs", "train_log_probs"):
        rows = zip(part[name].to_pylist(), same[name].to_pylist(), strict=True)
        changed |= np.array([one != other for one, other in rows])
    return changed


def findings(table: pa.Table) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(table, f"{folder}/dump.parquet")
        (found,) = diagnose([f"{folder}/dump.parquet"], threads=1).runs.values()
    return found


def healthy(plans: Iterable[Architecture], folder: Path) -> Iterator[Judged]:
    """Draws of clean dumps with workers, steps and version lags that mean nothing."""
    there = [
        (plan, name, folder) for plan in plans for name in CLEAN if (folder / plan.name / f"{name}.parquet").exists()
    ]
    with ProcessPoolExecutor() as pool:
        for rows in pool.map(_of_clean, *zip(*there, strict=True)):
            yield from rows


def _of_clean(plan: Architecture, name: str, folder: Path) -> list[Judged]:
    whole = pq.read_table(folder / plan.name / f"{name}.parquet")
    drawn = [(rows, draw) for rows in SIZES for draw in range(DRAWS if rows <= whole.num_rows else 0)]
    return [
        Judged(plan.name, name, rows, NOISE | QUIET, 0.0, False,
               findings(_shuffled(whole, rows, np.random.default_rng(1000 * draw + rows))))
        for rows, draw in drawn
    ]  # fmt: skip


def alarms(rows: list[Judged]) -> Iterator[str]:
    """Count clean dumps with a finding other than noise, by number of rows."""
    yield "| rows | dumps with an alarm at medium or high | at high |"
    yield "|---|---|---|"
    for size in SIZES:
        told = [[one for one in row.found if one.cause not in QUIET] for row in rows if row.rows == size]
        cells = (
            percent(sum(any(one.confidence in levels for one in found) for found in told), len(told))
            for levels in (("medium", "high"), ("high",))
        )
        yield f"| {size} | {' | '.join(cells)} |"


def _shuffled(table: pa.Table, rows: int, random: np.random.Generator) -> pa.Table:
    part = table.take(np.sort(random.permutation(table.num_rows)[:rows])).drop_columns(["worker", "step"])
    worker = random.integers(0, random.choice([2, 4, 8, rows]), rows)
    step = np.sort(random.integers(0, random.choice([1, 4, 8, rows]), rows))
    lag = random.integers(0, 3, rows) * int(random.random() < 0.5)
    columns = {"worker": worker, "step": step, "rollout_version": 9 + 0 * lag, "train_version": 9 + lag}
    for name, values in columns.items():
        part = part.append_column(name, pa.array(values))
    return part


def detection(rows: list[Judged]) -> list[str]:
    """First findings that name the cause, by plant and rows; and what else came first."""
    lines = [
        "| planted | " + " | ".join(f"{size} rows" for size in SIZES) + " | wrong first findings |",
        "|---|" + "---|" * (len(SIZES) + 1),
    ]
    for name in dict.fromkeys(row.plant for row in rows):
        mine = [row for row in rows if row.plant == name]
        cells = []
        for size in SIZES:
            told = [row.right for row in mine if row.rows == size]
            cells.append(f"{100 * np.mean(told):.0f}" if told else "")
        others = Counter(row.alarms[0].cause if row.alarms else "no finding" for row in mine if not row.right)
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(f'{c} {n}' for c, n in others.most_common(3))} |")
    return lines


def coverage(rows: list[Judged]) -> list[str]:
    """How often intervals hold the planted value, by rows; and how often there was none."""
    lines = [
        "| estimate | " + " | ".join(f"{size} rows" for size in SIZES) + " | all | no interval |",
        "|---|" + "---|" * (len(SIZES) + 2),
    ]
    for kind, (cause, name) in ESTIMATES.items():
        told: dict[int, list[bool]] = defaultdict(list)
        untold = 0
        for row in rows:
            found = [finding for finding in row.found if finding.cause == cause]
            if not f"{row.plant} ".startswith(f"{kind} ") or not found:
                continue
            value = _planted(row, name)
            ends = [fact.interval for fact in found[0].evidence if fact.name == name and fact.interval is not None]
            untold += not ends
            told[row.rows] += [low <= value <= high for low, high in ends]
        cells = [percent(sum(told[size]), len(told[size])) for size in SIZES]
        whole = sum(map(sum, told.values())), sum(map(len, told.values()))
        if whole[1] + untold:
            lines.append(f"| {kind} ({name}) | {' | '.join(cells)} | {percent(*whole)} | {untold} |")
    return lines


def _planted(row: Judged, name: str) -> float:
    """Return the value that the interval of a fact should contain."""
    if name in ("sequences", "ends"):
        return row.share
    return ONSET if name == "onset" else float(row.plant.split(" ")[1])


def known(folders: Iterable[Path]) -> Iterator[str]:
    """Yield a table of the first findings in folders of dumps with known causes, and a list of the wrong ones."""
    wrong = []
    yield "| dumps | first finding right | right at high | right at medium | also at high, wrong |"
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
                listed = ", which lists the planted cause as possible" if rivals else ""
                planted = " or ".join(sorted(truth))
                finding = f"{found[0].cause} ({found[0].confidence}){listed}"
                wrong.append(f"- In the dump {name}, the finding for {planted} is {finding}.")
        cells = [percent(counts[level, True], counts[level, True] + counts[level, False]) for level in CONFIDENCES[:2]]
        right = sum(count for (_, good), count in counts.items() if good)
        title = folder.name.replace("_", " ")
        yield f"| {title} | {percent(right, counts.total())} | {' | '.join(cells)} | {more} |"
    yield from ["", *wrong]


def models(plans: Iterable[Architecture], folder: Path) -> list[str]:
    return [
        f"- `{plan.name}`: {'words' if plan.words else 'bytes'}, {plan.layers} layers of {plan.width}, "
        f"{plan.heads} heads"
        + (f" ({plan.shared} share keys and values)" if plan.shared > 1 else "")
        + (", convolutions in turn with attention" if plan.convolved else "")
        + f", {NAMES.get(plan.positions, plan.positions)}, "
        + ("squared ReLU beside attention" if plan.parallel else "SwiGLU")
        + (f", {plan.experts} experts by {plan.router}, {plan.chosen} chosen" if plan.experts > 1 else "")
        + f", {plan.steps} steps on {plan.texts:,} texts at most"
        for plan in plans
        if (folder / plan.name / "clean.parquet").exists()
    ]


def section(plans: tuple[Architecture, ...], folder: Path) -> list[str]:
    """All tables of some models."""
    rows, clean = list(judged(plans, folder)), list(healthy(plans, folder))
    groups = {f"{size} rows": [row for row in (*rows, *clean) if row.rows == size] for size in SIZES}
    groups |= {f"`{plan.name}`": [row for row in (*rows, *clean) if row.model == plan.name] for plan in plans}
    groups["all"] = [*rows, *clean]
    right = {listed: [row.right for row in rows if (row.plant in LISTED) == listed] for listed in (True, False)}
    return [
        *models(plans, folder),
        "",
        f"{len(rows):,} dumps with a planted fault and {len(clean):,} clean dumps. Share of true findings:",
        "",
        *calibration({name: [(row.found, row.truth, row.felt) for row in own] for name, own in groups.items()}),
        "",
        "For causes that `diagnose` claims to identify, the first finding names the planted cause in "
        f"{percent(sum(right[True]), len(right[True]))} of the",
        "dumps. For all other causes, `unexplained` also counts as right, and the first finding is right in "
        f"{percent(sum(right[False]), len(right[False]))}",
        "of the dumps.",
        "",
        "The table shows false alarms in clean dumps. The workers, steps and version lags of these dumps are drawn at "
        "random, so",
        "that some have a single row:",
        "",
        *alarms(clean),
        "",
        "The next table shows the percentage of dumps whose first finding names the planted cause, by number of rows. "
        "A dump",
        "that happens to have no faulty row counts as clean. If `diagnose` does not claim to identify a fault, and the "
        "fault",
        "multiplies the engine's own K3 by less than 1.5, a noise finding also counts as right.",
        "",
        *detection(rows),
        "",
        "The next table shows the share of the 95 % intervals that contain the planted value, by the number of rows "
        "in the",
        "dump:",
        "",
        *coverage(rows),
        "",
    ]


def main() -> None:
    dumps, folders = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    model = next(plan.name for plan in UNSEEN[::-1] if (dumps / plan.name).exists())
    blocks = {
        "known": (PAGE, known(folders)),
        "strangers": (PAGE, section(UNSEEN, dumps)),
        "cost": (COST_PAGE, cost_section(dumps, model)),
    }
    for name, (page, lines) in blocks.items():
        if name != "known" or folders:
            between("\n".join(lines), page, f"<!-- {name} -->", f"<!-- end of {name} -->")


if __name__ == "__main__":
    main()
