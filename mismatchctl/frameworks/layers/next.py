"""What to compare next, in the syntax of the comparators: which sequences, which layers, which command."""

from __future__ import annotations

from collections.abc import Collection, Sequence

REPLAY = "mismatchctl score DUMPS --replay worst.jsonl --worst 8"
"""The worst sequences as lines of JSON: they are enough."""
COMPARE = "python -m sglang.srt.debug_utils.comparator --baseline-path BASELINE --target-path TARGET"
_HOOKS = "DUMPER_ENABLE=1 DUMPER_NON_INTRUSIVE_MODE=all"
_FILTER = r"""DUMPER_FILTER='layer_id in [{commas}] or search(r"layers\.{names}\.", name)'"""
SGLANG = f"run both sides with `{_HOOKS} {_FILTER}`, then `{COMPARE}`"
"""`layer_id` is of dumps placed by hand, names are those of hooks."""
SLIME = (
    "dump these layers of both sides, then `python tests/glm52_layerwise_comparator.py --megatron-dir MEGATRON "
    "--sglang-dir SGLANG --layers {layers} --output-json layerwise.json`"
)
MSPROBE = (
    'dump both sides with `"task": "tensor"` and `"list": [{quoted}]` in msprobe\'s config.json, then '
    "`msprobe compare -tp TARGET -gp GOLDEN -o OUT`"
)
EVERY_LAYER = f"run both sides with `{_HOOKS}`, then `{COMPARE}`"
_NUMERIC = frozenset(
    ("cache_quantization", "moe_routing", "position_mismatch", "quantized_rollout", "unexplained", "weights_differ")
)
"""Causes that are somewhere in the network; others are in what goes into it, or comes out."""


def again(syntax: str, layers: Sequence[int]) -> str:
    """Comparing some layers in the syntax of a tool, on the worst sequences."""
    texts = [str(layer) for layer in layers]
    names = texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"
    said = syntax.format(
        layers=" ".join(texts), commas=", ".join(texts), names=names,
        quoted=", ".join(f'"layers.{text}."' for text in texts),
    )  # fmt: skip
    return f"{said}; the worst sequences are enough: `{REPLAY}`"


def first_comparison(causes: Collection[str], wrong: str | None) -> list[tuple[str, str]]:
    """The steps from a dump to the first report of its layers, by name; none where no layer can be at fault.

    Args:
        causes: what was found at medium confidence or more.
        wrong: the side that is, where a third column tells.
    """
    if wrong == "none" or not (wrong or _NUMERIC & set(causes)):
        return []
    one = {"rollout": "the engine", "trainer": "the trainer"}.get(wrong or "")
    against = f"{one}, and the checkpoint in float32," if one else "the engine and the trainer"
    return [
        (
            "replay",
            f"`{REPLAY}` writes the worst sequences, to be scored in one prefill; needs prompt_token_ids",
        ),
        ("hook", f"score them with {against} each with `{_HOOKS} DUMPER_DIR=...`: two folders of every layer"),
        ("compare", f"`{COMPARE}` writes TARGET/comparator_report.jsonl"),
        ("read", "`mismatchctl diagnose DUMPS --layers TARGET/comparator_report.jsonl` names the first bad tensor"),
    ]
