"""Adapter of slime and Miles: configurations, findings of `lint`, and dump files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.errors import ConfigError, DataError, option
from mismatchctl.frameworks.adapter import (
    REPLAY_DEFAULTS,
    File,
    Framework,
    LoggedMetric,
    Replay,
    ReplayOptions,
    Row,
    read_layout,
    to_array,
)
from mismatchctl.frameworks.lint import (
    LintMessage,
    check_bounds,
    find_named_key,
    format_decimal,
    is_text_of_number,
    make_finding,
    read_table,
)
from mismatchctl.frameworks.slime.arguments import (
    DOCUMENTED_ONLY,
    KNOWN_KEYS,
    MIS_FIELDS,
    NUMBER_FIELDS,
    OLD_KEYS,
    ArgumentError,
    Arguments,
    SlimeVersion,
    find_unread_keys,
    include_custom_config,
    make_adapter,
    make_arguments,
    make_correction,
    normalize_key,
    read_arguments,
    recognize,
    write_old_keys,
)

if TYPE_CHECKING:
    import pyarrow as pa


_ARGUMENT_NAMES = tuple(field.name for field in fields(Arguments))


@dataclass(frozen=True)
class SlimeConfig:
    """The arguments of a user's file, with the spelling and the values of the file."""

    root: Mapping[str, Any]
    version: SlimeVersion

    @cached_property
    def keys(self) -> dict[str, str]:
        """Return the spelling of each argument in the file, for example `--use-tis`."""
        return {normalize_key(str(key)): str(key) for key in self.root}

    @cached_property
    def given(self) -> dict[str, Any]:
        """Return the arguments that the configuration sets. Numbers in quotes become floats."""
        values = {name: self.root[key] for name, key in self.keys.items() if key in self.root}
        return {name: float(value) if name in self.quoted_numbers else value for name, value in values.items()}

    @cached_property
    def quoted_numbers(self) -> list[str]:
        return [
            name for name, key in self.keys.items() if name in NUMBER_FIELDS and is_text_of_number(self.root.get(key))
        ]

    @cached_property
    def arguments(self) -> Arguments | ConfigError:
        ignored = {key for (key,), _ in find_unread_keys(self.root, self.version)}
        try:
            named = {name: value for name, value in self.given.items() if self.keys[name] not in ignored}
            return read_arguments(named, self.version)
        except ConfigError as error:
            return error

    @cached_property
    def correction(self) -> Correction | ConfigError:
        if isinstance(self.arguments, ConfigError):
            return self.arguments
        try:
            return make_correction(self.arguments, self.version.framework, "mask")
        except ConfigError as error:
            return error

    def place(self, name: str) -> str:
        return self.keys.get(name, name)

    def gate_place(self, gate: Gate) -> str:
        if gate.is_veto:
            return self.place("rs_veto_threshold")
        assert isinstance(self.arguments, Arguments)
        masks = self.arguments.tis_mode == "mask" and gate.keep == self.arguments.tis_bounds
        given = any(self.given.get(name) is not None for name in ("rs_lower_bound", "rs_upper_bound"))
        return self.place("tis_upper_bound" if masks or not given else "rs_upper_bound")

    def trap(self, name: str, place: str = "", /, **values: Any) -> LintMessage:
        version = self.version
        values |= {"framework": version.framework, "label": version.name}
        made = make_finding(__file__, name, self.source, **values)
        return replace(made, place=self.place(place or made.place))

    @property
    def source(self) -> str:
        version = self.version
        return f"{version.framework} {version.commit[:8]} ({version.name}), mis.py, loss.py, arguments.py"


def _check_keys(written: SlimeConfig) -> Iterator[LintMessage]:
    for name in written.quoted_numbers:
        value = written.root[written.keys[name]]
        yield written.trap("quoted_number", name, value=value, number=format_decimal(value))
    for (key,), hint in find_unread_keys(written.root, written.version):
        name = normalize_key(key)
        if name in DOCUMENTED_ONLY:
            yield written.trap("documented_only", name, why=DOCUMENTED_ONLY[name])
        else:
            yield written.trap("unread", name, hint=hint)
    for name, key in written.keys.items():
        if name in MIS_FIELDS and key.startswith("--"):
            yield written.trap("no_flag", name, name=name)
    if written.version.old_keys and not OLD_KEYS.keys().isdisjoint(written.keys):
        yield written.trap("old_keys")


