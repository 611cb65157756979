"""`score` gives the log-probs of small models, also in parts, after an interruption, and from a replay file."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mismatchctl.api import checkpoint as checkpoints
from mismatchctl.api import score
from tests.cli import command
from tests.factories.tiny_models import MASKS, PROMPTS, RESPONSES, expected, make_dump, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, expected(make_model(folder))


run = partial(command.run, code=0)


def reference(folder: Path) -> dict[str, list[float] | None]:
    table = pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("*.parquet")))
    return dict(zip(table["sequence_id"].to_pylist(), table["reference_log_probs"].to_pylist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral"])
def test_log_probs_match_the_logits_of_the_model(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "POSITIONS_PER_BLOCK", 4)  # several parts of each response
    truth = expected(make_model(tmp_path / "model", kind))
    dump = make_dump(tmp_path / "dump", truth)
    run("score", tmp_path / "model", dump, "-o", tmp_path / "out", "-q")
    found = reference(tmp_path / "out")
    for row, values in enumerate(truth):
        np.testing.assert_allclose(np.array(found[f"s{row}"]), values, rtol=0, atol=2e-5)


def test_precision_and_temperature_are_applied(tmp_path: Path, model: tuple[Path, list[np.ndarray]]) -> None:
    import transformers

    dump = make_dump(tmp_path / "dump", model[1])
    argv = ("score", model[0], dump, "-o", tmp_path / "out", "--temperature", 0.7, "--dtype", "float64", "-q")
    run(*argv, "--model-version", 9, "--device", "cpu")  # like `precise`: rotary positions are float32
    precise = transformers.AutoModelForCausalLM.from_pretrained(model[0], dtype=torch.float64)
    table = pq.read_table(next((tmp_path / "out").iterdir()))
    assert table.schema.field("reference_log_probs").type.value_type == pa.float64()
    assert table["reference_version"].to_pylist() == [9] * 6
    for found, values in zip(table["reference_log_probs"].to_pylist(), expected(precise, 0.7), strict=True):
        np.testing.assert_allclose(np.array(found), values, rtol=0, atol=1e-12)


def test_rows_are_scored_independently(tmp_path: Path, model: tuple[Path, list[np.ndarray]]) -> None:
    run("score", model[0], make_dump(tmp_path / "all", model[1]), "-o", tmp_path / "a", "-q")
    run("score", model[0], make_dump(tmp_path / "one", model[1], [3]), "-o", tmp_path / "b", "-q")
    run("score", model[0], make_dump(tmp_path / "turned", model[1], [5, 4, 3, 0]), "-o", tmp_path / "c", "-q")
    found = [reference(tmp_path / name)["s3"] for name in "abc"]
    assert found[0] == found[1] == found[2] and len(found[0] or ()) == 14


def test_interrupted_runs_are_continued(
    tmp_path: Path, model: tuple[Path, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "ROWS_PER_PIECE", 2)
    dump, argv = make_dump(tmp_path / "dump", model[1]), ("-q", "--json")
    run("score", model[0], dump, "-o", tmp_path / "whole", "-q")
    own, calls = checkpoints.Checkpoint.log_probs, []

    def stopping(self: Any, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return own(self, *given)

    monkeypatch.setattr(checkpoints.Checkpoint, "log_probs", stopping)
    run("score", model[0], dump, "-o", tmp_path / "out", *argv, code=130)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["00000_00000.parquet"]
    done = json.loads(run("score", model[0], dump, "-o", tmp_path / "out", *argv).stdout)
    assert done == {"out": str(tmp_path / "out"), "sequences": 6, "tokens": 41, "kept": 2, "left_out": 0}
    assert len(calls) == 8  # two and a half pieces, then the missing pieces
    assert reference(tmp_path / "out") == reference(tmp_path / "whole")


def test_results_of_other_settings_are_not_reused(tmp_path: Path, model: tuple[Path, list[np.ndarray]]) -> None:
    dump = make_dump(tmp_path / "dump", model[1])
    run("score", model[0], dump, "-o", tmp_path / "out", "-q")
    other = ("score", model[0], dump, "-o", tmp_path / "out", "--temperature", 0.5)
    assert "with other sequences or settings" in run(*other, code=2).stderr
    before = reference(tmp_path / "out")
    run(*other, "--force", "-q")
    assert reference(tmp_path / "out") != before


def test_worst_rows_and_samples_can_be_scored(tmp_path: Path, model: tuple[Path, list[np.ndarray]]) -> None:
    dump = make_dump(tmp_path / "dump", model[1])
    table = pq.read_table(next(dump.iterdir())).to_pylist()
    badness = {
        row["sequence_id"]: abs(
            sum(
                (t - r) * m
                for t, r, m in zip(row["train_log_probs"], row["rollout_log_probs"], row["response_mask"], strict=True)
            )
        )
        for row in table
    }
    done = run("score", model[0], dump, "-o", tmp_path / "worst", "--worst", 2)
    assert "4 sequences were not selected" in done.stderr
    scored = {name for name, values in reference(tmp_path / "worst").items() if values is not None}
    assert scored == set(sorted(badness, key=lambda name: -badness[name])[:2])
    turned = make_dump(tmp_path / "turned", model[1], [4, 2, 5, 0, 3, 1])
    for place, out in ((dump, "x"), (turned, "y")):
        run("score", model[0], place, "-o", tmp_path / out, "--sample", 3, "-q")
    first, second = ({k for k, v in reference(tmp_path / name).items() if v is not None} for name in "xy")
    assert first == second and len(first) == 3


def test_diagnose_names_the_side_of_scored_dumps(tmp_path: Path, model: tuple[Path, list[np.ndarray]]) -> None:
    dump = make_dump(tmp_path / "dump", model[1])
    run("score", model[0], dump, "-o", tmp_path / "out", "-q")
    run("analyze", tmp_path / "out", "-o", tmp_path / "r.json", "-q")
    metrics = json.loads((tmp_path / "r.json").read_text())["runs"]["out"]["overall"]["metrics"]
    assert metrics["share_rollout"]["value"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["share_train"]["value"] == pytest.approx(0.0, abs=1e-3)


def test_rows_can_be_exported_and_scores_imported(tmp_path: Path, model: tuple[Path, list[np.ndarray]]) -> None:
    dump = make_dump(tmp_path / "dump", model[1])
    run("score", dump, "--replay", tmp_path / "lines.jsonl", "--worst", 2, "-q")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        row = int(line["sequence_id"][1:])
        assert (line["row"], line["step"]) == (row, 1)
        assert line["prompt_token_ids"] == PROMPTS[row].tolist() and line["token_ids"] == RESPONSES[row].tolist()
        assert line["response_mask"] == MASKS[row].tolist()
    answers = {
        "sequence_id": [line["sequence_id"] for line in lines],
        "reference_log_probs": [model[1][line["row"]].tolist() for line in lines],
    }
    pq.write_table(pa.table(answers), tmp_path / "answers.parquet")
    run("convert", dump, tmp_path / "joined.parquet", "--join", tmp_path / "answers.parquet", "-q")
    found = pq.read_table(tmp_path / "joined.parquet")["reference_log_probs"].to_pylist()
    assert [row for row, values in enumerate(found) if values is not None] == sorted(line["row"] for line in lines)
    pq.write_table(pa.table({**answers, "sequence_id": ["x", "y"]}), tmp_path / "answers.parquet")
    done = run("convert", dump, tmp_path / "no.parquet", "--join", tmp_path / "answers.parquet", code=4)
    assert "does not contain any sequence of this dump" in done.stderr and not (tmp_path / "no.parquet").exists()


@pytest.mark.parametrize(
    ("columns", "code", "said"),
    [
        ({"prompt_token_ids": None}, 4, "prompt_token_ids: the dump lacks this column; record the prompt's tokens"),
        ({"prompt_token_ids": [[1], [1], [1], [], [1], [1]]}, 4, "row 3, column prompt_token_ids: is empty"),
        ({"token_ids": [one + 45 for one in RESPONSES]}, 4, "column token_ids: has the id"),
        ({"prompt_token_ids": [np.zeros(70, np.int64)] * 6}, 4, "the model takes at most 64"),
        ({"reference_log_probs": [np.zeros(len(one)) for one in RESPONSES]}, 4, "the column already exists"),
    ],
)
def test_unscorable_dumps_are_refused(
    tmp_path: Path, model: tuple[Path, list[np.ndarray]], columns: dict[str, Any], code: int, said: str
) -> None:
    dump = make_dump(tmp_path / "dump", model[1], **columns)
    done = run("score", model[0], dump, "-o", tmp_path / "out", code=code)
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_wrong_paths_are_refused(
    tmp_path: Path, model: tuple[Path, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, out = make_dump(tmp_path / "dump", model[1]), tmp_path / "out"
    assert "this folder is not a checkpoint" in run("score", dump, dump, "-o", out, code=2).stderr
    assert "is inside the input dump" in run("score", model[0], dump, "-o", dump / "more", code=2).stderr
    assert "--replay needs one dump" in run("score", model[0], dump, "--replay", out, code=2).stderr
    assert "score takes" in run("score", model[0], dump, code=2).stderr
    assert "this device is not available" in run("score", model[0], dump, "-o", out, "--device", "warp", code=2).stderr
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert "contains mine.txt" in run("score", model[0], dump, "-o", out, "--force", code=2).stderr
    (out / "mine.txt").unlink()
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "mismatchctl[score]" in run("score", model[0], dump, "-o", out, code=2).stderr


class Code:
    def __reduce__(self) -> Any:
        return Path.write_text, (Path("ran"), "code of a checkpoint")


def configured(**values: Any) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        place = folder / "config.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | values))

    return damage


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Code()))


def remote(folder: Path) -> None:
    (folder / "own.py").write_text("open('ran', 'w')")
    configured(auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}, model_type="own")(folder)


def spoilt(folder: Path) -> None:
    place = folder / "model.safetensors"
    content = place.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    place.write_bytes(content[:start] + b"\xff" * (len(content) - start))


BROKEN: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), 2, "this folder is not a checkpoint"),
    "no JSON": (lambda folder: (folder / "config.json").write_text('{"a":'), 2, "not a valid JSON"),
    "nothing configured": (lambda folder: (folder / "config.json").write_text("{}"), 2, "Unrecognized model"),
    "an unknown architecture": (configured(model_type="nonsense"), 2, "nonsense"),
    "no language model": (configured(model_type="vit"), 2, "Unrecognized configuration"),
    "words for numbers": (configured(hidden_size="many"), 2, "hidden_size"),
    "other shapes": (configured(hidden_size=64), 2, "do not have the shapes in config.json"),
    "more words than there are weights": (configured(vocab_size=10**12), 2, "do not have the shapes"),
    "layers without weights": (configured(num_hidden_layers=5), 2, "weights that config.json requires"),
    "truncated": (lambda folder: os.truncate(folder / "model.safetensors", 5000), 2, "cannot load"),
    "empty": (lambda folder: os.truncate(folder / "model.safetensors", 0), 2, "cannot load"),
    "a pickle": (pickled, 2, "this folder is not a checkpoint"),
    "a pickle by another name": (
        lambda folder: (folder / "model.safetensors").write_bytes(pickle.dumps(Code())), 2, "cannot load",
    ),
    "code of its own": (remote, 2, "custom code"),
    "no finite weight": (spoilt, 4, "no finite log-prob"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_broken_checkpoints_give_one_sentence(
    what: str, tmp_path: Path, model: tuple[Path, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is written, no code is executed, and no weight is invented."""
    damage, code, said = BROKEN[what]
    folder = shutil.copytree(model[0], tmp_path / "model")
    damage(folder)
    dump = make_dump(tmp_path / "dump", model[1])
    monkeypatch.chdir(tmp_path)
    done = run("score", "model", dump, "-o", "out", code=code)
    assert said in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "model"]
