"""`mismatchctl watch`."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.errors import EXIT_CHECK_FAILED, ConfigError, DataError

_SECONDS_PER_UNIT = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def watch(
    paths: list[str],
    correction: list[str] | None = None,
    rule: list[str] | None = None,
    baseline: Path | None = None,
    until_idle: str | None = None,
    every: str = "10s",
    column: list[str] | None = None,
    threads: int | None = None,
    quiet: bool = False,
    html: Path | None = None,
    force: bool = False,
) -> None:
    """Follow a running job: print one line per step.

    Only complete files are read. The command ends at Ctrl-C, after --until-idle, or when a --rule fails.
    """
    out.check_output_paths(html, force=force, inputs=[*paths, baseline])

    from mismatchctl.api.gate.gate import read_baselines
    from mismatchctl.api.gate.rules import parse_rules
    from mismatchctl.api.watch import DumpWatcher
    from mismatchctl.core.formatting import format_command
    from mismatchctl.report.pages.analyze import document
    from mismatchctl.report.pages.watch import format_answers, format_failures, format_header, format_new_steps

    rules = [one for text in rule or () for one in parse_rules(text)]
    compares = next((one for one in rules if one.increase is not None or one.decrease is not None), None)
    if compares is not None and baseline is None:
        raise ConfigError(f"--rule {compares.text}: this rule needs an accepted Result; add --baseline FILE")

    watched = DumpWatcher(
        paths,
        opt.select_corrections(correction),
        rules,
        read_baselines(baseline),
        opt.parse_renames(column),
        every=max(_parse_duration("--every", every), 0.1),
        until_idle=None if until_idle is None else _parse_duration("--until-idle", until_idle),
        threads=threads,
    )
    first = True
    for look in watched.snapshots():
        if look is None:
            out.print_message(f"waiting for complete files in {', '.join(paths)}", quiet)
            continue
        failed, runs = format_failures(look), look.result.runs
        out.print_warnings(look.left_out, quiet)
        head = [*format_answers(look, runs), "", format_header(len(runs) > 1)] if first else []
        answers = [] if first else format_answers(look, look.answered)
        for line in () if quiet else (*head, *format_new_steps(look, first=first), *answers):
            typer.echo(out.escape_text(line))
        for sentence in failed:
            out.print_message(f"failed: {sentence}")
        first = False
        out.write_files(out.render_page_files(partial(document, look.result), html))
        if failed:
            raise typer.Exit(EXIT_CHECK_FAILED)
    out.print_warnings([f"left out {place}: it never became complete" for place in watched.unfinished], quiet)
    if first:
        problem = f"no file arrived within {until_idle}"
        raise DataError(problem, file=", ".join(paths), remedy="check the path that the job writes to")
    if not quiet:
        typer.echo(f"\nNext: {format_command('diagnose', paths)}")


def _parse_duration(flag: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if found is None:
        raise ConfigError(f"{flag} {text}: write a time such as 90s, 30m or 2h")
    return float(found[1]) * _SECONDS_PER_UNIT[found[2]]
