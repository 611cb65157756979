"""What to compare next, in the syntax of the comparators: which sequences, which layers, which command."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

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
_MSPROBE = "msprobe compare -tp TARGET -gp GOLDEN -o OUT"
MSPROBE = (
    f'dump both sides with `"task": "tensor"` and `"list": [{{quoted}}]` in msprobe\'s config.json, then `{_MSPROBE}`'
)
EVERY_LAYER = f"run both sides with `{_HOOKS}`, then `{COMPARE}`"


class NextStep(BaseModel):
    """A step from a dump to the first report of its layers.

    Attributes:
        name: replay, hook, compare, read; msprobe: the same by that tool.
        text: what to do, with its commands in backticks.
        commands: these alone; words in capitals are to be filled in.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    text: str
    commands: list[str]

    @classmethod
    def of(cls, name: str, text: str) -> NextStep:
        """One whose commands stand in its text."""
        return cls(name=name, text=text, commands=text.split("`")[1::2])


def again(syntax: str, layers: Sequence[int]) -> str:
    """Comparing some layers in the syntax of a tool, on the worst sequences."""
    texts = [str(layer) for layer in layers]
    names = texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"
    said = syntax.format(
        layers=" ".join(texts), commas=", ".join(texts), names=names,
        quoted=", ".join(f'"layers.{text}."' for text in texts),
    )  # fmt: skip
    return f"{said}; the worst sequences are enough: `{REPLAY}`"


def first_comparison(wrong: str | None, *, in_layers: bool) -> list[NextStep]:
    """The steps from a dump to the first report of its layers; none where no layer can be at fault.

    Args:
        wrong: the side that is, where a third column tells.
        in_layers: whether a cause was found, at medium confidence or more, that is in them.
    """
    if wrong == "none" or not (wrong or in_layers):
        return []
    one = {"rollout": "the engine", "trainer": "the trainer"}.get(wrong or "")
    against = f"{one}, and the checkpoint in float32," if one else "the engine and the trainer"
    steps = {
        "replay": f"`{REPLAY}` writes the worst sequences, to be scored in one prefill; needs prompt_token_ids",
        "hook": f"score them with {against} each with `{_HOOKS} DUMPER_DIR=DIR`: two folders of every layer",
        "compare": f"`{COMPARE}` writes TARGET/comparator_report.jsonl",
        "msprobe": f'or in place of both: dump each with "task": "tensor" in msprobe\'s config.json, then `{_MSPROBE}`',
        "read": "`mismatchctl diagnose DUMPS --layers TARGET` (the report in it; or OUT) names the first bad tensor",
    }
    return [NextStep.of(name, text) for name, text in steps.items()]
