"""Writing YAML that is read back as it was."""

from __future__ import annotations

from typing import Any

import yaml

from mismatchctl.texts.scalars import scalar

_BREAKS = "\x85\u2028\u2029"
"""Line breaks to YAML alone, which only double quotes keep."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `scalar` would take for something else."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        quoted = not isinstance(scalar(text), str)
    except ValueError:
        quoted = True
    style = '"' if any(sign in text for sign in _BREAKS) else "'" if quoted else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump_yaml(data: Any, *, inner: bool = False) -> str:
    """Plain data as YAML, in its order; `inner` writes the innermost mappings and lists on one line."""
    return yaml.dump(
        data,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None if inner else False,
        width=100 if inner else 80,
    )
