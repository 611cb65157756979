"""What `--correction`, `--config` and the `--is-*`, `--rs-*` and `--veto` flags mean, as Corrections."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mismatchctl.cli.output import say
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.correction import Correction
    from mismatchctl.frameworks import Framework


Level = Literal["token", "sequence", "geometric"]
"""Of a weight or of a rejection."""
rule_option = partial(typer.Option, rich_help_panel="One more correction, from flags")


@dataclass(frozen=True)
class RuleFlags:
    """The flags that spell one correction."""

    is_level: Annotated[Level | None, rule_option(help="Importance weights at this level.")] = None
    is_threshold: Annotated[float | None, rule_option(help="Upper bound of weights.")] = None
    is_lower: Annotated[float | None, rule_option(help="Lower bound of weights.")] = None
    is_mode: Annotated[
        Literal["truncate", "clip", "zero"] | None, rule_option(help="Weights outside: truncate above, clip, or zero.")
    ] = None
    normalize: Annotated[Literal["none", "token", "sequence"], rule_option(help="Divide weights by their mean.")] = (
        "none"
    )
    rs_level: Annotated[Level | None, rule_option(help="Reject by the ratio at this level.")] = None
    rs_lower: Annotated[float | None, rule_option(help="Smallest ratio kept.")] = None
    rs_upper: Annotated[float | None, rule_option(help="Largest ratio kept.")] = None
    veto: Annotated[float | None, rule_option(help="Reject a sequence with any token ratio below this.")] = None

    def correction(self) -> Correction | None:
        """The correction called `flags`, if any of its flags was given.

        Raises:
            ConfigError: flags that need another one, or exclude each other.
        """
        if self == RuleFlags():
            return None
        from mismatchctl.correction import correction_from_mapping

        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: write a finite number, or leave it out")
        weight, gates = self._weight(), [*self._rejection(), *self._veto()]
        return correction_from_mapping({"name": "flags", "weight": weight, "gates": gates}, "flags")

    def _weight(self) -> dict[str, Any] | None:
        bounds = self.is_threshold, self.is_lower
        if self.is_level is None:
            if bounds != (None, None) or self.is_mode is not None or self.normalize != "none":
                raise ConfigError("--is-threshold, --is-lower, --is-mode and --normalize need --is-level")
            return None
        mode = self.is_mode or ("truncate" if self.is_lower is None else "clip")
        weight: dict[str, Any] = {"level": self.is_level, "normalize": self.normalize}
        if bounds == (None, None):
            if self.is_mode is not None:
                raise ConfigError("--is-mode needs a bound: --is-threshold, --is-lower")
            return weight
        if mode == "truncate" and self.is_lower is not None:
            raise ConfigError("--is-mode truncate has no lower bound: leave --is-lower out, or clip")
        return weight | {mode: self.is_threshold if mode == "truncate" else [self.is_lower, self.is_threshold]}

    def _rejection(self) -> list[dict[str, Any]]:
        keep = [self.rs_lower, self.rs_upper]
        if (self.rs_level is None) != (keep == [None, None]):
            raise ConfigError("rejection needs --rs-level, and --rs-lower or --rs-upper or both")
        return [] if self.rs_level is None else [{"level": self.rs_level, "keep": keep}]

    def _veto(self) -> list[dict[str, Any]]:
        if self.veto is None:
            return []
        if not self.veto > 0:
            raise ConfigError(f"--veto {self.veto:g} rejects nothing: ratios are above 0; 1e-4 is usual")
        return [{"level": "min", "keep": [self.veto, None], "clamp": "none"}]


def chosen_corrections(
    named: Iterable[str] | None,
    configs: Iterable[str] | None = None,
    flags: RuleFlags = RuleFlags(),
    framework: str = "",
    *,
    quiet: bool = False,
) -> list[Correction]:
    """The corrections that are asked for: those named, those of configuration files, the one from flags.

    Args:
        named: presets, files, YAML mappings.
        configs: files in a framework's own keys.
        flags: those that spell one correction.
        framework: whose keys; empty: as each file tells.
        quiet: do not say what each file told.

    Raises:
        ConfigError: something is named that is no preset, no file and no mapping, or that is wrong in itself.
    """
    found: list[Correction] = []
    for text in named or ():
        found += (
            _inline(text, {item.name for item in found}) if text.lstrip().startswith("{") else named_corrections(text)
        )
    for path in configs or ():
        found += _configured(path, framework, quiet)
    own = flags.correction()
    return found if own is None else [*found, own]


def _configured(path: str, framework: str, quiet: bool) -> list[Correction]:
    """A file in a framework's own keys; says whose it was taken for where nobody told, and what nothing reads."""
    from mismatchctl.frameworks.native import read_configurations

    configurations = read_configurations(path, framework)
    said = []
    for written, _ in configurations:
        if "@" not in framework:
            said.append(f"read as {written.framework.dated}; --framework says otherwise")
        if written.unread:
            said.append(f"nothing of a correction reads {', '.join(written.unread)}")
    corrections = [correction for _, correction in configurations]
    if len(corrections) > 1:
        said.append(f"its branches or calls differ: {', '.join(one.name for one in corrections)} stand side by side")
        said += [f"{one.name} takes {_branches(one.beside)} too" for one, _ in configurations if one.beside]
    for what in dict.fromkeys(said):
        say(f"{path}: {what}", quiet)
    return corrections


