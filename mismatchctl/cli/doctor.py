"""`mismatchctl doctor`."""

from __future__ import annotations

from typing import Any

import typer

from mismatchctl.cli.flags import Json
from mismatchctl.cli.output import print_or_show
from mismatchctl.cli.settings import settings_and_places, unread_variables
from mismatchctl.errors import EXIT_CHECK_FAILED


def doctor(ctx: typer.Context, json: Json = False) -> None:
    """Whether this installation is sound: versions, machine, settings, a self-test (exit code 3: it is not)."""
    from dataclasses import asdict

    from mismatchctl.doctor import dependencies, machine, self_test
    from mismatchctl.render.pages.checks import Setting, examination

    group: Any = ctx.parent.command if ctx.parent else None
    settings = [
        Setting(verb, flag, value, where)
        for verb, chosen in settings_and_places(group).items()
        for flag, (value, where) in chosen.items()
    ]
    unread, here, needed, checks = unread_variables(group), machine(), dependencies(), self_test()
    sound = all(check.passed for check in checks) and all(package.fits for package in needed)
    data = {
        "sound": sound,
        "machine": asdict(here),
        "dependencies": [asdict(package) | {"fits": package.fits} for package in needed],
        "settings": [asdict(setting) for setting in settings],
        "unread_variables": unread,
        "self_test": [asdict(check) | {"passed": check.passed} for check in checks],
    }
    print_or_show(data, lambda: examination(here, needed, settings, unread, checks), as_json=json)
    if not sound:
        raise typer.Exit(EXIT_CHECK_FAILED)
