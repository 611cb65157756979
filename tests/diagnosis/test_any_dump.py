"""Any dump can be diagnosed: findings are valid JSON for all values, masks, columns and layouts."""

import math
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatchctl.api.diagnose import diagnose
from mismatchctl.errors import DataError
from mismatchctl.results.model import Finding
from tests.factories.random_dumps import Files, Shape, make_rows, shapes, write

ANYTHING = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.5, -9999.0, 1.0, math.nan, -math.inf, math.inf]),
    st.floats(-20, 0, width=32),
)
TOKEN = st.tuples(ANYTHING, ANYTHING, st.booleans())


def diagnosed(folder: Path) -> list[Finding]:
    return [finding for findings in diagnose([str(folder)], threads=1).runs.values() for finding in findings]


@settings(max_examples=12, derandomize=True)
@given(shapes())
def test_random_dumps_can_be_diagnosed(shape: Shape) -> None:
    with tempfile.TemporaryDirectory() as place:
        files = Files(Path(place) / "dump", shape.row_group, shape.float32, shape.mask_type)
        for finding in diagnosed(write(make_rows(shape), files)):
            assert Finding.model_validate_json(finding.model_dump_json()) == finding


@settings(max_examples=12, derandomize=True)
@given(st.lists(st.lists(TOKEN, max_size=40), min_size=1, max_size=12), st.data())
def test_any_values_can_be_diagnosed(rows: list[list[tuple[float, float, bool]]], data: st.DataObject) -> None:
    columns = {
        "rollout_log_probs": [[token[0] for token in row] for row in rows],
        "train_log_probs": [[token[1] for token in row] for row in rows],
        "response_mask": [[token[2] for token in row] for row in rows],
        "step": data.draw(st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=len(rows), max_size=len(rows))),
        "worker": data.draw(st.lists(st.sampled_from(["a", "b", None]), min_size=len(rows), max_size=len(rows))),
    }
    types = {"step": pa.int64(), "worker": pa.string(), "response_mask": pa.list_(pa.bool_())}
    floats = pa.list_(data.draw(st.sampled_from([pa.float32(), pa.float64()])))
    table = pa.table({name: pa.array(values, types.get(name, floats)) for name, values in columns.items()})
    with tempfile.TemporaryDirectory() as place:
        pq.write_table(table, f"{place}/a.parquet")
        try:
            findings = diagnosed(Path(place))
        except DataError:
            assert not any(token[2] for row in rows for token in row)  # no valid token
            return
        for finding in findings:
            assert Finding.model_validate_json(finding.model_dump_json()) == finding


def test_missing_token_ids_can_be_diagnosed(tmp_path: Path) -> None:
    """Four samples of each prompt share a prefix, and some ids in it are missing."""
    random = np.random.default_rng(0)
    rollout = random.normal(-1.0, 0.3, (40, 24)).clip(-6, -0.01)
    ids = [[None if row % 5 == place else place // 8 for place in range(24)] for row in range(40)]
    columns = {
        "rollout_log_probs": rollout.tolist(),
        "train_log_probs": (rollout + random.normal(0, 0.01, rollout.shape)).clip(-6, -0.001).tolist(),
        "token_ids": [list(row) + [7] * (number == 3) for number, row in enumerate(ids)],  # of another length
        "prompt_id": [number // 4 for number in range(40)],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert diagnosed(tmp_path)


@pytest.mark.parametrize("kind", ["float16", "float64"])
def test_long_format_and_other_float_types_can_be_diagnosed(kind: str, tmp_path: Path) -> None:
    rows = 40
    total = 30 * rows
    sequence = [i // 30 for i in range(total)]
    values = pa.array([-0.1 - math.sqrt(i * 37 % 101) for i in range(total)], pa.float64())
    other = pa.array([value.as_py() + 0.01 * math.sin(i) for i, value in enumerate(values)], pa.float64())
    dtype = pa.type_for_alias("halffloat" if kind == "float16" else "double")
    table = pa.table(
        {
            "sequence_id": sequence,
            "position": [i % 30 for i in range(total)],
            "step": [0] * total,
            "rollout_log_probs": values.cast(dtype),
            "train_log_probs": other,
            "rollout_version": [i % 2 for i in range(total)],
        }
    )
    pq.write_table(table, tmp_path / "long.parquet", row_group_size=100)
    first = diagnosed(tmp_path)[0]
    assert first.cause == ("low_precision_logging" if kind == "float16" else "numerical_noise")


def test_rows_of_one_number_each_can_be_diagnosed(tmp_path: Path) -> None:
    """They look like running sums and a truncation, which together explain every token."""
    train = -np.random.default_rng(0).exponential(1.5, (8, 120))
    rollout = np.repeat(-75.0 - 3 * np.arange(8)[:, None], 120, axis=1)
    table = pa.table({"rollout_log_probs": rollout.tolist(), "train_log_probs": train.tolist()})
    pq.write_table(table, tmp_path / "a.parquet")
    assert "cumulative" in {finding.cause for finding in diagnosed(tmp_path)}
