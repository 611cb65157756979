"""`mismatchctl gate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.errors import EXIT_CANNOT_JUDGE, EXIT_CHECK_FAILED, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from mismatchctl.api.gate.rules import Rule
    from mismatchctl.api.gate.verdict import Verdict


UndecidedPolicy = Literal["fail", "warn", "pass"]
baseline_option = partial(typer.Option, rich_help_panel="Baselines")

PathsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="DUMPS...", help="Dumps (files, folders or globs), or a Result.")
]
RuleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rule", help="Require a rule, as in k3:max=0.01,increase=20%,per=step, or the rules of a file (repeatable)."
    ),
]
BitwiseOption = Annotated[bool, typer.Option("--expect-bitwise", help="Require that all log-probs are identical.")]
UndecidedOption = Annotated[
    UndecidedPolicy, typer.Option(help="If a rule cannot be judged: exit 4 (fail), exit 0 with a warning, or exit 0.")
]
LevelOption = Annotated[
    float,
    typer.Option(
        min=1e-4, max=0.5, help="Probability that the gate fails without a real change, for all rules together."
    ),
]
MaxSkippedOption = Annotated[
    str,
    typer.Option(
        metavar="SHARE",
        help="Undecided if a larger share of sequences, tokens or files is skipped as bad, or repeated.",
    ),
]
MaxMissingOption = Annotated[
    str,
    baseline_option(
        metavar="SHARE", help="Undecided if a larger share of the baseline's steps, prompts or responses is missing."
    ),
]
DifferentModelOption = Annotated[
    bool,
    baseline_option(
        "--allow-different-model", help="Judge the dump even if its model or engine is not the baseline's."
    ),
]
PlanOption = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Print the number of sequences needed to detect a rise by this share, as in 20%, and stop.",
    ),
]

BaselineOption = Annotated[Path | None, baseline_option(help="Compare with this accepted Result.")]
HistoryOption = Annotated[Path | None, baseline_option(help="Judge the trend over this folder of accepted Results.")]
LastOption = Annotated[int, baseline_option(min=1, help="Use the last N Results of --history.")]
FixedTokensOption = Annotated[
    bool, baseline_option("--fixed-tokens", help="Require that the dump has the baseline's tokens, scored again.")
]
SaveBaselineOption = Annotated[
    Path | None,
    baseline_option(help="If the dump passes, save its Result to FILE, or to a folder under the next number."),
]
AcceptOption = Annotated[bool, baseline_option("--accept", help="Save the baseline regardless of the verdict.")]

JsonOption = Annotated[bool, opt.output_option("--json", help="Print the verdict as JSON.")]
JUnitOption = Annotated[Path | None, opt.output_option(help="Write the verdict as JUnit XML.")]
MarkdownOption = Annotated[
    Path | None, opt.output_option(help="Write the verdict as Markdown to FILE, or to stdout with -.")
]
ForceOption = Annotated[bool, opt.output_option("--force", help="Overwrite reports and baselines.")]


@opt.flatten_options
def gate(
    *,
    paths: PathsArgument = None,
    pair: opt.PairOptions,
    rule: RuleOption = None,
    expect_bitwise: BitwiseOption = False,
    correction: opt.CorrectionOption = None,
    column: opt.ColumnOption = None,
    micro_batch_size: opt.MicroBatchOption = None,
    on_undecided: UndecidedOption = "fail",
    level: LevelOption = 0.05,
    max_skipped: MaxSkippedOption = "1%",
    max_missing: MaxMissingOption = "5%",
    allow_different_model: DifferentModelOption = False,
    plan: PlanOption = None,
    verbose: opt.VerboseOption = False,
    quiet: opt.QuietOption = False,
    engine: opt.EngineOptions,
    baseline: BaselineOption = None,
    history: HistoryOption = None,
    last: LastOption = 10,
    fixed_tokens: FixedTokensOption = False,
    save_baseline: SaveBaselineOption = None,
    accept: AcceptOption = False,
    json: JsonOption = False,
    junit: JUnitOption = None,
    markdown: MarkdownOption = None,
    html: opt.HtmlOption = None,
    force: ForceOption = False,
) -> None:
    """Fail CI if the mismatch got worse (exit 3) or is unclear (exit 4)."""
    markdown, printed = out.resolve_text_output(markdown, json)
    if accept and save_baseline is None:
        raise ConfigError("--accept only works with --save-baseline")
    if plan is not None and (save_baseline or junit or markdown or printed or html):
        raise ConfigError("--plan does not judge; leave out --save-baseline, --junit, --markdown and --html")
    paths, sides = paths or [], pair.sides()
    into_folder = save_baseline is not None and save_baseline.is_dir()
    kept, shown = None if into_folder else save_baseline, (junit, markdown, html)
    before = None if baseline == kept else baseline  # a new baseline may replace the old one
    out.check_output_paths(kept, *shown, force=force, inputs=[*paths, *(sides or ()), before], baseline=kept)
    if sides is None and opt.are_logs(paths):
        given = {"--baseline": baseline, "--history": history, "--save-baseline": save_baseline, "--plan": plan,
                 "--correction": correction, "--expect-bitwise": expect_bitwise}  # fmt: skip
        if needless := [name for name, value in given.items() if value]:
            raise ConfigError(f"{paths[0]}: is a metrics log without tokens; leave out {', '.join(needless)}")
        from mismatchctl.api.gate.gate import judge_logs
        from mismatchctl.api.gate.rules import parse_rules

        verdict = judge_logs(paths, [one for text in rule or () for one in parse_rules(text, any_name=True)], level)
        with out.write_together(quiet):
            _write_reports(verdict, junit, markdown, html)
        _print_verdict(verdict, paths, printed, quiet=quiet, json=json, verbose=verbose)
        raise typer.Exit(_exit_code(verdict, on_undecided, quiet))

    from mismatchctl.api.gate.coverage import Tolerances
    from mismatchctl.api.gate.gate import load_result, plan_sample_sizes, read_baselines
    from mismatchctl.api.gate.judgement import judge, no_baseline

    rules = _parse_rules(rule or (), expect_bitwise)
    against = read_baselines(baseline, history, last, fixed_tokens=fixed_tokens)
    corrections = opt.select_corrections(correction)
    regression = None if plan is None else opt.parse_share("--plan", plan, 1000, "name a rise such as 20%")
    limits = Tolerances(
        opt.parse_share("--max-skipped", max_skipped, 1, "name a share from 0 to 1, such as 1%"),
        opt.parse_share("--max-missing", max_missing, 1, "name a share from 0 to 1, such as 5%"),
        allow_different_model,
    )
    where, sources = engine.build(), pair.sources(paths, quiet)
    with out.progress_bar(quiet) as progress:
        result = load_result(
            sources, rules, corrections, rename=opt.parse_renames(column), progress=progress, engine=where,
            micro_batch_size=micro_batch_size,
        )  # fmt: skip
    if regression is not None:
        from mismatchctl.report.pages.gate import plan_document

        found = plan_sample_sizes(result, rules, regression, against, level)
        data = [need.model_dump(mode="json") for need in found]
        out.print_json_or_page(data, lambda: plan_document(found), as_json=json, quiet=quiet)
        return
    out.print_warnings(result.warnings, quiet)
    verdict = judge(result, rules, replace(against, accept=accept), level, limits)
    with out.write_together(quiet):
        _write_reports(verdict, junit, markdown, html)
        if save_baseline is not None:
            from mismatchctl.api.gate.gate import make_baseline, write_baseline

            on_screen = not (quiet or json or printed) and any(
                check.reason == no_baseline() for check in verdict.checks
            )
            remedy = "" if on_screen else ". Add --accept to save it regardless"
            if verdict.outcome == "passed" or accept:
                write_baseline(make_baseline(result, verdict, rules, by_hand=accept), save_baseline)
            else:
                out.print_message(f"{save_baseline}: not written, because the verdict is {verdict.outcome}{remedy}")
    _print_verdict(
        verdict,
        pair.words(paths),
        printed,
        quiet=quiet,
        json=json,
        verbose=verbose,
        saved=str(save_baseline) if accept else "",
    )
    raise typer.Exit(EXIT_OK if accept else _exit_code(verdict, on_undecided, quiet))


def _parse_rules(texts: Sequence[str], expect_bitwise: bool) -> Sequence[Rule]:
    from mismatchctl.api.gate.rules import BITWISE_RULE, DEFAULT_RULES, parse_rules

    rules = [rule for text in texts for rule in parse_rules(text)]
    return [*rules, *([BITWISE_RULE] if expect_bitwise else [])] or DEFAULT_RULES


def _write_reports(verdict: Verdict, junit: Path | None, markdown: Path | None, html: Path | None) -> None:
    from mismatchctl.report.markdown import junit_xml
    from mismatchctl.report.pages.gate import document

    if junit is not None:
        out.write_files([(junit, junit_xml(verdict))])
    out.write_files(out.render_page_files(lambda: document(verdict), html, markdown))


def _print_verdict(
    verdict: Verdict, paths: Sequence[str], as_markdown: bool, *, quiet: bool, json: bool, verbose: bool,
    saved: str = "",
) -> None:  # fmt: skip
    """Print the verdict, and write the summary and annotations of GitHub Actions."""
    from mismatchctl.report.markdown import render_markdown, workflow_commands
    from mismatchctl.report.pages.gate import document, gate_screen

    page = document(verdict)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        _append_text(Path(summary), render_markdown(page))
    if as_markdown:
        out.print_markdown(page)
    elif json:
        out.print_json(verdict.model_dump(mode="json"))
    elif not quiet:
        out.print_page(gate_screen(verdict, paths, page=page if verbose else None, saved=saved), whole=verbose)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in workflow_commands(verdict):
            typer.echo(line, err=json or as_markdown)


def _append_text(place: Path, text: str) -> None:
    try:
        with place.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        out.print_message(f"warning: the summary cannot be written to {place}: {error.strerror or error}")


def _exit_code(verdict: Verdict, on_undecided: UndecidedPolicy, quiet: bool) -> int:
    if verdict.outcome == "undecided" and on_undecided != "fail":
        if on_undecided == "warn":
            out.print_message("warning: undecided, let through by --on-undecided warn", quiet)
        return EXIT_OK
    return {"passed": EXIT_OK, "failed": EXIT_CHECK_FAILED, "undecided": EXIT_CANNOT_JUDGE}[verdict.outcome]
