"""No output contains NaN or an infinite number, whatever the log-probs are."""

import csv
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.main import get_command

from mismatchctl.cli.main import app
from tests.cli.command import run

EXTREMES = {
    "far": (-1e4, 1.0), "tiny": (-1e-300, 1.0), "rewards": (-3.0, 1e300),
    "sentinel": (-3.4e38, 1.0),
}  # fmt: skip
"""Extreme log-probs of the trainer, and the size of rewards and advantages."""
VERBS = {
    "analyze": ["analyze", "a.parquet", "--json", "-c", "seq_is_rs", "-c", "none", "--by", "worker"],
    "sequences": ["analyze", "a.parquet", "-q", "-o", "out/r.json", "--sequences", "out/q.parquet", "-c", "seq_is"],
    "sweep": ["sweep", "a.parquet", "--json", "-c", "seq_is", "--vary", "weight.truncate=1:1e9:3:log"],
    "sweep.csv": ["sweep", "a.parquet", "-q", "-c", "seq_is", "--vary", "weight.truncate=1:9:3", "-o", "out/s.csv"],
    "sweep.parquet": ["sweep", "a.parquet", "-q", "--target-rejection", "0.1", "-o", "out/s.parquet"],
    "compare": ["compare", "b.parquet", "a.parquet", "--json"],
    "gate": ["gate", "a.parquet", "--rule", "k3:max=1", "--rule", "abs_diff_max:max=1", "--json"],
    "baseline": ["gate", "a.parquet", "--baseline", "b.json", "--json", "--save-baseline", "out/b.json", "--accept"],
    "diagnose": ["diagnose", "a.parquet", "--json"],
    "advise": ["advise", "a.parquet", "--json"],
    "convert": ["convert", "a.parquet", "out/c.parquet", "-q"],
    "lint": ["lint", "a.yaml", "a.parquet", "--json"],
    "report": ["report", "b.json", "--markdown", "out/r.md"],
    "analyze.md": ["analyze", "a.parquet", "-q", "-c", "seq_is", "--by", "worker", "--markdown", "out/a.md"],
    "gate.md": ["gate", "a.parquet", "--baseline", "b.json", "--markdown", "out/g.md", "--junit", "out/g.xml"],
    "watch": ["watch", "a.parquet", "--until-idle", "0.01s", "--every", "0.01s", "--rule", "k3:max=1"],
    "schema": ["schema", "--check", "a.parquet"],
}  # fmt: skip
PAGES = {
    "analyze": ["analyze", "a.parquet", "-q", "--html", "out/r.html"],
    "compare": ["compare", "b.parquet", "a.parquet", "-q", "--html", "out/c.html"],
    "sweep": ["sweep", "a.parquet", "-q", "-c", "seq_is", "--vary", "weight.truncate=1:9:3", "--html", "out/s.html"],
}
NUMBER = re.compile(r"(?<![\w.-])[-+]?(?:nan|inf(?:inity)?)(?![\w-])", re.IGNORECASE)
"""A number that is not finite in the data of a page. `-inf` as an open bound is allowed in text."""


def dump(path: Path, value: float, size: float, seed: int) -> None:
    """Write sequences of 1 to 12 tokens in 4 steps. One step has a single sequence of one token."""
    noise = np.random.default_rng(seed)
    lengths = np.append(noise.integers(1, 12, 40), 1)
    ends = np.cumsum(lengths)[:-1]
    rollout = -noise.exponential(1.0, lengths.sum()) - 1e-6
    train = np.minimum(rollout + 0.05 * noise.standard_normal(len(rollout)), -1e-9)
    train[::7], rollout[3::11] = value, value
    columns: dict[str, Any] = {
        name: [part.tolist() for part in np.split(values, ends)]
        for name, values in {
            "rollout_log_probs": rollout, "train_log_probs": train,
            "advantages": size * noise.standard_normal(len(train)), "token_ids": noise.integers(0, 50, len(train)),
        }.items()
    }  # fmt: skip
    rows = len(lengths)
    ids = {"step": np.arange(rows) // 14, "prompt_id": np.arange(rows) % 10, "worker": np.arange(rows) % 2}
    pq.write_table(pa.table({**columns, **ids, "reward": size * noise.standard_normal(rows)}), path)


def numbers(data: Any) -> Iterator[float]:
    if isinstance(data, dict):
        for value in data.values():
            yield from numbers(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from numbers(value)
    elif isinstance(data, float):
        yield data


def without_code(page: str) -> str:
    """Return a page without the code of its scripts, which contains the word NaN."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def check_numbers(path: Path) -> Iterator[float]:
    if path.suffix == ".json":
        yield from numbers(json.loads(path.read_text()))
    elif path.suffix == ".parquet":
        yield from numbers(pq.read_table(path).to_pydict())
    elif path.suffix == ".csv":
        for row in csv.reader(path.read_text().splitlines()):
            yield from (float(cell) for cell in row if re.fullmatch(r"[-+]?(\d.*|nan|inf.*)", cell, re.IGNORECASE))
    elif path.suffix in (".html", ".md", ".xml"):
        yield from map(float, NUMBER.findall(without_code(path.read_text())))


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    value, size = EXTREMES[request.param]
    dump(tmp_path / "a.parquet", value, size, 0)
    dump(tmp_path / "b.parquet", -1.0, 1.0, 1)
    (tmp_path / "a.yaml").write_text("algorithm:\n  rollout_correction:\n    rollout_is: token\n")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    run("gate", "b.parquet", "--save-baseline", "b.json", "--accept")
    return tmp_path


def check_command(folder: Path, argv: list[str]) -> None:
    for path in (folder / "out").iterdir():
        path.unlink()
    done = run(*argv)
    assert done.exit_code in (0, 3, 4), (argv, done.exit_code, done.stderr, done.exception)
    assert done.exit_code != 4 or argv[0] == "gate", (argv, done.stderr)
    if "--json" in argv:
        assert all(map(math.isfinite, numbers(json.loads(done.stdout)))), argv
    for path in (folder / "out").iterdir():
        assert all(map(math.isfinite, check_numbers(path))), (argv, path.name)


@pytest.mark.slow
@pytest.mark.parametrize("folder", EXTREMES, indirect=True)
def test_outputs_contain_only_finite_numbers(folder: Path) -> None:
    for argv in VERBS.values():
        check_command(folder, argv)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["far"], indirect=True)
@pytest.mark.parametrize("verb", PAGES)
def test_pages_draw_only_finite_numbers(folder: Path, verb: str) -> None:
    check_command(folder, PAGES[verb])


def test_every_measuring_command_is_tested() -> None:
    """Commands without a dump print no numbers. `score` refuses extreme values in another test."""
    without = {"metrics", "presets", "doctor", "score", "demo", "init"}
    assert set(get_command(app).commands) == {argv[0] for argv in VERBS.values()} | without


def test_the_search_finds_non_finite_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1.0, NaN]}')
    (tmp_path / "a.csv").write_text("x,y\n1,inf\n")
    (tmp_path / "a.html").write_text("<script>const x = NaN</script><path d='M 0 nan'/><p>information, nano</p>")
    (tmp_path / "b.html").write_text('<script type="application/json">{"y":[1,NaN]}</script>')
    pq.write_table(pa.table({"x": [[1.0, math.inf]]}), tmp_path / "a.parquet")
    for path in tmp_path.iterdir():
        assert not all(map(math.isfinite, check_numbers(path))), path.name
