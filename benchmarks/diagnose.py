"""Writes docs/diagnose.md: what each cause looks like, and how often findings are true on models nobody tuned to.

    python benchmarks/stranger_dumps.py DUMPS      # trains small models and makes their dumps: an hour of one core
    python benchmarks/diagnose.py DUMPS [FOLDER]

FOLDER holds real dumps with a known cause each, and a labels.json that names it; its table is written only with it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from stranger_dumps import Plant, plants  # noqa: E402
from strangers import SEEN, UNSEEN, Architecture  # noqa: E402

from mismatchctl.diagnose import diagnose  # noqa: E402
from mismatchctl.diagnose.causes import CAUSES  # noqa: E402
from mismatchctl.result import Finding  # noqa: E402

SIZES = {8: 2, 32: 1, 128: 1, 512: 1}
"""Rows of a dump, and how many are drawn of each, no row twice."""
OFTEN = {8: 6, 32: 4, 128: 1}
"""The same of plants whose estimates have an interval."""
FEWER = {8: 1, 128: 1}
"""The same of models that rules were tried on, whose figures flatter."""
ESTIMATES = {
    "temperature": ("temperature", "temperature"),
    "raw": ("raw_logprobs", "temperature"),
    "top-p": ("truncated_sampling", "top_p"),
    "top-k": ("truncated_sampling", "top_k"),
    "growing": ("growing_mismatch", "onset"),
    "shift of": ("misaligned", "sequences"),
}
"""Plants by the beginning of their names: the cause, and the fact of it whose interval should hold what was planted."""
PLANTED = {"growing": 4.0, "shift of 5 %": 0.05}
"""Values that are not in the name of a plant."""
CLEAN = ("clean", "clean float32", "clean both bfloat16", "clean greedy")
QUIET = {"numerical_noise", "identical"}
DRAWS = 12
ESTIMATED = (
    "## How settings are estimated",
    "",
    "- A temperature (or what raw log-probs hide) is the exponent b in q = p^b / Z, whose Z is of each context and",
    "  unknown. What sampled from q has E[p / q] = 1 in every context, so that p / q - 1 is an instrument that no",
    "  function of the context moves: b = E[(p / q - 1) log q] / E[(p / q - 1) log p], whatever the contexts are. Its",
    "  interval holds every b that the scatter between clusters does not refute, and all that noise in the trainer's",
    "  column does to it: errors in log p draw the exponent away from 1, by twice the K3 of that noise at most, which",
    "  is counted as a spread of 0.05 in the logits. Experts that flip more than that are not in the interval.",
    "- If one b is right for all, ratios average to 1 among the contexts of each Z. A soft cap, penalties and other",
    "  weights do not leave it so: that, not only how unlikely tokens scale, tells a temperature from them.",
    "- k is E[1 / q]: sampled from q, 1 / q averages to the number of tokens that have any probability, in every",
    "  context. Places count by the mass that was cut off. Where fewer tokens are kept the less is cut, it is top-p;",
    "  where more are, min-p.",
    "- p is where the log-probs of tokens that were alone in their nucleus end; without such, it lies between the mass",
    "  that was kept and the same without the sampled token.",
    "- Shares of rows that are shifted, edited or tokenized anew have Wilson's interval, an onset that of the fit of",
    "  the growth. Of rows that hold each other's log-probs only those are counted whose other row is in the sample,",
    "  which bounds their share from below: it has no interval. A lag is what the version columns say.",
    "- min-p has no estimate without recorded lists of both sides' likeliest tokens, nor has k where less than a tenth",
    "  of the mass is cut, nor a temperature beside a truncation.",
    "",
)
"""Why estimates are what they are."""
BEFORE = (
    "## What these models said before rules were tried on them",
    "",
    "The honest measure of a model is its first one. Three of the models above were strangers once; what they showed",
    "then changed rules, and they count among the models that rules were tried on since:",
    "",
    "- `gqa-unsure` hardly attends to its context and is sure of nothing. Findings at high were true in 75 % (141 of",
    "  187), at medium in 54 % (45 of 84): temperatures were called other weights, and settings that it does not feel",
    "  were noise. Likely tokens are told by rank since then.",
    "- `softmax-moe-sure` makes a noise of 0.043 to 0.048 in bfloat16, twice the bound of the rules, with the far tail",
    "  of experts chosen differently. Of clean dumps of this model and `alibi-parallel`, 25 to 38 % raised an alarm at",
    "  medium or high, and 17 % of those with 32 rows at high; findings at high were true in 96 % (318 of 332), at",
    "  medium in 36 % (75 of 210).",
    "- `alibi-parallel`: findings at high were true in 98.6 % (204 of 207), at medium in 69.6 % (39 of 56), and 25 %",
    "  of its clean dumps of 128 rows raised an alarm: greedy samples, whose ratios do not average to 1, were called",
    "  another vocabulary. Noise that rises along the response was called other weights.",
    "",
    "`alibi-moe` has one rule that followed a look at it: 3 of its 24 clean dumps of 128 rows were called another",
    "vocabulary at first, greedy samples like those of `alibi-parallel`. Clean draws were doubled after a first look",
    "(1 of 24 at 32 rows), and an interval that held 2 of 5 was taken away. Its other figures are its first ones, and",
    "from before `stale_prefix` was made to ask for starts that are louder than what follows.",
    "Where they miss: positions that are off under ALiBi are called other weights, at high; a prefix cache kept over",
    "updates is not seen in it; few steps or workers that are stale, in 8 rows, are noise. Another stranger may do as",
    "badly in its own way.",
    "",
)
"""First measures, which a rerun cannot give."""
_FELT = 1.5
LABELS = {
    "precision_noise": "numerical_noise",
    "temperature_mismatch": "temperature",
    "kv_cache_quantization": "cache_quantization",
}


@dataclass(frozen=True)
class Judged:
    """A dump that was diagnosed: the plant, its rows, and what was found; `truth` are the right names."""

    model: str
    plant: str
    listed: bool
    rows: int
    truth: frozenset[str]
    found: list[Finding]

    @property
    def alarms(self) -> list[Finding]:
        return [finding for finding in self.found if finding.confidence != "low"]

    @property
    def right(self) -> bool:
        """Whether the first finding, beyond low confidence, names the cause."""
        return bool(self.alarms) and self.alarms[0].cause in self.truth


def judged(plans: Iterable[Architecture], folder: Path) -> Iterator[Judged]:
    """Draws of the dumps of some models."""
    for plan in plans:
        clean = folder / plan.name / "clean.parquet"
        if not clean.exists():
            continue
        sound = pq.read_table(clean)
        for plant in plants():
            path = folder / plan.name / f"{plant.name}.parquet"
            if path.exists():
                yield from _draws(plan, plant, pq.read_table(path), sound)


def _shows(table: pa.Table, clean: pa.Table) -> bool:
    """Whether a plant makes more K3 than the engine's noise: a model that hardly attends does not feel a window."""
    return _k3(table) > _FELT * _k3(clean)


