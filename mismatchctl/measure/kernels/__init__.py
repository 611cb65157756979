"""Kernels: the arithmetic over tokens in numpy, compiled, and on a device."""

from __future__ import annotations

import os
from typing import Literal

from mismatchctl.errors import ConfigError, option
from mismatchctl.measure.kernels.kernel import Kernel

MIN_COMPILED_TOKENS = 2_000_000
"""Tokens from which the compiled kernel is taken. Loading it takes 0.05 s, which 0.3 M tokens save; on 2 M it saves two
fifths of the command, 0.7 s. Making it takes 8 s, once; in a fresh container, each time."""

MIN_DEVICE_TOKENS = 1_000_000_000
"""Tokens from which a device is worth its start. Torch and a CUDA context take some five seconds; of the time of a
token, the device can save its arithmetic, which is about 15 ns with five corrections and is shared by the threads."""
Device = Literal["auto", "cpu", "cuda"]


def is_worth_compiling(tokens: int) -> bool:
    """Whether a dump of so many tokens is worth the compiled loops, and numba may make them."""
    return tokens >= MIN_COMPILED_TOKENS and os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")


def choose_kernel(tokens: int, device: Device = "cpu") -> Kernel:
    """The kernel for a dump of so many tokens: on a device or compiled where that pays.

    Raises:
        ConfigError: there is no such device.
    """
    if device == "cuda" or (device == "auto" and tokens >= MIN_DEVICE_TOKENS):
        from mismatchctl.measure.kernels.device_kernel import accelerators, build_device_kernel

        found = accelerators()
        if found:
            return build_device_kernel(found)
        if device == "cuda":
            import torch

            raise ConfigError(
                f"{option('device', 'cuda')}: torch {torch.__version__} finds no CUDA device here; "
                f"leave {option('device')} out for the CPU"
            )
    if not is_worth_compiling(tokens):
        from mismatchctl.measure.kernels.numpy_kernel import NUMPY_KERNEL

        return NUMPY_KERNEL
    from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL

    return COMPILED_KERNEL
