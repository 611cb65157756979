"""slime, and Miles, which forked it and runs the same correction: presets and column names.

Three things hold for all presets here:
    Normalization is called "across the batch", but runs inside the loss, once per micro-batch: presets say
        micro_batch, which falls back to the whole group where a dump has no micro_batch column.
    Rejection (`use_rs`, veto) takes tokens out of the loss average, mask mode keeps the nominal batch, as the
        documents say. The code has one mask for both: in 2026-01 either shrinks the token count of its
        sequence, the reducer of 2026-08 divides by the original counts.
    The veto looks at the ratio of each token, as the code does; the Miles article says probability.
"""

from __future__ import annotations

from typing import Literal

from mismatchctl.correction.model import Correction, Gate, Weight
from mismatchctl.correction.presets import Preset

_SHIPPED = "slime commit 9bfe1525, 2026-01-20, examples/train_infer_mismatch_helper/mis.yaml"
_MODES = "slime commit 9bfe1525, 2026-01-20, examples/train_infer_mismatch_helper/mis.py"
_BUILT_IN = "slime commit 9bfe1525, 2026-01-20, slime/backends/megatron_utils/loss.py"
_ARTICLE = "Let Speed Be With Stability (Training-Inference Mismatch with Miles), LMSYS, 2026-01-16"
_MILES_YAML = "Miles commit 5522da06, examples/train_infer_mismatch_helper/mis.yaml"

_VETO = Gate(statistic="ratio", level="min", keep=(1e-4, None), clamp="none")
_GEOMETRIC = Gate(statistic="ratio", level="geometric", keep=(0.99, 1.001))
_SEQUENCE = Gate(statistic="ratio", level="sequence", keep=(0.5, 2.0))


def _truncate(upper: float, normalize: Literal["none", "token"] = "none") -> Weight:
    return Weight(level="token", truncate=upper, normalize=normalize, normalize_over="micro_batch")


def _clip(low: float, high: float, normalize: Literal["none", "token"] = "none") -> Weight:
    return Weight(level="token", clip=(low, high), normalize=normalize, normalize_over="micro_batch")


_SLIME = (
    Preset(
        Correction(
            name="slime-mis",
            about="The mis.yaml that slime ships: token weights truncated at 2 and normalized per "
            "micro-batch, tokens with a ratio outside 0.5..2 rejected, veto at 1e-4.",
            weight=_truncate(2.0, "token"),
            gates=(Gate(statistic="ratio", level="token", keep=(0.5, 2.0)), _VETO),
        ),
        "slime",
        "2026-01",
        _SHIPPED,
    ),
    Preset(
        Correction(
            name="tis-truncate",
            about="mis.yaml's truncate mode alone: token weights above 2 become 2, nothing is rejected.",
            weight=_truncate(2.0),
        ),
        "slime",
        "2026-01",
        _MODES,
    ),
    Preset(
        Correction(
            name="tis-clip",
            about="mis.yaml's clip mode alone: token weights are clipped to 0.5..2, nothing is rejected.",
            weight=_clip(0.5, 2.0),
        ),
        "slime",
        "2026-01",
        _MODES,
    ),
    Preset(
        Correction(
            name="mis",
            about="mis.yaml's mask mode alone: tokens with a ratio outside 0.5..2 contribute nothing but "
            "stay in the nominal batch; the rest keep their raw weight.",
            weight=Weight(level="token"),
            gates=(Gate(statistic="ratio", level="token", keep=(0.5, 2.0), effect="zero"),),
        ),
        "slime",
        "2026-01",
        _MODES,
    ),
    Preset(
        Correction(
            name="slime-tis",
            about="--use-tis without a custom function: token weights are clipped to 0..2.",
            weight=Weight(level="token", clip=(0.0, 2.0)),
        ),
        "slime",
        "2026-01",
        f"{_BUILT_IN}: vanilla_tis_function, --tis-clip-low 0 --tis-clip 2.0",
    ),
    Preset(
        Correction(
            name="icepop",
            # The IcePop article itself takes 0.5..5.
            about="slime's IcePop with the bounds of its flags: token weights above 2 become 0; "
            "no token leaves the denominators.",
            weight=Weight(level="token", zero=(0.0, 2.0)),
        ),
        "slime",
        "2026-01",
        f"{_BUILT_IN}: icepop_function, --tis-clip-low 0 --tis-clip 2.0",
    ),
)

