"""Adapter of Miles, a fork of slime, with its own dump files. All other code is shared with slime."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.errors import DataError
from mismatchctl.frameworks.adapter import File, Row, read_layout, to_array
from mismatchctl.frameworks.slime import Slime, check_complete, take_response
from mismatchctl.frameworks.slime.arguments import make_adapter, recognize
from mismatchctl.io.parquet_footer import check_footer


def _read_rows(file: File) -> Iterator[Row]:
    content = file.torch()
    for number, sample in enumerate(content["samples"]):
        row = {name: to_array(value) for name, value in sample.items()}
        have, remedy = len(row["old_log_probs"]), "convert train_data instead, because its slices can be joined"
        check_complete(file, number, have, int(row["response_length"]), remedy)
        # Samples have no id, so use a checksum. Tensor-parallel copies have equal values, data-parallel ranks do not.
        values = crc32(row["old_log_probs"].tobytes())
        name = f"{content['call']}:{row['index']}:{values:08x}"
        yield {**row, "sequence_id": name, "micro_batch": f"{content['rank']}:{content['call']}"}


LAYOUT = read_layout(__file__, "miles-policy-loss", _read_rows)


def _read_dashboard_rows(file: File) -> Iterator[Row]:
    if file.path.name.startswith("rollout_eval_"):
        return  # evaluation data, which is not trained on
    try:
        with pa.OSFile(str(file.path)) as place:
            check_footer(place)
            for batch in pq.ParquetFile(place).iter_batches(256):
                for row in batch.to_pylist():
                    response = take_response(row["tokens"], row["response_length"], row["loss_mask"])
                    yield {**row, **response, "step": file.step, "sequence_id": row["sample_index"]}
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"this is not a Parquet file: {str(error).splitlines()[0]}", file=str(file.path)) from error


DASHBOARD_LAYOUT = read_layout(__file__, "miles-dashboard", _read_dashboard_rows)

ADAPTER = make_adapter(
    "miles",
    Slime,
    recognize=lambda native: None if recognize(native) is None else "",  # a version of slime is not one of Miles
    layouts=(LAYOUT, DASHBOARD_LAYOUT),
)
