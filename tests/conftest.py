"""Fixtures and options of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from tests.factories.dump_files import FORMAT
from tests.report.browser import reason_to_skip
from tests.report.browser import start as start_browser

if TYPE_CHECKING:
    from mismatchctl.measure.kernels.kernel import Kernel

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a work unit runs in one thread, as in the command
vars(typer.testing)["_get_command"] = cache(
    typer.main.get_command
)  # the picture is the same for all tests, and slow to draw
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")  # benchmarks measure speed, and a busy machine must not fail a test


def module_marks(item: pytest.Item) -> list[pytest.Mark]:
    module = item.getparent(pytest.Module)
    return module.own_markers if module is not None else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow modules first, so that no worker waits for one of them at the end."""
    items.sort(key=lambda item: not any(mark.name == "slow" for mark in module_marks(item)))


@pytest.fixture(
    scope="session", params=["compiled", "torch on the CPU", pytest.param("torch on CUDA", marks=pytest.mark.gpu)]
)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL

    if request.param == "compiled":
        return COMPILED_KERNEL
    from mismatchctl.measure.kernels.device_kernel import DeviceKernel, accelerators

    devices = accelerators() if request.param == "torch on CUDA" else ("cpu",)
    if not devices:
        pytest.skip("no accelerator")
    return DeviceKernel(devices)


@pytest.fixture(scope="module")
def row_groups_apart() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mismatchctl.data.catalog.UNIT_TOKENS", 0)
        yield


@pytest.fixture(scope="module", params=["parquet", "arrow", "stream"])
def file_format(request: pytest.FixtureRequest) -> Iterator[str]:
    token = FORMAT.set(request.param)
    yield request.param
    FORMAT.reset(token)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    yield from start_browser(tmp_path_factory.mktemp("profile"))
