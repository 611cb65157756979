"""Parsed text (YAML, TOML, JSON, flags): accepted values, types and errors."""

import contextlib
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import load_presets
from mismatchctl.io.scripts import parse_shell
from mismatchctl.io.yaml import (
    TextError,
    _YamlDumper,
    dump_yaml,
    parse_inline,
    parse_json,
    parse_number,
    parse_scalar,
    parse_yaml,
    read_data,
    read_with_scalars,
    resolve_interpolations,
)
from tests.cli.command import run
from tests.paths import SAMPLE_DATA

DUMP = str(SAMPLE_DATA / "dense" / "step_00000.parquet")
OMEGACONF: dict[str, Any] = {
    "1e-4": 1e-4, "1E5": 1e5, "1.e5": 1e5, ".5": 0.5, ".5e+3": 500.0, ".5e3": ".5e3", "-.5": "-.5", "+1": 1,
    "1_000": 1000, "0.5_5": 0.55, "75_E4": "75_E4", "0x1F": 31, "0o17": "0o17", "017": 15, "08": "08", "1:30": 90,
    "1:30.5": 90.5, "-1:30": -90, "1:60": "1:60", ".inf": math.inf, "-.INF": -math.inf, "inf": "inf", "nan": "nan",
    "yes": True, "Off": False, "y": "y", "TRUE": True, "null": None, "~": None, "": None, "2020-13-45": "2020-13-45",
    "1,000": "1,000", "1e1_0": "1e1_0", '"1e-4"': "1e-4",
    "!!int 3": 3, "!!float 3": 3.0, "!!str 3": "3",
}  # fmt: skip
"""Values that `OmegaConf.create("x: ...")` of version 2.4.0 gives."""


@pytest.mark.parametrize("text", OMEGACONF)
def test_yaml_scalars_match_omegaconf(text: str) -> None:
    found = parse_yaml(f"x: {text}")["x"]
    assert (found, type(found)) == (OMEGACONF[text], type(OMEGACONF[text]))


WRONG = {
    "{x: !!timestamp 99999-01-01}": "line 1, column 5: the tag !!timestamp is not supported",
    "{x: !!bool maybe}": "does not match the tag !!bool",
    "{x: !!int ''}": "does not match the tag !!int",
    "{x: !!python/object/apply:os.system [id]}": "the tag !!python/object/apply:os.system is not supported",
    "{x: !mine 1}": "the tag !mine is not supported",
    "{x: 1e999}": "larger than any float",
    "{x: 99999999999999999999}": "more than 64 bits",
    "{x: 1, x: 2}": "line 1, column 8: the key 'x' occurs twice",
    "{x: *y}": "line 1, column 5: found undefined alias",
    "{x: &a 1, y: &a 2}": "line 1, column 14: this anchor occurs twice",
    "{? [1] : 2}": "a key must be a string",
    "{<<: 3}": "the merge key << needs a mapping",
    "{x: " + "[" * 200 + "]" * 200 + "}": "line 1, column 68: nested too deeply",
    "{x: " + "[" * 2000 + "]" * 2000 + "}": "nest",  # libyaml has its own message since 0.2.6
    "{x: 1": "line 2, column 1",
    "{x: \x07}": "control characters",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:30])
def test_invalid_yaml_gives_the_place_and_reason(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f: not valid YAML: ") as error:
        parse_inline(text, "f")
    assert WRONG[text] in str(error.value) and "\n" not in str(error.value)


def test_yaml_aliases_merge_within_the_limit() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\nd: &k e\n*k : 4"
    whole = {"x": 1, "y": 2}
    assert parse_yaml(text) == {"a": whole, "b": {"x": 1, "y": 3}, "c": [whole, whole], "d": "e", "e": 4}
    laughs = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)
    )
    with pytest.raises(TextError, match="more than 100,000 values"):
        parse_yaml(laughs)
    with pytest.raises(TextError, match="nested too deeply"):
        parse_yaml("a: &a [*a]")
    with pytest.raises(TextError, match="a second document"):
        parse_yaml("a: 1\n---\nb: 2")


