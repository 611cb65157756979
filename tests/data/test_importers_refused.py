"""Files that would run code are refused by name, and run none."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatchctl.data.importers.pickles import load_pickle, load_torch
from mismatchctl.data.importers.rows import all_layouts, read_rows
from mismatchctl.errors import DataError
from mismatchctl.frameworks.skyrl import PICKLE_CLASSES
from tests.cli.command import run


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def save_pickle(value: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(value))


def load_skyrl(path: Path) -> Any:
    """A pickle as SkyRL writes it."""
    return load_pickle(path, PICKLE_CLASSES)


SAVERS: list[tuple[Callable[..., None], Callable[[Path], Any]]] = [(save_pickle, load_skyrl), (torch.save, load_torch)]


@pytest.mark.parametrize(("save", "load"), SAVERS)
@pytest.mark.parametrize("nested", [False, True])
def test_hostile_files_run_nothing(
    tmp_path: Path, save: Callable[..., None], load: Callable[[Path], Any], nested: bool
) -> None:
    marker, path = tmp_path / "ran", tmp_path / "dump"
    save({"a": [Hostile(marker)]} if nested else Hostile(marker), path)
    with pytest.raises(DataError, match="system"):
        load(path)
    assert not marker.exists()


@pytest.mark.parametrize(("save", "load"), SAVERS)
def test_numbers_are_read(tmp_path: Path, save: Callable[..., None], load: Callable[[Path], Any]) -> None:
    path = tmp_path / "dump"
    save({"a": np.arange(3, dtype="int64"), "b": np.float32(1.5), "c": [None, "x"]}, path)
    read = load(path)
    assert read["a"].tolist() == [0, 1, 2]
    assert (float(read["b"]), read["c"]) == (1.5, [None, "x"])


@pytest.mark.parametrize("load", [load_skyrl, load_torch])
def test_damaged_files_are_named(tmp_path: Path, load: Callable[[Path], Any]) -> None:
    path = tmp_path / "dump.pt"
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"dump\.pt"):
        load(path)


SKYRL = "skyrl.backends.skyrl_train.training_batch"


def calling(function: str, marker: Path) -> bytes:
    """A pickle by hand: protocol 0 names the function, which need not exist here."""
    module, _, name = function.rpartition(".")
    return f"c{module}\n{name}\n(Vtouch {marker}\ntR.".encode()


@pytest.mark.parametrize("function", ["os.system", "builtins.eval", "builtins.exec", "subprocess.check_output"])
@pytest.mark.parametrize("load", [load_skyrl, load_torch])
def test_calls_by_name_are_refused(tmp_path: Path, load: Callable[[Path], Any], function: str) -> None:
    path = tmp_path / "dump.pkl"
    path.write_bytes(calling(function, tmp_path / "ran"))
    with pytest.raises(DataError, match=r"dump\.pkl"):
        load(path)
    assert list(tmp_path.iterdir()) == [path]


def test_refusals_name_what_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "dump.pkl"
    path.write_bytes(calling("subprocess.check_output", tmp_path / "ran"))
    with pytest.raises(DataError, match=r"asks for subprocess\.check_output, and nothing in a file is executed"):
        load_skyrl(path)


@pytest.mark.parametrize(("save", "load"), SAVERS)
def test_objects_in_arrays_are_refused(tmp_path: Path, save: Callable[..., None], load: Callable[[Path], Any]) -> None:
    marker, path = tmp_path / "ran", tmp_path / "dump"
    save({"values": np.array([1.0, Hostile(marker)], dtype=object)}, path)
    with pytest.raises(DataError, match="system"):
        load(path)
    assert not marker.exists()


def test_a_pickle_inside_an_array_of_bytes_stays_bytes(tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "dump"
    inner = np.frombuffer(pickle.dumps(Hostile(marker)), np.uint8)
    save_pickle({"format": "numpy", "data": inner}, path)
    assert load_skyrl(path)["data"].tobytes() == inner.tobytes()
    assert not marker.exists()


def skyrl_batch(**columns: object) -> bytes:
    """What SkyRL's class pickles to: a call of its own function on its state."""
    state = pickle.dumps({"batch_dict": columns, "metadata": {}}, protocol=3)[2:-1]
    head = f"c{SKYRL}\n_rebuild_tensor_batch\n(c{SKYRL}\nTrainingInputBatch\n".encode()
    return b"\x80\x03" + head + state + b"tR."


