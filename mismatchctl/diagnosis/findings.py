"""Test a run for all causes and return its findings. Each test sees only tokens that no earlier test has explained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatchctl.core.batch import Segments
from mismatchctl.core.formatting import shorten_exponents
from mismatchctl.data.blocks import Rows
from mismatchctl.diagnosis.case import UNRELATED_CORRELATION, Case
from mismatchctl.diagnosis.causes.registry import CAUSES, Cause
from mismatchctl.diagnosis.detection import Detection, percent
from mismatchctl.diagnosis.evidence import Evidence
from mismatchctl.results.growth import Growth
from mismatchctl.results.model import Confidence, Example, Finding, RivalCause

CONFIDENCES: tuple[Confidence, ...] = ("high", "medium", "low")
NOISE_CAUSE, UNEXPLAINED_CAUSE = "numerical_noise", "unexplained"
_MINOR_SHARE, _NOISE_SHARE, _SMALL_SHARE = 0.5, 1 / 3, 0.05


@dataclass(frozen=True)
class _CauseResult:
    cause: Cause
    detection: Detection
    case: Case
    share_k3: float | None = None


def find_causes(
    evidence: Evidence, files: Mapping[int, str], growth: Callable[[], Growth | None] | None = None
) -> list[Finding]:
    if evidence.sample is None or not evidence.tokens:
        return _report_unfit_rows(evidence, files)
    with np.errstate(all="ignore"):
        case = Case.of(evidence, evidence.sample.rows).with_fields(growth=growth)
        found = _merge_symptoms(_divide_k3(_limit_confidence(_run_tests(case))))
    ranked = sorted(
        found, key=lambda row: (CONFIDENCES.index(row.detection.confidence), -round(row.detection.share, 2))
    )
    return [_make_finding(row, files) for row in ranked]


def _report_unfit_rows(evidence: Evidence, files: Mapping[int, str]) -> list[Finding]:
    if evidence.unfit is None:
        return []
    none = np.zeros(0)
    case = Case.of(evidence, Rows(Segments(np.zeros(1, np.int64)), none, none, mask=np.zeros(0, np.bool_)))
    lengths = CAUSES[0]
    detection = lengths.test(case)
    return [] if detection is None else [_make_finding(_CauseResult(lengths, detection, case, 0.0), files)]


def _run_tests(case: Case) -> list[_CauseResult]:
    whole = case.weight
    found: list[_CauseResult] = []
    waiting = list(CAUSES)
    tested: list[Cause] = []
    while waiting:
        cause = waiting.pop(0)
        detection = cause.test(case)
        if detection is None:
            tested.append(cause)
            continue
        if detection.tokens is not None:
            leaves = detection.leaves or case.without(detection.tokens)
            detection = replace(detection, share=case.share(detection.tokens), leaves=leaves)
        if cause.id == NOISE_CAUSE and any(row.detection.confidence != "low" for row in found):
            detection = replace(detection, confidence="low")  # other causes may explain this noise
        part = min(case.weight / whole, 1.0) if whole else 1.0
        found.append(_CauseResult(cause, replace(detection, share=detection.share * part), case))
        rest = detection.leaves or case
        same = rest.rollout is case.rollout and rest.train is case.train
        if rest.reshaped != case.reshaped or not same:  # tests may give other results now
            waiting, tested = [*tested, *waiting], []
        told = detection.confidence != "low"
        explained = (*case.explained, cause.id) if told else case.explained
        case = rest.with_fields(explained=explained, filled=case.filled or (told and detection.everywhere))
    return found


def _merge_symptoms(found: list[_CauseResult]) -> list[_CauseResult]:
    """Merge each symptom into the finding of its cause, unless the cause was not found or has low confidence."""
    causes = {row.cause.id: row for row in found if not row.detection.symptom_of and row.detection.confidence != "low"}
    alone = []
    for row in found:
        symptom, cause = row.detection, causes.get(row.detection.symptom_of)
        if cause is None:
            alone.append(row)
            continue
        own = cause.detection
        merged = replace(
            own,
            summary=f"{own.summary}. {symptom.summary[:1].upper()}{symptom.summary[1:]}",
            evidence=(*own.evidence, *symptom.evidence),
            where={**(symptom.where or {}), **(own.where or {})},
            share=min(own.share + symptom.share, 1.0),
        )
        share_k3 = cause.share_k3 if row.share_k3 is None else (cause.share_k3 or 0.0) + row.share_k3
        causes[cause.cause.id] = replace(cause, detection=merged, share_k3=share_k3)
    return [causes.get(row.cause.id, row) for row in alone]


def _limit_confidence(found: list[_CauseResult]) -> list[_CauseResult]:
    """If unexplained tokens have uncorrelated log-probs on the two sides, limit small causes to medium confidence."""
    rest = [row for row in found if row.cause.id == UNEXPLAINED_CAUSE and row.detection.everywhere]
    if not any(row.case.column_correlation < UNRELATED_CORRELATION for row in rest):
        return found

    medium = []
    for row in found:
        own = row.detection
        partial = own.confidence == "high" and own.leaves is not None and own.share < _MINOR_SHARE
        medium.append(replace(row, detection=replace(own, confidence="medium")) if partial else row)
    return medium


def _divide_k3(found: list[_CauseResult]) -> list[_CauseResult]:
    """Set each cause's share of K3. The remainder goes to the first that affects all tokens, or else to the last."""
    if not found:
        return []
    whole = left = found[0].case.whole_k3
    rows: list[_CauseResult] = []
    for row in found:
        explained = None
        rest = row.detection.leaves
        if row.detection.outside_k3:
            rows.append(row)
            continue
        if whole > 0 and row.detection.k3 is not None:
            explained = row.detection.k3 * float(row.case.k3.sum()) / whole
        elif whole > 0 and rest is not None and not row.detection.everywhere:
            explained = float(row.case.k3.sum() - rest.k3.sum()) / whole
        if explained is not None:
            explained = min(max(explained, 0.0), left / whole)
            left -= explained * whole
        rows.append(replace(row, share_k3=explained))
    fillers = [row for row in rows if row.detection.everywhere and row.detection.confidence != "low"]
    fillers += [row for row in rows if row.detection.everywhere and row.cause.id == NOISE_CAUSE]
    filler = fillers[0] if fillers else None if rows[-1].detection.outside_k3 else rows[-1]
    rest_k3 = left / whole if whole > 0 else 1.0
    rows = [replace(row, share_k3=(row.share_k3 or 0.0) + rest_k3) if row is filler else row for row in rows]
    return [_describe_small_share(row, whole) for row in rows]


