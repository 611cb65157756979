"""The schema of a dump: its columns with their type, unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

MIN_LOG_PROB = -1e40
"""Smallest value that counts as a log-prob. Masking values such as the lowest float32 are above it and count."""
POSITIVE_TOLERANCE = 1e-3
"""A log-prob up to this far above zero counts as rounding. A larger value is not a log-prob."""


class ColumnKind(Enum):
    """The type of a cell if a dump has one row per sequence."""

    LOG_PROBS = "log-probs, one per token"
    MASK = "0/1 or true/false, one per token"
    TOKENS = "integers, one per token"
    PER_TOKEN_OR_SCALAR = "numbers, one per token or one per sequence"
    EXPERTS = "lists of expert ids, one list per token"
    TOP_IDS = "lists of token ids, one list per token"
    TOP_LOG_PROBS = "lists of log-probs, one list per token"
    PROMPT = "integers, a list of any length"
    NUMBER = "a number"
    ID = "an integer or a string"


NESTED_KINDS = (ColumnKind.EXPERTS, ColumnKind.TOP_IDS, ColumnKind.TOP_LOG_PROBS)
"""Types of columns with a list per token. All lists in a column have the same length."""


@dataclass(frozen=True)
class DumpColumn:
    """One column of the schema."""

    name: str
    kind: ColumnKind
    unit: str
    meaning: str
    required: bool = False

    @property
    def per_token(self) -> bool:
        """Return True if the column has a list in dumps with one row per sequence."""
        return self.kind in (ColumnKind.LOG_PROBS, ColumnKind.MASK, ColumnKind.TOKENS, *NESTED_KINDS)


COLUMNS: tuple[DumpColumn, ...] = (
    DumpColumn("rollout_log_probs", ColumnKind.LOG_PROBS, "nats",
        "log-prob of each sampled token, as the inference engine reported it", required=True),
    DumpColumn("train_log_probs", ColumnKind.LOG_PROBS, "nats",
        "log-prob of the same tokens, recomputed by the trainer with the weights that sampled them; -inf "
        "(probability 0) counts for vetoes and is left out of means", required=True),
    DumpColumn("response_mask", ColumnKind.MASK, "0/1",
        "1 on tokens that the policy sampled and trains on; absent: all valid"),
    DumpColumn("run", ColumnKind.ID, "-", "which run a row belongs to; absent: the path argument names the run"),
    DumpColumn("step", ColumnKind.ID, "-", "the training step; rows of one step form a group; absent: one group"),
    DumpColumn("sequence_id", ColumnKind.ID, "-", "names the sequence within its run; required in the long layout"),
    DumpColumn("position", ColumnKind.NUMBER, "tokens",
        "long layout only: the token's place in its sequence, ascending"),
    DumpColumn("prompt_id", ColumnKind.ID, "-", "names the prompt; sequences of one prompt are one cluster"),
    DumpColumn("token_ids", ColumnKind.TOKENS, "-", "the sampled tokens; shown next to the worst tokens"),
    DumpColumn("prompt_token_ids", ColumnKind.PROMPT, "-",
        "the tokens before the response, without padding; `mismatchctl score` needs them"),
    DumpColumn("current_log_probs", ColumnKind.LOG_PROBS, "nats",
        "log-probs under the policy being updated (pi_theta now)"),
    DumpColumn("ref_log_probs", ColumnKind.LOG_PROBS, "nats", "log-probs under the reference policy"),
    DumpColumn("reference_log_probs", ColumnKind.LOG_PROBS, "nats",
        "the same tokens scored again in high precision, with the trainer's weights, to find the wrong side"),
    DumpColumn("advantages", ColumnKind.PER_TOKEN_OR_SCALAR, "reward", "advantage of each token, or of the sequence"),
    DumpColumn("reward", ColumnKind.NUMBER, "reward", "the sequence's reward"),
    DumpColumn("rollout_version", ColumnKind.PER_TOKEN_OR_SCALAR, "updates",
        "weight version that sampled the sequence, or each token"),
    DumpColumn("train_version", ColumnKind.PER_TOKEN_OR_SCALAR, "updates", "weight version with which the "
    "trainer recomputed the log-probs"),
    DumpColumn("reference_version", ColumnKind.NUMBER, "updates", "weight version that scored `reference_log_probs`"),
    DumpColumn("worker", ColumnKind.ID, "-", "which rollout worker sampled the sequence"),
    DumpColumn("turn", ColumnKind.PER_TOKEN_OR_SCALAR, "-",
        "which turn of its response each token belongs to, for `--by turn`; absent: masked tokens separate turns"),
    DumpColumn("micro_batch", ColumnKind.ID, "-", "which micro-batch of its step the sequence was trained in"),
    DumpColumn("rollout_ids", ColumnKind.ID, "-",
        "rollout of the sequence, if a rollout is split into several sequences; means can be over rollouts"),
    DumpColumn("truncated", ColumnKind.NUMBER, "0/1",
        "whether the response was cut off at the maximum length; for `--by truncated`"),
    DumpColumn("model", ColumnKind.ID, "-",
        "name of the model; the gate does not compare different models"),
    DumpColumn("engine", ColumnKind.ID, "-",
        "name of the inference engine, with or without its version; the gate does not compare different names"),
    DumpColumn("entropy", ColumnKind.PER_TOKEN_OR_SCALAR, "nats", "entropy of the trainer's distribution"),
    DumpColumn("kept_tokens", ColumnKind.PER_TOKEN_OR_SCALAR, "tokens",
        "number of tokens that top-k, top-p and min-p left to the sampler: the size of the engine's sampling mask"),
    DumpColumn("rollout_experts", ColumnKind.EXPERTS, "-",
        "experts chosen by the rollout engine, layers x k ids per token"),
    DumpColumn("train_experts", ColumnKind.EXPERTS, "-", "experts chosen by the trainer, layers x k ids per token"),
    DumpColumn("rollout_top_ids", ColumnKind.TOP_IDS, "-", "the k most likely tokens of the rollout at each position"),
    DumpColumn("rollout_top_log_probs", ColumnKind.TOP_LOG_PROBS, "nats",
        "their log-probs by the rollout, k per token"),
    DumpColumn("train_top_log_probs", ColumnKind.TOP_LOG_PROBS, "nats", "log-probs of the same tokens by the trainer"),
    DumpColumn("reference_top_log_probs", ColumnKind.TOP_LOG_PROBS, "nats",
        "log-probs of the same tokens from the model of `reference_log_probs`; used if the trainer's log-probs "
        "are missing"),
)  # fmt: skip

COLUMNS_BY_NAME: dict[str, DumpColumn] = {column.name: column for column in COLUMNS}
VERSION_COLUMNS: tuple[str, ...] = ("rollout_version", "train_version")
"""Columns of weight versions. If a version is given per token, the sequence gets the oldest."""
TURN_COLUMN = "turn"
"""Column of turns, which is only read on request."""
REFERENCE_COLUMN = "reference_log_probs"
"""Column of the reference log-probs, from a third scorer."""
PARTIAL_COLUMNS: tuple[str, ...] = (
    "ref_log_probs",
    REFERENCE_COLUMN,
    *(column.name for column in COLUMNS if column.kind in NESTED_KINDS),
    *VERSION_COLUMNS,
    TURN_COLUMN,
)
"""Columns that may lack values for some sequences. Their metrics are measured on the other sequences."""
REQUIRED_COLUMNS: tuple[str, ...] = tuple(column.name for column in COLUMNS if column.required)
LONG_LAYOUT_REQUIRED: tuple[str, ...] = (*REQUIRED_COLUMNS, "sequence_id", "position")


def list_aliases(name: str, aliases: Mapping[str, str]) -> list[str]:
    return sorted(alias for alias, canonical in aliases.items() if canonical == name)


def build_schema_data(aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "name": column.name,
            "required": column.required,
            "kind": column.kind.value,
            "unit": column.unit,
            "meaning": column.meaning,
            "also": list_aliases(column.name, aliases),
        }
        for column in COLUMNS
    ]
