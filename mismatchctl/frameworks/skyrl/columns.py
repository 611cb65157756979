"""What SkyRL calls the columns of the dump contract."""

from __future__ import annotations

COLUMNS = {
    "rollout_logprobs": "rollout_log_probs",
    "action_log_probs": "train_log_probs",
    "base_action_log_probs": "ref_log_probs",
    "loss_mask": "response_mask",
}
