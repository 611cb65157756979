"""Column names of the frameworks that have no presets here, and common spellings.

A name is listed when it means one thing wherever it is used. Traps that are left out on purpose:
    `logprobs`: the rollout engine's in AReaL, open-instruct and tinker, the trainer's in hand-written dumps.
    `prox_logp` (AReaL): entry t is about token t + 1, while its other columns are about token t.
    `rewards`, `score`: per token, per sequence, normalized or raw, depending on who writes them.
    `response_tokens`, `completion_tokens`: ids here, a count or text there.
    `attention_mask`, `mask`: cover the prompt or the padding only.
    `weight_version`, `model_version`, `versions`: of the sampler or of the trainer, per group or per token.
    `routed_experts` and its relatives: cover the prompt too.
"""

from __future__ import annotations

COLUMNS: dict[str, dict[str, str]] = {
    "nemo-rl": {
        "generation_logprobs": "rollout_log_probs",
        # All zero in runs that skip the recomputation (force_on_policy_ratio).
        "prev_logprobs": "train_log_probs",
        "token_loss_mask": "response_mask",
    },
    "prime-rl": {
        "inference_logprobs": "rollout_log_probs",
        # There is no separate recomputation: the one forward of the trainer is also the current policy.
        "trainer_logprobs": "train_log_probs",
        "ref_logprobs": "ref_log_probs",
        "loss_mask": "response_mask",
    },
    "trl": {
        "sampling_per_token_logps": "rollout_log_probs",
        "old_per_token_logps": "train_log_probs",
        "ref_per_token_logps": "ref_log_probs",
        # Tool tokens are valid in it: a dump with tools needs completion_mask * tool_mask.
        "completion_mask": "response_mask",
        "completion_ids": "token_ids",
    },
    "openrlhf": {
        "action_log_probs": "train_log_probs",
        # Inside its loss the name above is the current policy, beside this one: both in a file is an error.
        "old_action_log_probs": "train_log_probs",
        "base_action_log_probs": "ref_log_probs",
        "action_mask": "response_mask",
    },
    "skyrl": {
        "rollout_logprobs": "rollout_log_probs",
        "action_log_probs": "train_log_probs",
        "base_action_log_probs": "ref_log_probs",
        "loss_mask": "response_mask",
    },
    "roll": {
        "infer_logprobs": "rollout_log_probs",
        "old_log_probs": "train_log_probs",
    },
    "open-instruct": {
        "advantage": "advantages",
        "prompt_idx": "prompt_id",
    },
    "spellings": {
        "sampling_logprobs": "rollout_log_probs",
        "old_logprobs": "train_log_probs",
        "train_logprobs": "train_log_probs",
        "current_logprobs": "current_log_probs",
        "training_step": "step",
        "train_step": "step",
    },
}
"""Framework -> its name -> the contract's."""
