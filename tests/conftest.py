"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import chromium
import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command does: units are what runs side by side


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all tests that look at pages."""
    yield from chromium.start(tmp_path_factory.mktemp("profile"))
