"""`mismatchctl watch`."""

from __future__ import annotations

import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatchctl.cli.corrections import chosen_corrections
from mismatchctl.cli.flags import Cache, Columns, Corrections, Force, Html, Quiet, Threads, renamed
from mismatchctl.cli.output import page_files, page_of, say, visible, warn, write
from mismatchctl.cli.places import check_places, on_disk
from mismatchctl.errors import EXIT_CHECK_FAILED, ConfigError, DataError

if TYPE_CHECKING:
    from mismatchctl.watch import Snapshot

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Paths = Annotated[
    list[str],
    typer.Argument(help="Dumps as they grow: files, folders; they may come later.", show_default=False),
]
Rules = Annotated[
    list[str] | None, typer.Option("--rule", help="As in gate: METRIC:KEY=VALUE,...; exit 3 once it fails; repeat.")
]
Baseline = Annotated[Path | None, typer.Option(help="A Result that was accepted, for rules that compare.")]
Exec = Annotated[
    str | None,
    typer.Option("--exec", metavar="CMD", help="Run this when a rule fails, and go on; $MISMATCHCTL_FAILED says what."),
]
UntilIdle = Annotated[
    str | None, typer.Option(metavar="TIME", help="End when nothing new came for so long, as in 30m.")
]
Every = Annotated[str, typer.Option(metavar="TIME", help="How often to look.")]


def watch(
    paths: Paths,
    correction: Corrections = None,
    rule: Rules = None,
    baseline: Baseline = None,
    exec_: Exec = None,
    until_idle: UntilIdle = None,
    every: Every = "10s",
    column: Columns = None,
    threads: Threads = None,
    cache: Cache = None,
    quiet: Quiet = False,
    html: Html = None,
    force: Force = False,
) -> None:
    """Look at dumps while a run writes them: a line per step as it arrives, the answer when it changes.

    Only whole files are read. Ends by Ctrl-C, with --until-idle, or when a --rule fails.
    """
    if exec_ is not None and not rule:
        raise ConfigError("--exec runs when a rule fails: give one with --rule")
    if exec_ is not None and "\0" in exec_:
        raise ConfigError("--exec: a command holds no null byte")
    check_places(html, force=force, inputs=[*paths, baseline])

    from mismatchctl.gate import read_against, rules_from_text
    from mismatchctl.watch import Watch

    rules = [one for text in rule or () for one in rules_from_text(text)]
    compares = next((one for one in rules if one.increase is not None or one.decrease is not None), None)
    if compares is not None and baseline is None:
        raise ConfigError(f"--rule {compares.text}: compares with a Result that was accepted: name it with --baseline")

    watched = Watch(
        paths,
        chosen_corrections(correction),
        rules,
        read_against(baseline),
        renamed(column),
        every=max(_seconds("--every", every), 0.1),
        until_idle=None if until_idle is None else _seconds("--until-idle", until_idle),
        cache=None if cache is None else on_disk(cache),
        threads=threads,
    )
    first, known = True, set[str]()
    for look in watched.looks():
        if look is None:
            say(f"waiting for whole files in {', '.join(paths)}", quiet)
            continue
        failed = _show(look, first, quiet)
        first = False
        write(page_files(partial(page_of, "analyze", look.result), html))
        fresh = [sentence for sentence in failed if sentence not in known]
        if failed and exec_ is None:
            raise typer.Exit(EXIT_CHECK_FAILED)
        if exec_ is not None and fresh:
            known.update(fresh)
            _run(exec_, fresh)
    warn([f"left out {place}: it never became whole" for place in watched.unfinished], quiet)
    if first:
        raise DataError(
            f"nothing to read came in {until_idle}", file=", ".join(paths), remedy="name what the run writes"
        )


def _show(look: Snapshot, first: bool, quiet: bool) -> list[str]:
    """Print what is new; gives what failed."""
    from mismatchctl.render.watching import answers, failures, head, lines

    failed = failures(look)
    warn(look.left_out, quiet)
    if not quiet:
        if first:
            typer.echo(head(len(look.result.runs) > 1))
        for line in (*lines(look), *answers(look)):
            typer.echo(line)
    for sentence in failed:
        say(f"failed: {sentence}")
    return failed


def _run(command: str, failed: list[str]) -> None:
    """The user's own command; what failed is in its environment alone, where no shell reads it."""
    told = {"MISMATCHCTL_FAILED": "\n".join(map(visible, failed))}
    done = subprocess.run(command, shell=True, env=os.environ | told, check=False)
    if done.returncode:
        say(f"warning: --exec ended with {done.returncode}: {command}")


def _seconds(flag: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if found is None:
        raise ConfigError(f"{flag} {text}: write a time such as 90s, 30m or 2h")
    return float(found[1]) * _UNITS[found[2]]
