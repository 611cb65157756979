"""Read a framework's configuration files as corrections, and write corrections in its keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from mismatchctl.core.validation import describe_expected
from mismatchctl.corrections.application import gate_bounds
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.corrections.presets import Preset
from mismatchctl.errors import ConfigError, option, wording
from mismatchctl.frameworks.adapter import Framework
from mismatchctl.frameworks.registry import (
    ADAPTER_MODULES,
    CONFIG_CLASSES,
    find_adapter,
    load_framework,
    load_framework_for,
    recognize,
)
from mismatchctl.io.scripts import find_python_calls, is_shell_script, parse_shell
from mismatchctl.io.yaml import TextError, dump_yaml, read_text, read_with_scalars, resolve_interpolations

if TYPE_CHECKING:
    from mismatchctl.io.yaml import YamlScalar

FileForm = Literal["data", "shell", "python"]
_SUFFIX_FORMS: dict[str, FileForm] = {
    ".json": "data",
    ".toml": "data",
    ".sh": "shell",
    ".bash": "shell",
    ".py": "python",
}
_PYTHON_CALL = re.compile(rf"^\s*(?:\w+\s*=\s*)?(?:{'|'.join(CONFIG_CLASSES)})[.(]", re.MULTILINE)


def detect_form(path: Path) -> FileForm:
    """What a file holds: as its suffix says, else as its lines begin."""
    if path.suffix in _SUFFIX_FORMS:
        return _SUFFIX_FORMS[path.suffix]
    text = read_text(path)
    return "python" if _PYTHON_CALL.search(text) else "shell" if is_shell_script(text) else "data"


@dataclass(frozen=True)
class RawConfig:
    """What stands in a file: the keys of a configuration, whatever the form.

    Attributes:
        name: of the correction that it makes.
        keys: and their values.
        whose: the framework whose class is called; empty where only the keys can tell.
        line: where it begins, counted from 1, or, negated, a branch that it leaves out; 0 where it is all of the file.
        beside: where further branches begin that it takes all.
        scalars: of a YAML file, its values as they are written.
    """

    name: str
    keys: dict[str, Any]
    whose: str = ""
    line: int = 0
    beside: tuple[int, ...] = ()
    scalars: Sequence[YamlScalar] = ()


def read_raw_configs(path: Path) -> list[RawConfig]:
    """The keys of each configuration in a file.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    form, name = detect_form(path), path.stem[:80]
    try:
        if form == "python":
            return _read_python(path, name)
        if form == "shell":
            return [RawConfig(name, one.keys, line=one.line, beside=one.beside) for one in parse_shell(read_text(path))]
        keys, scalars = _read_mapping(path)
        return [RawConfig(name, keys, scalars=scalars)]
    except TextError as error:
        raise ConfigError(f"{path}: not valid {'Python' if form == 'python' else 'shell'}: {error}") from None


def _read_python(path: Path, name: str) -> list[RawConfig]:
    """What the calls of a framework's class say; each may be called after its function."""
    text = read_text(path)
    calls = [(call, name, whose) for name, whose in CONFIG_CLASSES.items() for call in find_python_calls(text, name)]
    try:
        said = [(call, find_adapter(whose).classes[name](call), whose) for call, name, whose in calls]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    found = [RawConfig(call.function or name, keys, whose, call.line) for call, keys, whose in said if keys is not None]
    if not found:
        classes = ", ".join(CONFIG_CLASSES)
        raise ConfigError(f"{path}: no call of {classes} says a correction: that is what is read of Python")
    return found


def _read_mapping(path: Path) -> tuple[dict[str, Any], list[YamlScalar]]:
    data, scalars = read_with_scalars(path)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected keys and values; name a configuration of a framework")
    return dict(data), scalars


