"""`mismatchctl init ci`, and ci/record.py with a tiny local model, from an empty folder to a gate that fails."""

import json
import re
import runpy
import shlex
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from tests.cli.command import run
from tests.paths import ROOT

GUIDE = (ROOT / "docs/guides/ci.md").read_text(encoding="utf-8")
PROMPTS = {"a": [5, 6, 7], "b": [9, 300]}
SMALL = ("--model", "tiny", "--prompts", "small.jsonl", "--samples", "3", "--max-tokens", "6")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Llama with random weights and a tokenizer, and a copy with other weights."""
    folder = tmp_path_factory.mktemp("models")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "tiny")
    transformers.ByT5Tokenizer().save_pretrained(folder / "tiny")
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * 0.004)
    model.save_pretrained(folder / "stale")
    return folder


@pytest.fixture
def place(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "stale"):
        (tmp_path / name).symlink_to(models / name)
    Path("small.jsonl").write_text(
        "".join(json.dumps({"prompt_id": name, "prompt_token_ids": ids}) + "\n" for name, ids in PROMPTS.items())
    )
    return tmp_path


def record(*words: str) -> None:
    path = "ci/record.py" if Path("ci/record.py").exists() else str(ROOT / "templates/ci/record.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["record.py", *words])
        runpy.run_path(path, run_name="__main__")


def rows(folder: str = "dumps") -> list[dict[str, Any]]:
    return pq.read_table(folder).to_pylist()


def log_probs_of(model: str, prompt: list[int], tokens: list[int], dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Compute the log-probs of a response with one forward pass per token, normalized in float64."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    found = []
    for place, token in enumerate(tokens):
        with torch.no_grad():
            logits = loaded(torch.tensor([prompt + tokens[:place]])).logits[0, -1].double().numpy()
        found.append(logits[token] - np.logaddexp.reduce(logits))
    return np.array(found)


@pytest.mark.slow
@pytest.mark.process
def test_the_transcript_of_the_guide_works(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands are init, record, a first gate, record with a planted regression, and a failing gate."""
    section = GUIDE.split("## From an empty folder\n")[1].split("\n## ")[0]
    transcript = re.findall(r"```console\n(.*?)```", section, flags=re.DOTALL)[0]
    commands = re.findall(r"^\$ (.*)\n((?:[^$\n].*\n|\n)*)", transcript.replace("\\\n", ""), flags=re.MULTILINE)
    assert [shlex.split(command)[1] for command, _ in commands] == [
        "init",
        "ci/record.py",
        "gate",
        "ci/record.py",
        "gate",
    ]
    for number, (command, shown) in enumerate(commands):
        words = shlex.split(command)
        if words[0] == "python":
            record(*words[2:])
            printed = capsys.readouterr().out
        else:
            done = run(*words[1:], code=3 if number == len(commands) - 1 else 0)
            printed = done.stdout + done.stderr
        printed = " ".join(printed.split())
        for line in (" ".join(line.split()) for line in shown.splitlines()):
            parts = re.split(r"[\d.,]+(?:e-?\d+)?%?", line)  # numbers depend on the processor
            assert all(part.strip() in printed for part in parts), (line, printed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_columns_match_their_model(dtype: str, place: Path) -> None:
    record(
        *SMALL,
        "--engine",
        "transformers=stale",
        "--engine-dtype",
        dtype,
        "--trainer-dtype",
        "float32",
        "--out",
        "dumps",
    )
    found = rows()
    assert [row["prompt_id"] for row in found] == ["a"] * 3 + ["b"] * 3
    assert len({tuple(row["token_ids"]) for row in found}) > 3  # responses differ
    noise = 1e-4 if dtype == "float32" else 0.15  # bfloat16 has 8 bits
    for row in found:
        assert row["prompt_token_ids"] == PROMPTS[row["prompt_id"]]
        ids = row["prompt_token_ids"], row["token_ids"]
        np.testing.assert_allclose(row["train_log_probs"], log_probs_of("tiny", *ids), atol=1e-4)
        np.testing.assert_allclose(
            row["rollout_log_probs"], log_probs_of("stale", *ids, getattr(torch, dtype)), atol=noise
        )
    assert max(abs(np.subtract(row["train_log_probs"], row["rollout_log_probs"])).max() for row in found) > 1e-3


@pytest.mark.slow
def test_temperature_applies_to_both_sides_and_padding_is_removed(place: Path) -> None:
    config = json.loads((place / "tiny/generation_config.json").read_text())
    assert config["eos_token_id"] == 1
    words = [*SMALL[:4], "--samples", "200", "--max-tokens", "12", "--temperature", "2", "--engine", "transformers"]
    record(*words, "--engine-dtype", "float32", "--trainer-dtype", "float32", "--out", "dumps")
    found = rows()
    for row in found:
        np.testing.assert_allclose(row["rollout_log_probs"], row["train_log_probs"], atol=1e-4)
        assert 1 not in row["token_ids"][:-1]
    lengths = {len(row["token_ids"]) for row in found}
    assert 12 in lengths and len(lengths) > 1


@contextmanager
def server(answer: Any) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    asked: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            content = json.dumps(answer(body)).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}", asked
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def sampled(prompt: list[int], number: int) -> tuple[list[int], list[float]]:
    """Return the answer of a stubbed engine. Tokens and log-probs depend on the prompt and the sample."""
    tokens = [prompt[0] + number, 40 + number, 1]
    return tokens, [-0.5 - number, -1.25, -0.125]


