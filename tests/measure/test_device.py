"""The device of the arithmetic, its option, and the transfer of tables but not of tokens."""

import json
import math
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.core.batch import TokenBatch
from mismatchctl.corrections.model import Correction
from mismatchctl.data.engines import Engine, IncrementalEngine, LocalEngine
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.measure.kernels import MIN_DEVICE_TOKENS, choose_kernel
from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL
from mismatchctl.measure.kernels.kernel import NUMPY_KERNEL, Kernel
from mismatchctl.measure.reduction import MeasurePlan, reduce_batch
from tests.cli import command
from tests.factories.batches import made_batch
from tests.paths import SAMPLE_DATA

SAMPLE = SAMPLE_DATA / "dense"
ACCELERATORS = "mismatchctl.measure.kernels.device_kernel.accelerators"

WITH_CURRENT = frozenset({"current_log_probs"})


run = partial(command.run, "analyze", SAMPLE)


def cpu_as_device() -> str:
    import torch

    return f"cpu with torch {torch.__version__}"


def test_a_missing_device_gives_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ACCELERATORS, lambda: ())
    done = run("--device", "cuda", "-o", tmp_path / "result.json", code=2)
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "finds no CUDA device here" in done.stderr
    assert not any(tmp_path.iterdir())


def test_a_full_device_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 MiB")

    monkeypatch.setattr(ACCELERATORS, lambda: ("cpu",))
    monkeypatch.setattr("mismatchctl.measure.kernels.device_kernel.to_device", full)
    done = run("--device", "cuda")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: out of GPU memory; use fewer --threads, or --device cpu\n"


def numbers(value: Any) -> Any:
    """Return a Result's JSON with numbers rounded, so that results that differ only by rounding are equal."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-6, abs=1e-10, nan_ok=True)
    if isinstance(value, list):
        return [numbers(each) for each in value]
    return {key: numbers(each) for key, each in value.items()} if isinstance(value, dict) else value


@pytest.mark.slow
def test_the_command_uses_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The device is torch on the CPU."""
    monkeypatch.setattr(ACCELERATORS, lambda: ("cpu",))
    words = ("-c", "token_tis", "-c", "geo_rs", "-c", "miles-moe-2", "--by", "worker", "--json")
    rows = tmp_path / "rows.parquet"
    on_device = json.loads(run(*words, "--device", "cuda", "--sequences", rows).stdout)
    on_cpu = json.loads(run(*words, "--device", "cpu").stdout)
    assert rows.exists()
    assert on_device["provenance"].pop("device") == cpu_as_device()
    assert on_device == numbers(on_cpu)


def test_cpu_results_name_no_device() -> None:
    plain = analyze([str(SAMPLE)], device="cpu").to_json()
    assert plain == analyze([str(SAMPLE)]).to_json()
    assert "device" not in json.loads(plain)["provenance"]


@pytest.mark.slow
def test_device_results_are_equal_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ACCELERATORS, lambda: ("cpu", "cpu"))
    corrections = [find_preset("token_tis"), find_preset("geo_rs")]
    one, three = (analyze([str(SAMPLE)], corrections, threads=threads, device="cuda") for threads in (1, 3))
    assert one.provenance.device == f"2 x {cpu_as_device()}"
    assert one.to_json() == three.to_json()


def test_auto_uses_a_device_only_for_large_dumps_with_many_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ACCELERATORS, lambda: ("cpu",))
    assert choose_kernel(100, "auto") is NUMPY_KERNEL
    assert choose_kernel(MIN_DEVICE_TOKENS - 1, "auto", 1.0) is COMPILED_KERNEL
    assert choose_kernel(MIN_DEVICE_TOKENS, "auto", 0.9) is COMPILED_KERNEL
    assert choose_kernel(MIN_DEVICE_TOKENS, "auto", 1.0).device == cpu_as_device()
    assert choose_kernel(MIN_DEVICE_TOKENS, "cpu") is COMPILED_KERNEL
    assert choose_kernel(100, "cuda").device == cpu_as_device()
    monkeypatch.setattr(ACCELERATORS, lambda: ())
    assert choose_kernel(MIN_DEVICE_TOKENS, "auto", 1.0) is COMPILED_KERNEL
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_kernel(MIN_DEVICE_TOKENS, "cuda")


