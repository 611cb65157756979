"""Compare a sweep with one `analyze` per point, on every dump of the given folders.

    python benchmarks/sweep_exactness.py FOLDER...

Each FOLDER is a run or contains runs. The script compares all values, overall and by step. Counts must be equal, other
values must agree to 1e-9 relative or 1e-13 absolute, and undefined values must have the same reason. It prints a table
by run. docs/methods/accuracy.md states the totals.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from mismatchctl.api.analyze import analyze as analyze_module
from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.sweep.study import Study, ThresholdAxis
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.frameworks.registry import find_preset

STUDIES = {
    "token truncation": ("token_tis", {"weight.truncate": "1.001:10:20:log"}),
    "icepop": ("decoupled_token_icepop", {"weight.zero.1": "1.01:5:10:log", "weight.zero.0": "0.2,0.5,0.9"}),
    "token rejection": ("slime-mis", {"gates.0.keep.1": "1.01:4:10:log", "gates.0.keep.0": "0.25,0.5,0.99"}),
    "sequence": ("seq_is_rs", {"gates.0.keep": "1.05:100:20:log"}),
    "geometric": ("geo_rs", {"gates.0.keep": "1.0001:1.1:20:log", "gates.1.keep.0": "1e-6,1e-4,1e-2"}),
    "combined": ("miles-moe-2", {"weight.clip.1": "1.1:4:6", "gates.0.keep.1": "1.0001:1.1:10:log"}),
    "level": ("token_tis", {"weight.level": "token,sequence,geometric", "weight.truncate": "1.5,2,4"}),
}
_RELATIVE, _ABSOLUTE = 1e-9, 1e-13


def list_studies() -> list[Study]:
    found = []
    for name, (base, axes) in STUDIES.items():
        correction = find_preset(base).model_copy(update={"name": name})
        found.append(Study(correction, tuple(ThresholdAxis.parse(path, values) for path, values in axes.items())))
    return found


def compare(folder: Path) -> tuple[int, int, float]:
    """Return the number of compared values, the number that differ, and the largest relative difference of one run."""
    chosen = list_studies()
    points = {
        (study.name, point): correction.model_copy(update={"name": f"{study.name} {point}"})
        for study in chosen
        for point, correction in enumerate(map(study.correction_at, range(len(study.points))))
    }
    found, truth = sweep([str(folder)], chosen), analyze([str(folder)], list(points.values()))
    (run,) = truth.runs.values()
    values: list[tuple[dict, str, float | None, str]] = []
    for row in found.overall.to_dicts():
        for key, value in run.overall.corrections[points[row["correction"], row["point"]].name].items():
            values.append((row, key, value.value, value.status))
    places = {label: index for index, label in enumerate(run.groups.labels)}
    for row in found.groups.collect().to_dicts():
        for key, series in run.groups.corrections[points[row["correction"], row["point"]].name].items():
            index = places[row["group"]]
            values.append((row, key, series.value[index], series.status_at(index)))
    values = [each for each in values if each[1] in each[0]]  # a sweep has no other loss aggregations
    wrong, largest = 0, 0.0
    for row, key, value, status in values:
        if value is None or row[key] is None:
            wrong += row[key] is not value or found.reason(row, key) != status
            continue
        gap = abs(row[key] - value)
        wrong += not math.isclose(row[key], value, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
        wrong += key == "kept_tokens" and gap > 0
        if gap > _ABSOLUTE:
            largest = max(largest, gap / abs(value))
    return len(values), wrong, largest


HEAD = """# A sweep against one analysis per point

Written by `benchmarks/sweep_exactness.py` on runs of small real models, dense and with experts: token, sequence
and geometric rules and their combinations, 229 points, overall and by step. `different` counts values that
differ by more than 1e-9 relative and 1e-13 absolute, unequal counts, and undefined values with another reason.
The largest relative difference is over values that differ by more than 1e-13.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    analyze_module.CORRECTION_DIGITS = 17  # do not round series
    print(HEAD)
    print("| run | values | different | largest relative difference |\n|---|---|---|---|")
    whole = [0, 0]
    for folder in parser.parse_args().folders:
        runs = [folder] if any(folder.glob("*.parquet")) else sorted(path for path in folder.iterdir() if path.is_dir())
        for run in runs:
            count, wrong, largest = compare(run)
            whole[0], whole[1] = whole[0] + count, whole[1] + wrong
            print(f"| {run.name} | {count:,} | {wrong} | {largest:.1e} |", flush=True)
    print(f"| all | {whole[0]:,} | {whole[1]} | |")


if __name__ == "__main__":
    main()
