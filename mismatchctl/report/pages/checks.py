"""Pages of `schema --check`, `lint` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mismatchctl.core.formatting import format_bytes, format_count, format_label
from mismatchctl.frameworks.lint import LEVELS, LintMessage
from mismatchctl.report.document import TERMINAL_AND_PAGE, Card, Document, Facts, Headline, Note, Section, add_heading

if TYPE_CHECKING:
    from mismatchctl.api.doctor import Dependency, Machine, SelfTestCheck
    from mismatchctl.data.schema_check import FileCheck

_CardLine = tuple[str, str, int]


def schema_check_document(checks: Sequence[FileCheck]) -> Document:
    """Build the page of checked files, with a card per group of similar files."""
    kinds: dict[object, list[FileCheck]] = {}
    for check in checks:
        kinds.setdefault(_grouping_key(check), []).append(check)
    section = Section("", "files").add(*(_file_card(alike) for alike in kinds.values()))
    if len(checks) > 1:
        section.add(Note(f"{sum(check.sound for check in checks)} of {len(checks)} files can be used as they are"))
    return Document(Headline("")).add(section)


def _grouping_key(check: FileCheck) -> object:
    """Return the properties that similar files share. A file with problems is a group of one."""
    if not check.sound:
        return check.path
    columns = (check.recognized, tuple(check.partition), check.absent, tuple(check.ignored.items()), check.unknown)
    return check.run, check.layout, columns


def _file_card(alike: Sequence[FileCheck]) -> Card:
    first = alike[0]
    more = f" and {len(alike) - 1} more like it" if len(alike) > 1 else ""
    lines = [(heading, text, 0) for heading, text in (*_file_facts(alike), *_file_faults(first))]
    if first.sound:
        return Card("fine", "good", f"{first.path}{more}", lines=lines)
    return Card("bad", "bad", first.path, "cannot be used as it is", lines=lines)


def _file_facts(alike: Sequence[FileCheck]) -> Iterable[tuple[str, str]]:
    first = alike[0]
    size, rows, sequences, tokens = (
        sum(getattr(check, name) for check in alike) for name in ("size", "rows", "sequences", "tokens")
    )
    if size:
        counts = [(rows, "row"), (sequences, "sound sequence"), (tokens, "valid token")]
        yield "holds", ", ".join([format_bytes(size), *(format_count(*each) for each in counts)])
    yield "run", first.run
    if first.layout is not None:
        meaning = "one row per sequence" if first.layout == "wide" else "one row per token"
        yield "layout", f"{first.layout}: {meaning}"
    elif first.error is None:
        yield "left out", "other files of its run hold what is compared"
    columns = [
        f"{column.name}: {column.dtype}{'' if column.actual == column.name else f', called {column.actual} there'}"
        for column in first.recognized
    ]
    for name, value in first.partition.items():
        columns.append(f"{name}: from the folders' names" + ("" if len(alike) > 1 else f" ({format_label(value)})"))
    yield from add_heading("columns", columns)
    if first.absent:
        yield "absent", ", ".join(first.absent)
    if first.unknown:
        yield "unknown", ", ".join(f"{column.name}: {column.dtype}{column.hint}" for column in first.unknown)


def _file_faults(check: FileCheck) -> Iterable[tuple[str, str]]:
    if check.error is not None:
        yield "problem", check.error
    for name, why in check.ignored.items():
        yield "left out", f"{name}: {why}"
    for bad in check.bad:
        yield (
            "bad data",
            f"{bad.reason} in {format_count(bad.sequences, 'sequence')}; first in row {bad.row}: {bad.problem}",
        )


_LEVEL_NOUNS = {
    "error": "error{s}",
    "warning": "warning{s}",
    "advice": "piece{s} of advice",
    "unknown": "unknown value{s}",
    "info": "note{s}",
}


def lint_document(findings: Sequence[LintMessage], title: str, *, notes: bool = True) -> Document:
    """Build the page of lint findings. `notes` includes findings of level info."""
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    counted = [
        f"{count} {_LEVEL_NOUNS[level].format(s='s' * (count != 1))}" for level, count in counts.items() if count
    ]
    if not notes and counts["info"]:
        counted[-1] += " (-v prints them)"
    doc = Document(Headline(title, counted or ["nothing to report"], subtitle="lint"))
    shown = [finding for finding in findings if notes or finding.level != "info"]
    return doc.add(Section("", "traps").add(*map(_trap_card, shown)))


def _trap_card(finding: LintMessage) -> Card:
    lines: list[_CardLine] = [(name, getattr(finding, name), 0) for name in ("consequence", "fix", "source")]
    lines += [("on the dumps", finding.change, 0)] if finding.change else []
    return Card(finding.level, finding.level, finding.place or "the whole", lines=lines)


@dataclass(frozen=True)
class SettingRow:
    """The default of one option of one command, and its origin."""

    verb: str
    flag: str
    value: Any
    where: str


_CheckedFact = tuple[str, str, bool]
"""Name, text, and True if it is as required."""


def doctor_document(
    machine: Machine,
    dependencies: Sequence[Dependency],
    settings: Sequence[SettingRow],
    unread: Sequence[str],
    checks: Sequence[SelfTestCheck],
) -> Document:
    """Build the page of the machine, the installed packages, the settings and the self-test."""
    packages = [(package.name, _dependency_version(package), package.fits) for package in dependencies]
    chosen = [
        (f"{setting.verb} --{setting.flag.replace('_', '-')}", f"{setting.value}, from {setting.where}", True)
        for setting in settings
    ]
    ignored = [(name, "is read by no verb", False) for name in unread]
    return Document(Headline("", subtitle="doctor")).add(
        _fact_section("Machine", _machine_facts(machine)),
        _fact_section("Packages", packages or [("", "not known: mismatchctl itself is not installed", True)]),
        _fact_section("Settings", [*chosen, *ignored] or [("", "none: every flag is as --help has it", True)]),
        _fact_section("Self-test", _self_test_facts(checks)),
    )


def _fact_section(title: str, found: Iterable[_CheckedFact]) -> Section:
    facts = list(found)
    wrong = {place for place, (_, _, sound) in enumerate(facts) if not sound}
    return Section(title, title.lower()).add(
        Facts([(name, text) for name, text, _ in facts], wrong=wrong, reach=TERMINAL_AND_PAGE)
    )


def _machine_facts(machine: Machine) -> Iterator[_CheckedFact]:
    yield "mismatchctl", f"{machine.version}, result format {machine.result_format}, in {machine.place}", True
    yield "python", f"{machine.python}, {machine.executable}", True
    yield "platform", machine.platform, True
    yield "threads", f"{machine.threads} of {machine.processors} processors", True
    sizes = ((machine.memory, ""), (machine.memory_free, " free"), (machine.memory_limit, " allowed"))
    known = [f"{format_bytes(size)}{what}" for size, what in sizes if size is not None]
    yield "memory", ", ".join(known) or "not known", True
    yield "devices", ", ".join(machine.devices) or "no accelerator: the CPU does the work", True


def _dependency_version(package: Dependency) -> str:
    wanted = f" (wanted: {package.wanted})" if not package.fits else ""
    return f"{package.version or ('absent, optional' if package.optional else 'absent')}{wanted}"


def _self_test_facts(checks: Sequence[SelfTestCheck]) -> Iterator[_CheckedFact]:
    for part in dict.fromkeys(check.part for check in checks):
        own = [check for check in checks if check.part == part]
        wrong = [check for check in own if not check.passed]
        yield part, f"{len(own) - len(wrong)} of {len(own)} numbers are right", not wrong
        for check in wrong:
            yield "", f"{check.metric}: {check.found!r}, should be {check.stored!r}", False
            if check.problem:
                yield "", check.problem, False
                break
