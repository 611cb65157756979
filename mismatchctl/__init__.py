"""mismatchctl measures, corrects and gates the mismatch between rollout and training log-probs.

`import mismatchctl as mm` is fast, because each name is imported when it is first used. See docs/guides/python.md.
"""

from importlib import import_module

from mismatchctl.io import __version__ as __version__
from mismatchctl.results import register_renderer

TYPE_CHECKING = False  # not `typing.TYPE_CHECKING`: importing typing takes longer than the rest of this module
if TYPE_CHECKING:
    from mismatchctl.api.advise.advice import Advice
    from mismatchctl.api.compare.comparison import Comparison
    from mismatchctl.api.estimators import chi2, ess, k1, k2, k3, keep, weights
    from mismatchctl.api.gate.verdict import Verdict
    from mismatchctl.api.public import (
        advise,
        analyze,
        compare,
        diagnose,
        gate,
        lint,
        metrics,
        pair,
        preset,
        presets,
        read_config,
        read_result,
        sweep,
    )
    from mismatchctl.api.sweep.result import Sweep
    from mismatchctl.corrections.model import Correction
    from mismatchctl.diagnosis.diagnosis import Diagnosis
    from mismatchctl.errors import ConfigError, DataError
    from mismatchctl.results.model import Result
    from mismatchctl.results.views import Renderer

__all__ = [
    "Advice", "Comparison", "ConfigError", "Correction", "DataError", "Diagnosis", "Result", "Sweep", "Verdict",
    "advise", "analyze", "chi2", "compare", "diagnose", "ess", "gate", "k1", "k2", "k3", "keep", "lint", "metrics",
    "pair", "preset", "presets", "read_config", "read_result", "sweep", "weights",
]  # fmt: skip
_MODULES = {
    "Advice": "mismatchctl.api.advise.advice", "Comparison": "mismatchctl.api.compare.comparison",
    "ConfigError": "mismatchctl.errors", "Correction": "mismatchctl.corrections.model",
    "DataError": "mismatchctl.errors", "Diagnosis": "mismatchctl.diagnosis.diagnosis",
    "Result": "mismatchctl.results.model", "Sweep": "mismatchctl.api.sweep.result",
    "Verdict": "mismatchctl.api.gate.verdict",
    **dict.fromkeys(("chi2", "ess", "k1", "k2", "k3", "keep", "weights"), "mismatchctl.api.estimators"),
}  # fmt: skip
"""Module of each public name, except for names that are defined in `mismatchctl.api.public`."""


def _load_renderer() -> "Renderer":
    from mismatchctl.report.notebook import get_report_renderer  # results/ must not import report/ itself

    return get_report_renderer()


register_renderer(_load_renderer)


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module(_MODULES.get(name, "mismatchctl.api.public")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
