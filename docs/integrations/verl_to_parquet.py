"""Writes batches that verl saved as Parquet that mismatchctl reads. Run it where verl runs.

    python verl_to_parquet.py dumps/ FILE...

FILE is what `DataProto.save_to_disk` wrote after advantages were computed, or a `tq_batch.pt` of the TransferQueue.
Both are pickles: opening one runs what it says, so open only what your own runs wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatchctl.recorder.recorder import Recorder

PER_TOKEN = {
    "response_mask": ("loss_mask", "response_mask"),  # only the second one is changed by rejection sampling
    "token_ids": ("responses",),
    "ref_log_probs": ("ref_log_prob",),
    "advantages": ("advantages",),
}


def load(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], Any]:
    """Tensors by name, columns that are none, and the training step of one file."""
    if path.suffix == ".pt":
        import torch

        saved = torch.load(path, map_location="cpu", weights_only=False)
        return saved["tensordict"], {}, saved["global_steps"]
    from verl import DataProto

    data = DataProto.load_from_disk(path)
    return data.batch, data.non_tensor_batch, data.meta_info.get("global_steps", path.parent.name)


def main(out: str, *files: str) -> None:
    """Write each file's batch to the folder `out`."""
    with Recorder(out) as recorder:
        for path in map(Path, files):
            tensors, others, step = load(path)
            has = set(tensors.keys())
            if missing := {"rollout_log_probs", "old_log_probs"} - has:
                sys.exit(f"{path}: holds no {' and no '.join(sorted(missing))}: save it after the trainer has them")
            found = {name: [one for one in names if one in has] for name, names in PER_TOKEN.items()}
            rest = {name: tensors[names[0]] for name, names in found.items() if names}
            uid = others.get("uid") if "uid" in others else tensors.get("uid") if "uid" in has else None
            if uid is not None:  # in a TensorDict, `get` gives what has a tolist, and [] may not
                rest["prompt_id"] = list(map(str, uid.tolist() if hasattr(uid, "tolist") else uid))
            scores = {"rollout_log_probs": tensors["rollout_log_probs"], "train_log_probs": tensors["old_log_probs"]}
            print(recorder.write(step=int(step), **scores, **rest))


if __name__ == "__main__":
    main(*sys.argv[1:])