@pytest.mark.parametrize("engine", [LocalEngine(4), IncrementalEngine(LocalEngine(4))], ids=["threads", "watch"])
def test_corrections_are_counted_per_thread(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    given: list[tuple[Any, ...]] = []

    def note(tokens: int, *others: Any) -> Kernel:
        given.append(others)
        return NUMPY_KERNEL

    monkeypatch.setattr("mismatchctl.api.analyze.analyze.choose_kernel", note)
    analyze([str(SAMPLE)], [find_preset("token_tis"), find_preset("geo_rs")], engine=engine)
    assert given == [("auto", 0.5)]


@pytest.mark.process
def test_small_dumps_do_not_load_torch() -> None:
    code = (
        "import sys; from mismatchctl.api.analyze.analyze import analyze; "
        "analyze(sys.argv[1:]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(SAMPLE)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_other_engines_refuse_a_device() -> None:
    done = run("--device", "cuda", "--engine", "ray")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: --device cuda does not work with --engine ray; leave one of them out\n"


def test_threads_use_devices_in_turn() -> None:
    from mismatchctl.measure.kernels.device_kernel import DeviceKernel

    kernel = DeviceKernel(("cpu", "cpu:0"))
    batch, taken = made_batch(0, [3, 4], np.float32), []

    def work() -> None:
        own = [str(block.segments.device) for _ in range(3) for _, block in kernel.split_blocks(batch)]
        assert len(set(own)) == 1
        taken.append(own[0])

    for _ in range(4):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert sorted(taken) == ["cpu", "cpu", "cpu:0", "cpu:0"]


EVERYTHING = Correction.model_validate(
    {
        "weight": {"zero": [0.8, 1.2]},
        "gates": [
            {"keep": [0.7, 1.5]},
            {"statistic": "k3", "level": "mean", "keep": [None, 0.1], "sees": "remaining"},
            {"level": "geometric", "over": "segment", "keep": [0.9, 1.1], "when": "positive_advantage"},
            {"level": "min", "keep": [1e-4, None]},
        ],
        "loss": "policy_gradient",
    }
)


@pytest.mark.slow
def test_no_token_arrays_are_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tables by bin, values per sequence, tails and ends of turns are copied."""
    from mismatchctl.measure.kernels import device_kernel
    from mismatchctl.measure.kernels.device_kernel import DeviceKernel

    sizes: list[int] = []

    def watched(values: Any) -> Any:
        sizes.append(values.numel())
        return copied(values)

    copied = device_kernel.to_host
    monkeypatch.setattr(device_kernel, "to_host", watched)
    monkeypatch.setattr("mismatchctl.measure.kernels.device_kernel.to_host", watched)
    batch = made_batch(1, [10_000] * 70, np.float32, scale=0.01)
    plan = MeasurePlan((EVERYTHING,), available_columns=WITH_CURRENT, kernel=DeviceKernel(("cpu",)))
    table = reduce_batch(batch, "run", plan).cells["run", (None, ())].table
    assert len(sizes) > 50
    assert max(sizes) < batch.tokens
    plain = reduce_batch(batch, "run", MeasurePlan((EVERYTHING,), available_columns=WITH_CURRENT))
    np.testing.assert_allclose(table.sums, plain.cells["run", (None, ())].table.sums, rtol=1e-8, atol=1e-8)


def test_host_and_device_do_not_mix() -> None:
    import torch

    from mismatchctl.measure.kernels.device_kernel import to_device, to_device_array

    device = to_device_array(to_device(np.array([1.0, 2.0]), torch.device("cpu")))
    with pytest.raises(TypeError, match="with an array on a device"):
        device + np.array([1.0, 2.0])
    with pytest.raises(TypeError):
        np.median(device)
    with pytest.raises(TypeError):
        np.hypot(device, device)
    assert (2 * device - np.float64(1.0))[np.array([1])].tolist() == [3.0]


def test_read_only_and_strided_arrays_are_copied() -> None:
    import torch

    from mismatchctl.measure.kernels.device_kernel import to_device, to_host

    values = np.arange(10, dtype=np.float32)[::3]
    values.flags.writeable = False
    np.testing.assert_array_equal(to_host(to_device(values, torch.device("cpu"))), [0, 3, 6, 9])


def test_empty_groups_work_on_a_device() -> None:
    from mismatchctl.measure.kernels.device_kernel import DeviceKernel

    batch: TokenBatch = made_batch(1, [0, 0], np.float64)
    sums = reduce_batch(
        batch, "run", MeasurePlan((EVERYTHING,), available_columns=WITH_CURRENT, kernel=DeviceKernel(("cpu",)))
    )
    table = sums.cells["run", (None, ())].table
    assert math.isfinite(table.sums.sum())
