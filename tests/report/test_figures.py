"""Figures: numbers of the Result, CSV, JSON of the page, and drawings of matplotlib."""

import csv
import io
import json
import math
import subprocess
import sys
from itertools import chain, pairwise

import matplotlib
import numpy as np
import pyarrow.parquet as pq
import pytest

import mismatchctl as mm
from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.frameworks.registry import find_preset, load_presets
from mismatchctl.report.figures.figure import (
    MAX_SCREEN_POINTS,
    Axis,
    Figure,
    Marks,
    StepAxis,
    change_axis,
    page_data,
    rows_figure,
)
from mismatchctl.report.figures.matplotlib_backend import draw_with_matplotlib, figure_content
from mismatchctl.report.figures.runs import corrections_figure, k3_figure, run_figures
from mismatchctl.report.html import script_json
from mismatchctl.results.model import RunResult, Series
from mismatchctl.results.summary import get_summary, summarize_run
from tests.factories.results import HOSTILE, make_corrections, make_result
from tests.paths import ROOT, SAMPLE_DATA


@pytest.fixture(scope="module")
def run() -> RunResult:
    return make_result().runs["run-a"]


@pytest.fixture(scope="module")
def figures(run: RunResult) -> dict[str, Figure]:
    return {figure.name: figure for figure in chain(*run_figures(run).values())}


def _line(values: list[float]) -> Figure:
    mark = Marks("line", "K3", list(range(len(values))), values)
    return Figure("k3", "K3", "", Axis("step"), Axis("K3"), (mark,))


def test_every_figure_has_a_title_axes_and_data(figures: dict[str, Figure]) -> None:
    assert len(figures) > 15
    for figure in figures.values():
        assert figure.title and len(figure.alt) > 20, figure.name
        assert figure.x.label and (figure.y.label or figure.y.scale == "band"), figure.name
        heads, rows = figure.table()
        assert rows and all(len(row) == len(heads) for row in rows), figure.name
        assert len(list(csv.reader(io.StringIO(figure.csv())))) == len(rows) + 1


def test_figures_contain_the_numbers_of_the_result(run: RunResult, figures: dict[str, Figure]) -> None:
    heads, rows = figures["k3"].table()
    assert heads[:2] == ["step", "K3 (nats/token)"]
    assert [row[1] for row in rows] == run.groups.metrics["k3"].value
    k3, errors = run.groups.metrics["k3"].value, run.groups.metrics["k3"].se
    assert errors is not None
    for row, value, se in zip(rows, k3, errors, strict=True):
        assert row[2:] == [
            pytest.approx((value or 0) - 1.96 * (se or 0), rel=1e-3),
            pytest.approx((value or 0) + 1.96 * (se or 0), rel=1e-3),
        ]
    position = figures["k3_by_position"].table()[1]
    assert [row[2] for row in position] == run.breakdowns["position"].k3
    surprisal = figures["k3_by_surprisal"]  # its mirrored axis has no values
    heads, rows = surprisal.table()
    assert heads[0] == "rollout probability of the token"
    assert [row[0] for row in rows] == list(surprisal.marks[0].labels)
    edges, tokens = np.array(run.distribution.edges), np.array(run.distribution.tokens)
    stairs = figures["distribution"].marks[0]
    widths = np.diff([float(x or 0) for x in stairs.x])
    shares = np.array([float(y or 0) for y in stairs.y]) * widths
    assert shares.sum() == pytest.approx(1.0, rel=1e-3)
    assert (stairs.x[0], stairs.x[-1]) == (edges[0], edges[-1]) and tokens.sum() > 0
    for name in ("rejected_tokens", "weight_mean", "loss_scale"):
        shown = {mark.name: mark.y for mark in figures[f"over-{name}"].marks}
        expected = {key: found[name].value for key, found in run.groups.corrections.items()}
        assert shown == {key: values for key, values in expected.items() if any(v is not None for v in values)}, name


