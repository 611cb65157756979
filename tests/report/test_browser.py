"""Tests in a browser are skipped with a reason if it is missing, and never in CI."""

import shutil

import pytest

from tests.report.browser import reason_to_skip


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (("chromium", "chromedriver"), ""),
        (("google-chrome", "chromedriver"), ""),
        (("chromium",), "no chromedriver here"),
        (("chromedriver",), "no Chromium here"),
        ((), "no Chromium and chromedriver here"),
    ],
)
def test_missing_browsers_skip_with_a_reason_but_never_in_ci(
    installed: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in installed else None)
    monkeypatch.delenv("CI", raising=False)
    assert reason_to_skip() == reason
    monkeypatch.setenv("CI", "true")
    assert reason_to_skip() == ""
