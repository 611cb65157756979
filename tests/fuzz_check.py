"""Runs a case of the fuzz harness and says what is wrong with how it ended: nothing, or a few words."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import traceback
from pathlib import Path
from typing import Any

from fuzzing import Case, Maker
from typer.testing import CliRunner

from mismatchctl.cli.main import app

ENDINGS = (0, 2, 3, 4)
"""Fine, usage, a check that failed, could not judge."""


def checked(seed: int) -> tuple[Case, str]:
    """Run the case of a seed in a folder of its own; what is wrong, or an empty text."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    before = Path.cwd()
    try:
        case = Maker(seed, folder).case()
        (folder / "out").mkdir()
        given = {path.relative_to(folder) for path in folder.rglob("*")}
        os.chdir(folder)
        with contextlib.redirect_stderr(None):
            done = CliRunner().invoke(app, case.argv, env={"COLUMNS": "200", "MISMATCHCTL_THREADS": "1"})
        os.chdir(before)
        return case, problem(case, done, {path.relative_to(folder) for path in folder.rglob("*")} - given, folder)
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def problem(case: Case, done: Any, made: set[Path], folder: Path) -> str:
    """What is wrong with an ending."""
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        frames = traceback.extract_tb(done.exc_info[2])
        where = next((f for f in reversed(frames) if "mismatchctl" in f.filename), frames[-1])
        words = f"{type(done.exception).__name__}: {str(done.exception)[:120]}"
        return f"traceback: {words} at {where.filename}:{where.lineno}"
    if done.exit_code not in ENDINGS:
        return f"exit code {done.exit_code}"
    if "Traceback" in done.stderr:
        return "a traceback on stderr"
    sentences = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    judged = case.argv[0] in ("gate", "lint", "schema")
    if len(sentences) > 1 or (done.exit_code in (2, 4) and not sentences and not judged and "Usage" not in done.stderr):
        return f"{len(sentences)} sentences for exit code {done.exit_code}: {done.stderr[:200]!r}"
    if any(part.startswith(".") for path in made for part in path.parts):
        return f"left behind: {sorted(map(str, made))}"
    if done.exit_code in (2, 4) and made and not judged:
        return f"written although it failed: {sorted(map(str, made))}"
    for path in made:
        if path.suffix == ".json":
            strict((folder / path).read_text())
    if "--json" in case.argv and done.stdout.strip() and done.exit_code != 2:
        try:
            data = strict(done.stdout)
        except ValueError as error:
            return f"stdout is no strict JSON: {error}"
        if case.k3 is not None:
            return _differs(case.k3, data)
    elif case.k3 is not None:
        return f"a sound dump ended with {done.exit_code}: {done.stderr[:200]!r}"
    return ""


def _differs(expected: float, data: Any) -> str:
    (run,) = data["runs"].values()
    found = run["overall"]["metrics"]["k3"]["value"]
    return (
        "" if found is not None and abs(found - expected) <= 1e-9 * expected + 1e-300 else f"K3 {found}, not {expected}"
    )


def strict(text: str) -> Any:
    """JSON without NaN and Infinity; a ValueError where it is none."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)
