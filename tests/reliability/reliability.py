"""Run the long form of the fuzz cases, the kills and the faults, and write docs/methods/reliability.md.

`python -m tests.reliability.reliability --cases 20000 --kills 1000 --write docs/methods/reliability.md` runs all.
Results are kept as lines of JSON in a folder (`--log`), and the next run continues from there. Sections of an existing
document for which the log has no results stay as they are, so that one harness can be run again by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow

from tests.paths import ROOT

KINDS = {
    "a pickle corrupts memory": (
        "data/test_pickles.py::test_forged_states_are_refused",
        "data/test_pickles.py::test_made_up_sizes_are_refused",
    ),
    "the gate lets a worse value pass": (
        "reliability/test_fail_open.py::test_no_way_opens_the_gate",
        "reliability/test_fail_open.py::test_an_edited_result_does_not_pass",
        "api/test_gate_coverage.py::test_repeated_sequences_are_counted_by_analyze_diagnose_and_the_gate",
        "api/test_gate_coverage.py::test_skipped_data_is_counted_in_tokens_too",
        "api/test_gate_coverage.py::test_a_broken_file_counts_by_its_size",
        "api/test_gate_coverage.py::test_files_with_other_names_are_told",
        "api/test_gate.py::test_concurrent_saves_never_share_a_number",
        "api/test_gate.py::test_rules_that_mean_nothing",
        "api/test_gate_coverage.py::test_a_result_that_dropped_its_bad_half_is_undecided",
        "api/test_gate_coverage.py::test_a_place_of_the_baseline_must_be_there",
        "api/test_gate_coverage.py::test_infinitely_many_tokens_are_no_evidence",
        "api/test_gate_coverage.py::test_a_mask_that_hides_the_bad_tokens_does_not_pass",
    ),
    "memory and time by step": (
        "measure/test_many_groups.py::test_a_group_is_as_large_as_its_tokens",
        "api/test_sweep_memory.py::test_targets_take_no_more_memory_for_more_sequences",
        "api/test_sweep_memory.py::test_rows_without_tokens_are_not_measured",
        "api/test_sweep_memory.py::test_tables_of_groups_are_made_together",
    ),
    "files that exhaust the machine": (
        "data/test_unusual_dumps.py::test_a_row_that_is_too_long_is_refused_before_it_is_decoded",
        "data/test_unusual_dumps.py::test_texts_that_many_rows_share_stay_encoded",
        "data/test_paths.py::test_a_pipe_in_a_folder_is_refused",
        "data/test_paths.py::test_folders_may_be_nested_deeply",
        "reliability/test_faults.py::test_small_hostile_files_take_little_memory",
    ),
    "extreme numbers": (
        "cli/test_extreme_values.py::test_no_output_holds_a_number_that_is_not_finite",
        "cli/test_extreme_values.py::test_no_page_draws_a_number_that_is_not_finite",
        "cli/test_extreme_values.py::test_no_verb_is_left_out",
    ),
    "texts that are parsed": (
        "io/test_text_parsing.py::test_what_is_refused_says_where_and_why",
        "io/test_text_parsing.py::test_regular_files_alone_are_read",
        "results/test_damaged_results.py::test_nothing_waits_for_a_pipe",
        "test_architecture.py::test_text_is_parsed_in_io_only",
    ),
    "Results from elsewhere": (
        "results/test_damaged_results.py::test_a_result_that_is_not_whole_is_refused",
        "results/test_damaged_results.py::test_a_result_holds_finite_numbers",
        "results/test_damaged_results.py::test_a_sweep_that_is_not_whole_is_refused",
        "results/test_damaged_results.py::test_a_comparison_that_is_not_whole_is_refused",
    ),
    "odd dumps": (
        "data/test_unusual_dumps.py::test_ids_of_any_kind_name_sequences",
        "data/test_unusual_dumps.py::test_a_mask_of_fractions_is_converted_and_then_refused",
        "data/test_unusual_dumps.py::test_a_memory_limit_needs_no_units",
    ),
    "outputs": (
        "io/test_files.py::test_outputs_appear_together",
        "io/test_files.py::test_an_output_never_replaces_an_input",
        "io/test_files.py::test_the_first_output_does_not_stay_when_the_second_fails",
        "report/test_escaping.py::test_every_medium_has_one_function_that_escapes",
        "report/test_escaping.py::test_hostile_labels_stay_text_in_every_output",
        "report/test_escaping.py::test_names_stay_text",
        "reliability/faults.py::threads",
    ),
    "interruption": (
        "cli/test_signals.py::test_a_signal_ends_with_its_code_and_leaves_nothing",
        "cli/test_signals.py::test_a_signal_that_a_callback_swallows_is_not_lost",
        "cli/test_signals.py::test_interrupts_during_imports_end_with_130",
        "io/test_files.py::test_what_dead_processes_left_is_swept",
        "cli/test_signals.py::test_streams_that_are_closed_or_full",
        "recorder/test_files.py::test_a_killed_writer_loses_only_its_file",
    ),
    "a footer that ends pyarrow": (
        "data/test_unusual_dumps.py::test_a_footer_that_contradicts_itself_is_told",
        "data/test_unusual_dumps.py::test_another_process_looks_at_a_large_footer",
        "data/test_unusual_dumps.py::test_a_footer_that_cannot_be_read_is_refused",
        "reliability/test_fuzz.py::test_no_bytes_end_the_process",
    ),
    "sentences": (
        "data/test_paths.py::test_a_file_without_permission_is_told",
        "data/test_paths.py::test_a_path_that_is_not_utf_8_is_read_and_shown_escaped",
        "data/test_paths.py::test_a_link_that_leads_nowhere_is_told",
        "reliability/faults.py::permission",
    ),
    "files of earlier and later versions": (
        "results/test_compatibility.py::test_its_values_are_read",
        "results/test_compatibility.py::test_the_same_dump_passes_against_it",
        "results/test_compatibility.py::test_a_newer_format_is_refused_by_every_reader",
    ),
    "the network": ("cli/test_no_network.py::test_no_verb_asks_the_network",),
    "a fresh machine": ("report/test_browser.py::test_what_is_missing_is_the_reason_and_ci_never_skips",),
    "speed of small things": (
        "reliability/faults.py::many",
        "api/test_sweep_memory.py::test_a_long_sequence_is_sought_in_once",
    ),
}
"""What once broke, and the tests that hold each kind."""
LIMITS = """
- pyarrow decodes Parquet and Arrow in this process. A file that was forged to break it could end the
  process. One kind did, a footer that contradicts its schema: a footer is read before pyarrow sees it, and what
  cannot be read is refused; above 1 MB a process of its own reads it first. The bytes below the footer and those
  of Arrow, whose arrays are validated whole, found no other. Read dumps of strangers where a crash does no harm.
