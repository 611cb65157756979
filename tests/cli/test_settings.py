"""Defaults from settings files and environment variables, and their precedence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.factories.dumps import write_dump


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return write_dump(tmp_path / "healthy")


def test_settings_apply_to_all_commands_or_one(dump: Path, tmp_path: Path) -> None:
    (tmp_path / "mismatchctl.toml").write_text(
        "quiet = true\njson = true\n"
        "[analyze]\ncorrection = [{name = 'own', weight = {truncate = 2.0}}, 'none']\ncolumn = {reward = 'reward'}\n"
    )
    assert names(run("analyze", dump).stdout) == ["own", "none"]
    assert json.loads(run("metrics", "k3").stdout)[0]["key"] == "k3"
    (tmp_path / "mismatchctl.toml").write_text("json = true\ncorrection = 'none seq_is'\n[analyze]\njson = false\n")
    assert run("analyze", dump).stdout.startswith("CHECK  healthy: ")


def test_the_nearest_settings_file_is_used(dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.mismatchctl.analyze]\ncorrection = ['none']\njson = true\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[project]\nname = 'inner'\n")
    monkeypatch.chdir(inner)
    assert names(run("analyze", dump).stdout) == ["none"]
    (inner / "mismatchctl.toml").write_text("[analyze]\ncorrection = ['seq_is']\njson = true\n")
    assert names(run("analyze", dump).stdout) == ["seq_is"]


@pytest.mark.process
def test_files_without_settings_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'own'\n")
    code = (
        "import sys; read = []; sys.addaudithook(lambda event, given: event == 'open' and read.append(str(given[0])))\n"
        "sys.argv[1:] = ['metrics', 'k3', '--json']\nfrom mismatchctl.cli.main import main\ntry: main()\n"
        "except SystemExit: print([one for one in read if one.endswith('pyproject.toml')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.count("pyproject.toml") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("thredas = 2\n", "did you mean 'threads'?"),
        ("[analyse]\nquiet = true\n", "did you mean 'analyze'?"),
        ("[analyze]\nthreads = 'many'\n", "--threads"),
        ("not toml", "TOML"),
    ],
)
def test_wrong_settings_are_refused(text: str, says: str, dump: Path, tmp_path: Path) -> None:
    (tmp_path / "mismatchctl.toml").write_text(text)
    done = run("analyze", dump, code=2)
    assert says in done.stderr


BUILT = """
import contextlib, sys, typer.main
from mismatchctl.cli.main import app, main
built, build = [], typer.main.get_command_from_info
typer.main.get_command_from_info = lambda **info: built.append(info) or build(**info)
with contextlib.suppress(SystemExit):
    main()
assert len(app.registered_commands) > 1, "a second call has every command again"
print(len(built) > 1, file=sys.stderr)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "words", "others", "says"),
    [
        ("", ["metrics", "k3"], False, ""),
        ("", ["metrisc"], True, "did you mean 'metrics'?"),
        ("[sweep]\nthredas = 2\n", ["metrics", "k3"], True, "did you mean 'threads'?"),
        ("not toml", ["metrics", "k3"], True, "TOML"),
    ],
)
def test_only_the_needed_command_is_built(text: str, words: list[str], others: bool, says: str, tmp_path: Path) -> None:
    (tmp_path / "mismatchctl.toml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", BUILT, *words], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stderr.splitlines()[-1] == str(others)
    assert says in done.stderr and bool(done.stdout) is not bool(says)


def test_wrong_environment_variables_are_refused(dump: Path) -> None:
    done = run("analyze", dump, MISMATCHCTL_ANALYZE_THREDS="2", code=2)
    assert "did you mean 'threads'?" in done.stderr
    inline = run("analyze", dump, "--json", MISMATCHCTL_ANALYZE_CORRECTION="{name: mine, weight: {truncate: 2}}")
    assert names(inline.stdout) == ["mine"]


def test_settings_file_environment_and_flags_take_precedence_in_this_order(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def chosen(*words: str, **environment: str) -> list[str]:
        done = run("analyze", dump, "--json", *words, **environment)
        return [correction["name"] for correction in json.loads(done.stdout)["corrections"]]

    (tmp_path / "pyproject.toml").write_text("[tool.mismatchctl.analyze]\ncorrection = ['seq_is', 'geo_rs']\n")
    assert chosen() == ["seq_is", "geo_rs"]
    assert chosen(MISMATCHCTL_ANALYZE_CORRECTION="token_tis none") == ["token_tis", "none"]
    assert chosen("-c", "seq_mis", MISMATCHCTL_ANALYZE_CORRECTION="none") == ["seq_mis"]
    (tmp_path / "pyproject.toml").write_text("[tool.mismatchctl.analyze]\ncorection = 'none'\n")
    refused = run("analyze", dump, code=2)
    assert "did you mean 'correction'?" in refused.stderr


def names(done_stdout: str) -> list[str]:
    return [correction["name"] for correction in json.loads(done_stdout)["corrections"]]
