"""What `diagnose` writes as JSON, and its schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter

from mismatchctl.diagnose import Diagnosis
from mismatchctl.frameworks.layers import LayerReport
from mismatchctl.frameworks.layers.next import NextStep
from mismatchctl.frameworks.layers.noise import LogitNoise
from mismatchctl.result import Finding, Sides

_FIELDS: dict[str, Any] = {
    "findings": list[Finding],
    "sides": dict[str, Sides],
    "next": dict[str, list[NextStep]],
    "layers": list[LayerReport],
    "logit_noise": dict[str, LogitNoise],
}
_DESCRIPTION = """All findings, strongest first in each run. Each has a `run` if there are several runs.

`sides` says whose error it is, by run. `next` are the steps from the dump to a comparison of layers, by run, if the
fault may be in a layer. With reports of such comparisons, `layers` is what they say, each with its own `next`, and
`logit_noise` is the noise on the logits that the log ratios of each run imply. Only `findings` is always present."""


def as_json(found: Diagnosis, reports: Sequence[LayerReport]) -> dict[str, Any]:
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
    """Return the JSON Schema of a saved diagnosis."""
    fields, schema = TypeAdapter.json_schemas(
        [(name, "serialization", TypeAdapter(kind)) for name, kind in _FIELDS.items()]
    )
    schema["$defs"]["Finding"]["properties"]["run"] = {"type": "string"}
    properties = {"format": {"type": "integer"}, "tool": {"type": "string"}, "version": {"type": "string"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Diagnosis",
        "description": _DESCRIPTION,
        "type": "object",
        "additionalProperties": False,
        "properties": properties | {name: fields[name, "serialization"] for name in _FIELDS},
        "required": [*properties, "findings"],
        "$defs": schema["$defs"],
    }