def test_the_onset_and_its_interval_are_drawn() -> None:
    result = make_result(steps=tuple(range(40)))
    run = result.runs["run-a"]
    growth = summarize_run(run).growth
    assert growth.changed and growth.onset_interval is not None
    figure = k3_figure({"run-a": run}, "k3")
    assert figure is not None
    (onset,) = [rule for rule in figure.rules if rule.axis == "x"]
    assert (onset.at, onset.interval) == (growth.onset, growth.onset_interval)
    assert {rule.interval for rule in figure.rules if rule.style == "usual"} == {(1e-5, 1e-3), (1e-3, 0.1)}
    assert (figure.x.limits, figure.y.scale) == ((0.0, 39.0), "log")


def test_each_line_has_its_own_limit(run: RunResult) -> None:
    """A k-hat between the two limits is fine for tokens and too large for sequences."""
    count = len(run.groups.labels)
    khat = {"khat_token": 0.5, "khat_token_limit": 0.7, "khat_sequence": 0.5, "khat_sequence_limit": 0.336}
    metrics = run.groups.metrics | {key: Series(value=[value] * count) for key, value in khat.items()}
    between = run.model_copy(update={"groups": run.groups.model_copy(update={"metrics": metrics})})
    figure = next(figure for figure in chain(*run_figures(between).values()) if figure.name == "khat")
    assert figure.title == f"Pareto k-hat is above its limit in {count} of {count} steps (sequences)"
    rows = figure.table()[1]
    assert [value for _, step, value in rows if step == rows[0][1]] == [0.5, 0.7, 0.5, 0.336]


def test_titles_without_a_message_are_the_subject(figures: dict[str, Figure]) -> None:
    for key, subject in (("ppl", "Perplexity"), ("chi2", "Chi-square"), ("over-loss_scale", "Loss scale")):
        assert figures[f"{key}"].title == subject


def test_long_series_keep_their_extremes() -> None:
    values = np.random.default_rng(1).random(10_000)
    values[[4000, 7000]] = 9.0, -9.0
    x, y = page_data([_line(values.tolist())])["columns"]
    assert len(y) <= MAX_SCREEN_POINTS + 2
    assert {9.0, -9.0} <= set(y) and (x[0], x[-1]) == (0, 9999)
    assert [values[place] for place in x] == pytest.approx(y, rel=1e-3)
    assert page_data([_line([math.nan] * 2000)])["columns"][0][0] == 0


def test_page_data_is_compact_and_strict() -> None:
    line = _line([1.0, 1.23456789e-5, math.nan, math.inf])
    data = json.loads(script_json(page_data([line, line])))
    assert data["columns"] == [[0, 1, 2, 3], [1, 1.235e-5, None, None]]  # shared by both figures
    assert [figure["marks"][0]["y"] for figure in data["figures"]] == [1, 1]
    hostile = Figure(
        "x",
        HOSTILE[3],
        "",
        Axis(HOSTILE[4]),
        Axis("y"),
        (Marks("dots", HOSTILE[0], [1], [2], labels=[HOSTILE[3]]),),
    )
    assert not set("\x1b\u202e\x07") & set(script_json(page_data([hostile])))


def test_text_steps_are_labels(figures: dict[str, Figure]) -> None:
    axis = StepAxis(["a", None, "b"])
    assert axis.place_of == {"a": 0, "(none)": 1, "b": 2}
    assert (axis.places, axis.axis.named) == ([0, 1, 2], True)
    assert [name for _, name in axis.axis.ticks] == axis.names
    assert StepAxis([3, 1, 2]).numeric is False and StepAxis([1, 5]).axis.limits == (1.0, 5.0)


@pytest.mark.slow
def test_matplotlib_draws_every_mark(figures: dict[str, Figure]) -> None:
    for figure in figures.values():
        with draw_with_matplotlib(figure) as canvas:
            axes = canvas.axes[0]
            scales = {"band": "linear"}
            assert axes.get_xscale() == scales.get(figure.x.scale, figure.x.scale), figure.name
            lines = [mark for mark in figure.marks if mark.kind in ("line", "dots")]
            drawn = {line.get_label(): line for line in axes.lines}
            for mark in lines:
                found = np.asarray(drawn[mark.name].get_ydata(), np.float64)
                if figure.y.scale != "band":
                    expected = np.array([math.nan if y is None else y for y in mark.y], np.float64)
                    assert np.array_equal(found, expected, equal_nan=True), (figure.name, mark.name)


