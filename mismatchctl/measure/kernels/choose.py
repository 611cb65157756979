"""Which kernel does the arithmetic: the one whose start a dump of that size pays for."""

from __future__ import annotations

import os
from typing import Literal

from mismatchctl.errors import ConfigError, option
from mismatchctl.measure.kernels.kernel import Kernel

WORTH_COMPILING = 2_000_000
"""Tokens from which the compiled kernel is taken. Loading it takes 0.05 s, which 0.3 M tokens save; on 2 M it saves two
fifths of the command, 0.7 s. Making it takes 8 s, once; in a fresh container, each time."""

WORTH_A_DEVICE = 1_000_000_000
"""Tokens from which a device is worth its start. Torch and a CUDA context take some five seconds; of the time of a
token, the device can save its arithmetic, which is about 15 ns with five corrections and is shared by the threads."""
Device = Literal["auto", "cpu", "cuda"]


def worth_compiling(tokens: int) -> bool:
    """Whether a dump of so many tokens is worth the compiled loops, and numba may make them."""
    return tokens >= WORTH_COMPILING and os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")


def kernel_for(tokens: int, device: Device = "cpu") -> Kernel:
    """The kernel for a dump of so many tokens: on a device or compiled where that pays.

    Raises:
        ConfigError: there is no such device.
    """
    if device == "cuda" or (device == "auto" and tokens >= WORTH_A_DEVICE):
        from mismatchctl.measure.kernels.device import accelerators, kernel_on

        found = accelerators()
        if found:
            return kernel_on(found)
        if device == "cuda":
            import torch

            raise ConfigError(
                f"{option('device', 'cuda')}: torch {torch.__version__} finds no CUDA device here; "
                f"leave {option('device')} out for the CPU"
            )
    if not worth_compiling(tokens):
        from mismatchctl.measure.kernels.plain import PLAIN

        return PLAIN
    from mismatchctl.measure.kernels.compiled import COMPILED

    return COMPILED