def _check_switches(written: SlimeConfig) -> Iterator[LintMessage]:
    """Yield findings about argument values that slime refuses or ignores, and about values with known problems."""
    given, gates = written.given, written.correction.gates if isinstance(written.correction, Correction) else ()
    if isinstance(written.correction, ConfigError):
        message = str(written.correction)
        refused = written.correction
        name = refused.argument if isinstance(refused, ArgumentError) else find_named_key(message, _ARGUMENT_NAMES)
        trap = "refused_normalization" if name == "tis_batch_normalize" else "refused"
        yield written.trap(trap, name, message=message)
    if given.get("true_on_policy_mode"):
        yield written.trap("true_on_policy")
    weighs_with_mis = given.get("use_tis") and any(name in given for name in MIS_FIELDS)
    if weighs_with_mis:
        yield written.trap("measures_only" if given.get("get_mismatch_metrics") else "wins")
        if given.get("use_rollout_logprobs"):
            yield written.trap("corrects_twice")
    if given.get("use_rs") and not given.get("use_tis"):
        found = written.trap("rejection_off")
        yield replace(found, level="warning") if "use_tis" in given else found  # the file sets use_tis to false
    veto = given.get("rs_veto_threshold")
    if weighs_with_mis and isinstance(veto, int | float):
        if not given.get("use_rs"):
            yield written.trap("veto_off")
        elif veto <= 0:
            yield written.trap("veto_nothing")
        else:  # slime documents a bound on probabilities, but compares ratios
            yield written.trap("veto_ratio", threshold=veto, number=format_decimal(veto))
    read = written.arguments if isinstance(written.arguments, Arguments) else None
    correction = written.correction
    mis = read if read is not None and read.function == "mis" else None
    if mis is not None and weighs_with_mis:
        yield from _check_fallbacks(written, mis)
    if written.version.rollout_denominators and gates:  # slime does not document these denominators
        yield written.trap("denominators", option=option("framework"))
    if mis is not None and mis.rejects and mis.rs_level == "sequence":
        yield written.trap("product")
    if isinstance(correction, Correction) and mis is not None and (known := _find_published_run(correction)):
        number, held = known
        yield replace(written.trap("held" if held else "collapsed", number=number), source=_ARTICLE)
    if written.version.finite:
        yield from _check_forward_only(written)
    if read is not None and read.weighs and read.tis_batch_normalize:  # slime takes this mean over one micro-batch
        alone = given.get("micro_batch_size") == 1 and not given.get("use_dynamic_batch_size")
        if read.tis_level == "sequence":
            yield written.trap("cancels" if alone else "may_cancel")
        else:
            yield written.trap("per_sequence_mean" if alone else "depends_on_packing")
        if read.tis_mode == "mask":
            yield written.trap("raw_mean")
    if isinstance(correction, Correction):
        place = written.place("tis_upper_bound" if mis is not None else "tis_clip")
        yield from check_bounds(correction, place, written.gate_place, written.source)
    for name in ("tis_clip", "tis_clip_low"):
        if weighs_with_mis and name in given:
            yield written.trap("built_in_only", name)
    if given.get("eps_clip_c") is not None and not written.version.dual_clip:
        yield written.trap("no_dual_clip")


def _check_fallbacks(written: SlimeConfig, given: Arguments) -> Iterator[LintMessage]:
    low, high = given.rs_bounds if given.use_rs else given.tis_bounds
    if given.rejects and given.rs_lower_bound is None:
        origin = "tis_lower_bound" if given.tis_lower_bound is not None else "1 / tis_upper_bound"
        yield written.trap("lower_falls_back", origin=origin, level_name=given.rs_level, low=low)
    elif given.tis_mode == "truncate" and given.tis_lower_bound is not None:
        yield written.trap("no_lower_bound")
    if given.rejects and given.rs_upper_bound is None:
        yield written.trap("upper_falls_back", level_name=given.rs_level, high=high)


_OUTCOMES = {
    (2.0, True, True): ("1", False),
    (1.5, True, True): ("2", True),
    (1.5, False, True): ("3", True),
    (1.5, False, False): ("4", False),
}
"""(upper weight bound, normalized, keeps geometric means in 0.99..1.001) -> (number of the run in _ARTICLE, stable)."""
_ARTICLE = "Let Speed Be With Stability (Training-Inference Mismatch with Miles), LMSYS, 2026-01-16: MoE runs"


def _find_published_run(correction: Correction) -> tuple[str, bool] | None:
    """Find a run of the Miles article with the same weights and gates. Return its number, and True if it was stable."""
    weight, gates = correction.weight, correction.gates
    if weight is None or weight.level != "token" or weight.zero is not None:
        return None
    rejects = [(gate.statistic, gate.level, gate.keep) for gate in gates] == [("ratio", "geometric", (0.99, 1.001))]
    if bool(gates) is not rejects:
        return None
    return _OUTCOMES.get((weight.bounds[1], weight.normalize == "token", rejects))


