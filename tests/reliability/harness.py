"""Run a harness in its own process, because its forks would lack the threads of the tests."""

import json
import subprocess
import sys
from typing import Any

from tests.paths import ROOT


def found(script: str, *words: object) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "default::RuntimeWarning", "-m", f"tests.reliability.{script}", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