@dataclass(frozen=True)
class NativeConfig:
    """A configuration as it stands in a file.

    Attributes:
        name: how the correction that it makes is called.
        framework: whose it is, at the version that it was written for.
        keys: all of it, what it includes and points to put in.
        line: where it begins, or, negated, a branch that it leaves out; 0 where it is all of the file.
        beside: lines of a script where branches begin that are taken all, beside the one that it is named after.
        scalars: of a YAML file, its values as they are written.
    """

    name: str
    framework: Framework
    keys: dict[str, Any]
    line: int = 0
    beside: tuple[int, ...] = ()
    scalars: Sequence[YamlScalar] = ()

    @property
    def unread(self) -> tuple[str, ...]:
        """Its keys that nothing here reads, dotted."""
        return tuple(".".join(item.place) for item in self.framework.unread(self.keys))

    @property
    def is_readable(self) -> bool:
        """Whether its framework does not refuse it."""
        try:
            self.framework.correction(self.keys)
        except ConfigError:
            return False
        return True

    def says_the_same(self, other: NativeConfig) -> bool:
        """Whether both make the same correction: an example in Python often shows two ways to say it."""
        try:
            ours, theirs = (one.framework.correction(one.keys) for one in (self, other))
        except ConfigError:
            return self.keys == other.keys
        return is_same(ours, theirs)


def read_configurations(path: str | Path, framework: str = "") -> list[tuple[NativeConfig, Correction]]:
    """The configurations of a file in a framework's own keys, and what each does: those that calls or branches say.

    Args:
        path: YAML, JSON or TOML; a shell script with flags or Hydra overrides; Python that calls a framework's class.
        framework: whose configuration it is; its version, or all of it where empty, is what the keys tell.

    Raises:
        ConfigError: the file cannot be read, is of no framework here or of another one, or is rejected there.
    """
    return [(written, _read_correction(Path(path), written)) for written in read_native_configs(path, framework)]


def read_native_configs(path: str | Path, framework: str = "", *, of_any: bool = False) -> list[NativeConfig]:
    """What stands in a file, and whose it is: see `read_configurations`; `of_any`: even if it is of another one."""
    path = Path(path)
    found: list[NativeConfig] = []
    everything = read_raw_configs(path)
    for said in [said for said in everything if _is_recognized(said, framework)] or everything[:1]:
        chosen = _choose_framework(path, said, framework, of_any)
        whole = chosen.with_included(_select_keys(said, chosen), path.parent)
        keys = whole if chosen.reads_yaml_1_1 else resolve_interpolations(whole)
        one = NativeConfig(said.name, chosen, keys, said.line, said.beside, said.scalars)
        if not any(one.says_the_same(other) for other in found):
            found.append(one)
    if len(found) > 1:  # where a script takes no branch, variables may be without a value
        found = [one for one in found if one.line > 0 or one.is_readable] or found
    return [replace(one, name=name) for one, name in zip(found, _iterate_config_names(found), strict=True)]


def _iterate_config_names(found: Sequence[NativeConfig]) -> Iterator[str]:
    """A name of its own for each: with the line, and with a number where several begin there."""
    places = [(one.name, one.line) for one in found]
    for number, (name, line) in enumerate(places):
        before = places[:number].count((name, line))
        if line and sum(name == other for other, _ in places) > 1:
            name += f"-line-{line}" if line > 0 else f"-without-line-{-line}"
            name += f"-{before + 1}" if before else ""
        yield name


def _is_recognized(said: RawConfig, framework: str) -> bool:
    """Whether keys are of a framework, or of the one that they are to be read as."""
    if said.whose or (framework and _may_belong_to(said.keys, load_framework_for(said.keys, framework))):
        return True
    return recognize(said.keys) is not None  # imports every framework


def _may_belong_to(keys: Mapping[str, Any], framework: Framework) -> bool:
    """Whether keys may be of a framework."""
    return find_adapter(framework.name).recognize(keys) is not None or framework.holds(keys)


def _select_keys(said: RawConfig, framework: Framework) -> dict[str, Any]:
    """The keys; of a call that only its class tells, those that its framework has: the others are the training's."""
    if not said.whose or recognize(said.keys) is not None:
        return said.keys
    return {key: value for key, value in said.keys.items() if framework.holds({key: value})}


def _choose_framework(path: Path, said: RawConfig, framework: str, of_any: bool) -> Framework:
    """The framework that a configuration is of, or is to be read as."""
    keys = said.keys
    chosen = load_framework_for(keys, framework) if framework else None
    if chosen is not None and (of_any or _may_belong_to(keys, chosen)):
        return chosen
    guessed = recognize(keys) or said.whose or None
    if guessed is None:
        known = ", ".join(ADAPTER_MODULES)
        raise ConfigError(
            f"{path}: holds no key of a correction of {known}: say whose it is with {option('framework')}; "
            f"what mismatchctl writes is a {wording(python='correction', command='--correction')}"
        )
    if chosen is not None:
        raise ConfigError(f"{path}: is a configuration of {load_framework(guessed).title}, not of {chosen.title}")
    return load_framework(guessed)


