"""What corrections do to a run, in tables: weights and rejection, loss, gates, kept against rejected."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mismatchctl.correction import Correction
from mismatchctl.numbers import DASH
from mismatchctl.render.document import BRIEF, USUAL, Head, Table
from mismatchctl.render.tables import Registry, measured, words
from mismatchctl.render.text import clean
from mismatchctl.result import NOT_RECORDED, Result, RunResult, Value

CORRECTION_KEYS = {
    "weight_mean": 5, "weight_std": None, "weight_bounded_low": None, "weight_bounded_high": None,
    "normalization_factor": None, "rejected_tokens": 0, "rejected_sequences": 4, "fully_rejected_sequences": None,
    "empty_prompts": None, "ess_token": 0, "ess_sequence": 3, "loss_scale": 2, "k3_kept": 1,
}  # fmt: skip
"""Metrics of corrections, and how early each goes where there is little room; None: it stands on the page alone."""
LOSS_KEYS = ("loss", "loss_change", "loss_clip_fraction", "gradient_cosine", "gradient_norm")
COMPARED_KEYS = tuple(f"{side}_{name}" for name in ("reward", "advantage", "length") for side in ("kept", "rejected"))


def corrections_table(run: RunResult, registry: Registry, name: str) -> Table:
    """One row per correction."""
    caption = (
        "What each correction would do to this run. Weights are those applied, rejected tokens included; shares are of "
        "valid tokens or of sequences."
    )
    table = _by_correction(caption, CORRECTION_KEYS, run, registry)
    table.title, table.reach = f"Corrections{name}", BRIEF
    return table


def effects_table(result: Result) -> Table:
    """What each correction takes of each of many runs, in two figures: of the terminal alone."""
    acting = [correction.name for correction in result.corrections if correction.gates or correction.weight]
    columns: list[Any] = [("run", lambda item: words(item[0], "name"))]
    for name in acting:
        effect = lambda item, name=name: _effect(item[1].overall.corrections.get(name, {}))  # noqa: E731
        columns.append((Head(clean(name), drop=0), effect))
    caption = "Corrections: tokens rejected | ESS of sequences left, in percent"
    return Table.of(caption, result.runs.items(), columns, matrix=True, reach=USUAL)


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


def _by_correction(
    caption: str, keys: Iterable[str], run: RunResult, registry: Registry, rows: Collection[str] = (), **more: Any
) -> Table:
    """A row for each correction, or each of those named, with its metrics."""
    shown = [item for item in run.overall.corrections.items() if not rows or item[0] in rows]
    name = "correction", lambda item: words(item[0], "name")
    columns = registry.columns(keys, lambda item: item[1], "c", **more)
    return Table.of(caption, shown, [name, *columns], sortable=True)


def gates_table(corrections: Sequence[Correction], run: RunResult, registry: Registry) -> Table:
    """What each gate rejects to either side."""
    keys = [f"{level}_{side}" for level in ("tokens", "sequences") for side in ("low", "high")]
    rows = []
    for correction in corrections:
        values = run.overall.corrections.get(correction.name, {})
        for index, gate in enumerate(correction.gates):
            own = {key: values.get(registry.metric(f"gate{index}_{key}", "c").key, NOT_RECORDED) for key in keys}
            rows.append((correction.name, f"{index}: {gate.title}", own))
    columns: list[Any] = [("correction", lambda row: words(row[0], "name")), ("gate", lambda row: words(row[1]))]
    for key in keys if rows else ():
        head = registry.head(f"gate0_{key}", "c", key.replace("_", " too "))
        columns.append((head, lambda row, key=key: measured(row[2][key], "fraction")))
    caption = "What each gate rejects, by side: too low and too high. A token rejected by two gates counts in both."
    return Table.of(caption, rows, columns)


def selection_table(result: Result, run: RunResult, registry: Registry) -> Table | None:
    """Kept against rejected sequences; None where no correction rejects anything."""
    names = {correction.name for correction in result.corrections if correction.gates}
    caption = "Kept against rejected: each sequence counts by its share of kept or of rejected tokens."
    texts = {key: key.replace("_", " ") for key in COMPARED_KEYS}
    return _by_correction(caption, COMPARED_KEYS, run, registry, names, texts=texts) if names else None