- Of the versions above a part of the tests was run; all of them run on Python 3.11. Older versions of
  torch were not tried.
- Files of frameworks above 64 MB are mapped: one that is cut short while it is read ends the process.
- pyarrow 26 cannot read lists of flags that it wrote in version 2 pages of a few bytes: such a file is
  refused.
- SIGKILL between the renames of several outputs can leave some of them new and some of them old, each whole.
"""


def logged(folder: Path, name: str) -> list[dict[str, Any]]:
    """What one of the harnesses has found so far."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def extend(folder: Path, name: str, script: str, *words: str) -> None:
    """Run a harness and keep what it finds."""
    with open(folder / f"{name}.jsonl", "a") as file:
        subprocess.run(
            [sys.executable, "-W", "default::RuntimeWarning", "-m", f"tests.reliability.{script}", *words],
            stdout=file,
            check=True,
            cwd=ROOT,
        )


def brief(words: str) -> str:
    """The end of what is wrong, in one line."""
    return " ".join(words.split())[-200:]


def most(found: list[dict[str, Any]], name: str) -> Any:
    """The largest of a number that each has."""
    return max((one[name] for one in found), default=0)


def cases(found: list[dict[str, Any]], earlier: int) -> list[str]:
    """The section of the cases."""
    kinds = Counter(case["kind"] for case in found)
    failures = [
        f"- seed {case['seed']}, {case['kind']}, `{' '.join(case['argv'])[:60]}`: {brief(case['wrong'])}"
        for case in found
        if case["wrong"]
    ]
    return [
        "Each case follows from its seed (`tests/reliability/fuzzing.py`). A hundred share a fork. One that does not",
        "end well there, or was not reached, is run again in a fork of its own. Sound dumps are held to their K3. A",
        "warning of a library on stderr is a failure too. Seeds that failed on the way were mended and run again.",
        f"{earlier:,} others ran on earlier code." if earlier else "",
        "",
        "| input | cases |",
        "|---|---|",
        *(f"| {kind} | {count:,} |" for kind, count in sorted(kinds.items())),
        f"| **all** | **{len(found):,}** |",
        "",
        f"Failures: {len(failures):,}. The slowest case took {most(found, 'seconds'):.1f} s of CPU time, the largest "
        f"{most(found, 'memory') >> 20:,} MB.",
        *(["", *failures] if failures else []),
    ]


