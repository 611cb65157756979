"""A user's program that calls every public function with its usual arguments. mypy checks it in strict mode."""

from pathlib import Path

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

import mismatchctl as mm

DUMPS, OTHER, CONFIG = "dumps/", Path("other"), "trainer.yaml"


def main() -> None:
    result: mm.Result = mm.analyze(DUMPS)
    mm.analyze(DUMPS, OTHER, corrections=["token_tis", {"weight": {"truncate": 2.0}}], by="worker", threads=2)
    mm.analyze([DUMPS, OTHER], corrections="token_tis", columns={"train_log_probs": "old"}, on_bad="skip")
    mm.analyze(pl.DataFrame({"rollout_log_probs": [[-1.0]]}), pl.LazyFrame(), losses=["gspo"], baseline="b.json")
    rollout: NDArray[np.float32] = np.zeros((2, 3), np.float32)
    mm.analyze({"rollout": rollout, "train": rollout, "prompt_id": [1, 2]})
    mm.analyze(rollout=rollout, train=rollout, mask=rollout > 0)
    mm.analyze(rollout=torch.zeros(2, 3), train=torch.zeros(2, 3), mask=torch.ones(2, 3), findings=False)
    mm.analyze(rollout=[[-1.0], [-2.0]], train=[[-1.0], [-2.0]])
    mm.analyze(mm.pair("rollout.jsonl", "train.jsonl", on="id"))
    value: float | None = result["run"].k3.value or result.k3.se
    table: pl.DataFrame = result.to_polars()
    page: str = result.to_html()
    result.to_html("report.html")
    result.save(Path("result.json"))
    text: str = result.to_json() + repr(result)
    print(value, table, page, text, result.plot("distribution"), result["run"].steps)

    sweep: mm.Sweep = mm.sweep(DUMPS)
    mm.sweep(DUMPS, correction="token_tis", vary={"weight.truncate": [1.5, 2.0]}, target_rejection=0.05)
    mm.sweep(DUMPS, correction="token_tis", vary={"weight.truncate": "1.5:4:20"}, target_ess=[0.9], at_length=2048)
    sweep.save("sweep.json")

    comparison: mm.Comparison = mm.compare(DUMPS, OTHER)
    mm.compare(result, "baseline.json", corrections="token_tis")
    comparison.to_html("comparison.html")

    verdict: mm.Verdict = mm.gate(DUMPS, "baseline.json", rule="k3:max=0.01")
    assert mm.gate(result, baseline=result, rules=["k3:increase=20%", "ess_token:min=0.5"], level=0.01)
    assert verdict and verdict.passed

    diagnosis: mm.Diagnosis = mm.diagnose(DUMPS, by=["worker", "rank"])
    print([finding.cause for finding in diagnosis["run"]], diagnosis.to_polars())

    advice: mm.Advice = mm.advise(DUMPS, framework="verl", batch=512, max_rejection=0.05)
    print([one.name for one in advice["run"].advice], advice.to_json())

    for message in mm.lint(CONFIG, DUMPS) + mm.lint({"use_vllm": True}, framework="trl"):
        print(message.level, message.consequence)

    mm.analyze(DUMPS, corrections=mm.read_config(CONFIG) + mm.read_config({"use_vllm": True}, framework="trl"))
    again: mm.Result = mm.read_result("result.json")
    correction: mm.Correction = mm.preset("token_tis")
    print(again, sorted(mm.presets()), correction.name)


def training_step(rollout: torch.Tensor, train: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights, kept = mm.weights(rollout, train, mask, "token_tis", micro_batches=8)
    also = mm.keep(rollout, train, mask, {"gates": [{"level": "geometric", "keep": [0.9, 1.1]}]})
    return -(weights * kept * also * train).sum()


def offline(rollout: NDArray[np.float32], train: NDArray[np.float32], mask: NDArray[np.bool_]) -> dict[str, float]:
    weights, kept = mm.weights(rollout, train, mask)
    used: NDArray[np.float32] = weights[kept]
    rows, flags = mm.weights([[-1.0]], [[-1.1]])
    first: float = rows[0][0] + float(flags[0][0]) + float(used.sum())
    estimates = {"k1": mm.k1(rollout, train, mask), "k2": mm.k2(rollout, train), "k3": mm.k3([[-1.0]], [[-1.1]])}
    estimates |= {"ess": mm.ess(rollout, train, mask, level="sequence"), "chi2": mm.chi2(rollout, train), "w": first}
    k3: float | None = mm.metrics(rollout, train, mask)["k3"]
    return estimates | ({} if k3 is None else {"metric": k3})


def errors() -> None:
    try:
        mm.analyze("nowhere")
    except (mm.ConfigError, mm.DataError) as error:
        print(error)
