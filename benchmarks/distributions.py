"""Measure how often `diagnose` finds a sampler setting in recorded distributions.

    python benchmarks/distributions.py DUMPS [--write]

DUMPS contains the trained models of stranger_dumps.py. The engine decodes in bfloat16 with a KV cache and one sampler
setting, and records the most likely tokens of each position. The trainer scores the same tokens in float32 without the
setting. `--write` writes the table of "Settings from recorded distributions" in docs/methods/accuracy.md.
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

from measure import format_share, replace_section  # noqa: E402
from stranger_dumps import ENGINE, TRAINER, TrainedModel  # noqa: E402
from stranger_plans import PROMPT, RESPONSE, UNSEEN  # noqa: E402
from strangers import Processors, cast_model, sample_responses  # noqa: E402

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
class TopTokenRecorder:
    """Logit processors that record the most likely tokens of each position."""

    process: Processors
    ids: list[torch.Tensor] = field(default_factory=list)
    log_probs: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, logits: torch.Tensor, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
        processed = self.process(logits, prompt, response)
        values, ids = processed.log_softmax(-1).topk(K)
        self.ids.append(ids)
        self.log_probs.append(values)
        return processed


@torch.inference_mode()
def record(trained: TrainedModel, name: str, value: float, folder: Path) -> None:
    """Write a dump with one sampler setting."""
    given = {} if name == "clean" else {name: int(value) if name == "top_k" else value}
    top_tokens = TopTokenRecorder(Processors(**given))
    rollout = sample_responses(trained.versions[0], trained.prompts[:ROWS], ENGINE, top_tokens, 12)  # type: ignore[arg-type]
    ids, top_log_probs = (torch.stack(values, 1) for values in (top_tokens.ids, top_tokens.log_probs))
    whole = torch.cat([rollout.prompts, rollout.tokens], 1)[:, :-1]
    train = cast_model(trained.versions[0], "float32")(whole, None, TRAINER)[:, PROMPT - 1 :].log_softmax(-1)
    sampled = train.gather(-1, rollout.tokens[..., None])[..., 0]
    inside = np.arange(RESPONSE) < rollout.lengths[:, None]
    columns = {
        "rollout_log_probs": rollout.log_probs, "train_log_probs": sampled, "token_ids": rollout.tokens,
        "rollout_top_ids": ids, "rollout_top_log_probs": top_log_probs, "train_top_log_probs": train.gather(-1, ids),
    }  # fmt: skip
    rows = {
        key: [row.numpy()[keep] for row, keep in zip(values, inside, strict=True)] for key, values in columns.items()
    }
    with Recorder(folder) as recorder:
        recorder.write(step=0, **rows)


def first_finding(folder: Path) -> Finding:
    (found,) = diagnose([str(folder)], threads=1).runs.values()
    return found[0]


def judge(name: str, value: float, finding: Finding) -> tuple[bool, bool | None]:
    """Return whether the finding names the setting above low confidence, and whether its interval contains it."""
    if name == "clean":
        alarm = finding.cause in ("temperature", "truncated_sampling") and finding.confidence != "low"
        return not alarm, None
    cause = CAUSES.get(name, "truncated_sampling")
    facts = {fact.name: fact for fact in finding.evidence}
    named = finding.cause == cause and finding.confidence != "low" and name in facts
    interval = facts[name].interval if named else None
    return named, None if interval is None else interval[0] * 0.999 <= value <= interval[1] * 1.001


@dataclass
class Summary:
    """Verdicts by setting, and descriptions of wrong findings."""

    models: list[str] = field(default_factory=list)
    settings: dict[str, list[tuple[bool, bool | None]]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)

    def add(self, trained: TrainedModel) -> None:
        """Record and judge each setting with one model."""
        self.models.append(trained.plan.name)
        for name, value in SETTINGS:
            with tempfile.TemporaryDirectory() as place:
                record(trained, name, value, Path(place))
                finding = first_finding(Path(place))
            row = judge(name, value, finding)
            self.settings[f"{name} {value:g}" if name != "clean" else "clean"].append(row)
            print(trained.plan.name, name, value, *row, finding.cause, finding.confidence, flush=True)
            if not row[0] or row[1] is False:
                what = "its interval does not contain it" if row[0] else f"{finding.cause} ({finding.confidence})"
                self.wrong.append(f"- {trained.plan.name}, {name} {value:g}: {what}")

    def to_lines(self) -> list[str]:
        """Format the summary as Markdown."""
        models = " and ".join(f"`{name}`" for name in self.models)
        lines = [
            "",
            f"The models {models} were not used to develop `diagnose`. Each dump has {ROWS} responses, with the {K} "
            "most likely tokens at each position. The last row shows dumps without a setting. In these dumps, "
            "`diagnose` is right if it reports no temperature, top-k, top-p or min-p.",
            "",
        ]
        lines += ["| setting of the sampler | setting found | interval contains the setting |", "|---|---|---|"]
        for key, rows in self.settings.items():
            contained = [inside for _, inside in rows if inside is not None]
            shares = (
                format_share(sum(named for named, _ in rows), len(rows)),
                format_share(sum(contained), len(contained)),
            )
            lines.append(f"| {key if key != 'clean' else 'no setting'} | {' | '.join(shares)} |")
        return [*lines, "", *(["Wrong findings:", "", *self.wrong, ""] if self.wrong else [])]


def main() -> None:
    torch.set_num_threads(1)
    summary = Summary()
    for plan in UNSEEN:
        summary.add(TrainedModel.load(plan, Path(sys.argv[1]), 1))
    replace_section("\n".join(summary.to_lines()), DOCUMENT if "--write" in sys.argv else None, BEGIN, END)


if __name__ == "__main__":
    main()
