"""A verdict as CI systems read it: JUnit XML, a suite per run, a case per check; annotations of GitHub Actions."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from xml.etree import ElementTree as Xml

from mismatchctl.escape import github
from mismatchctl.escape import xml as clean
from mismatchctl.gate import Check, Verdict
from mismatchctl.gate.words import basis, by_rule, chosen, sentence

_ELEMENTS = {"failed": "failure", "undecided": "error"}
"""What cannot be judged is an error in JUnit's words: it is not the code that failed."""


def junit(verdict: Verdict) -> bytes:
    """The XML document."""
    root = Xml.Element("testsuites", {"name": "mismatchctl gate"} | _counts(verdict.checks))
    for run, found in groupby(sorted(verdict.checks, key=lambda check: check.run), key=lambda check: check.run):
        checks = list(found)
        suite = Xml.SubElement(root, "testsuite", {"name": clean(run)} | _counts(checks))
        for check in checks:
            _case(suite, check)
    Xml.indent(root)
    return bytes(Xml.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _counts(checks: list[Check]) -> dict[str, str]:
    found = Counter(check.outcome for check in checks)
    return {
        "tests": str(len(checks)), "failures": str(found["failed"]), "errors": str(found["undecided"]), "skipped": "0",
        "time": "0",
    }  # fmt: skip


def _case(suite: Xml.Element, check: Check) -> None:
    name = f"{check.rule} {check.kind} {check.place}"
    case = Xml.SubElement(
        suite, "testcase", {"classname": f"gate.{clean(check.run)}", "name": clean(name), "time": "0"}
    )
    if check.outcome in _ELEMENTS:
        words = {"message": sentence(check), "type": check.outcome}
        Xml.SubElement(case, _ELEMENTS[check.outcome], words).text = basis(check)
    else:
        Xml.SubElement(case, "system-out").text = f"{sentence(check)}\n{basis(check)}"


def workflow_commands(verdict: Verdict) -> list[str]:
    """Workflow commands of GitHub Actions: an error per failed check, a warning per undecided one, notes."""
    words = {"failed": "error", "undecided": "warning"}
    notes = [f"::notice title=mismatch::{github(note)}" for note in verdict.notes]
    judged = [
        f"::{words[check.outcome]} title={github(f'mismatch: {check.rule}', of_property=True)}::"
        f"{github(f'{check.run}: {sentence(check)}')}"
        for _, checks in by_rule(verdict.checks)
        for check in chosen(checks)[0]
        if check.outcome in words
    ]
    return judged + notes
