"""The summary in the terminal fits its width, is complete, and escapes text from a dump."""

import io
import re
from functools import cache
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from mismatchctl.report.document import EVERYWHERE, Column, Document, Facts, Headline, Section, Table, alarms
from mismatchctl.report.pages.analyze import document
from mismatchctl.report.terminal import MAX_LINES, TerminalWriter, break_name, print_document
from mismatchctl.results.model import Result, Value
from tests.factories.results import HOSTILE, make_corrections, make_result

WIDTHS = (80, 140)
RUNS = [f"{kind}_run_with_a_rather_long_name_number_{index}" for kind in ("dense", "moe") for index in range(16)]
EVERYTHING: dict[str, dict[str, Any]] = {
    "one run": {},
    "one step": {"steps": [None]},
    "two runs": {"runs": ["dense", "moe"]},
    "32 runs": {"runs": RUNS, "steps": range(4)},
    "12 corrections": {"corrections": make_corrections(12)},
    "32 runs, 12 corrections": {"runs": RUNS, "steps": range(4), "corrections": make_corrections(12)},
    "no corrections": {"corrections": []},
    "hostile": {"runs": HOSTILE[:2], "corrections": make_corrections(5, HOSTILE), "hostile": True},
    "hostile, many": {"runs": HOSTILE, "corrections": make_corrections(5, HOSTILE), "hostile": True},
}


@cache
def everything(what: str) -> Result:
    return make_result(**EVERYTHING[what])


class Page(io.StringIO):
    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


def printed(result: Result, width: int = 140, *, encoding: str = "utf-8", terminal: bool = False) -> str:
    page = Page(encoding)
    console = Console(file=page, width=width, force_terminal=terminal, markup=False, highlight=False)
    print_document(document(result), console)
    return page.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, *WIDTHS])
@pytest.mark.parametrize("what", EVERYTHING)
def test_lines_fit_the_terminal(what: str, width: int) -> None:
    lines = printed(everything(what), width).splitlines()
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("runs", [["dense"], ["dense", "moe"]])
def test_tables_name_their_column_and_run(runs: list[str]) -> None:
    result = make_result(runs=runs)
    assert any(correction.gates for correction in result.corrections) and result.runs["dense"].by
    titles = re.findall(r"By (?!column)(\S+)( on \w+)?", printed(result))
    expected = {(column, f" on {run}" if len(runs) > 1 else "") for run in runs for column in result.runs[run].by}
    assert set(titles) == expected


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("what", ["one run", "two runs", "32 runs", "12 corrections"])
def test_all_runs_and_corrections_are_named(what: str, width: int) -> None:
    result = everything(what)
    text = printed(result, width)
    for correction in result.corrections:
        if correction.weight or correction.gates or len(result.runs) <= 3:
            assert correction.name in text.replace("-\n", "-")
    for number in range(16):
        assert what != "32 runs" or len(re.findall(rf"number_{number}\b", text)) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_every_correction_of_every_run_has_a_row(width: int) -> None:
    result = everything("32 runs, 12 corrections")
    lines = printed(result, width).split("\nCorrections\n")[1].split("\n\n")[0].splitlines()
    heads = " ".join(lines[:2])
    assert "correction" in heads and "K3 left" in heads and "rejected" in heads
    rows = [line.split() for line in lines if line.startswith(("dense_run", "moe_run"))]
    names = [correction.name for correction in result.corrections]
    assert [row[1] for row in rows] == names * 32
    assert all(float(row[-1 if width == 80 else -2]) > 0 for row in rows)
    assert max(map(len, lines)) <= width


def test_numbers_are_not_truncated() -> None:
    text = printed(everything("32 runs"), 80)
    for line in text.splitlines():
        if line.startswith(("dense_run", "moe_run")):
            assert not re.search(r"\d…", line.split(maxsplit=1)[1])


def test_the_summary_of_one_run_is_complete() -> None:
    text = printed(make_result(level=1e-4), 80)
    for part in (
        "run-a: mismatch grew",
        "±",
        "dense model",
        "what to do",
    ):
        assert part in text
    assert re.search(r"rose by a factor of [\d.]+", text)
    assert "z of the mean ratio" in text


def test_undefined_values_are_a_dash_with_a_reason() -> None:
    result = make_result()
    run = result.runs["run-a"]
    run.overall.metrics["k3"] = Value(value=None, status="no valid token")
    run.overall.corrections["geo_rs"]["loss_scale"] = Value(value=None, status="nothing is kept")
    text = printed(result)
    assert "K3 is undefined: no valid token" in text
    assert re.search(r"geo_rs.*–", text)


