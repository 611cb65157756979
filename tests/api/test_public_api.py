"""The Python API: arguments, results, and lazy imports."""

from __future__ import annotations

import ast
import copy
import doctest
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

import mismatchctl as mm
import mismatchctl.api.advise.advise
import mismatchctl.api.diagnose
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.corrections.model import Correction, Weight
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.io.process import _find_openblas
from tests.cli.command import run
from tests.paths import ROOT

RNG = np.random.default_rng(1)
LENGTHS = (5, 9, 0, 12)
WIDTH = 14
MASK = np.array([[place < length for place in range(WIDTH)] for length in LENGTHS])
MASK[1, 3] = False
ROLLOUT = np.where(MASK, -RNG.exponential(1.0, MASK.shape), np.nan)
TRAIN = np.where(MASK, np.minimum(ROLLOUT + RNG.normal(0, 0.3, MASK.shape), 0.0), np.inf)
RATIO = np.exp(TRAIN[MASK] - ROLLOUT[MASK])


class Unreadable:
    def __arrow_c_stream__(self, schema: object = None) -> None:
        raise ValueError


class Formatted:
    """A stand-in for a Dataset of Hugging Face's datasets."""

    def __init__(self, table: pa.Table, form: str = "") -> None:
        self.table, self.form = table, form

    def with_format(self, form: str) -> Formatted:
        return Formatted(self.table, form)

    def __getitem__(self, rows: slice) -> pa.Table:
        assert self.form == "arrow"
        return self.table[rows]


def listed(values: Any) -> list[Any]:
    return [row[flags].tolist() for row, flags in zip(values, MASK, strict=True)]


@pytest.mark.process
def test_importing_loads_no_heavy_modules() -> None:
    code = "import sys, mismatchctl as mm; dir(mm); print([m for m in ('numpy','polars','torch') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert {"analyze", "weights", "k3", "Correction"} <= set(dir(mm))
    with pytest.raises(AttributeError, match="no attribute 'analyse'"):
        _ = mm.analyse


FUNCTIONS = [name for name in mm.__all__ if not name[0].isupper()]


def test_all_public_names_can_be_imported() -> None:
    assert len(mm.__all__) <= 30
    assert [name for name in mm.__all__ if not callable(getattr(mm, name))] == []
    assert dir(mm) == sorted([*mm.__all__, "__version__"])
    for name in FUNCTIONS:
        assert inspect.isfunction(getattr(mm, name)), name


@pytest.mark.process
def test_functions_keep_their_names_when_modules_are_imported() -> None:
    """Some modules have the name of a public function. In any import order, the name must be the function."""
    code = "import mismatchctl.diagnosis.case, mismatchctl.api.diagnose, mismatchctl as mm; print(mm.diagnose.__name__)"
    for first in ("", "import mismatchctl as mm; mm.diagnose; "):
        done = subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True, check=True)
        assert done.stdout == "diagnose\n"
    assert type(mm) is type(sys)


