"""Apply Corrections in slow loops over tokens, as part of the oracle."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from mismatchctl.corrections.model import Correction, Gate, Weight
from tests.oracles.estimates import (
    ONE,
    ZERO,
    Formula,
    Sequence_,
    Sums,
    Truth,
    clamped,
    cluster_rows,
    deviation,
    effective_share,
    log_probs,
    mean,
    over,
    positions,
    total,
    truth,
)
from tests.oracles.metrics import k3, log_ratios


@dataclass
class Applied:
    raw: list[Decimal] = field(default_factory=list)
    weight: list[Decimal] = field(default_factory=list)
    low: list[bool] = field(default_factory=list)
    high: list[bool] = field(default_factory=list)
    factor: Decimal = ONE
    kept: list[bool] = field(default_factory=list)
    counted: list[bool] = field(default_factory=list)
    gates: list[list[int]] = field(default_factory=list)  # -1 rejected as too low, 1 as too high, 0 kept
    catastrophic: list[bool] = field(default_factory=list)


def apply(correction: Correction, group: Sequence[Sequence_]) -> list[Applied]:
    applied = [_gated(correction, sequence) for sequence in group]
    for sequence, own in zip(group, applied, strict=True):
        _weigh(correction.weight or Weight(), sequence, own, correction.weight is None)
    if correction.weight is not None:
        _normalize(correction.weight, group, applied)
    return applied


def _source(rule: Weight | Gate) -> tuple[str, str]:
    upper, lower = rule.source.split("/")
    return upper, lower


def _weigh(rule: Weight, sequence: Sequence_, own: Applied, nothing: bool) -> None:
    """Return the weights of a sequence after its gates. A unit without kept tokens has the weight 1."""
    x = log_ratios(sequence, *_source(rule)) if not nothing else [ZERO] * len(positions(sequence))
    if rule.clamp == "token":
        x = [clamped(v) for v in x]
    logs = list(x)
    for unit in [] if rule.level == "token" else _units(rule, sequence, len(x)):
        seen = [x[token] for token in unit if rule.sees == "original" or own.kept[token]]
        for token in unit:
            logs[token] = total(seen) / (max(len(seen), 1) if rule.level == "geometric" else 1)
    raw = [(clamped(v) if rule.clamp == "aggregate" else v).exp() for v in logs]
    interval = rule.clip or rule.zero or (None, rule.truncate)
    low = [interval[0] is not None and w < Decimal(interval[0]) for w in raw]
    high = [interval[1] is not None and w > Decimal(interval[1]) for w in raw]
    bounded = []
    for w, below, above in zip(raw, low, high, strict=True):
        if not (below or above):
            bounded.append(w)
        else:
            bounded.append(ZERO if rule.zero else Decimal(interval[0 if below else 1]))  # type: ignore[arg-type]
    own.raw, own.weight, own.low, own.high = raw, bounded, low, high


def _normalize(rule: Weight, group: Sequence[Sequence_], applied: list[Applied]) -> None:
    """Divide by the mean weight of the step or micro-batch, unless the mean is nearly 0."""
    if rule.normalize == "none":
        return
    batches: dict[Any, list[Applied]] = {}
    for sequence, own in zip(group, applied, strict=True):
        name = sequence.get("micro_batch") if rule.normalize_over == "micro_batch" else None
        batches.setdefault(name, []).append(own)
    for batch in batches.values():
        weights = [own.weight for own in batch if own.weight]
        if rule.normalize == "sequence":
            weights = [[total(own) / len(own)] for own in weights]
            weights += [[ZERO] for own in batch if not own.weight and rule.normalize_empty == "count"]
        everything = [w for own in weights for w in own]
        factor = total(everything) / len(everything) if everything else ONE
        factor = factor if factor > Decimal("1e-8") else ONE
        for own in batch:
            own.factor = factor
            own.weight = [w / factor for w in own.weight]


def _gated(correction: Correction, sequence: Sequence_) -> Applied:
    n = len(positions(sequence))
    own = Applied(kept=[True] * n, counted=[True] * n, catastrophic=[False] * n)
    veto = next((gate for gate in correction.gates if gate.is_veto), None)
    if veto is not None:
        floor = Decimal(veto.keep[0] or 0).ln()
        own.catastrophic = [v < floor for v in log_ratios(sequence, *_source(veto))]
    for gate in correction.gates:
        sides = _sides(gate, sequence, own.kept)
        own.gates.append(sides)
        for token, side in enumerate(sides):
            if side:
                own.kept[token] = False
                own.counted[token] = own.counted[token] and gate.effect == "zero"
    return own


def _sides(gate: Gate, sequence: Sequence_, remaining: list[bool]) -> list[int]:
    n, statistic = len(remaining), _statistic(gate, sequence)
    sides = [0] * n
    for unit in _units(gate, sequence, n):
        seen = [token for token in unit if gate.sees == "original" or remaining[token]]
        if not seen:
            continue
        side = _side(gate, _aggregate(gate, [statistic[token] for token in seen]))
        for token in unit:
            if _may_reject(gate, sequence, token):
                sides[token] = side
    return sides


def _units(rule: Weight | Gate, sequence: Sequence_, n: int) -> list[list[int]]:
    if rule.level == "token":
        return [[token] for token in range(n)]
    if rule.over == "sequence":
        return [list(range(n))]
    places, units = positions(sequence), []
    for token in range(n):
        if token and places[token] == places[token - 1] + 1:
            units[-1].append(token)
        else:
            units.append([token])
    return units


def _statistic(gate: Gate, sequence: Sequence_) -> list[Decimal]:
    upper, lower = _source(gate)
    x = log_ratios(sequence, upper, lower)
    if gate.clamp == "token":
        x = [clamped(v) for v in x]
    above = [v.exp() for v in log_probs(sequence, upper)]
    below = [v.exp() for v in log_probs(sequence, lower)]
    differences = [a - b for a, b in zip(above, below, strict=True)]
    return {
        "ratio": lambda: x,
        "k1": lambda: [-v for v in x],
        "k2": lambda: [v * v / 2 for v in x],
        "k3": lambda: [k3(v) for v in x],
        "abs_log_ratio": lambda: [abs(v) for v in x],
        "mult_error": lambda: [abs(v).exp() for v in x],
        "prob_diff": lambda: differences,
        "abs_prob_diff": lambda: [abs(v) for v in differences],
        "train_prob": lambda: above,
        "rollout_prob": lambda: below,
    }[gate.statistic]()


def _aggregate(gate: Gate, values: list[Decimal]) -> Decimal:
    if gate.statistic == "ratio" and gate.level == "mean":
        ratios = [(v if gate.clamp == "none" else clamped(v)).exp() for v in values]
        return (total(ratios) / len(ratios)).ln()
    value = {
        "token": lambda: values[0],
        "sequence": lambda: total(values),
        "sum": lambda: total(values),
        "geometric": lambda: total(values) / len(values),
        "mean": lambda: total(values) / len(values),
        "min": lambda: min(values),
        "max": lambda: max(values),
    }[gate.level]()
    return clamped(value) if gate.statistic == "ratio" and gate.clamp == "aggregate" else value


def _side(gate: Gate, value: Decimal) -> int:
    low, high = (None if bound is None else Decimal(bound) for bound in gate.keep)
    if gate.statistic == "ratio":
        low = None if not low else low.ln()
        high = None if high is None else high.ln()
    if low is not None and (value < low or (value == low and not gate.inclusive[0])):
        return -1
    if high is not None and (value > high or (value == high and not gate.inclusive[1])):
        return 1
    return 0


def _advantages(sequence: Sequence_) -> list[Decimal] | None:
    given = sequence.get("advantages")
    if given is None:
        return None
    places = positions(sequence)
    return [Decimal(given[place] if isinstance(given, list) else given) for place in places]


def _may_reject(gate: Gate, sequence: Sequence_, token: int) -> bool:
    if gate.when == "always":
        return True
    advantage = (_advantages(sequence) or [])[token]
    return advantage > 0 if gate.when == "positive_advantage" else advantage < 0


def _sums(correction: Correction, sequence: Sequence_, own: Applied) -> Sums:
    n = len(own.raw)
    filled = int(n > 0)
    sums = Sums()
    sums.add("n", n)
    sums.add("sequences", filled)
    kept = [index for index in range(n) if own.kept[index]]
    sums.add_ratios("raw", *own.raw)
    sums.add_ratios("w", *own.weight, factor=own.factor)
    sums.add_ratios("wk", *(own.weight[i] for i in kept), factor=own.factor)
    sums.add("low", sum(own.low))
    sums.add("high", sum(own.high))
    sums.add("factor", own.factor * n)
    sums["#factor"] += n
    sums.add("kept", len(kept))
    sums.add("rejected", n - len(kept))
    sums["#rejected"] = Decimal(n)  # code that subtracts kept tokens from all tokens rounds relative to these
    sums.add("counted", sum(own.counted))
    sums.add("touched", filled and len(kept) < n)
    sums.add("gone", filled and not kept)
    mass = total(own.weight[i] for i in kept) / n if n else ZERO
    sums.add_ratios("W", mass, factor=own.factor)
    x = log_ratios(sequence, "train", "rollout")
    sums.add("k3", *(k3(x[i]) for i in kept))
    for index, sides in enumerate(own.gates):
        for end, side in (("low", -1), ("high", 1)):
            sums.add(f"gate{index}_tokens_{end}", sides.count(side))
            sums.add(f"gate{index}_sequences_{end}", int(side in sides))
    sums.add("catastrophic", sum(own.catastrophic))
    sums.add("catastrophic_sequences", int(any(own.catastrophic)))
    advantages, reward = _advantages(sequence), sequence.get("reward")
    outcomes = {
        "reward": None if reward is None else Decimal(reward),
        "advantage": total(advantages) / n if advantages else None,
        "length": Decimal(n),
    }
    for name, outcome in outcomes.items():
        shares = {"kept": ZERO, "rejected": ZERO}
        if filled and outcome is not None:
            shares = {"kept": Decimal(len(kept)) / n, "rejected": Decimal(n - len(kept)) / n}
        for side, share in shares.items():
            sums.add(f"{side}_{name}_share", share)
            sums.add(f"{side}_{name}", share * (outcome or ZERO))
    return sums


FORMULAS: dict[str, Formula] = {
    "raw_weight_mean": mean("raw", "n"),
    "raw_weight_std": deviation("raw", "rawraw", "n"),
    "weight_mean": mean("w", "n"),
    "weight_std": deviation("w", "ww", "n"),
    "weight_bounded_low": mean("low", "n"),
    "weight_bounded_high": mean("high", "n"),
    "normalization_factor": mean("factor", "n"),
    "ess_token": effective_share("wk", "wkwk", "n"),
    "ess_sequence": effective_share("W", "WW", "sequences"),
    "rejected_tokens": mean("rejected", "n"),
    "rejected_sequences": mean("touched", "sequences"),
    "fully_rejected_sequences": mean("gone", "sequences"),
    "empty_prompts": mean("dead", "clusters"),
    "loss_scale": lambda t: over(t["wk"], t["counted"]),
    "k3_kept": mean("k3", "kept"),
    "catastrophic_tokens": mean("catastrophic", "n"),
    "catastrophic_sequences": mean("catastrophic_sequences", "sequences"),
} | {
    f"{side}_{name}": mean(f"{side}_{name}", f"{side}_{name}_share")
    for side in ("kept", "rejected")
    for name in ("reward", "advantage", "length")
}


def correction_truths(
    correction: Correction, sequences: Sequence[Sequence_], applied: Sequence[Applied]
) -> dict[str, Truth]:
    """Return all metrics of a correction for some sequences. The correction was applied to whole steps."""
    sums = [_sums(correction, sequence, own) for sequence, own in zip(sequences, applied, strict=True)]
    rows = cluster_rows(sequences, sums)
    for row in rows:
        row |= {"clusters": ONE, "dead": Decimal(row["kept"] == 0)}
        row |= {"#clusters": ONE, "#dead": row["dead"]}
    found = {key: truth(formula, rows) for key, formula in FORMULAS.items()}
    for index in range(len(correction.gates)):
        for end in ("low", "high"):
            for unit, below in (("tokens", "n"), ("sequences", "sequences")):
                key = f"gate{index}_{unit}_{end}"
                found[key] = truth(mean(key, below), rows)
    found["kept_tokens"] = Truth(total(row["kept"] for row in rows))
    for name, values in (("raw_weight", [own.raw for own in applied]), ("weight", [own.weight for own in applied])):
        flat = [w for own in values for w in own]
        found |= {f"{name}_min": Truth(min(flat, default=None)), f"{name}_max": Truth(max(flat, default=None))}
    if correction.weight is None or correction.weight.normalize == "none":
        found["normalization_factor"] = Truth(None)
    if not any(gate.is_veto for gate in correction.gates):
        del found["catastrophic_tokens"], found["catastrophic_sequences"]
    return found
