"""What OpenRLHF calls the columns of the dump contract."""

from __future__ import annotations

COLUMNS = {
    "action_log_probs": "train_log_probs",
    # Inside its loss the name above is the current policy, beside this one: both in a file is an error.
    "old_action_log_probs": "train_log_probs",
    "base_action_log_probs": "ref_log_probs",
    "action_mask": "response_mask",
}
