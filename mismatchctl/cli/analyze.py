"""`mismatchctl analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.errors import ConfigError

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
    advise: bool = False,
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

    DUMPS may also be metrics logs (W&B, TensorBoard).
    """
    if tokens is None and (browse or tokenizer):
        raise ConfigError("--browse and --tokenizer need --tokens FILE")
    quiet = outputs.quiet
    outputs.check(sequences, tokens, inputs=[*inputs.files, *(config or []), against, baseline])
    given = {
        "--correction": correction, "--config": config, "--framework": framework, "--against": against,
        "--baseline": baseline, "--advise": advise, "--sequences": sequences, "--tokens": tokens, "--by": by,
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
    from mismatchctl.frameworks.adapter import ReplayOptions
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
                micro_batch_size=micro_batch_size, replay=ReplayOptions(micro_batch_size), log=log, device=device,
                losses=loss or [], baseline=accepted,
                presets=[preset.correction for preset in load_presets().values()] if outputs.html else (),
            )  # fmt: skip
        if advise:
            from mismatchctl.api.advise.advice import set_advice_answers
            from mismatchctl.api.advise.advise import advise as advise_runs

            with out.progress_bar(quiet) as progress:
                set_advice_answers(result, advise_runs(sources, rename=inputs.rename, progress=progress))
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
    """Return the framework and version of the configurations, if they agree."""
    from mismatchctl.frameworks.config_files import read_native_configs
    from mismatchctl.frameworks.registry import load_framework

    found = [written.framework for path in configs for written in read_native_configs(path, name)]
    return found[0] if len({source.title for source in found}) == 1 else load_framework(name)