def check_recorded(samples: int = 3) -> None:
    found = rows()
    expected = [sampled(ids, number) for ids in PROMPTS.values() for number in range(samples)]
    assert [(row["token_ids"], row["rollout_log_probs"]) for row in found] == expected
    for row in found[:1]:
        truth = log_probs_of("tiny", row["prompt_token_ids"], row["token_ids"])
        np.testing.assert_allclose(row["train_log_probs"], truth, atol=1e-4)


def test_vllm_servers_are_recorded(place: Path) -> None:
    """The server answers like /v1/completions with `return_tokens_as_token_ids`."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for number in range(body["n"]):
            tokens, log_probs = sampled(body["prompt"], number)
            names = [f"token_id:{token}" for token in tokens]
            found = {"text_offset": [0, 1, 2], "token_logprobs": log_probs, "tokens": names, "top_logprobs": [{}] * 3}
            choices.append({"index": number, "text": "?", "logprobs": found, "finish_reason": "stop"})
        return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": choices}

    with server(answer) as (url, asked):
        record(*SMALL, "--engine", f"vllm={url}", "--trainer-dtype", "float32", "--out", "dumps")
    check_recorded()
    assert [path for path, _ in asked] == ["/v1/completions"] * 2
    assert asked[0][1] == {
        "model": "tiny", "prompt": [5, 6, 7], "n": 3, "max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "repetition_penalty": 1.0, "seed": 0, "logprobs": 1, "return_tokens_as_token_ids": True,
    }  # fmt: skip


def sglang_answer(prompt: list[int], number: int) -> dict[str, Any]:
    tokens, log_probs = sampled(prompt, number)
    pairs = [[log_prob, token, None] for token, log_prob in zip(tokens, log_probs, strict=True)]
    return {"text": "?", "output_ids": tokens, "meta_info": {"output_token_logprobs": pairs}}


def test_sglang_servers_are_recorded(place: Path) -> None:
    with server(lambda body: sglang_answer(body["input_ids"], (len(asked) - 1) % 3)) as (url, asked):
        record(*SMALL, "--engine", f"sglang={url}", "--trainer-dtype", "float32", "--out", "dumps")
    check_recorded()
    assert [path for path, _ in asked] == ["/generate"] * 6
    assert asked[0][1]["return_logprob"] and asked[0][1]["sampling_params"]["max_new_tokens"] == 6


def test_in_process_engines_are_recorded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stub modules have the classes, arguments and results of the engines."""
    vllm, sglang = types.ModuleType("vllm"), types.ModuleType("sglang")

    class LLM:
        def __init__(self, model: str, *, dtype: str, seed: int, generation_config: str, logprobs_mode: str) -> None:
            assert (model, generation_config, logprobs_mode) == ("tiny", "vllm", "processed_logprobs")

        def generate(self, prompts: list[dict[str, Any]], settings: dict[str, Any]) -> list[Any]:
            assert settings["logprobs"] == 0 and settings["max_tokens"] == 6
            prompt_ids = [each["prompt_token_ids"] for each in prompts]
            outputs = [[self._one(ids, number) for number in range(settings["n"])] for ids in prompt_ids]
            return [types.SimpleNamespace(outputs=each) for each in outputs]

        def _one(self, prompt: list[int], number: int) -> Any:
            tokens, log_probs = sampled(prompt, number)
            steps = [{token: types.SimpleNamespace(logprob=one)} for token, one in zip(tokens, log_probs, strict=True)]
            return types.SimpleNamespace(token_ids=tuple(tokens), logprobs=steps)

    class Engine:
        def __init__(self, *, model_path: str, dtype: str, random_seed: int) -> None:
            assert model_path == "tiny"

        def generate(self, *, input_ids: list[list[int]], sampling_params: dict[str, Any], return_logprob: bool) -> Any:
            assert return_logprob and sampling_params["n"] == 1
            return [sglang_answer(ids, place % 3) for place, ids in enumerate(input_ids)]

        def shutdown(self) -> None:
            pass

    vllm.LLM, vllm.SamplingParams, sglang.Engine = LLM, dict, Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "sglang", sglang)
    for engine in ("vllm", "sglang"):
        record(*SMALL, "--engine", engine, "--trainer-dtype", "float32", "--out", engine)
        Path("dumps").unlink(missing_ok=True)
        Path("dumps").symlink_to(engine)
        check_recorded()


