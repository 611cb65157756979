"""What tinker-cookbook calls the columns of the dump contract."""

from __future__ import annotations

COLUMNS: dict[str, str] = {}

OWN_COLUMNS = {"logprobs": "rollout_log_probs", "mask": "response_mask"}
"""In its own step; elsewhere these names mean something else too."""
