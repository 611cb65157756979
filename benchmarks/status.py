"""Measure how often the status of a run (OK, CHECK, FAIL) is right on dumps with a known truth.

    python benchmarks/status.py [FOLDER ...] [--write]

Each FOLDER contains dumps and a labels.json that names the planted cause of each. The script also generates dumps:
healthy ones of random models with bfloat16-like noise, and the faults of reported_faults.py. `--write` writes the table
"status" of docs/methods/accuracy.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from measure import replace_section  # noqa: E402
from reported_faults import FAULTS, KINDS  # noqa: E402

from mismatchctl.api.public import analyze  # noqa: E402
from mismatchctl.errors import DataError  # noqa: E402
from mismatchctl.results.summary import run_status  # noqa: E402
from tests.factories.sampled import Model, Setup, sampled  # noqa: E402

PAGE = ROOT / "docs/methods/accuracy.md"
BEGIN, END = "<!-- status: begin -->", "<!-- status: end -->"
HEALTHY = {
    "identical",
    "precision_noise",
    "float32_noise",
    "shared_precision_noise",
    "numerical_noise",
    "log_densities",
}
WITHIN_NOISE = {
    "quantized_rollout", "kv_cache_quantization", "cache_quantization", "low_precision_logits", "routing_flip",
    "batch_dependent_trainer", "low_precision_logging", "batch_dependent_kernels",
}  # fmt: skip
"""Causes whose effect can be as small as bfloat16 noise, so that any status can be right."""
FIRST_SEED, SEEDS, SHAPES = 9200, 6, ((4, 96), (12, 192))
STATUSES = ("OK", "CHECK", "FAIL", "refused")
Verdict = tuple[str, str, str, str]
"""Group, truth (healthy, within noise or faulty), status, and name."""


def find_status(path: Path) -> str:
    try:
        (run,) = analyze(str(path), corrections=["none"]).runs.values()
    except DataError:
        return "refused"
    return run_status(run).status


def judge_labeled(folder: Path) -> Iterator[Verdict]:
    """Yield verdicts on the dumps of a folder with a labels.json."""
    for name, label in json.loads((folder / "labels.json").read_text()).items():
        causes = {label["cause"]} if "cause" in label else {*(label.get("causes_accepted") or label.get("first") or ())}
        if "log_densities" in causes or (not causes and label.get("onset") is None):
            continue
        truth = "healthy" if causes and causes <= HEALTHY | {"moe_routing"} else "faulty"
        truth = "within noise" if causes & WITHIN_NOISE else truth
        yield folder.name.replace("_", " "), truth, find_status(folder / name), name


def judge_generated(folder: Path) -> Iterator[Verdict]:
    """Yield verdicts on healthy dumps of random models and on a dump of each reported fault."""
    for kind, shape in KINDS.items():
        for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
            for steps, rows in SHAPES:
                dump = sampled(Model.of(seed, *shape), seed, Setup(rows=rows, steps=steps))
                yield "random models", "healthy", find_status(dump.write(folder / "dump.parquet")), f"{kind} {steps}"
    for number, (name, planted) in enumerate(FAULTS.items()):
        causes = planted.truth
        truth = "healthy" if causes <= HEALTHY else "within noise" if causes & WITHIN_NOISE else "faulty"
        if name == "healthy" or "log_densities" in causes:  # densities need an option
            continue
        for kind in list(KINDS)[number % 2 :: 2]:
            severity = planted.severities[len(planted.severities) // 2]
            dump = planted.fault(Model.of(FIRST_SEED, *KINDS[kind]), FIRST_SEED, severity)
            yield "random models", truth, find_status(dump.write(folder / "dump.parquet")), f"{name}, {kind}"


def table(rows: list[Verdict]) -> list[str]:
    lines = [f"| dumps | truth | number | {' | '.join(STATUSES)} |", f"|---|---|---|{'---|' * len(STATUSES)}"]
    for key in dict.fromkeys((group, truth) for group, truth, _, _ in rows):
        found = Counter(status for group, truth, status, _ in rows if (group, truth) == key)
        lines.append(f"| {' | '.join(key)} | {found.total()} | {' | '.join(str(found[one]) for one in STATUSES)} |")
    return lines


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        rows = [*judge_generated(Path(place))]
    for folder in sys.argv[1:]:
        if folder != "--write":
            rows += judge_labeled(Path(folder))
    for row in rows:
        if (row[1], row[2]) not in (("healthy", "OK"), ("faulty", "FAIL"), ("faulty", "CHECK"), ("faulty", "refused")):
            print(*row, sep=" | ")
    lines = table(sorted(rows, key=lambda row: (row[0], ["healthy", "within noise", "faulty"].index(row[1]))))
    page = PAGE if "--write" in sys.argv else None
    replace_section("\n" + "\n".join(lines) + "\n", page, BEGIN, END)


if __name__ == "__main__":
    main()
