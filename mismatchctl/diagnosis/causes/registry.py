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
from mismatchctl.diagnosis.causes.data_shape import (
    BATCH_DEPENDENT_KERNELS,
    CONSTANT_COLUMN,
    LENGTH_MISMATCH,
    LOG_DENSITIES,
    PACKED_COLUMNS,
    UNMASKED_PADDING,
    WRONG_SIGN,
)
from mismatchctl.diagnosis.causes.engine_state import ENGINE_STATE
from mismatchctl.diagnosis.causes.numerics import CACHE_QUANTIZATION, MOE_ROUTING, NUMERICAL_NOISE
from mismatchctl.diagnosis.causes.other_token_recorded import OTHER_TOKEN_RECORDED
from mismatchctl.diagnosis.causes.rows import (
    CONTEXT_MISMATCH,
    CONTEXT_MISMATCH_AT_TURN,
    CONTEXT_MISMATCH_BY_PROMPT,
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
    SAMPLING_SETTINGS,
    TEMPERATURE,
    TRUNCATED_SAMPLING,
)
from mismatchctl.diagnosis.causes.staleness import (
    GROWING_MISMATCH,
    STALE_POLICY,
    STALE_PREFIX,
    STALE_STEP,
    STALE_WORKER,
    WEIGHTS_NEVER_UPDATED,
)
from mismatchctl.diagnosis.causes.unexplained import UNEXPLAINED
from mismatchctl.diagnosis.causes.weights import OTHER_MODEL, OTHER_VOCABULARY, QUANTIZED_ROLLOUT, WEIGHTS_DIFFER

CAUSES: tuple[Cause, ...] = (
    LENGTH_MISMATCH,
    CONSTANT_COLUMN,
    UNMASKED_PADDING,
    LOG_DENSITIES,
    WRONG_SIGN,
    PROBABILITIES_NOT_LOGS,
    CUMULATIVE,
    WRONG_LOG_BASE,
    LOW_PRECISION_LOGGING,
    DUPLICATED_ROWS,
    BATCH_DEPENDENT_KERNELS,
    IDENTICAL,
    SEQUENCE_MEANS,
    CLAMPED,
    PACKED_COLUMNS,
    MASK_WRONG,
    MISALIGNED,
    REVERSED_ROWS,
    SWAPPED_ROWS,
    OTHER_TOKEN_RECORDED,
    PADDING_OR_SENTINEL,
    UNSAMPLED_TOKENS,
    RETOKENIZED,
    CONTEXT_MISMATCH_AT_TURN,
    ENGINE_STATE,
    EDITED_RESPONSE,
    STALE_WORKER,
    STALE_STEP,
    LOGIT_BIAS,
    LOGIT_PENALTY,
    TRUNCATED_SAMPLING,
    TEMPERATURE,
    RAW_LOGPROBS,
    SAMPLING_SETTINGS,
    LOGIT_SOFTCAP,
    OTHER_MODEL,
    CONTEXT_MISMATCH,
    POSITION_MISMATCH,
    WEIGHTS_NEVER_UPDATED,
    STALE_POLICY,
    GROWING_MISMATCH,
    STALE_PREFIX,
    QUANTIZED_ROLLOUT,
    WEIGHTS_DIFFER,
    CACHE_QUANTIZATION,
    MOE_ROUTING,
    OTHER_VOCABULARY,
    CONTEXT_MISMATCH_BY_PROMPT,
    UNEXPLAINED,
    NUMERICAL_NOISE,
)
"""Columns first, then tokens, workers, the distribution and the weights. The rest and noise come last."""
