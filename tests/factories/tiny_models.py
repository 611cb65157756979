"""Make small language models of several architectures, and a dump that they can score."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mismatchctl.recorder.recorder import Recorder
from tests.paths import FIXTURES

WORDS = 50
SIZES = {"vocab_size": WORDS, "num_hidden_layers": 2, "num_attention_heads": 4}
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, WORDS, size) for size in (1, 4, 7, 2, 5, 3)]
RESPONSES = [RNG.integers(0, WORDS, size) for size in (9, 1, 0, 14, 6, 11)]
MASKS = [RNG.random(len(one)) < 0.8 for one in RESPONSES]


def _config(kind: str) -> Any:
    import transformers

    if kind == "gpt2":
        return transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    own: dict[str, Any] = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}
    own |= {"max_position_embeddings": 64}
    if kind == "gemma2":  # the head of the model caps logits
        return transformers.Gemma2Config(**own, head_dim=8, final_logit_softcapping=2.0, sliding_window=6)
    if kind == "mixtral":
        return transformers.MixtralConfig(**own, num_local_experts=4)
    return transformers.LlamaConfig(**own)


def make_model(folder: Path, kind: str = "llama") -> Any:
    import transformers

    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(_config(kind)).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(3.0)  # otherwise all tokens are about equally likely
    model.save_pretrained(folder)
    return model


def expected(model: Any, temperature: float = 1.0) -> list[np.ndarray]:
    """Return the log-probs from the model's own logits of whole sequences."""
    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        with torch.no_grad():
            logits = model(torch.as_tensor(np.concatenate([prompt, response])[None])).logits[0].double().numpy()
        places = np.arange(len(response)) + len(prompt) - 1
        scaled = logits[places] / temperature
        scaled -= scaled.max(axis=1, keepdims=True)
        found.append((scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True)))[np.arange(len(response)), response])
    return found


def make_dump(folder: Path, truth: Sequence[np.ndarray], rows: Sequence[int] = range(6), **columns: Any) -> Path:
    noise = np.random.default_rng(1)
    rollout = [truth[row] + noise.normal(0, 0.1 * (1 + row), len(truth[row])) for row in rows]
    given = {
        "rollout_log_probs": [np.minimum(one, 0.0) for one in rollout],
        "train_log_probs": [truth[row] for row in rows],
        "response_mask": [MASKS[row] for row in rows],
        "prompt_token_ids": [PROMPTS[row] for row in rows],
        "token_ids": [RESPONSES[row] for row in rows],
        "sequence_id": [f"s{row}" for row in rows],
        **columns,
    }
    with Recorder(folder) as recorder:
        recorder.write(step=1, **given)
    return folder


if __name__ == "__main__":  # write the files that a guide scores
    folder = FIXTURES / "tiny_model"
    make_dump(folder / "dump", expected(make_model(folder / "checkpoint"), 0.8))
