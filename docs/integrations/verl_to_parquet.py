"""Convert batches that verl saved to Parquet files for mismatchctl. Run this script in an environment with verl.

    python verl_to_parquet.py dumps/ FILE...

FILE is a file that `DataProto.save_to_disk` wrote after the trainer computed its log-probs, or the file `tq_batch.pt`
of the TransferQueue. These files are pickles, and a pickle can contain code that Python runs when it opens the file.
Therefore only open files of your own runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatchctl.recorder.recorder import Recorder

PER_TOKEN = {
    "response_mask": ("loss_mask", "response_mask"),  # rejection sampling changes response_mask, not loss_mask
    "token_ids": ("responses",),
    "ref_log_probs": ("ref_log_prob",),
    "advantages": ("advantages",),
}


def load(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], Any]:
    """Return the tensors of a file by name, its columns that are not tensors, and its training step."""
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
                absent = " and no ".join(sorted(missing))
                sys.exit(f"{path}: contains no {absent}. Save the batch after the trainer computed its log-probs")
            found = {name: [one for one in names if one in has] for name, names in PER_TOKEN.items()}
            rest = {name: tensors[names[0]] for name, names in found.items() if names}
            uid = others.get("uid") if "uid" in others else tensors.get("uid") if "uid" in has else None
            if uid is not None:  # in a TensorDict, `get` returns an object with `tolist`. [] may return another object
                rest["prompt_id"] = list(map(str, uid.tolist() if hasattr(uid, "tolist") else uid))
            scores = {"rollout_log_probs": tensors["rollout_log_probs"], "train_log_probs": tensors["old_log_probs"]}
            print(recorder.write(step=int(step), **scores, **rest))


if __name__ == "__main__":
    main(*sys.argv[1:])
