"""What slime and Miles call the columns of the dump contract."""

from __future__ import annotations

COLUMNS = {
    "loss_masks": "response_mask",
    "loss_mask": "response_mask",
    "group_index": "prompt_id",
    "raw_reward": "reward",
}
"""Left out: `log_probs`, the recomputation here and the current policy elsewhere; `rewards`, normalized within the
group here; `rollout_id`, the step of a file but the group of a sample; `tokens` and `rollout_routed_experts`, which
cover the prompt too. Miles' policy_loss_debug calls the current policy `train_log_probs`, the contract's name for the
recomputation: such a file needs `--column`."""
