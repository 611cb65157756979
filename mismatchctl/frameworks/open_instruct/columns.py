"""What open-instruct calls the columns of the dump contract."""

from __future__ import annotations

COLUMNS = {"advantage": "advantages", "prompt_idx": "prompt_id"}