def _read_correction(path: Path, written: NativeConfig) -> Correction:
    chosen = written.framework
    try:
        found = chosen.correction(written.keys)
    except ConfigError as error:
        message = str(error)
        whose = "" if message.startswith(chosen.title) else f"{chosen.title}: "
        raise ConfigError(f"{path}: {whose}{message}") from None
    about = found.about or f"{path.name}, as {chosen.title} reads it"
    named = found.model_copy(update={"name": written.name, "about": about})
    _check_satisfiable(named, path, chosen)
    return named


def _check_satisfiable(correction: Correction, path: Path, framework: Framework) -> None:
    """Refuse a bound that holds nothing: frameworks take that, a Result does not."""
    try:
        Correction.model_validate(correction.model_dump())
    except ValidationError as error:
        why = describe_expected(error.errors()[0])
        raise ConfigError(f"{path}: {framework.title} accepts this, but it can hold nothing: {why}") from None


def write_keys(correction: Correction, framework: Framework) -> dict[str, Any]:
    """The keys that say a Correction.

    Raises:
        ConfigError: the framework cannot say it, with what it cannot, and which of its versions can.
    """
    found, problems = _try_keys(correction, framework)
    if not problems:
        return found
    others = [
        title for title in find_adapter(framework.name).titles if not _try_keys(correction, load_framework(title))[1]
    ]
    able = f"; {others[0]} can" if others else ""
    raise ConfigError(f"{framework.title} cannot say {correction.name}: {'; '.join(problems)}{able}")


def _try_keys(correction: Correction, framework: Framework) -> tuple[dict[str, Any], list[str]]:
    """What comes nearest, and in what it is another Correction."""
    found, problems = framework.native(correction)
    if problems:
        return found, problems
    try:
        again = framework.correction(found)
    except ConfigError as error:
        return found, [str(error)]
    return found, [] if is_same(correction, again) else ["its keys would be read as another correction"]


def is_same(one: Correction, other: Correction) -> bool:
    """Whether two Corrections weight and reject alike, whatever they are called."""
    return _comparable_rules(one) == _comparable_rules(other)


def _comparable_rules(correction: Correction) -> tuple[Any, ...]:
    weight = None if correction.weight is None else _comparable_weight(correction.weight)
    return weight, [_comparable_gate(gate) for gate in correction.gates], correction.loss


def _comparable_weight(weight: Weight) -> tuple[Any, ...]:
    over = None if weight.normalize == "none" else weight.normalize_over
    named = weight.model_dump(exclude={"truncate", "clip", "zero", "normalize_over"})
    return weight.bounds, weight.zero is not None, over, named


def _comparable_gate(gate: Gate) -> tuple[Any, ...]:
    return gate_bounds(gate), gate.model_dump(exclude={"keep"})


def format_preset(preset: Preset) -> str:
    """A preset as YAML that `--correction FILE` reads, with its source as a comment."""
    facts = (f"{preset.framework} {preset.version}".strip(), preset.source, preset.documented)
    head = [f"# {text}" for text in facts if text]
    return "\n".join([*head, dump_yaml(preset.correction.to_mapping(), inner=True)])


def format_native(correction: Correction, framework: Framework, *, nearest: bool = False) -> str:
    """A Correction as YAML of a framework, which reads it back as the same; `nearest`: or what comes near, with how.

    Raises:
        ConfigError: the framework cannot say it.
    """
    head = [f"# {correction.name} as {framework.dated} reads it"]
    keys, unsaid = framework.native(correction) if nearest else (write_keys(correction, framework), [])
    if unsaid:
        head += [f"# What {framework.title} cannot say, or says otherwise:", *(f"# - {text}" for text in unsaid)]
    for key in reversed(framework.block):
        keys = {key: keys}
    return "\n".join([*head, dump_yaml(keys)])
