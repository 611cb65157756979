"""Compare mismatchctl with the numbers of ten frameworks (conformance/peers/README.md), and print a line for each."""

import json
import lzma
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.core.losses import sum_terms
from mismatchctl.corrections.model import Correction
from mismatchctl.frameworks.adapter import Dtype, Framework, ReplayOptions
from mismatchctl.frameworks.options import PlainFramework
from mismatchctl.frameworks.registry import load_framework
from mismatchctl.frameworks.step import ConfiguredStep
from mismatchctl.measure.columns import compute_token_loss

FOLDER = Path(__file__).parent / "peers"
FRAMEWORKS = {
    "trl": "trl",
    "nemo": "nemo-rl",
    "openrlhf": "openrlhf@0.11",
    "prime": "prime-rl",
    "prime_2026_09": "prime-rl@2026-09",
    "prime_2026_10": "prime-rl@2026-10",
    "areal": "areal",
    "areal_2026_08": "areal@2026-08",
    "skyrl": "skyrl",
    "roll": "roll",
    "tinker": "tinker-cookbook",
    "openinstruct": "open-instruct",
    "swift": "ms-swift",
}
VALUE, WEIGHT, GRADIENT = 2e-5, 3e-6, 2e-4
"""Relative tolerances: of a value (or of the values that it averages), of a weight, and of the largest gradient of a
step.
"""
UNEQUAL: dict[tuple[str, str, str], str] = {
    **{
        ("openrlhf nonfinite", kind, what): "weights were recovered from a gradient that PPO's clip had made 0"
        for kind in ("tis", "tis_default", "tis_seq_mean")
        for what in ("weights", "keep")
    },
}
"""Differences that cannot be repaired, by (goldens, configuration, value), with the reason
(docs/methods/conformance.md).
"""


@dataclass
class Tally:
    compared: dict[str, int] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)

    def check(self, kind: str, same: Any, where: tuple[str, str, Any], what: Any, wanted: Any, found: Any) -> None:
        self.compared[kind] = self.compared.get(kind, 0) + 1
        if not same:
            known = any((where[0], where[1], item) in UNEQUAL for item in (what, "*"))
            line = f"{where}: {what} {wanted!r}, not {found!r}"
            (self.excused if known else self.differences).append(line)


@cache
def goldens() -> dict[str, Any]:
    with lzma.open(FOLDER / "expected.json.xz", "rt") as file:
        found: dict[str, Any] = json.load(file)
    return found


@cache
def table(name: str, step: int) -> pa.Table:
    rows = pq.read_table(FOLDER / name)
    return rows.filter(pc.equal(rows["step"], step))


@cache
def framework(name: str) -> Framework:
    return load_framework(FRAMEWORKS[name])


def number(value: Any) -> float:
    return float(value)


def close(wanted: float, found: float, scale: float = 0.0, relative: float = VALUE) -> bool:
    if math.isnan(wanted) or math.isinf(wanted):
        return math.isnan(found) if math.isnan(wanted) else wanted == found
    return abs(wanted - found) <= relative * max(abs(wanted), scale) + 2e-7


