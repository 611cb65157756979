"""From evidence to findings: the tests in their order, each on what the ones before it leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import CONFIDENCES, Cause, Diagnosis
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
    diagnosis: Diagnosis
    case: Case
    share_k3: float | None = None


def findings(evidence: Evidence, files: Sequence[str], growth: Growth | None = None) -> list[Finding]:
    """The causes that a run shows, strongest first; `files` are the dump's paths, by index, `growth` that of K3."""
    if evidence.sample is None or not evidence.tokens:
        return []
    with np.errstate(all="ignore"):
        found = _divided(_doubted(_searched(Case.of(evidence, evidence.sample.rows).relabelled(growth=growth))))
    ranked = sorted(
        found, key=lambda row: (CONFIDENCES.index(row.diagnosis.confidence), -round(row.diagnosis.share, 2))
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
        diagnosis = cause.test(case)
        if diagnosis is None:
            tested.append(cause)
            continue
        if cause.id == NOISE and any(row.diagnosis.confidence != "low" for row in found):
            diagnosis = replace(diagnosis, confidence="low")  # it is what is left beside something else
        part = min(case.weight / whole, 1.0) if whole else 1.0
        found.append(_Found(cause, replace(diagnosis, share=diagnosis.share * part), case))
        rest = diagnosis.leaves or case
        if _looks_different(rest, case):  # then ask those again that saw nothing
            waiting, tested = [*tested, *waiting], []
        told = diagnosis.confidence != "low"
        explained = (*case.explained, cause.id) if told else case.explained
        case = rest.relabelled(explained=explained, filled=case.filled or (told and diagnosis.everywhere))
    return found


def _doubted(found: list[_Found]) -> list[_Found]:
    """What takes out a part of the tokens is medium at most where the rest are unrelated columns: it may be chance."""
    if not any(row.cause.id == REST and row.diagnosis.everywhere and related(row.case) < UNRELATED for row in found):
        return found
    return [
        replace(row, diagnosis=replace(row.diagnosis, confidence="medium"))
        if row.diagnosis.confidence == "high" and row.diagnosis.leaves is not None and row.diagnosis.share < _PART
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
        rest = row.diagnosis.leaves
        if whole > 0 and row.diagnosis.k3 is not None:
            explained = row.diagnosis.k3 * float(row.case.k3.sum()) / whole
        elif whole > 0 and rest is not None and not row.diagnosis.everywhere:
            explained = float(row.case.k3.sum() - rest.k3.sum()) / whole
        if explained is not None:
            explained = min(max(explained, 0.0), left / whole)
            left -= explained * whole
        rows.append(replace(row, share_k3=explained))
    fillers = [row for row in rows if row.diagnosis.everywhere and row.diagnosis.confidence != "low"]
    fillers += [row for row in rows if row.diagnosis.everywhere and row.cause.id == NOISE]
    filler = fillers[0] if fillers else rows[-1]
    rest_k3 = left / whole if whole > 0 else 1.0
    return [replace(row, share_k3=(row.share_k3 or 0.0) + rest_k3) if row is filler else row for row in rows]


def _looks_different(rest: Case, case: Case) -> bool:
    """Whether a cause has changed what its tokens look like, beside taking tokens out."""
    return rest.reshaped != case.reshaped or rest.rollout is not case.rollout or rest.train is not case.train


def _finding(found: _Found, files: Sequence[str]) -> Finding:
    cause, diagnosis = found.cause, found.diagnosis
    return Finding(
        cause=cause.id,
        confidence=diagnosis.confidence,
        title=cause.title,
        summary=_sentence(diagnosis.summary),
        share=round(diagnosis.share, 4),
        share_k3=None if found.share_k3 is None else round(found.share_k3, 4),
        evidence=list(diagnosis.evidence),
        where={"tokens": "all"} if diagnosis.where is None and diagnosis.everywhere else dict(diagnosis.where or {}),
        examples=list(_examples(diagnosis, found.case, files)),
        advice=cause.advised,
        pointless=cause.pointless,
        rivals=[Rival(cause=rival, tell=tell) for rival, tell in diagnosis.rivals.items()],
    )


def _sentence(text: str) -> str:
    """A capital at the beginning, unless that is the name of a column, and a full stop."""
    return f"{text if '_' in text.split(' ')[0] else text[:1].upper() + text[1:]}."


def _examples(diagnosis: Diagnosis, case: Case, files: Sequence[str]) -> Iterator[Example]:
    for file, row, position in diagnosis.places:
        yield Example(file=files[file], row=row, position=position)
    positions = diagnosis.positions
    examples = loudest(case) if diagnosis.examples is None else diagnosis.examples
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
