"""Pairs of policies that are compared on the same tokens: every metric of a pair is measured on each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """Two policies; x, the log ratio, is that of `policy` to `reference`.

    Attributes:
        name: of its columns and metrics; those of the mismatch itself go without.
        policy: whose log-probs x adds.
        reference: whose log-probs x takes away.
        title: a few words for people.
        meaning: what its metrics tell, to follow "of".
        section: heads the part of a page that is about it.
    """

    name: str
    policy: str
    reference: str
    title: str
    meaning: str
    section: str

    @property
    def source(self) -> str:
        """Both policies, as rules and corrections name them."""
        return f"{self.policy}/{self.reference}"

    @property
    def policies(self) -> tuple[str, str]:
        """Both policies."""
        return self.policy, self.reference

    @property
    def prefix(self) -> str:
        """What the names of its columns begin with."""
        return "" if self.name == "mismatch" else f"{self.name}_"

    def key(self, key: str) -> str:
        """What a metric of the mismatch is called when it is measured on this pair."""
        return _NAMED.get((self.name, key), self.prefix + key)

    @property
    def needs(self) -> frozenset[str]:
        """Columns of the contract, beside the required ones."""
        return frozenset(f"{policy}_log_probs" for policy in self.policies) - _REQUIRED


_REQUIRED = {"rollout_log_probs", "train_log_probs"}
_NAMED = {("drift", "ratio_mean"): "ois", ("drift", "ratio_mean_z"): "ois_z"}  # the usual names

MISMATCH = Pair("mismatch", "train", "rollout", "mismatch", "what engine and trainer disagree on", "The mismatch")
DRIFT = Pair(
    "drift", "current", "train", "drift", "how far the policy has moved since the trainer's recomputation",
    "The second drift, from train to current",
)  # fmt: skip
TOTAL = Pair(
    "total", "current", "rollout", "total", "how far the policy being updated is from the one that sampled",
    "Both drifts together, from rollout to current",
)  # fmt: skip
ROLLOUT_ERROR = Pair(
    "rollout_reference", "rollout", "reference", "rollout's error",
    "the rollout's own error, against the same tokens scored in high precision",
    "The rollout's error, from reference to rollout",
)  # fmt: skip
TRAIN_ERROR = Pair(
    "train_reference", "train", "reference", "trainer's error",
    "the trainer's own error, against the same tokens scored in high precision",
    "The trainer's error, from reference to train",
)  # fmt: skip
PAIRS = (MISMATCH, DRIFT, TOTAL, ROLLOUT_ERROR, TRAIN_ERROR)
"""All pairs; a dump has those whose columns it has."""
BY_SOURCE = {pair.source: pair for pair in PAIRS}
WHOLE = ("log_ratio", "square", "k3")
"""Sums of the mismatch that every other pair keeps too, over the sequences that it is measured on."""


def whole_names(pair: Pair) -> tuple[str, ...]:
    """What they are called there."""
    return () if pair is MISMATCH else tuple(f"mismatch_{name}" for name in WHOLE)
