"""What AReaL calls the columns of the dump contract."""

from __future__ import annotations

COLUMNS = {"loss_mask": "response_mask"}

OWN_COLUMNS = {"logprobs": "rollout_log_probs"}
"""In its own step; elsewhere these names mean something else too."""
