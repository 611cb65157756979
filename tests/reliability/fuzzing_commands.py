"""Fuzz cases for commands with other inputs than a dump: logs, layer reports, saved results, and token
pages.
"""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from tests.factories.protobuf import varint
from tests.reliability.fuzzing import FRAMEWORKS, HERE, NASTY, PAGES, Case, Maker

RESULT = HERE / "result.json"
REPORTS = FRAMEWORKS / "comparators"
SAVED: dict[str, bytes] = {}
"""JSON outputs of commands by file name, which the runner of the cases makes once."""
SAVING = {
    "sweep.json": ("sweep", "a.parquet", "-c", "token_tis", "--vary", "weight.truncate=1.5:3:3"),
    "compare.json": ("compare", "a.parquet", "b.parquet"),
    "advise.json": ("advise", "a.parquet"),
    "diagnose.json": ("diagnose", "a.parquet"),
    "gate.json": ("gate", "a.parquet", "--rule", "k3:max=1", "--json"),
}


class VerbMaker(Maker):
    def kinds(self) -> list[tuple[Callable[[], Case], int]]:
        mine = [(self.log, 3), (self.layers, 2), (self.saved, 3), (self.tokens, 2), (self.watched, 1)]
        return [*super().kinds(), *mine]

    def log(self) -> Case:
        name = self.written(self.columns(odd=False) | {}, "dump", small_pages=False)
        rows = [
            {"step": step, "rollout_corr/k3_kl": 0.001 * step, "actor/kl": float(self.noise.random()), "note": "x"}
            for step in range(3)
        ]
        suffix = self.rng.choice(["jsonl", "csv", "tfevents"])
        path = self.folder / ("events.out.tfevents.1.host" if suffix == "tfevents" else f"log.{suffix}")
        if suffix == "jsonl":
            self.exchange(rows)
            text = "\n".join(json.dumps(row) for row in rows)
        elif suffix == "csv":
            cells = [[*rows[0]], *([str(value) for value in row.values()] for row in rows)]
            cells[self.rng.randrange(len(cells))][self.rng.randrange(4)] = str(self.rng.choice(NASTY))
            text = "\n".join(self.rng.choice([",", ",", ";", "\t"]).join(row) for row in cells)
        content = self.events(rows) if suffix == "tfevents" else text.encode(errors="surrogatepass")
        path.write_bytes(self.spoilt(content) if self.rng.random() < 0.3 else content)
        framework = self.rng.choice(["verl", "slime", "trl"])
        return Case("log of a run", ["analyze", name, "--framework", framework, "--against", path.name, "--json"])

    def events(self, rows: list[dict[str, Any]], known: int = 1) -> bytes:
        """Write records of TensorBoard, some of them wrong. `known` is the share of known metric names."""
        made = b""
        for row in rows:
            name = str(self.rng.choice(("rollout_corr/k3_kl",) * known + NASTY)).encode(errors="replace")[:100]
            value = b"\x0a" + varint(len(name)) + name + b"\x15" + struct.pack("<f", row["actor/kl"])
            summary = b"\x0a" + varint(len(value)) + value
            record = b"\x10" + varint(row["step"]) + b"\x2a" + varint(len(summary)) + summary
            record = self.spoilt(record) if self.rng.random() < 0.4 else record
            head = struct.pack("<Q", self.rng.choice([len(record), len(record), len(record), 2**63, 0]))
            made += head + struct.pack("<I", masked_crc32c(head)) + record + struct.pack("<I", masked_crc32c(record))
        return made

    def layers(self) -> Case:
        path = self.rng.choice(sorted(path for path in REPORTS.rglob("*") if path.is_file() and path.parent != REPORTS))
        content = path.read_bytes()
        place = self.folder / path.name
        lines = content.decode(errors="replace").splitlines()
        at = self.rng.randrange(len(lines)) if lines else 0
        try:
            data = [json.loads(lines[at])] if path.suffix == ".jsonl" else [json.loads(content)]
        except (ValueError, IndexError):
            data = []
        if data and self.rng.random() < 0.7:
            self.exchange(data)
            text = json.dumps(data[0] if data else None)
            content = "\n".join([*lines[:at], text, *lines[at + 1 :]] if path.suffix == ".jsonl" else [text]).encode()
        else:
            content = self.spoilt(content)
        place.write_bytes(content)
        name = self.written(self.columns(odd=False), "dump")
        return Case("report of layers", ["diagnose", name, "--layers", place.name, "--json"])

    def saved(self) -> Case:
        name = self.rng.choice([*SAVED])
        data = json.loads(SAVED[name])
        for _ in range(self.rng.choice([1, 1, 3])):
            self.exchange(data)
        content = json.dumps(data).replace('"1e999"', "1e999").encode()
        (self.folder / name).write_bytes(self.spoilt(content) if self.rng.random() < 0.15 else content)
        shutil.copy(RESULT, self.folder / "ok.json")
        argv = ["report", name, *(["ok.json"] if self.rng.random() < 0.3 else [])]
        page = self.rng.random() < 5 * PAGES
        return Case("saved by a verb", [*argv, *(["--html", "out/r.html"] if page else ["--markdown", "-"])])

    def tokens(self) -> Case:
        columns = self.columns(odd=self.rng.random() < 0.5)
        if "token_ids" not in columns:
            lengths = (
                [len(row or []) for row in columns["rollout_log_probs"].to_pylist()]
                if pa.types.is_list(columns["rollout_log_probs"].type)
                else []
            )
            columns |= {"token_ids": pa.array([list(range(n)) for n in lengths])} if lengths else {}
        pq.write_table(pa.table(columns), self.folder / "dump.parquet")
        vocabulary: Any = {"model": {"type": "BPE", "vocab": {f"t{n}": n for n in range(12)}, "merges": []}}
        self.exchange(vocabulary)
        (self.folder / "tokenizer.json").write_text(json.dumps(vocabulary))
        words = self.rng.choice(["tokenizer.json", "bytes", "ids", str(self.rng.choice(NASTY))])
        words = words.encode(errors="replace").decode().replace("\0", "")
        row = self.rng.choice(["0", "0", "1", "99", "-1", "x", str(2**70)])
        browse = ["--browse", f"dump.parquet:{row}"] if self.rng.random() < 0.7 else []
        return Case("tokens", ["analyze", "dump.parquet", "--tokens", "out/t.html", "--tokenizer", words, *browse])

    def watched(self) -> Case:
        name = self.written(self.columns(odd=self.rng.random() < 0.5), "dump")
        if self.rng.random() < 0.4:
            path = self.folder / name
            path.write_bytes(self.spoilt(path.read_bytes()))
        rule = ["--rule", "k3:max=1"] if self.rng.random() < 0.5 else []
        return Case("under watch", ["watch", name, "--until-idle", "0.01s", "--every", "0.01s", *rule])


def save(run: Callable[[Path, tuple[str, ...]], str], folder: Path) -> None:
    for name, argv in SAVING.items():
        if name not in SAVED:
            out = () if "--json" in argv else ("-o", name)
            printed = run(folder, (*argv, *out))
            SAVED[name] = (folder / name).read_bytes() if out else printed.encode()
