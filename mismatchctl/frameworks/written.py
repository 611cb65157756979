"""Corrections as one writes them: our YAML, and a framework's."""

from __future__ import annotations

from mismatchctl.correction import Correction
from mismatchctl.correction.presets import Preset
from mismatchctl.frameworks.framework import Framework
from mismatchctl.frameworks.said import said
from mismatchctl.texts.yaml_written import dump_yaml


def preset_yaml(preset: Preset) -> str:
    """A preset as YAML that `--correction FILE` reads, with its source as a comment."""
    facts = (f"{preset.framework} {preset.version}".strip(), preset.source, preset.documented)
    head = [f"# {text}" for text in facts if text]
    mapping = preset.correction.to_mapping()
    body = dump_yaml(mapping, inner=True)
    return "\n".join([*head, body])


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
