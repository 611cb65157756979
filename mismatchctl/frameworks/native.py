"""Configuration files as frameworks write them, read as Corrections; and Corrections in their words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from mismatchctl.correction import Correction, Gate, Weight
from mismatchctl.correction.apply import gate_bounds
from mismatchctl.correction.presets import Preset
from mismatchctl.errors import ConfigError, option, wording
from mismatchctl.frameworks import CLASSES, MODULES, load, load_for, recognize, shelf
from mismatchctl.frameworks.framework import Framework
from mismatchctl.texts import TextError, read_text, read_with_scalars
from mismatchctl.texts.pointers import resolved
from mismatchctl.texts.python_text import python_calls
from mismatchctl.texts.shell_text import looks_like_shell, parse_shell
from mismatchctl.texts.yaml_written import dump_yaml
from mismatchctl.validation import takes

if TYPE_CHECKING:
    from mismatchctl.texts.yaml_text import Scalar

Form = Literal["data", "shell", "python"]
_BY_SUFFIX: dict[str, Form] = {".json": "data", ".toml": "data", ".sh": "shell", ".bash": "shell", ".py": "python"}
_CALLED = re.compile(rf"^\s*(?:\w+\s*=\s*)?(?:{'|'.join(CLASSES)})[.(]", re.MULTILINE)


def form_of(path: Path) -> Form:
    """What a file holds: as its suffix says, else as its lines begin."""
    if path.suffix in _BY_SUFFIX:
        return _BY_SUFFIX[path.suffix]
    text = read_text(path)
    return "python" if _CALLED.search(text) else "shell" if looks_like_shell(text) else "data"


@dataclass(frozen=True)
class Said:
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
    scalars: Sequence[Scalar] = ()


def keys_in(path: Path) -> list[Said]:
    """The keys of each configuration in a file.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    form, name = form_of(path), path.stem[:80]
    try:
        if form == "python":
            return _called(path, name)
        if form == "shell":
            return [Said(name, one.keys, line=one.line, beside=one.beside) for one in parse_shell(read_text(path))]
        keys, scalars = _mapping(path)
        return [Said(name, keys, scalars=scalars)]
    except TextError as error:
        raise ConfigError(f"{path}: not valid {'Python' if form == 'python' else 'shell'}: {error}") from None


def _called(path: Path, name: str) -> list[Said]:
    """What the calls of a framework's class say; each may be called after its function."""
    text = read_text(path)
    calls = [(call, name, whose) for name, whose in CLASSES.items() for call in python_calls(text, name)]
    try:
        said = [(call, shelf(whose).classes[name](call), whose) for call, name, whose in calls]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    found = [Said(call.function or name, keys, whose, call.line) for call, keys, whose in said if keys is not None]
    if not found:
        classes = ", ".join(CLASSES)
        raise ConfigError(f"{path}: no call of {classes} says a correction: that is what is read of Python")
    return found


def _mapping(path: Path) -> tuple[dict[str, Any], list[Scalar]]:
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
    scalars: Sequence[Scalar] = ()

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
    return [(written, _read(Path(path), written)) for written in read_written(path, framework)]


def read_written(path: str | Path, framework: str = "", *, of_any: bool = False) -> list[NativeConfig]:
    """What stands in a file, and whose it is: see `read_configurations`; `of_any`: even if it is of another one."""
    path = Path(path)
    found: list[NativeConfig] = []
    everything = keys_in(path)
    for said in [said for said in everything if _tells(said, framework)] or everything[:1]:
        chosen = _whose(path, said, framework, of_any)
        whole = chosen.with_included(_own(said, chosen), path.parent)
        keys = whole if chosen.reads_yaml_1_1 else resolved(whole)
        one = NativeConfig(said.name, chosen, keys, said.line, said.beside, said.scalars)
        if not any(one.says_the_same(other) for other in found):
            found.append(one)
    if len(found) > 1:  # where a script takes no branch, variables may be without a value
        found = [one for one in found if one.line > 0 or one.is_readable] or found
    return [replace(one, name=name) for one, name in zip(found, _names(found), strict=True)]


def _names(found: Sequence[NativeConfig]) -> Iterator[str]:
    """A name of its own for each: with the line, and with a number where several begin there."""
    places = [(one.name, one.line) for one in found]
    for number, (name, line) in enumerate(places):
        before = places[:number].count((name, line))
        if line and sum(name == other for other, _ in places) > 1:
            name += f"-line-{line}" if line > 0 else f"-without-line-{-line}"
            name += f"-{before + 1}" if before else ""
        yield name