def _k3(table: pa.Table) -> float:
    sides = [np.asarray(table[f"{side}_log_probs"].combine_chunks().values) for side in ("train", "rollout")]
    x = np.clip(np.nan_to_num(sides[0].astype(np.float64) - sides[1], nan=20.0), -20, 20)
    return float((np.expm1(x) - x).mean())


def _draws(plan: Architecture, plant: Plant, table: pa.Table, clean: pa.Table) -> Iterator[Judged]:
    felt = plant.listed or _shows(table, clean)
    sizes = SIZES if plan in UNSEEN else FEWER
    often = plan in UNSEEN and any(plant.name.startswith(kind) for kind in ESTIMATES)
    for rows, draws in sizes.items():
        order = np.random.default_rng(rows).permutation(table.num_rows)
        for draw in range(min(OFTEN.get(rows, draws) if often else draws, table.num_rows // rows)):
            chosen = np.sort(order[draw * rows : (draw + 1) * rows])
            part, truth = table.take(chosen), plant.truth
            if not _touched(part, clean):  # a plant in few rows, none of which was drawn
                truth = frozenset({"numerical_noise", "moe_routing"})
            elif not felt:
                truth |= {"numerical_noise", "moe_routing"}
            yield Judged(plan.name, plant.name, plant.listed, rows, truth, findings(part))


def _touched(part: pa.Table, clean: pa.Table) -> bool:
    """Whether some row is not as it was before something was planted; duplicates: a row that is there twice."""
    ids = part["sequence_id"].to_numpy()
    if len(set(ids.tolist())) < len(ids):
        return True
    if ids.max() >= clean.num_rows:
        return True
    same = clean.take(ids)
    return any(not part[name].equals(same[name]) for name in ("rollout_log_probs", "train_log_probs"))


def findings(table: pa.Table) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(table, f"{folder}/dump.parquet")
        (found,) = diagnose([f"{folder}/dump.parquet"], threads=1).runs.values()
    return found


def false_alarms(plans: Iterable[Architecture], folder: Path) -> dict[int, Counter[str]]:
    """Clean dumps with workers, steps and version lags that mean nothing: alarms by rows."""
    table: dict[int, Counter[str]] = defaultdict(Counter)
    for plan in plans:
        for name in CLEAN:
            path = folder / plan.name / f"{name}.parquet"
            whole = pq.read_table(path) if path.exists() else None
            for rows in SIZES if plan in UNSEEN else FEWER:
                for draw in range(DRAWS if whole is not None and rows <= whole.num_rows else 0):
                    found = findings(_shuffled(whole, rows, np.random.default_rng(1000 * draw + rows)))
                    alarms = [finding for finding in found if finding.cause not in QUIET]
                    table[rows]["dumps"] += 1
                    table[rows]["medium"] += any(finding.confidence != "low" for finding in alarms)
                    table[rows]["high"] += any(finding.confidence == "high" for finding in alarms)
    return table


def _shuffled(table: pa.Table, rows: int, random: np.random.Generator) -> pa.Table:
    part = table.take(np.sort(random.permutation(table.num_rows)[:rows])).drop_columns(["worker", "step"])
    worker = random.integers(0, random.choice([2, 4, 8, rows]), rows)
    step = np.sort(random.integers(0, random.choice([1, 4, 8, rows]), rows))
    lag = random.integers(0, 3, rows) * int(random.random() < 0.5)
    columns = {"worker": worker, "step": step, "rollout_version": 9 + 0 * lag, "train_version": 9 + lag}
    for name, values in columns.items():
        part = part.append_column(name, pa.array(values))
    return part


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} % ({part:,} of {whole:,})" if whole else "-"


def calibration(rows: list[Judged]) -> list[str]:
    """Of the findings at each confidence: the share that is true; what `unexplained` says of a listed cause apart."""
    lines = ["| rows | high: true | medium: true | medium without `unexplained` |", "|---|---|---|---|"]
    for size in [*SIZES, None]:
        cells = []
        for level, strict in (("high", True), ("medium", True), ("medium", False)):
            told = [
                finding.cause in row.truth
                for row in rows
                if size in (None, row.rows)
                for finding in row.found
                if finding.confidence == level and (strict or finding.cause != "unexplained")
            ]
            cells.append(percent(sum(told), len(told)))
        lines.append(f"| {size or 'all'} | {' | '.join(cells)} |")
    return lines


def detection(rows: list[Judged]) -> list[str]:
    """First findings that name the cause, by plant and rows; and what else came first."""
    lines = ["| planted | " + " | ".join(map(str, SIZES)) + " | else first |", "|---|" + "---|" * (len(SIZES) + 1)]
    for name in dict.fromkeys(row.plant for row in rows):
        mine = [row for row in rows if row.plant == name]
        cells = []
        for size in SIZES:
            told = [row.right for row in mine if row.rows == size]
            cells.append(f"{100 * np.mean(told):.0f}" if told else "")
        others = Counter(row.alarms[0].cause if row.alarms else "none" for row in mine if not row.right)
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(f'{c} {n}' for c, n in others.most_common(3))} |")
    return lines