# The article gives intervals for the weights and says that they "remain within [lower_bound, upper_bound]":
# that is clip, truncate has no lower bound. (The mis.yaml with the numbers of configuration 2 says truncate:
# it is miles-mis.) The article gives no veto for these runs; every mis.yaml with rejection has 1e-4: the variants
# that end in -veto have it.
_MOE = (
    Correction(
        name="miles-moe-1",
        about="Token weights clipped to 0.5..2 and normalized, geometric mean ratio kept in 0.99..1.001: "
        "collapsed on a mixture of experts.",
        weight=_clip(0.5, 2.0, "token"),
        gates=(_GEOMETRIC,),
    ),
    Correction(
        name="miles-moe-2",
        about="Token weights clipped to 0.5..1.5 and normalized, geometric mean ratio kept in 0.99..1.001: "
        "held on a mixture of experts.",
        weight=_clip(0.5, 1.5, "token"),
        gates=(_GEOMETRIC,),
    ),
    Correction(
        name="miles-moe-3",
        about="miles-moe-2 without normalization: held as well.",
        weight=_clip(0.5, 1.5),
        gates=(_GEOMETRIC,),
    ),
    Correction(
        name="miles-moe-4",
        about="Token weights clipped to 0.5..1.5, nothing rejected: collapsed on a mixture of experts.",
        weight=_clip(0.5, 1.5),
    ),
)

_MOE_VETO = tuple(
    item.model_copy(
        update={
            "name": f"{item.name}-veto",
            "about": f"{item.name} with the veto at 1e-4 that every mis.yaml with rejection has.",
            "gates": (*item.gates, _VETO),
        }
    )
    for item in _MOE
    if item.gates
)

# The article names these four without bounds or mode: they are those of the mis.yaml shipped at the time,
# whose rejection bounds fall back to the weights' 0.5..2 at whatever level, here the whole sequence.
_DENSE = (
    Correction(name="miles-dense-1", about="Baseline of the dense experiment: nothing weighted, nothing rejected."),
    Correction(
        name="miles-dense-2",
        about="Dense experiment, token weights; no bounds are published, those shipped: truncated at 2.",
        weight=_truncate(2.0),
    ),
    Correction(
        name="miles-dense-3",
        about="Dense experiment, miles-dense-2 and sequence masking; no bounds are published, those shipped: "
        "sequence ratio in 0.5..2, veto at 1e-4.",
        weight=_truncate(2.0),
        gates=(_SEQUENCE, _VETO),
    ),
    Correction(
        name="miles-dense-4",
        about="Dense experiment, miles-dense-3 with normalized weights.",
        weight=_truncate(2.0, "token"),
        gates=(_SEQUENCE, _VETO),
    ),
)

_MILES_MIS = Correction(
    name="miles-mis",
    about="A mis.yaml of Miles, configuration 2 in truncate mode: token weights truncated at 1.5 and "
    "normalized, geometric mean ratio kept in 0.99..1.001, veto at 1e-4.",
    weight=_truncate(1.5, "token"),
    gates=(_GEOMETRIC, _VETO),
)

PRESETS: tuple[Preset, ...] = (
    *_SLIME,
    *(Preset(item, "miles", "2026-01", f"{_ARTICLE}: MoE, config {item.name[-1]}") for item in _MOE),
    *(Preset(item, "miles", "2026-01", f"{_ARTICLE}: MoE, and {_SHIPPED}") for item in _MOE_VETO),
    *(Preset(item, "miles", "2026-01", f"{_ARTICLE}: dense, configuration {item.name[-1]}") for item in _DENSE),
    Preset(_MILES_MIS, "miles", "2026-01", _MILES_YAML),
)

COLUMNS: dict[str, str] = {
    "loss_masks": "response_mask",
    "loss_mask": "response_mask",
    "group_index": "prompt_id",
    "raw_reward": "reward",
}
"""slime's and Miles' columns. Left out: `log_probs`, the recomputation here and the current policy in verl;
`rewards`, normalized within the group here; `rollout_id`, the step of a file but the group of a sample;
`tokens` and `rollout_routed_experts`, which cover the prompt too. Miles' policy_loss_debug calls the current
policy `train_log_probs`, the contract's name for the recomputation: such a file needs `--column`."""
