"""A verdict as workflow commands of GitHub Actions: annotations of the run."""

from __future__ import annotations

from mismatchctl.escape import github
from mismatchctl.gate import Verdict
from mismatchctl.gate.words import by_rule, chosen, sentence


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
