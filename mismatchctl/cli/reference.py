"""`mismatchctl metrics`, `schema`, `lint`, `presets` and `doctor`: commands that do not analyze a dump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.cli.help import declare_options
from mismatchctl.errors import EXIT_CANNOT_JUDGE, EXIT_CHECK_FAILED, ConfigError


def metrics(name: str | None = None, verbose: bool = False, json: bool = False) -> None:
    """Explain a metric: definition, unit and source."""
    from mismatchctl.frameworks.glossary import find_meanings, find_metrics, meanings_as_data, metrics_as_data
    from mismatchctl.report.pages import reference

    meanings = {} if name is None else find_meanings(name)
    try:
        found = find_metrics(name)
    except ConfigError:
        if not meanings:
            raise
        found = {}
    if json:  # slow: reads the metric names of all frameworks
        out.print_json([*metrics_as_data(found), *meanings_as_data(meanings)])
    elif name is None:
        out.print_page(reference.metrics_document(found) if verbose else reference.metrics_screen(found))
    else:
        several = len({metric.key for metrics in found.values() for metric in metrics}) > 1
        if several:
            out.print_page(reference.metrics_document({title: own for title, own in found.items() if own}))
        if meanings or not several:
            out.print_page(reference.metric_document({} if several else found, meanings, whole=verbose))


def schema(
    paths: list[str] | None = None,
    check: bool = False,
    column: list[str] | None = None,
    json_schema: bool = False,
    verbose: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Describe the dump format, or check files (exit 4 on unusable files)."""
    if check or paths:
        if not paths:
            raise ConfigError("--check needs files or folders")
        _check_files(paths, opt.parse_renames(column), verbose=verbose, json=json, quiet=quiet)
    elif json_schema:
        from mismatchctl.results.model import result_schema

        out.print_json(result_schema())
    else:
        from mismatchctl.core.schema import build_schema_data
        from mismatchctl.frameworks.registry import column_aliases
        from mismatchctl.report.pages import reference

        page = reference.contract_document if verbose else reference.contract_screen
        out.print_json_or_page(build_schema_data(column_aliases()), lambda: page(column_aliases()), as_json=json)


def _check_files(paths: list[str], rename: dict[str, str], *, verbose: bool, json: bool, quiet: bool) -> None:
    from dataclasses import asdict

    from mismatchctl.core.formatting import format_command
    from mismatchctl.data.reader import check_files
    from mismatchctl.frameworks.registry import column_aliases
    from mismatchctl.report.pages import checks

    found = check_files(paths, rename=rename, aliases=column_aliases())
    data = [asdict(file) | {"sound": file.sound} for file in found]
    page = checks.schema_check_document(found, format_command("analyze", paths), whole=verbose)
    out.print_json_or_page(data, lambda: page, as_json=json, quiet=quiet)
    if not all(file.sound for file in found):
        raise typer.Exit(EXIT_CANNOT_JUDGE)


def lint(
    config: Path,
    dumps: list[str] | None = None,
    framework: str = "",
    column: list[str] | None = None,
    verbose: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Check a framework's configuration (exit 3 on errors)."""
    from mismatchctl.api.lint import lint as run
    from mismatchctl.core.formatting import format_command
    from mismatchctl.report.pages.checks import lint_document

    chosen, findings = run(config, dumps or (), framework, opt.parse_renames(column))
    entries = [{name: value for name, value in vars(one).items() if name != "instead"} for one in findings]
    title, following = (
        f"{config} as {chosen.dated}",
        format_command("analyze", dumps or ["DUMPS"], f"--config {config}"),
    )
    out.print_json_or_page(
        {"framework": chosen.title, "findings": entries},
        lambda: lint_document(findings, title, notes=verbose, following=following),
        as_json=json,
        quiet=quiet,
    )
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(EXIT_CHECK_FAILED)


def doctor(ctx: typer.Context, verbose: bool = False, json: bool = False) -> None:
    """Check this installation with a self-test (exit 3 if a check fails)."""
    from dataclasses import asdict

    from mismatchctl.api.doctor import inspect_machine, list_dependencies, run_self_test
    from mismatchctl.cli.settings import find_unread_variables, read_settings
    from mismatchctl.report.pages.checks import doctor_document

    group: Any = ctx.parent.command if ctx.parent else None
    settings = [
        {"verb": verb, "flag": flag, "value": value, "where": where}
        for verb, chosen in read_settings(group).items()
        for flag, (value, where) in chosen.items()
    ]
    unread, here, needed, checks = find_unread_variables(group), inspect_machine(), list_dependencies(), run_self_test()
    sound = all(check.passed for check in checks) and all(package.fits for package in needed)
    data = {
        "sound": sound,
        "machine": asdict(here),
        "dependencies": [asdict(package) | {"fits": package.fits} for package in needed],
        "settings": settings,
        "unread_variables": unread,
        "self_test": [asdict(check) | {"passed": check.passed} for check in checks],
    }
    out.print_json_or_page(
        data, lambda: doctor_document(here, needed, settings, unread, checks, whole=verbose), as_json=json
    )
    if not sound:
        raise typer.Exit(EXIT_CHECK_FAILED)


presets = typer.Typer(help="List the presets of corrections, or show one.", invoke_without_command=True)


@presets.callback()
@declare_options("presets")
def presets_or_list(ctx: typer.Context, table: bool = False, verbose: bool = False, json: bool = False) -> None:
    """List the presets of corrections, or show one with `show NAME`."""
    if verb := ctx.invoked_subcommand:
        if table or json:
            raise ConfigError(
                "leave out --table and --json: show prints YAML"
                if verb == "show"
                else f"leave out --table, and write --json at the end: mismatchctl presets {verb} --json"
            )
        return
    from mismatchctl.corrections.presets import list_traits
    from mismatchctl.frameworks.registry import load_presets
    from mismatchctl.report.pages import reference

    known = load_presets()
    data = list_traits(known) if table else [preset.to_mapping() | {"name": name} for name, preset in known.items()]
    page = reference.presets_document if verbose else reference.presets_screen
    out.print_json_or_page(data, lambda: (reference.methods_document if table else page)(known), as_json=json)


@presets.command("list")
@declare_options("presets list")
def list_presets(ctx: typer.Context, verbose: bool = False, json: bool = False) -> None:
    """List all presets by framework."""
    presets_or_list(ctx=ctx, verbose=verbose, json=json)


@presets.command("frameworks")
@declare_options("presets frameworks")
def list_frameworks(verbose: bool = False, json: bool = False) -> None:
    """List the frameworks and their versions."""
    from mismatchctl.frameworks.registry import list_frameworks
    from mismatchctl.report.pages import reference

    known = list_frameworks()
    out.print_json_or_page(known, lambda: reference.frameworks_document(known, whole=verbose), as_json=json)


@presets.command("show")
@declare_options("presets show")
def show(name: str, framework: str = "", nearest: bool = False) -> None:
    """Print a preset as YAML (a file for --correction), or as a framework's configuration."""
    if nearest and not framework:
        raise ConfigError("--nearest only works with --as NAME")
    from mismatchctl.corrections.presets import Preset
    from mismatchctl.frameworks.config_files import format_native, format_preset
    from mismatchctl.frameworks.registry import load_framework, load_presets

    for correction in opt.load_corrections(name):
        known = load_presets().get(name, Preset(correction))
        text = (
            format_native(correction, load_framework(framework), nearest=nearest) if framework else format_preset(known)
        )
        typer.echo(text, nl=False)
