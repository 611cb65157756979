"""Gates over: batch on a dump: from which value on each step drops a token, found by one more reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mismatchctl.batch import Ints, TokenBatch
from mismatchctl.correction import Correction, Gate
from mismatchctl.correction.apply import Selection, measure
from mismatchctl.correction.trim import Trim
from mismatchctl.dumps import Dump, Problems
from mismatchctl.errors import ConfigError
from mismatchctl.measure.hashes import Value
from mismatchctl.measure.reduce import cut
from mismatchctl.ratios import ratios_of

Step = tuple[str, Value]
"""A run and one of its steps."""
_PLACE = "\0place"


@dataclass(frozen=True)
class Trims:
    """By gate and step, from which value on a token is dropped."""

    thresholds: Mapping[Gate, Mapping[Step, float]] = field(default_factory=dict)

    def on(self, batch: TokenBatch, run: str) -> TokenBatch:
        """A batch that knows what its steps drop; `run` names the rows that carry no run of their own."""
        if not self.thresholds:
            return batch
        trims = {gate: np.full(len(batch), np.inf) for gate in self.thresholds}
        for step, places, _ in _by_step(batch, run):
            for gate, known in self.thresholds.items():
                trims[gate][places] = known[step]
        return replace(batch, trims=trims)


def trims_of(dump: Dump, corrections: Iterable[Correction]) -> Trims:
    """Those of all steps; the dump is read once more where a correction has such a gate.

    Raises:
        ConfigError: such a gate is to see what earlier ones left.
        DataError: as of the reading itself.
    """
    gates = _gates(corrections)
    units = dump.readings if gates else ()
    return _found(gates, ((batch, unit.file.run) for unit in units for batch in dump.read(unit, Problems())))


def trimmed(batch: TokenBatch, corrections: Iterable[Correction]) -> TokenBatch:
    """A batch of whole steps that knows what they drop."""
    return _found(_gates(corrections), [(batch, "")]).on(batch, "")


def _gates(corrections: Iterable[Correction]) -> list[Gate]:
    gates: dict[Gate, None] = {}
    for correction in corrections:
        for number, gate in enumerate(correction.gates):
            if gate.over == "batch" and number and gate.sees == "remaining":
                raise ConfigError(
                    f"correction {correction.name}: gate {number} over: batch sees what earlier gates left, which no "
                    "reading of a dump knows: put it first, or let it see the original tokens"
                )
            if gate.over == "batch":
                gates[gate] = None
    return [*gates]


def _found(gates: list[Gate], batches: Iterable[tuple[TokenBatch, str]]) -> Trims:
    known: dict[Gate, dict[Step, Trim]] = {gate: {} for gate in gates}
    for batch, run in batches if gates else ():
        for step, _, part in _by_step(batch, run):
            ratios, everything = ratios_of(part, {gate.source for gate in gates}), Selection.everything(part.segments)
            for gate, trims in known.items():
                values = measure(gate, ratios[gate.source], everything, part)
                trims[step] = trims.get(step, Trim(gate)).with_values(values)
    return Trims({gate: {step: trim.threshold() for step, trim in trims.items()} for gate, trims in known.items()})


def _by_step(batch: TokenBatch, run: str) -> Iterator[tuple[Step, Ints, TokenBatch]]:
    """Each step's sequences: their places in the batch, and themselves."""
    placed = replace(batch, columns={**batch.columns, _PLACE: np.arange(len(batch))})
    for name, (step, _), part in cut(placed, run, ()):
        yield (name, step), part.columns[_PLACE], part
