"""Fuzz cases for lists of likely tokens, reference columns, joined files, checkpoints, and options.

These cases have their own random stream, so that the seeds of other kinds keep their cases.
"""

import json
import os
import random
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.factories.dumps import make_dump
from tests.reliability.fuzzing import NASTY, Case
from tests.reliability.fuzzing_commands import VerbMaker

SHARE = 0.15
"""Share of these cases."""
COUNTS = (
    "0",
    "-1",
    "1",
    "2",
    "1e3",
    "0x1",
    "nan",
    "inf",
    "",
    " 1",
    "٣",
    "1.5",
    str(2**31),
    str(2**63),
    str(10**30),
    "x",
)
NUMBERS = (
    ("advise", "--threads"), ("analyze", "--threads"), ("analyze", "--micro-batch-size"), ("advise", "--batch"),
    ("advise", "--min-ess"), ("advise", "--max-rejection"), ("sweep", "--target-ess"), ("sweep", "--batch"),
    ("sweep", "--at-length"), ("sweep", "--target-rejection"), ("sweep", "--geo"), ("gate", "--level"),
    ("gate", "--max-skipped"), ("watch", "--until-idle"),
)  # fmt: skip
"""Commands and their options with numbers, times and shares."""
PLACES = (
    ("analyze",), ("report",), ("lint",), ("schema", "--check"), ("compare", "a.parquet"), ("gate",),
    ("analyze", "a.parquet", "-c"), ("analyze", "a.parquet", "--config"), ("analyze", "a.parquet", "--baseline"),
    ("analyze", "a.parquet", "--framework", "verl", "--against"), ("analyze", "a.parquet", "-q", "-o"),
    ("analyze", "a.parquet", "-q", "--sequences"), ("analyze", "a.parquet", "-q", "--figures"),
    ("analyze", "a.parquet", "--tokens", "out/t.html", "--tokenizer"),
    ("analyze", "a.parquet", "--tokens", "out/t.html", "--browse"), ("diagnose", "a.parquet", "--layers"),
    ("diagnose", "a.parquet", "--replay"), ("gate", "a.parquet", "--rule", "k3:max=1", "--baseline"),
    ("gate", "a.parquet", "--rule", "k3:max=1", "--junit"),
    ("gate", "a.parquet", "--rule"), ("sweep", "a.parquet", "-q", "-o"),
    ("convert", "a.parquet", "out/c.parquet", "--join"), ("convert", "a.parquet"), ("advise", "a.parquet", "-o"),
    ("score", "model", "a.parquet", "-o"),
)  # fmt: skip
"""Commands that end with a path."""

NOWHERE = (
    "fifo.json", "loop", "dangling.json", "empty.json", "deep.json", "wide.csv", "nul.csv", "utf16.jsonl", "/dev/zero",
    "/dev/null", "/dev/full", ".", "out", "a.parquet", "a.parquet/x", "missing/x.json", "~", "-", "x" * 300,
    "http://x/y", "s3://", "file:///a", "\udcff.json", "*", "a.parquet:0:0", "a.parquet:1e3",
)  # fmt: skip
"""Paths that do not exist or have an unusual type."""


