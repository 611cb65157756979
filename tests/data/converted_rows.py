"""Convert framework files and read the rows."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mismatchctl.data.conversion import convert_dump


def converted(source: Path, out: Path, **how: Any) -> list[dict[str, Any]]:
    convert_dump(source, out / "out.parquet", **how)
    rows: list[dict[str, Any]] = pq.read_table(out / "out.parquet").to_pylist()
    return rows
