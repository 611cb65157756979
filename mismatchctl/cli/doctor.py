"""`mismatchctl doctor`."""

from __future__ import annotations

from typing import Any

import typer

from mismatchctl.cli.options import JsonOption, VerboseOption
from mismatchctl.cli.output import print_json_or_page
from mismatchctl.cli.settings import find_unread_variables, read_settings_with_origins
from mismatchctl.errors import EXIT_CHECK_FAILED


def doctor(ctx: typer.Context, verbose: VerboseOption = False, json: JsonOption = False) -> None:
    """Check this installation with a self-test (exit 3 if a test fails)."""
    from dataclasses import asdict

    from mismatchctl.api.doctor import inspect_machine, list_dependencies, run_self_test
    from mismatchctl.report.pages.checks import SettingRow, doctor_document

    group: Any = ctx.parent.command if ctx.parent else None
    settings = [
        SettingRow(verb, flag, value, where)
        for verb, chosen in read_settings_with_origins(group).items()
        for flag, (value, where) in chosen.items()
    ]
    unread, here, needed, checks = find_unread_variables(group), inspect_machine(), list_dependencies(), run_self_test()
    sound = all(check.passed for check in checks) and all(package.fits for package in needed)
    data = {
        "sound": sound,
        "machine": asdict(here),
        "dependencies": [asdict(package) | {"fits": package.fits} for package in needed],
        "settings": [asdict(setting) for setting in settings],
        "unread_variables": unread,
        "self_test": [asdict(check) | {"passed": check.passed} for check in checks],
    }
    print_json_or_page(
        data, lambda: doctor_document(here, needed, settings, unread, checks, whole=verbose), as_json=json
    )
    if not sound:
        raise typer.Exit(EXIT_CHECK_FAILED)
