"""Reports of layer-wise comparators: the first bad layer of real reports, and errors for broken reports."""

import csv
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatchctl.diagnosis.layer_reports import (
    COMPARE_COMMAND,
    LayerReport,
    compare_with_noise,
    estimate_logit_noise,
    parse_layer,
    plan_first_comparison,
    read_layers,
)
from mismatchctl.errors import DataError
from mismatchctl.report.figures.distributions import layers_figure
from tests.paths import FIXTURES

REPORTS = FIXTURES / "framework_dumps" / "comparators"
CASES = json.loads((REPORTS / "labels.json").read_text())["cases"]


def place(report: LayerReport) -> tuple[int | None, int | None]:
    bad = report.first_bad
    return (None, None) if bad is None else (bad.step, bad.layer)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
def test_the_injected_layer_is_the_first_bad_layer(case: dict[str, Any]) -> None:
    [report] = read_layers(str(REPORTS / case["file"]))
    injected = case.get("true_first_bad_layer", case["first_bad_layer"])
    apart = report.first_apart.layer if report.first_apart else None
    shown = [layer for layer in (place(report)[1], apart) if layer is not None]
    if "selected_layers" in case["file"]:
        assert min(shown) == case["first_bad_layer"]
        assert any(f"layers {injected}" in note for note in report.notes)
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
def test_printed_reports_of_slime_match_its_json(case: dict[str, Any]) -> None:
    [printed], [written] = read_layers(str(REPORTS / case["stdout"])), read_layers(str(REPORTS / case["file"]))
    assert [layer for layer, _ in printed.growth] == [layer for layer, _ in written.growth]
    if case["first_bad_layer"] is not None:
        assert printed.first_bad is not None
        assert printed.first_bad.layer == case["first_bad_layer"]


def test_folders_contain_reports_of_all_ranks() -> None:
    reports = read_layers(str(REPORTS / "msprobe" / "diff_analyze"))
    found = [(report.rank, report.first_bad and report.first_bad.layer) for report in reports]
    assert found == [("0", None), ("1", 3), ("1", 3)]


def test_missing_parts_of_a_report_are_named() -> None:
    [report] = read_layers(str(REPORTS / "sglang" / "mixed_records" / "report.jsonl"))
    said = " ".join(report.notes)
    for word in ("attn_output of layer 1 was not compared", "bad_dims could not be compared", "config_note differs"):
        assert word in said
    [report] = read_layers(str(REPORTS / "msprobe" / "statistics_unmatched" / "compare_result_20260822000000.csv"))
    assert "layers.6" in report.notes[0]
    assert "missing on the golden side" in report.notes[0]


