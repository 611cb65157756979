"""mismatchctl: the mismatch between rollout and training log-probs, measured, corrected and gated.

`import mismatchctl as mm` costs nothing: what is asked for is loaded then. docs/python.md shows each name.
"""

from mismatchctl.io.version import __version__ as __version__

_NAMES = (
    *("analyze", "sweep", "compare", "gate", "diagnose", "lint", "advise"),
    *("ConfigError", "Correction", "DataError", "Result", "chi2", "ess", "k1", "k2", "k3", "keep", "metrics"),
    *("preset", "presets", "read_result", "weights"),
)


def __getattr__(name: str) -> object:
    if name in _NAMES:
        from mismatchctl.api import public

        return getattr(public, name)
    raise AttributeError(f"module 'mismatchctl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_NAMES, "__version__"])