def cases(name: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield each batch with a configuration and the expected numbers."""
    for key, golden in goldens().items():
        if key.rpartition("_")[0] == name:
            for config, case in golden["configs"].items():
                yield golden["input"], config, case


def compare(name: str) -> Tally:
    tally, own = Tally(), framework(name)
    for batch, config, case in cases(name):
        correction = own.correction(case["config"])
        steps = case["per_step"]
        for step, wanted in steps.items():
            rows = table(batch, int(step))
            where = (f"{name} {batch[6:-8]}", config, int(step))
            replay = own.replay(rows, correction, ReplayOptions(dtype="float32"))
            _values(tally, where, wanted, replay.logged)
            _rows(tally, where, case, rows, replay, own, correction)
    return tally


@dataclass(frozen=True)
class ProductLoss:
    """A framework's policy loss as a loss of mismatchctl, with a factor."""

    losses: Sequence[str]  # as `analyze --loss` takes them
    factors: Any  # weights, mask and denominators of the framework [T]
    over: Any = None  # tokens in the means over sequences [T]. None: all.
    scale: float = 1.0  # of the advantages
    subtracted: Sequence[str] = ()  # losses that are subtracted
    bypassed: bool = False  # the rollout's log-probs replace the trainer's

    def gradient(self, run: ConfiguredStep) -> Any:
        """Return the derivative by each current log-prob [T], as `analyze` computes it."""
        over = np.ones(run.segments.tokens, np.bool_) if self.over is None else self.over
        segments = Segments.from_lengths(run.segments.sum(over))
        train = run.rollout if self.bypassed else run.train
        values = (run.rollout[over], train[over], run.current[over], None, run.advantages[over] * self.scale)
        found = np.zeros(run.segments.tokens)
        for sign, names in ((1, self.losses), (-1, self.subtracted)):
            for name in names:
                loss = compute_token_loss(name, TokenBatch(segments, *values))
                assert loss is not None
                found[over] += sign * loss.gradient(self.factors[over])
        return found


def _clip_loss(low: float, high: float, dual: float | None, cap: float | None = None) -> str:
    bounds = f"low={low},high={high}"
    if cap is not None:
        return f"two_sided:{bounds},cap={cap}"
    return f"ppo:{bounds}" if dual is None else f"dual_clip:{bounds},dual={dual}"


def _trl(run: ConfiguredStep, options: Any, factors: Any) -> ProductLoss | None:
    low, high = options["eps"]
    if options["loss_type"] == "sapo" and options["level"] == "token":
        positive, negative = options["sapo"]
        return ProductLoss([f"sapo:positive={positive},negative={negative}"], factors)
    if options["loss_type"] == "cispo":
        return ProductLoss([f"cispo:low=0,high={high}"], factors)
    if options["loss_type"] in ("sapo", "vespo"):
        return None
    if options["level"] == "sequence":
        return ProductLoss([f"gspo:low={1 - low},high={1 + high}"], factors)
    return ProductLoss([_clip_loss(1 - low, 1 + high, None, options["delta"])], factors)


def _nemo(run: ConfiguredStep, options: Any, factors: Any) -> ProductLoss:
    given = options["loss"]
    low, high = 1 - given["ratio_clip_min"], 1 + given["ratio_clip_max"]
    if given["sequence_level_importance_ratios"]:
        return ProductLoss([f"gspo:low={low},high={high}"], factors)
    if given["use_cispo"]:
        return ProductLoss([f"cispo:low={low},high={high}"], factors)
    return ProductLoss([_clip_loss(low, high, given["ratio_clip_c"])], factors)


def _openrlhf(run: ConfiguredStep, options: Any, factors: Any) -> ProductLoss:
    low, high = 1 - options["clip_eps_low"], 1 + options["clip_eps_high"]
    gspo = options["policy_loss_type"] == "gspo"
    name = f"gspo:low={low},high={high}" if gspo else _clip_loss(low, high, options["dual_clip"])
    return ProductLoss([name], factors, bypassed=gspo and options["correct"])


def _prime(run: ConfiguredStep, options: Any, factors: Any) -> ProductLoss | None:
    kind, tau, scale = options["type"], options["kl_tau"], options["adv_tau"]
    cap = options.get("max_importance_ratio")
    if cap is not None and kind != "cispo" and (np.exp(run.v) > cap).any():
        return None
    if kind == "ipo" and not options["eps"] and run.single:  # any rounding of a float32 probability is a change
        return None
    if kind == "icepop":  # the factors contain its gate
        return ProductLoss(["importance_sampling"], factors, scale=scale)
    share = run.each(1 / max(run.tokens, 1))
    low, high = options.get("ratio_low"), options.get("ratio_high")
    name = {
        "ipo": f"ipo:eps={options.get('eps')}",
        "default": f"dppo:low={options.get('dppo_mask_low')},high={options.get('dppo_mask_high')}",
        "ppo": f"ppo_bypass:low={0.8 if low is None else low},high={1.2 if high is None else high}",
        "cispo": f"cispo_bypass:low={0.0 if low is None else low},high={5.0 if high is None else high}",
    }[kind]
    if kind in ("ppo", "cispo") or not tau:
        return ProductLoss([name], share, scale=scale)
    return ProductLoss([name, f"quadratic:tau={tau}"], share, scale=scale, subtracted=["importance_sampling"])


def _areal(run: ConfiguredStep, options: Any, factors: Any) -> ProductLoss:
    higher = options["eps_clip_higher"]
    low, high = 1 - options["eps_clip"], 1 + (options["eps_clip"] if higher is None else higher)
    sequence = options["importance_sampling_level"] == "sequence"
    if options["use_cispo_loss"]:
        return ProductLoss([f"cispo:low={low},high={high}"], factors)
    name = f"gspo:low={low},high={high}" if sequence else _clip_loss(low, high, options["c_clip"])
    return ProductLoss([name], factors, run.keep if sequence else None)


def _skyrl(run: ConfiguredStep, options: Any, factors: Any) -> ProductLoss:
    low, high = 1 - options["eps_clip_low"], 1 + options["eps_clip_high"]
    kind, cispo, dppo = options["policy_loss_type"], options["cispo"], options["dppo"]
    over = factors != 0 if kind == "gspo" else None
    bounds = f"low={1 - cispo['cispo_eps_clip_low']},high={1 + cispo['cispo_eps_clip_high']}"
    name = {
        "cispo": f"cispo{'_bypass' if cispo['cispo_anchor'] == 'rollout' else ''}:{bounds}",
        "gspo": f"gspo_token:low={low},high={high}",  # the mean has no gradient
        "dppo": f"dppo:low={dppo['delta_low']},high={dppo['delta_high']}",
        "rollout_is": "cispo_bypass:low=0,high=1e9",  # REINFORCE with a ratio, and a gate in the factors
    }.get(kind)
    if kind == "dppo" and dppo["dppo_type"] == "binary_tv":  # mismatchctl's loss drops tokens
        factors = 1.0 * run.passed(lambda gate: gate.source == "train/rollout")
    elif kind == "dppo":  # the factors contain the gate of the binary KL
        name = "importance_sampling"
    dual = options["clip_ratio_c"] if kind == "dual_clip" else None
    return ProductLoss([name or _clip_loss(low, high, dual)], factors, over)


def _open_instruct(run: ConfiguredStep, options: Any, factors: Any) -> ProductLoss:
    low, high = 1 - options["clip_lower"], 1 + options["clip_higher"]
    name = f"cispo:low=0,high={high}" if options["loss_fn"] == "cispo" else _clip_loss(low, high, None)
    return ProductLoss([name], factors)


def _swift(run: ConfiguredStep, options: Any, factors: Any) -> ProductLoss:
    low, higher, level = options["epsilon"], options["epsilon_high"], options["importance_sampling_level"]
    high = low if higher is None else higher
    if options["loss_type"] == "cispo":
        return ProductLoss([f"cispo:low=0,high={high}"], factors)
    if options["loss_type"] == "sapo":
        return ProductLoss([f"sapo:positive={options['tau_pos']},negative={options['tau_neg']}"], factors)
    bounds = f"low={1 - low},high={1 + high}"
    names = {"sequence": f"gspo:{bounds}", "sequence_token": f"gspo_token:{bounds}"}
    name = names.get(level) or _clip_loss(1 - low, 1 + high, None, options["delta"])
    return ProductLoss([name], factors, None if level == "token" else run.counted)


PRODUCT_LOSSES: dict[str, Callable[[ConfiguredStep, Any, Any], ProductLoss | None]] = {
    "trl": _trl, "nemo": _nemo, "openrlhf": _openrlhf, "prime": _prime, "areal": _areal, "skyrl": _skyrl,
    "openinstruct": _open_instruct, "swift": _swift,
}  # fmt: skip
"""mismatchctl's loss for a configuration, or None if there is none."""


def product_gradient(name: str, own: Framework, rows: pa.Table, correction: Correction) -> list[Any] | None:
    """Return the derivative of a framework's loss by each current log-prob, with the loss that `analyze` computes."""
    assert isinstance(own, PlainFramework)
    run = own.configure(rows, correction, "float32")
    with np.errstate(all="ignore"):
        found = PRODUCT_LOSSES[name.partition("_")[0]](run, run.options, own.terms(run)[0][1])
        return None if found is None else run.step.by_row(found.gradient(run))


def framework_loss(
    own: Framework, rows: pa.Table, correction: Correction, dtype: Dtype = "float64"
) -> tuple[float, list[Any]]:
    """Return the loss that the framework logs, and its derivative by each current log-prob, per row."""
    assert isinstance(own, PlainFramework)
    run = own.configure(rows, correction, dtype)
    with np.errstate(all="ignore"):
        value, gradient = sum_terms(own.terms(run))
        return value, run.step.by_row(gradient)


def _values(tally: Tally, where: Any, wanted: Mapping[str, Any], found: Mapping[str, float]) -> None:
    plain = {metric: value for metric, value in wanted.items() if not isinstance(value, list)}
    for metric in sorted(plain.keys() - found.keys()):
        tally.check("values", False, where, metric, plain[metric], "nothing")
    for metric in sorted(found.keys() - plain.keys()):
        tally.check("values", False, where, metric, "nothing", found[metric])
    for metric in sorted(plain.keys() & found.keys()):
        golden, value = number(plain[metric]), found[metric]
        tally.check("values", close(golden, value), where, metric, golden, value)


def _rows(tally: Tally, where: Any, case: Any, rows: pa.Table, replay: Any, own: Framework, correction: Any) -> None:
    gradients: dict[str, list[Any]] = {}
    for row, sequence in enumerate(rows["sequence_id"].to_pylist()):
        golden = case["per_sequence"].get(sequence)
        if golden is None:
            continue
        for kind, values in (("weights", replay.weights), ("keep", replay.keep)):
            if golden.get(kind) is None:
                continue
            if values is None:
                tally.check(kind, False, where, kind, golden[kind], None)
                continue
            for place, wanted in enumerate(golden[kind]):
                if wanted is None:
                    continue
                found = float(values[row][place])
                same = (
                    close(number(wanted), found, relative=WEIGHT) if kind == "weights" else bool(wanted) == bool(found)
                )
                tally.check(kind, same, where, f"{kind}", wanted, (sequence, place, found))
        if golden.get("grad") is not None:
            if not gradients:
                gradients["gradients"] = framework_loss(own, rows, correction, "float32")[1]
                product = product_gradient(where[0].partition(" ")[0], own, rows, correction)
                gradients |= {} if product is None else {"gradients of analyze": product}
            wanted_grads = np.array([number(value) if value is not None else 0.0 for value in golden["grad"]])
            every = [
                abs(number(value))
                for other in rows["sequence_id"].to_pylist()
                for value in case["per_sequence"][other].get("grad") or []
                if value is not None
            ]
            scale = max((value for value in every if math.isfinite(value)), default=0.0)
            for kind, gradient in gradients.items():
                for place, wanted in enumerate(wanted_grads):
                    found = float(gradient[row][place])
                    same = close(wanted, found, scale, GRADIENT)
                    tally.check(kind, same, where, kind, wanted, (sequence, place, found))


KINDS = ("values", "weights", "keep", "gradients", "gradients of analyze")


def line(name: str, tally: Tally) -> str:
    cells = " | ".join(f"{tally.compared.get(kind, 0):,}" for kind in KINDS)
    compared = sum(tally.compared.values())
    equal = compared - len(tally.differences) - len(tally.excused)
    return f"| {FRAMEWORKS[name]} | {cells} | {compared:,} | {equal:,} |"


if __name__ == "__main__":
    limit = 20
    for chosen in sys.argv[1:] or FRAMEWORKS:
        made = compare(chosen)
        print(line(chosen, made))
        print(*made.differences[:limit], sep="\n")
