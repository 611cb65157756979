"""What NeMo-RL calls the columns of the dump contract."""

from __future__ import annotations

COLUMNS = {
    "generation_logprobs": "rollout_log_probs",
    # All zero in runs that skip the recomputation (force_on_policy_ratio).
    "prev_logprobs": "train_log_probs",
    "token_loss_mask": "response_mask",
}
