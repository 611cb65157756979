"""Read configuration files of frameworks as corrections, and write corrections in the frameworks' keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from mismatchctl.core.formatting import escape_terminal
from mismatchctl.core.validation import describe_expected
from mismatchctl.corrections.model import Correction
from mismatchctl.corrections.presets import Preset
from mismatchctl.errors import ConfigError, wording
from mismatchctl.frameworks import registry
from mismatchctl.frameworks.adapter import Framework, find_file, is_same, split_unknown
from mismatchctl.io.scripts import UNPACKING_NOT_READ, find_python_calls, is_shell_script, parse_shell
from mismatchctl.io.yaml import TextError, dump_yaml, read_data, read_text, read_with_scalars, resolve_interpolations

if TYPE_CHECKING:
    from mismatchctl.io.yaml import YamlScalar

_MOST_FILES = 64


def compose(keys: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Merge a configuration with the files in its `defaults:`. Also return the names of missing files."""
    missing: list[str] = []
    chosen = [key for key, value in keys.items() if re.search("[/@]", key) and isinstance(value, str)]
    own = {key: value for key, value in keys.items() if key not in chosen}
    if chosen:  # files that a Hydra command line selects, such as `group=file`
        listed = own.get("defaults", [])
        own["defaults"] = [*([listed] if isinstance(listed, str) else listed), *({key: keys[key]} for key in chosen)]
    return _composed(own, folder, missing, []), missing


def _composed(keys: dict[str, Any], folder: Path, missing: list[str], files: list[Path]) -> dict[str, Any]:
    listed = keys.get("defaults")
    if not isinstance(listed, (str, list)):
        return keys
    own = {key: value for key, value in keys.items() if key != "defaults"}
    whole: dict[str, Any] = {}
    for entry in [listed] if isinstance(listed, str) else listed:
        if entry == "_self_":
            continue  # no effect: in these frameworks, the file's own keys always take precedence
        for name, package in _iterate_default_files(entry):
            found = find_file(name, folder)
            if found is None or len(files) >= _MOST_FILES:
                missing.append(name)
                continue
            files.append(found)
            parent = read_data(found) or {}
            if not isinstance(parent, Mapping):
                raise ConfigError(f"{found}: expected keys and values")
            inner = _composed(dict(parent), found.parent, missing, files)
            for key in reversed(package):
                inner = {key: inner}
            whole = merge(whole, inner)
    return merge(whole, own)