def test_only_skyrls_own_names_are_stood_in_for(tmp_path: Path) -> None:
    path = tmp_path / "global_step_1_training_input.pkl"
    path.write_bytes(skyrl_batch(loss_mask=None))
    assert load_skyrl(path)["batch_dict"] == {"loss_mask": None}
    path.write_bytes(skyrl_batch().replace(b"_rebuild_tensor_batch", b"_other"))
    with pytest.raises(DataError, match=rf"{SKYRL}\._other"):
        load_skyrl(path)
    path.write_bytes(skyrl_batch(loss_mask=Hostile(tmp_path / "ran")))
    with pytest.raises(DataError, match="system"):
        load_skyrl(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "state",
    [
        {"data": b"12345678", "dtype": "O", "shape": (1,)},
        {"data": b"1234567", "dtype": "float64", "shape": (1,)},
        {"data": b"12345678", "dtype": "float64", "shape": (1 << 40,)},
        {"dtype": "float64", "shape": (1,)},
        {"data": 3, "dtype": ["float64"], "shape": "x"},
    ],
)
def test_arrays_of_skyrl_that_are_none_are_refused(tmp_path: Path, state: dict[str, object]) -> None:
    path = tmp_path / "global_step_1_training_input.pkl"
    path.write_bytes(skyrl_batch(loss_mask={"format": "numpy", **state}))
    with pytest.raises(DataError, match="column loss_mask: is no array"):
        list(read_rows(all_layouts()["skyrl"], path))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32", "bool", "U3", "S3"])
@pytest.mark.parametrize(("save", "load"), SAVERS)
def test_arrays_of_every_plain_kind_are_read(
    tmp_path: Path, save: Callable[..., None], load: Callable[[Path], Any], dtype: str
) -> None:
    path = tmp_path / "dump"
    array = np.array([0, 1, 1], dtype)
    save({"a": array}, path)
    assert load(path)["a"].tolist() == array.tolist()


@pytest.mark.parametrize("verb", ["convert", "analyze"])
@pytest.mark.parametrize("name", ["0_0.pt", "global_step_1_training_input.pkl"])
def test_verbs_run_nothing_either(tmp_path: Path, verb: str, name: str) -> None:
    place = tmp_path / "source"
    place.mkdir()
    save = torch.save if name.endswith(".pt") else save_pickle
    save({"rollout_data": {"x": np.array([Hostile(tmp_path / "ran")], object)}, "rollout_id": 1}, place / name)
    words = [verb, str(place), *([str(tmp_path / "out.parquet")] if verb == "convert" else [])]
    done = run(*words, code=4)
    assert "nothing in a file is executed" in done.stderr and "system" in done.stderr
    assert list(tmp_path.iterdir()) == [place]


TENSORS: dict[str, torch.Tensor] = {
    "a matrix": torch.arange(24.0).reshape(2, 3, 4),
    "transposed": torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
    "a part": torch.arange(24.0).reshape(2, 3, 4)[1, :, ::2],
    "repeated": torch.tensor([1.0, 2.0])[:, None].expand(2, 5),
    "half": torch.arange(3.0).half(),
    "bfloat16": torch.arange(6.0).reshape(2, 3).bfloat16().T,
    "flags": torch.arange(3) > 1,
    "nothing": torch.zeros(0, 3),
    "a number": torch.tensor(3),
    "unsigned": torch.arange(3).to(torch.uint16),
    "a parameter": torch.nn.Parameter(torch.arange(3.0)),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_what_torch_reads(tmp_path: Path, name: str, zipped: bool) -> None:
    path, tensor = tmp_path / "a.pt", TENSORS[name]
    torch.save({"x": tensor, "y": tensor}, path, _use_new_zipfile_serialization=zipped)
    read = load_torch(path)
    expected = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
    for found in read.values():
        assert found.dtype == expected.numpy().dtype and np.array_equal(found, expected.numpy())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_of_every_protocol_are_read(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "dump"
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    value = {"a": array, "t": array.T, "n": np.float32(2), "o": np.array(["a", None], object), "b": b"x", "i": 10**30}
    path.write_bytes(pickle.dumps({**value, "again": array}, protocol))
    read = load_skyrl(path)
    assert {name: np.asarray(read[name]).tolist() for name in value} == {
        k: np.asarray(v).tolist() for k, v in value.items()
    }
    assert read["again"].tolist() == array.tolist()


def test_kinds_that_numpy_lacks_are_errors_only_where_they_are_needed(tmp_path: Path) -> None:
    torch.save({"other": torch.zeros(2).to(torch.float8_e4m3fn), "x": torch.ones(2)}, tmp_path / "a.pt")
    assert load_torch(tmp_path / "a.pt")["x"].tolist() == [1, 1]
