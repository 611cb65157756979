"""Where tests of pages are skipped: never in CI, and elsewhere with the reason."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (("chromium", "chromedriver"), None),
        (("google-chrome", "chromedriver"), None),
        (("chromium",), "no chromedriver here"),
        (("chromedriver",), "no Chromium here"),
        ((), "no Chromium and chromedriver here"),
    ],
)
def test_what_is_missing_is_the_reason_and_ci_never_skips(
    installed: tuple[str, ...], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in installed else None)
    monkeypatch.delenv("CI", raising=False)
    skips, why = skipped()
    assert skips == (reason is not None) and (not skips or why == reason)
    monkeypatch.setenv("CI", "true")
    assert skipped()[0] is False


def skipped() -> tuple[Any, Any]:
    mark = runpy.run_path(str(Path(__file__).with_name("browser.py")))["NEEDS_BROWSER"].mark
    return mark.args[0], mark.kwargs["reason"]
