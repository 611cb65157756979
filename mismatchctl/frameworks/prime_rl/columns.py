"""What prime-rl calls the columns of the dump contract."""

from __future__ import annotations

COLUMNS = {
    "inference_logprobs": "rollout_log_probs",
    # There is no separate recomputation: the one forward of the trainer is also the current policy.
    "trainer_logprobs": "train_log_probs",
    "ref_logprobs": "ref_log_probs",
    "loss_mask": "response_mask",
}

OWN_COLUMNS = {"trainer_logprobs": "current_log_probs"}
"""In its own step; elsewhere these names mean something else too."""
