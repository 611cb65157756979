"""Diagnosis of a dump: collect evidence by run, find the causes, and convert them to JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict

from mismatchctl.core.schema import REFERENCE_COLUMN
from mismatchctl.data.blocks import Rows
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import Dump
from mismatchctl.diagnosis.causes.registry import CAUSES
from mismatchctl.diagnosis.content import IDENTITY_COLUMNS, describe_content
from mismatchctl.diagnosis.evidence import MAX_SAMPLE, MIN_SAMPLE, SAMPLE_SHARE, Evidence, gather_evidence
from mismatchctl.diagnosis.findings import find_causes
from mismatchctl.diagnosis.layer_reports import LayerReport, LogitNoise, NextStep, plan_first_comparison
from mismatchctl.diagnosis.sides import assign_sides
from mismatchctl.results.growth import Growth
from mismatchctl.results.model import Finding, RunContent, Sides
from mismatchctl.results.views import ByRun, TableText, View, add_version, json_text, make_frame

if TYPE_CHECKING:
    import polars as pl

_CAUSE_COLUMNS = (column for cause in CAUSES for column in cause.columns)
DIAGNOSIS_COLUMNS: tuple[str, ...] = tuple(
    dict.fromkeys((*_CAUSE_COLUMNS, REFERENCE_COLUMN, "reference_version", "token_ids", *IDENTITY_COLUMNS))
)


class UnitRows(Protocol):
    """A source of rows: one part of a dump, for example a file."""

    def rows(self) -> Iterator[Rows]:
        """Yield all sequences of the part, including their masked tokens and bad values."""


@dataclass
class EvidenceCollector:
    """Evidence of each run in a dump, collected part by part."""

    by: tuple[str, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)  # approximate number of tokens per run
    size: int = MIN_SAMPLE  # approximate number of tokens in the sample of a run
    runs: dict[str, Evidence] = field(default_factory=dict)

    def watch(self, rows: Rows) -> None:
        flags = [cause.flags for cause in CAUSES]
        self._add(gather_evidence(rows, self.by, flags, self.size, self.tokens))

    def add(self, other: EvidenceCollector) -> None:
        self._add({run: found.sampled(self.size, self.tokens.get(run, 0)) for run, found in other.runs.items()})

    def __add__(self, other: EvidenceCollector) -> EvidenceCollector:
        both = replace(self, runs=dict(self.runs))
        both._add(other.runs)
        return both

    def __call__(self, unit: UnitRows, run: str) -> EvidenceCollector:
        """Collect the evidence of one part of a dump. Keep bad values, because they are evidence too."""
        found = self.empty()
        for rows in unit.rows():
            found.watch(rows)
        return found

    def empty(self) -> EvidenceCollector:
        return replace(self, runs={})

    def findings(
        self, run: str, files: Mapping[int, str], growth: Callable[[], Growth | None] | None = None
    ) -> tuple[list[Finding], Sides | None]:
        """Return the findings of a run, strongest first. With reference log-probs, also return each side's error."""
        if run not in self.runs:
            return [], None
        return assign_sides(find_causes(self.runs[run], files, growth), self.runs[run], files)

    def content(self, run: str, files: Mapping[int, str], findings: Sequence[Finding]) -> RunContent | None:
        known = self.runs.get(run)
        if known is None or not known.hashes.parts:
            return None
        return describe_content(known.hashes, known.sample.rows if known.sample else None, files, findings)

    def _add(self, runs: Mapping[str, Evidence]) -> None:
        for run, evidence in runs.items():
            self.runs[run] = self.runs.get(run, Evidence()) + evidence


def make_collector(dump: Dump, by: Sequence[str]) -> EvidenceCollector:
    """Create a collector. A growing dump keeps its sample size until its token count passes a power of 2."""
    found: dict[str, int] = {}
    for unit in dump.units:
        run = "" if dump.has("run") else unit.file.run
        found[run] = found.get(run, 0) + unit.tokens
    tokens = {run: 1 << number.bit_length() >> 1 for run, number in found.items()}
    total = sum(found.values())
    size = int(min(max((1 << total.bit_length() >> 1) * SAMPLE_SHARE, MIN_SAMPLE), MAX_SAMPLE))
    return EvidenceCollector(tuple(by), tokens, size)