@pytest.mark.slow
def test_the_same_figure_gives_the_same_bytes(run: RunResult, figures: dict[str, Figure]) -> None:
    again = {figure.name: figure for figure in chain(*run_figures(run).values())}
    for name in ("k3", "joint", "corrections"):
        for kind in ("svg", "png", "pdf"):
            assert figure_content(again[name], kind) == figure_content(figures[name], kind)
            assert b"mismatchctl" in figure_content(again[name], kind)


def test_user_settings_of_matplotlib_do_not_change_figures(run: RunResult, figures: dict[str, Figure]) -> None:
    plain = figure_content(figures["ppl"], "svg")
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9}):
        assert figure_content(figures["ppl"], "svg") == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_csv_text_is_not_a_formula() -> None:
    figure = Figure("x", "t", "", Axis("x"), Axis("y"), (Marks("dots", "=1+1", [1.0], [2.0], labels=['=a"b']),))
    assert figure.csv() == 'name,x,y\n"\'=a""b",1,2\n'


def test_plot_returns_a_matplotlib_figure(run: RunResult) -> None:
    figure = run.plot("k3_by_position")
    assert isinstance(figure, matplotlib.figure.Figure)
    assert figure.axes[0].get_yscale() == "log"
    assert run.plot("k3") is not run.plot("k3")


def test_forty_corrections_fit_in_a_figure() -> None:
    run = make_result(corrections=make_corrections(40)).runs["run-a"]
    figures = {figure.name: figure for figure in chain(*run_figures(run).values())}
    assert len(figures["over-loss_scale"].marks) == 12
    assert figures["over-loss_scale"].title == "Loss scale (first 12 corrections)"
    assert len(figures["corrections"].marks[0].y) == 40
    assert get_summary(run).growth.changed


@pytest.mark.process
def test_pages_do_not_import_matplotlib() -> None:
    code = """
import sys
from tests.factories.results import make_result
from mismatchctl.report.pages import analyze
from mismatchctl.report.html import render_html
assert "<figure" in render_html(analyze.document(make_result()))
print("matplotlib" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False"]


def test_control_characters_in_csv_labels_are_escaped() -> None:
    hostile = "a\r=HYPERLINK(1)\n\x1b[2J\x07"
    mark = Marks("dots", "", [hostile, "=1", "plain"], [1.0, 2.0, 3.0])
    text = Figure("x", "t", "", Axis("label"), Axis("value"), (mark,)).csv()
    rows = list(csv.reader(io.StringIO(text, newline="")))
    shown = "a\r'=HYPERLINK(1)\n\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}"
    assert rows[1:] == [[shown, "1"], ["'=1", "2"], ["plain", "3"]]
    assert text.count('"') == 2 and not set(text) & {"\x1b", "\x07"}


@pytest.mark.parametrize("count", [0, 2])
def test_reward_over_steps_does_not_depend_on_corrections(count: int) -> None:
    corrections = make_corrections(5)[2 : 2 + count]  # each correction rejects some tokens
    run = analyze([str(SAMPLE_DATA / "moe")], corrections).runs["moe"]
    figure = next(figure for figure in chain(*run_figures(run).values()) if figure.name == "reward")
    files = sorted((SAMPLE_DATA / "moe").glob("*.parquet"))
    expected = [float(np.mean(pq.read_table(file, columns=["reward"])["reward"].to_numpy())) for file in files]
    assert list(figure.marks[0].y) == pytest.approx(expected, rel=1e-6)
    assert run.overall.metrics["reward_mean"].value == pytest.approx(np.mean(expected), rel=1e-6)


def test_large_changes_have_an_axis_by_factors() -> None:
    small, large = (change_axis("change", {"run": {"K3": (0.5, -0.2, high)}}) for high in (1.2, 1500.0))
    assert (small.scale, small.ticks) == ("linear", ())
    assert large.scale == "symlog" and large.limits is not None and large.limits[1] > 1500
    assert large.ticks == ((0.0, "0%"), (1.0, "+100%"), (9.0, "10x"), (99.0, "100x"), (999.0, "1,000x"))


def test_similar_names_stay_separate_rows() -> None:
    names = {f"{'x' * 70}{end}": (1.0, None, None) for end in "ab"}
    figure = rows_figure("f", "t", "", Axis("x"), {"one": names, "two": {}})
    assert figure is not None and rows_figure("f", "t", "", Axis("x"), {"one": {}}) is None
    assert len(figure.marks) == 1 and len(set(figure.marks[0].y)) == 2


def test_presets_and_their_pareto_front_are_drawn() -> None:
    """Rejected shares and the remaining K3 are computed again from the file's columns."""
    every = [preset.correction for preset in load_presets().values()]
    run = analyze([str(SAMPLE_DATA / "moe")], [find_preset("geo_rs")], presets=every).runs["moe"]
    assert "skyrl-icepop" in run.presets and "areal-m2po" not in run.presets  # needs the whole step
    columns = ["train_log_probs", "rollout_log_probs", "response_mask"]
    tables = [pq.read_table(file, columns=columns) for file in sorted((SAMPLE_DATA / "moe").glob("*.parquet"))]
    responses = [
        (np.array(train) - np.array(rollout))[np.array(mask, bool)]
        for table in tables for train, rollout, mask in zip(*(table[key].to_pylist() for key in columns), strict=True)
    ]  # fmt: skip
    x = np.concatenate(responses)
    k3, sizes = np.expm1(x) - x, [len(own) for own in responses]
    sums = np.repeat([own.sum() for own in responses], sizes)
    worst_k3 = np.repeat([(np.expm1(own) - own).max() for own in responses], sizes)
    for name, kept in {
        "token_tis": x == x, "skyrl-icepop": (np.exp(x) >= 0.5) & (np.exp(x) <= 5),
        "trust-region-mask": worst_k3 <= 0.05, "skyrl-product-mask": np.abs(sums) <= math.log(2),
    }.items():  # fmt: skip
        point = run.presets[name]
        assert point.rejected_tokens == pytest.approx(1 - kept.mean(), abs=1e-6), name
        assert point.k3_kept == pytest.approx(k3[kept].mean(), rel=1e-5), name
    figure = corrections_figure({"moe": run}, "corrections")
    assert figure is not None
    front, *others = figure.marks
    shown = {(a, b) for mark in others for a, b in zip(mark.x, mark.y, strict=True)}
    assert {(point.rejected_tokens, point.k3_kept) for point in run.presets.values() if point.k3_kept} <= shown
    assert all(any(a <= x and b <= y for a, b in zip(front.x, front.y, strict=True)) for x, y in shown)
    assert not any(
        a <= x and b <= y and (a, b) != (x, y) for x, y in zip(front.x, front.y, strict=True) for a, b in shown
    )