def test_truncated_reports_are_noted(tmp_path: Path) -> None:
    text = (REPORTS / "sglang" / "error_from_layer" / "report.jsonl").read_text()
    cut = tmp_path / "comparator_report.jsonl"
    cut.write_text(text[: len(text) * 3 // 4])
    [report] = read_layers(str(cut))
    assert place(report) == (0, 3)
    assert "truncated" in " ".join(report.notes)


def test_differences_below_the_tolerance_are_located(tmp_path: Path) -> None:
    """Each layer but one has noise of one size. The other layer is found at any place."""
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
def test_other_files_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"report{'.csv' if 'CSV' in name else '.jsonl'}"
    file.write_bytes(HOSTILE[name])
    with pytest.raises(DataError, match=str(file)):
        read_layers(str(file))


def test_pipes_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.jsonl")
    with pytest.raises(DataError, match="regular file"):
        read_layers(str(tmp_path / "report.jsonl"))


def test_odd_values_are_not_read_as_numbers(tmp_path: Path) -> None:
    file = tmp_path / "layerwise.json"
    layers = {"0": {"tokens": 9, "max_abs": 0.0, "mean_abs": 0.0}, "1": {"tokens": 9, "max_abs": "x"}, "x": 3, "2": []}
    file.write_text(json.dumps({"max_hidden_diff": 1e-7, "layers": layers}))
    [report] = read_layers(str(file))
    assert report.tensors == 2
    assert place(report) == (None, 1)


class TestNoise:
    """The noise of the logits that the log ratios imply, for logits with known noise."""

    @pytest.mark.parametrize("size", [0.003, 0.05])
    def test_logit_noise_is_estimated(self, size: float) -> None:
        random = np.random.default_rng(7)
        logits = random.normal(0, 2, (20_000, 50))
        sampled = (logits - np.log(-np.log(random.uniform(size=logits.shape)))).argmax(1)  # by Gumbel's trick

        def log_probs(values: Any) -> Any:
            return (values - np.log(np.exp(values).sum(1, keepdims=True)))[np.arange(len(values)), sampled]

        found = estimate_logit_noise(log_probs(logits), log_probs(logits + random.normal(0, size, logits.shape)))
        assert found is not None
        low, high = found.logit_noise
        assert low * 0.97 < size < high * 1.03

    def test_certain_tokens_give_no_noise_estimate(self) -> None:
        assert estimate_logit_noise(np.zeros(4), np.zeros(4)) is None
        assert estimate_logit_noise(np.zeros(0), np.zeros(0)) is None

    def test_layer_reports_are_compared_with_the_dump(self) -> None:
        [bad] = read_layers(str(REPORTS / "sglang" / "error_from_layer" / "report.jsonl"))
        [clean] = read_layers(str(REPORTS / "sglang" / "clean" / "report.jsonl"))
        [slime] = read_layers(str(REPORTS / "slime" / "error_from_layer" / "layerwise.json"))
        large = estimate_logit_noise(np.full(100, -1.0), np.full(100, -1.5))
        assert large is not None
        assert "usual in language models" in compare_with_noise(bad, large)
        assert "a second cause" in compare_with_noise(clean, large)
        assert "not relative" in compare_with_noise(slime, large)


def test_growth_over_layers_is_drawn() -> None:
    [report] = read_layers(str(REPORTS / "sglang" / "error_from_layer" / "report.jsonl"))
    figure = layers_figure(report, "growth")
    assert report.next is not None and r"layers\.(2|3)\." in report.next and "--replay" in report.next
    assert figure is not None and "differ from layer 3" in figure.title and "layer 3" in figure.alt
    assert figure.table()[1] == [[layer, value] for layer, value in report.growth]
    assert [line.at for line in figure.rules] == [3.0]
    assert layers_figure(report.model_copy(update={"growth": report.growth[:1]}), "growth") is None


def records(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (REPORTS / "sglang" / folder / "report.jsonl").read_text().splitlines()]


def read(tmp_path: Path, lines: list[dict[str, Any]]) -> LayerReport:
    file = tmp_path / "comparator_report.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [report] = read_layers(str(file))
    return report


@pytest.mark.parametrize("seed", range(5))
def test_unordered_reports_are_sorted_by_layer(seed: int, tmp_path: Path) -> None:
    lines = records("error_from_layer")
    report = read(tmp_path, [lines[place] for place in np.random.default_rng(seed).permutation(len(lines))])
    assert place(report) == (0, 3)
    assert report.first_apart is not None and report.first_apart.layer == 3 and report.last_good == 2
    assert "not in order of execution" in report.notes[0]


def test_backward_passes_and_ranks_keep_their_order(tmp_path: Path) -> None:
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
def test_layer_names_are_parsed(name: str) -> None:
    assert parse_layer(name) == 3
    assert parse_layer("layernorm.3") is None and parse_layer("player3.x") is None


FORWARD = [(f"model.layers.{k}.{part}", k) for k in range(6) for part in ("self_attn.output", "mlp.output")]


def tensors(names: list[tuple[str, int]], bad: set[int]) -> list[dict[str, Any]]:
    def diff(layer: int) -> dict[str, Any]:
        return {"rel_diff": 0.1 if layer in bad else 1e-12, "predicate": "rel <= 0.001", "passed": layer not in bad}

    lines = [{"type": "comparison_tensor", "name": name, "location": {"step": 0}, "diff": diff(k)} for name, k in names]
    return [{"type": "config", "config": {}}, *lines, {"type": "summary", "total": len(lines)}]


def test_reversed_forward_passes_are_reordered(tmp_path: Path) -> None:
    report = read(tmp_path, tensors(FORWARD[::-1], {3, 4, 5}))
    assert (place(report), report.last_good) == ((0, 3), 2)
    assert report.first_bad is not None and "self_attn" in report.first_bad.name
    assert "read from its end" in report.notes[0]


@pytest.mark.parametrize("inside", ["reversed", "kept", "shuffled"])
def test_tensors_without_a_layer_come_first_or_last(inside: str, tmp_path: Path) -> None:
    names = [("model.embed_tokens", -1), *FORWARD, ("model.norm", 6), ("lm_head", 6), ("logits.forward", 6)]
    if inside == "shuffled":
        names = [names[place] for place in np.random.default_rng(1).permutation(len(names))]
    else:
        names = names[::-1] if inside == "reversed" else sorted(names, key=lambda row: -row[1])
    report = read(tmp_path, tensors(names, {3, 4, 5, 6}))
    assert (place(report), report.last_good) == ((0, 3), 2)
    assert report.first_bad is not None and "layers.3" in report.first_bad.name


def test_a_step_without_layers_can_come_first(tmp_path: Path) -> None:
    lines = tensors([("input_embeds", -1), *[(f"model.layers.{k}.mlp", k) for k in range(5, -1, -1)]], {3, 4, 5})
    for line in lines[2:-1]:
        line["location"] = {"step": 1}
    report = read(tmp_path, lines)
    assert report.last_good == 2 and report.first_bad is not None and "layers.3" in report.first_bad.name


def test_backward_passes_are_recognized(tmp_path: Path) -> None:
    named = [(f"grad__{name}", layer) for name, layer in FORWARD[::-1]]
    report = read(tmp_path, tensors(named, {0, 1, 2}))
    assert (place(report), report.last_good) == ((0, 2), 3) and "a backward pass" in report.notes[0]


MSPROBE = "msprobe/statistics_error_from_layer/compare_result_20260822000000.csv"


def respelled(text: str) -> dict[str, tuple[str, str]]:
    """Return the same report in the forms of other versions and spreadsheets, as name -> (file name, text)."""
    rows = list(csv.DictReader(io.StringIO(text)))
    head, _, body = text.partition("\n")
    named = {"NPU": "Target", "Bench": "Golden"}
    called = head
    for ours, theirs in named.items():
        called = called.replace(f"{ours} ", f"{theirs} ")
    columns = [*rows[0]]
    tables = {}
    for name, separator in (("semicolons", ";"), ("tabs", "\t")):
        out = io.StringIO()
        writer = csv.DictWriter(out, columns, delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
        tables[name] = ("report.csv", out.getvalue())
    shuffled = io.StringIO()
    writer = csv.DictWriter(shuffled, columns[::-1], lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return tables | {
        "a byte order mark": ("report.csv", "\ufeff" + text),
        "other sides": ("report.csv", f"{called}\n{body}"),
        "small letters": ("report.csv", f"{head.lower().replace(' ', '_')}\n{body}"),
        "capitals": ("REPORT.CSV", text.replace(",warning,", ",Warning,").replace(",error,", ",ERROR,")),
        "other order of columns": ("report.csv", shuffled.getvalue()),
        "rows of JSON": ("report.json", json.dumps(rows)),
        "JSON lines": ("report.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
    }


@pytest.mark.parametrize("name", respelled("NPU Name,Bench Name\na,b\n"))
def test_msprobe_spellings_are_read(name: str, tmp_path: Path) -> None:
    [expected] = read_layers(str(REPORTS / MSPROBE))
    file, text = respelled((REPORTS / MSPROBE).read_text())[name]
    (tmp_path / file).write_text(text, newline="")
    for path in (tmp_path / file, tmp_path):
        [report] = read_layers(str(path))
        assert report.model_copy(update={"file": expected.file}) == expected


@pytest.mark.parametrize("rounded", [False, True])
def test_different_weights_are_named_before_activations(rounded: bool, tmp_path: Path) -> None:
    """Activations differ by growing bfloat16 noise. All weights but one are equal or rounded."""
    rows, random = list(csv.DictReader(io.StringIO((REPORTS / MSPROBE).read_text()))), np.random.default_rng(5)
    for other in (False, True):
        for row in rows:
            weight = ".parameters." in row["NPU Name"]
            size = (1e-5 * rounded if weight else 0.004) * random.uniform(0.5, 2)
            if other and row["NPU Name"] == "Module.layers.1.mlp.Linear.forward.0.parameters.weight":
                size = 0.05
            row |= {"NormRelativeErr": f"{100 * size}%" if size else "0", "MaxRelativeErr": "0", "MinRelativeErr": "0"}
            row |= {"Result": "pass", "Err_message": "[]"}
        with (tmp_path / "report.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
        [report] = read_layers(str(tmp_path / "report.csv"))
        assert report.first_bad is None
        if not other:
            assert report.first_apart is None
            continue
        assert report.first_apart is not None and report.next is not None
        assert (report.first_apart.layer, report.last_good) == (1, 0)
        assert report.first_apart.name.endswith("layers.1.mlp.Linear.forward.0.parameters.weight")
        assert report.first_apart.value == pytest.approx(0.05)
        assert "most weights agree" in report.first_apart.why


def test_parts_of_a_report_are_merged(tmp_path: Path) -> None:
    [expected] = read_layers(str(REPORTS / MSPROBE))
    head, *rows = (REPORTS / MSPROBE).read_text().splitlines(keepends=True)
    for part in range(3):
        text = head + "".join(rows[part * len(rows) // 3 : (part + 1) * len(rows) // 3])
        (tmp_path / f"compare_result_20260822000000_part_{part}.csv").write_text(text)
    [report] = read_layers(str(tmp_path))
    assert (report.first_bad, report.first_apart, report.tensors) == (
        expected.first_bad, expected.first_apart, expected.tensors,
    )  # fmt: skip


def test_msprobe_versions_without_a_result_column_are_read(tmp_path: Path) -> None:
    file = tmp_path / "compare.csv"
    lines = [f"Module.layers.{k}.mlp.forward.0.output.0," * 2 + ("No" if k > 2 else "Yes") for k in range(6)]
    file.write_text("\n".join(["NPU Name,Bench Name,Accuracy Reached or Not", *lines]))
    [report] = read_layers(str(file))
    assert place(report) == (None, 3)


def test_parts_of_other_ranks_and_files_stay_separate(tmp_path: Path) -> None:
    text = (REPORTS / MSPROBE).read_text()
    for name in ("a_part_1.csv", "a_part_2.csv", "b_part_1.csv", "a_part_1.tsv"):
        (tmp_path / name).write_text(text)
    assert len(read_layers(str(tmp_path))) == 3


def test_the_reason_belongs_to_the_failure(tmp_path: Path) -> None:
    file = tmp_path / "compare.csv"
    lines = [f"Module.layers.{k}.mlp.forward.0.output.0," * 2 + "No,pass" for k in range(3)]
    file.write_text("\n".join(["NPU Name,Bench Name,Accuracy Reached or Not,Result", *lines]))
    [report] = read_layers(str(file))
    assert report.first_bad is not None and report.first_bad.why == "accuracy not reached"


def test_binary_files_are_skipped_in_folders_and_refused_alone(tmp_path: Path) -> None:
    (tmp_path / "a.out").write_bytes(b"\x7fELF\xff\xfe")
    (tmp_path / "b.csv").write_text((REPORTS / MSPROBE).read_text())
    assert len(read_layers(str(tmp_path))) == 1
    with pytest.raises(DataError, match="not a text file in UTF-8"):
        read_layers(str(tmp_path / "a.out"))


def test_extra_fields_of_a_logger_are_ignored(tmp_path: Path) -> None:
    line = "iter 3 layer={} tokens=2 max_abs=0.5 mean_abs=0.1 next-layer=foo layer=x\n"
    (tmp_path / "layers.log").write_text(line.format(0) + line.format(1))
    [report] = read_layers(str(tmp_path / "layers.log"))
    assert report.tensors == 2


def test_spreadsheets_are_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "compare_result.xlsx").write_bytes(b"PK\x03\x04")
    for path in (tmp_path, tmp_path / "compare_result.xlsx"):
        with pytest.raises(DataError, match="as CSV"):
            read_layers(str(path))


def test_sglang_logs_arrays_and_later_versions_are_read(tmp_path: Path) -> None:
    lines = records("error_from_layer")
    [expected] = read_layers(str(REPORTS / "sglang" / "error_from_layer" / "report.jsonl"))
    texts = {
        "log.txt": "".join(f"INFO 12:00 {n}\n{json.dumps(line)}\n" for n, line in enumerate(lines)),
        "report.json": json.dumps(lines),
        "indented.json": json.dumps(lines, indent=2),
        "odd.jsonl": "".join(json.dumps(line) + "\n" for line in [*lines, {"type": []}, {"type": {}}]),
        "later.jsonl": "".join(json.dumps(line) + "\n" for line in [*lines, {"type": "timing", "seconds": 3}]),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        [report] = read_layers(str(tmp_path / name))
        assert (report.first_bad, report.first_apart, report.growth) == (
            expected.first_bad, expected.first_apart, expected.growth,
        )  # fmt: skip
        assert not any("truncated" in note for note in report.notes)
    assert "'timing' is an unknown type of record" in " ".join(report.notes)


def test_slime_logs_and_other_keys_are_read(tmp_path: Path) -> None:
    folder = REPORTS / "slime" / "error_from_layer"
    [expected] = read_layers(str(folder / "layerwise.json"))
    document = json.loads((folder / "layerwise.json").read_text())
    renamed = document | {"layers": {f"layer_{key}": found for key, found in document["layers"].items()}}
    (tmp_path / "renamed.json").write_text(json.dumps(renamed))
    [report] = read_layers(str(tmp_path / "renamed.json"))
    assert report.growth == expected.growth and report.first_bad == expected.first_bad
    printed = (folder / "stdout.txt").read_text()
    logged = "".join(f"[2026-08-22 rank0] {line}\n" for line in printed.splitlines())
    swapped = "\n".join(
        " ".join([line.split()[0], *line.split()[:0:-1]]) if line.startswith("layer=") else line
        for line in printed.splitlines()
    )
    for text in (logged, swapped):
        (tmp_path / "out.log").write_text(text)
        [report] = read_layers(str(tmp_path / "out.log"))
        assert [layer for layer, _ in report.growth] == [layer for layer, _ in expected.growth]
        assert place(report) == place(expected)


def test_miles_logs_are_read(tmp_path: Path) -> None:
    text = (REPORTS / "miles" / "logprob_fail" / "stdout.txt").read_text()
    [expected] = read_layers(str(REPORTS / "miles" / "logprob_fail" / "stdout.txt"))
    (tmp_path / "out.log").write_text("".join(f"(worker pid=3) {line}\n" for line in text.splitlines()))
    [report] = read_layers(str(tmp_path / "out.log"))
    assert (report.first_bad, report.notes) == (expected.first_bad, expected.notes)


TOOLS = {
    "sglang/error_from_layer/report.jsonl": (
        """DUMPER_FILTER='layer_id in [2, 3] or search(r"layers\\.(2|3)\\.", name)'""", "comparator --baseline-path"
    ),
    "slime/error_from_layer/layerwise.json": ("--layers 2 3 ", "glm52_layerwise_comparator.py"),
    MSPROBE: ('"list": ["layers.2.", "layers.3."]', "msprobe compare -tp TARGET/stepN -gp GOLDEN/stepN -o OUT"),
    "miles/logprob_fail/stdout.txt": ("DUMPER_NON_INTRUSIVE_MODE=all`", "comparator --baseline-path"),
}  # fmt: skip


@pytest.mark.parametrize("file", TOOLS)
def test_the_next_comparison_uses_the_syntax_of_the_tool(file: str) -> None:
    [report] = read_layers(str(REPORTS / file))
    assert report.next is not None and all(words in report.next for words in (*TOOLS[file], "--replay worst.jsonl"))


def test_filters_select_only_the_named_layers() -> None:
    """The expression is evaluated with the names that the dumper provides."""
    [report] = read_layers(str(REPORTS / "sglang" / "error_from_layer" / "report.jsonl"))
    assert report.next is not None
    expression = report.next.partition("DUMPER_FILTER='")[2].partition("'")[0]
    for layer in (1, 2, 3, 4, 20, 32):
        for tags in (
            {"layer_id": layer, "name": "mlp_output"},
            {"layer_id": None, "name": f"model.layers.{layer}.mlp"},
        ):
            assert bool(eval(expression, {"search": re.search, **tags})) is (layer in (2, 3))


def test_clean_reports_need_no_further_comparison() -> None:
    for clean in ("sglang/clean/report.jsonl", "miles/logprob_pass/stdout.txt"):
        assert read_layers(str(REPORTS / clean))[0].next is None


def test_the_first_comparison_is_planned_from_the_dump() -> None:
    said = {step.name: step for step in plan_first_comparison("rollout", in_layers=False)}
    assert list(said) == ["replay", "hook", "compare", "msprobe", "read"]
    assert "the engine, and the checkpoint in float32" in said["hook"].text
    assert said["compare"].commands == [COMPARE_COMMAND]
    assert all(command in step.text for step in said.values() for command in step.commands)
    assert plan_first_comparison(None, in_layers=False) == [] == plan_first_comparison("none", in_layers=True)
    assert "the engine and the trainer" in plan_first_comparison(None, in_layers=True)[1].text