def _tells(said: Said, framework: str) -> bool:
    """Whether keys are of a framework, or of the one that they are to be read as."""
    if said.whose or (framework and _fits(said.keys, load_for(said.keys, framework))):
        return True
    return recognize(said.keys) is not None  # imports every framework


def _fits(keys: Mapping[str, Any], framework: Framework) -> bool:
    """Whether keys may be of a framework."""
    return shelf(framework.name).recognize(keys) is not None or framework.holds(keys)


def _own(said: Said, framework: Framework) -> dict[str, Any]:
    """The keys; of a call that only its class tells, those that its framework has: the others are the training's."""
    if not said.whose or recognize(said.keys) is not None:
        return said.keys
    return {key: value for key, value in said.keys.items() if framework.holds({key: value})}


def _whose(path: Path, said: Said, framework: str, of_any: bool) -> Framework:
    """The framework that a configuration is of, or is to be read as."""
    keys = said.keys
    chosen = load_for(keys, framework) if framework else None
    if chosen is not None and (of_any or _fits(keys, chosen)):
        return chosen
    guessed = recognize(keys) or said.whose or None
    if guessed is None:
        known = ", ".join(MODULES)
        raise ConfigError(
            f"{path}: holds no key of a correction of {known}: say whose it is with {option('framework')}; "
            f"what mismatchctl writes is a {wording(python='correction', command='--correction')}"
        )
    if chosen is not None:
        raise ConfigError(f"{path}: is a configuration of {load(guessed).title}, not of {chosen.title}")
    return load(guessed)


def _read(path: Path, written: NativeConfig) -> Correction:
    chosen = written.framework
    try:
        found = chosen.correction(written.keys)
    except ConfigError as error:
        message = str(error)
        whose = "" if message.startswith(chosen.title) else f"{chosen.title}: "
        raise ConfigError(f"{path}: {whose}{message}") from None
    about = found.about or f"{path.name}, as {chosen.title} reads it"
    named = found.model_copy(update={"name": written.name, "about": about})
    _check_judgeable(named, path, chosen)
    return named


def _check_judgeable(correction: Correction, path: Path, framework: Framework) -> None:
    """Refuse a bound that holds nothing: frameworks take that, a Result does not."""
    try:
        Correction.model_validate(correction.model_dump())
    except ValidationError as error:
        why = takes(error.errors()[0])
        raise ConfigError(f"{path}: {framework.title} accepts this, but it can hold nothing: {why}") from None


def said(correction: Correction, framework: Framework) -> dict[str, Any]:
    """The keys that say a Correction.

    Raises:
        ConfigError: the framework cannot say it, with what it cannot, and which of its versions can.
    """
    found, problems = _tried(correction, framework)
    if not problems:
        return found
    others = [title for title in shelf(framework.name).titles if not _tried(correction, load(title))[1]]
    able = f"; {others[0]} can" if others else ""
    raise ConfigError(f"{framework.title} cannot say {correction.name}: {'; '.join(problems)}{able}")


def _tried(correction: Correction, framework: Framework) -> tuple[dict[str, Any], list[str]]:
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
    return _rules(one) == _rules(other)


def _rules(correction: Correction) -> tuple[Any, ...]:
    weight = None if correction.weight is None else _weight(correction.weight)
    return weight, [_gate(gate) for gate in correction.gates], correction.loss


def _weight(weight: Weight) -> tuple[Any, ...]:
    over = None if weight.normalize == "none" else weight.normalize_over
    named = weight.model_dump(exclude={"truncate", "clip", "zero", "normalize_over"})
    return weight.bounds, weight.zero is not None, over, named


def _gate(gate: Gate) -> tuple[Any, ...]:
    return gate_bounds(gate), gate.model_dump(exclude={"keep"})


def preset_yaml(preset: Preset) -> str:
    """A preset as YAML that `--correction FILE` reads, with its source as a comment."""
    facts = (f"{preset.framework} {preset.version}".strip(), preset.source, preset.documented)
    head = [f"# {text}" for text in facts if text]
    return "\n".join([*head, dump_yaml(preset.correction.to_mapping(), inner=True)])


def native_yaml(correction: Correction, framework: Framework, *, nearest: bool = False) -> str:
    """A Correction as YAML of a framework, which reads it back as the same; `nearest`: or what comes near, with how.

    Raises:
        ConfigError: the framework cannot say it.
    """
    head = [f"# {correction.name} as {framework.dated} reads it"]
    keys, unsaid = framework.native(correction) if nearest else (said(correction, framework), [])
    if unsaid:
        head += [f"# What {framework.title} cannot say, or says otherwise:", *(f"# - {text}" for text in unsaid)]
    for key in reversed(framework.block):
        keys = {key: keys}
    return "\n".join([*head, dump_yaml(keys)])
