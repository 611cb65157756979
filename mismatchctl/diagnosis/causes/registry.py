"""All causes, in the order of their tests."""

from mismatchctl.diagnosis.cause import Cause
from mismatchctl.diagnosis.causes.alignment import (
    EDITED_RESPONSE,
    MASK_WRONG,
    MISALIGNED,
    PADDING_OR_SENTINEL,
    RETOKENIZED,
    UNSAMPLED_TOKENS,
)
from mismatchctl.diagnosis.causes.column_values import (
    CLAMPED,
    CUMULATIVE,
    LOW_PRECISION_LOGGING,
    PROBABILITIES_NOT_LOGS,
    SEQUENCE_MEANS,
    WRONG_LOG_BASE,
)
from mismatchctl.diagnosis.causes.numerics import CACHE_QUANTIZATION, MOE_ROUTING, NUMERICAL_NOISE
from mismatchctl.diagnosis.causes.rows import (
    CONTEXT_MISMATCH,
    DUPLICATED_ROWS,
    IDENTICAL,
    POSITION_MISMATCH,
    REVERSED_ROWS,
    SWAPPED_ROWS,
)
from mismatchctl.diagnosis.causes.sampling import (
    LOGIT_BIAS,
    LOGIT_PENALTY,
    LOGIT_SOFTCAP,
    RAW_LOGPROBS,
    TEMPERATURE,
    TRUNCATED_SAMPLING,
)
from mismatchctl.diagnosis.causes.staleness import (
    GROWING_MISMATCH,
    STALE_POLICY,
    STALE_PREFIX,
    STALE_STEP,
    STALE_WORKER,
)
from mismatchctl.diagnosis.causes.unexplained import UNEXPLAINED
from mismatchctl.diagnosis.causes.weights import OTHER_MODEL, OTHER_VOCABULARY, QUANTIZED_ROLLOUT, WEIGHTS_DIFFER

CAUSES: tuple[Cause, ...] = (
    PROBABILITIES_NOT_LOGS,
    CUMULATIVE,
    WRONG_LOG_BASE,
    LOW_PRECISION_LOGGING,
    DUPLICATED_ROWS,
    IDENTICAL,
    SEQUENCE_MEANS,
    CLAMPED,
    MASK_WRONG,
    MISALIGNED,
    REVERSED_ROWS,
    SWAPPED_ROWS,
    PADDING_OR_SENTINEL,
    UNSAMPLED_TOKENS,
    RETOKENIZED,
    EDITED_RESPONSE,
    STALE_WORKER,
    STALE_STEP,
    LOGIT_BIAS,
    LOGIT_PENALTY,
    TRUNCATED_SAMPLING,
    TEMPERATURE,
    RAW_LOGPROBS,
    LOGIT_SOFTCAP,
    OTHER_MODEL,
    CONTEXT_MISMATCH,
    POSITION_MISMATCH,
    STALE_POLICY,
    GROWING_MISMATCH,
    STALE_PREFIX,
    QUANTIZED_ROLLOUT,
    WEIGHTS_DIFFER,
    CACHE_QUANTIZATION,
    MOE_ROUTING,
    OTHER_VOCABULARY,
    UNEXPLAINED,
    NUMERICAL_NOISE,
)
"""The columns first, then tokens, workers, the distribution and the weights. Last: what no test explains, and noise."""