@dataclass(frozen=True, repr=False)
class Diagnosis(View, ByRun[list[Finding]]):
    """The causes of each run, strongest first. `sides` shows for each run which side (rollout, trainer) is wrong."""

    runs: dict[str, list[Finding]]
    sides: dict[str, Sides]
    logit_noise: dict[str, LogitNoise]
    warnings: list[str]
    problems: Problems

    @property
    def next(self) -> dict[str, list[NextStep]]:
        """For each run with a possible fault in a layer of the model, return instructions to compare the layers."""
        steps = {}
        for run, found in self.runs.items():
            surer = {finding.cause for finding in found if finding.confidence != "low"}
            sides = self.sides.get(run)
            in_layers = any(cause.in_layers for cause in CAUSES if cause.id in surer)
            steps[run] = plan_first_comparison(None if sides is None else sides.side, in_layers=in_layers)
        return {run: own for run, own in steps.items() if own}

    def to_data(self, reports: Sequence[LayerReport] = ()) -> dict[str, Any]:
        """Return the content of `to_json` as a dict. Layer `reports`, if given, replace the next steps (`next`)."""
        parts = {"layers": reports, "logit_noise": self.logit_noise} if reports else {"next": self.next}
        every = [finding for found in self.runs.values() for finding in found]
        content = _Content.model_validate({"findings": every, "sides": self.sides, **parts}).model_dump(mode="json")
        if len(self.runs) > 1:
            runs = (run for run, found in self.runs.items() for _ in found)
            content["findings"] = [{"run": run, **one} for run, one in zip(runs, content["findings"], strict=True)]
        return add_version({name: part for name, part in content.items() if part or name == "findings"})

    def to_json(self) -> str:
        """Return strict JSON, as `mismatchctl diagnose --json` prints it."""
        return json_text(self.to_data())

    def to_polars(self) -> pl.DataFrame:
        """Return a row per finding: run, cause, confidence, share of the mismatch, summary, advice."""
        rows = ({"run": run, **vars(found)} for run, findings in self.runs.items() for found in findings)
        return make_frame(rows, ("String", "run cause confidence"), ("Float64", "share"), ("String", "summary advice"))

    def _lines(self) -> list[str]:
        several = len(self.runs) > 1
        return [
            f"{f'{run}: ' if several else ''}{line}"
            for run, findings in self.runs.items()
            for line in [f"{one.title} ({one.confidence} confidence): {one.summary}" for one in findings]
            or ["nothing found"]
        ]

    def _table(self) -> TableText:
        return [], []


class _Content(BaseModel):
    """The JSON of a Diagnosis. `findings` contains all findings, strongest first within each run.

    If there are several runs, each finding has a `run`. The other keys are optional. `sides` contains the errors of
    rollout and trainer for each run. `next` explains how to compare layers, for each run whose layers may be wrong.
    If reports of layer comparisons are given, `next` is replaced by `layers`, with the conclusions from each report,
    and `logit_noise`: the size of random errors in the logits that would explain the log ratios of a run.
    """

    model_config = ConfigDict(extra="forbid", title="Diagnosis")

    findings: list[Finding]
    sides: dict[str, Sides] = {}
    next: dict[str, list[NextStep]] = {}
    layers: list[LayerReport] = []
    logit_noise: dict[str, LogitNoise] = {}


def diagnosis_schema() -> dict[str, Any]:
    schema = _Content.model_json_schema(mode="serialization")
    schema["$defs"]["Finding"]["properties"]["run"] = {"type": "string"}
    given = {"format": {"type": "integer"}, "tool": {"type": "string"}, "version": {"type": "string"}}
    schema |= {"properties": given | schema["properties"], "required": [*given, *schema["required"]]}
    return schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
