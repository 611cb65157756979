"""`mismatchctl gate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.errors import EXIT_CANNOT_JUDGE, EXIT_CHECK_FAILED, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from mismatchctl.api.gate.verdict import Verdict


def gate(
    *,
    inputs: opt.InputOptions,
    rule: list[str] | None = None,
    expect_bitwise: bool = False,
    correction: list[str] | None = None,
    micro_batch_size: int | None = None,
    on_undecided: Literal["fail", "warn", "pass"] = "fail",
    level: str = "0.05",
    max_skipped: str = "1%",
    max_missing: str = "5%",
    allow_different_model: bool = False,
    plan: str | None = None,
    engine: opt.EngineOptions,
    baseline: Path | None = None,
    fixed_tokens: bool = False,
    save_baseline: Path | None = None,
    accept: bool = False,
    junit: Path | None = None,
    outputs: opt.OutputOptions,
) -> None:
    """Fail CI if the mismatch grew (exit 3) or cannot be judged (exit 4).

    DUMPS may also be a result file of analyze, or a metrics log of W&B or TensorBoard.
    """
    quiet = outputs.quiet
    if accept and save_baseline is None:
        raise ConfigError("--accept only works with --save-baseline")
    if plan is not None and (save_baseline or junit or outputs.markdown or outputs.html):
        raise ConfigError("--plan computes no verdict; leave out --save-baseline, --junit, --markdown and --html")
    into_folder = save_baseline is not None and save_baseline.is_dir()
    kept = None if into_folder else save_baseline
    before = None if baseline == kept else baseline  # if the paths are equal, the old baseline is replaced
    outputs.check(kept, junit, inputs=[*inputs.files, before], baseline=kept)
    error_level = opt.parse_share("--level", level, 0.5, "write a probability above 0 and at most 0.5, such as 5%")
    given = {"--baseline": baseline, "--save-baseline": save_baseline, "--plan": plan,
             "--correction": correction, "--expect-bitwise": expect_bitwise}  # fmt: skip
    if inputs.are_logs(given):
        from mismatchctl.api.gate.gate import judge_logs
        from mismatchctl.api.gate.rules import parse_rules

        wanted = [one for text in rule or () for one in parse_rules(text, any_name=True)]
        verdict = judge_logs(inputs.names, wanted, error_level)
        with out.write_together(quiet):
            _write_verdict(verdict, outputs, junit)
        _print_verdict(verdict, inputs.names, outputs)
        raise typer.Exit(_exit_code(verdict, on_undecided, quiet))

    from mismatchctl.api.gate.coverage import Tolerances
    from mismatchctl.api.gate.gate import judge, load_result, no_baseline, plan_sample_sizes, read_baseline
    from mismatchctl.api.gate.rules import BITWISE_RULE, DEFAULT_RULES, parse_rules

    given_rules = [one for text in rule or () for one in parse_rules(text)] + [BITWISE_RULE] * expect_bitwise
    rules = given_rules or DEFAULT_RULES
    against = read_baseline(baseline, fixed_tokens=fixed_tokens)
    corrections = opt.select_corrections(correction)
    regression = None if plan is None else opt.parse_share("--plan", plan, 1000, "write a rise, such as 20%")
    if regression == 0:
        raise ConfigError(f"--plan {plan}: write a rise above 0, such as 20%")
    limits = Tolerances(
        opt.parse_share("--max-skipped", max_skipped, 1, "write a share from 0 to 1, such as 1%"),
        opt.parse_share("--max-missing", max_missing, 1, "write a share from 0 to 1, such as 5%"),
        allow_different_model,
    )
    where, sources = engine.build(), inputs.sources(quiet)
    with out.progress_bar(quiet) as progress:
        result = load_result(
            sources, rules, corrections, rename=inputs.rename, progress=progress, engine=where,
            micro_batch_size=micro_batch_size,
        )  # fmt: skip
    if regression is not None:
        from mismatchctl.report.pages.gate import plan_document

        found = plan_sample_sizes(result, rules, regression, against, error_level)
        data = [need.model_dump(mode="json") for need in found]
        out.print_json_or_page(data, lambda: plan_document(found, inputs.words), as_json=outputs.json, quiet=quiet)
        return
    out.print_warnings(result.warnings, quiet or outputs.has_screen)
    verdict = judge(result, rules, replace(against, accept=accept), error_level, limits)
    with out.write_together(quiet):
        _write_verdict(verdict, outputs, junit)
        if save_baseline is not None:
            from mismatchctl.api.gate.gate import make_baseline, write_baseline

            first = any(check.reason == no_baseline() for check in verdict.checks)
            remedy = "" if first and outputs.has_screen else ". Add --accept to save the baseline regardless"
            if verdict.outcome == "passed" or accept:
                write_baseline(make_baseline(result, verdict, rules, by_hand=accept), save_baseline)
            else:
                out.print_message(f"{save_baseline}: not written, because the verdict is {verdict.outcome}{remedy}")
    _print_verdict(verdict, inputs.words, outputs, str(save_baseline) if accept else "", result.warnings)
    raise typer.Exit(EXIT_OK if accept else _exit_code(verdict, on_undecided, quiet))


def _write_verdict(verdict: Verdict, outputs: opt.OutputOptions, junit: Path | None) -> None:
    from mismatchctl.report.markdown import junit_xml
    from mismatchctl.report.pages.gate import document

    outputs.write(verdict.to_json, lambda: document(verdict))
    if junit is not None:
        out.write_files([(junit, junit_xml(verdict))])


def _print_verdict(
    verdict: Verdict, paths: Sequence[str], outputs: opt.OutputOptions, saved: str = "", warnings: Sequence[str] = ()
) -> None:
    from mismatchctl.report.markdown import render_markdown, workflow_commands
    from mismatchctl.report.pages.gate import document, gate_screen

    page = document(verdict)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(render_markdown(page) + "\n")
        except OSError as error:
            out.print_message(f"warning: the summary cannot be written to {summary}: {error.strerror or error}")
    shown = page if outputs.verbose else None
    outputs.show(
        verdict.to_json, lambda: page, lambda: gate_screen(verdict, paths, page=shown, saved=saved, warnings=warnings)
    )
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in workflow_commands(verdict):
            typer.echo(line, err=bool(outputs.printed))


def _exit_code(verdict: Verdict, on_undecided: str, quiet: bool) -> int:
    if verdict.outcome == "undecided" and on_undecided != "fail":
        if on_undecided == "warn":
            out.print_message("warning: the verdict is undecided, but --on-undecided warn sets exit code 0", quiet)
        return EXIT_OK
    return {"passed": EXIT_OK, "failed": EXIT_CHECK_FAILED, "undecided": EXIT_CANNOT_JUDGE}[verdict.outcome]
