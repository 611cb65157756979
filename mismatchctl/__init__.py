"""mismatchctl: the mismatch between rollout and training log-probs, measured, corrected and gated.

`import mismatchctl as mm` loads nothing heavy: each name is imported when it is used. The guide: docs/guides/python.md.
"""

from typing import TYPE_CHECKING

from mismatchctl.io import __version__ as __version__
from mismatchctl.results import register_renderer

if TYPE_CHECKING:
    from mismatchctl.api.public import (
        Advice,
        Comparison,
        ConfigError,
        Correction,
        DataError,
        Diagnosis,
        Result,
        Sweep,
        Verdict,
        advise,
        analyze,
        chi2,
        compare,
        diagnose,
        ess,
        gate,
        k1,
        k2,
        k3,
        keep,
        lint,
        metrics,
        pair,
        preset,
        presets,
        read_config,
        read_result,
        sweep,
        weights,
    )
    from mismatchctl.results.views import Renderer

__all__ = [
    "Advice",
    "Comparison",
    "ConfigError",
    "Correction",
    "DataError",
    "Diagnosis",
    "Result",
    "Sweep",
    "Verdict",
    "advise",
    "analyze",
    "chi2",
    "compare",
    "diagnose",
    "ess",
    "gate",
    "k1",
    "k2",
    "k3",
    "keep",
    "lint",
    "metrics",
    "pair",
    "preset",
    "presets",
    "read_config",
    "read_result",
    "sweep",
    "weights",
]


def _load_renderer() -> "Renderer":
    from mismatchctl.report.notebook import (
        get_report_renderer,  # report/ is above results/, and nothing else points upward
    )

    return get_report_renderer()


register_renderer(_load_renderer)


def __getattr__(name: str) -> object:
    if name in __all__:
        from mismatchctl.api import public

        return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
