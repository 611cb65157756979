"""Run part of the tests with other versions of Python and the oldest dependencies, each in a new environment.

`python -m tests.reliability.versions python3.10 python3.12 --oldest python3.10` prints one line of JSON per
environment. Each environment runs `mismatchctl demo`, then the tests that need no torch. The exit code is 1 if one
fails. `make -s versions > LOG/versions.jsonl` keeps the lines for `tests.reliability.reliability --log LOG`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from mismatchctl.io.yaml import parse_toml
from tests.paths import ROOT

TESTS = (
    *("io/test_text_parsing", "data/test_wide_format", "data/test_unusual_dumps"),
    *("measure/test_accuracy", "api/test_sweep_exact", "results/test_damaged_results", "recorder/test_files"),
    *("cli/test_gate", "cli/test_extreme_values"),
)
WITH = (
    *("click>=8.1", "pytest>=8.0", "hypothesis>=6.100", "scipy>=1.11"),
    *("jsonschema>=4.21", "xmlschema>=3.0"),
)
OLD = ("-W", "default::DeprecationWarning")
"""Warnings of old libraries about deprecated features of newer libraries."""
SHOWN = ("numpy", "pyarrow", "polars", "pydantic", "numba", "typer", "matplotlib")


def dependencies(oldest: bool) -> list[str]:
    wanted = parse_toml((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [one.replace(">=", "==") if oldest else one for one in wanted]


def tried(python: str, oldest: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        own = f"{folder}/bin/python"
        pip = [own, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--prefer-binary"]
        tests = [
            own,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            *OLD[: 2 * oldest],
            *(f"tests/{name}.py" for name in TESTS),
        ]
        found: dict[str, Any] = {"python": python, "oldest": oldest, "versions": {}, "tests": "", "wrong": ""}
        for command in (
            [python, "-m", "venv", folder],
            [*pip, *dependencies(oldest), *WITH],
            [*pip, "--no-deps", str(ROOT)],
            [f"{folder}/bin/mismatchctl", "demo"],
            tests,
        ):
            where = folder if command[1:] == ["demo"] else ROOT  # not in the checkout: the installed package is used
            done = subprocess.run(command, capture_output=True, text=True, cwd=where)
            if done.returncode:
                return found | {"wrong": (done.stdout + done.stderr)[-2000:]}
        show = "import sys, importlib.metadata as m; print(sys.version.split()[0], *map(m.version, sys.argv[1:]))"
        number, *versions = subprocess.check_output([own, "-c", show, *SHOWN], text=True).split()
        passed = done.stdout.strip().splitlines()[-1]
        return found | {"python": number, "versions": dict(zip(SHOWN, versions, strict=True)), "tests": passed}


def every(pythons: list[str], oldest: list[str]) -> Iterator[dict[str, Any]]:
    for python in pythons:
        yield tried(python, False)
    for python in oldest:
        yield tried(python, True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*")
    parser.add_argument("--oldest", nargs="*", default=[])
    asked = parser.parse_args()
    if not asked.pythons + asked.oldest:
        parser.error("no Python to try")
    failed = False
    for one in every(asked.pythons, asked.oldest):
        print(json.dumps(one), flush=True)
        if one["wrong"]:
            failed = True
            print(one["wrong"], file=sys.stderr)
    sys.exit(failed)
