"""Compare the advice of `mismatchctl advise` with the truth on policies with a known true gradient.

    python benchmarks/advise_models.py TRUTH        # train small models and measure each correction
    python benchmarks/advise.py TRUTH [FIRST] [BUGS]

TRUTH contains the output of the first command. The rule was chosen on the models in `CHOSEN_ON`, and the other models
are held out. FIRST has the same layout and contains a policy of another script. BUGS contains dumps with one known
cause each and a labels.json. Writes the figures of docs/methods/advice.md.

The error of a correction is 1 - cos^2 of the angle between the gradient of an update and the true gradient. It is the
error that remains with the best step size, as a share of the true gradient's squared norm. Regret is the error of the
advised correction over the lowest error of all corrections that keep a tenth of the tokens and half of the loss.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measure import replace_section  # noqa: E402

from mismatchctl.api.advise.advice import MIN_LOSS_SCALE  # noqa: E402
from mismatchctl.api.advise.advise import measure_candidates  # noqa: E402
from mismatchctl.api.advise.candidates import (  # noqa: E402
    MAX_REJECTION,
    CandidateRanking,
    GradientProducts,
    Limits,
    choose_correction,
    choose_reference,
    read_samples,
    required_standard_errors,
)
from mismatchctl.api.diagnose import diagnose  # noqa: E402
from mismatchctl.corrections.presets import parse_correction  # noqa: E402
from mismatchctl.results.summary import find_fixable, is_uncorrectable  # noqa: E402

BATCHES = (64, 512, 4096)
GOALS = (1.05, 1.15, 1.5)
"""Required median, 90th percentile and maximum of the regret at a batch of 512."""
STABILITY_GOAL = 0.8
SHOWN = ("none", "token_truncate_2", "seq_truncate_2", "seq_mis", "seq_mis_2", "decoupled_k3_rs_token_tis", "slime-mis")
HARM_FACTOR = 1.05
"""Advice does harm if its error is more than this multiple of the error without a correction."""
MEASURED_BATCH = 64
"""Batch size of the variances in truth.json."""
BEGIN, END = "<!-- figures: benchmarks/advise.py -->", "<!-- end of figures -->"
CHOSEN_ON = frozenset({"dense-44", "moe-40", "parallel-36"})
BUGS = frozenset(
    {"stale_worker", "temperature_mismatch", "truncated_sampling", "misaligned", "unsampled_tokens", "edited_response",
     "low_precision_logging", "context_mismatch"}
)  # fmt: skip
"""Causes that must be fixed. Noise, routing, quantization and stale policies are corrected instead."""


@dataclass(frozen=True)
class Case:
    """A mismatch of a model, with the true error of each correction by batch size, and the advice."""

    name: str
    facts: dict[str, Any]
    errors: dict[int, dict[str, float]]
    choices: dict[int, CandidateRanking]
    products: dict[str, GradientProducts]
    loss_scales: dict[str, float]
    stable: float | None

    def regret(self, batch: int, name: str) -> float:
        allowed = [error for own, error in self.errors[batch].items() if self.loss_scales[own] >= MIN_LOSS_SCALE]
        return self.errors[batch][name] / min(allowed)

    def own_regret(self, batch: int) -> float:
        """Return the regret of the advised correction."""
        return self.regret(batch, self.choices[batch].first)

    def is_worse(self, batch: int) -> bool:
        """Return True if no correction would have been better than the advised correction."""
        return self.own_regret(batch) > HARM_FACTOR * self.regret(batch, "none")


def true_error(found: dict[str, Any], norm2: float, batch: int) -> float:
    """Return 1 - cos^2 of the gradient of an update to the true gradient."""
    projection = found["projection"]
    mean2 = max(found["bias2"], 0.0) + (2 * projection - 1) * norm2
    whole = mean2 + found["variance"] * MEASURED_BATCH / batch
    return 1.0 if projection <= 0 or whole <= 0 else max(1 - projection**2 * norm2 / whole, 0.0)


def read_cases(folder: Path) -> Iterator[Case]:
    """Return all cases of a folder."""
    for path in sorted(folder.glob("*/truth.json")):
        truth = json.loads(path.read_text())
        own = truth["corrections"]
        corrections = [parse_correction({"name": name, **found["correction"]}) for name, found in own.items()]
        (sample,) = read_samples([str(path.parent / "dump.parquet")]).values()
        norm2 = truth["g_star_norm2"] - (truth["g_star_error2"] if "model" in truth else 0.0)
        usable = {name: found for name, found in own.items() if found["rejected_tokens"] <= MAX_REJECTION}
        errors = {batch: {name: true_error(f, norm2, batch) for name, f in usable.items()} for batch in BATCHES}

        with np.errstate(all="ignore"):
            measured, products, _ = measure_candidates(sample, choose_reference(sample), corrections, Limits())
            scales = {name: found.loss_scale for name, found in measured.items()}
            shrinking = {name for name, scale in scales.items() if scale < MIN_LOSS_SCALE}
            scale, standard_errors = len(sample) / len(products["none"]), required_standard_errors(len(sample))
            choices = {
                batch: choose_correction(products, scale / batch, standard_errors, shrinking=shrinking)
                for batch in BATCHES
            }
            stable = split_stability(products, scale / 512, standard_errors, shrinking)
        scales |= {name: 1.0 for name in usable if name not in scales}
        yield Case(path.parent.name, truth, errors, choices, products, scales, stable)


def split_stability(
    products: dict[str, GradientProducts], scale: float, standard_errors: float, shrinking: set[str]
) -> float | None:
    """Return the share of random halves of the batches that give the same first correction or a tie with it."""
    count = len(products["none"])
    if count < 16:
        return None
    random, agreed = np.random.default_rng(count), []
    for _ in range(20):
        order, choices = random.permutation(count), []
        for half in (order[: count // 2], order[count // 2 :]):
            rows = np.ix_(np.sort(half), np.sort(half))
            parts = {
                name: GradientProducts(own.own[rows], own.across[rows], own.apart[rows], own.reference[rows])
                for name, own in products.items()
            }
            choices.append(choose_correction(parts, scale, standard_errors, shrinking=shrinking))
        first, second = choices
        agreed.append(first.ties(second.first) or second.ties(first.first))
    return float(np.mean(agreed))


def _format_row(name: str, found: Sequence[Case], regret: Callable[[Case, int], float | None]) -> str:
    cells = []
    for batch in BATCHES:
        values = [value for case in found if (value := regret(case, batch)) is not None]
        cells.append(_join_numbers(_summarize(values)) if values else "-")
    return f"| {name} | {' | '.join(cells)} |"


def _summarize(values: Sequence[float]) -> tuple[float, float, float]:
    return float(np.median(values)), float(np.quantile(values, 0.9)), float(np.max(values))


def _constant_choice(name: str) -> Callable[[Case, int], float | None]:
    return lambda case, batch: case.regret(batch, name) if name in case.errors[batch] else None


def regret_table(title: str, found: Sequence[Case]) -> Iterator[str]:
    """Yield a table of regrets of the advice, and of each correction if it is always used."""
    yield (
        f'The next table shows the regret of the group "{title}" ({len(found)} mismatches), for updates of 64, 512 and '
        "4,096 sequences. A cell contains the median, the 90th percentile and the worst regret. In a row with "
        '"always", the same correction is used for every mismatch.'
    )
    yield ""
    yield f"| correction | {' | '.join(f'{batch:,}' for batch in BATCHES)} |"
    yield "|---|---|---|---|"
    yield _format_row("**the advice**", found, Case.own_regret)
    names = [name for name in found[0].facts["corrections"] if any(name in case.errors[512] for case in found)]
    shown = [name for name in SHOWN if name in names]
    for name in shown:
        yield _format_row(f"`{name}`, always", found, _constant_choice(name))
    yield ""


def _criteria_table(groups: dict[str, list[Case]]) -> Iterator[str]:
    """Yield a table with each goal and the values of each group of mismatches."""
    yield f"| criterion | goal | {' | '.join(f'{name} ({len(found)} mismatches)' for name, found in groups.items())} |"
    yield f"|{'---|' * (2 + len(groups))}"
    cells = (_format_regrets(found) for found in groups.values())
    yield f"| regret, batch of 512: median / 90th percentile / worst | {_join_numbers(GOALS)} | {' | '.join(cells)} |"
    cells = (_format_stability(found) for found in groups.values())
    title = "random splits of a dump into halves: share of splits with the same advice (or a tie) for both halves"
    yield f"| {title} | {STABILITY_GOAL:.0%} | {' | '.join(cells)} |"
    for batch in BATCHES:
        cells = (", ".join(case.name for case in found if case.is_worse(batch)) or "0" for found in groups.values())
        yield f"| advice worse than no correction, batch of {batch:,} | 0 | {' | '.join(cells)} |"


def _format_regrets(found: Sequence[Case]) -> str:
    values = _summarize([case.own_regret(512) for case in found])
    met = all(value <= goal for value, goal in zip(values, GOALS, strict=True))
    return f"{_join_numbers(values)}{_mark_missed(met)}"


def _mark_missed(met: bool) -> str:
    return "" if met else ": **missed**"


def _join_numbers(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def _format_stability(found: Sequence[Case]) -> str:
    shares = [case.stable for case in found if case.stable is not None]
    share = float(np.mean(shares)) if shares else 0.0
    return f"{share:.0%}, worst mismatch {min(shares, default=0.0):.0%}{_mark_missed(share >= STABILITY_GOAL)}"


def _estimate_table(groups: dict[str, list[Case]]) -> Iterator[str]:
    """Yield a table that compares estimated projections and variances with the true values."""
    yield "The next table compares the estimated projection and variance with their true values. The last column shows"
    yield "a range that contains 80% of the estimates:"
    yield ""
    yield "| policies | value | estimated minus true, or estimated / true (median) | range of 80% of the estimates |"
    yield "|---|---|---|---|"
    for group, found in groups.items():
        differences, ratios = [], []
        for case in found:
            own, none = case.facts["corrections"], case.products["none"].moments().variance
            for name, products in case.products.items():
                estimate = products.estimate_projection() * case.loss_scales[name]
                differences.append(estimate - own[name]["projection"])
                if own[name]["variance"] > 0:
                    relative = own[name]["variance"] / own["none"]["variance"]
                    variance = products.moments().variance * case.loss_scales[name] ** 2
                    ratios.append(variance / none / relative)
        for part, values, sign in (("projection", differences, "+"), ("variance", ratios, "")):
            low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
            text = "difference" if sign else "ratio"
            yield f"| {group} | {part} | {text} {middle:{sign}.2f} | {low:{sign}.2f} to {high:{sign}.2f} |"


def _bug_lines(folder: Path) -> Iterator[str]:
    """Yield sentences about planted bugs, which the advice must report first."""
    labels, missed, alarms, bugs = json.loads((folder / "labels.json").read_text()), [], [], 0
    for name, label in labels.items():
        (findings,) = diagnose([str(folder / name)]).runs.values()
        fix = find_fixable(findings)
        bugs += label["cause"] in BUGS
        if label["cause"] in BUGS and fix is None:
            missed.append(name)
        if label["cause"] not in BUGS and fix is not None:
            alarms.append(f"{name} ({fix.cause}, {'FAIL' if is_uncorrectable(fix) else 'CHECK'})")
    others = len(labels) - bugs
    found = bugs - len(missed)
    yield f"Another test uses {len(labels)} dumps of a dense model and a mixture of experts. {bugs} dumps have a"
    yield f"planted bug, and `advise` reports a bug in {found} of them. {', '.join(missed)}".strip()
    yield f"{others} dumps do not have a bug, and `advise` reports a bug in {len(alarms)} of them."
    if alarms:
        yield ", ".join(alarms)


def main(truth: Path, policy: Path | None, bugs: Path | None) -> None:
    """Write the figures of docs/methods/advice.md."""
    found, first = list(read_cases(truth)), [] if policy is None else list(read_cases(policy))
    held_out, chosen = ([case for case in found if (case.facts["model"] in CHOSEN_ON) == own] for own in (False, True))
    groups = {"held out": held_out, "first policy": first, "chosen on": chosen}
    groups = {name: group for name, group in groups.items() if group}
    lines = ["", *_criteria_table(groups), ""]
    lines += [line for name, group in groups.items() for line in regret_table(name, group)]
    lines += [*_estimate_table(groups), ""]
    lines += [*_bug_lines(bugs), ""] if bugs is not None else []
    replace_section("\n".join(lines), ROOT / "docs/methods/advice.md", BEGIN, END)


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]] + [None, None]
    main(*given[:3])  # type: ignore[arg-type]
