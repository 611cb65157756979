"""In every command, `--micro-batch-size N` equals a column `micro_batch` with N rows of a step each."""

import json
from typing import Any

import numpy as np
import pytest

from mismatchctl.recorder.recorder import Recorder
from tests.cli.command import run

SIZE = 4
CORRECTION = "miles-moe-1"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write the same sequences with and without the column, and worse sequences."""
    folder = tmp_path_factory.mktemp("micro")
    for name, noise, named in (
        ("plain", 0.2, False),
        ("named", 0.2, True),
        ("w-plain", 0.3, False),
        ("w-named", 0.3, True),
    ):
        rng = np.random.default_rng(3)
        with Recorder(folder / name) as recorder:
            for step in range(2):
                rollout = [-1.5 - rng.exponential(1.0, int(n)) for n in rng.integers(10, 40, 10)]
                train = [row + rng.normal(0, noise, len(row)).clip(-1, 1) for row in rollout]
                column = {"micro_batch": np.arange(10) // SIZE} if named else {}
                recorder.write(
                    step=step, rollout_log_probs=rollout, train_log_probs=train, sequence_id=np.arange(10), **column
                )
    return {name: str(folder / name) for name in ("plain", "named", "w-plain", "w-named")}


def reported(*words: str, codes: tuple[int, ...] = (0,)) -> Any:
    done = run(*words, "--json")
    assert done.exit_code in codes, done.output
    return json.loads(done.stdout)


def swept(path: str, *words: str) -> list[dict[str, float]]:
    found = reported("sweep", path, "-c", CORRECTION, "--vary", "weight.clip.1=1.2:3:3", *words)
    return [
        {name: value}
        for name in ("weight_std", "ess_token", "normalization_factor")
        for value in found["table"][name]
        if value is not None
    ]


def compared(one: str, other: str, *words: str) -> list[dict[str, float]]:
    found = reported("compare", one, other, "-c", CORRECTION, *words)
    return _numbers(found, ("reference", "other", "difference", "value"))


def gated(path: str, *words: str) -> list[dict[str, float]]:
    rules = [
        word
        for key in ("weight_std", "ess_token", "normalization_factor")
        for word in ("--rule", f"{key}:correction={CORRECTION},max=0.01")
    ]
    return _numbers(reported("gate", path, "-c", CORRECTION, *rules, *words, codes=(3, 4)), ("value",))


def _numbers(found: Any, names: tuple[str, ...]) -> list[dict[str, float]]:
    if isinstance(found, list):
        return [each for item in found for each in _numbers(item, names)]
    if not isinstance(found, dict):
        return []
    own = [{name: value} for name, value in found.items() if name in names and isinstance(value, float)]
    return own + [each for value in found.values() for each in _numbers(value, names)]


def are_equal(one: list[dict[str, float]], other: list[dict[str, float]]) -> bool:
    assert one and [[*each] for each in one] == [[*each] for each in other]
    pairs = [(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a]
    return all(a == pytest.approx(b, rel=1e-9, abs=1e-12) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sweep", "compare", "gate"])
def test_the_micro_batch_option_equals_the_column(verb: str, dumps: dict[str, str]) -> None:
    def numbers(kind: str, *words: str) -> list[dict[str, float]]:
        path, worse = dumps[kind], dumps[f"w-{kind}"]
        return (
            {"sweep": swept, "gate": gated}[verb](path, *words) if verb != "compare" else compared(path, worse, *words)
        )

    flag = ("--micro-batch-size", str(SIZE))
    assert are_equal(numbers("plain", *flag), numbers("named"))
    assert not are_equal(numbers("plain"), numbers("named"))
    assert not are_equal(numbers("plain", "--micro-batch-size", "1"), numbers("named"))


@pytest.mark.parametrize("verb", ["sweep", "compare", "gate"])
def test_the_micro_batch_size_must_be_positive(verb: str, dumps: dict[str, str]) -> None:
    paths = [dumps["plain"], dumps["w-plain"]][: 2 if verb == "compare" else 1]
    done = run(verb, *paths, "-c", CORRECTION, "--micro-batch-size", "0", code=2)
    assert "micro-batch-size" in done.stderr
