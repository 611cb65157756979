"""verl: everything that carries its name. One file per matter.

versions    which releases differ, and in what
keys        where its keys stand, and which nothing reads
dialect     its keys and threshold syntax -> Correction; plan: a Correction -> what verl does with it, and its keys
lint        traps of its configurations; written: a configuration as somebody wrote it
recognize   which release a configuration was written for
sample      the two policies, in verl's dtype; subjects: the quantities made of them
metrics     the logged names, each a quantity, what it is taken over, and a reduction; names: the same in words
helper      weights, mask and logged values of a batch; debug: training/rollout_*; losses: with verl's denominators
replay      its column names, and what a version computes and logs for the rows of a step
factories   its RolloutCorrectionConfig as it is called in Python; presets.yaml: the same with their defaults
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mismatchctl.errors import DataError
from mismatchctl.frameworks.framework import Shelf
from mismatchctl.frameworks.layout import File, Layout, Row
from mismatchctl.frameworks.verl.factories import CLASS, factory_keys, keys_of
from mismatchctl.frameworks.verl.recognize import recognize
from mismatchctl.frameworks.verl.replay import Verl
from mismatchctl.frameworks.verl.versions import VERSIONS, find_version


def _rows(file: File) -> Iterator[Row]:
    raise DataError(
        "is a pickle of verl's and tensordict's classes, and nothing in a file is executed",
        file=str(file.path),
        remedy="run docs/integrations/verl_to_parquet.py on it where verl is installed",
    )


LAYOUT = Layout(
    framework="verl",
    columns={
        "rollout_log_probs": "rollout_log_probs",
        "train_log_probs": "old_log_probs",
        "response_mask": "loss_mask, else response_mask",
        "token_ids": "responses",
        "ref_log_probs": "ref_log_prob",
        "advantages": "advantages",
    },
    padding="right",
    mask="1 on sampled tokens; rejection sampling writes its result into response_mask, not into loss_mask",
    patterns=("*.dp", "tq_batch.pt"),
    rows=_rows,
)


SHELF = Shelf(
    name="verl",
    versions=tuple(version.name for version in reversed(VERSIONS)),
    load=lambda version: Verl(find_version(version)),
    recognize=recognize,
    presets=Path(__file__).with_name("presets.yaml"),
    columns=Verl.columns,
    layouts=(LAYOUT,),
    classes={CLASS: keys_of},
    factory=factory_keys,
    compared=("token_tis", "seq_mis", "geo_rs"),
)
