"""`mismatchctl analyze` and `watch`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.errors import EXIT_CHECK_FAILED, ConfigError, DataError

if TYPE_CHECKING:
    from mismatchctl.frameworks.adapter import Framework


def analyze(
    *,
    inputs: opt.InputOptions,
    correction: list[str] | None = None,
    config: list[str] | None = None,
    framework: str = "",
    micro_batch_size: int | None = None,
    against: Path | None = None,
    loss: list[str] | None = None,
    baseline: Path | None = None,
    by: list[str] | None = None,
    on_bad: opt.BadDataPolicy = "error",
    engine: opt.EngineOptions,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    sequences: Path | None = None,
    tokens: Path | None = None,
    browse: list[str] | None = None,
    tokenizer: str | None = None,
    outputs: opt.OutputOptions,
) -> None:
    """Measure the mismatch and compare corrections.

    DUMPS may also be metrics logs of W&B or TensorBoard. A log contains no tokens, so only its metrics are analyzed.
    """
    if tokens is None and (browse or tokenizer):
        raise ConfigError("--browse and --tokenizer need --tokens FILE")
    quiet = outputs.quiet
    outputs.check(sequences, tokens, inputs=[*inputs.files, *(config or []), against, baseline])
    given = {
        "--correction": correction, "--config": config, "--framework": framework, "--against": against,
        "--baseline": baseline, "--sequences": sequences, "--tokens": tokens, "--by": by,
    }  # fmt: skip
    if inputs.are_logs(given):
        from mismatchctl.api.metrics_log import analyze_logs
        from mismatchctl.report.pages.metrics_log import document as log_document

        logs = analyze_logs(inputs.names)
        outputs.finish(logs.to_json, lambda: log_document(logs), lambda: log_document(logs, whole=outputs.verbose))
        return
    chosen = opt.select_corrections(correction, config, framework, quiet=quiet)
    sources, where = inputs.sources(quiet), engine.build()

    from mismatchctl.api.analyze.analyze import analyze as run
    from mismatchctl.api.analyze.run_log import read_run_log
    from mismatchctl.api.scan import NO_MICRO_BATCHES
    from mismatchctl.frameworks.registry import default_corrections, load_presets
    from mismatchctl.report.pages.analyze import analyze_screen, document
    from mismatchctl.results.reader import read_result
    from mismatchctl.results.summary import data_notes

    log = None if against is None else read_run_log(against)
    accepted = None if baseline is None else (str(baseline), read_result(baseline))
    with out.write_together(quiet):
        with out.progress_bar(quiet) as progress:
            result = run(
                sources, chosen or default_corrections(), rename=inputs.rename, by=by or [], on_bad=on_bad,
                engine=where, progress=progress, sequences=sequences,
                framework=_replayed_framework(framework, config or []) if framework else None,
                micro_batch_size=micro_batch_size, log=log, device=device,
                losses=loss or [], baseline=accepted,
                presets=[preset.correction for preset in load_presets().values()] if outputs.html else (),
            )  # fmt: skip
        outputs.write(result.to_json, lambda: document(result))
        if tokens is not None:
            from mismatchctl.api.browse import browse as browse_tokens
            from mismatchctl.api.browse import parse_places
            from mismatchctl.report.pages.tokens import render_tokens

            places = parse_places(browse or [], result)
            shown = browse_tokens(
                sources, places, result.corrections, rename=inputs.rename, vocabulary=tokenizer, on_bad=on_bad
            )
            out.write_files([(tokens, render_tokens(shown).encode())])
    page = document(result) if outputs.verbose else None
    outputs.show(
        result.to_json,
        lambda: document(result),
        lambda: analyze_screen(result, inputs.words, asked=bool(chosen), page=page),
        lambda: [note for note in data_notes(result) if chosen or NO_MICRO_BATCHES not in note],
    )


def _replayed_framework(name: str, configs: Sequence[str]) -> Framework:
    """Return the framework of `configs` if they all have the same framework and version, or else `name`."""
    from mismatchctl.frameworks.config_files import read_native_configs
    from mismatchctl.frameworks.registry import load_framework

    found = [written.framework for path in configs for written in read_native_configs(path, name)]
    return found[0] if len({source.title for source in found}) == 1 else load_framework(name)


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

    Files that are still being written are not read. The command ends when you press Ctrl-C, when no new data arrives
    for the time in --until-idle, or when a --rule fails.
    """
    out.check_output_paths(html, force=force, inputs=[*paths, baseline])

    from mismatchctl.api.gate.gate import read_baseline
    from mismatchctl.api.gate.rules import parse_rules
    from mismatchctl.api.watch import DumpWatcher
    from mismatchctl.core.formatting import format_command
    from mismatchctl.frameworks.registry import load_framework
    from mismatchctl.report.pages.analyze import document
    from mismatchctl.report.pages.watch import format_answers, format_failures, format_header, format_new_steps

    rules = [one for text in rule or () for one in parse_rules(text)]
    named = dict.fromkeys(one.framework for one in rules if one.framework)
    out.print_warnings((text for name in named for text in load_framework(name).warnings), quiet)
    compares = next((one for one in rules if one.increase is not None or one.decrease is not None), None)
    if compares is not None and baseline is None:
        raise ConfigError(f"--rule {compares.text}: this rule compares with a baseline; add --baseline FILE")

    watched = DumpWatcher(
        paths,
        opt.select_corrections(correction),
        rules,
        read_baseline(baseline),
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
