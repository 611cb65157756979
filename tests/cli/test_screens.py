"""The first screen of each command has the answer in line 1 and at most 24 lines."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.cli import screens

NO_ANSWER = re.compile(r"^(Findings|Summary|Corrections|K3|step|Metrics)\b")


@pytest.fixture(scope="module")
def dumps() -> Iterator[dict[str, list[str]]]:
    with screens.workplace() as found:
        yield found


def check_form(words: list[str], text: str, width: int) -> None:
    lines = text.splitlines()
    assert len(lines) <= screens.MAX_LINES, (words, text)
    assert max(map(cell_len, lines)) <= width, (words, text)
    assert [line for line in lines if line != line.rstrip()] == [], words
    assert lines[0] and not NO_ANSWER.match(lines[0]), words
    if words[0] in ("analyze", "diagnose", "watch", "lint", "advise", "compare") or "--check" in words:
        assert lines[0].split()[0] in ("OK", "CHECK", "FAIL"), words
    assert "Next: mismatchctl " in " ".join(lines[-2:]) or words[:2] == ["metrics", "k3"], (words, text)
    assert "e-05" not in text and " %" not in text.replace(" %s", ""), (words, text)


@pytest.mark.parametrize("width", screens.WIDTHS)
@pytest.mark.parametrize("name", ["healthy", "growing", "moe", "padded", "runs"])
def test_screens_of_dumps_match_the_goldens(name: str, width: int, dumps: dict[str, list[str]]) -> None:
    check_screens(name, list(screens.commands_of(name, dumps[name])), width)


@pytest.mark.parametrize("width", screens.WIDTHS)
def test_reference_screens_match_the_goldens(width: int, dumps: dict[str, list[str]]) -> None:
    commands = [words.split() for words in screens.REFERENCE]
    check_screens("reference", [words for words in commands if words[0] not in screens.UNSTABLE], width)
    for words in commands:
        if words[0] in screens.UNSTABLE:
            check_form(words, screens.screen(words, width), width)


def check_screens(name: str, commands: list[list[str]], width: int) -> None:
    shown = [screens.screen(words, width) for words in commands]
    stored = (screens.FOLDER / f"{name}-{width}.txt").read_text(encoding="utf-8")
    assert screens.transcript(commands, shown) == stored, "run `python -m tests.cli.screens` and look at the difference"
    for words, text in zip(commands, shown, strict=True):
        check_form(words, text, width)


def test_the_five_dumps_get_their_status(dumps: dict[str, list[str]]) -> None:
    heads = {name: screens.screen(["analyze", *paths], 80).splitlines()[0] for name, paths in dumps.items()}
    assert heads["healthy"].startswith("OK ")
    assert heads["growing"].startswith("FAIL ") and "since step 4" in heads["growing"]
    assert heads["moe"].startswith("CHECK ")
    assert heads["padded"].startswith("CHECK ") and "padding" in heads["padded"].lower()
    assert heads["runs"] == "FAIL   3 of 30 runs need attention"


@pytest.mark.parametrize("name", ["healthy", "growing", "moe", "padded"])
def test_analyze_and_diagnose_name_the_same_cause(name: str, dumps: dict[str, list[str]]) -> None:
    titles = {
        "healthy": "numerical noise", "growing": "stale rollout weights", "moe": "MoE routing differs",
        "padded": "Padding counted as tokens",
    }  # fmt: skip
    for verb in ("analyze", "diagnose"):
        text = screens.screen([verb, *dumps[name]], 120)
        assert titles[name].lower() in text.split("\ndo ")[0].lower(), (verb, text)


@pytest.mark.parametrize("name", ["healthy", "growing", "moe", "padded"])
def test_a_finding_and_k3_are_printed_once(name: str, dumps: dict[str, list[str]]) -> None:
    text = screens.screen(["analyze", *dumps[name]], 120)
    assert len(re.findall(r"^K3 ", text, flags=re.M)) == 1
    for title in ("stale rollout weights", "numerical noise", "padding counted as tokens", "MoE routing differs"):
        assert text.lower().count(title.lower()) <= 1, title


def test_shortened_screens_name_the_verbose_option(dumps: dict[str, list[str]]) -> None:
    brief, whole = (screens.screen(["analyze", *dumps["growing"], *more], 80) for more in ([], ["-v"]))
    assert "Details: -v" in brief and "Details: -v" not in whole
    assert len(whole.splitlines()) > len(brief.splitlines())
    assert whole.splitlines()[0] == brief.splitlines()[0]


@pytest.mark.parametrize("name", ["healthy", "growing", "moe", "padded"])
def test_the_answer_takes_one_line(name: str, dumps: dict[str, list[str]]) -> None:
    for verb in ("analyze", "diagnose"):
        assert screens.screen([verb, *dumps[name]], 80).splitlines()[1] == "", verb


def test_the_next_command_names_the_worst_run(dumps: dict[str, list[str]]) -> None:
    paths = [*dumps["healthy"], *dumps["growing"]]
    for words in (["analyze", *paths], ["diagnose", *paths], ["diagnose", *reversed(paths)]):
        assert screens.screen(words, 120).split()[-1] == "growing.parquet", words


@pytest.mark.parametrize("words", ["analyze", "diagnose", "sweep", "gate --baseline ok.json", "schema --check"])
def test_screens_of_long_paths_fit_and_their_command_is_complete(words: str, dumps: dict[str, list[str]]) -> None:
    path = Path("folder-with-a-long-name-" * 8, f"{'n' * 200}.parquet")
    path.parent.mkdir(exist_ok=True)
    shutil.copy(dumps["growing"][0], path)
    *lines, last = screens.screen([*words.split(), str(path)], 80).splitlines()
    assert len(lines) < screens.MAX_LINES
    assert str(path) in shlex.split(last.partition("Next: ")[2])
