"""All causes, in the order of testing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.causes import alignment, column_values, data_shape, numerics, rows, sampling, staleness
from mismatchctl.diagnosis.detection import Detection
from mismatchctl.diagnosis.distributions import TOP_COLUMNS
from mismatchctl.diagnosis.evidence import FlagFunction
from mismatchctl.frameworks.registry import list_settings
from mismatchctl.io.yaml import parse_toml


@cache
def load_texts() -> dict[str, dict[str, str]]:
    return parse_toml((files("mismatchctl.diagnosis.causes") / "causes.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Cause:
    """A cause of a mismatch.

    Attributes:
        test: A function that looks for the cause in a sample.
        columns: Optional columns of the dump that the test reads.
        flags: A function that counts suspicious tokens in the whole dump, because the test sees only a sample.
        in_layers: True if the fault may be in a layer of the model.
    """

    id: str
    test: Callable[[Case], Detection | None]
    columns: tuple[str, ...] = ()
    flags: FlagFunction = lambda rows: {}
    in_layers: bool = False

    @property
    def title(self) -> str:
        return load_texts()[self.id]["title"]

    @property
    def shows(self) -> str:
        return load_texts()[self.id]["shows"]

    @property
    def pointless(self) -> str:
        return load_texts()[self.id].get("pointless", "")

    @property
    def advice(self) -> str:
        known = list_settings(self.id)
        return load_texts()[self.id]["advice"].replace("{settings}", f" ({'; '.join(known)})" if known else "")


_VERSIONS, _LEARNING = ("rollout_version", "train_version"), ("token_ids", "current_log_probs")
CAUSES: tuple[Cause, ...] = (
    Cause("length_mismatch", data_shape.detect_length_mismatch),
    Cause("constant_column", data_shape.detect_constant_column),
    Cause("unmasked_padding", data_shape.detect_unmasked_padding),
    Cause("log_densities", data_shape.detect_log_densities),
    Cause("wrong_sign", data_shape.detect_wrong_sign),
    Cause("probabilities_not_logs", column_values.detect_probabilities_not_logs),
    Cause("cumulative", column_values.detect_cumulative),
    Cause("wrong_log_base", column_values.detect_wrong_log_base),
    Cause("low_precision_logging", column_values.detect_low_precision_logging),
    Cause("duplicated_rows", rows.detect_duplicated_rows),
    Cause("batch_dependent_kernels", data_shape.detect_batch_dependent_kernels, columns=("micro_batch",)),
    Cause("identical", rows.detect_identical),
    Cause("sequence_means", column_values.detect_sequence_means),
    Cause("clamped", column_values.detect_clamped),
    Cause("packed_columns", data_shape.detect_packed_columns, columns=("response_mask",)),
    Cause("mask_wrong", alignment.detect_mask_wrong, columns=("token_ids",)),
    Cause("misaligned", alignment.detect_misaligned),
    Cause("reversed_rows", column_values.detect_reversed_rows),
    Cause("swapped_rows", rows.detect_swapped_rows),
    Cause("other_token_recorded", column_values.detect_other_token_recorded),
    Cause("padding_or_sentinel", alignment.detect_padding_or_sentinel, flags=alignment.flag_placeholders),
    Cause("unsampled_tokens", alignment.detect_unsampled_tokens),
    Cause("retokenized", alignment.detect_retokenized),
    Cause("context_mismatch", rows.detect_context_at_turn, columns=("turn",)),
    Cause("engine_state", alignment.detect_engine_state, in_layers=True),
    Cause("edited_response", alignment.detect_edited_response),
    Cause("stale_worker", staleness.detect_stale_worker, columns=("worker",)),
    Cause("stale_step", staleness.detect_stale_step),
    Cause("logit_bias", sampling.detect_logit_bias, columns=("token_ids",)),
    Cause("logit_penalty", sampling.detect_logit_penalty, columns=("token_ids",)),
    Cause("truncated_sampling", sampling.detect_truncated_sampling, columns=TOP_COLUMNS),
    Cause("temperature", sampling.detect_temperature, columns=TOP_COLUMNS),
    Cause("raw_logprobs", sampling.detect_raw_logprobs, columns=("entropy",)),
    Cause("sampling_settings", sampling.detect_sampling_settings),
    Cause("logit_softcap", sampling.detect_logit_softcap),
    Cause("other_model", numerics.detect_other_model),
    Cause("context_mismatch", rows.detect_context_mismatch, columns=("turn",)),
    Cause("position_mismatch", rows.detect_position_mismatch, in_layers=True),
    Cause("weights_never_updated", staleness.detect_weights_never_updated, columns=(*_VERSIONS, *_LEARNING)),
    Cause("stale_policy", staleness.detect_stale_policy, columns=(*_VERSIONS, *_LEARNING, "advantages")),
    Cause("growing_mismatch", staleness.detect_growing_mismatch),
    Cause("stale_prefix", staleness.detect_stale_prefix, columns=("prompt_id",)),
    Cause("quantized_rollout", numerics.detect_quantized_rollout, columns=_LEARNING, in_layers=True),
    Cause("weights_differ", numerics.detect_weights_differ, columns=("token_ids",), in_layers=True),
    Cause("cache_quantization", numerics.detect_cache_quantization, columns=("token_ids",), in_layers=True),
    Cause("moe_routing", numerics.detect_moe_routing, columns=("rollout_experts", "train_experts"), in_layers=True),
    Cause("other_vocabulary", numerics.detect_other_vocabulary),
    Cause("context_mismatch", rows.detect_context_by_prompt, columns=("turn",)),
    Cause("unexplained", numerics.detect_unexplained, in_layers=True),
    Cause("numerical_noise", numerics.detect_numerical_noise),
)
"""All causes that `diagnose` tests, in this order. The first causes are recording errors, the last is noise."""
