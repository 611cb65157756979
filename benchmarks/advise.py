"""Writes the figures of docs/methods/advice.md: the advice against the truth, on policies whose true gradient is known.

    python benchmarks/advise_models.py TRUTH        # trains small models and measures what corrections do to them
    python benchmarks/advise.py TRUTH [TUNED] [BUGS]

TRUTH holds what the first command made: the rule was chosen on some of its models (`CHOSEN_ON`) and on those of TUNED
(the same layout), the others are held out. BUGS holds dumps with one known cause each and a labels.json. Regret is the
true error of what is advised over that of the best of all corrections that keep a tenth of the tokens or more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from mismatchctl.api.advise.advise import (  # noqa: E402
    UNRELIABLE_FACTOR,
    _measure_candidates,
    _MeasuredCandidates,
)
from mismatchctl.api.advise.candidates import MAX_REJECTION, Limits  # noqa: E402
from mismatchctl.api.advise.gradient import (  # noqa: E402
    CandidateRanking,
    choose_correction,
    required_standard_errors,
    split_stability,
)
from mismatchctl.api.advise.sample import read_samples  # noqa: E402
from mismatchctl.api.diagnose import diagnose  # noqa: E402
from mismatchctl.corrections.presets import parse_correction  # noqa: E402
from mismatchctl.results.summary import find_fixable, is_uncorrectable  # noqa: E402

BATCHES = (64, 512, 4096)
BARS = {512: (1.05, 1.15, 1.4), 4096: (1.1, 1.5, 2.0)}
STABLE, WITHIN = 0.8, 0.95
SHOWN = ("none", "token_truncate_2", "seq_mis", "seq_mis_2", "decoupled_k3_rs_token_tis", "miles-moe-2", "slime-mis")
WORSE = 1.05
"""Times the error of no correction beyond which advice did harm."""
OF_A_BATCH = 64
BEGIN, FINISH = "<!-- figures: benchmarks/advise.py -->", "<!-- end of figures -->"
CHOSEN_ON = frozenset({"dense-32", "moe-64", "dense-128", "moe-512", "moe-96"})
BUGS = frozenset(
    {"stale_worker", "temperature_mismatch", "truncated_sampling", "misaligned", "unsampled_tokens", "edited_response",
     "low_precision_logging", "context_mismatch"}
)  # fmt: skip
"""Causes that are to be fixed; noise, routing, quantization and a policy that moved are there to be corrected."""


@dataclass(frozen=True)
class Case:
    """A mismatch of a model: the true error of each correction by batch, and what was chosen on what estimates."""

    name: str
    facts: dict[str, Any]
    errors: dict[int, dict[str, float]]
    choices: dict[int, CandidateRanking]
    made: _MeasuredCandidates
    stable: float | None

    def regret(self, batch: int, name: str) -> float:
        return self.errors[batch][name] / min(self.errors[batch].values())

    def own_regret(self, batch: int) -> float:
        """Of what is advised."""
        return self.regret(batch, self.choices[batch].first)

    def is_worse(self, batch: int) -> bool:
        """Whether no correction would have been better than what is advised."""
        return self.own_regret(batch) > WORSE * self.regret(batch, "none")

    def is_within(self, batch: int) -> bool:
        """Whether the regret is no more than what is said."""
        return self.own_regret(batch) <= self.choices[batch].most_regret()

    def spearman(self, batch: int) -> float:
        """Of estimated and true errors."""
        estimated, true = self.choices[batch].mse, self.errors[batch]
        names = [name for name in estimated if name in true]
        ranks = [np.argsort(np.argsort([errors[name] for name in names])) for errors in (estimated, true)]
        return float(np.corrcoef(*ranks)[0, 1])


def cases(folder: Path) -> Iterator[Case]:
    """All that a folder holds."""
    for path in sorted(folder.glob("*/truth.json")):
        truth = json.loads(path.read_text())
        own = truth["corrections"]
        corrections = [parse_correction({"name": name, **found["correction"]}) for name, found in own.items()]
        (sample,) = read_samples([str(path.parent / "dump.parquet")]).values()
        usable = {name: found for name, found in own.items() if found["rejected_tokens"] <= MAX_REJECTION}
        errors = {
            batch: {name: max(f["bias2"], 0.0) + f["variance"] * OF_A_BATCH / batch for name, f in usable.items()}
            for batch in BATCHES
        }

        with np.errstate(all="ignore"):
            made = _measure_candidates(replace(sample, steps=()), corrections, Limits())
        scale, sure = len(sample) / len(made.products["none"]), required_standard_errors(len(sample))
        choices = {batch: choose_correction(made.products, scale / batch, sure) for batch in BATCHES}
        yield Case(path.parent.name, truth, errors, choices, made, split_stability(made.products, scale / 512, sure))


def _row(name: str, found: Sequence[Case], regret: Callable[[Case, int], float | None]) -> str:
    cells = []
    for batch in BATCHES:
        values = [value for case in found if (value := regret(case, batch)) is not None]
        cells.append(_three(_summary(values)) if values else "-")
    return f"| {name} | {' | '.join(cells)} |"


def _summary(values: Sequence[float]) -> tuple[float, float, float]:
    return float(np.median(values)), float(np.quantile(values, 0.9)), float(np.max(values))


def _always(name: str) -> Callable[[Case, int], float | None]:
    return lambda case, batch: case.regret(batch, name) if name in case.errors[batch] else None


def regrets(title: str, found: Sequence[Case]) -> Iterator[str]:
    """Of the advice, and of everything that could be taken always."""
    yield f"{title} ({len(found)} mismatches): median / 90th percentile / worst regret at a batch of"
    yield ""
    yield f"| taken | {' | '.join(f'{batch:,}' for batch in BATCHES)} |"
    yield "|---|---|---|---|"
    yield _row("**the advice**", found, Case.own_regret)
    names = [name for name in found[0].facts["corrections"] if any(name in case.errors[512] for case in found)]
    shown = [name for name in SHOWN if name in names]
    for name in shown:
        yield _row(f"`{name}`, always", found, _always(name))
    yield ""


def _bars(groups: dict[str, list[Case]]) -> Iterator[str]:
    """What was wanted beside what each group of mismatches shows."""
    yield f"| bar | wanted | {' | '.join(f'{name} ({len(found)} mismatches)' for name, found in groups.items())} |"
    yield f"|{'---|' * (2 + len(groups))}"
    for batch, wanted in BARS.items():
        cells = (_against(wanted, found, batch) for found in groups.values())
        yield f"| regret at {batch:,} | {_three(wanted)} | {' | '.join(cells)} |"
    cells = (_stable(found) for found in groups.values())
    yield f"| halves of the dump that advise the same | {STABLE:.0%} | {' | '.join(cells)} |"
    for batch in BATCHES:
        cells = (_within(found, batch) for found in groups.values())
        yield f"| regret at {batch:,} is within what is said | {WITHIN:.0%} | {' | '.join(cells)} |"
        cells = (", ".join(case.name for case in found if case.is_worse(batch)) or "none" for found in groups.values())
        yield f"| worse than no correction at {batch:,} | none | {' | '.join(cells)} |"


def _against(wanted: tuple[float, ...], found: Sequence[Case], batch: int) -> str:
    values = _summary([case.own_regret(batch) for case in found])
    met = all(value <= bar for value, bar in zip(values, wanted, strict=True))
    return f"{_three(values)}{_missed(met)}"


def _within(found: Sequence[Case], batch: int) -> str:
    """How often what is said of the regret holds, and how often that is only that it may be many times."""
    share = float(np.mean([case.is_within(batch) for case in found]))
    many = sum(case.choices[batch].most_regret() >= UNRELIABLE_FACTOR for case in found)
    return f'{share:.0%}, {many} of {len(found)} "many"{_missed(share >= WITHIN)}'


def _missed(met: bool) -> str:
    return "" if met else ": **missed**"


def _three(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def _stable(found: Sequence[Case]) -> str:
    shares = [case.stable for case in found if case.stable is not None]
    share = float(np.mean(shares)) if shares else 0.0
    return f"{share:.0%}, worst mismatch {min(shares, default=0.0):.0%}{_missed(share >= STABLE)}"


def _each(found: Sequence[Case]) -> Iterator[str]:
    columns = " | ".join(f"at {batch:,}, none" for batch in BATCHES)
    yield f"| mismatch | tokens | K3 | advised at 512 | best | {columns} | Spearman at 64, 512, 4,096 |"
    yield f"|{'---|' * 9}"
    for case in found:
        errors = case.errors[512]
        rho = ", ".join(f"{case.spearman(batch):.2f}" for batch in BATCHES)
        best = min(errors, key=lambda name: errors[name])
        size = f"{case.facts['mean_tokens']:.0f} | {case.facts['k3']:.2g}"
        regret = " | ".join(f"{case.own_regret(batch):.2f}, {case.regret(batch, 'none'):.2f}" for batch in BATCHES)
        yield f"| {case.name} | {size} | {case.choices[512].first} | {best} | {regret} | {rho} |"


def _parts(found: Sequence[Case]) -> Iterator[str]:
    """Estimated against true, where the true bias can be told from 0; a bias that counts more than once, once."""
    counted = "bias², as much as counts"
    logs: dict[str, list[float]] = {counted: [], "variance": []}
    for case in found:
        own, choice = case.facts["corrections"], case.choices[OF_A_BATCH]
        counts, uncorrected = case.made.reference.counts, choice.variance("none")
        for name, found_of in choice.moments.items():
            bias2, variance = found_of.bias2_counted, choice.variance(name)
            true = own.get(name)
            if true is None or name == "none":
                continue
            scale = uncorrected / own["none"]["variance"]
            logs["variance"].append(np.log10(variance / scale / true["variance"]) if true["variance"] > 0 else 0.0)
            if true["bias2"] > 3 * true["bias2_se"] and bias2 > 0:
                logs[counted].append(np.log10(bias2 / counts / scale / true["bias2"]))
    yield "| part, in units of the variance of no correction | pairs | estimated over true, median | 80 % of them |"
    yield "|---|---|---|---|"
    for part, values in logs.items():
        if values:
            low, middle, high = 10 ** np.quantile(values, (0.1, 0.5, 0.9))
            yield f"| {part} | {len(values)} | {middle:.2f} | {low:.2f} to {high:.2f} |"


def _fixed(folder: Path) -> Iterator[str]:
    """Whether planted bugs come first, and nothing else does."""
    labels, missed, alarms, bugs = json.loads((folder / "labels.json").read_text()), [], [], 0
    for name, label in labels.items():
        (findings,) = diagnose([str(folder / name)]).runs.values()
        fix = find_fixable(findings)
        bugs += label["cause"] in BUGS
        if label["cause"] in BUGS and fix is None:
            missed.append(name)
        if label["cause"] not in BUGS and fix is not None:
            alarms.append(f"{name} ({fix.cause}, {'nothing advised' if is_uncorrectable(fix) else 'until then'})")
    others = len(labels) - bugs
    yield f"Of {len(labels)} dumps of a dense model and a mixture of experts, {bugs} have a planted bug:"
    yield f"{bugs - len(missed)} are told to fix it first (**missed**: {', '.join(missed) or 'none'}); of the"
    yield f"{others} others, {len(alarms)} are ({', '.join(alarms) or 'none'})."


def main(truth: Path, tuned: Path | None, bugs: Path | None) -> None:
    """Put the figures between the marks of docs/methods/advice.md."""
    found, first = list(cases(truth)), [] if tuned is None else list(cases(tuned))
    held, chosen = ([case for case in found if (case.facts["model"] in CHOSEN_ON) == own] for own in (False, True))
    groups = {"held out": held, "chosen on": chosen, "chosen on, first policy": first}
    groups = {name: group for name, group in groups.items() if group}
    lines = [BEGIN, "", *_bars(groups), ""]
    lines += [line for name, group in groups.items() for line in regrets(name.capitalize(), group)]
    lines += [*_each(found), "", *_parts(found), ""]
    lines += [*_fixed(bugs), ""] if bugs is not None else []
    page = ROOT / "docs/methods/advice.md"
    before, after = page.read_text(encoding="utf-8").split(BEGIN)[0], page.read_text(encoding="utf-8").split(FINISH)[1]
    page.write_text(before + "\n".join([*lines, FINISH]) + after, encoding="utf-8")


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]] + [None, None]
    main(*given[:3])  # type: ignore[arg-type]