def test_scalars_are_listed_once_where_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a {x: 1, y: '2'}\nb: {<<: *a, x: 3}\nc: *a")
    data, scalars = read_with_scalars(tmp_path / "a.yaml")
    assert data["b"] == {"x": 3, "y": "2"}
    found = [(one.keys, one.text, one.quoted) for one in scalars]
    assert found == [(("a", "x"), "1", False), (("a", "y"), "2", True), (("b", "x"), "3", False)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -Infinity}', "-Infinity is not a JSON number"),
        ('{"a": 1e999}', "larger than any float"),
        ('{"a": ' + "9" * 5000 + "}", "more than 64 bits"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1\n"b"}', "line 2, column 1"),
    ],
)
def test_invalid_json_is_refused(text: str, problem: str) -> None:
    with pytest.raises(TextError, match=problem):
        parse_json(text)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.toml", b"a = 1\nb = = 2", "not valid TOML: line 2, column 5"),
        ("a.toml", b"a = 2020-13-45", "not valid TOML: "),
        ("a.toml", b"a = " + b"[" * 2000, "not valid TOML: nested too deeply"),
        ("a.toml", b"[" + b"a." * 400 + b"a]", "not valid TOML: nested too deeply"),
        ("a.json", b'{"a": ' * 400 + b"1" + b"}" * 400, "not valid JSON: nested too deeply"),
        ("a.yaml", b"a: 1\nb: \xff", "line 2, column 4: not UTF-8"),
        ("a.json", b"{", "not valid JSON: line 1, column 2"),
        ("a.yaml", b" " * (1 << 21), "is larger than 1 MB"),
    ],
)
def test_files_are_refused_with_file_line_and_column(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_data(path)
    assert str(error.value).startswith(f"{path}: ") and problem in str(error.value)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "dangling", "missing"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("nowhere")
    said = {"folder": "this is a folder", "dangling": "does not exist", "missing": "does not exist"}
    with pytest.raises(ConfigError, match=said.get(kind, "is not a regular file")):
        read_data(path)


def test_toml_dates_are_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("a = 2020-01-02\nb = [07:32:00]")
    assert read_data(path) == {"a": "2020-01-02", "b": ["07:32:00"]}


@pytest.mark.parametrize(
    "text", ["inf", "nan", "-inf%", "1e999", "yes", "", "1 2", "20%%", "0x", "1_000", "010", "1:30", "0b1", "on"]
)
def test_number_options_must_be_finite(text: str) -> None:
    with pytest.raises(TextError):
        parse_number(text)
    assert (parse_number("20%"), parse_number("1e-4"), parse_number("1000"), parse_number(".5")) == (
        0.2,
        1e-4,
        1000.0,
        0.5,
    )


WORDS = st.one_of(st.text(max_size=8), st.sampled_from(list(OMEGACONF)))
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(DATA)
@example({"<<": None})
def test_written_yaml_is_read_back(data: Any) -> None:
    for inner in (False, True):
        assert parse_yaml(dump_yaml({"x": data}, inner=inner)) == {"x": data}


def test_libyaml_and_pyyaml_write_presets_alike() -> None:
    class Plain(yaml.SafeDumper):
        yaml_representers = _YamlDumper.yaml_representers

    for preset in load_presets().values():
        data = preset.correction.to_mapping()
        for inner in (False, True):
            flow, width = None if inner else False, 100 if inner else 80
            options = {"sort_keys": False, "allow_unicode": True, "default_flow_style": flow, "width": width}
            assert dump_yaml(data, inner=inner) == yaml.dump(data, Dumper=Plain, **options)


@given(st.text("0123456789_.eE+-:xbonfaIN~ytrue", max_size=9))
def test_any_scalar_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(TextError):
        assert isinstance(parse_scalar(text), (str, int, float, bool, type(None)))


FLAGS = {
    "-c": ["analyze", DUMP, "-q", "-c"],
    "--config": ["analyze", DUMP, "-q", "--config"],
    "--rule": ["gate", DUMP, "-q", "--rule"],
    "lint": ["lint"],
}
BAD = {
    "date.yaml": "x: !!timestamp 2020-13-45",
    "maybe.yaml": "name: !!bool maybe",
    "int.yaml": "gates: !!int ''",
    "deep.yaml": "[" * 2000,
    "empty-key.yaml": "'': 1",
    "laughs.yaml": "a: &a [1,2,3]\n" * 2,
    "wrong.toml": "a = 1979-13-45",
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", BAD)
def test_every_option_reads_files_with_the_same_checks(flag: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(BAD[name])
    done = run(*FLAGS[flag], path)
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit)
    assert done.stderr.startswith(f"error: {path}: ") or flag == "lint" or name == "empty-key.yaml"
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


SETTINGS = {
    "by = 5": 2,
    "by = [[1]]": 2,
    "threads = [1]": 2,
    "threads = {a = 1}": 2,
    "threads = 1.5": 2,
    "json = 'maybe'": 2,
    "is-threshold = inf\nis-level = 'token'": 2,
    "correction = [[]]": 2,
    "correction = 2020-01-01": 2,
    "a = " + "[" * 3000: 2,
}


@pytest.mark.parametrize("text", SETTINGS, ids=lambda text: text[:20])
def test_wrong_settings_give_one_sentence(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mismatchctl.toml").write_text(f"[analyze]\n{text}")
    monkeypatch.chdir(tmp_path)
    done = run("analyze", DUMP, "-q", code=SETTINGS[text])
    assert "Traceback" not in done.stderr


def _shell(text: str) -> dict[str, Any]:
    (reading,) = parse_shell(text)
    return reading.keys


@pytest.mark.slow
def test_circular_or_growing_interpolations_stay_unresolved() -> None:
    assert all(value in ("${a}", "${b}") for value in resolve_interpolations({"a": "${b}", "b": "${a}"}).values())
    found = resolve_interpolations(
        {"a": "x" * 900, "b": "${a}${a}", "c": "${d.e}", "d": {"e": [1, "${a}"]}, "f": "${oc.env:HOME}"}
    )
    assert found["b"] == "${a}${a}" and found["c"] == [1, "${a}"] and found["f"] == "${oc.env:HOME}"
    doubled = _shell("A=xx\n" + "A=$A$A\n" * 60 + "run --flag $A\n")
    assert len(doubled["--flag"]) <= 10_000
    tracemalloc.start()
    grown = _shell(f"A+={'x' * 9000}\n" * 60 + f"run --flag {'$A' * 2000} --short $A\n")
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert grown == {"--flag": "$A" * 2000, "--short": "$A"}


def test_interpolations_resolve_at_any_depth_of_settings() -> None:
    keys = _shell(f"run rule=1 {'a.' * 60}b='${{c.d}}' c.d=2\n")
    found: Any = resolve_interpolations(keys)
    for _ in range(60):
        found = found["a"]
    assert found["b"] == 2