@pytest.mark.parametrize("broken", ["nan", "short"])
def test_invalid_engine_log_probs_are_refused(broken: str, place: Path) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        names, log_probs = ["token_id:3", "token_id:4"], [-1.0] if broken == "short" else [-1.0, float("nan")]
        return {"choices": [{"logprobs": {"tokens": names, "token_logprobs": log_probs}}] * body["n"]}

    with server(answer) as (url, _), pytest.raises(SystemExit, match="wrong log-probs for a"):
        record(*SMALL, "--engine", f"vllm={url}", "--out", "dumps")
    assert not Path("dumps").exists()


@pytest.mark.parametrize(
    ("words", "engine", "files"),
    [
        ("", "vllm", {"ci/record.py", "ci/prompts.jsonl", ".github/workflows/mismatch.yml"}),
        ("--framework Slime --gitlab", "sglang", {"ci/record.py", "ci/prompts.jsonl", "ci/gitlab.yml"}),
    ],
)
def test_init_ci_writes_its_files(
    words: str, engine: str, files: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("init", "ci", *words.split(), code=0)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == files
    assert f'\nENGINE = "{engine}"  #' in Path("ci/record.py").read_text()
    assert "python ci/record.py --out dumps/" in done.stdout
    assert len(Path("ci/prompts.jsonl").read_text().splitlines()) == 32
    run("init", "ci", *words.split(), code=0)  # no line to change
    Path("ci/record.py").write_text("mine")
    assert "ci/record.py: this file already exists" in run("init", "ci", *words.split(), code=2).stderr
    assert Path("ci/record.py").read_text() == "mine"
    run("init", "ci", *words.split(), "--force", code=0)
    assert Path("ci/record.py").read_text() != "mine"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--framework tinker-cookbook", "run as a service"),
        ("--framework nope", "unknown framework"),
        ("--write", "only"),
    ],
)
def test_init_ci_refuses_in_one_sentence(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("init", "ci", *words.split(), code=2)
    assert says in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
