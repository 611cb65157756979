"""Write dumps from inside a training loop: files of the contract, one row per sequence.

    with Recorder("dumps/", run="moe-3") as recorder:
        recorder.write(step=3, rollout_log_probs=..., train_log_probs=..., response_mask=..., reward=...)

It runs where the trainer runs, so this room needs numpy and pyarrow and nothing else, of ours neither; torch
tensors are recognized by what they can do. docs/recording.md says what is kept when, and what was measured.
"""

from mismatchctl.recorder.recorder import Recorder

__all__ = ["Recorder"]
