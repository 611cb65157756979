"""`mismatchctl diagnose`, `advise`, `compare` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.core.formatting import format_command, format_count

if TYPE_CHECKING:
    from mismatchctl.report.document import Document


def diagnose(
    *,
    inputs: opt.InputOptions,
    by: list[str] | None = None,
    layers: list[str] | None = None,
    engine: opt.EngineOptions,
    outputs: opt.OutputOptions,
) -> None:
    """Find the causes of the mismatch, with evidence and what to do."""
    outputs.check(inputs=inputs.files)
    sources = inputs.sources(outputs.quiet)

    from mismatchctl.api.diagnose import diagnose as run
    from mismatchctl.diagnosis.layer_reports import read_layers
    from mismatchctl.report.pages.diagnose import diagnose_screen, document
    from mismatchctl.results.views import json_text

    reports = [report for path in layers or [] for report in read_layers(path)]
    with out.progress_bar(outputs.quiet) as progress:
        found = run(sources, rename=inputs.rename, by=by or [], progress=progress, engine=engine.build())
    left_out = found.problems.counts.items()
    notes = [f"left out of {file}: {format_count(count, 'sequence')}, {reason}" for (file, reason), count in left_out]
    warnings, whole = [*found.warnings, *notes], outputs.verbose
    shown = document(found, reports, full=whole) if whole or reports else None
    outputs.finish(
        lambda: json_text(found.to_data(reports)),
        lambda: document(found, reports),
        lambda: diagnose_screen(found, inputs.words, shown, warnings),
        lambda: warnings,
    )


def advise(
    *,
    inputs: opt.InputOptions,
    framework: str = "",
    correction: list[str] | None = None,
    config: list[str] | None = None,
    batch: int | None = None,
    max_rejection: str = "100%",
    min_ess: str = "0%",
    no_rejection: bool = False,
    outputs: opt.OutputOptions,
) -> None:
    """Recommend a correction and its threshold, or name a bug to fix first."""
    outputs.check(inputs=inputs.files)
    sources, quiet = inputs.sources(outputs.quiet), outputs.quiet

    from mismatchctl.api.advise.advise import advise as run
    from mismatchctl.api.advise.candidates import Limits
    from mismatchctl.report.pages.advise import advise_screen, document

    most = opt.parse_share("--max-rejection", max_rejection, 1, "write a share, as in 5% or 0.05")
    least = opt.parse_share("--min-ess", min_ess, 1, "write a share, as in 90% or 0.9")
    chosen = opt.select_corrections(correction, quiet=quiet)
    yours = opt.select_corrections(None, config, framework=framework if config and framework else "", quiet=quiet)
    with out.progress_bar(quiet) as progress:
        found = run(
            sources, framework=framework, corrections=chosen, yours=yours, batch=batch,
            limits=Limits(most, least, no_rejection), rename=inputs.rename, progress=progress,
        )  # fmt: skip
    outputs.finish(
        found.to_json, lambda: document(found), lambda: advise_screen(found, inputs.words, full=outputs.verbose)
    )


def compare(
    *,
    paths: list[str],
    correction: list[str] | None = None,
    by: list[str] | None = None,
    column: list[str] | None = None,
    on_bad: opt.BadDataPolicy = "error",
    micro_batch_size: int | None = None,
    engine: opt.EngineOptions,
    outputs: opt.OutputOptions,
) -> None:
    """Compare each run with the first run.

    The exit code is 0 even if a run is worse. Use `gate` to fail CI.
    """
    outputs.check(inputs=paths)
    corrections = opt.select_corrections(correction, quiet=outputs.quiet)

    from mismatchctl.api.compare.compare import compare as run
    from mismatchctl.report.pages.compare import compare_screen, document

    with out.progress_bar(outputs.quiet) as progress:
        found = run(
            paths, corrections=corrections, rename=opt.parse_renames(column), by=by or [], on_bad=on_bad,
            micro_batch_size=micro_batch_size, engine=engine.build(), progress=progress,
        )  # fmt: skip
    shown = document(found) if outputs.verbose else None
    outputs.finish(found.to_json, lambda: document(found), lambda: compare_screen(found, shown), lambda: found.warnings)


def report(*, results: list[Path], outputs: opt.OutputOptions) -> None:
    """Show saved results again in the terminal, as HTML or as Markdown.

    The dumps are not needed. Several results of analyze share one page, and -o merges them into one file. With results
    of analyze and sweep, the chart of corrections also shows the best thresholds of the sweep (Pareto front).
    """
    outputs.check(inputs=results)
    import numpy as np

    from mismatchctl.report.pages.analyze import analyze_screen
    from mismatchctl.report.pages.saved import read_saved
    from mismatchctl.results.model import Result

    def screen() -> Document:
        if outputs.verbose or not isinstance(kept, Result):
            return doc
        following = format_command("report", [str(path) for path in results], "--html report.html")
        return analyze_screen(kept, [], asked=False, following=following)

    with np.errstate(all="ignore"):  # numbers in a result file that was edited by hand can overflow
        kept, doc = read_saved(results)
        outputs.finish(kept.to_json, lambda: doc, screen)