def coverage(rows: list[Judged]) -> list[str]:
    """How often intervals hold the planted value, by rows; and how often there was none."""
    lines = [
        "| estimate | " + " | ".join(map(str, SIZES)) + " | all | no interval |",
        "|---|" + "---|" * (len(SIZES) + 2),
    ]
    for kind, (cause, name) in ESTIMATES.items():
        told: dict[int, list[bool]] = defaultdict(list)
        untold = 0
        for row in rows:
            found = [finding for finding in row.found if finding.cause == cause]
            if not f"{row.plant} ".startswith(f"{kind} ") or not found:
                continue
            value = PLANTED[row.plant] if row.plant in PLANTED else float(row.plant.split(" ")[1])
            ends = [fact.interval for fact in found[0].evidence if fact.name == name and fact.interval is not None]
            untold += not ends
            told[row.rows] += [low <= value <= high for low, high in ends]
        cells = [percent(sum(told[size]), len(told[size])) for size in SIZES]
        whole = sum(map(sum, told.values())), sum(map(len, told.values()))
        if whole[1] + untold:
            lines.append(f"| {kind} ({name}) | {' | '.join(cells)} | {percent(*whole)} | {untold} |")
    return lines


def folders(folder: Path) -> list[str]:
    """A table of real dumps with known causes."""
    labels = json.loads((folder / "labels.json").read_text())
    lines, right = [], 0
    for name, label in sorted(labels.items()):
        cause = LABELS.get(label["cause"], label["cause"])
        (found,) = diagnose([str(folder / name)], threads=1).runs.values()
        good = found[0].cause == cause and found[0].confidence != "low"
        alike = cause == "quantized_rollout" and "8 bits" in found[0].summary
        right += good or alike
        others = ", ".join(f"{finding.cause} ({finding.confidence})" for finding in found[1:])
        first = f"{found[0].cause} ({found[0].confidence})"
        mark = "" if good else "cannot be told, and it says so: " if alike else "**not** "
        lines.append(f"| {name} | {cause} | {mark}{first} | {others} |")
    return [
        "## Real dumps with a known cause",
        "",
        f"The cause is the first finding, at high or medium confidence, in {right} of {len(labels)} dumps of two small",
        "language models (byte-level, dense and mixture of experts); int8 weights over bfloat16 make no more "
        "than bfloat16",
        "itself, and count where the first finding is noise that says so.",
        "",
        "| dump | cause | first finding | others |",
        "|---|---|---|---|",
        *lines,
        "",
    ]


