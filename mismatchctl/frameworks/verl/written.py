"""A configuration of verl as somebody wrote it: what stands where, what verl makes of it, or why it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mismatchctl.correction import Correction, Gate
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.lint import Level, LintMessage, is_text_of_number
from mismatchctl.frameworks.verl.dialect import read
from mismatchctl.frameworks.verl.keys import find, path_of
from mismatchctl.frameworks.verl.versions import VerlVersion


@dataclass(frozen=True)
class VerlConfig:
    """A configuration as somebody wrote it.

    Attributes:
        root: all of it.
        version: whose it is.
    """

    root: Mapping[str, Any]
    version: VerlVersion

    @cached_property
    def _path(self) -> tuple[str, ...]:
        return path_of(self.root, self.version)

    @cached_property
    def block(self) -> Any:
        """What stands where the keys of rollout correction are looked for."""
        return self.find(*self._path)

    @cached_property
    def section(self) -> Mapping[str, Any]:
        """The keys of rollout correction, those too that this version does not know."""
        return self.block if isinstance(self.block, Mapping) else {}

    @cached_property
    def given(self) -> dict[str, Any]:
        """Those that it knows; a number in quotes is taken for one."""
        known = {key: value for key, value in self.section.items() if key in self.version.keys}
        return {key: float(known[key]) if key in self.texts else known[key] for key in known}

    @cached_property
    def texts(self) -> list[str]:
        """Keys of numbers that stand in quotes; in 2026 verl takes text for a threshold."""
        if self.version.dialect == "estimator":
            return []
        return [key for key, value in self.section.items() if "threshold" in str(key) and is_text_of_number(value)]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """With verl's defaults."""
        return dict(self.version.keys) | self.given

    @cached_property
    def correction(self) -> Correction | ConfigError:
        """What verl makes of it, or why it refuses."""
        try:
            return read(self.given, self.version)
        except ConfigError as error:
            return error

    @property
    def full(self) -> bool:
        """Whether it shows more than rollout correction."""
        return "trainer" in self.root or "actor_rollout_ref" in self.root

    @property
    def veto_key(self) -> str | None:
        """The key of the veto in this version."""
        return next((key for key in self.version.keys if "veto" in key), None)

    @property
    def bypasses(self) -> bool:
        """Whether the recomputation is skipped."""
        return self.version.dialect != "flat" and bool(self.settings[self.version.bypass_key])

    def find(self, *keys: str) -> Any:
        """A value further inside; None if there is none."""
        return find(self.root, *keys)

    def place(self, key: str) -> str:
        """Where a key of rollout correction stands."""
        return ".".join((*self._path, key) if key else self._path)

    def gate_place(self, gate: Gate) -> str:
        """Where the threshold of a gate stands."""
        if gate.is_veto and self.veto_key:
            return self.place(self.veto_key)
        return self.place("rollout_is_threshold" if self.version.dialect == "flat" else "rollout_rs_threshold")

    def finding(
        self,
        level: Level,
        key: str,
        consequence: str,
        fix: str,
        place: str | None = None,
        instead: Correction | None = None,
    ) -> LintMessage:
        """A finding at a key of rollout correction, or at another place."""
        return LintMessage(level, self.place(key) if place is None else place, consequence, fix, self.source, instead)

    @property
    def source(self) -> str:
        """The code that says so."""
        file = "mismatch_helper.py" if self.version.dialect == "flat" else "rollout_corr_helper.py"
        return f"verl {self.version.commit} ({self.version.date}), {file} and its trainers"
