"""Run a command in the process of the test, or functions in threads."""

from collections.abc import Callable
from threading import Thread

from click.testing import Result
from typer.testing import CliRunner

from mismatchctl.cli.main import app


def run(*words: object, code: int | None = None, **environment: str) -> Result:
    """Run the command with a wide terminal, and check the exit code if `code` is not None."""
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", **environment})
    assert code is None or done.exit_code == code, (done.output, done.exception)
    return done


def at_once(*works: Callable[[], object]) -> None:
    threads = [Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
