"""Where verl looks for the keys of rollout correction, and which keys of a configuration nothing reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.framework import UnreadKey, is_of_corrections, nearest
from mismatchctl.frameworks.verl.versions import KEYS, VerlVersion, knowing

BLOCK = "rollout_correction"
ACTOR_BLOCK = ("actor_rollout_ref", "actor", "policy_loss", BLOCK)
"""Where the V1 trainer of 2026 reads the same keys again."""
ACTOR_CAP = ("actor_rollout_ref", "actor", "tis_imp_ratio_cap")
"""Where verl had the bound of its weights, above 0, before it had rollout corrections."""

_SECTIONS = frozenset(
    {"actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "data", "defaults", "global_profiler"}
    | {"hydra", "ray_init", "ray_kwargs", "reward", "reward_manager", "reward_model", "skip", "trainer"}
    | {"transfer_queue"}
)
_PARTS = frozenset({"actor_rollout_ref", "trainer"})
"""Sections that only a configuration of all of verl has."""
_ALGORITHM = frozenset(
    {"_target_", "adv_estimator", "filter_groups", "gamma", "kl_ctrl", "kl_penalty", "lam", "norm_adv_by_std_in_grpo"}
    | {"pf_ppo", "use_kl_in_reward", "use_pf_ppo"}
)

_CHOICE = re.compile("[/@]")
"""What the choice of a file for a group has in its key, in Hydra's words."""

_REPLACED = {
    "rollout_token_veto_threshold": "verl has dropped the veto; nearest to it is rollout_rs seq_max_k2 with "
    "the threshold 0.5 * ln(veto)**2, which is two-sided",
    "rollout_rs_threshold_lower": 'write both bounds as one text: rollout_rs_threshold: "lo_hi"',
    "bypass_old_logprob_for_rollout": "it is called bypass_mode now",
    "use_pure_rollout_correction": "it is called use_policy_gradient (2025-11), then loss_type: reinforce (2026)",
    "use_policy_gradient": "write loss_type: reinforce",
    "tis_imp_ratio_cap": "it was replaced in 2025-10; write rollout_is and rollout_is_threshold",
}
"""What to write for a key that came to an end."""


def find(native: Mapping[str, Any], *keys: str) -> Any:
    """A value further inside; None if there is none."""
    found: Any = native
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def path_of(native: Mapping[str, Any], version: VerlVersion) -> tuple[str, ...]:
    """The keys under which those of rollout correction stand in a configuration that may hold all of verl's."""
    path: tuple[str, ...] = ("algorithm",) if _is_full(native) else ()
    outer = find(native, *path) or {}
    nested = version.dialect != "flat" and (BLOCK in outer or bool(path))
    return (*path, BLOCK) if nested else path


def _is_full(native: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of all of verl, which need not set anything of its algorithm."""
    alone = BLOCK in native or not KEYS.isdisjoint(native)
    return isinstance(native.get("algorithm"), Mapping) or not (alone or _PARTS.isdisjoint(native))


def section(native: Mapping[str, Any], version: VerlVersion) -> dict[str, Any]:
    """The keys of rollout correction.

    Raises:
        ConfigError: they are no keys and values, or hold one of a correction that this version does not read.
    """
    found = find(native, *path_of(native, version))
    if not isinstance(found, Mapping | None):
        raise ConfigError(f"{BLOCK} must hold keys and values, found {found!r}")
    for key, file in chosen(native):
        raise ConfigError(f"{key}={file}: the keys in that file are not read: write them out in place of it")
    for item in unread(native, version):
        if item.refused:
            raise ConfigError(f"verl@{version.name} knows no {item.key!r}{item.hint}")
    return {key: value for key, value in (found or {}).items() if key in version.keys}


def unread(native: Mapping[str, Any], version: VerlVersion) -> Iterator[UnreadKey]:
    """Keys that nothing here reads: of a correction, or of nothing that is known of verl."""
    path = path_of(native, version)
    level: Any = native
    for depth in range(len(path) + 1):
        if not isinstance(level, Mapping):
            return
        inside = depth == len(path)
        where = path[:depth]
        for key, value in level.items():
            word = str(key)
            if _CHOICE.search(word) or (inside and word in version.keys) or (not inside and word == path[depth]):
                continue
            if (inside and version.dialect != "flat") or is_of_corrections(word) or word in KEYS:
                yield UnreadKey((*where, word), _hint(word, version), refused=True)
            elif word in (_ALGORITHM if where == ("algorithm",) else _SECTIONS | (_ALGORITHM if not path else set())):
                yield from _deeper((*where, word), value)
            elif near := nearest(word, version.keys):
                yield UnreadKey((*where, word), near, refused=True)
            else:
                yield UnreadKey((*where, word), "", refused=False)
        level = level if inside else level.get(path[depth])


def chosen(native: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Files that a launch or a list of defaults puts in place of verl's own, in which all is off: key and name."""
    listed = native.get("defaults")
    blocks = [native, *(one for one in listed if isinstance(one, Mapping))] if isinstance(listed, list) else [native]
    for key, file in ((str(key), file) for block in blocks for key, file in block.items()):
        if _CHOICE.search(key) and BLOCK in _CHOICE.split(key.replace(".", "/")) and file not in (BLOCK, None, "null"):
            yield key, file


def _deeper(where: tuple[str, ...], level: Any) -> Iterator[UnreadKey]:
    """Keys of a correction in sections that look at none: read by an older trainer, if at all."""
    if not isinstance(level, Mapping) or where == ACTOR_BLOCK:
        return
    for key, value in level.items():
        place = (*where, str(key))
        if place == ACTOR_CAP and not _is_off(value):
            yield UnreadKey(place, f": {_REPLACED[place[-1]]}", refused=True)
        elif place != ACTOR_BLOCK and is_of_corrections(str(key)):
            yield UnreadKey(place, "", refused=False)
        yield from _deeper(place, value)


def _is_off(cap: Any) -> bool:
    return cap is None or (isinstance(cap, (int, float)) and cap <= 0)


def _hint(key: str, version: VerlVersion) -> str:
    """Which versions read it, and what to write here."""
    names = [other.name for other in knowing(key)]
    known = f"verl@{names[0]}" if len(names) == 1 else f"verl@{names[0]} to verl@{names[-1]}" if names else ""
    does = [f"{known} {'does' if len(names) == 1 else 'do'}"] if known else []
    instead = _REPLACED.get(key) if not names or names[-1] < version.name else None
    if said := [*does, *([instead] if instead else [])]:
        return f": {'; '.join(said)}"
    return nearest(key, version.keys)
