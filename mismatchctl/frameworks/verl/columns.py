"""What verl calls the columns of the dump contract."""

from __future__ import annotations

COLUMNS: dict[str, str] = {
    # In bypass mode verl fills it with a copy of the rollout's log-probs: all tokens are then bit-identical.
    "old_log_probs": "train_log_probs",
    "old_log_prob": "train_log_probs",
    "ref_log_prob": "ref_log_probs",
    # Since 2026 the mask as it was before rejection; response_mask, where both exist, is the one after it.
    "loss_mask": "response_mask",
    "uid": "prompt_id",  # one per prompt, repeated for each of its responses
    "global_step": "step",
    "global_steps": "step",
}
"""verl's columns. Left out: `log_probs`, the current policy here and the recomputation in slime; `responses`,
token ids or text; `score`, the reward here and a grader's mark elsewhere."""
