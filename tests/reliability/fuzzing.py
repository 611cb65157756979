"""Fuzz cases, each made from its seed: a folder of inputs, a command, and the right answer if it is known.

Inputs are valid Parquet and Arrow files with unusual types, values, nulls and nesting, files with changed bytes,
footers and lengths, and configurations, Results, rules, options and framework files with a changed part.
"""

import copy
import json
import math
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

from tests.paths import FIXTURES

HERE = Path(__file__).parent
FRAMEWORKS = FIXTURES / "framework_dumps"
NASTY: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        "",
        " ",
        "\0",
        "nan",
        "NaN",
        "inf",
        "-inf",
        "1e999",
        "0x10",
        "1_000",
        "2020-13-45",
        "~",
        "=cmd()",
    ),
    *(
        "\u202egnp",
        "\u2028",
        "::error::x",
        "<script>alert(1)</script>",
        "[bold]x[/]",
        "a\nb",
        "x" * 3000,
        "é" * 40,
        "\ud83d",
    ),
    *(
        0,
        -1,
        1,
        2,
        2**31,
        2**63,
        -(2**63) - 1,
        10**30,
        0.0,
        -0.0,
        0.5,
        1e-320,
        1e308,
        -1e308,
        math.nan,
        math.inf,
        -math.inf,
    ),
    *([], {}, [[]], [None], {"": None}, [1, "a", None], {"a": {"b": {"c": []}}}, [[[[[[[[[[1]]]]]]]]]]),
)
"""Values that often break parsers, arithmetic and terminals."""
PAGES = 0.03
"""Share of cases with a page, because drawing figures takes ten times as long."""
SCALARS = (
    *(
        "!!timestamp x",
        "!!bool maybe",
        "!!int ''",
        "!!python/object:os.system x",
        "&a [*a]",
        "*b",
        "? x",
        "{",
        "[",
        "]",
    ),
    *(
        "- - - -",
        "2020-13-45",
        "1:2:3",
        "0o17",
        ".inf",
        "-.nan",
        "<<: *a",
        "|",
        ">",
        "%TAG",
        "---",
        "...",
        "\t",
        "\x07",
    ),
    *("1e400", "{a: 1, a: 2}", "!!set {a}", "!!binary x", "'", '"', "# x", "@x", "`x`", "null", "~", "yes"),
)


@dataclass
class Case:
    """One run of a command. `k3` is the mean K3 of all valid tokens if the input is valid."""

    kind: str
    argv: list[str]
    k3: float | None = None


