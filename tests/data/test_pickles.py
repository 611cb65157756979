"""Reading a pickle never runs code, and damaged or oversized pickles are refused."""

import io
import json
import os
import pickle
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatchctl.data.importers import pickles
from mismatchctl.data.importers.pickles import load_pickle, load_torch
from mismatchctl.data.importers.rows import all_layouts, read_rows
from mismatchctl.errors import DataError
from mismatchctl.frameworks.skyrl import PICKLE_CLASSES
from tests.cli.command import run
from tests.factories.hostile_pickle import Hostile

PICKLE, TORCH = "global_step_1_training_input.pkl", "0_0.pt"


class Calls:
    """A call of `os.system` that writes a file."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:

        return os.system, (f"touch {self.marker}",)


def text(value: str) -> bytes:
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


ROUTES: dict[str, Callable[[str], bytes]] = {
    "GLOBAL and REDUCE": lambda m: f"cposix\nsystem\n(Vtouch {m}\ntR.".encode(),
    "STACK_GLOBAL": lambda m: b"\x80\x04" + text("posix") + text("system") + b"\x93" + text(f"touch {m}") + b"\x85R.",
    "STACK_GLOBAL with a dotted name": lambda m: (
        b"\x80\x04" + text("numpy") + text("f2py.os.system") + b"\x93" + text(f"touch {m}") + b"\x85R."
    ),
    "a dotted name under an allowed module": lambda m: (
        b"\x80\x04" + text("numpy") + text("dtype.__class__") + b"\x93" + text(f"touch {m}") + b"\x85R."
    ),
    "INST": lambda m: f"(Vtouch {m}\niposix\nsystem\n.".encode(),
    "OBJ": lambda m: f"(cposix\nsystem\nVtouch {m}\no.".encode(),
    "NEWOBJ": lambda m: f"\x80\x02csubprocess\nPopen\n(Vtouch {m}\nt\x81.".encode("latin1"),
    "NEWOBJ_EX": lambda m: f"\x80\x04csubprocess\nPopen\n(Vtouch {m}\nt}}\x92.".encode("latin1"),
    "BUILD of a stand-in": lambda m: (
        b"cskyrl.backends.skyrl_train.training_batch\n_rebuild_tensor_batch\n"
        b"(N}V__code__\ncposix\nsystem\nstb(Vx\nVy\ntR."
    ),
    "BUILD of an allowed class": lambda m: b"cnumpy\nndarray\n(N}V__new__\ncposix\nsystem\nstb.",
    "EXT1": lambda m: b"\x80\x02\x82\x01(Vx\ntR.",
    "EXT4": lambda m: b"\x80\x02\x84\x01\x00\x00\x00(Vx\ntR.",
    "PERSID": lambda m: b"Pposix.system\n.",
    "BINPERSID": lambda m: b"\x80\x02Vposix.system\nQ.",
    "a getter": lambda m: b"cbuiltins\ngetattr\n(cnumpy\ndtype\nV__init__\ntR.",
    "numpy's own loader": lambda m: b"cnumpy\nload\n(Vx\ntR.",
    "the torch loader": lambda m: b"ctorch\nload\n(Vx\ntR.",
    "a device that is called": lambda m: f"ctorch\ndevice\n(cposix\nsystem\nVtouch {m}\ntR.".encode(),
}
"""Pickles that call `touch` on a marker file, or that reach a function that could."""


def zipped(inner: bytes) -> bytes:
    good, out = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.zeros(2)}, good)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            target.writestr(name, inner if name.endswith("data.pkl") else source.read(name))
    return out.getvalue()


def legacy(inner: bytes) -> bytes:
    """Write a torch file of the format before zip: several pickles."""
    whole = io.BytesIO()
    torch.save({}, whole, _use_new_zipfile_serialization=False)
    begin = whole.getvalue().index(pickle.dumps({}, 2))
    return whole.getvalue()[:begin] + inner


def tar(inner: bytes) -> bytes:
    """Write a torch file of the oldest format: a tar archive."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(inner)
            archive.addfile(member, io.BytesIO(inner))
    return whole.getvalue()