def natives(found: list[dict[str, Any]]) -> list[str]:
    """The section of bytes that pyarrow decodes."""
    if not found:
        return ["Not tried."]
    return [
        "What code in C decodes, a few of its bytes exchanged, decoded in this process as the tool has it decoded",
        "(`tests/reliability/natives.py`): Parquet and Arrow in every form that a writer may choose (pages without",
        "checksums), torch's files, pickles, YAML, TOML and JSON, TensorBoard's events. Files of",
        "numpy's own (npy, npz) are not read at all.",
        "",
        "| bytes | files | decoded | refused | not survived, or no sentence |",
        "|---|---|---|---|---|",
        *(
            f"| {one['part']} | {one['files']:,} | {one['ended'].get('decoded', 0):,} "
            f"| {one['ended'].get('refused', 0):,} | {brief(' '.join(one['wrong'])) or 'none'} |"
            for one in found
        ),
    ]


def guided(found: list[dict[str, Any]]) -> list[str]:
    """The section of the doors that were fuzzed by coverage."""
    if not found:
        return ["Not tried: `make guided`."]
    return [
        "The doors that take strangers' bytes, fuzzed by atheris, which keeps what reaches new edges of our code",
        "(`tests/reliability/guided.py`, `make guided`; atheris is not part of what the tests need).",
        "",
        "| door | executions | edges | outcome |",
        "|---|---|---|---|",
        *(
            f"| {one['door']} | {one['executions']:,} | {one['edges']:,} | {brief(one['wrong']) or 'nothing found'} |"
            for one in found
        ),
    ]


_WAY_KINDS = {
    "repeated": r"cop(y|ies)|links to|saved twice but",
    "missing": "^missing|empty|fully masked",
    "masked": r"^(mask|zero|cut|equal) tokens|a mask hides",
    "skipped": "^skipped",
    "other names of files": "^bad rows in ",
    "too good": "^too good|saved twice",
    "other values": "^values",
    "another model or other tokens": "another|vocabulary|other tokens?|fixed tokens",
    "rules and histories": "rule|history",
    "dilution and worse rows": "",
}
"""Kinds of ways to open the gate by their names, the first that fits."""


def open_gates(found: list[dict[str, Any]]) -> list[str]:
    """The section of ways to make the gate pass with bad data."""
    kinds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _WAY_KINDS}
    for one in found:
        kinds[next(kind for kind, words in _WAY_KINDS.items() if re.search(words, one["way"]))].append(one)
    ways, seeds = len({one["way"] for one in found}), len({one["seed"] for one in found})
    return [
        f"{ways} ways to make the gate pass with a dump that is worse than its baseline or cannot be judged, each with",
        f"{seeds} seeds (`tests/reliability/fail_open.py`). Every second seed has a heavy tail.",
        "",
        "| kind | tries | failed (3) | undecided (4) | refused (2) | passed (0) | tracebacks |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {kind} | {len(own):,} | "
            + " | ".join(f"{sum(one['code'] == code for one in own):,}" for code in (3, 4, 2, 0))
            + f" | {sum(bool(one['error']) for one in own):,} |"
            for kind, own in [*kinds.items(), ("**all**", found)]
        ),
    ]


