"""A run's own log in the forms that trackers write, and the lag at which K3 follows it."""

from __future__ import annotations

import struct
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatchctl.api.analyze.run_log import estimate_lag, masked_crc, read_run_log, read_scalars
from mismatchctl.errors import DataError
from tests.cli.command import run
from tests.cli.test_commands import write_dump


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def simple(name: str, value: float) -> bytes:
    return message(1, message(1, name.encode()) + varint(2 << 3 | 5) + struct.pack("<f", value))


def tensor(name: str, value: float) -> bytes:
    held = varint(1 << 3) + varint(1) + message(4, struct.pack("<f", value))
    return message(1, message(1, name.encode()) + message(8, held))


def event(step: int, *values: bytes) -> bytes:
    return varint(1 << 3 | 1) + struct.pack("<d", 1.7e9) + varint(2 << 3) + varint(step) + message(5, b"".join(values))


def record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    crc = struct.pack("<I", masked_crc(length)), struct.pack("<I", masked_crc(content))
    return length + crc[0] + content + crc[1]


EVENTS = [
    varint(1 << 3 | 1) + struct.pack("<d", 1.7e9) + message(3, b"brain.Event:2"),
    event(0, simple("train/grad_norm", 0.1), tensor("reward", 2.5)),
    event(300, simple("train/grad_norm", 3.25)),
]
"""Laid out by hand from the published .proto files: the version, then scalars in both forms."""


def test_the_checksum_is_that_of_the_castagnoli_polynomial() -> None:
    """The check value of CRC-32C, 0xE3069283, masked."""
    crc = 0xE3069283
    assert masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_event_files_are_read_even_while_they_grow(tmp_path: Path) -> None:
    content = b"".join(map(record, EVENTS))
    (tmp_path / "events.out.tfevents.1.host").write_bytes(content + record(EVENTS[1])[:-3])
    for path in (tmp_path, tmp_path / "events.out.tfevents.1.host"):
        rows = read_run_log(path).rows
        assert rows == {
            "0": {"train/grad_norm": Decimal("0.1"), "reward": Decimal("2.5")},
            "300": {"train/grad_norm": Decimal("3.25")},
        }


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    content = bytearray(b"".join(map(record, EVENTS)))
    content[-10] ^= 1
    with pytest.raises(DataError, match="record 2 is damaged"):
        list(read_scalars(bytes(content), "x"))
    with pytest.raises(DataError, match="no event file"):
        list(read_scalars(b"PAR1" * 9, "x"))
    with pytest.raises(DataError, match="record 0 is no event"):
        list(read_scalars(record(b"\xff" * 20), "x"))


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=60), max_size=4), st.binary(max_size=30))
def test_hostile_bytes_give_a_sentence_or_scalars(records: list[bytes], rest: bytes) -> None:
    try:
        for step, name, value in read_scalars(b"".join(map(record, records)) + rest, "x"):
            assert isinstance(step, int) and name and value.is_finite()
    except DataError as error:
        assert str(error)


def test_exports_as_csv(tmp_path: Path) -> None:
    place = tmp_path / "wandb.csv"
    place.write_text(
        '"Step","r1 - train/k3","r1 - train/k3__MIN","r1 - _runtime"\n0,0.5,0.4,1\n2,"",1,1\n3,1e-3,1,NaN\n'
    )
    assert read_run_log(place).rows == {"0": {"train/k3": Decimal("0.5")}, "3": {"train/k3": Decimal("1e-3")}}
    board = tmp_path / "loss.csv"
    board.write_text("Wall time,Step,Value\n1.5,0,0.25\n2.5,1,0.125\n")
    assert read_run_log(board).rows == {"0": {"loss": Decimal("0.25")}, "1": {"loss": Decimal("0.125")}}
    (tmp_path / "none.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="no column of steps"):
        read_run_log(tmp_path / "none.csv")


def series(seed: int, lag: int, steps: int = 120, noise: float = 0.3) -> tuple[list[float | None], list[float | None]]:
    random = np.random.default_rng(seed)
    drive = random.normal(size=steps + 40).cumsum() * 0.3
    k3 = np.exp(drive[20 : 20 + steps] + noise * random.normal(size=steps) - 6)
    return k3.tolist(), drive[20 + lag : 20 + lag + steps].tolist()


@pytest.mark.parametrize("lag", [-6, -1, 0, 3, 9])
def test_a_planted_lag_is_found(lag: int) -> None:
    """What is logged runs `lag` steps ahead of what drives K3, so K3 follows it by that."""
    found = [estimate_lag(*series(seed, lag)) for seed in range(10)]
    assert sum(one.steps == lag for one in found) >= 8


def test_unrelated_series_have_none() -> None:
    """Random walks, noise and both: one in a hundred may look like a lag."""
    random = np.random.default_rng(5)
    wrong = 0
    for _ in range(300):
        walk, noise = random.normal(size=(2, 80)).cumsum(axis=1) * 0.2, random.normal(size=(2, 80))
        mix = random.random() * noise + random.random() * walk
        wrong += estimate_lag(np.exp(mix[0] - 5).tolist(), mix[1].tolist()).steps is not None
    assert wrong <= 9  # 3 expected; 10 or more would be one in a thousand


def test_too_little_says_so() -> None:
    assert "takes" in estimate_lag([1.0] * 5, [1.0] * 5).status
    assert estimate_lag([1.0] * 30, [float(i) for i in range(30)]).status == "it does not vary"


def test_a_log_needs_no_framework(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "dump")
    (tmp_path / "events.out.tfevents.1").write_bytes(
        b"".join(map(record, [event(s, simple("lr", s)) for s in range(3)]))
    )
    page = tmp_path / "page.html"
    done = run("analyze", dump, "--against", tmp_path / "events.out.tfevents.1", "--json", "--html", page, code=0)
    assert '"lags":{"lr":' in done.stdout
    assert "lr, as logged" in page.read_text()