def in_skyrl(inner: bytes) -> bytes:
    """Return a torch file within a SkyRL pickle, as SkyRL saves bfloat16."""
    mask = {"format": "torch", "data": zipped(inner)}
    return pickle.dumps({"batch_dict": {"loss_mask": mask}, "metadata": {}})


HOLDERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "pickle": (PICKLE, lambda inner: inner),
    "torch within a pickle": (PICKLE, in_skyrl),
    "torch": (TORCH, zipped),
    "legacy torch": (TORCH, legacy),
    "torch tar": (TORCH, tar),
    "a bare pickle as torch": (TORCH, lambda inner: inner),
}


def refused(folder: Path, verb: str = "convert") -> str:
    """Check that a folder cannot be read, and that no file is written. Return the error."""
    out = folder.parent / "out.parquet"
    before = sorted(folder.parent.rglob("*"))
    words = [verb, str(folder), *([str(out)] if verb == "convert" else [])]
    done = run(*words, code=4, COLUMNS="1000")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert sorted(folder.parent.rglob("*")) == before
    return done.stderr


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("route", ROUTES)
def test_no_opcode_executes_code(route: str, holder: str, tmp_path: Path) -> None:
    name, wrap = HOLDERS[holder]
    source = tmp_path / "source"
    source.mkdir()
    (source / name).write_bytes(wrap(ROUTES[route](str(tmp_path / "ran"))))
    assert f"{source / name}" in refused(source)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_protocol_executes_code(protocol: int, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    value = {"batch_dict": {"loss_mask": {"format": "numpy", "data": Calls(str(tmp_path / "ran"))}}}
    (source / PICKLE).write_bytes(pickle.dumps(value, protocol))
    assert "the pickle refers to posix.system, which mismatchctl does not load" in refused(source)


LIES: dict[str, bytes] = {
    "a string of 2^62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "bytes of 2^40": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "a frame of 2^62 bytes": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "a place of the memo of 2^31": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "an array of 2^60": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(L1152921504606846976L\ntVd\ntR.",
    "nested 100000 deep": b"(" * 100_000 + b"t" * 100_000 + b".",
    "lists 100000 deep": b"]" * 100_000 + b"a" * 99_999 + b".",
    "nothing": b"",
    "no end": b"\x80\x04]",
    "an unknown opcode": b"\x80\x04\xff.",
    "protocol 200": b"\x80\xc8N.",
}


@pytest.mark.slow
@pytest.mark.parametrize("holder", ["pickle", "torch"])
@pytest.mark.parametrize("lie", LIES)
def test_forged_sizes_are_refused(lie: str, holder: str, tmp_path: Path) -> None:
    name, wrap = HOLDERS[holder]
    source = tmp_path / "source"
    source.mkdir()
    (source / name).write_bytes(wrap(LIES[lie]))
    refused(source)


def dtype(code: bytes, state: bytes = b"") -> bytes:
    return b"cnumpy\ndtype\n(V" + code + b"\nI00\nI01\ntR" + (b"(" + state + b"tb" if state else b"")


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
EMPTY = RECONSTRUCT + b"(cnumpy\nndarray\n(I0\ntVb\ntR"
PLAIN = b"I3\nV<\nNNNI-1\nI-1\nI0\n"
FORGED: dict[str, bytes] = {
    "an object out of eight bytes": b"cnumpy.core.multiarray\nscalar\n("
    + dtype(b"O8", PLAIN.replace(b"V<", b"V|"))
    + b"VAAAAAAAA\ntR.",
    "an object array out of bytes": EMPTY + b"(I1\n(I1\nt" + dtype(b"O8", PLAIN) + b"I00\nVAAAAAAAA\ntb.",
    "numbers that a state turns into objects": b"cnumpy.core.multiarray\nscalar\n("
    + dtype(b"f8", b"I3\nV|\nNNNI8\nI8\nI63\n")
    + b"VAAAAAAA\ntR.",
    "a kind of parts": b"cnumpy.core.multiarray\nscalar\n("
    + dtype(b"V8", b"I3\nV<\nNNNI1073741824\nI8\nI0\n")
    + b"VAAAAAAAA\ntR.",
    "a kind with its own parts": dtype(b"f8", b"I3\nV<\n(" + dtype(b"O8") + b"(I9\nttNNI8\nI8\nI0\n") + b".",
    "an array of 2^30 objects": RECONSTRUCT + b"(cnumpy\nndarray\n(I1073741824\ntVO\ntR.",
    "an array of 2^40 numbers": EMPTY + b"(I1\n(I1099511627776\nt" + dtype(b"f8", PLAIN) + b"I00\nVA\ntb.",
    "a shape below 0": EMPTY + b"(I1\n(I-1\nI-8\nt" + dtype(b"f8", PLAIN) + b"I00\nVAAAAAAAA\ntb.",
    "a shape of texts": EMPTY + b"(I1\n(Vx\nt" + dtype(b"f8", PLAIN) + b"I00\nVAAAAAAAA\ntb.",
    "a shape of 64 dimensions": EMPTY + b"(I1\n(" + b"I1\n" * 64 + b"t" + dtype(b"f8", PLAIN) + b"I00\nVAAAAAAAA\ntb.",
    "a state of a number": b"I3\n(Vx\ntb.",
    "a call of a number": b"I3\n(tR.",
    "a key that nests itself 64 times": b"}N" + b"2\x86" * 64 + b"Ns.",
    "a whole kind as text": dtype(b"(1000000000,1000000000)f8") + b".",
}
"""Pickles of allowed types with a forged state. A reader that trusts the state crashes, needs 8 GB or does not end."""


@pytest.mark.parametrize("holder", ["pickle", "torch"])
@pytest.mark.parametrize("forged", FORGED)
def test_forged_states_are_refused(forged: str, holder: str, tmp_path: Path) -> None:
    name, wrap = HOLDERS[holder]
    source = tmp_path / "source"
    source.mkdir()
    (source / name).write_bytes(wrap(FORGED[forged]))
    assert "weights_only" not in refused(source)


def tensor(offset: int, size: str, stride: str, count: int = 2) -> bytes:
    storage = f"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI{count}\ntQ".encode()
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + f"I{offset}\n({size}t({stride}tI00\nNtR.".encode()


@pytest.mark.parametrize(
    "inner",
    [
        tensor(0, "I1099511627776\n", "I1\n"),
        tensor(1, "I2\n", "I1\n"),
        tensor(-1, "I2\n", "I1\n"),
        tensor(0, "I2\n", "I-1\n"),
        tensor(0, "I2\n", ""),
        tensor(0, "I2\nI2\n", "I1\nI4611686018427387903\n"),
        tensor(0, "I1073741824\n", "I0\n"),
    ],
)
def test_tensors_beyond_their_bytes_are_refused(inner: bytes, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / TORCH).write_bytes(zipped(inner))
    assert "a tensor" in refused(source) or "tensors" in refused(source)


def test_archives_larger_than_their_file_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with zipfile.ZipFile(source / TORCH, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02]" + b"N" * (1 << 24) + b".")
    assert "is a compressed archive" in refused(source)
    whole = bytearray(zipped(b"]."))
    for place in (whole.rindex(b"PK\x01\x02") + 20, whole.rindex(b"PK\x01\x02") + 24):
        whole[place : place + 4] = struct.pack("<I", 1 << 31)
    (source / TORCH).write_bytes(bytes(whole))
    assert "is shorter than its header" in refused(source)


def test_repeated_references_are_limited(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    column = [torch.full((4096,), -1.0)] * 512
    data = {"log_probs": column, "rollout_log_probs": column, "loss_masks": [torch.ones(4096)] * 512}
    data |= {"tokens": [torch.zeros(4096, dtype=torch.int64)] * 512, "response_lengths": [4096] * 512}
    torch.save({"rollout_id": 0, "rollout_data": data}, source / TORCH)
    assert "only possible if rows share their values" in refused(source)


@pytest.mark.parametrize("verb", ["convert", "analyze"])
@pytest.mark.parametrize("keep", [0, 1, 10, 200, -1, -30, -300])
def test_truncated_files_are_refused(keep: int, verb: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    torch.save({"rollout_id": 0, "rollout_data": {"log_probs": [torch.zeros(1000)], "tokens": [[1]]}}, source / TORCH)
    content = (source / TORCH).read_bytes()
    (source / TORCH).write_bytes(content[:keep])
    assert str(source / TORCH) in refused(source, verb)


GOOD: dict[str, Any] = {"step": 1, "token_ids": [1, 2], "loss_mask": [False, True]}
GOOD |= {"inference_logprobs": [0.0, -1.0], "trainer_logprobs": [-9.0, -1.5]}
LINES: dict[str, tuple[str, str]] = {
    "cut off": ('{"loss_mask": [1, 0', "row 1: not valid JSON"),
    "nested deeply": ("[" * 100_000, "row 1: not valid JSON: nested too deeply"),
    "a digit too many": ('{"step": ' + "1" * 5000 + "}", "row 1: not valid JSON"),
    "another object": ('{"a": 1}', "row 1, column inference_logprobs: the file does not contain this column"),
    "no object": ("3", "row 1: the line is not a JSON object"),
    "a step beyond int64": (
        json.dumps(GOOD | {"step": 10**30}),
        "row 1, column step: contains a value that is not a number",
    ),
    "a fractional step": (
        json.dumps(GOOD | {"step": 1.5}),
        "row 1, column step: contains a value that is not a number: 1.5",
    ),
    "a step as text": (
        json.dumps(GOOD | {"step": "1"}),
        "row 1, column step: contains a value that is not a number: '1'",
    ),
    "no mask": (
        json.dumps(GOOD | {"loss_mask": None}),
        "row 1, column loss_mask: the file does not contain this column",
    ),
    "a short mask": (json.dumps(GOOD | {"loss_mask": [True]}), "row 1, column loss_mask: lists differ in length"),
    "a later version": (
        json.dumps(GOOD | {"schema_version": 2}),
        "row 1, column schema_version: this file has version 2, but only 1",
    ),
    "a long mask": (json.dumps(GOOD | {"loss_mask": [False] * 3}), "row 1, column loss_mask: lists differ in length"),
}


@pytest.mark.parametrize("verb", ["convert", "analyze"])
@pytest.mark.parametrize("bad", LINES)
def test_bad_lines_are_named(bad: str, verb: str, tmp_path: Path) -> None:
    line, says = LINES[bad]
    source = tmp_path / "source"
    source.mkdir()
    (source / "rank_0.jsonl").write_text(json.dumps(GOOD) + "\n" + line)
    said = refused(source, verb)
    assert f"{source / 'rank_0.jsonl'}, {says}" in said


def save_pickle(value: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(value))


def load_skyrl(path: Path) -> Any:
    return load_pickle(path, PICKLE_CLASSES)


SAVERS: list[tuple[Callable[..., None], Callable[[Path], Any]]] = [(save_pickle, load_skyrl), (torch.save, load_torch)]


@pytest.mark.parametrize(("save", "load"), SAVERS)
@pytest.mark.parametrize("nested", [False, True])
def test_hostile_files_execute_no_code(
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


SKYRL = "skyrl.backends.skyrl_train.training_batch"


@pytest.mark.parametrize(("save", "load"), SAVERS)
def test_objects_in_arrays_are_refused(tmp_path: Path, save: Callable[..., None], load: Callable[[Path], Any]) -> None:
    marker, path = tmp_path / "ran", tmp_path / "dump"
    save({"values": np.array([1.0, Hostile(marker)], dtype=object)}, path)
    with pytest.raises(DataError, match="system"):
        load(path)
    assert not marker.exists()


def test_pickles_inside_byte_arrays_stay_bytes(tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "dump"
    inner = np.frombuffer(pickle.dumps(Hostile(marker)), np.uint8)
    save_pickle({"format": "numpy", "data": inner}, path)
    assert load_skyrl(path)["data"].tobytes() == inner.tobytes()
    assert not marker.exists()


def skyrl_batch(**columns: object) -> bytes:
    """Return the pickle of SkyRL's class, which calls its own function on its state."""
    state = pickle.dumps({"batch_dict": columns, "metadata": {}}, protocol=3)[2:-1]
    head = f"c{SKYRL}\n_rebuild_tensor_batch\n(c{SKYRL}\nTrainingInputBatch\n".encode()
    return b"\x80\x03" + head + state + b"tR."


def test_only_class_names_of_skyrl_are_accepted(tmp_path: Path) -> None:
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
def test_missing_arrays_of_skyrl_are_refused(tmp_path: Path, state: dict[str, object]) -> None:
    path = tmp_path / "global_step_1_training_input.pkl"
    path.write_bytes(skyrl_batch(loss_mask={"format": "numpy", **state}))
    with pytest.raises(DataError, match="column loss_mask: this value is not an array"):
        list(read_rows(all_layouts()["skyrl"], path))


def test_a_missing_key_of_skyrl_is_named(tmp_path: Path) -> None:
    path = tmp_path / "global_step_1_training_input.pkl"
    path.write_bytes(skyrl_batch(loss_mask={"format": "numpy", "data": b"12345678", "shape": (1,)}))
    with pytest.raises(DataError, match=r"not an array \(the key 'dtype' is missing\); let SkyRL write"):
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


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_match_torch(tmp_path: Path, name: str) -> None:
    path, tensor = tmp_path / "a.pt", TENSORS[name]
    torch.save({"x": tensor, "y": tensor}, path)
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


def test_unsupported_dtypes_are_errors_only_if_needed(tmp_path: Path) -> None:
    torch.save({"other": torch.zeros(2).to(torch.float8_e4m3fn), "x": torch.ones(2)}, tmp_path / "a.pt")
    assert load_torch(tmp_path / "a.pt")["x"].tolist() == [1, 1]


def _colliding_keys() -> bytes:
    """Return 180,000 integer keys with the same hash, because Python reduces integers modulo 2^61 - 1."""
    keys = [pickle.encode_long(number * ((1 << 61) - 1) + 1) for number in range(180_000)]
    return b"\x80\x02}(" + b"".join(b"\x8a" + bytes([len(key)]) + key + b"N" for key in keys) + b"u."


def _copies(count: int) -> bytes:
    text = b"X" + struct.pack("<I", 500_000) + b"a" * 500_000
    again = b"h\x00h\x01U\x06latin1\x86R"
    return b"\x80\x02c_codecs\nencode\nq\x00" + text + b"q\x01]q\x02(" + again * count + b"e."


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (_colliding_keys(), "keys are not strings or small integers"),
        (b"\x80\x02}(G?\xf0\x00\x00\x00\x00\x00\x00Nu.", "keys are not strings or small integers"),
        (_copies(50_000), "far more values than a file of its size"),
    ],
)
def test_values_that_exhaust_memory_are_refused(body: bytes, words: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / TORCH).write_bytes(zipped(body))
    started = time.process_time()
    assert words in refused(source)
    assert time.process_time() - started < 10


def test_slow_pickles_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "_SECONDS", -1.0)
    source = tmp_path / "source"
    source.mkdir()
    (source / TORCH).write_bytes(zipped(b"\x80\x02}(X\x01\x00\x00\x00aNu."))
    assert "takes too long" in refused(source)