def edited(found: list[dict[str, Any]]) -> list[str]:
    """The section of edited Results."""
    kinds = {re.sub(r"\.\d+(?=\.|$)", ".*", f"{one['file']}:{one['place']}") for one in found}
    return [
        "One change of the JSON of a worse dump's Result, or of its baseline: removed, null, 0, negative, tiny, huge,",
        "scaled, text, a list, a mapping, or repeated (`tests/reliability/edited_results.py`).",
        "",
        "| file | mutations | failed (3) | undecided or refused (4) | passed (0) | tracebacks |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {len(own):,} | "
            + " | ".join(f"{sum(one['code'] == code for one in own):,}" for code in (3, 4, 0, 1))
            + " |"
            for name in ("result", "baseline")
            for own in [[one for one in found if one["file"] == name]]
        ),
        "",
        f"They cover {len(kinds):,} kinds of paths, which differ in more than the index in a list.",
    ]


def kills(found: list[dict[str, Any]], earlier: int) -> list[str]:
    """The section of the kills."""
    verbs, wrong = Counter(kill["verb"] for kill in found), [kill for kill in found if kill["wrong"]]
    early = sum(kill["code"] != 0 for kill in found)
    return [
        "SIGKILL, SIGTERM and SIGINT at random moments of the verbs below (`diagnose` with `--json` alone, so that it",
        "writes no file) and of the recorder; half of those that replace outputs with earlier ones in place. An output",
        "is as an undisturbed run writes it (JSON, which holds moments: of that length, and whole) or as it was",
        "before; those of one command appear together, but after SIGKILL; the exit code is the signal's, or 0 where it",
        "came too late; after the next run no other file is there, temporary folders included. Kills that found",
        "something were mended, and others of that verb made in their place. `combined` is a report of several",
        "Results, `figures` and `markdown` are those outputs.",
        f"{earlier:,} others were of earlier code." if earlier else "",
        "",
        "| verb | kills |",
        "|---|---|",
        *(f"| {verb} | {count:,} |" for verb, count in verbs.items()),
        f"| **all** | **{len(found):,}** |",
        "",
        f"Lost or left behind: {len(wrong):,}. {early:,} came before the command had ended.",
        *(["", *(f"- {one['verb']}, {one['signal']}: {brief(one['wrong'])}" for one in wrong)]),
    ]


def memory(found: list[dict[str, Any]]) -> list[str]:
    """The section of the files that could exhaust a machine."""
    if not found:
        return ["None was tried."]
    latest = {one["name"]: one for one in found}
    return [
        "Files that `tests/reliability/memory.py` makes, read by `analyze` with a Result and a page: exit code, peak",
        "memory of the process and CPU time. Exit code 4 is a refusal in one sentence.",
        "",
        "| file | bytes | exit code | memory | CPU time |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {one['bytes']:,} | {one['code']} | {one['mb']:,} MB | {one['cpu']} s |"
            for name, one in latest.items()
        ),
    ]


def faults(found: list[dict[str, Any]]) -> list[str]:
    """The section of the faults of the machine."""
    outcomes = {fault["name"]: brief(fault["wrong"]) or "as it should be" for fault in found}
    return ["| fault | outcome |", "|---|---|", *(f"| {name} | {outcome} |" for name, outcome in outcomes.items())]


def versions(found: list[dict[str, Any]]) -> list[str]:
    """The section of other versions of Python and of the dependencies."""
    if not found:
        return ["None was tried: `make versions`."]
    names = list(max((one["versions"] for one in found), key=len))
    return [
        "A part of the tests with other versions of Python, and with the oldest of each dependency (`make versions`);",
        "torch, and what needs it, is left out.",
        "",
        f"| Python | {' | '.join(names)} | outcome |",
        f"|---{'|---' * len(names)}|---|",
        *(
            f"| {' | '.join([one['python'], *(one['versions'].get(name, '') for name in names)])} "
            f"| {brief(one['wrong'] or one['tests'])} |"
            for one in found
        ),
    ]


