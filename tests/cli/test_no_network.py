"""Commands use the network only if a path names an object store."""

import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

from mismatchctl.cli.main import app
from tests.cli.command import run
from tests.factories.tiny_models import RESPONSES, make_dump, make_model
from tests.paths import FIXTURES, ROOT

VERBS = {
    "demo": "demo",
    "init": "init trl",
    "analyze": "analyze moe -c token_tis --by worker -o again.json --html again.html --sequences again.parquet",
    "diagnose": "diagnose moe --json",
    "sweep": "sweep moe --geo 1.001:1.01:3 --html sweep.html",
    "advise": "advise moe --for verl",
    "compare": "compare moe dense --html compare.html",
    "gate": "gate moe --baseline result.json --junit junit.xml",
    "convert": "convert nemo_rl converted.parquet",
    "report": "report result.json --html report.html",
    "schema": "schema --check moe",
    "metrics": "metrics k3",
    "lint": "lint verl.yaml moe",
    "doctor": "doctor",
    "presets": "presets --table",
    "watch": "watch moe --until-idle 0s",
    "score": "score tiny tokens -o scored",
}


class Refused(BaseException):
    """A BaseException, so that no code catches it."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    for name in ("moe", "dense"):
        (folder / name).mkdir()
        for step in range(2):
            shutil.copy(ROOT / f"sample_data/{name}/step_{step:05d}.parquet", folder / name)
    shutil.copytree(FIXTURES / "framework_dumps/peers/nemo_rl", folder / "nemo_rl")
    make_model(folder / "tiny")
    make_dump(folder / "tokens", [np.full(len(one), -1.0) for one in RESPONSES])
    (folder / "verl.yaml").write_text("rollout_correction: {rollout_is: token, rollout_is_threshold: 2.0}\n")
    run("analyze", folder / "moe", "-o", folder / "result.json", "-q", code=0)
    return folder


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make each network call fail, and return the list of calls."""
    asked: list[str] = []

    def refuse(name: str) -> Any:
        def call(*given: object, **_: object) -> None:
            asked.append(f"{name}{given}")
            raise Refused(asked[-1])

        return call

    class Socket(socket.socket):
        def __new__(cls, *given: Any, **named: Any) -> Any:
            return refuse("socket")(*given)

    monkeypatch.setattr(socket, "socket", Socket)
    for name in ("create_connection", "getaddrinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse(name))
    monkeypatch.setattr(
        "mismatchctl.io.stores.open_filesystem", refuse("filesystem")
    )  # the clients of object stores can be compiled code
    return asked


def test_every_command_is_tested() -> None:
    assert set(get_command(app).commands) == set(VERBS)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_commands_do_not_use_the_network(
    verb: str, place: Path, blocked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    done = run(*VERBS[verb].split())
    assert blocked == []
    assert done.exit_code in (0, 3) and done.output, (done.output, done.exception)


def test_the_network_block_works(blocked: list[str]) -> None:
    with pytest.raises(Refused):
        socket.socket(socket.AF_INET)
    with pytest.raises(Refused):
        socket.create_connection(("example.com", 80))
    assert len(blocked) == 2


@pytest.mark.parametrize("words", ["analyze s3://bucket/run", "gate moe --baseline s3://bucket/b.json"])
def test_remote_paths_use_the_network(
    words: str, place: Path, blocked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(Refused):
        run(*words.split())
    assert blocked == ["filesystem('s3', 'bucket')"]