def _check_forward_only(written: SlimeConfig) -> Iterator[LintMessage]:
    """Yield findings about arguments that Miles needs or refuses with --skip-actor-forward-only or asynchronous PPO."""
    given = written.given
    if given.get("skip_actor_forward_only"):
        others = [name for name in ("keep_old_actor", "true_on_policy_mode") if given.get(name)]
        for kind in ("indexer", "routing"):
            if given.get(f"use_{kind}_replay") and not given.get(f"use_rollout_{kind}_replay"):
                others.append(f"use_{kind}_replay")
        yield from (written.trap("skip_refuses", name=name) for name in others)
        if not given.get("use_rollout_logprobs"):
            yield written.trap("own_old_policy")
    corrects = any(given.get(name) for name in ("use_rollout_logprobs", "use_tis", "keep_old_actor"))
    is_async = "train_async" in str(written.root.get("<program>", ""))
    if is_async and given.get("advantage_estimator") == "ppo" and not corrects:
        yield written.trap("async_ppo")


class Slime(Framework):
    """slime or Miles at one version."""

    columns: Mapping[str, str] = read_table(__file__, "options.yaml")["columns"]
    reads_yaml_1_1 = True

    def __init__(self, version: SlimeVersion) -> None:
        self.name, self.version, self.about = version.framework, version.name, version
        self.note, self.unknown = version.commit[:8], version.unknown

    def correction(self, native: Mapping[str, Any]) -> Correction:
        return make_correction(self._checked(read_arguments(native, self.about)), self.name, self.about.effect)

    def native(self, correction: Correction) -> tuple[dict[str, Any], list[str]]:
        said, unsaid, otherwise = make_arguments(correction, self.about)
        return write_old_keys(said) if self.about.old_keys else said.native(), [*unsaid, *otherwise]

    def lint(self, native: Mapping[str, Any], unknown: Collection[str] = ()) -> list[LintMessage]:
        written = SlimeConfig(native, self.about)
        return [*_check_keys(written), *(() if unknown else _check_switches(written))]

    def with_included(self, native: dict[str, Any], folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
        return include_custom_config(native, folder)

    def reads(self, place: tuple[str, ...], native: Mapping[str, Any]) -> bool:
        return len(place) == 1 and normalize_key(place[0]) in KNOWN_KEYS

    def published_outcome(self, correction: Correction) -> str:
        if (known := _find_published_run(correction)) is None:
            return ""
        number, held = known
        return f"published MoE run (Miles article, configuration {number}): {'no collapse' if held else 'collapsed'}"

    def remarks(self, correction: Correction) -> list[str]:
        if not (self.about.rollout_denominators and correction.gates):
            return []
        return [
            f"{self.title} keeps rejected tokens in the denominators, so the loss shrinks by their share; presets take "
            f"them out ({option('framework')} {self.name}@2026-01 too)"
        ]

    def gate_places(self, native: Mapping[str, Any], correction: Correction) -> list[str]:
        written = SlimeConfig(native, self.about)
        return [written.gate_place(gate) for gate in correction.gates]

    def replay(self, table: pa.Table, correction: Correction, options: ReplayOptions = REPLAY_DEFAULTS) -> Replay:
        """Replay a step. The column `rollout_ids` shows which sequences belong to the same rollout."""
        from mismatchctl.frameworks.slime.replay import replay_step
        from mismatchctl.frameworks.step import Step

        own = {**self.columns, "log_probs": "train_log_probs"}  # slime's `log_probs` are the trainer's
        step = Step.read(table, options.dtype, own)
        return replay_step(step, self._arguments(correction), self.about, options.micro_batch_size)

    def unavailable_names(self, correction: Correction, columns: Collection[str]) -> dict[str, str]:
        given = self._arguments(correction)
        lacks_reference = given.use_kl_loss and "ref_log_probs" not in columns
        found = dict.fromkeys(("kl_loss", "loss"), "ref_log_probs in every row") if lacks_reference else {}
        return found | ({"opsm_clipfrac": "masked tokens"} if given.use_opsm else {})

    def meanings(self) -> list[LoggedMetric]:
        from mismatchctl.frameworks.slime.replay import list_meanings

        return list_meanings(self.about)

    def _checked(self, given: Arguments) -> Arguments:
        if given.advantage_estimator == "cispo" and not self.about.cispo:
            raise ConfigError(f"{self.name}@{self.version} does not support advantage_estimator cispo")
        return given

    def _arguments(self, correction: Correction) -> Arguments:
        said, unsaid, _ = make_arguments(correction, self.about)
        if unsaid:
            raise ConfigError(f"{self.name} cannot express this correction: {'; '.join(unsaid)}")
        return self._checked(said)


SLICED_COLUMNS = ("rollout_log_probs", "log_probs", "ref_log_probs", "advantages", "returns", "values", "entropy", "kl")
"""Columns that are split across the files of context-parallel ranks. Other columns are complete in every file."""
MAX_NAMED_RANKS = 8
"""Maximum number of missing ranks in an error message. A damaged file may declare millions of ranks."""


def find_ranks(file: File) -> dict[Path, Any]:
    """Map the file of each rank of a rollout to (rank, number of ranks, sample ids, True if it has `log_probs`)."""
    rollout = file.path.stem.partition("_")[0]
    others = sorted(file.path.parent.glob(f"{rollout}_*.pt"))
    return _read_ranks(tuple((file.open(other), other.stat().st_size, other.stat().st_mtime_ns) for other in others))


@lru_cache(maxsize=1)
def _read_ranks(stamps: tuple[tuple[File, int, int], ...]) -> dict[Path, Any]:
    found = {}
    for file, *_ in stamps:
        content = file.torch()
        if isinstance(content, dict) and isinstance(data := content.get("rollout_data"), dict):
            rank, size = content.get("cp_rank", 0), content.get("cp_size", 1)
            found[file.path] = (rank, size, _identify_samples(data), "log_probs" in data)
    return found


def _identify_samples(data: Mapping[str, Any]) -> tuple[int, ...]:
    """Return one id per sample: its index, or a checksum of its tokens."""
    if data.get("sample_indices") is not None:
        return tuple(int(index) for index in data["sample_indices"])
    return tuple(crc32(np.asarray(to_array(tokens), np.int64).tobytes()) for tokens in data.get("tokens", ()))


def join_responses(file: File, content: Mapping[str, Any]) -> dict[str, list[NDArray[Any]]]:
    """Join the columns that are split across ranks. If `file` is not from rank 0, return {}."""
    size, own = content["cp_size"], content["cp_rank"]
    samples = _identify_samples(content["rollout_data"])
    ranks = reversed(find_ranks(file).items())  # if several files have the same rank, use the first
    by_rank = {rank: path for path, (rank, *about) in ranks if about == [size, samples, True]} | {own: file.path}
    problem = f"this file belongs to context-parallel rank {own} of {size}"
    if not 0 <= own < size:
        raise DataError(problem, file=str(file.path))
    if missing := list(islice((str(rank) for rank in range(size) if rank not in by_rank), MAX_NAMED_RANKS)):
        remedy = f"copy the files of all ranks of this rollout: {file.path.stem.partition('_')[0]}_*.pt"
        problem += f", and the files of rank {', '.join(missing)} are missing"
        raise DataError(problem, file=str(file.path), remedy=remedy)
    if own != 0:
        return {}
    data = [file.open(by_rank[rank]).torch()["rollout_data"] for rank in range(size)]
    lengths = [int(length) for length in data[0]["response_lengths"]]
    totals = [int(length) for length in data[0]["total_lengths"]]
    padded = data[0].get("max_seq_lens") if content.get("qkv_format") == "bshd" else None
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in SLICED_COLUMNS if name in data[0]}
    for number, (total, length) in enumerate(zip(totals, lengths, strict=True)):
        axis = total if padded is None else int(padded[number])
        places = [find_positions(total, length, axis, rank, size) for rank in range(size)]
        for name, column in columns.items():
            slices = [np.asarray(to_array(rank[name][number])) for rank in data]
            column.append(_join_slices(slices, places, length, name, number, [by_rank[rank] for rank in range(size)]))
    return columns


