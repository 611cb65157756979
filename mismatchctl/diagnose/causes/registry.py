"""All causes, in the order of their tests."""

from importlib import import_module

from mismatchctl.diagnose.cause import Cause

_TESTS = (
    "probabilities_not_logs",
    "cumulative",
    "wrong_log_base",
    "low_precision_logging",
    "duplicated_rows",
    "identical",
    "sequence_means",
    "clamped",
    "mask_wrong",
    "misaligned",
    "reversed_rows",
    "swapped_rows",
    "padding_or_sentinel",
    "unsampled_tokens",
    "retokenized",
    "edited_response",
    "stale_worker",
    "stale_step",
    "logit_bias",
    "logit_penalty",
    "truncated_sampling",
    "temperature",
    "raw_logprobs",
    "logit_softcap",
    "other_model",
    "context_mismatch",
    "position_mismatch",
    "stale_policy",
    "growing_mismatch",
    "stale_prefix",
    "quantized_rollout",
    "weights_differ",
    "cache_quantization",
    "moe_routing",
    "other_vocabulary",
    "unexplained",
    "numerical_noise",
)
"""What is wrong with the columns first, then with tokens, with workers, with the distribution, with the weights; what
none of these explains, and noise, last."""

CAUSES: tuple[Cause, ...] = tuple(import_module(f"{__name__}.{name}").CAUSE for name in _TESTS)