def test_corrections_at_the_same_point_share_a_label() -> None:
    dump = [{"rollout_log_probs": [-1.0, -2.0, -3.0 - row], "train_log_probs": [-1.1, -1.9, -3.0]} for row in range(8)]
    names = ["none", "token_tis", "seq_is", {"name": "rejects", "gates": [{"keep": [0.5, 1.5]}]}]
    run = mm.analyze({name: [row[name] for row in dump] for name in dump[0]}, corrections=names).runs
    figure = corrections_figure(run, "corrections")
    assert figure is not None
    assert figure.marks[-1].labels == ["none, token_tis and 1 more", "rejects"]


def test_labels_and_legends_do_not_overlap_in_drawn_figures() -> None:
    names = ["none", "token_tis", "token_is", "seq_is", "same place"]
    points = Marks("dots", "corrections", [0.0] * 4 + [1e-5], [2.0] * 5, labels=names)
    with draw_with_matplotlib(Figure("c", "title", "", Axis("x", limits=(0.0, 1.0)), Axis("y"), (points,))) as canvas:
        canvas.draw_without_rendering()
        boxes = {text.get_text(): text.get_window_extent() for text in canvas.axes[0].texts}
    assert list(boxes) == names
    assert all(box.count_overlaps([one for one in boxes.values() if one is not box]) == 0 for box in boxes.values())

    parts = {f"step {step}": (1e-4 * step, -5e-4, 5e-4) for step in range(9)}
    figure = rows_figure("r", "title", "", Axis("contribution"), {"whole": parts, "level": parts})
    assert figure is not None
    with draw_with_matplotlib(figure) as canvas:
        canvas.draw_without_rendering()
        (legend,), axes = canvas.legends, canvas.axes[0]
        assert not legend.get_window_extent().overlaps(axes.bbox)
        ticks = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in pairwise(ticks))
