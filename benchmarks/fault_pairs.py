"""Measure how often findings are right if two faults act at once.

    python benchmarks/fault_pairs.py

Plants each pair of a sampling fault and a column fault in dumps of random models. Writes the table of pairs in
docs/methods/accuracy.md in 5 minutes on one core.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measure import format_share, replace_section  # noqa: E402
from reported_faults import KINDS, PAGE, QUIET, diagnose_dump  # noqa: E402

from mismatchctl.results.model import Finding  # noqa: E402
from tests.factories import sampled as faults  # noqa: E402
from tests.factories.sampled import Dump, Model, Setup, joined, sampled, sampler  # noqa: E402

BEGIN, END = "<!-- pairs: begin -->", "<!-- pairs: end -->"
FIRST_SEED, ROWS = 9500, 96
VOCABULARIES = ("256 tokens", "512 tokens (confident model)")


def sample_older_weights(model: Model, seed: int) -> Dump:
    dump = sampled(model, seed, Setup(rows=ROWS, older=model.moved(seed, 0.1), older_until=2.0))
    dump.tokens.pop("old")
    dump.columns |= {"rollout_version": [3] * ROWS, "train_version": [5] * ROWS}
    return dump


def build_fault(**setup: object) -> Callable[[Model, int], Dump]:
    return lambda model, seed: sampled(model, seed, Setup(rows=ROWS, noise=(0.01, 0.0), **setup))  # type: ignore[arg-type]


SAMPLING_FAULTS: dict[str, tuple[str, Callable[[Model, int], Dump]]] = {
    "temperature 0.8": ("temperature", build_fault(process=sampler(0.8))),
    "top-p 0.9": ("truncated_sampling", build_fault(process=sampler(top_p=0.9))),
    "rollout log-probs without the temperature 0.7": ("raw_logprobs", build_fault(process=sampler(0.7), raw=True)),
    "engine with older weights": ("stale_policy weights_differ", sample_older_weights),
    "trainer loses half of the context": ("context_mismatch", build_fault(trainer_lost=0.5)),
    "wrong engine state for some prompts": ("engine_state", lambda model, seed: faults.engine_state(model, seed, 0.3)),
}


def change_rows(
    dump: Dump, seed: int, share: float, change: Callable[[np.ndarray, np.random.Generator], np.ndarray]
) -> Dump:
    rng = np.random.default_rng(seed)
    return dump.each("rollout_log_probs", lambda row, i: change(row, rng) if rng.random() < share else row)


def round_to_bfloat16(row: np.ndarray) -> np.ndarray:
    return (row.astype(np.float32).view(np.uint32) + 0x8000 & np.uint32(0xFFFF0000)).view(np.float32).astype(float)


def edit_rows(dump: Dump, seed: int) -> Dump:
    pool = np.concatenate(dump.tokens["rollout_log_probs"])

    def change(row: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        at = int(rng.integers(len(row) // 4, len(row) // 2))
        return np.append(row[:at], rng.choice(pool, len(row) - at))

    return change_rows(dump, seed, 0.2, change)


def swap_rows(dump: Dump, seed: int) -> Dump:
    rng, rows = np.random.default_rng(seed), dump.tokens["rollout_log_probs"]
    chosen = rng.permutation(len(rows))[: len(rows) // 5]
    source = dict(zip(chosen.tolist(), np.roll(chosen, 1).tolist(), strict=True))
    return dump.each("rollout_log_probs", lambda row, i: np.resize(rows[source.get(i, i)], len(row)))


def repeat_rows(dump: Dump, seed: int) -> Dump:
    chosen = np.random.default_rng(seed).permutation(len(dump))[: len(dump) // 5]
    tokens = {name: [rows[i] for i in chosen] for name, rows in dump.tokens.items()}
    columns = {name: [values[i] for i in chosen] for name, values in dump.columns.items()}
    return joined([dump, Dump(tokens, columns, [dump.best[i] for i in chosen])])


COLUMN_FAULTS: dict[str, tuple[str, Callable[[Dump, int], Dump]]] = {
    "rollout column shifted by 1": (
        "misaligned",
        lambda dump, seed: change_rows(dump, seed, 1.0, lambda row, rng: np.roll(row, 1)),
    ),
    "20% of the responses edited after sampling": ("edited_response retokenized", edit_rows),
    "rollout log-prob -30 at 1% of the tokens": (
        "padding_or_sentinel unexplained",
        lambda dump, seed: change_rows(
            dump, seed, 1.0, lambda row, rng: np.where(rng.random(len(row)) < 0.01, -30.0, row)
        ),
    ),
    "rollout column stored in bfloat16": (
        "low_precision_logging",
        lambda dump, seed: change_rows(dump, seed, 1.0, lambda row, rng: round_to_bfloat16(row)),
    ),
    "probabilities in the rollout column": (
        "probabilities_not_logs",
        lambda dump, seed: change_rows(dump, seed, 1.0, lambda row, rng: np.exp(row)),
    ),
    "20% of the responses repeated": ("duplicated_rows", repeat_rows),
    "rollout log-probs of other responses in 20% of the responses": ("swapped_rows", swap_rows),
}

Verdict = tuple[str, str, frozenset[str], frozenset[str], list[Finding]]


def judge(job: tuple[str, str, str, int]) -> Verdict:
    first, second, kind, number = job
    model, seed = Model.of(FIRST_SEED + number, *KINDS[kind]), FIRST_SEED + number
    (causes, plant), (others, spoil) = SAMPLING_FAULTS[first], COLUMN_FAULTS[second]
    findings = diagnose_dump(spoil(plant(model, seed), seed))
    return first, second, frozenset(causes.split()), frozenset(others.split()), findings


def main() -> None:
    """Write the table."""
    pairs = [(first, second) for first in SAMPLING_FAULTS for second in COLUMN_FAULTS]
    jobs = [(*pair, kind, number) for number, pair in enumerate(pairs) for kind in VOCABULARIES]
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(judge, jobs))
    counts: Counter[tuple[str, bool]] = Counter()
    for first, second, causes, others, findings in rows:
        for one in findings:
            if one.cause not in QUIET | {"unexplained"}:
                counts[one.confidence, one.cause in causes | others] += 1
                if one.confidence != "low" and one.cause not in causes | others:
                    print(one.confidence, first, "|", second, "|", [(row.cause, row.confidence) for row in findings])
    lines = ["| planted fault | first finding right | this fault found | other fault found |", "|---|---|---|---|"]
    for place, table in ((0, SAMPLING_FAULTS), (1, COLUMN_FAULTS)):
        for name in table:
            own = [row for row in rows if row[place] == name]
            named = [{one.cause for one in row[4] if one.confidence != "low"} for row in own]
            right = sum(bool(row[4]) and row[4][0].cause in row[2] | row[3] for row in own)
            own_fault, other_fault = (
                sum(bool(row[2 + at] & causes) for row, causes in zip(own, named, strict=True))
                for at in (place, 1 - place)
            )
            cells = [format_share(value, len(own)) for value in (right, own_fault, other_fault)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    shares = [
        format_share(counts[level, True], counts[level, True] + counts[level, False]) for level in ("high", "medium")
    ]
    text = (
        f"The test uses {len(rows)} dumps. Each dump combines a fault from the first six rows of the table with a "
        f"fault from the last seven rows. The vocabulary of a model has 256 or 512 tokens. The random seeds "
        "were not used to develop `diagnose`.\n\n"
        "A finding is right if it names one of the two faults of the dump. "
        f"{shares[0]} of the causes that `diagnose` names with high confidence are right. "
        f"With medium confidence, {shares[1]} are right. "
        "The last two columns count findings with medium or high confidence. "
        '"This fault" is the fault of the row, and "other fault" is the second fault of the same dump.\n\n'
    )
    replace_section(text + "\n".join(lines), PAGE, BEGIN, END)


if __name__ == "__main__":
    main()
