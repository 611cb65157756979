"""Compare Arrow files with Parquet: file size, bare decode, reading with all checks, and analysis.

    python benchmarks/formats.py --write benchmarks/results.md

Each case runs in a fresh process on one thread, and the cases are interleaved. The files are in the page cache. Writes
the section "Parquet and Arrow".
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from analyze import load_loops
from measure import COLUMNS, make_dump, make_parser, measure_rounds, publish, report_cost, table

ROOT = Path(__file__).parent.parent
PARQUET = "Parquet, as the recorder writes it"
FORMATS = {PARQUET: "parquet", "Arrow, lz4": "lz4", "Arrow, zstd": "zstd", "Arrow, not compressed": "none"}
DECODE, READ, ANALYZE = "decode", "read", "analyze"
CASES = (DECODE, READ, ANALYZE)


def convert(source: Path, target: Path, compression: str) -> None:
    """Write the dump as Arrow files, with one record batch per row group."""
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
    for file in sorted(source.iterdir()):
        parquet = pq.ParquetFile(file)
        with pa.ipc.new_file(target / f"{file.stem}.arrow", parquet.schema_arrow, options=options) as writer:
            for group in range(parquet.num_row_groups):
                writer.write_table(parquet.read_row_group(group))


def run_case(case: str, folder: Path) -> None:
    """Run one case in this process and print its cost."""
    from mismatchctl.api.analyze.analyze import analyze
    from mismatchctl.data.problems import Problems
    from mismatchctl.data.reader import open_dump

    if case == ANALYZE:
        analyze([str(ROOT / "sample_data" / "dense")], [])
        load_loops()
    with report_cost():
        if case == DECODE:
            decode(folder)
        elif case == READ:
            dump = open_dump([str(folder)])
            for unit in dump.units:
                for _ in dump.read(unit, Problems()):
                    pass
        else:
            analyze([str(folder)], [], threads=1)


def decode(folder: Path) -> None:
    """Decode the two columns of every row group with pyarrow."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".parquet":
            parquet = pq.ParquetFile(path)
            for group in range(parquet.num_row_groups):
                parquet.read_row_group(group, columns=list(COLUMNS), use_threads=False)
        else:
            fields = [pa.ipc.open_file(str(path)).schema.get_field_index(name) for name in COLUMNS]
            options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            with pa.OSFile(str(path)) as file:
                reader = pa.ipc.open_file(file, options=options)
                for group in range(reader.num_record_batches):
                    reader.get_batch(group)


def comparison_table(folders: dict[str, Path], tokens: int, repeat: int) -> str:
    cases = {f"{case} {name}": ("--case", case, "--folder", folders[name]) for name in folders for case in CASES}
    rounds = measure_rounds(__file__, cases, repeat)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    heads = (
        "format", "bytes per token", "decode, relative to Parquet", "read, relative to its decode",
        "read, relative to Parquet", "analyze, relative to Parquet", "analyze, peak memory, MB",
    )  # fmt: skip
    rows = []
    for name, folder in folders.items():
        size = sum(file.stat().st_size for file in folder.iterdir()) / tokens
        memory = rounds.median("memory", f"{ANALYZE} {name}")
        ratios = ((DECODE, DECODE, PARQUET), (READ, DECODE, name), (READ, READ, PARQUET), (ANALYZE, ANALYZE, PARQUET))
        cells = (rounds.spread("wall", f"{case} {name}", f"{other} {format_}") for case, other, format_ in ratios)
        rows.append((name, f"{size:.2f}", *cells, f"{memory:,.0f}"))
    title = f"{tokens / 1e6:.3g} M tokens, {repeat} rounds; load at the end: {load}"
    return f"{title}\n\n{table(heads, rows)}"


def main() -> None:
    given = make_parser(__doc__, 30e6, 5).parse_args()
    if given.case:
        run_case(given.case, given.folder)
        return
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place) / kind for name, kind in FORMATS.items()}
        for folder in folders.values():
            folder.mkdir()
        tokens = make_dump(folders[PARQUET], int(given.tokens), 2500)
        for name, kind in FORMATS.items():
            if name != PARQUET:
                convert(folders[PARQUET], folders[name], kind)
        publish(HEAD + comparison_table(folders, tokens, given.repeat), given.write)


HEAD = f"""## Parquet and Arrow

`benchmarks/formats.py` on {os.cpu_count()} cores, one thread: fresh processes, interleaved, medians [least,
most] of ratios within a round. *Decode* is pyarrow alone on two columns. *Read* adds checksums, offsets and
the check of every value. *Analyze* computes the report without corrections.

"""


if __name__ == "__main__":
    main()
