"""What `diagnose` writes as JSON, and its schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from mismatchctl.diagnose import Diagnosed
from mismatchctl.frameworks.layers import LayerReport
from mismatchctl.frameworks.layers.next import NextStep
from mismatchctl.frameworks.layers.noise import LogitNoise
from mismatchctl.result import Finding, Sides


class RunFinding(Finding):
    """A finding, with its run where there are several."""

    run: str | None = None


class SavedDiagnosis(BaseModel):
    """All findings, strongest first in each run; what follows them is there where there is something to say.

    `sides` says whose error it is, by run; `next` the steps from the dump to a comparison of layers, by run, where the
    fault may be in one. With reports of such comparisons, `layers` is what they say, each with its own `next`, and
    `logit_noise` what the log ratios of each run ask of the logits, to be held against them.
    """

    model_config = ConfigDict(extra="forbid")

    format: int
    tool: str
    version: str
    findings: list[RunFinding]
    sides: dict[str, Sides] = {}
    next: dict[str, list[NextStep]] = {}
    layers: list[LayerReport] = []
    logit_noise: dict[str, LogitNoise] = {}


def as_json(found: Diagnosed, reports: Sequence[LayerReport]) -> dict[str, Any]:
    """What was found, as plain data; who wrote it is still to be added."""
    several = len(found.runs) > 1
    findings = [
        ({"run": run} if several else {}) | finding.model_dump(mode="json")
        for run, findings in found.runs.items()
        for finding in findings
    ]
    told: dict[str, Any] = {"sides": found.sides}
    told |= {"layers": reports, "logit_noise": found.logit_noise} if reports else {"next": found.next}
    return {"findings": findings} | {name: _plain(each) for name, each in told.items() if each}


def _plain(value: Any) -> Any:
    """Models as dicts, wherever they stand."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return [_plain(each) for each in value]


def diagnosis_schema() -> dict[str, Any]:
    """The JSON Schema of it."""
    schema = SavedDiagnosis.model_json_schema(mode="serialization")
    return schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
