"""verl_to_parquet.py, with stubs of verl's classes."""

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.cli.command import run
from tests.paths import ROOT

SCRIPT = ROOT / "docs/integrations/verl_to_parquet.py"
LENGTHS = (4, 1, 6)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    class DataProto:
        @staticmethod
        def load_from_disk(path: Path) -> SimpleNamespace:
            return SimpleNamespace(**pickle.loads(path.read_bytes()))

    verl = ModuleType("verl")
    verl.DataProto = DataProto  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl", verl)
    spec = importlib.util.spec_from_file_location("verl_to_parquet", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch(jagged: bool) -> dict[str, torch.Tensor]:
    """Make tensors [B, T] with 0 on the right as the legacy trainer has, or jagged tensors as the TransferQueue has."""
    generator = torch.Generator().manual_seed(5)
    rows: dict[str, list[torch.Tensor]] = {
        name: [-torch.rand(length, generator=generator) for length in LENGTHS]
        for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages")
    }
    rows["responses"] = [torch.arange(length) for length in LENGTHS]
    rows["response_mask"] = [torch.zeros(length, dtype=torch.int64) for length in LENGTHS]
    rows["loss_mask"] = [torch.ones(length, dtype=torch.int64) for length in LENGTHS]
    rows["loss_mask"][2][3] = 0  # a token of a tool
    if jagged:
        return {name: torch.nested.nested_tensor(values, layout=torch.jagged) for name, values in rows.items()}
    return {name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in rows.items()}


class Names:
    def tolist(self) -> list[str]:
        return ["a", "a", "b"]


class TensorDict(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        assert name != "uid", "a LinkedList without tolist"
        return super().__getitem__(name)

    def keys(self) -> Any:
        return [*super().keys(), "uid"]

    def get(self, name: str, default: Any = None) -> Any:
        return Names() if name == "uid" else super().get(name, default)


def valid(values: Any, mask: list[Any]) -> list[Any]:
    return [value for value, one in zip(values, mask, strict=True) if one]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("jagged", [False, True])
def test_batches_are_converted_to_the_schema(jagged: bool, script: ModuleType, tmp_path: Path) -> None:
    tensors = batch(jagged)
    if jagged:
        source = tmp_path / "tq_batch.pt"
        tensors = TensorDict(tensors)
        torch.save({"tensordict": tensors, "tags": [], "keys": [], "global_steps": 7}, source)
    else:
        source = tmp_path / "step7.dp"
        state = {"batch": tensors, "non_tensor_batch": {"uid": ["a", "a", "b"]}, "meta_info": {"global_steps": 7}}
        source.write_bytes(pickle.dumps(state))
    script.main(str(tmp_path / "dumps"), str(source))
    rows = [row for path in (tmp_path / "dumps").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert len(rows) == len(LENGTHS)
    assert [row["prompt_id"] for row in rows] == ["a", "a", "b"]
    names = {"rollout_log_probs": "rollout_log_probs", "train_log_probs": "old_log_probs", "token_ids": "responses"}
    names |= {"ref_log_probs": "ref_log_prob", "advantages": "advantages"}
    for number, (row, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        mask = tensors["loss_mask"][number][:length].tolist()
        assert row["step"] == 7
        assert sum(map(bool, row["response_mask"])) == sum(mask)
        for column, name in names.items():
            assert valid(row[column], row["response_mask"]) == valid(tensors[name][number][:length].tolist(), mask)
    run("analyze", tmp_path / "dumps", "--json", code=0)


def test_batches_from_before_the_recomputation_are_refused(script: ModuleType, tmp_path: Path) -> None:
    tensors = batch(jagged=False)
    del tensors["old_log_probs"]
    source = tmp_path / "gen_batch.dp"
    source.write_bytes(pickle.dumps({"batch": tensors, "non_tensor_batch": {}, "meta_info": {"global_steps": 1}}))
    with pytest.raises(SystemExit, match=r"gen_batch\.dp: contains no old_log_probs"):
        script.main(str(tmp_path / "dumps"), str(source))
    assert list((tmp_path / "dumps").glob("*.parquet")) == []
