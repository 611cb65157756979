"""Fuzz cases for common formats: dumps, responses of engines and logs, with changed values or bytes."""

import csv
import io
import json
import random
from collections.abc import Callable
from pathlib import Path

from tests.factories.format_files import ENGINES, FORMATS, make_rows
from tests.reliability.fuzzing import NASTY, Case
from tests.reliability.fuzzing_flags import FlagMaker

SHARE = 0.15
"""Share of seeds with these cases. `fuzz_check --readers` makes only these cases."""
READERS = {
    **dict.fromkeys((".jsonl", ".ndjson"), "JSONL"), **dict.fromkeys((".csv", ".tsv"), "CSV"), ".json": "JSON",
    ".npz": "NPZ", ".safetensors": "safetensors", ".pt": "plain .pt", ".feather": "Feather", "": "Hugging Face folder",
}  # fmt: skip
"""Writers by suffix."""
VERBS = (
    ["analyze", "{}", "--json"],
    ["analyze", "{}", "--on-bad", "skip", "--json"],
    ["analyze", "{}", "--on-bad", "mask", "--json"],
    ["diagnose", "{}", "--json"],
    ["sweep", "{}", "-c", "token_tis", "--vary", "weight.truncate=1.5:3:3"],
    ["gate", "{}", "--rule", "k3:max=1"],
    ["convert", "{}", "out/c.parquet"],
    ["schema", "--check", "{}"],
)


class FormatMaker(FlagMaker):
    def case(self) -> Case:
        apart = random.Random(f"{self.seed} format")
        if apart.random() >= SHARE:
            return super().case()
        makes: list[tuple[Callable[[], Case], int]] = [(self.format, 5), (self.pair, 3), (self.metrics, 2)]
        return apart.choices([make for make, _ in makes], [weight for _, weight in makes])[0]()

    def format(self) -> Case:
        name = self.rng.choice(sorted(FORMATS))
        place = self.folder / name
        FORMATS[name](place, make_rows(self.rng.randrange(5), 6))
        for path in [place] if place.is_file() else sorted(place.iterdir()):
            if self.rng.random() < 0.8 or path == place:
                self.damage(path)
        return Case(READERS[Path(name).suffix], [word.format(name) for word in self.rng.choice(VERBS)])

    def damage(self, path: Path) -> None:
        content = path.read_bytes()
        whole = self.rng.random() < 0.7
        if whole and path.suffix in (".jsonl", ".ndjson", ".json"):
            lines = content.decode().splitlines() if path.suffix != ".json" else [content.decode()]
            at = self.rng.randrange(len(lines))
            data = json.loads(lines[at])
            self.exchange(data)
            lines[at] = json.dumps(data)
            content = "\n".join(lines).encode()
        elif whole and path.suffix in (".csv", ".tsv"):
            rows = [*csv.reader(content.decode().splitlines(), delimiter="\t" if path.suffix == ".tsv" else ",")]
            row = self.rng.choice(rows)
            row[self.rng.randrange(len(row))] = str(self.rng.choice([*NASTY, "[1", "[[1]]", "[nan]", "[]", '["a"]']))
            out = io.StringIO()
            csv.writer(out, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(rows)
            content = out.getvalue().encode(errors="surrogatepass")
        elif whole and path.suffix == ".pt":
            content = self.rezipped(content)
        else:
            content = self.spoilt(content)
        path.write_bytes(content)

    def pair(self) -> Case:
        rows = make_rows(self.rng.randrange(5), 6)
        engine = self.rng.choice(sorted(ENGINES))
        lines = [[ENGINES[engine](row) for row in rows], [{"id": row["sequence_id"], **row} for row in rows]]
        for data, name in zip(lines, ("a.jsonl", "b.jsonl"), strict=True):
            if self.rng.random() < 0.6:
                self.exchange(data)
            content = "\n".join(map(json.dumps, data)).encode()
            (self.folder / name).write_bytes(content if self.rng.random() < 0.8 else self.spoilt(content))
        sides = ["--rollout", "a.jsonl", "--train", "b.jsonl"]
        on = self.rng.choice([[], ["--on", "id"], ["--on", "step,id"], ["--on", "token_ids"], ["--on", "x"]])
        verb = self.rng.choice([["analyze", *sides, *on, "--json"], ["convert", *sides, *on, "out.parquet"]])
        return Case(f"two files, {engine}", verb)

    def metrics(self) -> Case:
        rows = [
            {"step": step, "rollout_corr/k3_kl": 0.001 + 1e-4 * step, "actor/grad_norm": 0.1, "reward": -0.5 * step}
            for step in range(self.rng.randrange(1, 30))
        ]
        if self.rng.random() < 0.7:
            self.exchange(rows)
        name = self.rng.choice(["log.jsonl", "log.csv", "trainer_state.json", "events.out.tfevents.1.host"])
        if name == "log.csv":
            heads = list(dict.fromkeys(str(key) for row in rows if isinstance(row, dict) for key in row))
            cells = [[str(row.get(head, "")) for head in heads] for row in rows if isinstance(row, dict)]
            text = "\n".join(",".join(line) for line in [heads, *cells])
        else:
            text = "\n".join(map(json.dumps, rows)) if name == "log.jsonl" else json.dumps({"log_history": rows})
        content = text.encode(errors="surrogatepass")
        if "tfevents" in name:
            steps = range(self.rng.randrange(1, 4))
            content = self.events([{"step": step, "actor/kl": 0.1 * step} for step in steps], known=40)
        (self.folder / name).write_bytes(content if self.rng.random() < 0.7 else self.spoilt(content))
        verb = self.rng.choice(
            [["analyze", name, "--json"], ["analyze", name], ["gate", name, "--rule", "k3:max=0.01"]]
        )
        return Case(f"metrics, {name}", verb)
