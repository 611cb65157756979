"""From evidence to findings: the tests in their order, each on what the ones before it leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import CONFIDENCES, Cause, Diagnosis
from mismatchctl.diagnose.causes import CAUSES
from mismatchctl.diagnose.evidence import Evidence
from mismatchctl.result import Example, Finding, Rival

NOISE = "numerical_noise"


def findings(evidence: Evidence, files: Sequence[str]) -> list[Finding]:
    """The causes that a run shows, strongest first; `files` are the dump's paths, by index."""
    if evidence.sample is None or not evidence.tokens:
        return []
    case = Case.of(evidence, evidence.sample.rows)
    whole = case.weight
    found: list[tuple[Cause, Diagnosis, Case]] = []
    waiting = list(CAUSES)
    tested: list[Cause] = []
    while waiting:
        cause = waiting.pop(0)
        if cause.id == NOISE and any(diagnosis.confidence != "low" for _, diagnosis, _ in found):
            continue
        with np.errstate(all="ignore"):
            diagnosis = cause.test(case)
        if diagnosis is None:
            tested.append(cause)
            continue
        part = min(case.weight / whole, 1.0) if whole else 1.0
        found.append((cause, replace(diagnosis, share=diagnosis.share * part), case))
        rest = diagnosis.leaves or case
        if _looks_different(rest, case):  # then ask those again that saw nothing
            waiting, tested = [*tested, *waiting], []
        case = replace(rest, explained=(*case.explained, cause.id))
    ranked = sorted(found, key=lambda row: (CONFIDENCES.index(row[1].confidence), -round(row[1].share, 2)))
    return [_finding(cause, diagnosis, seen, files) for cause, diagnosis, seen in ranked]


def _looks_different(rest: Case, case: Case) -> bool:
    """Whether a cause has changed what its tokens look like, beside taking tokens out."""
    return rest.reshaped != case.reshaped or rest.rollout is not case.rollout or rest.train is not case.train


def _finding(cause: Cause, diagnosis: Diagnosis, case: Case, files: Sequence[str]) -> Finding:
    return Finding(
        cause=cause.id,
        confidence=diagnosis.confidence,
        title=cause.title,
        summary=_sentence(diagnosis.summary),
        share=round(diagnosis.share, 4),
        evidence=list(diagnosis.evidence),
        where=dict(diagnosis.where),
        examples=list(_examples(diagnosis, case, files)),
        advice=cause.advice,
        pointless=cause.pointless,
        rivals=[Rival(cause=rival, tell=tell) for rival, tell in diagnosis.rivals.items()],
    )


def _sentence(text: str) -> str:
    """A capital at the beginning, unless that is the name of a column, and a full stop."""
    return f"{text if '_' in text.split(' ')[0] else text[:1].upper() + text[1:]}."


def _examples(diagnosis: Diagnosis, case: Case, files: Sequence[str]) -> Iterator[Example]:
    for file, row, position in diagnosis.places:
        yield Example(file=files[file], row=row, position=position)
    if diagnosis.examples is None:
        return
    positions = diagnosis.positions
    for number, sequence in enumerate(diagnosis.examples.tolist()):
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