def _describe_small_share(row: _CauseResult, whole: float) -> _CauseResult:
    """Add to the summary of a minor cause which share of K3 it will have after the other causes are fixed."""
    share, own, detection = row.share_k3 or 0.0, float(row.case.k3.sum()), row.detection
    if row.cause.id == NOISE_CAUSE and share < _NOISE_SHARE:
        return replace(row, detection=replace(detection, confidence="low"))
    if row.share_k3 is None or detection.confidence == "low" or detection.symptom_of:
        return row
    if not 0 < max(own, share * whole) <= _SMALL_SHARE * whole or share * whole < _MINOR_SHARE * own:
        return row
    remaining = percent(min(share * whole / own, 1.0))
    text = f"{detection.summary}. After the other causes are fixed, this cause explains {remaining} of K3"
    return replace(row, detection=replace(detection, summary=text))


def _make_finding(found: _CauseResult, files: Mapping[int, str]) -> Finding:
    cause, detection = found.cause, found.detection
    return Finding(
        cause=cause.id,
        confidence=detection.confidence,
        title=cause.title,
        summary=_format_sentence(detection.summary),
        share=round(detection.share, 4),
        share_k3=None if found.share_k3 is None else round(found.share_k3, 4),
        evidence=list(detection.evidence),
        where={"tokens": "all"} if detection.where is None and detection.everywhere else dict(detection.where or {}),
        examples=list(_iterate_examples(detection, found.case, files)),
        advice=cause.advice,
        pointless=cause.pointless,
        rivals=[RivalCause(cause=rival, tell=tell) for rival, tell in detection.rivals.items()],
    )


def _format_sentence(text: str) -> str:
    text = shorten_exponents(text)
    return f"{text if '_' in text.split(' ')[0] else text[:1].upper() + text[1:]}."


def _iterate_examples(detection: Detection, case: Case, files: Mapping[int, str]) -> Iterator[Example]:
    for file, row, position in detection.places:
        yield Example(file=files[file], row=row, position=None if position < 0 else position)
    positions = detection.positions
    examples = case.find_loudest() if detection.examples is None else detection.examples
    for number, sequence in enumerate(examples.tolist()):
        yield Example(
            file=files[int(case.rows.file[sequence])],
            row=int(case.rows.rows[sequence]),
            position=None if positions is None else int(positions[number]),
            step=_to_plain(case.column("step")[sequence]),
            sequence_id=_to_plain(case.column("sequence_id")[sequence]),
        )


def _to_plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and np.isnan(value) else value
