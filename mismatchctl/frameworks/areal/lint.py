"""AReaL: traps of its options."""

from __future__ import annotations

from mismatchctl.frameworks.lint import Finding
from mismatchctl.frameworks.plain import Trap

SOURCE = "areal-project/AReaL@cbff54d645d2"


TRAPS = (
    Trap(
        lambda o: o["rejection_sampling"] is None and bool(o["use_decoupled_loss"]),
        Finding(
            "warning",
            "actor.rejection_sampling",
            "without it no weight corrects the mismatch: only the update ratio is left",
            "give rejection_sampling",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: (o["rejection_sampling"] or {}).get("metric") == "binary_kl",
        Finding(
            "error",
            "actor.rejection_sampling.metric",
            "the shipped configuration class refuses binary_kl; and in "
            "float32 it rejects every token whose probability rounds to 1",
            "use kl_k3, or patch the class",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: (o["rejection_sampling"] or {}).get("metric") == "kl_k3",
        Finding(
            "info",
            "actor.rejection_sampling.metric",
            "the help says r - log r - 1, the code takes exp(-d) - 1 + d",
            "set the threshold for that",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: o["prox_logp_method"] == "reuse_train_logp" and o["ppo_n_minibatches"] > 1,
        Finding(
            "warning",
            "actor.ppo_n_minibatches",
            "reuse_train_logp forces it to 1",
            "set it to 1",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: o["rejection_sampling"] is not None and not o["use_decoupled_loss"],
        Finding(
            "warning",
            "actor.use_decoupled_loss",
            "without it log ratios are 0: the rule keeps everything",
            "set use_decoupled_loss true",
            SOURCE,
        ),
    ),
)