def models(plans: Iterable[Architecture], folder: Path) -> list[str]:
    return [
        f"- `{plan.name}`: {'words' if plan.words else 'bytes'}, {plan.layers} layers of {plan.width}, "
        f"{plan.positions}, "
        + ("squared ReLU beside attention" if plan.parallel else "SwiGLU")
        + (f", {plan.experts} experts by {plan.router}, {plan.chosen} chosen" if plan.experts > 1 else "")
        + f", {plan.steps} steps on {plan.texts:,} texts at most"
        for plan in plans
        if (folder / plan.name / "clean.parquet").exists()
    ]


def section(title: str, plans: tuple[Architecture, ...], folder: Path) -> list[str]:
    """All tables of some models."""
    rows = list(judged(plans, folder))
    alarms = false_alarms(plans, folder)
    return [
        f"## {title}",
        "",
        *models(plans, folder),
        "",
        f"{len(rows):,} dumps. Of the findings, these shares name what was planted, or, where no cause of the "
        f"list is, say that",
        "it is unexplained. `unexplained` before a cause of the list counts as false here; the last column "
        "leaves it out.",
        "",
        *calibration(rows),
        "",
        "Clean dumps, with workers, steps and version lags drawn at random, down to one row for each:",
        "",
        "| rows | an alarm at medium or high | at high |",
        "|---|---|---|",
        *(
            f"| {size} | {percent(count['medium'], count['dumps'])} | {percent(count['high'], count['dumps'])} |"
            for size, count in alarms.items()
        ),
        "",
        "First findings that name the planted cause, in percent by rows. Plants in few rows count as clean",
        "where none was drawn; those that make less than 1.5 times the engine's own K3 may be called noise.",
        "",
        *detection(rows),
        "",
        "Intervals (95 %) that hold the planted value, by rows:",
        "",
        *coverage(rows),
        "",
    ]


