"""From evidence to findings: the tests in their order, each on what the ones before it leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import CONFIDENCES, Cause, Detection
from mismatchctl.diagnose.causes import CAUSES
from mismatchctl.diagnose.causes.numerical_noise import UNRELATED
from mismatchctl.diagnose.evidence import Evidence
from mismatchctl.diagnose.measures import loudest, related
from mismatchctl.result import Example, Finding, Growth, Rival

NOISE, REST = "numerical_noise", "unexplained"
_PART = 0.5


@dataclass(frozen=True)
class _Found:
    """A cause with what was found of it, in which case, and its part of the K3; None: another reading of it."""

    cause: Cause
    detection: Detection
    case: Case
    share_k3: float | None = None


def findings(evidence: Evidence, files: Sequence[str], growth: Growth | None = None) -> list[Finding]:
    """The causes that a run shows, strongest first; `files` are the dump's paths, by index, `growth` that of K3."""
    if evidence.sample is None or not evidence.tokens:
        return []
    with np.errstate(all="ignore"):
        found = _divided(_doubted(_searched(Case.of(evidence, evidence.sample.rows).relabelled(growth=growth))))
    ranked = sorted(
        found, key=lambda row: (CONFIDENCES.index(row.detection.confidence), -round(row.detection.share, 2))
    )
    return [_finding(row, files) for row in ranked]


def _searched(case: Case) -> list[_Found]:
    """All tests in their order, each on what those before it leave."""
    whole = case.weight
    found: list[_Found] = []
    waiting = list(CAUSES)
    tested: list[Cause] = []
    while waiting:
        cause = waiting.pop(0)
        detection = cause.test(case)
        if detection is None:
            tested.append(cause)
            continue
        if cause.id == NOISE and any(row.detection.confidence != "low" for row in found):
            detection = replace(detection, confidence="low")  # it is what is left beside something else
        part = min(case.weight / whole, 1.0) if whole else 1.0
        found.append(_Found(cause, replace(detection, share=detection.share * part), case))
        rest = detection.leaves or case
        if _looks_different(rest, case):  # then ask those again that saw nothing
            waiting, tested = [*tested, *waiting], []
        told = detection.confidence != "low"
        explained = (*case.explained, cause.id) if told else case.explained
        case = rest.relabelled(explained=explained, filled=case.filled or (told and detection.everywhere))
    return found


def _doubted(found: list[_Found]) -> list[_Found]:
    """What takes out a part of the tokens is medium at most where the rest are unrelated columns: it may be chance."""
    if not any(row.cause.id == REST and row.detection.everywhere and related(row.case) < UNRELATED for row in found):
        return found
    return [
        replace(row, detection=replace(row.detection, confidence="medium"))
        if row.detection.confidence == "high" and row.detection.leaves is not None and row.detection.share < _PART
        else row
        for row in found
    ]


def _divided(found: list[_Found]) -> list[_Found]:
    """What each explains of the K3: what it takes out; the first that acts everywhere has what the others leave."""
    if not found:
        return []
    whole = left = found[0].case.whole_k3
    rows: list[_Found] = []
    for row in found:
        explained = None
        rest = row.detection.leaves
        if whole > 0 and row.detection.k3 is not None:
            explained = row.detection.k3 * float(row.case.k3.sum()) / whole
        elif whole > 0 and rest is not None and not row.detection.everywhere:
            explained = float(row.case.k3.sum() - rest.k3.sum()) / whole
        if explained is not None:
            explained = min(max(explained, 0.0), left / whole)
            left -= explained * whole
        rows.append(replace(row, share_k3=explained))
    fillers = [row for row in rows if row.detection.everywhere and row.detection.confidence != "low"]
    fillers += [row for row in rows if row.detection.everywhere and row.cause.id == NOISE]
    filler = fillers[0] if fillers else rows[-1]
    rest_k3 = left / whole if whole > 0 else 1.0
    return [replace(row, share_k3=(row.share_k3 or 0.0) + rest_k3) if row is filler else row for row in rows]


def _looks_different(rest: Case, case: Case) -> bool:
    """Whether a cause has changed what its tokens look like, beside taking tokens out."""
    return rest.reshaped != case.reshaped or rest.rollout is not case.rollout or rest.train is not case.train


def _finding(found: _Found, files: Sequence[str]) -> Finding:
    cause, detection = found.cause, found.detection
    return Finding(
        cause=cause.id,
        confidence=detection.confidence,
        title=cause.title,
        summary=_sentence(detection.summary),
        share=round(detection.share, 4),
        share_k3=None if found.share_k3 is None else round(found.share_k3, 4),
        evidence=list(detection.evidence),
        where={"tokens": "all"} if detection.where is None and detection.everywhere else dict(detection.where or {}),
        examples=list(_examples(detection, found.case, files)),
        advice=cause.advised,
        pointless=cause.pointless,
        rivals=[Rival(cause=rival, tell=tell) for rival, tell in detection.rivals.items()],
    )


def _sentence(text: str) -> str:
    """A capital at the beginning, unless that is the name of a column, and a full stop."""
    return f"{text if '_' in text.split(' ')[0] else text[:1].upper() + text[1:]}."


def _examples(detection: Detection, case: Case, files: Sequence[str]) -> Iterator[Example]:
    for file, row, position in detection.places:
        yield Example(file=files[file], row=row, position=position)
    positions = detection.positions
    examples = loudest(case) if detection.examples is None else detection.examples
    for number, sequence in enumerate(examples.tolist()):
        yield Example(
            file=files[int(case.rows.file[sequence])],
            row=int(case.rows.rows[sequence]),
            position=None if positions is None else int(positions[number]),
            step=_plain(case.column("step")[sequence]),
            sequence_id=_plain(case.column("sequence_id")[sequence]),
        )


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and np.isnan(value) else value