def check_complete(file: File, row: int, have: int, length: int, remedy: str) -> None:
    if have < length:
        problem = f"a context-parallel rank saved {have} of a response's {length} tokens, without their positions"
        remedy += ", or record the run with one context-parallel rank"
        raise DataError(problem, file=str(file.path), row=row, remedy=remedy)


def find_positions(total: int, response: int, axis: int, rank: int, size: int) -> NDArray[np.int64]:
    """Return the response positions that `rank` stores. With `size` 2, rank 0 has quarters 0 and 3 of `axis` tokens."""
    chunk = -(-axis // (2 * size))
    first = total - response - 1  # the logits at this position predict the first response token
    owned = [range(max(n * chunk, first), min((n + 1) * chunk, total - 1)) for n in (rank, 2 * size - 1 - rank)]
    return np.concatenate([np.arange(part.start, max(part.stop, part.start)) for part in owned]) - first


def _join_slices(
    slices: list[NDArray[Any]], places: list[NDArray[np.int64]], length: int, name: str, row: int, paths: list[Path]
) -> NDArray[Any]:
    for rank, (part, place) in enumerate(zip(slices, places, strict=True)):
        if len(part) != len(place):
            problem = f"has {len(part)} values, but rank {rank} of {len(places)} has {len(place)} in the zigzag layout"
            remedy = "only the zigzag layout is supported, so save with one context-parallel rank"
            raise DataError(problem, file=str(paths[rank]), row=row, column=name, remedy=remedy)
    if sum(map(len, places)) != length:
        problem = f"the slices of all ranks contain {sum(map(len, places))} of the response's {length} tokens"
        raise DataError(problem, file=str(paths[0]), row=row, column=name)
    whole = np.empty(length, slices[0].dtype)
    whole[np.concatenate(places)] = np.concatenate(slices)
    return whole


def _read_rows(file: File) -> Iterator[Row]:
    content = file.torch()
    for sample in content["samples"] if content.get("format_version") == 2 else _read_rank(file, content):
        row = {name: to_array(value) for name, value in sample.items()}
        length = int(row["response_lengths"])
        row["prompt"], row["response_ids"] = np.split(np.asarray(row["tokens"]), [len(row["tokens"]) - length])
        index = row.get("sample_index", row.get("sample_indices"))
        yield {**row, "step": content["rollout_id"], "sequence_id": index}


def _read_rank(file: File, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of a rank, or [] if the file of another rank provides them."""
    data = content["rollout_data"]
    if "log_probs" not in data:
        if any(has_log_probs for *_, has_log_probs in find_ranks(file).values()):
            return []
        remedy = "let the trainer recompute them"
        problem = "no rank saved log_probs for this rollout, as with --use-rollout-logprobs"
        raise DataError(problem, file=str(file.path), column="log_probs", remedy=remedy)
    count = len(data["tokens"])
    columns = {name: value for name, value in data.items() if hasattr(value, "__len__") and len(value) == count}
    columns.pop("raw_reward", None)  # contains the whole batch, not only this rank's samples
    if content.get("cp_size", 1) > 1:
        whole = join_responses(file, content)
        if not whole:
            return []
        columns |= whole
    elif "cp_size" not in content:
        for number, (values, length) in enumerate(zip(columns["log_probs"], columns["response_lengths"], strict=True)):
            check_complete(file, number, len(values), int(length), "update to a version that saves cp_rank and cp_size")
    return [{name: value[number] for name, value in columns.items()} for number in range(count)]


LAYOUT = read_layout(
    __file__,
    "slime",
    _read_rows,
    lambda file: file.has_keys("rollout_data", "rollout_id") or file.has_keys("format_version", "samples"),
)


def _read_rollout_rows(file: File) -> Iterator[Row]:
    content = file.torch()
    for sample in content["samples"]:
        mask = [0] * sample["response_length"] if sample.get("remove_sample") else sample.get("loss_mask")
        versions = [str(one) for one in sample.get("weight_versions") or ()]
        yield {
            **take_response(sample["tokens"], sample["response_length"], mask),
            "prompt": sample["tokens"][: len(sample["tokens"]) - sample["response_length"]],
            "truncated": None if "status" not in sample else str(sample["status"]).endswith("truncated"),
            "step": content["rollout_id"],
            "sequence_id": sample["index"],
            "rollout_log_probs": [] if sample["response_length"] == 0 else sample.get("rollout_log_probs"),
            "prompt_id": sample.get("group_index"),
            "rollout_ids": sample.get("rollout_id"),
            "reward": sample.get("reward"),
            "rollout_version": min(map(int, versions)) if versions and all(map(str.isdecimal, versions)) else None,
        }


def take_response(tokens: list[int], length: int, mask: Any) -> Row:
    """Return the tokens and mask of the response. Without a mask, all response tokens are valid."""
    return {"response_ids": tokens[len(tokens) - length :], "mask": [1] * length if mask is None else mask}


ROLLOUT_LAYOUT = read_layout(
    __file__,
    "slime-rollout",
    _read_rollout_rows,
    lambda file: file.has_keys("rollout_id", "samples") and not file.has_keys("format_version"),
)

VIME_LAYOUTS = replace(LAYOUT, framework="vime"), replace(ROLLOUT_LAYOUT, framework="vime-rollout")
"""Layouts of vime. The files of vime have the same format as slime's files."""

LAYOUTS = (LAYOUT, ROLLOUT_LAYOUT, *VIME_LAYOUTS)
ADAPTER = make_adapter("slime", Slime, recognize=recognize, layouts=LAYOUTS)