@pytest.mark.parametrize("what", ["hostile", "hostile, many"])
@pytest.mark.parametrize("terminal", [False, True])
def test_strings_from_dumps_stay_text(what: str, terminal: bool) -> None:
    text = printed(everything(what), terminal=terminal)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", text) if terminal else text
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert "\x1b[31m" not in text


def test_markup_in_names_is_text() -> None:
    assert "[bold]x[/bold]" in printed(make_result(runs=["[bold]x[/bold]"]))


@pytest.mark.slow
@pytest.mark.parametrize("what", EVERYTHING)
def test_ascii_terminals_get_ascii_output(what: str) -> None:
    text = printed(everything(what), 80, encoding="ascii")
    assert text.isascii()
    assert "hostile" in what or "\\u" not in text  # our own signs have ASCII forms, other scripts are escaped
    assert max(map(len, text.splitlines())) <= 80


def test_no_color_disables_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(everything("hostile"), terminal=True)
    codes = {code for found in re.findall(r"\x1b\[([0-9;]*)m", text) for code in found.split(";")}
    assert codes <= {"", "0", "1", "2"}  # bold and dim are not colors


def writer(encoding: str = "utf-8") -> TerminalWriter:
    return TerminalWriter(Console(file=Page(encoding)))


@pytest.mark.parametrize("facts", [1, 12, 30])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_notes_of_a_first_screen_are_whole_or_counted(facts: int, count: int) -> None:
    notes = [f"note {number}: {'the reason and the remedy of this note, ' * 5}end." for number in range(count)]
    rows = [(f"fact{number}", "a fact with a long text, " * 6) for number in range(facts)]
    screen = Document(Headline("title", status="OK")).add(Section("", "a").add(Facts(rows), *alarms(notes)))
    for commands, whole in (([("Next", "mismatchctl help")], False), ([], False), ([("Next", "help")], True)):
        screen.commands, page = commands, Page("utf-8")
        print_document(screen, Console(file=page, width=80), whole=whole)
        lines = page.getvalue().splitlines()
        text = " ".join(" ".join(lines).split())
        shown = sum(f"! {note}" in text for note in notes)
        assert shown == text.count("! note ")
        left = re.search(r"! (\d+) more notes: -v", text)
        assert shown + (int(left[1]) if left else 0) == count
        if whole or not commands:
            assert shown == count
        elif facts <= 12:
            assert len(lines) <= MAX_LINES and (shown or count == 0)


def test_sparklines_follow_the_values() -> None:
    assert writer().sparkline([1e-5, 1e-4, 1e-3]) == "▁▅█"
    assert writer().sparkline([1.0, None, 0.0, 10.0]) == "▁ ▁█"
    assert writer("ascii").sparkline([1e-5, 1e-3]) == "_#"
    assert writer().sparkline([]) == writer().sparkline([None, 0.0]) == ""
    assert len(set(writer().sparkline([1.0, 1.02, 0.99]))) <= 2, "noise is not blown up"
    long = writer().sparkline([1.0] * 500 + [100.0] * 500, 40)
    assert long == "▁" * 20 + "█" * 20


def test_names_are_shortened_in_the_middle() -> None:
    assert writer().shorten("dense_temperature_in_trainer", 13) == "dense_…rainer"
    assert writer().shorten("dense", 13) == "dense"
    assert len(writer("ascii").shorten("x" * 50, 13)) == 13


def test_headings_break_after_separators() -> None:
    assert break_name("decoupled_geo_rs_token_tis", 12).split("\n") == ["decoupled_", "geo_rs_", "token_tis"]
    assert break_name("none", 12) == "none"
    assert max(map(len, break_name("x" * 50, 12).split("\n"))) == 12


@pytest.mark.parametrize(("name", "shown"), [("n" * 60, ["must"]), ("n", ["last", "must", "first"])])
def test_less_important_columns_are_dropped_first(name: str, shown: list[str]) -> None:
    drops = (("last", 2), ("must", 0), ("first", 1))
    wide = [Column(head, lambda _: "1234567890", drop=drop) for head, drop in drops]
    table = Table.of("", [name], [Column("name", kind="name"), *wide], reach=EVERYWHERE)
    page = Page("utf-8")
    print_document(Document(Headline("")).add(Section("", "a").add(table)), Console(file=page, width=40))
    heads, *_ = page.getvalue().splitlines()
    assert heads.split() == ["name", *shown]
    assert page.getvalue().count("1234567890") == len(shown)
