"""Five small dumps for the screens: healthy, growing, MoE, padded, and thirty runs."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.factories import planted_causes as planted

GROWN_RUNS = (3, 17, 28)
"""Numbers of the runs whose mismatch grows."""


def write_screen_dumps(folder: Path) -> dict[str, list[str]]:
    planted.healthy().write(folder / "healthy.parquet")
    planted.growing(planted.healthy(), 1.0, 4).write(folder / "growing.parquet")
    planted.routing(planted.healthy("moe"), 0.02).write(folder / "moe.parquet")
    _write_padded(folder / "padded.parquet")
    (folder / "runs").mkdir()
    for number in range(30):
        dump = planted.healthy()
        rows = np.flatnonzero(dump.columns["prompt_id"] % 8 == number % 8)
        dump = dump.rows(rows)
        if number in GROWN_RUNS:
            dump = planted.growing(dump, 1.0, 4)
        dump.write(folder / "runs" / f"run{number:02d}.parquet")
    runs = [f"runs/run{number:02d}.parquet" for number in range(30)]
    return {name: [f"{name}.parquet"] for name in ("healthy", "growing", "moe", "padded")} | {"runs": runs}


def _write_padded(path: Path) -> None:
    dump = planted.healthy(steps=range(3))
    longest, ends = int(dump.lengths.max()), np.cumsum(dump.lengths)[:-1]
    table = {name: pa.array(values) for name, values in dump.columns.items()}
    for side in ("rollout_log_probs", "train_log_probs"):
        rows = [np.pad(row, (0, longest - len(row))) for row in np.split(dump.tokens[side], ends)]
        table[side] = pa.array(rows, pa.list_(pa.float32()))
    pq.write_table(pa.table(table), path)
