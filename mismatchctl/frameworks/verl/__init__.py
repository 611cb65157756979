"""Adapter of verl: recognition of its configurations, its dump layout, and the entry in the registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.adapter import Adapter, File, FileLayout, Row
from mismatchctl.frameworks.verl.configuration import (
    ACTOR_BLOCK,
    ACTOR_CAP,
    BLOCK,
    find_value,
    read_correction,
    with_rllm,
)
from mismatchctl.frameworks.verl.framework import Verl
from mismatchctl.frameworks.verl.statistics import CONFIG_CLASS, expand_factory, read_call
from mismatchctl.frameworks.verl.versions import KEYS, VERSIONS, VerlVersion, find_version

_SHARED_KEYS = {"loss_type"}
"""Keys that do not identify verl outside of its block, since other frameworks use them too."""


def recognize(native: Mapping[str, Any]) -> str | None:
    """Return the version of a configuration, or None without keys of rollout correction.

    Only versions that know most of its keys are considered. The newest version with an effect is preferred, then the
    newest version that accepts the keys, then the newest version, whose error is reported.
    """
    native = with_rllm(native)
    section, versions = _find_section(native)
    elsewhere = isinstance(find_value(native, *ACTOR_BLOCK), Mapping) or find_value(native, *ACTOR_CAP) is not None
    if elsewhere and not section.keys() & KEYS:
        return VERSIONS[-1].name
    if section is native and section.keys() & KEYS <= _SHARED_KEYS:
        return None
    known = {version.name: len(section.keys() & version.keys.keys()) for version in versions}
    most = max(known.values(), default=0)
    if not most and BLOCK not in _find_outer_block(native):
        return None
    candidates = [version for version in reversed(versions) if known[version.name] == most]
    return max(
        candidates, key=lambda version: _rank_version(native, version)
    ).name  # the first of several is the newest


def _rank_version(native: Mapping[str, Any], version: VerlVersion) -> int:
    """Rank a version: 0 if it rejects the configuration, 1 if it accepts it, 2 if the configuration has an effect."""
    try:
        correction = read_correction(native, version)
    except ConfigError:
        return 0
    return 1 + (correction != Correction(name=correction.name, about=correction.about))


def _find_outer_block(native: Mapping[str, Any]) -> Mapping[str, Any]:
    algorithm = native.get("algorithm")
    return algorithm if isinstance(algorithm, Mapping) else native


def _find_section(native: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[VerlVersion]]:
    """Find the keys of rollout correction, and the versions that look for them at this place."""
    outer = _find_outer_block(native)
    blocks = [version for version in VERSIONS if version.dialect != "flat"]
    flat = [version for version in VERSIONS if version.dialect == "flat"]
    if BLOCK in outer:
        block = outer[BLOCK]
        return (block if isinstance(block, Mapping) else {}), blocks
    if outer is not native:
        return outer, flat
    level = native.get("rollout_is", True)  # a switch in the flat keys, a level or null in all others
    return native, [*(flat if isinstance(level, bool) else []), *blocks]


def _read_rows(file: File) -> Iterator[Row]:
    raise DataError(
        "is a pickle of verl's and tensordict's classes, and nothing in a file is executed",
        file=str(file.path),
        remedy="run docs/integrations/verl_to_parquet.py on it where verl is installed",
    )


LAYOUT = FileLayout(
    framework="verl",
    columns={
        "rollout_log_probs": "rollout_log_probs",
        "train_log_probs": "old_log_probs",
        "response_mask": "loss_mask, else response_mask",
        "token_ids": "responses",
        "ref_log_probs": "ref_log_prob",
        "advantages": "advantages",
    },
    padding="right",
    mask="1 on sampled tokens; rejection sampling writes its result into response_mask, not into loss_mask",
    patterns=("*.dp", "tq_batch.pt"),
    rows=_read_rows,
)


TEXT_LAYOUT = FileLayout(
    framework="verl-rollout-data",
    columns={},
    mask="none",
    patterns=("*.jsonl",),
    rows=lambda file: iter(()),
    remedy="to get log-probs, set actor_rollout_ref.rollout.calculate_log_probs=True and record the batch "
    "(docs/integrations/verl.md)",
    recognizes=lambda file: {"input", "output", "score", "step"} <= file.first_line().keys(),
)
"""The files of `trainer.rollout_data_dir`, which contain only text."""


ADAPTER = Adapter(
    name="verl",
    versions=tuple(version.name for version in reversed(VERSIONS)),
    load=lambda version: Verl(find_version(version)),
    recognize=recognize,
    columns=Verl.columns,
    layouts=(LAYOUT, TEXT_LAYOUT),
    classes={CONFIG_CLASS: read_call},
    factory=expand_factory,
)