@dataclass
class Maker:
    seed: int
    folder: Path
    rng: random.Random = field(init=False)
    noise: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng, self.noise = random.Random(self.seed), np.random.default_rng(self.seed)

    def case(self) -> Case:
        kinds = self.kinds()
        make = self.rng.choices([make for make, _ in kinds], [weight for _, weight in kinds])[0]
        return make()

    def kinds(self) -> list[tuple[Callable[[], Case], int]]:
        return [
            (self.sound, 2), (self.odd, 6), (self.damaged, 4), (self.config, 3), (self.result, 4), (self.foreign, 5),
            (self.flags, 3),
        ]  # fmt: skip

    # -- dumps

    def columns(self, odd: bool) -> dict[str, pa.Array]:
        """Draw columns of a few sequences. `odd` changes some types and values."""
        rows = self.rng.choice([1, 2, 7, 20])
        lengths = self.noise.integers(1, 12, rows)
        ends = np.cumsum(lengths)[:-1]
        rollout = -self.noise.exponential(1.0, lengths.sum()) - 1e-6
        train = np.minimum(rollout + 0.05 * self.noise.standard_normal(len(rollout)), -1e-9)
        if odd and self.rng.random() < 0.4:
            for values in (rollout, train):
                at = self.noise.integers(0, len(values), self.rng.randint(1, 3))
                values[at] = self.rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 7.5, -1e4, -1e300, -1e308, -5e-324])
        columns: dict[str, pa.Array] = {
            "rollout_log_probs": pa.array([list(part) for part in np.split(rollout, ends)]),
            "train_log_probs": pa.array([list(part) for part in np.split(train, ends)]),
        }
        if self.rng.random() < 0.7:
            mask = self.noise.random(len(rollout)) < self.rng.choice([0.0, 0.5, 0.9, 1.0]) if odd else rollout < -0.05
            columns["response_mask"] = pa.array([list(map(bool, part)) for part in np.split(mask, ends)])
        for name, values in {
            "step": self.noise.integers(0, 3, rows),
            "prompt_id": self.noise.integers(0, 4, rows),
            "sequence_id": np.arange(rows),
            "reward": self.noise.standard_normal(rows),
            "worker": np.array([f"w{i % 3}" for i in range(rows)]),
            "advantages": self.noise.standard_normal(rows),
        }.items():
            if self.rng.random() < 0.6:
                columns[name] = pa.array(values)
        if self.rng.random() < 0.3:
            columns["token_ids"] = pa.array([list(range(length)) for length in lengths])
        if odd:
            for _ in range(self.rng.randint(1, 3)):
                name = self.rng.choice(list(columns))
                columns[name] = self.exchanged(columns[name], rows)
        return columns

    def exchanged(self, column: pa.Array, rows: int) -> pa.Array:
        nested = pa.types.is_list(column.type)
        if self.rng.random() < 0.5:
            target = self.rng.choice(
                [pa.float16(), pa.float32(), pa.float64(), pa.int8(), pa.uint64(), pa.int64(), pa.string(), pa.bool_()]
            )
            shapes = [pa.list_, pa.large_list] if nested else [lambda kind: kind]
            try:
                return column.cast(self.rng.choice(shapes)(target), safe=False)
            except (pa.ArrowException, ValueError):
                return column
        choices: list[Callable[[], pa.Array]] = [
            lambda: pa.nulls(rows),
            lambda: pa.array([self.rng.choice([None, 1, 2]) for _ in range(rows)], pa.int64()),
            lambda: pa.array(
                [self.rng.choice([None, 0.5, np.nan, np.inf, 1e300, 3.0]) for _ in range(rows)], pa.float64()
            ),
            lambda: pa.array([str(self.rng.choice(NASTY))[:50].encode(errors="replace").decode() for _ in range(rows)]),
            lambda: pa.array([b"\xff\xfe" for _ in range(rows)], pa.binary()),
            lambda: pa.array([[None, 1.0][: self.rng.randint(0, 2)] for _ in range(rows)], pa.list_(pa.float64())),
            lambda: pa.array([[[1.0], []] for _ in range(rows)]),
            lambda: pa.array([{"a": 1, "b": None} for _ in range(rows)]),
            lambda: pa.array([i % 2 for i in range(rows)]).dictionary_encode(),
            lambda: pa.array([2**63 + i for i in range(rows)], pa.uint64()),
            lambda: pa.array([i % 2 == 0 for i in range(rows)]),
            lambda: pa.array(list(range(rows)), pa.timestamp("ns")),
            lambda: pa.array([[] for _ in range(rows)], pa.list_(pa.float32())),
            lambda: pa.array([None if i % 2 else [-0.5] for i in range(rows)], pa.list_(pa.float32())),
        ]
        return self.rng.choice(choices)()

    def written(self, columns: dict[str, pa.Array], name: str, *, small_pages: bool = True) -> str:
        """Write the columns as Parquet, Arrow or Feather, with row groups and pages of any size."""
        renamed = {self.rng.choice([key, key, key, key, "", "a b", "x" * 300]) if key == "worker" else key: column
                   for key, column in columns.items()}  # fmt: skip
        table, suffix = pa.table(renamed), self.rng.choice(["parquet", "parquet", "arrow", "feather"])
        path = self.folder / f"{name}.{suffix}"
        try:
            if suffix == "parquet":
                pq.write_table(
                    table, path, row_group_size=self.rng.choice([1, 3, 1000]), use_dictionary=self.rng.random() < 0.5,
                    compression=self.rng.choice(["none", "snappy", "zstd", "gzip"]),
                    data_page_size=self.rng.choice([64, 1 << 20]) if small_pages else 1 << 20,
                    data_page_version=self.rng.choice(["1.0", "2.0"]), write_statistics=self.rng.random() < 0.5,
                )  # fmt: skip
            elif suffix == "feather":
                feather.write_feather(table, path)
            else:
                with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table, max_chunksize=self.rng.choice([1, 1000]))
        except (pa.ArrowException, TypeError, ValueError, OSError):
            path = self.folder / f"{name}.parquet"
            pq.write_table(pa.table({"x": [1]}), path)
        return path.name

    def sound(self) -> Case:
        columns = self.columns(odd=False)
        flat = [np.array(columns[name].flatten(), float) for name in ("rollout_log_probs", "train_log_probs")]
        valid = np.array(columns["response_mask"].flatten(), bool) if "response_mask" in columns else flat[0] < 1
        if not valid.any():
            return self.odd()
        ratio = (flat[1] - flat[0])[valid]
        # pyarrow 26 cannot read lists of booleans that it wrote in small version 2 pages.
        name = self.written(columns, "dump", small_pages=False)
        return Case("sound", ["analyze", name, "--json"], math.fsum(np.expm1(ratio) - ratio) / len(ratio))

    def odd(self) -> Case:
        names = [self.written(self.columns(odd=True), f"dump{number}") for number in range(self.rng.choice([1, 1, 2]))]
        return Case("odd dump", self.verb(names))

    def damaged(self) -> Case:
        name = self.written(self.columns(odd=False), "dump")
        path = self.folder / name
        path.write_bytes(self.spoilt(path.read_bytes()))
        return Case("damaged dump", self.verb([name]))

    def spoilt(self, content: bytes) -> bytes:
        """Change, cut, double or move a few bytes, half of them at the end."""
        data = bytearray(content)
        for _ in range(self.rng.choice([1, 1, 2, 8])):
            size = len(data)
            if not size:
                break
            tail = self.rng.random() < 0.5
            at = self.rng.randrange(max(size - 600, 0), size) if tail else self.rng.randrange(size)
            match self.rng.randrange(7):
                case 0:
                    data[at] = self.rng.randrange(256)
                case 1:
                    data[at] ^= 1 << self.rng.randrange(8)
                case 2:
                    del data[at:]
                case 3:
                    data[at : at + 4] = self.rng.choice(
                        [b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\xff\xff\xff\xff", b"PAR1"]
                    )
                case 4:
                    del data[at : at + self.rng.randint(1, 64)]
                case 5:
                    data[at:at] = data[at : at + self.rng.randint(1, 64)]
                case 6:
                    data[at : at + 8] = self.rng.randbytes(8)
        return bytes(data)

    # -- commands

    def verb(self, names: list[str]) -> list[str]:
        one = names[0]
        skip = ["--on-bad", "skip"] if self.rng.random() < 0.4 else []
        if self.rng.random() < PAGES:
            page = [
                ["analyze", *names, "-o", "out/r.json", "--html", "out/r.html", "--sequences", "out/q.parquet", *skip],
                ["compare", one, names[-1], "--html", "out/c.html", "-o", "out/c.json", *skip],
                ["sweep", *names, "-c", "token_tis", "--vary", "weight.truncate=1.5:3:3", "--html", "out/s.html"],
            ]
            return self.rng.choice(page)
        choices = [
            ["analyze", *names, "--json", *skip],
            ["analyze", *names, "-o", "out/r.json", "--sequences", "out/q.parquet", *skip],
            ["analyze", *names, "--by", self.rng.choice(["worker", "step", "prompt_id"]), "--json", *skip],
            ["sweep", *names, "-c", "token_tis", "--vary", "weight.truncate=1.5:3:3", "--json", *skip],
            ["diagnose", *names, "--json"],
            ["compare", one, names[-1], "--json", *skip],
            ["sweep", *names, "--target-rejection", "0.1", "-o", "out/s.csv", *skip],
            ["compare", one, names[-1], "-o", "out/c.json", *skip],
            ["gate", *names, "--rule", "k3:max=1", "--json"],
            ["advise", *names, "-o", "out/a.json", *skip],
            ["schema", "--check", one],
            ["convert", one, "out/c.parquet"],
        ]
        return self.rng.choice(choices)

    def flags(self) -> Case:
        name = self.written(self.columns(odd=False), "dump")
        nasty = str(self.rng.choice((*NASTY, *SCALARS))).encode(errors="replace").decode().replace("\0", "")
        argv = self.rng.choice(
            [
                ["analyze", name, "-c", f"{{gates: [{{level: min, keep: [{nasty}, null]}}]}}", "--json"],
                ["analyze", name, "-c", f"{{name: x, weight: {{truncate: {nasty}}}}}"],
                ["analyze", name, "-c", nasty],
                ["analyze", name, "--by", nasty],
                ["analyze", name, "--column", f"rollout_log_probs={nasty}"],
                ["analyze", name, "--memory-limit", nasty],
                ["analyze", name, "--config", nasty],
                ["analyze", nasty],
                ["sweep", name, "-c", "token_tis", "--vary", f"weight.truncate={nasty}", "--json"],
                ["sweep", name, "-c", "token_tis", "--vary", f"{nasty}=1:2:3"],
                ["sweep", name, "--target-rejection", nasty],
                ["sweep", name, "--at-step", nasty, "--at-length", "9"],
                ["gate", name, "--rule", nasty],
                ["gate", name, "--rule", f"k3:max={nasty}"],
                ["gate", name, "--rule", "k3:max=1", "--max-skipped", nasty],
                ["gate", name, "--baseline", nasty],
                ["gate", name, "--plan", nasty],
                ["presets", "show", nasty],
                ["metrics", nasty],
                ["report", nasty, "--html", "out/x.html"],
                ["convert", name, "out/c.parquet", "--from", nasty],
                ["diagnose", name, "--column", nasty],
            ]
        )
        return Case("flags", argv)

    # -- configurations and Results

    def config(self) -> Case:
        name = self.written(self.columns(odd=False), "dump")
        texts = {
            "c.yaml": "name: mine\nweight: {level: token, clip: [0.5, 1.5], normalize: token}\n"
            "gates:\n  - {statistic: ratio, level: geometric, keep: [0.99, 1.001]}\n",
            "v.yaml": "algorithm:\n  rollout_correction:\n    rollout_is: token\n    rollout_is_threshold: 2.0\n"
            "    rollout_rs: sequence\n    rollout_rs_threshold: 2.0\n",
            "r.yaml": "rules:\n  - {metric: k3, max: 0.01, per: step}\n  - {metric: k1, min: -1}\n",
            "r.toml": '[[rules]]\nmetric = "k3"\nmax = 0.01\n[[rules]]\nmetric = "k3"\nincrease = "25%"\n',
            "mismatchctl.toml": 'by = ["worker"]\nthreads = 1\nquiet = true\n',
        }
        chosen = self.rng.choice(list(texts))
        words = texts[chosen].split(" ")
        for _ in range(self.rng.randint(1, 3)):
            words[self.rng.randrange(len(words))] = str(self.rng.choice((*SCALARS, *NASTY)))
        content = " ".join(words).encode(errors="surrogatepass")
        if self.rng.random() < 0.3:
            content = self.spoilt(content)
        (self.folder / chosen).write_bytes(content)
        argv = {
            "c.yaml": ["analyze", name, "-c", chosen, "--json"],
            "v.yaml": self.rng.choice([["lint", chosen], ["analyze", name, "--config", chosen, "--json"]]),
            "r.yaml": ["gate", name, "--rule", chosen, "--json"],
            "r.toml": ["gate", name, "--rule", chosen],
            "mismatchctl.toml": ["schema", "--check", name],
        }
        return Case("configuration", argv[chosen])

    def result(self) -> Case:
        data = json.loads((HERE / "result.json").read_text())
        for _ in range(self.rng.choice([1, 1, 1, 3])):
            self.exchange(data)
        text = json.dumps(data).replace('"1e999"', "1e999")
        content = text.encode()
        if self.rng.random() < 0.15:
            content = self.spoilt(content)
        (self.folder / "r.json").write_bytes(content)
        shutil.copy(HERE / "result.json", self.folder / "ok.json")
        argv = self.rng.choice(
            [
                ["gate", "r.json", "--baseline", "ok.json", "--json"],
                ["gate", "ok.json", "--baseline", "r.json", "--rule", "k3:increase=25%", "--junit", "out/j.xml"],
                ["gate", "r.json", "--rule", "k3:max=1,per=step", "--markdown", "-"],
                ["compare", "r.json", "ok.json", "--json"],
            ]
        )
        if self.rng.random() < PAGES:
            argv = ["report", "r.json", "--html", "out/r.html"]
        return Case("Result", argv)

    def exchange(self, data: Any) -> None:
        """Replace, drop or repeat one value of a tree, at any depth."""
        while True:
            if isinstance(data, dict) and data:
                key: Any = self.rng.choice(list(data))
            elif isinstance(data, list) and data:
                key = self.rng.randrange(len(data))
            else:
                return
            if isinstance(data[key], (dict, list)) and data[key] and self.rng.random() < 0.8:
                data = data[key]
                continue
            if self.rng.random() < 0.15:
                del data[key]
            elif isinstance(data, list) and self.rng.random() < 0.2:
                data.insert(key, data[key])
            else:
                data[key] = copy.deepcopy(self.rng.choice(NASTY))
            return

    # -- files of frameworks

    def foreign(self) -> Case:
        """Change an instruction of a pickle, a value of a line or any byte in a framework's file."""
        files = sorted(path for path in FRAMEWORKS.rglob("*") if path.suffix in (".pt", ".pkl", ".jsonl", ".parquet"))
        path = self.rng.choice(files)
        place = self.folder / "source" / path.name
        if path.parent.name.startswith(("train_data", "rollout_data", "dumped_data", "dashboard")):
            place = self.folder / "source" / path.parent.name / path.name
        place.parent.mkdir(parents=True)
        content = path.read_bytes()
        if path.suffix == ".jsonl" and self.rng.random() < 0.8:
            lines = content.decode().splitlines()
            at = self.rng.randrange(len(lines))
            data = json.loads(lines[at])
            self.exchange(data)
            lines[at] = json.dumps(data)
            content = "\n".join(lines).encode()
        elif path.suffix == ".pt" and self.rng.random() < 0.8:
            content = self.rezipped(content)
        else:
            content = self.spoilt(content)
        place.write_bytes(content)
        verb = self.rng.choice([["analyze", "source", "--json"], ["convert", "source", "out/c.parquet"]])
        return Case("file of a framework", verb)

    def rezipped(self, content: bytes) -> bytes:
        out = BytesIO()
        with zipfile.ZipFile(BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
            names = old.namelist()
            chosen = next((name for name in names if name.endswith("data.pkl")), names[0])
            chosen = chosen if self.rng.random() < 0.8 else self.rng.choice(names)
            for name in names:
                data = old.read(name)
                new.writestr(name, self.spoilt(data) if name == chosen else data)
        return out.getvalue()
