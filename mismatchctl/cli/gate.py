"""`mismatchctl gate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mismatchctl.cli import flags
from mismatchctl.cli.corrections import chosen_corrections
from mismatchctl.cli.flags import flat, output_option
from mismatchctl.cli.output import (
    outputs,
    page_files,
    print_json,
    print_markdown,
    print_or_show,
    progress_bar,
    say,
    show,
    warn,
    write,
)
from mismatchctl.cli.places import check_places, or_printed
from mismatchctl.errors import EXIT_CANNOT_JUDGE, EXIT_CHECK_FAILED, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from mismatchctl.gate import Rule, Verdict


OnUndecided = Literal["fail", "warn", "pass"]
against_option = partial(typer.Option, rich_help_panel="What to compare with")

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

Baseline = Annotated[Path | None, against_option(help="A Result that was accepted.")]
History = Annotated[Path | None, against_option(help="A folder of accepted Results: judge the trend too.")]
Last = Annotated[int, against_option(min=1, help="How many of them.")]
Nights = Annotated[
    int | None, against_option(min=1, help="Verdicts in a row that share the level; with --history, --last.")
]
FixedTokens = Annotated[
    bool, against_option("--fixed-tokens", help="The baseline's own tokens, scored again, or undecided.")
]
SaveBaseline = Annotated[
    Path | None, against_option(help="Write what passed as a baseline; into a folder, with the next number.")
]
Accept = Annotated[bool, against_option("--accept", help="Save it whatever the verdict.")]

ToJson = Annotated[bool, output_option("--json", help="Print the verdict as JSON.")]
JUnit = Annotated[Path | None, output_option(help="Write JUnit XML.")]
Markdown = Annotated[Path | None, output_option(help="Write Markdown; - is stdout.")]
Force = Annotated[bool, output_option("--force", help="Overwrite reports and baselines.")]


@flat
def gate(
    *,
    paths: Paths,
    rule: Rules = None,
    expect_bitwise: Bitwise = False,
    correction: flags.Corrections = None,
    column: flags.Columns = None,
    micro_batch_size: flags.MicroBatch = None,
    on_undecided: Undecided = "fail",
    level: Level = 0.05,
    max_skipped: MaxSkipped = "1%",
    plan: Plan = None,
    quiet: flags.Quiet = False,
    engine: flags.EngineFlags,
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
    html: flags.Html = None,
    force: Force = False,
) -> None:
    """Did the mismatch get worse? Exit code 0: no. 3: yes, beyond noise. 4: cannot be judged."""
    markdown, printed = or_printed(markdown, json)
    if accept and save_baseline is None:
        raise ConfigError("--accept needs --save-baseline: it says that what is saved was looked at")
    if plan is not None and (save_baseline or junit or markdown or printed or html):
        raise ConfigError("--plan judges nothing: leave --save-baseline, --junit, --markdown and --html out")
    into_folder = save_baseline is not None and save_baseline.is_dir()
    kept, shown = None if into_folder else save_baseline, (junit, markdown, html)
    before = None if baseline == kept else baseline  # a baseline may replace the one before it
    check_places(kept, *shown, force=force, inputs=[*paths, before], baseline=kept)

    from mismatchctl.gate import judge, open_result, read_against
    from mismatchctl.gate import plan as needs

    rules = _rules(rule or (), expect_bitwise)
    against = read_against(baseline, history, last, nights, fixed_tokens=fixed_tokens)
    corrections = chosen_corrections(correction)
    regression = None if plan is None else flags.share("--plan", plan, 1000, "name a rise such as 20%")
    most = flags.share("--max-skipped", max_skipped, 1, "name a share from 0 to 1, such as 1%")
    where = engine.chosen()
    with progress_bar(quiet) as progress:
        result = open_result(
            paths, rules, corrections, rename=flags.renamed(column), progress=progress, engine=where,
            micro_batch_size=micro_batch_size,
        )  # fmt: skip
    if regression is not None:
        from mismatchctl.render.pages.gate import plan_document

        found = needs(result, rules, regression, against, level)
        data = [need.model_dump(mode="json") for need in found]
        print_or_show(data, lambda: plan_document(found), as_json=json, quiet=quiet)
        return
    warn(result.warnings, quiet)
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
    _show(verdict, printed, quiet=quiet, json=json)
    raise typer.Exit(EXIT_OK if accept else _exit_code(verdict, on_undecided, quiet))


def _rules(texts: Sequence[str], expect_bitwise: bool) -> Sequence[Rule]:
    from mismatchctl.api.defaults import rules_or_default
    from mismatchctl.gate import BITWISE, rules_from_text

    rules = [rule for text in texts for rule in rules_from_text(text)]
    return rules_or_default([*rules, *([BITWISE] if expect_bitwise else [])])


def _write(verdict: Verdict, junit: Path | None, markdown: Path | None, html: Path | None) -> None:
    from mismatchctl.render.pages.gate import document
    from mismatchctl.render.to.ci import junit as as_xml

    if junit is not None:
        write([(junit, as_xml(verdict))])
    write(page_files(lambda: document(verdict), html, markdown))


def _show(verdict: Verdict, as_markdown: bool, *, quiet: bool, json: bool) -> None:
    """Print the verdict; what GitHub reads is written where GitHub says that it reads."""
    from mismatchctl.render.pages.gate import document
    from mismatchctl.render.to.ci import workflow_commands
    from mismatchctl.render.to.markdown import markdown

    page = document(verdict)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        _append(Path(summary), markdown(page))
    if as_markdown:
        print_markdown(page)
    elif json:
        print_json(verdict.model_dump(mode="json"))
    elif not quiet:
        show(page)
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
    if verdict.outcome == "undecided" and on_undecided != "fail":
        if on_undecided == "warn":
            say("warning: undecided, let through by --on-undecided warn", quiet)
        return EXIT_OK
    return {"passed": EXIT_OK, "failed": EXIT_CHECK_FAILED, "undecided": EXIT_CANNOT_JUDGE}[verdict.outcome]