def document(folder: Path, earlier: str = "") -> str:
    """docs/methods/reliability.md; what is no line in the log is left as it stood."""

    def section(title: str, name: str, told: Callable[[list[dict[str, Any]]], list[str]]) -> list[str]:
        found = logged(folder, name)
        stood = re.search(rf"^## {title}\n\n(.*?)\n(?=\n## )", earlier, re.MULTILINE | re.DOTALL)
        return ["", f"## {title}", "", *(told(found) if found or stood is None else stood[1].splitlines())]

    lines = [
        "# Reliability",
        "<!-- Written by tests/reliability/reliability.py; run it again instead of editing. -->",
        "",
        "What it is held to: whatever it is given, mismatchctl ends in an answer, or in one sentence and exit code 2,",
        "3 or 4: no traceback, no hang beyond 30 s, no more than 2 GB for inputs of a few kilobytes, no output that is",
        "there in part. Where that is not so, as far as it is known, stands under Limits.",
        f"Measured on Python {platform.python_version()}, pyarrow {pyarrow.__version__}.",
        "Cases, kills and faults are of several commits, some before the last changes: run them again to be sure.",
        *section("Cases", "cases", lambda found: cases(found, len(logged(folder, "earlier")))),
        *section("Bytes that a library decodes", "natives", natives),
        *section("Guided by coverage", "guided", guided),
        *section("The gate and bad data", "open", open_gates),
        *section("The gate and edited Results", "edited", edited),
        *section("Kills", "kills", lambda found: kills(found, len(logged(folder, "earlier_kills")))),
        *section("Memory of small hostile files", "memory", memory),
        *section("Faults of the machine", "faults", faults),
        *section("Versions", "versions", versions),
        *(
            "",
            "## Kinds of failure",
            "",
            "What once broke, and the tests that hold it.",
            "",
            "| kind | tests |",
            "|---|---|",
        ),
        *(f"| {kind} | {', '.join(f'`{name}`' for name in names)} |" for kind, names in KINDS.items()),
        *("", "## Limits", LIMITS),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000, help="further ones; their seeds follow those of the log")
    parser.add_argument("--kills", type=int, default=1_000, help="further ones")
    parser.add_argument("--natives", type=int, default=5_000, help="files of each part whose bytes are exchanged")
    parser.add_argument("--gates", type=int, default=3, help="seeds of the ways to make the gate pass")
    parser.add_argument("--edited", type=int, default=6_000, help="mutations of Results and baselines")
    parser.add_argument("--log", type=Path, help="where lines are kept; default: a new temporary folder")
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    asked.log = asked.log or Path(tempfile.mkdtemp(prefix="mismatchctl-reliability-"))
    asked.log.mkdir(parents=True, exist_ok=True)
    first, seed = len(logged(asked.log, "cases")), len(logged(asked.log, "kills"))
    os.environ.setdefault("FAULTS_FILES", "10000")
    with ThreadPoolExecutor(2) as pool:  # its threads only wait for processes
        if asked.cases:
            pool.submit(extend, asked.log, "cases", "fuzz_check", str(first), str(asked.cases)).result()
        if asked.kills:
            pool.submit(extend, asked.log, "kills", "kills", str(seed), str(asked.kills)).result()
    if asked.natives:
        extend(asked.log, "natives", "natives", "0", str(asked.natives))
    extend(asked.log, "memory", "memory")
    if asked.gates:
        extend(
            asked.log,
            "open",
            "fail_open",
            str(len({one["seed"] for one in logged(asked.log, "open")})),
            str(asked.gates),
        )
    if asked.edited:
        extend(asked.log, "edited", "edited_results", str(len(logged(asked.log, "edited"))), str(asked.edited))
    extend(asked.log, "faults", "faults")
    earlier = asked.write.read_text(encoding="utf-8") if asked.write and asked.write.exists() else ""
    text = document(asked.log, earlier)
    asked.write.write_text(text, encoding="utf-8") if asked.write else print(text)


if __name__ == "__main__":
    main()
