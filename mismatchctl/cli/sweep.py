"""`mismatchctl sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from mismatchctl.api.sweep.study import Study
    from mismatchctl.api.sweep.sweep import TargetValue
    from mismatchctl.report.document import Document


def sweep(
    *,
    inputs: opt.InputOptions,
    correction: list[str] | None = None,
    config: list[str] | None = None,
    vary: list[str] | None = None,
    geo: str | None = None,
    by: list[str] | None = None,
    on_bad: opt.BadDataPolicy = "error",
    micro_batch_size: int | None = None,
    engine: opt.EngineOptions,
    outputs: opt.OutputOptions,
    target_rejection: list[str] | None = None,
    target_ess: list[str] | None = None,
    batch: int | None = None,
    at_length: list[int] | None = None,
    at_step: float | None = None,
) -> None:
    """Show the rejected data, ESS and bias for a range of thresholds.

    By default, sweep varies the thresholds of four corrections: one truncates token weights, one rejects sequences by
    the product of their ratios, one rejects sequences by the geometric mean of their ratios, and one rejects sequences
    with a very small token ratio (veto). -o writes a table if FILE ends in .parquet or .csv.
    """
    quiet = outputs.quiet
    outputs.check(inputs=[*inputs.files, *(config or [])])
    wishes = _parse_targets(target_rejection or [], target_ess or [])

    from mismatchctl.api.sweep.result import ForecastRequest, check_suffix, write_sweep
    from mismatchctl.api.sweep.study import DEFAULT_STUDIES, parse_studies
    from mismatchctl.api.sweep.sweep import price_targets
    from mismatchctl.api.sweep.sweep import sweep as run
    from mismatchctl.report.pages.sweep import document, sweep_screen, target_screen
    from mismatchctl.results.summary import skipped_data_notes

    if outputs.output is not None and str(outputs.output) != "-":
        check_suffix(outputs.output)
    named = opt.select_corrections(correction, config, quiet=quiet) if correction or config else []
    chosen = parse_studies(named, [_split_axis(text) for text in vary or ()])
    chosen += [] if geo is None else [_geometric_study(geo)]
    where, sources, rename = engine.build(), inputs.sources(quiet), inputs.rename
    with out.progress_bar(quiet) as progress:
        found = run(
            sources, chosen or DEFAULT_STUDIES, rename=rename, by=by or [], on_bad=on_bad, engine=where,
            progress=progress, notice=lambda sentence: out.print_warnings([sentence], quiet), wishes=wishes,
            outlook=ForecastRequest(batch, tuple(at_length or ()), at_step), micro_batch_size=micro_batch_size,
        )  # fmt: skip

    def screen() -> Document:
        if not found.targets or outputs.verbose:
            return sweep_screen(found, inputs.names, document(found) if outputs.verbose else None)
        prices = price_targets(
            found, inputs.names, rename=rename, on_bad=on_bad, engine=where, micro_batch_size=micro_batch_size
        )
        return target_screen(found, inputs.names, prices)

    outputs.finish(
        found.to_json,
        lambda: document(found),
        screen,
        lambda: (*found.warnings, *skipped_data_notes(found.left_out)),
        save=lambda place: write_sweep(found, place),
    )


def _geometric_study(values: str) -> Study:
    from mismatchctl.api.sweep.study import Study, ThresholdAxis, validate_study
    from mismatchctl.corrections.presets import parse_correction

    correction = parse_correction({"name": "geo", "gates": [{"level": "geometric", "keep": [0.5, 2.0]}]})
    try:
        axis = ThresholdAxis.parse("gates.0.keep", values, "--geo")
    except ConfigError as error:
        raise ConfigError(str(error).replace("gates.0.keep=", "")) from None
    if not axis.is_numeric or not all(isinstance(value, float) and value > 1 for value in axis.values):
        raise ConfigError(f"--geo {values}: write numbers above 1: one (2), a list (1.5,2,3) or a range (1.1:4:30)")
    return validate_study(Study(correction, (axis,)))


def _split_axis(text: str) -> tuple[str, str]:
    path, equals, values = text.partition("=")
    if not (path and equals and values):
        raise ConfigError(f"--vary {text}: write PATH=VALUES, as in weight.clip.1=1.1:4:30")
    return path.strip(), values.strip()


def _parse_targets(rejections: Sequence[str], sizes: Sequence[str]) -> list[TargetValue]:
    from mismatchctl.api.sweep.sweep import ESS_METRIC, TARGET_REJECTIONS

    found: list[TargetValue] = []
    for text in rejections:
        kind, equals, share = text.rpartition("=")
        kind = kind if equals else "tokens"
        if kind not in TARGET_REJECTIONS:
            known = f"write tokens=5% or sequences=5%{suggestion(kind, TARGET_REJECTIONS)}"
            raise ConfigError(f"--target-rejection {text}: {known}")
        value = opt.parse_share("--target-rejection", share, 1, "write a share between 0 and 1, such as 5% or 0.05")
        found.append((TARGET_REJECTIONS[kind], value))
    remedy = "write a share between 0 and 1, such as 90% or 0.9"
    found += [(ESS_METRIC, opt.parse_share("--target-ess", text, 1, remedy)) for text in sizes]
    return list(dict.fromkeys(found))
