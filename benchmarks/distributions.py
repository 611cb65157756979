"""Writes into docs/methods/accuracy.md what `diagnose` reads from recorded distributions of trained models.

    python benchmarks/distributions.py DUMPS [--write]

DUMPS keeps the trained models of stranger_dumps.py. An engine decodes in bfloat16 with a cache and a setting of its
sampler, and lists the most likely tokens of what it samples from; a trainer in float32 without the setting says what it
gives these.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measure import between  # noqa: E402
from sides import percent  # noqa: E402
from stranger_dumps import ENGINE, TRAINER, World  # noqa: E402
from stranger_plans import PROMPT, RESPONSE, UNSEEN  # noqa: E402
from strangers import Processors, decoded, rounded  # noqa: E402

from mismatchctl.api.diagnose import diagnose  # noqa: E402
from mismatchctl.recorder.recorder import Recorder  # noqa: E402
from mismatchctl.results.model import Finding  # noqa: E402

ROWS, K = 32, 20
SETTINGS: tuple[tuple[str, float], ...] = (
    *(("temperature", value) for value in (0.7, 0.95, 1.1)),
    *(("top_k", value) for value in (5, 15)),
    *(("top_p", value) for value in (0.7, 0.95)),
    *(("min_p", value) for value in (0.02, 0.1)),
    ("clean", 1.0),
)
CAUSES = {"temperature": "temperature", "top_k": "truncated_sampling", "top_p": "truncated_sampling"}
DOCUMENT = ROOT / "docs/methods/accuracy.md"
BEGIN, END = "<!-- benchmarks/distributions.py writes from here -->", "<!-- to there -->"


@dataclass
class Listing:
    """What an engine does to logits, and the most likely tokens of what is left, place by place."""

    process: Processors
    ids: list[torch.Tensor] = field(default_factory=list)
    log_probs: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, logits: torch.Tensor, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
        left = self.process(logits, prompt, response)
        values, ids = left.log_softmax(-1).topk(K)
        self.ids.append(ids)
        self.log_probs.append(values)
        return left


@torch.inference_mode()
def record(world: World, name: str, value: float, folder: Path) -> None:
    """A dump of one setting."""
    given = {} if name == "clean" else {name: int(value) if name == "top_k" else value}
    listing = Listing(Processors(**given))
    rollout = decoded(world.versions[0], world.prompts[:ROWS], ENGINE, listing, 12)  # type: ignore[arg-type]
    ids, ours = (torch.stack(values, 1) for values in (listing.ids, listing.log_probs))
    whole = torch.cat([rollout.prompts, rollout.tokens], 1)[:, :-1]
    train = rounded(world.versions[0], "float32")(whole, None, TRAINER)[:, PROMPT - 1 :].log_softmax(-1)
    sampled = train.gather(-1, rollout.tokens[..., None])[..., 0]
    inside = np.arange(RESPONSE) < rollout.lengths[:, None]
    columns = {
        "rollout_log_probs": rollout.log_probs, "train_log_probs": sampled, "token_ids": rollout.tokens,
        "rollout_top_ids": ids, "rollout_top_log_probs": ours, "train_top_log_probs": train.gather(-1, ids),
    }  # fmt: skip
    rows = {
        key: [row.numpy()[keep] for row, keep in zip(values, inside, strict=True)] for key, values in columns.items()
    }
    with Recorder(folder) as recorder:
        recorder.write(step=0, **rows)


def first(folder: Path) -> Finding:
    (found,) = diagnose([str(folder)], threads=1).runs.values()
    return found[0]


def judged(name: str, value: float, finding: Finding) -> tuple[bool, bool | None]:
    """Whether the setting is named at high or medium confidence, and whether its interval holds the value."""
    if name == "clean":
        alarm = finding.cause in ("temperature", "truncated_sampling") and finding.confidence != "low"
        return not alarm, None
    cause = CAUSES.get(name, "truncated_sampling")
    facts = {fact.name: fact for fact in finding.evidence}
    named = finding.cause == cause and finding.confidence != "low" and name in facts
    interval = facts[name].interval if named else None
    return named, None if interval is None else interval[0] * 0.999 <= value <= interval[1] * 1.001


@dataclass
class Told:
    """What was said of the dumps of some models: by setting, and what was not right."""

    models: list[str] = field(default_factory=list)
    settings: dict[str, list[tuple[bool, bool | None]]] = field(default_factory=lambda: defaultdict(list))
    others: list[str] = field(default_factory=list)

    def add(self, world: World) -> None:
        """Record and judge each setting."""
        self.models.append(world.plan.name)
        for name, value in SETTINGS:
            with tempfile.TemporaryDirectory() as place:
                record(world, name, value, Path(place))
                finding = first(Path(place))
            row = judged(name, value, finding)
            self.settings[f"{name} {value:g}" if name != "clean" else "clean"].append(row)
            print(world.plan.name, name, value, *row, finding.cause, finding.confidence, flush=True)
            if not row[0] or row[1] is False:
                what = "its interval does not contain it" if row[0] else f"{finding.cause} ({finding.confidence})"
                self.others.append(f"- {world.plan.name}, {name} {value:g}: {what}")

    def lines(self) -> list[str]:
        """As Markdown."""
        models = " and ".join(f"`{name}`" for name in self.models)
        lines = [
            "",
            f"The models {models} were not used to develop the tests. Each dump has {ROWS} responses and the {K} most "
            "likely tokens.",
            "`clean` is right if neither a temperature nor a truncation is found.",
            "",
        ]
        lines += ["| setting of the sampler | named | interval contains it |", "|---|---|---|"]
        for key, rows in self.settings.items():
            held = [inside for _, inside in rows if inside is not None]
            lines.append(
                f"| {key} | {percent(sum(named for named, _ in rows), len(rows))} | {percent(sum(held), len(held))} |"
            )
        return [*lines, "", "Other findings:", "", *(self.others or ["- no cases"]), ""]


def main() -> None:
    torch.set_num_threads(1)
    told = Told()
    for plan in UNSEEN:
        told.add(World.of(plan, Path(sys.argv[1]), 1))
    between("\n".join(told.lines()), DOCUMENT if "--write" in sys.argv else None, BEGIN, END)


if __name__ == "__main__":
    main()
