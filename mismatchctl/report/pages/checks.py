"""Pages of `schema --check`, `lint` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mismatchctl.core.formatting import cut_phrase, format_bytes, format_count, format_label
from mismatchctl.frameworks.lint import LEVELS, LintMessage
from mismatchctl.report.document import Card, Document, Facts, Headline, Note, Section, add_heading

if TYPE_CHECKING:
    from mismatchctl.api.doctor import Dependency, Machine, SelfTestCheck
    from mismatchctl.data.reader import FileCheck

_SHOWN_GROUPS, MAX_LINT_FINDINGS, _FAULT_WIDTH = 3, 3, 130  # limits of the terminal output without -v
_LEVEL_NOUNS = {"error": "error", "warning": "warning", "unknown": "unknown value", "info": "note"}


def schema_check_document(checks: Sequence[FileCheck], following: str, *, whole: bool = True) -> Document:
    """Build the page of checked files, with a card per group of similar files."""
    kinds: dict[object, list[FileCheck]] = {}
    for check in checks:
        columns = (check.recognized, tuple(check.partition), check.absent, tuple(check.ignored.items()), check.unknown)
        kinds.setdefault((check.run, check.layout, columns) if check.sound else check.path, []).append(check)
    bad = sum(not check.sound for check in checks)
    title = f"{bad} of {len(checks)} files cannot be used unchanged" if bad else f"all {len(checks)} files can be used"
    if len(checks) == 1:
        title = f"{checks[0].path} {'cannot' if bad else 'can'} be used as it is"
    doc = Document(Headline(title, status="FAIL" if bad else "OK"))
    groups = sorted(kinds.values(), key=lambda alike: alike[0].sound)
    shown = groups if whole else groups[: _SHOWN_GROUPS if bad else 1]
    section = Section("", "files").add(*(_file_card(alike, whole=whole) for alike in shown))
    more = format_count(len(groups) - len(shown), "more kind")
    section.add(Note(f"{more} of files: -v") if len(shown) < len(groups) else None)
    doc.commands = [*([] if whole else [("Details", "-v")]), *([] if bad else [("Next", following)])]
    return doc.add(section)


def _file_card(alike: Sequence[FileCheck], *, whole: bool) -> Card:
    first, facts, faults = alike[0], list(_file_facts(alike)), list(_file_faults(alike[0]))
    brief = [fact for fact in facts if fact[0] in ("contains", "layout", "unknown")]
    lines = [*facts, *faults] if whole else [*((name, cut_phrase(text, _FAULT_WIDTH)) for name, text in faults), *brief]
    if first.sound:
        more = f" and {format_count(len(alike) - 1, 'similar file')}" if len(alike) > 1 else ""
        return Card("fine", "good", f"{first.path}{more}", lines=lines)
    return Card("bad", "bad", first.path, "cannot be used as it is", lines=lines)


def _file_facts(alike: Sequence[FileCheck]) -> Iterable[tuple[str, str]]:
    first = alike[0]
    total = {key: sum(getattr(check, key) for check in alike) for key in ("size", "rows", "sequences", "tokens")}
    if total["size"]:
        counts = [(total["rows"], "row"), (total["sequences"], "valid sequence"), (total["tokens"], "valid token")]
        yield "contains", ", ".join([format_bytes(total["size"]), *(format_count(*each) for each in counts)])
    yield "run", first.run
    if first.layout is not None:
        meaning = "one row per sequence" if first.layout == "wide" else "one row per token"
        yield "layout", f"{first.layout}: {meaning}"
    elif first.error is None:
        yield "left out", "this file lacks log-probs, but other files of the same run contain them"
    columns = [
        f"{column.name}: {column.dtype}{'' if column.actual == column.name else f', named {column.actual} in the file'}"
        for column in first.recognized
    ]
    for name, value in first.partition.items():
        columns.append(
            f"{name}: read from the names of the folders" + ("" if len(alike) > 1 else f" ({format_label(value)})")
        )
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
        many = format_count(bad.sequences, "sequence")
        yield "bad data", f"{bad.reason} in {many}. First in row {bad.row}: {bad.problem}"


def lint_document(findings: Sequence[LintMessage], title: str, *, notes: bool = True, following: str = "") -> Document:
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    counted = [format_count(count, _LEVEL_NOUNS[level]) for level, count in counts.items() if count]
    if not notes and counts["info"]:
        counted[-1] += " (-v prints them)"
    status = "FAIL" if counts["error"] else "CHECK" if counts["warning"] or counts["unknown"] else "OK"
    doc = Document(Headline(f"{title}: {', '.join(counted) or 'no findings'}", subtitle="lint", status=status))
    shown = [one for level in LEVELS for one in findings if one.level == level and (notes or level != "info")]
    left = 0 if notes else len(shown) - MAX_LINT_FINDINGS
    section = Section("", "traps")
    for finding in shown[:MAX_LINT_FINDINGS] if left > 0 else shown:
        lines = [(name, getattr(finding, name)) for name in ("consequence", "fix", "source")]
        section.add(Card(finding.level, finding.level, finding.place or "the configuration", lines=lines))
    section.add(Note(f"{format_count(left, 'more finding')}: -v") if left > 0 else None)
    doc.commands = [*([] if notes else [("Details", "-v")]), *([("Next", following)] if following else [])]
    return doc.add(section)


_CheckedFact = tuple[str, str, bool]  # name, text, and True if the value is as required


def doctor_document(
    machine: Machine, dependencies: Sequence[Dependency], settings: Sequence[Mapping[str, Any]], unread: Sequence[str],
    checks: Sequence[SelfTestCheck], *, whole: bool = True,
) -> Document:  # fmt: skip
    packages = []
    for package in dependencies:
        version = package.version or ("absent, optional" if package.optional else "absent")
        wanted = "" if package.fits else f" (wanted: {package.wanted})"
        packages.append((package.name, f"{version}{wanted}", package.fits))
    chosen = [
        (f"{row['verb']} --{row['flag'].replace('_', '-')}", f"{row['value']}, from {row['where']}", True)
        for row in settings
    ]
    ignored = [(name, "this setting is ignored, because no command has this option", False) for name in unread]
    failed = sum(not check.passed for check in checks)
    wrong = [package.name for package in dependencies if not package.fits]
    tests = f"{len(checks) - failed} of {len(checks)} self-tests"
    title = f"mismatchctl {machine.version} works ({tests})"
    if failed or wrong:
        names = f"; wrong versions: {', '.join(wrong)}" if wrong else ""
        title = f"mismatchctl {machine.version} does not work here ({tests} passed{names})"
    doc = Document(Headline(title, status="FAIL" if failed or wrong else "OK", subtitle="doctor"))
    facts, tested = list(_machine_facts(machine)), _fact_section("Self-test", _self_test_facts(checks))
    if whole:
        packages = packages or [("", "unknown, because mismatchctl is not installed as a package", True)]
        settings_facts = [*chosen, *ignored] or [("", "all options have their defaults", True)]
        named = {"Machine": facts, "Packages": packages, "Settings": settings_facts}
        return doc.add(*(_fact_section(*each) for each in named.items()), tested)
    facts = [fact for fact in facts if fact[0] in ("python", "threads", "memory", "devices")]
    facts += [*(fact for fact in packages if not fact[2]), *chosen[:3], *ignored]
    doc.add(Section("", "facts").add(Facts([(name, text) for name, text, _ in facts])), tested if failed else None)
    doc.commands = [("Details", "-v"), ("Next", "mismatchctl demo")]
    return doc


def _fact_section(title: str, found: Iterable[_CheckedFact]) -> Section:
    facts = list(found)
    wrong = {place for place, (_, _, sound) in enumerate(facts) if not sound}
    return Section(title, title.lower()).add(Facts([(name, text) for name, text, _ in facts], wrong=wrong))


def _machine_facts(machine: Machine) -> Iterator[_CheckedFact]:
    yield "mismatchctl", f"{machine.version}, result format {machine.result_format}, in {machine.place}", True
    yield "python", f"{machine.python}, {machine.executable}", True
    yield "platform", machine.platform, True
    yield "threads", f"{machine.threads} of {machine.processors} processors", True
    sizes = ((machine.memory, ""), (machine.memory_limit, " allowed"))
    known = [f"{format_bytes(size)}{what}" for size, what in sizes if size is not None]
    yield "memory", ", ".join(known) or "unknown", True
    yield "devices", ", ".join(machine.devices) or "no GPU", True


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
