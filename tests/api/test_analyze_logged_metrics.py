"""A run's log beside the dump: it agrees to the precision of the log, and can differ at any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.analyze.run_log import read_run_log
from mismatchctl.corrections.model import Correction
from mismatchctl.frameworks.adapter import Dtype, ReplayOptions
from mismatchctl.frameworks.registry import load_framework
from mismatchctl.results.findings import Agreement
from mismatchctl.results.model import RunResult
from tests.cli.command import run

Logged = Mapping[str, Sequence[float | None]]
K3 = "rollout_corr/k3_kl"


def dump_of(folder: Path, scale: float, steps: int = 2) -> Path:
    """Log ratios of about `scale`, in float64, so that even the smallest is no rounding."""
    random = np.random.default_rng(3)
    rollout = [-0.6 - random.exponential(1.0, 200) for _ in range(8 * steps)]
    train = [row + random.normal(0, scale, 200) for row in rollout]
    table = pa.table(
        {"step": [i // 8 for i in range(8 * steps)], "rollout_log_probs": rollout, "train_log_probs": train}
    )
    folder.mkdir()
    pq.write_table(table, folder / "dump.parquet")
    return folder


def analyzed(dump: Path, dtype: Dtype = "float64", log: Path | None = None) -> RunResult:
    result = analyze(
        [str(dump)], [Correction(name="none")], framework=load_framework("verl"), replay=ReplayOptions(dtype=dtype),
        log=None if log is None else read_run_log(log), findings=False,
    )  # fmt: skip
    return result.runs[dump.name]


def replayed(dump: Path, dtype: Dtype = "float64") -> Logged:
    return analyzed(dump, dtype).logged["none"]


def written(path: Path, values: Logged, form: str = "") -> Path:
    """A log; `form` is how its numbers are printed, empty: as Python prints them."""

    def shown(value: float) -> str:
        return format(value, form) if form else repr(value)

    rows = [
        "{" + ", ".join([f'"step": {step}', *(f'"{name}": {shown(v[step])}' for name, v in values.items())]) + "}"
        for step in range(len(next(iter(values.values()))))
    ]
    path.write_text("\n".join(rows))
    return path


def against(dump: Path, log: Path) -> dict[str, Agreement]:
    return analyzed(dump, log=log).against["none"].names


@pytest.mark.parametrize("scale", [1.5e-6, 1e-3, 0.1])
def test_float32_agrees_and_what_is_farther_apart_differs(tmp_path: Path, scale: float) -> None:
    """Whatever the size of K3: the log in float32 is believed, another number is not."""
    dump = dump_of(tmp_path / "run", scale)
    exact, rounded = replayed(dump), replayed(dump, "float32")
    for values in (exact, rounded):
        found = against(dump, written(tmp_path / "log.jsonl", values))
        assert [name for name, item in found.items() if not item.agrees] == []
    true = exact[K3][0]
    wrong = true * 1.0001 if scale > 1e-5 else 9e-7
    log = written(tmp_path / "log.jsonl", exact | {K3: [wrong, exact[K3][1]]})
    item = against(dump, log)[K3]
    assert not item.agrees
    tenth = written(tmp_path / "log.jsonl", rounded | {K3: [rounded[K3][0] + 0.1 * abs(true), rounded[K3][1]]})
    assert scale < 1e-5 or not against(dump, tenth)[K3].agrees
    assert item.difference == pytest.approx(abs(wrong - true) / max(wrong, true), rel=1e-6)
    assert (item.step, item.dump, item.log, item.steps) == ("0", true, wrong, 2)


@pytest.mark.parametrize(("form", "half"), [(".4g", 5e-7), (".5f", 5e-6), (".3e", 5e-7), ("", 0.0)])
def test_the_digits_that_a_log_prints_are_what_it_is_held_to(tmp_path: Path, form: str, half: float) -> None:
    """K3 is about 1.2e-3: half a unit of its last digit."""
    dump = dump_of(tmp_path / "run", 0.05)
    exact = replayed(dump)
    found = against(dump, written(tmp_path / "log.jsonl", exact, form))
    assert [name for name, item in found.items() if not item.agrees] == []
    assert found[K3].allowed == pytest.approx(half / found[K3].dump, abs=2e-5)
    wrong = {name: [1.01 * value for value in values] for name, values in exact.items()}
    assert not against(dump, written(tmp_path / "log.jsonl", wrong, form))[K3].agrees


def test_a_zero_in_a_log_of_many_digits_is_a_zero(tmp_path: Path) -> None:
    dump = dump_of(tmp_path / "run", 1e-3)
    log = written(tmp_path / "log.jsonl", replayed(dump) | {K3: [0.0, 0.0]})
    item = against(dump, log)[K3]
    assert (item.agrees, item.difference, item.allowed < 0.1) == (False, 1.0, True)


def test_every_name_of_the_log_is_kept_and_the_summary_says_what_was_compared(tmp_path: Path) -> None:
    dump = dump_of(tmp_path / "run", 1e-3)
    grad = {"actor/grad_norm": [0.125, 3.5], "lr": [1e-6, 1e-6]}
    log = written(tmp_path / "log.jsonl", {K3: replayed(dump)[K3]} | grad)
    held = analyzed(dump, log=log)
    assert {name: held.log[name] for name in grad} == grad
    assert set(held.against["none"].names) == {K3}
    done = run("analyze", dump, "-c", "none", "--framework", "verl", "--against", log)
    assert "1 of 1 names agree" in done.stdout
    assert "kept from the log, not compared: actor/grad_norm, lr" in done.stdout.replace("\n", " ")


@pytest.mark.parametrize("text", ['{"step": 1e999999999, "a": 1}', '{"step": 0, "a": 1e99999999999999999999}'])
def test_numbers_beyond_every_float_are_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.jsonl").write_text(text + '\n{"step": 0, "b": 2}')
    assert analyzed(dump_of(tmp_path / "run", 1e-3), log=tmp_path / "log.jsonl").log == {"b": [2.0, None]}


def test_names_that_stand_for_a_metric_are_compared_without_a_framework(tmp_path: Path) -> None:
    """Those that mean one number wherever they are logged; a bare word, or what frameworks differ about, is kept."""
    dump = dump_of(tmp_path / "run", 0.05)
    truth = replayed(dump)
    names = (K3, "rollout_corr/kl", "rollout_corr/chi2_token")
    logged = {f"train/{name}" if name == K3 else name: truth[name] for name in names} | {"k3": truth[K3]}
    others = {"kl": truth[K3], "loss": [0.1, 0.2], "actor/grad_norm": [1.0, 2.0], "tokens": [7.0, 9.0]}
    for scale, agrees in ((1.0, True), (1.001, False)):
        values = {name: [scale * value for value in own if value is not None] for name, own in logged.items()}
        log = written(tmp_path / "log.jsonl", values | others, ".9g")
        (run_,) = analyze([str(dump)], log=read_run_log(log), findings=False).runs.values()
        found = run_.against_metrics
        assert found is not None
        assert found.metrics == dict(zip(logged, ("k3", "k1", "chi2_token", "k3"), strict=True))
        for name, item in found.names.items():
            assert (item.agrees, item.steps) == (agrees, 2), name
            assert item.difference == pytest.approx(1 - 1 / scale, rel=1e-3, abs=1e-7)
        assert run_.log.keys() == {*values, *others}
    text = run("analyze", str(dump), "--against", str(log)).stdout
    assert "against the metrics of run: 0 of 4 names agree" in text
    assert "kept from the log, not compared: kl, loss, actor/grad_norm, tokens" in text


def test_what_a_framework_replays_is_not_compared_twice(tmp_path: Path) -> None:
    dump = dump_of(tmp_path / "run", 0.05)
    found = analyzed(dump, log=written(tmp_path / "log.jsonl", replayed(dump)))
    assert K3 in found.against["none"].names
    assert found.against_metrics is None