class FlagMaker(VerbMaker):
    def case(self) -> Case:
        apart = random.Random(f"{self.seed} apart")
        if apart.random() >= SHARE:
            return super().case()
        makes: list[tuple[Callable[[], Case], int]] = [
            (self.lists, 6), (self.reference, 4), (self.joined, 6), (self.scored, 1), (self.number, 5), (self.place, 6),
        ]  # fmt: skip
        return apart.choices([make for make, _ in makes], [weight for _, weight in makes])[0]()

    def grown(self, name: str, columns: dict[str, Callable[[int], Any]]) -> str:
        table = pq.read_table(make_dump(self.folder / name, rows=self.rng.choice([4, 16])))
        for key, of in columns.items():
            rows = [of(len(row)) for row in table.column("rollout_log_probs").to_pylist()]
            table = table.append_column(key, column(rows))
        pq.write_table(table, self.folder / name)
        return name

    def asked(self, name: str) -> list[str]:
        verbs = (["analyze", name, "--json"], ["diagnose", name, "--json"], ["schema", "--check", name],
                 ["advise", name, "--json"], ["analyze", name, "-q", "--by", "prompt_id", "-o", "out/r.json"],
                 ["compare", name, name, "--json"], ["gate", name, "--rule", "k3:max=1", "--json"],
                 ["sweep", name, "-c", "token_tis", "--vary", "weight.truncate=1.5:3:3", "--json"],
                 ["convert", name, "out/c.parquet"])  # fmt: skip
        return self.rng.choice(verbs)

    def lists(self) -> Case:
        size = self.rng.choice([0, 1, 3, 3, 20, 2000])
        one: Any = self.rng.choice([*NASTY, -0.5, -1.0])
        ids = self.rng.choice([[7] * size, [*range(size)], [-1, 2**31 - 1], [1.5], ["1"], [None], [[1]], None, one])
        values = self.rng.choice([[-1.0 - n for n in range(size)], [5.0, 700.0, 1e300], [-0.01] * size, [float("nan")],
                                  [None, -1.0], ["a"], [[1.0]], None, [one], one])  # fmt: skip
        columns: dict[str, Callable[[int], Any]] = {
            "rollout_top_ids": lambda length: [ids] * length,
            "rollout_top_log_probs": lambda length: [values] * (length - self.rng.choice([0, 0, 0, 0, 0, 1])),
            "train_top_log_probs": lambda length: [[-1.0 - n for n in range(size)]] * length,
            "token_ids": lambda length: [*range(length)],
        }
        kept = {key: of for key, of in columns.items() if self.rng.random() < 0.9}
        return Case("lists of tokens", self.asked(self.grown("top.parquet", kept)))

    def reference(self) -> Case:
        one: Any = self.rng.choice([*NASTY, -0.5, -1e4, -1e300])
        of = self.rng.choice([lambda length: [one] * length, lambda length: [one, *[-1.0] * (length - 1)],
                              lambda length: [-1.0] * (length - 1), lambda length: one])  # fmt: skip
        key = self.rng.choice(["reference_log_probs", "reference_log_probs", "ref_log_probs", "current_log_probs"])
        return Case("third column", self.asked(self.grown("third.parquet", {key: of})))

    def joined(self) -> Case:
        rows = range(16)
        plain = pa.array(rows)
        pairs = (plain, plain, plain, pa.array(map(str, rows)), pa.array([1] * 16), pa.array([float("nan")] * 16),
                 pa.array([2**63 + n for n in rows], pa.uint64()), pa.array([n % 2 == 0 for n in rows]), pa.nulls(16),
                 pa.array([[n] for n in rows]), pa.array(map(float, rows)))  # fmt: skip
        for name, columns in (("a", {}), ("b", {"reward": NASTY, "reference_log_probs": NASTY, "worker": NASTY})):
            table = pq.read_table(make_dump(self.folder / f"{name}.parquet", rows=16))
            table = table.append_column("sequence_id", self.rng.choice(pairs))
            for key, values in columns.items():
                one: Any = self.rng.choice([*values, [-1.0] * 32, [-1.0], {"a": 1}])
                table = table.append_column(key, column([one] * 16))
            pq.write_table(table, self.folder / f"{name}.parquet")
        target = self.rng.choice(["out/c.parquet"] * 6 + ["a.parquet", "b.parquet", "out"])
        force = ["--force"] if self.rng.random() < 0.3 else []
        return Case("joined", ["convert", "a.parquet", target, "--join", "b.parquet", *force])

    def scored(self) -> Case:
        model = self.folder / "model"
        model.mkdir()
        config: Any = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 4,
                       "auto_map": {"AutoModelForCausalLM": "evil.M"}}  # fmt: skip
        self.exchange(config)
        (model / "config.json").write_text(json.dumps(config))
        (model / "evil.py").write_text("open('MARK', 'w')")
        sizes = self.rng.choice([2, 2**40, 2**62, 0])
        (model / "model.safetensors").write_bytes(struct.pack("<Q", sizes) + self.spoilt(b'{"a":{"dtype":"F32"}}'))
        name = self.grown("a.parquet", {key: lambda n: [*range(n)] for key in ("prompt_token_ids", "token_ids")})
        if self.rng.random() < 0.3:
            (model / self.rng.choice(["config.json", "model.safetensors"])).unlink()
        return Case("checkpoint", ["score", "model", name, "-o", self.rng.choice(["out/s", "out/s", "model", "."])])

    def number(self) -> Case:
        make_dump(self.folder / "a.parquet", rows=8)
        verb, flag = self.rng.choice(NUMBERS)
        value = self.rng.choice([*COUNTS, *(count + "s" for count in COUNTS[:4])])
        more = {"gate": ["--rule", "k3:max=1"], "convert": ["out/c.parquet"], "watch": ["--rule", "k3:max=1e-9"]}
        return Case("flag of a number", [verb, "a.parquet", *more.get(verb, ["--json"]), f"{flag}={value}"])

    def place(self) -> Case:
        make_dump(self.folder / "a.parquet", rows=8)
        os.mkfifo(self.folder / "fifo.json")
        os.symlink("loop", self.folder / "loop")
        os.symlink("nowhere.json", self.folder / "dangling.json")
        (self.folder / "empty.json").write_bytes(b"")
        (self.folder / "deep.json").write_text('{"a":' * 3000 + "1" + "}" * 3000)
        (self.folder / "wide.csv").write_text("step," + ",".join(f"c{n}" for n in range(5000)) + "\n1" + ",1" * 5000)
        (self.folder / "nul.csv").write_bytes(b'step,rollout_corr/k3_kl\n1,\0\n"unterminated')
        (self.folder / "utf16.jsonl").write_bytes('{"step": 1}'.encode("utf-16"))
        return Case("path", [*self.rng.choice(PLACES), self.rng.choice(NOWHERE)])


def column(rows: list[Any]) -> pa.Array:
    try:
        made = pa.array(rows)
        pq.write_table(pa.table({"x": made}), pa.BufferOutputStream())
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return pa.array([repr(row)[:100] for row in rows])
    return made