def main() -> None:
    dumps = Path(sys.argv[1])
    lines = [
        "# How causes are told apart",
        "",
        "<!-- Written by benchmarks/diagnose.py; run it again after a change of a test. -->",
        "",
        "`mismatchctl diagnose` looks at the rows of a dump as they are, masked tokens too, and tests one cause "
        "after the",
        "other; what a cause explains is taken out before the next test, and what is left is held against the "
        "noise that",
        "float32 and bfloat16 make: beyond it, the rest is a finding of its own, `unexplained`. The shares of "
        "the K3 that",
        "findings explain add up, with what is unexplained and what is noise, to 100 %. Counts and the levels "
        "by step and",
        "worker are of all tokens; everything else is read from a sample of whole rows, chosen by a hash of "
        "their content:",
        "a 32nd of the dump, at least 65,536 tokens and at most 262,144.",
        "",
        "| cause | how it shows |",
        "|---|---|",
        *(f"| `{cause.id}` | {cause.shows} |" for cause in sorted(CAUSES, key=lambda cause: cause.id)),
        "",
        "Two identities decide what no threshold could: if the rollout column is the distribution that sampled, "
        "and the",
        "trainer's has at least its support, E[ratio] = 1; if the trainer's column is what sampled, E[1 / ratio] = 1.",
        "",
        "## What confidence means",
        "",
        "`high`: of such findings, 95 in 100 are meant to be true on dumps that nobody tuned to; `medium`: 70 "
        "in 100; `low`:",
        "a possibility, one line. Counter-evidence caps it: a rival that fits as well, lags without effect, too "
        "few rows. It",
        "was measured by training small models (`benchmarks/strangers.py`), sampling from them with an engine "
        "that decodes",
        "in bfloat16 with a cache, scoring the same tokens truly with one prefill, and planting one cause in each dump",
        "(`benchmarks/stranger_dumps.py`). No rule was tried on the first model below: it was trained for the last",
        "measure alone, with another seed, width, vocabulary and router. The figures of the others flatter, as rules",
        "were tried on them; of their settings, rules saw temperatures 0.7, 0.9, 1.1 and 1.3, top-p 0.9 and 0.98,",
        "top-k 8 and 40 and min-p 0.05.",
        "",
        *ESTIMATED,
        *(folders(Path(sys.argv[2])) if len(sys.argv) > 2 else []),
        *section("Models that no rule was tried on", UNSEEN, dumps),
        *section("Models that rules were tried on", SEEN, dumps),
        *BEFORE,
        "## Limits",
        "",
        "- int8 weights over bfloat16 leave a trace too small to tell from bfloat16's own: noise, which says so.",
        "- The noise that bfloat16 makes (0.022 of the logits, at most) was measured on small models, and no dump "
        "tells how",
        "  large its model is. Up to three times as much, balanced, is `unexplained` at low confidence; with a "
        "tail as experts",
        "  make it, it is noise at medium; without one, from 3,000 tokens on, `cache_quantization` at medium, with "
        "its rivals.",
        "  So a few wrong tokens in a dump that is as loud, scattered and not all on last tokens, are low at most.",
        "- Weights that differ can be off more in the first tokens than in later ones, to 1.4 times; a lost prompt "
        "made 2.1 at",
        "  the least. Below 1.7 `context_mismatch` is low at most.",
        "- Older, quantized, adapted and other weights look alike (`weights_differ`) without versions or "
        "current log-probs.",
        "- Dropout, noise of a router and other numerics that grow no structure are `unexplained` or, near "
        "fp8's level,",
        "  `cache_quantization` at medium confidence: score a batch twice.",
        "- With 8 rows most causes that act on all tokens show only as `unexplained`.",
        "- Whatever acts on every token (temperature, truncation) hides small mismatches under it. Fix it, and "
        "diagnose again.",
        "- Log-probs that were sampled from a truncated or tempered distribution but recorded raw, with a trainer at",
        "  temperature 1, agree: nothing in these columns shows it.",
        "- A prefix cache kept over a weight update is told by prompts that differ from each other at the start of",
        "  their responses alone: it takes ids of prompts with several responses each, and prompts that one side",
        "  truncates look the same. Without them it is noise, or `context_mismatch`.",
        "- Text tokenized anew into as many tokens as before agrees again without a shift: it is",
        "  `edited_response`, or nothing.",
        "- Two wrong columns at once (shifted and in another base) are told as one, or not at all.",
        "",
    ]
    (ROOT / "docs" / "diagnose.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