@pytest.mark.process
@pytest.mark.slow
def test_a_users_program_passes_mypy(tmp_path: Path) -> None:
    """The program calls every public function, and mypy refuses a wrong argument."""
    program = Path(__file__).with_name("consumer.py")
    wrong = tmp_path / "wrong.py"
    calls = ("mm.analyze(3)", "mm.gate('a', levle=1)", "mm.k3('a', None).foo", "mm.analyze('a').k3.valu")
    wrong.write_text("\n".join(["import mismatchctl as mm", *calls, ""]))
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}/cache"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [*command, program, wrong], capture_output=True, text=True, check=False, env=kept, cwd=tmp_path
    )
    lines = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [line.partition(":")[0] for line in lines] == ["wrong.py"] * len(lines), done.stdout
    assert {line.split(":")[1] for line in lines} == {"2", "3", "4", "5"}, done.stdout
    tree = ast.parse(program.read_text())
    called = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "mm"
    }
    assert called == set(mm.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_show_every_parameter(name: str) -> None:
    function = getattr(mm, name)
    parameters = inspect.signature(function).parameters.values()
    assert not [one for one in parameters if one.kind is one.VAR_KEYWORD]
    assert {one.name for one in parameters if one.kind is one.VAR_POSITIONAL} <= {"sources", "dumps"}
    for one in parameters:
        assert one.annotation is not one.empty and "Any" not in str(one.annotation), one
        documented = rf"^ {{8}}\*?(\w+, )*{one.name}(, \w+)*: "
        assert re.search(documented, function.__doc__, re.MULTILINE), f"{one.name} is not documented"


@pytest.mark.parametrize(
    ("verb", "wrong", "right"),
    [
        ("analyze", "corection", "corrections"),
        ("gate", "rulez", "rule"),
        ("sweep", "varies", "vary"),
        ("weights", "microbatches", "micro_batches"),
    ],
)
def test_wrong_keywords_get_a_suggestion(verb: str, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=rf"{verb}\(\) got an unexpected keyword .*'{wrong}' \(did you mean '{right}'"):
        getattr(mm, verb)("nowhere", **{wrong: 1})


@pytest.mark.slow
def test_defaults_match_the_command_line() -> None:
    dump = str(ROOT / "sample_data" / "moe")
    assert mm.analyze(dump).to_json() == run("analyze", dump, "--json").stdout
    assert mm.sweep(dump).to_json() == run("sweep", dump, "--json").stdout
    judged = json.loads(run("gate", dump, "--json", "--on-undecided", "pass").stdout)
    assert [check.rule for check in mm.gate(dump).checks] == [check["rule"] for check in judged["checks"]]


@pytest.mark.slow
def test_pages_show_presets_like_the_command_line(tmp_path: Path) -> None:
    dump = str(ROOT / "sample_data" / "moe")
    run("analyze", dump, "--html", tmp_path / "page.html", "-q", code=0)
    result = mm.analyze(dump, presets=True)
    assert result.to_html() == (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "skyrl-icepop" in result["moe"].presets and not mm.analyze(dump)["moe"].presets


def test_arrays_are_passed_by_keyword() -> None:
    rollout, train = np.where(MASK, ROLLOUT, 0.0), np.where(MASK, TRAIN, 0.0)
    wanted = mm.analyze({"rollout": rollout, "train": train, "mask": MASK})
    for kind in (np.asarray, torch.tensor):
        made = mm.analyze(rollout=kind(rollout), train=kind(train), mask=kind(MASK))
        assert made["memory"].overall == wanted["memory"].overall
        assert list(made["memory"].overall.corrections) == ["none", "token_tis", "seq_mis", "geo_rs", "miles-moe-2"]
    with pytest.raises(ConfigError, match="missing rollout"):
        mm.analyze(train=train)
    with pytest.raises(ConfigError, match="pass dumps or arrays, not both"):
        mm.analyze("dump/", rollout=rollout, train=train)


def test_presets_given_as_dumps_are_explained() -> None:
    with pytest.raises(ConfigError, match="token_tis is a preset, not a dump"):
        mm.analyze(ROOT / "sample_data" / "moe", "token_tis")


def test_tables_are_read_in_groups_like_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or many row groups give equal results with any number of threads, and no file is written."""
    monkeypatch.setattr("mismatchctl.data.formats.GROUP_VALUES", 64)
    monkeypatch.setattr("tempfile.mkdtemp", lambda *_, **__: pytest.fail("a temporary folder"))
    lengths = RNG.integers(0, 12, 50)
    rollout = [(-RNG.exponential(1.0, length)).tolist() for length in lengths]
    train = [
        [min(value + shift, 0.0) for value, shift in zip(row, RNG.normal(0, 0.1, len(row)), strict=True)]
        for row in rollout
    ]
    table = pl.DataFrame({"rollout_log_probs": rollout, "train_log_probs": train, "step": [n // 5 for n in range(50)]})
    one, two = (mm.analyze(table, threads=threads).to_json() for threads in (1, 2))
    assert one == two
    table.write_parquet(tmp_path / "memory.parquet")
    (held,), (kept,) = (mm.analyze(source).runs.values() for source in (table, tmp_path / "memory.parquet"))
    assert held.groups.labels == kept.groups.labels == list(range(10))
    assert held.k3.value == pytest.approx(kept.k3.value, rel=1e-12)


def test_estimators_match_numpy() -> None:
    x = np.log(RATIO)
    for given in ((ROLLOUT, TRAIN, MASK), (listed(ROLLOUT), listed(TRAIN))):
        assert mm.k1(*given) == pytest.approx(-x.mean())
        assert mm.k2(*given) == pytest.approx((x * x / 2).mean())
        assert mm.k3(*given) == pytest.approx((np.exp(x) - 1 - x).mean())
        assert mm.ess(*given) == pytest.approx(RATIO.sum() ** 2 / (len(x) * (RATIO**2).sum()))
        assert mm.chi2(*given) == pytest.approx((RATIO**2).mean() - 1)
    products = np.exp([np.log(row).sum() for row in np.split(RATIO, np.cumsum(MASK.sum(1))[:-1]) if len(row)])
    assert mm.ess(ROLLOUT, TRAIN, MASK, level="sequence") == pytest.approx(
        products.sum() ** 2 / (len(products) * (products**2).sum())
    )


NORMALIZED = Correction(weight=Weight(clip=(0.5, 1.5), normalize="token", normalize_over="micro_batch"))


@pytest.mark.parametrize("kind", ["numpy", "float32", "torch", "bfloat16", "nested", "ragged", "lists"])
def test_weights_keep_the_type_of_the_input(kind: str) -> None:
    bounded = np.clip(RATIO, 0.5, 1.5)
    wanted = bounded / bounded.mean()
    tolerance = {"float32": 1e-6, "nested": 1e-6, "bfloat16": 0.05}.get(kind, 1e-12)
    rows: Any = (ROLLOUT, TRAIN, MASK)
    if kind == "float32":
        rows = (ROLLOUT.astype(np.float32), TRAIN.astype(np.float32), MASK)
    elif kind in ("torch", "bfloat16"):
        dtype = torch.float64 if kind == "torch" else torch.bfloat16
        rows = (*(torch.tensor(values, dtype=dtype, requires_grad=True) for values in rows[:2]), torch.tensor(MASK))
    elif kind == "nested":
        rows = tuple(
            torch.nested.nested_tensor(list(map(torch.tensor, listed(values))), layout=torch.jagged)
            for values in rows[:2]
        )
    elif kind == "ragged":
        rows = tuple([np.array(row) for row in listed(values)] for values in rows[:2])
    elif kind == "lists":
        rows = tuple(listed(values) for values in rows[:2])
    made, keep = mm.weights(*rows, correction=NORMALIZED)
    assert type(made) is type(rows[1])
    if kind in ("torch", "bfloat16"):
        assert made.dtype == rows[1].dtype and not made.requires_grad and keep.dtype == torch.bool
        flat, flags = made[torch.tensor(MASK)].double().numpy(), keep[torch.tensor(MASK)].numpy()
        assert not made[torch.tensor(~MASK)].any()
    elif kind in ("numpy", "float32"):
        assert made.dtype == rows[1].dtype and not made[~MASK].any()
        flat, flags = made[MASK], keep[MASK]
    else:
        parts = (made.unbind(), keep.unbind()) if kind == "nested" else (made, keep)
        flat, flags = (np.concatenate([np.zeros(0), *map(np.asarray, part)]) for part in parts)
    np.testing.assert_allclose(flat, wanted, rtol=tolerance)
    assert np.asarray(flags, bool).all()


def test_weights_are_normalized_by_micro_batch() -> None:
    made, _ = mm.weights(ROLLOUT, TRAIN, MASK, NORMALIZED, micro_batches=2)
    for rows in ([0, 1], [2, 3]):
        assert made[rows][MASK[rows]].mean() == pytest.approx(1.0)
    named, _ = mm.weights(ROLLOUT, TRAIN, MASK, NORMALIZED, micro_batches=["a", "b", "b", "a"])
    assert named[[0, 3]][MASK[[0, 3]]].mean() == pytest.approx(1.0)
    with pytest.raises(ConfigError, match=r"not the number of micro-batches.*one name for each of the 4 rows"):
        mm.weights(ROLLOUT, TRAIN, MASK, NORMALIZED, micro_batches=["a"])


def test_empty_weights_are_not_normalized() -> None:
    rule = {"weight": {"zero": [5.0, 6.0], "normalize": "token"}}  # no ratio is between these bounds
    made, _ = mm.weights(ROLLOUT, TRAIN, MASK, rule)
    np.testing.assert_array_equal(made, np.zeros(MASK.shape))


def test_weights_match_goldens_of_a_framework() -> None:
    from tests.conformance.compare_peers import cases, framework, table

    rows = table("input_moe.parquet", 0)
    columns = [rows[name].to_pylist() for name in ("rollout_log_probs", "train_log_probs", "response_mask")]
    _, _, case = next(one for one in cases("trl") if one[1] == "token_truncate_2sided" and "moe" in one[0])
    made, _ = mm.weights(*columns, framework("trl").correction(case["config"]))
    for row, sequence in enumerate(rows["sequence_id"].to_pylist()):
        for found, wanted in zip(made[row], case["per_sequence"][sequence]["weights"], strict=True):
            assert wanted is None or found == pytest.approx(wanted, rel=3e-6)


ROW = [[-1.0, -2.0]]
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "lengths": (lambda: mm.k3(ROLLOUT[:, :3], TRAIN, MASK), "row lengths differ"),
    "not finite": (lambda: mm.k3(ROLLOUT, TRAIN), "NaN or infinite"),
    "above 0": (lambda: mm.k3(ROW, [[-1.0, 0.5]]), "train is 0.5 at a valid token: log-probs must not be above 0"),
    "below all": (lambda: mm.k3(ROW, [[-1.0, -1e300]]), "no policy gives such a log-prob"),
    "weights for a mask": (
        lambda: mm.k3(ROW, ROW, [[1.0, 0.5]]),
        r"mask must contain only 0 and 1 \(or false and true\), found 0.5",
    ),
    "an unknown mask": (lambda: mm.k3(ROW, ROW, np.array([[1.0, np.nan]])), "found NaN"),
    "a hole in a mask": (lambda: mm.weights(ROW, ROW, [[1, None]]), "found None"),
    "no study": (
        lambda: sweep(["nowhere"], [], wishes=[("rejected_tokens", 0.05)]),
        "a sweep needs at least one correction",
    ),
    "one row": (lambda: mm.k3(ROLLOUT[0], TRAIN[0]), "expected an array .B, T. or a list of rows"),
    "one row as a list": (lambda: mm.k3(ROW[0], ROW[0]), "expected an array .B, T. or a list of rows"),
    "a number": (lambda: mm.k3(-1.0, -1.0), "found a float"),
    "a tensor of one number": (
        lambda: mm.k3(torch.tensor(-1.0), torch.tensor(-1.0)),
        "expected an array .B, T. or a list of rows",
    ),
    "a masked array": (lambda: mm.k3(np.ma.masked_array(ROW, [[0, 1]]), ROW), "rollout: the mask of a masked array"),
    "masked rows": (lambda: mm.k3(ROW, [np.ma.masked_array(ROW[0], [0, 1])]), "train: the mask of a masked array"),
    "a tuple of masked rows": (
        lambda: mm.analyze({"rollout": (np.ma.masked_array(ROW[0], [0, 1]),), "train": ROW}),
        "rollout: the mask of a masked array",
    ),
    "a column by two names": (
        lambda: mm.analyze({"rollout": ROW, "train": ROW, "rollout_log_probs": ROW}),
        "rollout and rollout_log_probs are the same column; pass only one of them",
    ),
    "three axes": (lambda: mm.k3(ROLLOUT[None], TRAIN[None]), "shape"),
    "text": (lambda: mm.k3("a", "b"), "found a str"),
    "rows of text": (lambda: mm.k3([["a"]], [["b"]]), "one number per position"),
    "complex": (lambda: mm.k3(np.array(ROW) + 1j, ROW), "one number per position"),
    "nothing": (lambda: mm.k3(None, TRAIN), "rollout: .* found None"),
    "a correction": (lambda: mm.weights(ROLLOUT, TRAIN, MASK, 3), "found an int"),
    "two corrections": (lambda: mm.weights(ROLLOUT, TRAIN, MASK, ["none", "token_tis"]), "expected one correction"),
    "current": (
        lambda: mm.weights(ROLLOUT, TRAIN, MASK, Correction(weight=Weight(source="current/rollout"))),
        "pass the argument current",
    ),
    "advantages": (
        lambda: mm.weights(ROW, ROW, advantages=[1.0, 2.0]),
        "2 values, expected 1 \\(one per row\\)",
    ),
    "age": (lambda: mm.keep(ROW, ROW, None, "staleness-drop", age=["old"]), "expected numbers"),
    "micro-batches": (lambda: mm.weights(ROW, ROW, None, "miles-moe-2", micro_batches=0), "rows per micro-batch"),
    "level": (lambda: mm.ess(ROW, ROW, level="row"), "level: pass 'token' or 'sequence', not 'row'"),
    "a source": (lambda: mm.analyze(5), "a dump must be a path"),
    "columns": (lambda: mm.analyze({"rollout": ROW, "train": ROW * 2}), "numbers of rows"),
    "a column lacks": (lambda: mm.analyze({"rollout": ROW}), "table in memory: .* train_log_probs"),
    "a column without a name": (lambda: mm.analyze({"rollout": ROW, "train": ROW, 1: [1]}), "must be strings"),
    "objects": (
        lambda: mm.analyze({"rollout": ROW, "train": ROW, "prompt_id": [object()]}),
        "prompt_id: expected .* found an object",
    ),
    "a column of two kinds": (
        lambda: mm.analyze({"rollout": ROW * 2, "train": ROW * 2, "worker": [1.5, "a"]}),
        "^column worker: expected only numbers, only lists of numbers or only text",
    ),
    "a value of Arrow": (lambda: mm.analyze(pa.scalar(1)), "cannot convert an Int64Scalar to a table: "),
    "a series of structs": (
        lambda: mm.analyze(pl.DataFrame({"rollout": ROW, "train": ROW}).to_struct()),
        "a dump must be a path, .* found a Series$",
    ),
    "a tensor without values": (
        lambda: mm.k3(torch.zeros(1, 2, device="meta"), torch.zeros(1, 2, device="meta")),
        "on the device 'meta' has no values",
    ),
    "a library's error without words": (
        lambda: mm.analyze(Unreadable()),
        "cannot convert an Unreadable to a table: ValueError$",
    ),
    "the second table": (
        lambda: mm.analyze([{"rollout": ROW, "train": ROW}, {"rollout": ROW, "train": [[0.5]]}]),
        "^table 2 in memory, row 0, column train_log_probs: ",
    ),
    "an Arrow array": (lambda: mm.analyze(pa.array([1])), "a dump must be a path"),
    "a Result for a dump": (
        lambda: mm.analyze(mm.analyze({"rollout": ROW, "train": ROW})),
        "a Result does not contain tokens; pass the dumps instead",
    ),
    "a field without a name": (
        lambda: mm.sweep({"rollout": ROW, "train": ROW}, correction="token_tis", vary={1: [2.0]}),
        "fields must be strings",
    ),
    "no grid": (
        lambda: mm.sweep({"rollout": ROW, "train": ROW}, correction="token_tis", vary=[1.0]),
        "expected a mapping",
    ),
    "no values": (
        lambda: mm.sweep({"rollout": ROW, "train": ROW}, correction="token_tis", vary={"weight.truncate": 2.0}),
        "several values",
    ),
    "nothing to compare": (lambda: mm.compare(), "two dumps"),
    "a rule": (lambda: mm.gate({"rollout": ROW, "train": ROW}, rules=[1]), "rules are strings"),
    "a number for rules": (lambda: mm.gate({"rollout": ROW, "train": ROW}, rules=5), "rules are strings"),
    "rules by name": (lambda: mm.gate({"rollout": ROW, "train": ROW}, rules={"k3:max=1": 1}), "not a dict"),
    "no level": (lambda: mm.gate({"rollout": ROW, "train": ROW}, rules="k3:max=1", level=float("nan")), "found NaN"),
    "a level of 0": (lambda: mm.gate({"rollout": ROW, "train": ROW}, rules="k3:max=1", level=0), "found 0"),
    "a level above all": (
        lambda: mm.gate({"rollout": ROW, "train": ROW}, rules="k3:max=1", level=2),
        "at most 0.5",
    ),
    "no baseline": (lambda: mm.gate({"rollout": ROW, "train": ROW}, []), "baseline: expected a Result .* found a list"),
    "by numbers": (lambda: mm.analyze({"rollout": ROW, "train": ROW}, by=[1]), "by: pass names of columns, not an int"),
    "a flag for columns": (
        lambda: mm.analyze({"rollout": ROW, "train": ROW}, columns="a=b"),
        "columns: expected a mapping",
    ),
    "a column by number": (lambda: mm.analyze({"rollout": ROW, "train": ROW}, columns={1: "a"}), "not an int"),
    "a number of a column": (lambda: mm.analyze({"rollout": ROW, "train": ROW}, columns={"reward": 3}), "not an int"),
    "threads as text": (lambda: mm.analyze({"rollout": ROW, "train": ROW}, threads="x"), "^threads: .* integer"),
    "no threads": (lambda: mm.diagnose({"rollout": ROW, "train": ROW}, threads=0), "^threads: .* found 0"),
    "no micro-batch": (
        lambda: mm.analyze({"rollout": ROW, "train": ROW}, micro_batch_size=1.5),
        "^micro_batch_size: .* found 1.5",
    ),
    "a device": (lambda: mm.analyze({"rollout": ROW, "train": ROW}, device="gpu"), "^device: .* not 'gpu'"),
    "an engine": (lambda: mm.compare({"rollout": ROW, "train": ROW}, engine="ray"), "^engine: .* found 'ray'"),
    "a framework": (lambda: mm.analyze({"rollout": ROW, "train": ROW}, framework="verk"), "did you mean 'verl'"),
    "a framework by number": (lambda: mm.advise({"rollout": ROW, "train": ROW}, framework=3), "found an int"),
    "a batch of none": (lambda: mm.advise({"rollout": ROW, "train": ROW}, batch=-1), "^batch: .* found -1"),
    "a level as text": (
        lambda: mm.gate({"rollout": ROW, "train": ROW}, level="a"),
        "^level: expected a number, found 'a'",
    ),
    "bad rows": (
        lambda: mm.gate({"rollout": ROW, "train": [[0.5, -1.0]]}),
        "correct the dump, or leave such rows out with on_bad='skip' of mm.analyze$",
    ),
    "a column of another name": (
        lambda: mm.diagnose({"rollout": ROW, "old": ROW}),
        r"choose the right column with columns=\{'train_log_probs': 'NAME'\}",
    ),
    "by a list": (
        lambda: mm.analyze({"rollout": ROW, "train": ROW, "token_ids": [[1, 2]]}, by="token_ids"),
        "^by='token_ids': the column contains lists of numbers in the table in memory; ",
    ),
    "a rule that is none": (
        lambda: mm.gate({"rollout": ROW, "train": ROW}, rules="k3:up"),
        "^rule 'k3:up': 'up' is not KEY=VALUE",
    ),
    "a configuration": (lambda: mm.lint(5), "found an int"),
    "keys of none": (
        lambda: mm.lint({"a": 1}),
        "^the mapping: the framework of this file is unclear. Pass framework=NAME, ",
    ),
    "an object in a configuration": (
        lambda: mm.lint({"rollout_is": object()}),
        "^the mapping contains an object of type object",
    ),
    "a result": (lambda: mm.read_result(5), "found an int"),
    "a preset": (lambda: mm.preset(5), "unknown preset 5"),
}


def test_masked_values_are_ignored() -> None:
    for mask in (np.array([[1, 0]]), np.array([[1.0, 0.0]]), [[True, False]]):
        assert mm.k1([[-1.0, 0.5]], [[-1.5, float("nan")]], mask) == 0.5


@pytest.mark.parametrize("what", WRONG)
def test_wrong_shapes_are_refused(what: str) -> None:
    call, said = WRONG[what]
    with pytest.raises((ConfigError, DataError), match=said):
        call()


def test_columns_and_integers_are_accepted() -> None:
    rollout, train = [[-1, -2], [-3]], [[-1.5, -2.0], [-3.0]]
    wanted = [[pytest.approx(np.exp(-0.5)), 1.0], [1.0]]
    series, flags = mm.weights(pl.Series(rollout), pl.Series("train", train))
    assert series.name == "train" and series.to_list() == wanted and flags.to_list() == [[True, True], [True]]
    assert mm.weights(pa.array(rollout), pa.array(train))[0].to_pylist() == wanted
    whole, _ = mm.weights(np.array([[-1, -2]]), np.array([[-2, -2]]))
    np.testing.assert_allclose(whole, np.exp([[-1.0, 0.0]]))


def test_all_kinds_of_sources_agree(tmp_path: Path) -> None:
    frame = pl.DataFrame({"rollout_log_probs": listed(ROLLOUT), "train_log_probs": listed(TRAIN)})
    frame.write_parquet(tmp_path / "d.parquet")
    wanted = mm.k3(ROLLOUT, TRAIN, MASK)
    sources: list[Any] = [str(tmp_path), tmp_path, [tmp_path / "d.parquet"], frame, frame.lazy(), frame.to_arrow()]
    sources += [{"rollout": np.nan_to_num(ROLLOUT), "train": np.nan_to_num(TRAIN, posinf=0), "mask": MASK}]
    for source in sources:
        (run,) = mm.analyze(source, corrections="token_tis").runs.values()
        assert run.k3.value == pytest.approx(wanted, rel=1e-8)
    assert isinstance(frame.to_arrow(), pa.Table)
    assert mm.metrics(listed(ROLLOUT), listed(TRAIN))["k3"] == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize("values", [range(2), torch.tensor([0.0, 1.0], dtype=torch.bfloat16)])
def test_values_per_row_can_have_any_type(values: Any) -> None:
    columns = {"rollout": ROW * 2, "train": ROW * 2, "step": range(2), "reward": values}
    (run,) = mm.analyze(columns, by="reward").runs.values()
    assert len(run.groups.labels) == 2 and len(run.by["reward"].labels) == 2


def test_frameworks_are_given_by_name() -> None:
    """The names are the values of `--framework`."""
    made = mm.analyze({"rollout": ROW, "train": ROW}, framework="verl", threads=np.int64(1))
    assert made.provenance.framework.startswith("verl@")


def test_arrow_tables_can_be_columns_or_streams() -> None:
    frame = pl.DataFrame({"rollout_log_probs": ROW * 2, "train_log_probs": ROW * 2, "step": [1, 2]})

    class Stream:
        def __arrow_c_stream__(self, schema: Any = None) -> Any:
            return frame.__arrow_c_stream__(schema)

    for source in (Stream(), dict(zip(frame.columns, frame.to_arrow().columns, strict=True))):
        assert mm.analyze(source)["memory"].groups.labels == [1, 2]


def test_datasets_are_read_as_tables() -> None:
    table = pa.table({"rollout_log_probs": listed(ROLLOUT), "train_log_probs": listed(TRAIN)})
    read, held = (mm.analyze(source).runs["memory"] for source in (Formatted(table), table))
    assert read.overall == held.overall


def test_errors_use_python_terms() -> None:
    rollout = -RNG.exponential(1.0, (160, 8)) - 1
    table = {
        "rollout": rollout,
        "train": rollout + RNG.normal(0, 0.01, rollout.shape),
        "advantages": RNG.normal(size=160),
    }
    (advice,) = mm.advise(table).values()
    assert any(note.endswith("the size of an update is unknown. Pass batch=N") for note in advice.notes)
    (check,) = mm.gate(table, rules="k3:increase=10%").checks
    assert check.reason == "no baseline: pass a Result or the path of a Result as baseline"
    bad = pa.table({"rollout_log_probs": [[-1.0], [1.0]], "train_log_probs": [[-1.0], [-1.0]]})
    verdict = mm.gate(mm.analyze(bad, on_bad="skip"), rules="k3:max=1")
    assert any(check.reason.endswith("Correct the dump, or allow more with max_skipped") for check in verdict.checks)
    assert "--" not in verdict.model_dump_json() and "--" not in advice.model_dump_json()


def test_streamed_datasets_are_refused() -> None:
    class Streamed(torch.utils.data.Dataset[Any]):  # like a Dataset, which accepts torch
        def with_format(self, form: str) -> Streamed:
            return self

    with pytest.raises(ConfigError, match="cannot convert a"):
        mm.analyze(Streamed())


def test_empty_tables_are_refused() -> None:
    """This includes columns without a type."""
    columns = {"rollout_log_probs": [], "train_log_probs": []}
    typed = pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.List(pl.Float64)))
    for table in (columns, {name: np.zeros((0, 4)) for name in columns}, pl.DataFrame(columns), typed):
        with pytest.raises(
            mm.DataError,
            match=r"the table in memory: (no row found in the file|the file does not contain rows); pass a dump",
        ):
            mm.analyze(table)
    with pytest.raises(mm.DataError, match="contains only nulls"):
        mm.analyze({name: [None] for name in columns})


def test_pandas_tables_are_read() -> None:
    pd = pytest.importorskip("pandas")
    columns = {"rollout_log_probs": [np.array(row) for row in ROW * 3], "train_log_probs": ROW * 3}
    frame = pd.DataFrame(columns | {"step": [1, 2, 3]})
    for steps in (frame, frame.set_index("step"), frame.groupby("step").first(), frame.astype({"step": "Int64"})):
        assert mm.analyze(steps)["memory"].groups.labels == [1, 2, 3]
    objects = frame.assign(rollout_log_probs=[np.array(row, dtype=object) for row in ROW * 3])
    assert mm.analyze(objects)["memory"].tokens.value == 6
    for bad, said in (
        (frame.assign(step=pd.array([1, None, 3], dtype="Int64")), "row 1, column step: the value is missing"),
        (frame.assign(train_log_probs=[*ROW, None, *ROW]), "row 1, column train_log_probs: the list is null"),
        (frame.assign(note=[object()] * 3), "column note"),
        (pd.concat([frame, frame[["step"]]], axis=1), "Duplicate column names"),
        (frame.rename(columns={"step": 1}), "column names must be strings, found an int"),
    ):
        with pytest.raises((mm.ConfigError, mm.DataError), match=said):
            mm.analyze(bad)


@pytest.mark.slow
def test_several_sources_can_be_any_collection(tmp_path: Path) -> None:
    """The result for a set does not depend on the order of hashes."""
    names = ["a", "b", "c"]
    for name in names:
        pl.DataFrame(
            {"rollout_log_probs": listed(ROLLOUT), "train_log_probs": listed(TRAIN), "worker": range(len(ROLLOUT))}
        ).write_parquet(tmp_path / f"{name}.parquet")
    listing = sorted(tmp_path.glob("*.parquet"))
    for sources in (iter(listing), set(listing), dict.fromkeys(listing).keys()):
        made = mm.analyze(sources, corrections={"token_tis", "geo_rs"}, by={"worker"})
        assert list(made.runs) == names and list(made["a"].overall.corrections) == ["geo_rs", "token_tis"]
        assert list(made["a"].by) == ["worker"]
    assert list(mm.diagnose(listing[0], by="worker").runs) == ["a"]
    rules = ["abs_diff_max:max=9", "k3:max=9"]
    for given in (iter(rules), set(rules), dict.fromkeys(rules).keys()):
        assert [check.rule for check in mm.gate(listing[0], rules=given).checks] == rules


def test_runs_of_tables_have_stable_names() -> None:
    one = {"rollout": ROW, "train": ROW}
    assert list(mm.analyze([one, one]).runs) == ["1/memory", "2/memory"]


def test_results_have_the_documented_attributes(tmp_path: Path) -> None:
    mine = {"name": "mine", "weight": {"truncate": 2.0}}
    result = mm.analyze(ROOT / "sample_data" / "moe", corrections=["token_tis", mine])
    run = result["moe"]
    assert run.k3.value > 0 and run.k3.se > 0
    assert run.steps["k3"].len() == len(run.groups.labels)
    frame = result.to_polars()
    assert set(frame["correction"].drop_nulls()) == {"token_tis", "mine"}
    assert frame.filter((pl.col("metric") == "k3") & pl.col("correction").is_null())["value"][0] == run.k3.value
    assert str(run).startswith("how bad: K3 0.00417") and "<pre>how bad: " in run._repr_html_()
    for name in ("k3_by_position", "distribution", "k3"):
        run.plot(name).savefig(tmp_path / f"{name}.png")
    with pytest.raises(ConfigError, match="k3_by_position"):
        run.plot("k3_by_positio")
    with pytest.raises(AttributeError, match="unknown metric"):
        _ = run.k4
    with pytest.raises(KeyError, match="no run 'dense'"):
        result["dense"]
    result.save(tmp_path / "r.json")
    again = mm.read_result(tmp_path / "r.json")
    assert again.to_json() == result.to_json()
    assert mm.gate(again, tmp_path / "r.json").passed


def test_metrics_of_a_single_run_need_no_name() -> None:
    moe, dense = (ROOT / "sample_data" / name for name in ("moe", "dense"))
    one = mm.analyze(moe, corrections=())
    assert one.k3 == one["moe"].k3 and one.steps.equals(one["moe"].steps) and one.plot("distribution").axes
    with pytest.raises(AttributeError, match="unknown metric"):
        _ = one.k4
    two = mm.analyze(moe, dense, corrections=(), findings=False)
    with pytest.raises(AttributeError, match=r"unknown attribute 'k3' of a Result with 2 runs: write result\[RUN\].k3"):
        _ = two.k3
    with pytest.raises(KeyError, match=r"choose one, as in result\[RUN\].plot"):
        two.plot()
    assert copy.deepcopy(two) == two and pickle.loads(pickle.dumps(two)) == two


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """Make one object of each type that the functions return, with two runs if possible."""
    moe, dense = (ROOT / "sample_data" / name for name in ("moe", "dense"))
    return {
        "Result": mm.analyze(moe, dense),
        "Sweep": mm.sweep(moe, dense),
        "Comparison": mm.compare(moe, dense),
        "Verdict": mm.gate([moe, dense], rules=["k3:max=0.0001,per=step", "ess_token:min=0.5"]),
        "Diagnosis": mm.diagnose(moe, dense),
        "Advice": mm.advise(moe, dense),
    }


COMMANDS = {"Result": "analyze", "Sweep": "sweep", "Comparison": "compare", "Diagnosis": "diagnose", "Advice": "advise"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Result", "Sweep", "Comparison", "Verdict", "Diagnosis", "Advice"])
def test_every_result_can_be_shown_saved_and_converted(name: str, shown: dict[str, Any], tmp_path: Path) -> None:
    own = shown[name]
    assert type(own) is getattr(mm, name)
    for text in (str(own), repr(own)):
        assert 1 <= len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 100
    cell = own._repr_html_()
    assert len(cell) < 120_000 and "<script" not in cell and "<pre" in cell
    assert cell.count("<img ") == 1
    own.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page == own.to_html() and page.startswith("<!DOCTYPE html>")
    own.save(tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == own.to_json() and json.loads(own.to_json())
    with pytest.raises(ConfigError, match=r"x.html: save writes JSON, .*use to_html$"):
        own.save(tmp_path / "x.html")
    assert not hasattr(own, "write") and not (tmp_path / "x.html").exists()
    table = own.to_polars()
    assert isinstance(table, pl.DataFrame) and table.height
    pd = pytest.importorskip("pandas")
    assert isinstance(own.to_pandas(), pd.DataFrame) and list(own.to_pandas().columns) == table.columns
    if name in COMMANDS:
        places = [str(ROOT / "sample_data" / run) for run in ("moe", "dense")]
        assert run(COMMANDS[name], *places, "--json").stdout == own.to_json()
    if name in ("Result", "Diagnosis", "Advice"):
        assert own["moe"] is own.runs["moe"] and own["dense"] is own.runs["dense"]


def test_notebooks_show_summary_trend_cause_corrections_and_a_chart(shown: dict[str, Any]) -> None:
    cell = mm.analyze(ROOT / "sample_data" / "moe")._repr_html_()
    parts = (
        "how bad",
        "since when",
        "K3 rose",
        "Stale rollout weights",
        "Corrections",
        "token_tis",
        "data:image",
    )
    assert [part for part in parts if part not in cell] == []


def test_verdicts_are_true_if_passed() -> None:
    moe = ROOT / "sample_data" / "moe"
    result = mm.analyze(moe, corrections=(), findings=False)
    verdicts = [mm.gate(result, rule=rule) for rule in ("k3:max=1", "k3:max=0.0001", "k3:increase=20%")]
    assert [verdict.outcome for verdict in verdicts] == ["passed", "failed", "undecided"]
    assert [bool(verdict) for verdict in verdicts] == [True, False, False] == [one.passed for one in verdicts]


def _padded(rows: list[list[float]], width: int) -> Any:
    return np.array([[*row, *[0.0] * (width - len(row))] for row in rows])


@pytest.mark.parametrize("version", ["c2", "d"])
def test_weights_match_goldens_of_the_replaced_helper(version: str) -> None:
    """Weights are compared token by token in float32, with IcePop, normalization and rejection."""
    from tests.conformance.compare_verl import _per_token, corrections, table

    compared, normalized = 0, 0
    for (batch, step, name), golden in _per_token(version).items():
        correction = corrections(version)[name]
        rows = table(batch, step)
        if correction.weight is None or correction.sources != {"train/rollout"} or batch not in ("moe", "multiturn"):
            continue
        columns = {key: rows[key].to_pylist() for key in ("rollout_log_probs", "train_log_probs", "response_mask")}
        width = max(map(len, columns["rollout_log_probs"]))
        made, keep = mm.weights(*(_padded(values, width) for values in columns.values()), correction)
        normalized += correction.weight.normalize != "none"
        for row, sequence in enumerate(rows["sequence_id"].to_pylist()):
            if sequence in golden:
                wanted, kept = golden[sequence]["weights"], golden[sequence]["keep"]
                np.testing.assert_allclose(made[row, : len(wanted)], wanted, rtol=2e-5, atol=1e-7)
                assert keep[row, : len(kept)].tolist() == kept
                compared += len(wanted)
    assert compared > 1000 and normalized


def test_weights_match_analyze() -> None:
    columns = {"rollout": listed(ROLLOUT), "train": listed(TRAIN)}
    for rules in ({"weight": {"truncate": 1.2}}, {"weight": {"clip": [0.8, 1.2], "normalize": "token"}}):
        made, keep = mm.weights(ROLLOUT, TRAIN, MASK, rules)
        (run,) = mm.analyze(columns, corrections=rules, findings=False).runs.values()
        (values,) = run.overall.corrections.values()
        used = made[keep]
        assert values["ess_token"].value == pytest.approx(used.sum() ** 2 / (MASK.sum() * (used**2).sum()))
        assert values["loss_scale"].value == pytest.approx(used.sum() / MASK.sum())


def test_weights_carry_no_gradient() -> None:
    mask = torch.tensor(MASK)
    rollout, train = (torch.tensor(np.where(MASK, values, 0.0), requires_grad=True) for values in (ROLLOUT, TRAIN))
    w, keep = mm.weights(rollout, train, mask, "miles-moe-2", micro_batches=2)
    (-(w * keep * train)).sum().backward()
    assert train.grad is not None and rollout.grad is None
    torch.testing.assert_close(train.grad, -(w * keep))


def test_transposed_arrays_are_read_by_row() -> None:
    square = np.arange(16, dtype=np.float64).reshape(4, 4) * -0.1 - 0.1
    turned = square.T
    made, _ = mm.weights(turned, turned * 1.1, None, {"weight": {"truncate": 5.0}})
    np.testing.assert_allclose(made, np.exp(turned * 1.1 - turned))


@pytest.mark.slow
def test_other_functions_return_their_results() -> None:
    moe = ROOT / "sample_data" / "moe"
    swept = mm.sweep(moe, correction="token_tis", vary={"weight.truncate": [1.5, 2.0]})
    assert swept.overall.height == 2
    assert mm.compare(moe, ROOT / "sample_data" / "dense").to_json()
    assert mm.diagnose(moe).runs
    assert "token_tis" in mm.presets() and mm.preset("token_tis").weight


@pytest.mark.slow
def test_the_examples_of_the_guide_run() -> None:
    failed, tried = doctest.testfile(
        str(ROOT / "docs/guides/python.md"), module_relative=False, optionflags=doctest.ELLIPSIS
    )
    assert not failed and tried > 50
    text = (ROOT / "docs/guides/python.md").read_text()
    shown = "\n".join(line for line in text.splitlines() if line.strip().startswith((">>>", "...")))
    assert [name for name in FUNCTIONS if f"mm.{name}(" not in shown] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_have_an_example_that_runs(name: str) -> None:
    text = inspect.getdoc(getattr(mm, name)) or ""
    assert ">>> " in text or re.search(r"Example:\s+`", text)
    examples = doctest.DocTestParser().get_doctest(text, {"mm": mm}, name, None, 0)
    assert doctest.DocTestRunner().run(examples).failed == 0


def test_run_names_are_escaped() -> None:
    """Run names come from folder names, so terminals and notebooks must escape them."""
    name = "<script>alert(1)</script>\x1b[31m\u202e"
    whole = mm.analyze(ROOT / "sample_data" / "dense", corrections="none")
    made = whole.model_copy(update={"runs": {name: whole["dense"]}})
    assert "\x1b" not in str(made) and "\u202e" not in str(made)
    assert "<script>" not in made._repr_html_() and "\x1b" not in made._repr_html_()


def test_commands_restore_the_threads_of_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, set_threads = _find_openblas() or (None, None)
    assert threads and set_threads
    seen: list[int] = []
    monkeypatch.setattr(mismatchctl.api.advise.advise, "advise", lambda paths, **options: seen.append(threads()) or {})
    monkeypatch.setattr(mismatchctl.api.diagnose, "diagnose", lambda paths, **options: mm.advise("a"))
    before = threads()
    set_threads(2)
    try:
        mm.diagnose("b")
        assert (seen, threads()) == ([1], 2)
        with pytest.raises(DataError):
            mm.analyze("no such file")
        assert threads() == 2
    finally:
        set_threads(before)


def test_log_probs_of_rounding_above_zero_have_breakdowns() -> None:
    """The sum of 1 - p of such tokens is negative, and a standard error is not."""
    table = {"rollout_log_probs": [[1e-4, 1e-4]] * 8, "train_log_probs": [[-0.001 * row, -0.002] for row in range(8)]}
    breakdown = next(iter(mm.analyze(table).runs.values())).breakdowns["surprisal"]
    assert all(error is None or error >= 0 for error in breakdown.logit_shift_se or [])
