"""What corrections do to a run, in tables: weights and rejection, loss, gates, kept against rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mismatchctl.correction import Correction
from mismatchctl.numbers import DASH
from mismatchctl.render.document import BRIEF, USUAL, Cell, Head, Table
from mismatchctl.render.tables import Registry, words
from mismatchctl.render.text import clean
from mismatchctl.result import NOT_RECORDED, Result, RunResult, Value

CORRECTION_KEYS = (
    "weight_mean",
    "weight_std",
    "weight_bounded_low",
    "weight_bounded_high",
    "normalization_factor",
    "rejected_tokens",
    "rejected_sequences",
    "fully_rejected_sequences",
    "empty_prompts",
    "ess_token",
    "ess_sequence",
    "loss_scale",
    "k3_kept",
)
LOSS_KEYS = ("loss", "loss_change", "loss_clip_fraction", "gradient_cosine", "gradient_norm")
COMPARED_KEYS = tuple(f"{side}_{name}" for name in ("reward", "advantage", "length") for side in ("kept", "rejected"))
_TERMINAL = {
    "weight_mean": 5, "rejected_tokens": 0, "rejected_sequences": 4, "ess_token": 0, "ess_sequence": 3, "loss_scale": 2,
    "k3_kept": 1,
}  # fmt: skip
"""How early a column goes where there is little room; others stand on the page alone."""


def corrections_table(run: RunResult, registry: Registry) -> Table:
    """One row per correction."""
    caption = (
        "What each correction would do to this run. Weights are those applied, rejected tokens included; shares are of "
        "valid tokens or of sequences."
    )
    table = _by_correction(caption, CORRECTION_KEYS, run, registry)
    table.title, table.reach = "Corrections", BRIEF
    return table


def effects_table(result: Result) -> Table:
    """What each correction takes of each of many runs, in two figures: of the terminal alone."""
    acting = [correction.name for correction in result.corrections if correction.gates or correction.weight]
    heads = [Head("run", numeric=False), *(Head(clean(name), drop=0) for name in acting)]
    table = Table("Corrections: tokens rejected | ESS of sequences left, in percent", heads, matrix=True, reach=USUAL)
    for name, run in result.runs.items():
        effects = (_effect(run.overall.corrections.get(each, {})) for each in acting)
        table.rows.append([words(name, "name"), *map(Cell, effects)])
    return table


def _effect(values: Mapping[str, Value]) -> str:
    rejected, left = (_percent(values.get(key, NOT_RECORDED).value) for key in ("rejected_tokens", "ess_sequence"))
    return f"{rejected:>3} |{left:>4}"


def _percent(share: float | None) -> str:
    """A whole percentage that is 0 or 100 only where the share is."""
    if share is None:
        return DASH
    whole = round(100 * share)
    if whole in (0, 100) and share not in (0, 1):
        return "<1" if whole == 0 else ">99"
    return f"{whole}"


def loss_table(run: RunResult, registry: Registry) -> Table | None:
    """What each correction does to the loss, where the dump tells."""
    if not any(values.get("loss", NOT_RECORDED).value is not None for values in run.overall.corrections.values()):
        return None
    caption = (
        "What each correction would do to the policy loss and to its gradient by token, against PPO without any "
        "correction."
    )
    return _by_correction(caption, LOSS_KEYS, run, registry)


def _by_correction(caption: str, keys: Sequence[str], run: RunResult, registry: Registry) -> Table:
    heads = [Head("correction", numeric=False), *(registry.head(key, "c", drop=_TERMINAL.get(key)) for key in keys)]
    table = Table(caption, heads, sortable=True)
    for name, values in run.overall.corrections.items():
        cells = [table.value(_value(values, key), registry.metric(key, "c").unit) for key in keys]
        table.rows.append([words(name, "name"), *cells])
    return table


def gates_table(corrections: Sequence[Correction], run: RunResult, registry: Registry) -> Table | None:
    """What each gate rejects to either side; None where nothing has a gate."""
    keys = [f"{level}_{side}" for level in ("tokens", "sequences") for side in ("low", "high")]
    table = Table(
        "What each gate rejects, by side: too low and too high. A token rejected by two gates counts in both.",
        [Head("correction", numeric=False), Head("gate", numeric=False)],
    )
    for correction in corrections:
        values = run.overall.corrections.get(correction.name, {})
        for index, gate in enumerate(correction.gates):
            cells = [table.value(_value(values, f"gate{index}_{key}"), "fraction") for key in keys]
            for key in keys:
                registry.metric(f"gate{index}_{key}", "c")
            table.rows.append([words(correction.name, "name"), words(f"{index}: {gate.title}"), *cells])
    if not table.rows:
        return None
    table.heads += [registry.head(f"gate0_{key}", "c", key.replace("_", " too ")) for key in keys]
    return table


def selection_table(result: Result, run: RunResult, registry: Registry) -> Table | None:
    """Kept against rejected sequences; None where no correction rejects anything."""
    if not any(correction.gates for correction in result.corrections):
        return None
    table = Table(
        "Kept against rejected: each sequence counts by its share of kept or of rejected tokens.",
        [Head("correction", numeric=False), *(registry.head(key, "c", key.replace("_", " ")) for key in COMPARED_KEYS)],
    )
    for correction in result.corrections:
        values = run.overall.corrections.get(correction.name, {})
        if correction.gates:
            cells = [table.value(_value(values, key), registry.metric(key, "c").unit) for key in COMPARED_KEYS]
            table.rows.append([words(correction.name, "name"), *cells])
    return table


def _value(values: dict[str, Value], key: str) -> Value:
    return values.get(key, NOT_RECORDED)
