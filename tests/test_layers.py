"""Reports of layer-wise comparators: the first bad layer of real ones, and sentences for broken ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatchctl.errors import DataError
from mismatchctl.frameworks.layers import LayerReport, read_layers
from mismatchctl.frameworks.layers.model import layer_in
from mismatchctl.frameworks.layers.noise import held_against, logit_noise
from mismatchctl.render.figures.layers import layers_figure

REPORTS = Path(__file__).parent / "framework_dumps" / "comparators"
CASES = json.loads((REPORTS / "labels.json").read_text())["cases"]


def place(report: LayerReport) -> tuple[int | None, int | None]:
    bad = report.first_bad
    return (None, None) if bad is None else (bad.step, bad.layer)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
def test_the_first_bad_layer_is_the_one_that_was_made(case: dict[str, Any]) -> None:
    [report] = read_layers(str(REPORTS / case["file"]))
    injected = case.get("true_first_bad_layer", case["first_bad_layer"])
    apart = report.first_apart.layer if report.first_apart else None
    shown = [layer for layer in (place(report)[1], apart) if layer is not None]
    if "selected_layers" in case["file"]:
        assert min(shown) == case["first_bad_layer"]
        assert any(f"not {injected}" in note for note in report.notes)
    elif "nan_hidden" in case["file"]:
        assert place(report)[1] == injected  # slime's own comparator lets NaN pass
    else:
        assert place(report)[1] == case["first_bad_layer"]
        assert min(shown, default=None) == injected
    if "first_bad_name" in case:
        assert report.first_bad is not None
        assert report.first_bad.name == case["first_bad_name"]
    if "first_bad_step" in case:
        assert place(report)[0] == case["first_bad_step"]
    if "first_flagged_row" in case:
        assert (report.first_bad and report.first_bad.name) == case["first_flagged_row"]
    if case.get("report_failed_step_layer"):
        assert list(place(report)) == case["report_failed_step_layer"][0]


@pytest.mark.parametrize("case", [case for case in CASES if "stdout" in case], ids=lambda case: case["file"])
def test_what_slime_prints_reads_like_its_json(case: dict[str, Any]) -> None:
    [printed], [written] = read_layers(str(REPORTS / case["stdout"])), read_layers(str(REPORTS / case["file"]))
    assert [layer for layer, _ in printed.growth] == [layer for layer, _ in written.growth]
    if case["first_bad_layer"] is not None:
        assert printed.first_bad is not None
        assert printed.first_bad.layer == case["first_bad_layer"]


def test_a_folder_holds_the_reports_of_its_ranks() -> None:
    reports = read_layers(str(REPORTS / "msprobe" / "diff_analyze"))
    found = [(report.rank, report.first_bad and report.first_bad.layer) for report in reports]
    assert found == [("0", None), ("1", 3), ("1", 3)]


def test_what_a_report_lacks_is_said() -> None:
    [report] = read_layers(str(REPORTS / "sglang" / "mixed_records" / "report.jsonl"))
    said = " ".join(report.notes)
    for word in ("attn_output of layer 1 was not compared", "bad_dims could not be compared", "config_note differs"):
        assert word in said
    [report] = read_layers(str(REPORTS / "msprobe" / "statistics_unmatched" / "compare_result_20260822000000.csv"))
    assert "layers.6" in report.notes[0]
    assert "no counterpart" in report.notes[0]


def test_a_report_that_was_cut_off_says_so(tmp_path: Path) -> None:
    text = (REPORTS / "sglang" / "error_from_layer" / "report.jsonl").read_text()
    cut = tmp_path / "comparator_report.jsonl"
    cut.write_text(text[: len(text) * 3 // 4])
    [report] = read_layers(str(cut))
    assert place(report) == (0, 3)
    assert "cut short" in " ".join(report.notes)


def test_a_difference_below_any_tolerance_is_placed(tmp_path: Path) -> None:
    """Noise of one size in each layer but one: found at the layer at which it was put, wherever that is."""
    random = np.random.default_rng(3)
    for bad in range(2, 12):
        values = 1e-6 * random.uniform(0.5, 2, 12)
        values[bad:] += 1e-3
        layers = {str(k): {"max_abs": v, "mean_abs": v / 3, "tokens": 9, "numel": 72} for k, v in enumerate(values)}
        file = tmp_path / "layerwise.json"
        file.write_text(json.dumps({"max_hidden_diff": 0.1, "request_mapping": {}, "layers": layers}))
        [report] = read_layers(str(file))
        assert report.first_bad is None
        assert report.first_apart is not None
        assert (report.first_apart.layer, report.last_good) == (bad, bad - 1)


HOSTILE = {
    "empty": b"",
    "bytes": b"\xff\xfe\x00",
    "other JSON": b'{"layers": [1, 2]}',
    "deep JSON": b"[" * 100_000,
    "long number": b'{"max_hidden_diff": ' + b"9" * 10_000 + b"}",
    "other CSV": b"a,b\n1,2\n",
    "no layer": b'{"max_hidden_diff": 1e-7, "layers": {}}',
    "no record": b'{"type": "config"}\n{"type": "summary"}\n',
    "list of lists": b"[[]]\n[[]]\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_report_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"report{'.csv' if 'CSV' in name else '.jsonl'}"
    file.write_bytes(HOSTILE[name])
    with pytest.raises(DataError, match=str(file)):
        read_layers(str(file))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.jsonl")
    with pytest.raises(DataError, match="regular file"):
        read_layers(str(tmp_path / "report.jsonl"))


def test_odd_values_in_a_report_are_no_numbers(tmp_path: Path) -> None:
    file = tmp_path / "layerwise.json"
    layers = {"0": {"tokens": 9, "max_abs": 0.0, "mean_abs": 0.0}, "1": {"tokens": 9, "max_abs": "x"}, "x": 3, "2": []}
    file.write_text(json.dumps({"max_hidden_diff": 1e-7, "layers": layers}))
    [report] = read_layers(str(file))
    assert report.tensors == 2
    assert place(report) == (None, 1)


class TestNoise:
    """What the dump asks of the logits, against logits that were made with noise of a known size."""

    @pytest.mark.parametrize("size", [0.003, 0.05])
    def test_noise_that_was_put_on_logits_is_found(self, size: float) -> None:
        random = np.random.default_rng(7)
        logits = random.normal(0, 2, (20_000, 50))
        sampled = (logits - np.log(-np.log(random.uniform(size=logits.shape)))).argmax(1)  # by Gumbel's trick

        def log_probs(values: Any) -> Any:
            return (values - np.log(np.exp(values).sum(1, keepdims=True)))[np.arange(len(values)), sampled]

        found = logit_noise(log_probs(logits), log_probs(logits + random.normal(0, size, logits.shape)))
        assert found is not None
        low, high = found.logit_noise
        assert low * 0.97 < size < high * 1.03

    def test_certain_tokens_ask_for_nothing(self) -> None:
        assert logit_noise(np.zeros(4), np.zeros(4)) is None
        assert logit_noise(np.zeros(0), np.zeros(0)) is None

    def test_layers_are_held_against_the_dump(self) -> None:
        [bad] = read_layers(str(REPORTS / "sglang" / "error_from_layer" / "report.jsonl"))
        [clean] = read_layers(str(REPORTS / "sglang" / "clean" / "report.jsonl"))
        [slime] = read_layers(str(REPORTS / "slime" / "error_from_layer" / "layerwise.json"))
        large = logit_noise(np.full(100, -1.0), np.full(100, -1.5))
        assert large is not None
        assert "as models have" in held_against(bad, large)
        assert "another cause beside" in held_against(clean, large)
        assert "not relative" in held_against(slime, large)


def test_the_growth_over_the_layers_is_drawn() -> None:
    [report] = read_layers(str(REPORTS / "sglang" / "error_from_layer" / "report.jsonl"))
    figure = layers_figure(report, "growth")
    assert report.next is not None and r"layers\.(2|3)\." in report.next and "--replay" in report.next
    assert figure is not None and "part at layer 3" in figure.title and "layer 3" in figure.alt
    assert figure.data.rows == tuple(report.growth)
    assert "<path" in figure.svg
    assert layers_figure(report.model_copy(update={"growth": report.growth[:1]}), "growth") is None


def records(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (REPORTS / "sglang" / folder / "report.jsonl").read_text().splitlines()]


def read(tmp_path: Path, lines: list[dict[str, Any]]) -> LayerReport:
    file = tmp_path / "comparator_report.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [report] = read_layers(str(file))
    return report


@pytest.mark.parametrize("seed", range(5))
def test_a_report_in_no_order_is_put_in_that_of_its_layers(seed: int, tmp_path: Path) -> None:
    lines = records("error_from_layer")
    report = read(tmp_path, [lines[place] for place in np.random.default_rng(seed).permutation(len(lines))])
    assert place(report) == (0, 3)
    assert report.first_apart is not None and report.first_apart.layer == 3 and report.last_good == 2
    assert "no order of execution" in report.notes[0]


def test_a_pass_backward_and_ranks_one_by_one_are_orders(tmp_path: Path) -> None:
    lines = records("error_from_layer")
    tensors = [line for line in lines if line["type"] == "comparison_tensor"]
    for other in (tensors[::-1], tensors):
        report = read(tmp_path, [*tensors, *other, lines[-1]])
        assert place(report) == (0, 3) and "no order" not in " ".join(report.notes)


def test_the_first_bad_tensor_may_be_missing(tmp_path: Path) -> None:
    lines = records("error_from_layer")
    bad = next(i for i, line in enumerate(lines) if line.get("diff") and not line["diff"]["passed"])
    report = read(tmp_path, lines[:bad] + lines[bad + 1 :])
    assert (place(report), report.last_good) == ((0, 3), 2)


@pytest.mark.parametrize(
    "name",
    ["model.layers.3.mlp", "transformer.h.3.attn", "blk.3.ffn", "model.layers[3].mlp", "layer3.attn", "blocks_3.mlp",
     "Module.module.decoder.layers.3.mlp.ColumnParallelLinear.forward.0"],
)  # fmt: skip
def test_layers_are_spelled_in_many_ways(name: str) -> None:
    assert layer_in(name) == 3
    assert layer_in("layernorm.3") is None and layer_in("player3.x") is None
