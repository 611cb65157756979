"""`mismatchctl gate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatchctl.cli.corrections import RuleFlags, chosen_corrections
from mismatchctl.cli.flags import (
    OUTPUTS,
    Address,
    Cache,
    Columns,
    Corrections,
    EngineChoice,
    EngineName,
    Html,
    MemoryLimit,
    MicroBatch,
    Quiet,
    Threads,
    chosen_engine,
    renamed,
)
from mismatchctl.cli.output import check_places, console, outputs, print_json, progress_bar, say, write
from mismatchctl.errors import EXIT_CANNOT_JUDGE, EXIT_CHECK_FAILED, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from mismatchctl.gate import Need, Rule, Verdict


class OnUndecided(str, Enum):
    """What an undecided verdict does."""

    fail = "fail"
    warn = "warn"
    passes = "pass"


_AGAINST = "What to compare with"

Paths = Annotated[list[str], typer.Argument(help="A Result, or dumps: files, folders, globs.")]
Rules = Annotated[
    list[str] | None,
    typer.Option("--rule", help="METRIC:KEY=VALUE,... as in k3:max=0.01,increase=20%,per=step; or a file; repeat."),
]
Bitwise = Annotated[bool, typer.Option("--expect-bitwise", help="All log-probs must agree to the bit.")]
Undecided = Annotated[OnUndecided, typer.Option(help="What cannot be judged: exit 4, or 0 with a warning or without.")]
Level = Annotated[float, typer.Option(min=1e-4, max=0.5, help="Chance of any false failure that is allowed for.")]
MaxSkipped = Annotated[
    str, typer.Option(metavar="SHARE", help="More sequences or files left out as bad than this: undecided.")
]
Plan = Annotated[
    str | None, typer.Option(metavar="SHARE", help="Judge nothing: how many sequences find such a rise, as in 20%.")
]

Baseline = Annotated[Path | None, typer.Option(help="A Result that was accepted.", rich_help_panel=_AGAINST)]
History = Annotated[
    Path | None, typer.Option(help="A folder of accepted Results: judge the trend too.", rich_help_panel=_AGAINST)
]
Last = Annotated[int, typer.Option(min=1, help="How many of them.", rich_help_panel=_AGAINST)]
Nights = Annotated[
    int | None,
    typer.Option(
        min=1, help="Verdicts in a row that share the level; with --history, --last.", rich_help_panel=_AGAINST
    ),
]
FixedTokens = Annotated[
    bool,
    typer.Option(
        "--fixed-tokens", help="The baseline's own tokens, scored again, or undecided.", rich_help_panel=_AGAINST
    ),
]
SaveBaseline = Annotated[
    Path | None,
    typer.Option(
        help="Write what passed as a baseline; into a folder, with the next number.", rich_help_panel=_AGAINST
    ),
]
Accept = Annotated[bool, typer.Option("--accept", help="Save it whatever the verdict.", rich_help_panel=_AGAINST)]

ToJson = Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.", rich_help_panel=OUTPUTS)]
JUnit = Annotated[Path | None, typer.Option(help="Write JUnit XML.", rich_help_panel=OUTPUTS)]
Markdown = Annotated[Path | None, typer.Option(help="Write Markdown; - is stdout.", rich_help_panel=OUTPUTS)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite reports and baselines.", rich_help_panel=OUTPUTS)]


def gate(
    paths: Paths,
    rule: Rules = None,
    expect_bitwise: Bitwise = False,
    correction: Corrections = None,
    column: Columns = None,
    micro_batch_size: MicroBatch = None,
    on_undecided: Undecided = OnUndecided.fail,
    level: Level = 0.05,
    max_skipped: MaxSkipped = "1%",
    plan: Plan = None,
    quiet: Quiet = False,
    threads: Threads = None,
    memory_limit: MemoryLimit = None,
    engine: EngineChoice = EngineName.local,
    address: Address = None,
    cache: Cache = None,
    baseline: Baseline = None,
    history: History = None,
    last: Last = 10,
    nights: Nights = None,
    fixed_tokens: FixedTokens = False,
    save_baseline: SaveBaseline = None,
    accept: Accept = False,
    json: ToJson = False,
    junit: JUnit = None,
    markdown: Markdown = None,
    html: Html = None,
    force: Force = False,
) -> None:
    """Did the mismatch get worse? Exit code 0: no. 3: yes, beyond noise. 4: cannot be judged."""
    to_stdout = str(markdown) == "-"
    if json and to_stdout:
        raise ConfigError("--json and --markdown - both write to stdout: give one of them")
    if accept and save_baseline is None:
        raise ConfigError("--accept needs --save-baseline: it says that what is saved was looked at")
    if plan is not None and (save_baseline or junit or markdown or html):
        raise ConfigError("--plan judges nothing: leave --save-baseline, --junit, --markdown and --html out")
    into_folder = save_baseline is not None and save_baseline.is_dir()
    kept, shown = None if into_folder else save_baseline, (junit, None if to_stdout else markdown, html)
    before = None if baseline == kept else baseline  # a baseline may replace the one before it
    check_places(kept, *shown, force=force, inputs=[*paths, before], baseline=kept)

    from mismatchctl.gate import judge, open_result, read_against
    from mismatchctl.gate import plan as needs

    rules = _rules(rule or (), expect_bitwise)
    against = read_against(baseline, history, last, nights, fixed_tokens=fixed_tokens)
    corrections = chosen_corrections(correction, RuleFlags()) if correction else []
    regression = None if plan is None else _share("--plan", plan, 1000, "name a rise such as 20%")
    most = _share("--max-skipped", max_skipped, 1, "name a share from 0 to 1, such as 1%")
    where = chosen_engine(threads, memory_limit, engine, address, cache)
    with progress_bar(quiet) as progress:
        result = open_result(
            paths, rules, corrections, rename=renamed(column), progress=progress, engine=where,
            micro_batch_size=micro_batch_size,
        )  # fmt: skip
    if regression is not None:
        _show_plan(needs(result, rules, regression, against, level), quiet, json)
        return
    for warning in result.warnings:
        say(f"warning: {warning}", quiet)
    verdict = judge(result, rules, replace(against, accept=accept), level, most)
    with outputs(quiet):
        _write(verdict, junit, markdown, html)
        if save_baseline is not None:
            from mismatchctl.gate import as_baseline, write_baseline

            if verdict.outcome == "passed" or accept:
                write_baseline(as_baseline(result, verdict, rules, by_hand=accept), save_baseline)
            else:
                why = f"since the verdict is {verdict.outcome}; --accept saves it all the same"
                say(f"{save_baseline}: not written, {why}")
    _show(verdict, to_stdout, quiet=quiet, json=json)
    raise typer.Exit(EXIT_OK if accept else _exit_code(verdict, on_undecided, quiet))


def _rules(texts: Sequence[str], expect_bitwise: bool) -> list[Rule]:
    from mismatchctl.gate import BITWISE, DEFAULT_RULES, rules_from_text

    rules = [rule for text in texts for rule in rules_from_text(text)]
    return [*rules, *([BITWISE] if expect_bitwise else [])] or [*DEFAULT_RULES]


def _share(flag: str, text: str, most: float, remedy: str) -> float:
    from mismatchctl.texts import number

    try:
        share = number(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= most:
        raise ConfigError(f"{flag} {text}: {remedy}")
    return share


def _show_plan(needs: list[Need], quiet: bool, json: bool) -> None:
    if json:
        print_json([need.model_dump(mode="json") for need in needs])
    elif not quiet:
        from mismatchctl.render.pages.gate import plan_document
        from mismatchctl.render.to.terminal import show

        show(plan_document(needs), console())


def _write(verdict: Verdict, junit: Path | None, markdown: Path | None, html: Path | None) -> None:
    from mismatchctl.render.pages.gate import document
    from mismatchctl.render.to import junit as xml
    from mismatchctl.render.to.markdown import markdown as as_markdown

    files = [] if junit is None else [(junit, xml.junit(verdict))]
    if markdown is not None and str(markdown) != "-":
        files.append((markdown, as_markdown(document(verdict)).encode()))
    if html is not None:
        from mismatchctl.render.to import html as page

        files.append((html, page.html(document(verdict)).encode()))
    write(files)


def _show(verdict: Verdict, as_markdown: bool, *, quiet: bool, json: bool) -> None:
    """Print the verdict; what GitHub reads is written where GitHub says that it reads."""
    from mismatchctl.render.pages.gate import document
    from mismatchctl.render.to.github import workflow_commands
    from mismatchctl.render.to.markdown import markdown
    from mismatchctl.render.to.terminal import show

    page = document(verdict)
    text = markdown(page)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        _append(Path(summary), text)
    if as_markdown:
        typer.echo(text, nl=False)
    elif json:
        print_json(verdict.model_dump(mode="json"))
    elif not quiet:
        show(page, console())
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in workflow_commands(verdict):
            typer.echo(line, err=json or as_markdown)


def _append(place: Path, text: str) -> None:
    try:
        with place.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        say(f"warning: the summary cannot be written to {place}: {error.strerror or error}")


def _exit_code(verdict: Verdict, on_undecided: OnUndecided, quiet: bool) -> int:
    if verdict.outcome == "undecided" and on_undecided is not OnUndecided.fail:
        if on_undecided is OnUndecided.warn:
            say("warning: undecided, let through by --on-undecided warn", quiet)
        return EXIT_OK
    return {"passed": EXIT_OK, "failed": EXIT_CHECK_FAILED, "undecided": EXIT_CANNOT_JUDGE}[verdict.outcome]