def _branches(lines: Sequence[int]) -> str:
    """The branches of blocks that are not combined."""
    return f"the branch{'es' * (len(lines) > 1)} of line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}"


def replaying(framework: str, configs: Iterable[str]) -> Framework | None:
    """The framework that replays: without a version, at that of the configurations where they agree, else the newest.

    Raises:
        ConfigError: there is no such framework, or a configuration cannot be read.
    """
    if not framework:
        return None
    from mismatchctl.frameworks import load
    from mismatchctl.frameworks.native import read_written

    found = [written.framework for path in configs for written in read_written(path, framework)]
    return found[0] if len({source.title for source in found}) == 1 else load(framework)


def named_corrections(text: str) -> list[Correction]:
    """A file, or a preset."""
    from mismatchctl.correction import corrections_from_file
    from mismatchctl.correction.load import CORRECTION_SUFFIXES

    try:
        if Path(text).suffix in CORRECTION_SUFFIXES:
            return corrections_from_file(text)
        if os.sep in text:
            raise ConfigError(f"--correction {text}: a file of corrections ends in {', '.join(CORRECTION_SUFFIXES)}")
        return [_preset(text)]
    except ConfigError as error:
        raise _hinted(text, error) from None


def _preset(name: str) -> Correction:
    from mismatchctl.frameworks import preset

    try:
        return preset(name)
    except ConfigError as error:
        raise ConfigError(f"{error}; `mismatchctl presets` lists them") from None


def _hinted(path: str, error: ConfigError) -> ConfigError:
    """The error of a file of corrections, or that the file is a framework's own configuration."""
    from mismatchctl.frameworks.native import read_written

    try:
        framework = read_written(path)[0].framework.title
    except ConfigError:
        return error
    return ConfigError(f"--correction {path}: this is a configuration of {framework}; --config {path} reads it")


def _inline(text: str, taken: set[str]) -> list[Correction]:
    """A YAML mapping; where it does not say its name, one that is not taken."""
    from mismatchctl.correction import correction_from_mapping
    from mismatchctl.texts import parse_inline

    data = parse_inline(text, f"--correction {text}")
    if not isinstance(data, dict):
        raise ConfigError(f"--correction {text}: not a mapping with weight and gates")
    number = next(n for n in range(1, len(taken) + 2) if _unnamed(n) not in taken)
    return [correction_from_mapping({"name": _unnamed(number)} | data, f"--correction {text}")]


def _unnamed(number: int) -> str:
    return "inline" if number == 1 else f"inline-{number}"
