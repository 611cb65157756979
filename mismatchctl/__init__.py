"""mismatchctl: the mismatch between rollout and training log-probs, measured, corrected and gated.

`import mismatchctl as mm` costs nothing: what is asked for is loaded then. docs/python.md shows each name.
"""

import sys
from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_VERBS = ("analyze", "sweep", "compare", "gate", "diagnose", "lint", "advise")
_NAMES = (
    *_VERBS,
    *("ConfigError", "Correction", "DataError", "Result", "chi2", "ess", "k1", "k2", "k3", "keep", "metrics"),
    *("preset", "presets", "read_result", "weights"),
)


class _Verb(ModuleType):
    """A module of the package that is called like the function of its name in the front door."""

    def __call__(self, *given: object, **named: object) -> object:
        return getattr(import_module("mismatchctl.api.public"), self.__name__.rpartition(".")[2])(*given, **named)


class _Package(ModuleType):
    """This package: its verbs can be called, whether they were imported before or not."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _VERBS and isinstance(value, ModuleType):
            value.__class__ = _Verb
        super().__setattr__(name, value)


def __getattr__(name: str) -> object:
    if name in _VERBS:
        return import_module(f"mismatchctl.{name}")
    if name in _NAMES:
        return getattr(import_module("mismatchctl.api.public"), name)
    raise AttributeError(f"module 'mismatchctl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_NAMES, "__version__"])


sys.modules[__name__].__class__ = _Package
