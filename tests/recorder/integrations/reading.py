"""Read the sequences of a dump with mismatchctl's own reader."""

from pathlib import Path
from typing import Any

from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import open_dump


def recorded(folder: Path, columns: tuple[str, ...], problems: Problems | None = None) -> list[dict[str, Any]]:
    dump = open_dump([str(folder)], wanted=columns, on_bad="skip" if problems is not None else "error")
    found: list[dict[str, Any]] = []
    numbers: dict[tuple[Any, Any], int] = {}
    for unit in dump.units:
        for batch in dump.read(unit, problems if problems is not None else Problems()):
            ids = dump.token_ids(int(batch.file[0]), batch.rows.tolist()) if "token_ids" in columns else {}
            for row in range(len(batch)):
                one = batch.sequences(row, row + 1)
                step = one.columns["step"][0]
                record = {"step": int(step), "rollout": one.rollout.tolist(), "train": one.train.tolist()}
                for name in columns:
                    if name == "token_ids":
                        record[name] = ids[int(one.rows[0])].tolist()
                    elif name == "advantages":
                        record[name] = one.advantages.tolist() if one.advantages is not None else None
                    elif name == "prompt_id":
                        seen = sum(1 for known in numbers if known[0] == step)
                        record[name] = numbers.setdefault((step, one.columns[name][0]), seen)
                    else:
                        record[name] = float(one.columns[name][0])
                found.append(record)
    return found
