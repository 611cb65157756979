"""One module per cause. The order is that of the tests: each sees a case without what those before it explain."""

from mismatchctl.diagnose.cause import Cause
from mismatchctl.diagnose.causes import (
    cache_quantization,
    context_mismatch,
    duplicated_rows,
    edited_response,
    growing_mismatch,
    identical,
    low_precision_logging,
    mask_wrong,
    misaligned,
    moe_routing,
    numerical_noise,
    padding_or_sentinel,
    probabilities_not_logs,
    quantized_rollout,
    raw_logprobs,
    stale_policy,
    stale_worker,
    temperature,
    truncated_sampling,
    unsampled_tokens,
    wrong_log_base,
)

CAUSES: tuple[Cause, ...] = tuple(
    module.CAUSE
    for module in (
        probabilities_not_logs,
        wrong_log_base,
        low_precision_logging,
        duplicated_rows,
        identical,
        mask_wrong,
        padding_or_sentinel,
        misaligned,
        unsampled_tokens,
        edited_response,
        stale_worker,
        truncated_sampling,
        temperature,
        raw_logprobs,
        context_mismatch,
        stale_policy,
        growing_mismatch,
        cache_quantization,
        quantized_rollout,
        moe_routing,
        numerical_noise,
    )
)
"""What is wrong with the columns first, then with tokens, with workers, with the distribution, with the weights."""
