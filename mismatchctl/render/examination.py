"""What `doctor` prints: the machine, what is installed on it, settings with their places, and the self-test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.doctor import Check, Dependency, Machine
from mismatchctl.numbers import bytes_size
from mismatchctl.render.glyphs import Glyphs


@dataclass(frozen=True)
class Setting:
    """The default of one flag of one verb, and where it comes from."""

    verb: str
    flag: str
    value: Any
    where: str


def render_examination(
    machine: Machine,
    dependencies: Sequence[Dependency],
    settings: Sequence[Setting],
    unread: Sequence[str],
    checks: Sequence[Check],
    console: Console,
) -> None:
    """Print it all; what is wrong is red."""
    _section(console, "Machine", _facts(machine))
    packages = [(package.name, _version(package), package.fits) for package in dependencies]
    _section(console, "Packages", packages or [("", "not known: mismatchctl itself is not installed", True)])
    chosen = [
        (f"{setting.verb} --{setting.flag.replace('_', '-')}", f"{setting.value}, from {setting.where}", True)
        for setting in settings
    ]
    ignored = [(name, "is read by no verb", False) for name in unread]
    _section(console, "Settings", [*chosen, *ignored] or [("", "none: every flag is as --help has it", True)])
    _section(console, "Self-test", _tested(checks))


def _facts(machine: Machine) -> Iterator[tuple[str, str, bool]]:
    yield "mismatchctl", f"{machine.version}, result format {machine.result_format}, in {machine.place}", True
    yield "python", f"{machine.python}, {machine.executable}", True
    yield "platform", machine.platform, True
    yield "threads", f"{machine.threads} of {machine.processors} processors", True
    sizes = ((machine.memory, ""), (machine.memory_free, " free"), (machine.memory_limit, " allowed"))
    known = [f"{bytes_size(size)}{what}" for size, what in sizes if size is not None]
    yield "memory", ", ".join(known) or "not known", True
    yield "devices", ", ".join(machine.devices) or "no accelerator: the CPU does the work", True


def _version(package: Dependency) -> str:
    wanted = f" (wanted: {package.wanted})" if not package.fits else ""
    return f"{package.version or ('absent, optional' if package.optional else 'absent')}{wanted}"


def _tested(checks: Sequence[Check]) -> Iterator[tuple[str, str, bool]]:
    for part in dict.fromkeys(check.part for check in checks):
        own = [check for check in checks if check.part == part]
        wrong = [check for check in own if not check.passed]
        yield part, f"{len(own) - len(wrong)} of {len(own)} numbers are right", not wrong
        for check in wrong:
            yield "", f"{check.metric}: {check.found!r}, should be {check.stored!r}", False
            if check.problem:
                yield "", check.problem, False
                break


def _section(console: Console, title: str, lines: Iterable[tuple[str, str, bool]]) -> None:
    glyphs = Glyphs(console)
    console.print(Text(title, style="bold"))
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, text, sound in lines:
        rows.add_row(Text(f"  {glyphs.text(name)}"), Text(glyphs.text(text), style="" if sound else "red"))
    console.print(rows, "")
