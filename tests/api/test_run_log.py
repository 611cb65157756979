"""Logs of a run: the formats of trackers, comparison with the dump, and the lag between K3 and a metric."""

import json
import struct
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.analyze.run_log import estimate_lag, read_run_log
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import DataError
from mismatchctl.frameworks.adapter import Dtype, ReplayOptions
from mismatchctl.frameworks.registry import load_framework
from mismatchctl.results.model import Agreement, Result, RunResult
from tests.cli.command import run
from tests.factories.dumps import write_dump
from tests.factories.protobuf import varint

masked_crc = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow").masked_crc32c

Logged = Mapping[str, Sequence[float | None]]
K3 = "rollout_corr/k3_kl"


def dump_of(folder: Path, scale: float, steps: int = 2) -> Path:
    """Write log ratios of about `scale` in float64, so that rounding does not matter."""
    random = np.random.default_rng(3)
    rollout = [-0.6 - random.exponential(1.0, 200) for _ in range(8 * steps)]
    train = [row + random.normal(0, scale, 200) for row in rollout]
    table = pa.table(
        {"step": [i // 8 for i in range(8 * steps)], "rollout_log_probs": rollout, "train_log_probs": train}
    )
    folder.mkdir()
    pq.write_table(table, folder / "dump.parquet")
    return folder


def analyzed(dump: Path, log: Path | None = None) -> RunResult:
    result = analyze(
        [str(dump)], [Correction(name="none")], framework=load_framework("verl"),
        log=None if log is None else read_run_log(log), findings=False,
    )  # fmt: skip
    return result.runs[dump.name]


def replayed(dump: Path, dtype: Dtype = "float64") -> Logged:
    found = analyzed(dump).logged["none"]
    if dtype == "float64":
        return found
    table, framework = pq.read_table(dump), load_framework("verl")
    steps = [table.filter(pc.equal(table["step"], step)) for step in range(len(found[K3]))]
    rows = [framework.replay(step, Correction(name="none"), ReplayOptions(dtype=dtype)).logged for step in steps]
    return {name: [row[name] for row in rows] for name in found}


def written(path: Path, values: Logged, form: str = "") -> Path:
    """Write a log. `form` is the number format, or empty for Python's own format."""

    def shown(value: float) -> str:
        return format(value, form) if form else repr(value)

    rows = [
        "{" + ", ".join([f'"step": {step}', *(f'"{name}": {shown(v[step])}' for name, v in values.items())]) + "}"
        for step in range(len(next(iter(values.values()))))
    ]
    path.write_text("\n".join(rows))
    return path


def against(dump: Path, log: Path) -> dict[str, Agreement]:
    return analyzed(dump, log=log).against["none"].names


@pytest.mark.parametrize("scale", [1.5e-6, 1e-3, 0.1])
def test_float32_logs_agree_and_larger_differences_are_reported(tmp_path: Path, scale: float) -> None:
    dump = dump_of(tmp_path / "run", scale)
    exact, rounded = replayed(dump), replayed(dump, "float32")
    for values in (exact, rounded):
        found = against(dump, written(tmp_path / "log.jsonl", values))
        assert [name for name, item in found.items() if not item.agrees] == []
    true = exact[K3][0]
    wrong = true * 1.0001 if scale > 1e-5 else 9e-7
    log = written(tmp_path / "log.jsonl", exact | {K3: [wrong, exact[K3][1]]})
    item = against(dump, log)[K3]
    assert not item.agrees
    tenth = written(tmp_path / "log.jsonl", rounded | {K3: [rounded[K3][0] + 0.1 * abs(true), rounded[K3][1]]})
    assert scale < 1e-5 or not against(dump, tenth)[K3].agrees
    assert item.difference == pytest.approx(abs(wrong - true) / max(wrong, true), rel=1e-6)
    assert (item.step, item.dump, item.log, item.steps) == ("0", true, wrong, 2)


@pytest.mark.parametrize(("form", "half"), [(".4g", 5e-7), (".5f", 5e-6), (".3e", 5e-7), ("", 0.0)])
def test_logs_are_compared_to_their_printed_digits(tmp_path: Path, form: str, half: float) -> None:
    """K3 is about 1.2e-3, and the tolerance is half a unit of the last printed digit."""
    dump = dump_of(tmp_path / "run", 0.05)
    exact = replayed(dump)
    found = against(dump, written(tmp_path / "log.jsonl", exact, form))
    assert [name for name, item in found.items() if not item.agrees] == []
    assert found[K3].allowed == pytest.approx(half / found[K3].dump, abs=2e-5)
    wrong = {name: [1.01 * value for value in values] for name, values in exact.items()}
    assert not against(dump, written(tmp_path / "log.jsonl", wrong, form))[K3].agrees


def test_zeros_in_precise_logs_are_zero(tmp_path: Path) -> None:
    dump = dump_of(tmp_path / "run", 1e-3)
    log = written(tmp_path / "log.jsonl", replayed(dump) | {K3: [0.0, 0.0]})
    item = against(dump, log)[K3]
    assert (item.agrees, item.difference, item.allowed < 0.1) == (False, 1.0, True)


def test_the_summary_lists_compared_and_other_names(tmp_path: Path) -> None:
    dump = dump_of(tmp_path / "run", 1e-3)
    grad = {"actor/grad_norm": [0.125, 3.5], "lr": [1e-6, 1e-6]}
    log = written(tmp_path / "log.jsonl", {K3: replayed(dump)[K3]} | grad)
    held = analyzed(dump, log=log)
    assert {name: held.log[name] for name in grad} == grad
    assert set(held.against["none"].names) == {K3}
    done = run("analyze", dump, "-c", "none", "--framework", "verl", "--against", log)
    assert "1 of 1 metric agrees with the run's log" in done.stdout
    assert "in the log, but not compared: actor/grad_norm, lr" in done.stdout
    whole = run("analyze", dump, "-c", "none", "--framework", "verl", "--against", log, "-v").stdout
    assert (
        "1 of 1 metric agrees with the run's log" in whole
        and "in the log, but not compared: actor/grad_norm, lr" in whole
    )


@pytest.mark.parametrize("text", ['{"step": 1e999999999, "a": 1}', '{"step": 0, "a": 1e99999999999999999999}'])
def test_numbers_beyond_float_range_are_skipped(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.jsonl").write_text(text + '\n{"step": 0, "b": 2}')
    assert analyzed(dump_of(tmp_path / "run", 1e-3), log=tmp_path / "log.jsonl").log == {"b": [2.0, None]}


def test_metric_names_are_compared_without_a_framework(tmp_path: Path) -> None:
    """Names with one meaning in all frameworks are compared. Others are kept without a comparison."""
    dump = dump_of(tmp_path / "run", 0.05)
    truth = replayed(dump)
    names = (K3, "rollout_corr/kl", "rollout_corr/chi2_token")
    logged = {f"train/{name}" if name == K3 else name: truth[name] for name in names} | {"k3": truth[K3]}
    others = {"kl": truth[K3], "loss": [0.1, 0.2], "actor/grad_norm": [1.0, 2.0], "tokens": [7.0, 9.0]}
    for scale, agrees in ((1.0, True), (1.001, False)):
        values = {name: [scale * value for value in own if value is not None] for name, own in logged.items()}
        log = written(tmp_path / "log.jsonl", values | others, ".9g")
        (run_,) = analyze([str(dump)], log=read_run_log(log), findings=False).runs.values()
        found = run_.against_metrics
        assert found is not None
        assert found.metrics == dict(zip(logged, ("k3", "k1", "chi2_token", "k3"), strict=True))
        for name, item in found.names.items():
            assert (item.agrees, item.steps) == (agrees, 2), name
            assert item.difference == pytest.approx(1 - 1 / scale, rel=1e-3, abs=1e-7)
        assert run_.log.keys() == {*values, *others}
    text = run("analyze", str(dump), "--against", str(log)).stdout
    assert "0 of 4 metrics agree with the run's log; different:" in text
    assert "in the log, but not compared: kl, loss, actor/grad_norm, tokens" in text


def test_replayed_names_are_compared_once(tmp_path: Path) -> None:
    dump = dump_of(tmp_path / "run", 0.05)
    found = analyzed(dump, log=written(tmp_path / "log.jsonl", replayed(dump)))
    assert K3 in found.against["none"].names
    assert found.against_metrics is None


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
"""Bytes that follow the published .proto files: the version, then scalars in both forms."""


def test_growing_event_files_are_read(tmp_path: Path) -> None:
    content = b"".join(map(record, EVENTS))
    (tmp_path / "events.out.tfevents.1.host").write_bytes(content + record(EVENTS[1])[:-3])
    for path in (tmp_path, tmp_path / "events.out.tfevents.1.host"):
        rows = read_run_log(path).rows
        assert rows == {
            "0": {"train/grad_norm": Decimal("0.1"), "reward": Decimal("2.5")},
            "300": {"train/grad_norm": Decimal("3.25")},
        }


def test_damaged_records_end_their_file(tmp_path: Path) -> None:
    place = tmp_path / "events.out.tfevents.1"
    content = bytearray(b"".join(map(record, EVENTS)))
    content[-10] ^= 1
    place.write_bytes(content)
    assert list(read_run_log(place).rows) == ["0"]
    length = struct.pack("<Q", 1 << 63)
    endless = length + struct.pack("<I", masked_crc(length))
    for refused in (b"PAR1" * 9, record(b"\xff" * 20), b"", record(event(1, b"\xff")), endless):
        place.write_bytes(refused)
        with pytest.raises(DataError):
            read_run_log(place)


def test_tensors_with_many_values_are_not_scalars(tmp_path: Path) -> None:
    """A forged shape must not allocate memory."""
    shape = message(2, message(2, varint(1 << 3) + varint(1 << 50)))
    held = varint(1 << 3) + varint(1) + shape + varint(5 << 3 | 5) + struct.pack("<f", 1.0)
    large = message(1, message(1, b"image") + message(8, held))
    place = tmp_path / "events.out.tfevents.1"
    place.write_bytes(record(event(1, large, simple("k3", 0.5))))
    assert read_run_log(place).rows == {"1": {"k3": Decimal("0.5")}}


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(st.binary(max_size=60), max_size=4), rest=st.binary(max_size=30))
def test_hostile_event_files_give_one_sentence_or_scalars(tmp_path: Path, records: list[bytes], rest: bytes) -> None:
    place = tmp_path / "events.out.tfevents.1"
    place.write_bytes(b"".join(map(record, records)) + rest)
    try:
        for row in read_run_log(place).rows.values():
            assert all(name and value.is_finite() for name, value in row.items())
    except DataError as error:
        assert str(error)


def test_non_finite_values_are_counted(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,k3,reward\n1,0.1,1\n2,NaN,1\n3,Infinity,\n")
    log = read_run_log(tmp_path / "log.csv")
    assert log.not_finite == {"k3": 2}
    assert log.rows["3"].get("k3") is None if "3" in log.rows else True
    (tmp_path / "log.jsonl").write_text('{"step": 1, "k3": NaN}\n{"step": 2, "k3": 0.5, "x": "-inf"}\n')
    assert read_run_log(tmp_path / "log.jsonl").not_finite == {"k3": 1, "x": 1}


def test_trainer_state_histories_are_logs(tmp_path: Path) -> None:
    place = tmp_path / "trainer_state.json"
    place.write_text(
        '{"global_step": 2, "log_history": [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "epoch": 1}]}'
    )
    rows = read_run_log(place).rows
    assert rows == {"1": {"loss": Decimal("0.5")}, "2": {"loss": Decimal("0.25"), "epoch": Decimal(1)}}


def test_csv_exports_are_read(tmp_path: Path) -> None:
    place = tmp_path / "wandb.csv"
    place.write_text(
        '"Step","r1 - train/k3","r1 - train/k3__MIN","r1 - _runtime"\n0,0.5,0.4,1\n2,"",1,1\n3,1e-3,1,NaN\n'
    )
    assert read_run_log(place).rows == {"0": {"train/k3": Decimal("0.5")}, "3": {"train/k3": Decimal("1e-3")}}
    board = tmp_path / "loss.csv"
    board.write_text("Wall time,Step,Value\n1.5,0,0.25\n2.5,1,0.125\n")
    assert read_run_log(board).rows == {"0": {"loss": Decimal("0.25")}, "1": {"loss": Decimal("0.125")}}
    (tmp_path / "none.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="no step column"):
        read_run_log(tmp_path / "none.csv")


def series(seed: int, lag: int, steps: int = 120, noise: float = 0.3) -> tuple[list[float | None], list[float | None]]:
    random = np.random.default_rng(seed)
    drive = random.normal(size=steps + 40).cumsum() * 0.3
    k3 = np.exp(drive[20 : 20 + steps] + noise * random.normal(size=steps) - 6)
    return k3.tolist(), drive[20 + lag : 20 + lag + steps].tolist()


@pytest.mark.parametrize("lag", [-6, -1, 0, 3, 9])
def test_planted_lags_are_found(lag: int) -> None:
    """The logged series changes `lag` steps before K3."""
    found = [estimate_lag(*series(seed, lag)) for seed in range(10)]
    assert sum(one.steps == lag for one in found) >= 8


def test_unrelated_series_have_no_lag() -> None:
    """One in a hundred random walks may show a lag by chance."""
    random = np.random.default_rng(5)
    wrong = 0
    for _ in range(300):
        walk, noise = random.normal(size=(2, 80)).cumsum(axis=1) * 0.2, random.normal(size=(2, 80))
        mix = random.random() * noise + random.random() * walk
        wrong += estimate_lag(np.exp(mix[0] - 5).tolist(), mix[1].tolist()).steps is not None
    assert wrong <= 9  # 3 are expected. 10 or more have a probability of 0.001


def test_too_few_steps_give_a_reason() -> None:
    assert "a lag needs 16" in estimate_lag([1.0] * 5, [1.0] * 5).status
    assert estimate_lag([1.0] * 30, [float(i) for i in range(30)]).status == "K3 or this metric does not vary"


def test_logs_work_without_a_framework(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "dump")
    (tmp_path / "events.out.tfevents.1").write_bytes(
        b"".join(map(record, [event(s, simple("lr", s)) for s in range(3)]))
    )
    done = run("analyze", dump, "--against", tmp_path / "events.out.tfevents.1", "--json", code=0)
    assert '"lags":{"lr":' in done.stdout


def test_logs_one_step_late_are_shifted(tmp_path: Path) -> None:
    """After the shift, all metrics agree. A log without a delay is not shifted."""
    dump = dump_of(tmp_path / "run", 0.05, steps=4)
    corrections, trl = [Correction(name="none")], load_framework("trl")

    def analyzed_by_trl(log: Path | None) -> Result:
        return analyze(
            [str(dump)], corrections, framework=trl, log=None if log is None else read_run_log(log), findings=False
        )

    values = analyzed_by_trl(None).runs["run"].logged["none"]
    assert "entropy" not in values
    for offset in (0, 1):
        rows = [{"step": step + offset} | {name: series[step] for name, series in values.items()} for step in range(4)]
        place = tmp_path / "trainer_state.json"
        place.write_text(json.dumps({"log_history": rows}))
        result = analyzed_by_trl(place)
        found = result.runs["run"].against["none"].names
        assert set(found) == set(values)
        assert all(item.agrees and item.steps == 4 for item in found.values())
        assert any("moved 1 step back" in text for text in result.warnings) == bool(offset)
