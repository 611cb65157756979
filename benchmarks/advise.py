"""Writes the figures of docs/advise.md: the advice against the truth, on policies whose true gradient is known.

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

from mismatchctl.advise.limits import MOST_REJECTED, Limits  # noqa: E402
from mismatchctl.advise.model import Advice  # noqa: E402
from mismatchctl.advise.rank import rank  # noqa: E402
from mismatchctl.advise.sample import Sample, read  # noqa: E402
from mismatchctl.correction import correction_from_mapping  # noqa: E402
from mismatchctl.diagnose import diagnose  # noqa: E402
from mismatchctl.result.story import is_hopeless, to_fix  # noqa: E402

BATCHES = (64, 512, 4096)
BARS = {512: (1.05, 1.15, 1.4), 4096: (1.1, 1.5, 2.0)}
HALVED, STABLE = 1280, 0.8
OF_A_BATCH = 64
BEGIN, FINISH = "<!-- figures: benchmarks/advise.py -->", "<!-- end of figures -->"
CHOSEN_ON = frozenset({"dense-32", "moe-64", "dense-128", "moe-512"})
BUGS = frozenset(
    {"stale_worker", "temperature_mismatch", "truncated_sampling", "misaligned", "unsampled_tokens", "edited_response",
     "low_precision_logging", "context_mismatch"}
)  # fmt: skip
"""Causes that are to be fixed; noise, routing, quantization and a policy that moved are there to be corrected."""


@dataclass(frozen=True)
class Case:
    """A mismatch of a model: the true error of each correction by batch, what was advised, and what else was."""

    name: str
    facts: dict[str, Any]
    errors: dict[int, dict[str, float]]
    advice: dict[int, Advice]
    stable: float | None

    def regret(self, batch: int, name: str) -> float:
        return self.errors[batch][name] / min(self.errors[batch].values())

    def own_regret(self, batch: int) -> float:
        """Of what is advised."""
        return self.regret(batch, self.advice[batch].advice[0].name)

    def spearman(self, batch: int) -> float:
        """Of estimated and true errors."""
        front, true = self.advice[batch].front, self.errors[batch]
        names = [name for name in front if name in true]
        ranks = [np.argsort(np.argsort(values)) for values in (
            [max(front[name][0], 0.0) + front[name][1] for name in names], [true[name] for name in names]
        )]  # fmt: skip
        return float(np.corrcoef(*ranks)[0, 1])


def cases(folder: Path) -> Iterator[Case]:
    """All that a folder holds."""
    for path in sorted(folder.glob("*/truth.json")):
        truth = json.loads(path.read_text())
        own = truth["corrections"]
        corrections = [correction_from_mapping({"name": name, **found["correction"]}) for name, found in own.items()]
        (sample,) = read([str(path.parent / "dump.parquet")]).values()
        usable = {name: found for name, found in own.items() if found["rejected_tokens"] <= MOST_REJECTED}
        errors = {
            batch: {name: max(f["bias2"], 0.0) + f["variance"] * OF_A_BATCH / batch for name, f in usable.items()}
            for batch in BATCHES
        }

        advice = {batch: rank(sample, corrections, batch, Limits(), None) for batch in BATCHES}
        fewer = rank(_first(sample, HALVED), corrections, 512, Limits(), None)
        yield Case(path.parent.name, truth, errors, advice, fewer.stable)


def _first(sample: Sample, count: int) -> Sample:
    """The prompts that come first, of so many sequences."""
    last = sample.cluster[min(count, len(sample)) - 1]
    chosen = np.flatnonzero(sample.cluster <= last)
    ids, advantages = sample.token_ids, sample.advantages
    tokens = sample.batch.segments.members(chosen)
    return replace(
        sample, batch=sample.batch.take(chosen), cluster=sample.cluster[chosen], step=sample.step[chosen],
        token_ids=None if ids is None else ids[tokens], advantages=None if advantages is None else advantages[tokens],
    )  # fmt: skip


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
    shown = [name for name in names if name in ("none", "token_truncate_2", "seq_mis", "seq_mis_2") or "-" in name
             or name.startswith("decoupled") or name in ("geo_0.999_1.001", "miles_moe_2")]  # fmt: skip
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
    yield f"| halves of {HALVED:,} sequences that advise the same | {STABLE:.0%} | {' | '.join(cells)} |"


def _against(wanted: tuple[float, ...], found: Sequence[Case], batch: int) -> str:
    values = _summary([case.own_regret(batch) for case in found])
    met = all(value <= bar for value, bar in zip(values, wanted, strict=True))
    return f"{_three(values)}{'' if met else ': **missed**'}"


def _three(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def _stable(found: Sequence[Case]) -> str:
    shares = [case.stable for case in found if case.stable is not None]
    share = float(np.mean(shares)) if shares else 0.0
    missed = "" if share >= STABLE else ": **missed**"
    return f"{share:.0%}, worst mismatch {min(shares, default=0.0):.0%}{missed}"


def _each(found: Sequence[Case]) -> Iterator[str]:
    yield "| mismatch | tokens | K3 | k-hat | reference | advised at 512 | best | regret | Spearman at 64, 512, 4,096 |"
    yield f"|{'---|' * 9}"
    for case in found:
        advice, errors = case.advice[512], case.errors[512]
        first = advice.advice[0].name
        rho = ", ".join(f"{case.spearman(batch):.2f}" for batch in BATCHES)
        k_hat = "-" if advice.k_hat is None else f"{advice.k_hat:.2f}"
        best = min(errors, key=lambda name: errors[name])
        size = f"{case.facts['mean_tokens']:.0f} | {case.facts['k3']:.2g} | {k_hat}"
        regret = f"{case.regret(512, first):.2f}"
        yield f"| {case.name} | {size} | {advice.reference} | {first} | {best} | {regret} | {rho} |"


def _parts(found: Sequence[Case]) -> Iterator[str]:
    """Estimated against true, where the true bias can be told from 0; a bias that counts more than once, once."""
    counted = "bias², as much as counts"
    logs: dict[str, list[float]] = {counted: [], "variance": []}
    for case in found:
        own, advice = case.facts["corrections"], case.advice[OF_A_BATCH]
        front, counts = advice.front, advice.bias_counts
        for name, (bias2, variance, _) in front.items():
            true = own.get(name)
            if true is None or name == "none":
                continue
            scale = front["none"][1] / own["none"]["variance"]
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
        fix = to_fix(findings)
        bugs += label["cause"] in BUGS
        if label["cause"] in BUGS and fix is None:
            missed.append(name)
        if label["cause"] not in BUGS and fix is not None:
            alarms.append(f"{name} ({fix.cause}, {'nothing advised' if is_hopeless(fix) else 'until then'})")
    others = len(labels) - bugs
    yield f"Of {len(labels)} dumps of a dense model and a mixture of experts, {bugs} have a planted bug:"
    yield f"{bugs - len(missed)} are told to fix it first (**missed**: {', '.join(missed) or 'none'}); of the"
    yield f"{others} others, {len(alarms)} are ({', '.join(alarms) or 'none'})."


def main(truth: Path, tuned: Path | None, bugs: Path | None) -> None:
    """Put the figures between the marks of docs/advise.md."""
    found, first = list(cases(truth)), [] if tuned is None else list(cases(tuned))
    held, chosen = ([case for case in found if (case.facts["model"] in CHOSEN_ON) == own] for own in (False, True))
    groups = {"held out": held, "chosen on": chosen, "chosen on, first policy": first}
    groups = {name: group for name, group in groups.items() if group}
    lines = [BEGIN, "", *_bars(groups), ""]
    lines += [line for name, group in groups.items() for line in regrets(name.capitalize(), group)]
    lines += [*_each(found), "", *_parts(found), ""]
    lines += [*_fixed(bugs), ""] if bugs is not None else []
    page = ROOT / "docs" / "advise.md"
    before, after = page.read_text(encoding="utf-8").split(BEGIN)[0], page.read_text(encoding="utf-8").split(FINISH)[1]
    page.write_text(before + "\n".join([*lines, FINISH]) + after, encoding="utf-8")


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]] + [None, None]
    main(*given[:3])  # type: ignore[arg-type]
