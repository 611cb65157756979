"""A worse dump never passes with an edited Result or baseline, and no edit causes a traceback.

Every path of the JSON is removed, replaced, scaled or repeated. `python -m tests.reliability.edited_results FIRST
COUNT` prints a line of JSON per mutation.
"""

import copy
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.cli.command import run
from tests.reliability.fail_open import make_rows

Place = tuple[str | int, ...]
CHANGES = (
    "remove",
    "null",
    "zero",
    "negative",
    "tiny",
    "huge",
    "smaller",
    "larger",
    "text",
    "list",
    "mapping",
    "twice",
)


@cache
def make_results(folder: Path) -> dict[str, tuple[Path, Any]]:
    """Write a baseline, and a Result of the same prompts with a mismatch twice as large."""
    make_rows(0, 0.05, prompts=6).write(folder / "good" / "dump.parquet")
    make_rows(1, 0.1, prompts=6).write(folder / "bad" / "dump.parquet")
    baseline, result = folder / "baseline.json", folder / "result.json"
    run("gate", folder / "good", "--save-baseline", baseline, "--accept", "-q", code=0)
    run("analyze", folder / "bad", "-c", "none", "-o", result, "-q", code=0)
    return {
        "result": (result, json.loads(result.read_text())),
        "baseline": (baseline, json.loads(baseline.read_text())),
    }


def list_places(data: Any, place: Place = ()) -> Iterator[Place]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*place, key)
        yield from list_places(value, (*place, key))


def change(data: Any, place: Place, how: str) -> Any:
    changed = copy.deepcopy(data)
    parent = changed
    for key in place[:-1]:
        parent = parent[key]
    key, old = place[-1], parent[place[-1]]
    number = old if isinstance(old, (int, float)) and not isinstance(old, bool) else 1.0
    if how == "remove":
        del parent[key]
    elif how == "twice" and isinstance(parent, list):
        parent.insert(int(key), old)
    elif how == "twice":
        parent[f"{key} "] = old
    else:
        parent[key] = {
            "null": None, "zero": 0, "negative": -abs(number) - 1, "tiny": 1e-12, "huge": 1e300,
            "smaller": number / 100, "larger": number * 100, "text": "\n::error::<b>", "list": [], "mapping": {},
        }[how]  # fmt: skip
    return changed


def try_mutation(number: int, folder: Path) -> dict[str, Any]:
    results = make_results(folder)
    name = "baseline" if number % 3 == 2 else "result"
    data = results[name][1]
    places = _list_all(folder, name)
    rng = random.Random(number)
    place = places[(number // 3 * 2 + number % 3 if name == "result" else number // 3) % len(places)]
    how = rng.choice(CHANGES)
    edited = folder / f"{name}_edited.json"
    edited.write_text(json.dumps(change(data, place, how)))
    used = {key: path for key, (path, _) in results.items()} | {name: edited}
    done = run("gate", used["result"], "--baseline", used["baseline"])
    error = "" if done.exception is None or isinstance(done.exception, SystemExit) else repr(done.exception)
    wrong = error or ("passed" if done.exit_code == 0 else "")
    shown = ".".join(map(str, place))
    return {"number": number, "file": name, "place": shown, "how": how, "code": done.exit_code, "wrong": wrong}


@cache
def _list_all(folder: Path, name: str) -> list[Place]:
    """Return all paths in random order, first one of each kind. Paths of a kind differ only in list indices."""
    places = list(list_places(make_results(folder)[name][1]))
    random.Random(0).shuffle(places)
    kinds = {tuple("*" if isinstance(key, int) else key for key in place): place for place in places}
    first = set(kinds.values())
    return [*kinds.values(), *(place for place in places if place not in first)]


def main() -> Iterator[dict[str, Any]]:
    first, count = map(int, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as place:
        for number in range(first, first + count):
            yield try_mutation(number, Path(place))


if __name__ == "__main__":
    for line in main():
        print(json.dumps(line), flush=True)
