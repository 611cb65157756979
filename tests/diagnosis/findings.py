"""Diagnose a planted dump and read its findings."""

from pathlib import Path
from typing import Any

from mismatchctl.api.diagnose import diagnose
from mismatchctl.results.model import Finding
from tests.factories.planted_causes import Planted


def found(dump: Planted, folder: Path, **options: Any) -> list[Finding]:
    (findings,) = diagnose([str(dump.write(folder / "dump.parquet"))], **options).runs.values()
    return findings


def alarms(findings: list[Finding]) -> list[str]:
    return [finding.cause for finding in findings if finding.confidence != "low"]