def _iterate_default_files(entry: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each file that an entry of `defaults:` names, and the block for its content, such as ("actor", "optim")."""
    places: list[tuple[str, str]] = []
    if isinstance(entry, str):
        name, _, package = entry.partition("@")
        group = name.rpartition("/")[0].strip("./") if not name.endswith((".yaml", ".yml")) else ""
        places = [(name, "" if name.startswith(".") else package or group)]
    elif isinstance(entry, Mapping):
        for key, value in entry.items():
            if isinstance(value, str):
                group, at, package = re.sub(r"^override\s+", "", str(key)).partition("@")
                group = group.strip("/")
                places.append((f"{group}/{value}", package if at else group))
    for name, place in places:
        yield name, tuple(part for part in re.split(r"[./]", place) if part and place not in ("_here_", "_global_"))


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `above` into `below`. A block of `above` with `_override_: true` replaces the block of `below`."""
    made = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(made.get(key), Mapping)
        made[key] = merge(made[key], value) if both and not value.get("_override_") else value
    return made


FileForm = Literal["data", "shell", "python"]
_SUFFIX_FORMS: dict[str, FileForm] = {
    ".json": "data", ".toml": "data", ".yaml": "data", ".yml": "data", ".py": "python",
    ".sh": "shell", ".bash": "shell", ".sbatch": "shell", ".slurm": "shell",
}  # fmt: skip
_PYTHON_CALL = re.compile(rf"^\s*(?:\w+\s*=\s*)?(?:{'|'.join(registry.CONFIG_CLASSES)})[.(]", re.MULTILINE)
_COMMANDS = ("run", "command")  # keys of job files, such as SkyPilot's, that contain a shell script
UNPACKED = "the ** of the call"
"""Marks options with unknown names in `RawConfig.missing`, because a Python call passes them as `**options`."""
_CONFIG_FLAGS = frozenset({"", "config", "config-file", "config_file", "configs", "config-path", "config_path"})
"""Flags whose value is the path of a training configuration. The empty flag is a positional argument."""


@dataclass(frozen=True)
class RawConfig:
    """The keys of one configuration in a file of any format."""

    name: str  # name of the correction that is read from it
    keys: dict[str, Any]
    whose: str = ""  # the framework, if the file calls its configuration class, else empty
    line: int = 0  # first line of the configuration in its file, counted from 1. 0: the whole file.
    scalars: Sequence[YamlScalar] = ()  # the values of a YAML file, each with its text in the file
    files: tuple[tuple[str, str], ...] = ()  # flag and path of each configuration file in a launch command
    missing: tuple[str, ...] = ()  # sources of more options that were not read: missing files, or UNPACKED


def read_raw_configs(path: Path, text: str) -> list[RawConfig]:
    name, form = path.stem[:80], _SUFFIX_FORMS.get(path.suffix)
    if form is None:
        form = "python" if _PYTHON_CALL.search(text) else "shell" if is_shell_script(text) else "data"
    try:
        if form == "python":
            return _read_python(path, text, name)
        if form == "shell":
            return _launched(text, name)
        keys, scalars = read_with_scalars(path)
        if not isinstance(keys, Mapping):
            raise ConfigError(f"{path}: expected keys and values. Pass a configuration of a framework.")
        script = next((keys[key] for key in _COMMANDS if isinstance(keys.get(key), str)), None)
        if script is not None and registry.recognize(keys) is None:
            return _launched(script, name)
        return [RawConfig(name, dict(keys), scalars=scalars)]
    except TextError as error:
        raise ConfigError(f"{path}: not valid {'Python' if form == 'python' else 'shell'}: {error}") from None


def _launched(script: str, name: str) -> list[RawConfig]:
    launches = [(one, {"<program>": one.program} if one.program else {}) for one in parse_shell(script)]
    return [RawConfig(name, one.keys | program, line=one.line, files=one.files) for one, program in launches]


def _read_python(path: Path, text: str, name: str) -> list[RawConfig]:
    """Read calls such as `GRPOConfig(...)`. Name each after the file or, for `Class.method(...)`, after the method."""
    found = []
    try:
        for class_name, whose in registry.CONFIG_CLASSES.items():
            for call in find_python_calls(text, class_name):
                keys = registry.find_adapter(whose).classes[class_name](call)
                if keys is not None:
                    unread = (UNPACKED,) * call.brings_more
                    found.append(RawConfig(call.function or name, keys, whose, call.line, missing=unread))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not found:
        classes = " or ".join(registry.CONFIG_CLASSES)
        raise ConfigError(f"{path}: no call of {classes} in this file sets a correction. Other Python code is not read")
    return found


@dataclass(frozen=True, kw_only=True)
class NativeConfig(RawConfig):
    """A configuration with a framework's own keys: files merged, interpolations resolved, unknown values left out."""

    framework: Framework  # the framework, at the version that the keys are for
    unknown: tuple[tuple[str, str], ...] = ()  # (key, text) of values that matter but are not in the file: `${name}`
    descendant: str = ""  # a project in the file that reuses the framework's keys, such as rLLM, or empty

    def is_equivalent(self, other: NativeConfig) -> bool:
        """Return True if both configurations give the same correction."""
        try:
            ours, theirs = (one.framework.correction(one.keys) for one in (self, other))
        except ConfigError:
            return self.keys == other.keys
        return is_same(ours, theirs)


def read_configurations(path: str | Path, framework: str = "") -> list[tuple[NativeConfig, Correction]]:
    found = read_native_configs(path, framework)
    for one in found:
        if UNPACKED in one.missing:
            raise ConfigError(f"{path}: line {one.line}: {UNPACKING_NOT_READ}")
        if one.unknown:
            place, value = one.unknown[0]
            raise ConfigError(
                f"{path}: {place} refers to {value}, which the file does not define. Write the value itself at {place}."
            )
    return [(written, _read_correction(Path(path), written)) for written in found]


def read_native_configs(path: str | Path, framework: str = "", *, of_any: bool = False) -> list[NativeConfig]:
    """Read the configurations in a file. Default: detect `framework`. `of_any`: allow files without correction keys."""
    path = Path(path)
    text = read_text(path)
    everything = [_with_files(said, path.parent) for said in read_raw_configs(path, text)]
    guesses: dict[str, int] = {}
    if not framework:
        guesses = registry.guess_frameworks(path, text, [said.keys for said in everything])
        if not registry.is_clear(guesses):
            registry.refuse_others(path, text)
    likely = framework or next(iter(guesses), "")
    trainings = [one for one in everything if one.whose or _may_belong_to(one.keys, likely)]
    found: list[NativeConfig] = []
    for said in trainings or [max(everything, key=lambda one: _size(one.keys))]:
        chosen = _choose_framework(path, said, framework, guesses, of_any)
        given = said.keys
        if said.whose and registry.recognize(given) is None:  # keep only keys that `chosen` accepts
            given = {key: value for key, value in given.items() if chosen.accepts_keys({key: value})}
        whole, absent = chosen.with_included(given, path.parent)
        whole = chosen.known_names(whole, text)
        resolves = not chosen.reads_yaml_1_1
        whole = resolve_interpolations(whole) if resolves else whole
        keys, unknown = split_unknown(whole, interpolations=resolves)
        missing = tuple(name for name in (*said.missing, *absent) if not chosen.is_default_file(name))
        one = NativeConfig(
            **vars(replace(said, keys=keys, missing=missing)),
            framework=chosen,
            unknown=tuple((".".join(place), text) for place, text in unknown if chosen.reads(place, whole)),
            descendant=registry.find_descendant(chosen.name, text),
        )
        if not any(one.is_equivalent(other) for other in found):
            found.append(one)
    return [replace(one, name=name) for one, name in zip(found, _iterate_config_names(found), strict=True)]


def _with_files(said: RawConfig, folder: Path) -> RawConfig:
    """Merge the files that a configuration refers to. The keys of the configuration take precedence."""
    below: dict[str, Any] = {}
    missing = [*said.missing]
    names = [(flag, name) for flag, name in said.files if flag in _CONFIG_FLAGS]
    names += [("config-name", name) for name in _hydra_files(said.keys)] if said.files or said.line else []
    for flag, name in names:
        place = find_file(name, folder, above=True)
        if place is not None:
            data = read_data(place)
            if isinstance(data, Mapping):
                parent, absent = compose(data, place.parent)
                below, missing = merge(below, parent), [*missing, *absent]
        elif flag:
            missing.append(name)
    keys, absent = compose(said.keys, folder)
    return replace(said, keys=merge(below, keys) if below else keys, missing=(*missing, *absent))


def _hydra_files(keys: Mapping[str, Any]) -> list[str]:
    given = {key.replace("_", "-"): str(value) for key, value in keys.items() if str(key).startswith("--config")}
    folder, name = given.get("--config-path", ""), given.get("--config-name", "")
    if not name or "$" in name:
        return []
    return [name if not folder or "$" in folder else f"{folder}/{name}"]


def _size(keys: Mapping[str, Any]) -> int:
    return sum(_size(value) if isinstance(value, Mapping) else 1 for value in keys.values())


def _iterate_config_names(found: Sequence[NativeConfig]) -> Iterator[str]:
    """Yield unique names: `run`, or `run-line-12` if names are equal, or `run-line-12-2` if lines are also equal."""
    names = [one.name for one in found]
    places = [f"{one.name}-line-{one.line}" for one in found]
    for number, (one, place) in enumerate(zip(found, places, strict=True)):
        before = places[:number].count(place)
        numbered = f"{place}-{before + 1}" if before else place
        yield numbered if one.line and names.count(one.name) > 1 else one.name


def _may_belong_to(keys: Mapping[str, Any], name: str) -> bool:
    """Return True if the keys can belong to the framework `name`, or if `name` is empty, to any framework."""
    if not name:
        return registry.recognize(keys) is not None  # slow: imports every framework
    framework = registry.load_framework_for(keys, name)
    return registry.find_adapter(framework.name).recognize(keys) is not None or framework.accepts_keys(
        framework.known_names(keys)
    )


def _choose_framework(
    path: Path, said: RawConfig, framework: str, guesses: Mapping[str, int], of_any: bool
) -> Framework:
    whose = "" if framework else said.whose
    likely = framework or (next(iter(guesses)) if registry.is_clear(guesses) else "")
    if likely and not whose and (of_any or _may_belong_to(said.keys, likely)):
        return registry.load_framework_for(said.keys, likely)
    recognized, first_two = registry.recognize(said.keys), list(guesses)[:2]  # slow: imports every framework
    name = (recognized or "").partition("@")[0]
    if whose:
        return registry.load_framework(recognized if recognized and name == whose else whose)
    if not framework and recognized is not None and (not guesses or name in first_two):
        return registry.load_framework(recognized)
    title = registry.load_framework(likely).title if likely else ""
    if framework and (other := said.whose or recognized):
        raise ConfigError(f"{path}: this is a configuration of {registry.load_framework(other).title}, not of {title}.")
    if likely:
        raise ConfigError(f"{path}: this file contains no correction key of {title}.")
    names = [*dict.fromkeys(filter(None, [name, *guesses]))][:2] or [
        f"NAME, where NAME is one of {', '.join(registry.ADAPTER_MODULES)}"
    ]
    likeliest = " or ".join(wording(python="framework=", command="--framework ") + one for one in names)
    own = wording(python="as correction", command="with --correction")
    raise ConfigError(
        f"{path}: the framework of this file is unclear. Pass {likeliest}. If the file is a "
        "correction of mismatchctl, "
        f"pass it {own}."
    )


def _read_correction(path: Path, written: NativeConfig) -> Correction:
    chosen = written.framework
    try:
        found = chosen.correction(written.keys)
    except ConfigError as error:
        message = str(error)
        whose = "" if message.startswith(chosen.title) else f"{chosen.title}: "
        raise ConfigError(f"{path}: {whose}{message}") from None
    about = ". ".join([found.about or f"{path.name}, as {chosen.title} reads it", *chosen.warnings])
    named = found.model_copy(update={"name": written.name, "about": about})
    try:
        Correction.model_validate(named.model_dump())
    except ValidationError as error:  # frameworks accept empty intervals, a Correction does not
        why = describe_expected(error.errors()[0])
        raise ConfigError(
            f"{path}: {chosen.title} accepts this file, but mismatchctl cannot read a correction from it: {why}"
        ) from None
    return named


def write_keys(correction: Correction, framework: Framework) -> dict[str, Any]:
    found, problems = _try_keys(correction, framework)
    if not problems:
        return found
    others = [
        title
        for title in registry.find_adapter(framework.name).titles
        if not _try_keys(correction, registry.load_framework(title))[1]
    ]
    able = f"; {others[0]} can express it" if others else ""
    reasons = framework.as_it("; ".join(problems))
    raise ConfigError(f"{framework.title} cannot express {correction.name}: {reasons}{able}")


def _try_keys(correction: Correction, framework: Framework) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that are nearest to a Correction, and a list of the remaining differences."""
    found, problems = framework.native(correction)
    if not problems and not is_same(correction, framework.correction(found)):  # the losses differ
        problems = ["its keys would be read as another correction"]
    return found, problems


def format_preset(preset: Preset) -> str:
    """Format a preset as YAML for `--correction FILE`, with its source as a comment."""
    facts = (f"{preset.framework} {preset.version}".strip(), preset.source, preset.documented)
    head = [f"# {escape_terminal(text)}" for text in facts if text]
    return "\n".join([*head, dump_yaml(preset.correction.to_mapping(), inner=True)])


def format_native(correction: Correction, framework: Framework, *, nearest: bool = False) -> str:
    """Format a Correction as YAML of a framework. `nearest`: describe rules that it lacks, instead of an error."""
    head = [f"{escape_terminal(correction.name)} as {framework.dated} reads it", *framework.warnings]
    head = [f"# {text}" for text in head]
    keys, unsaid = framework.native(correction) if nearest else (write_keys(correction, framework), [])
    if unsaid:
        head += [
            f"# Differences that {framework.title} cannot express:",
            *(f"# - {escape_terminal(text)}" for text in unsaid),
        ]
    for key in reversed(framework.block):
        keys = {key: keys}
    return "\n".join([*head, dump_yaml(keys)])
