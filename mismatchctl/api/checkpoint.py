"""A local transformers checkpoint that computes the log-probs of one sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from mismatchctl.core.batch import Float64s, Ints
from mismatchctl.errors import ConfigError
from mismatchctl.io.stores import first_error_line

_INSTALL_HINT = "scoring needs transformers and torch. Install them with: pip install 'mismatchctl[score]'"
try:
    import torch
except ModuleNotFoundError:
    raise ConfigError(_INSTALL_HINT) from None
except Exception as error:  # a broken installation may raise any error
    raise ConfigError(f"scoring needs torch, but torch cannot be imported ({first_error_line(error)})") from error

CheckpointDtype = Literal["float32", "float64"]
POSITIONS_PER_BLOCK = 512
"""Number of positions whose logits are computed at once. The logits of a whole sequence may not fit into memory."""


class Checkpoint:
    """A causal language model that scores one sequence at a time, without padding."""

    def __init__(self, folder: Path, dtype: CheckpointDtype = "float32", device: str = "cpu") -> None:
        """Load a local checkpoint without a download. Python code in the checkpoint does not run."""
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(_INSTALL_HINT) from error
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        try:
            model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                output_loading_info=True,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
        except Exception as error:  # transformers may raise any error for a bad configuration
            raise ConfigError(
                f"{folder}: transformers cannot load this checkpoint: {_load_error_text(error)}"
            ) from error
        if lacking := sorted(loaded["missing_keys"]):  # transformers fills missing weights with random numbers
            raise ConfigError(
                f"{folder}: the checkpoint lacks {len(lacking)} weights that config.json requires, such as {lacking[0]}"
            )
        self._device = _choose_device(device)
        self._model = model.to(self._device).eval()
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._limit: int | None = getattr(model.config, "max_position_embeddings", None)

    def log_probs(self, prompt: Ints, response: Ints, temperature: float) -> Float64s:
        """Return the log-prob of each response token in nats [T]. Logits are converted to float64."""
        if not len(response):
            return np.empty(0)
        ids = torch.as_tensor(np.concatenate([prompt, response])[None], device=self._device)
        if self._limit is not None and ids.shape[1] > self._limit:
            raise ValueError(f"{ids.shape[1]:,} tokens with the prompt, but the model takes at most {self._limit:,}")
        targets, found = ids[0, len(prompt) :, None], []
        with torch.inference_mode():
            for part, logits in self._logits(ids[:, :-1], len(prompt) - 1):
                scaled = torch.log_softmax(logits.double() / temperature, dim=-1)
                first = part.start + 1 - len(prompt)
                found.append(scaled.gather(-1, targets[first : first + len(scaled)]).cpu().numpy())
        values: Float64s = np.concatenate(found)[:, 0]
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"the model gives no finite log-prob to token {place}")
        return values

    def _logits(self, ids: torch.Tensor, first: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Compute logits from position `first` on, in blocks to save memory. Yield (positions of a block, logits)."""
        body = self._model.base_model
        hidden = body(input_ids=ids, use_cache=False)  # all layers except the head, which computes logits
        for start in range(first, ids.shape[1], POSITIONS_PER_BLOCK):
            part = slice(start, min(start + POSITIONS_PER_BLOCK, ids.shape[1]))
            answer = type(hidden)(last_hidden_state=hidden.last_hidden_state[:, part])
            body.forward = lambda *given, known=answer, **named: known  # so that `_model` only runs its head
            try:
                logits = self._model(input_ids=ids[:, part], use_cache=False).logits[0]
            finally:
                del body.forward
            yield part, logits


def _load_error_text(error: Exception) -> str:
    if "ignore_mismatched_sizes" in str(error):
        return "the weights do not have the shapes in config.json"
    first_line, *more = str(error).split("\n")
    return f"{first_line} {more[0].strip()}" if first_line.endswith(":") and more else first_error_line(error)


def _choose_device(name: str) -> torch.device:
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: this device is not available: {first_error_line(error)}") from error
    return device
