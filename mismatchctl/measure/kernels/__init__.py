"""Kernels compute sums over tokens: in numpy, in compiled loops or on a GPU."""

from __future__ import annotations

import os
from typing import Literal

from mismatchctl.errors import ConfigError, option
from mismatchctl.io.stores import first_error_line
from mismatchctl.measure.kernels.kernel import NUMPY_KERNEL, Kernel

MIN_COMPILED_TOKENS = 2_000_000
"""Dumps with at least this number of tokens use the compiled kernel. It loads in 0.05 s and saves 40% of the time."""
MIN_DEVICE_TOKENS = 1_000_000_000
"""With `device="auto"`, dumps of at least this size use a GPU if there is at least one correction per thread."""
# The start takes 5 s. Without corrections, an H200 takes 8 ns more per token than 4 threads. A correction saves 4 ns.
Device = Literal["auto", "cpu", "cuda"]


def find_devices() -> tuple[tuple[str, ...], str]:
    """Return the names of the GPUs, and the message that users see if this machine lacks a GPU."""
    try:
        import torch

        from mismatchctl.measure.kernels.device_kernel import accelerators

        return accelerators(), f"torch {torch.__version__} finds no CUDA device here"
    except ModuleNotFoundError as error:
        return (), f"needs torch ({error}). Install it with: pip install torch"
    except Exception as error:  # a broken installation may raise any error
        return (), f"needs torch, which cannot be loaded ({first_error_line(error)}). Install torch again"


def choose_kernel(tokens: int, device: Device = "cpu", corrections_per_thread: float = 0.0) -> Kernel:
    saves_time = tokens >= MIN_DEVICE_TOKENS and corrections_per_thread >= 1
    if device == "cuda" or (device == "auto" and saves_time):
        found, problem = find_devices()
        if found:
            from mismatchctl.measure.kernels.device_kernel import DeviceKernel

            return DeviceKernel(found)
        if device == "cuda":
            raise ConfigError(f"{option('device', 'cuda')}: {problem}; leave {option('device')} out to use the CPU")
    if tokens < MIN_COMPILED_TOKENS or os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return NUMPY_KERNEL
    from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL

    return COMPILED_KERNEL
