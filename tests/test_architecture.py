"""Imports point one way, heavy packages stay where they belong, and documents say what the code says."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "mismatchctl"

FRAMEWORKS = sorted(path.parent.name for path in (PACKAGE / "frameworks").glob("*/presets.yaml"))
"""The shelves."""

ORDER = (
    "errors",
    "validation",
    "interrupts",
    "blas",
    "escape",
    "finite",
    "numbers",
    "footer",
    "files",
    "marks",
    "texts",
    "stores",
    "contract",
    "batch",
    "vocabulary",
    "ratios",
    "correction",
    "surrogates",
    "measure",
    "views",
    "result",
    "frameworks",
    "dumps",
    "engines",
    "diagnose",
    "analyze",
    "resample",
    "predict",
    "sweep",
    "browse",
    "advise",
    "gate",
    "watch",
    "score",
    "compare",
    "lint",
    "doctor",
    "render",
    "tensors",
    "api",
    "cli",
)
"""Each may import only from itself and from those before it."""

ONLY_IN = {
    "numba": (
        *(f"measure/kernels/{name}.py" for name in ("compiling", "look_loops", "loops", "machine_code")),
        "dumps/page_loops.py",
    ),
    "torch": ("tensors.py", "measure/kernels/", "score/checkpoint.py"),
    "transformers": "score/checkpoint.py",
    "matplotlib": ("render/figures/with_matplotlib.py", "render/figures/notebook.py"),
    "jinja2": "render/",
    "rich": ("render/", "cli/"),
    "typer": "cli/",
}

PARSERS = {
    "json": {"load", "loads", "JSONDecoder"},
    "yaml": {"load", "load_all", "safe_load", "safe_load_all", "full_load", "compose", "parse", "scan"},
    "tomllib": {"load", "loads"},
    "tomli": {"load", "loads"},
    "configparser": {"ConfigParser", "RawConfigParser"},
    "ast": {"literal_eval"},
    "pickle": {"load", "loads", "Unpickler"},
}
"""What reads text (or worse) as data: called in the room of texts alone; pickles in the importers' reader."""


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_module_has_its_place_in_the_order() -> None:
    rooms = {room(path) for path in sources()}
    assert rooms - {"__init__", "__main__", "recorder"} <= set(ORDER)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    here = room(path)
    if here in ("__init__", "__main__"):
        return
    # The recorder stands alone, so that anything may use it.
    allowed = {"recorder"} | (set() if here == "recorder" else set(ORDER[: ORDER.index(here) + 1]))
    for module in imports(path):
        package, _, rest = module.partition(".")
        if package == "mismatchctl" and rest:
            assert rest.split(".")[0] in allowed, f"{path} imports {module}"


@pytest.mark.parametrize("package", ONLY_IN)
def test_heavy_packages_stay_in_their_rooms(package: str) -> None:
    users = [
        str(path.relative_to(PACKAGE)) for path in sources() if package in {m.split(".")[0] for m in imports(path)}
    ]
    assert [user for user in users if not user.startswith(ONLY_IN[package])] == []


def parsers_called(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in PARSERS:
            found |= {f"{node.module}.{a.name}" for a in node.names if a.name in PARSERS[node.module]}
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found |= {f"{owner}.{node.attr}"} if node.attr in PARSERS.get(owner, ()) else set()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found |= {node.func.id} if ast.unparse(node) != "exec('')" else set()  # which is of no text
    return found


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_parquet_is_opened_behind_one_door() -> None:
    """Whoever lets pyarrow read a footer has it checked first."""
    opens = re.compile(r"\bpq\.(ParquetFile|read_\w+)\(")
    users = [path for path in sources() if opens.search(path.read_text()) and path.name != "footer.py"]
    assert users and [path for path in users if "check_footer(" not in path.read_text()] == []


def test_texts_are_parsed_behind_one_door() -> None:
    users = {str(path.relative_to(PACKAGE)): parsers_called(path) for path in sources()}
    elsewhere = {user: found for user, found in users.items() if found and not user.startswith("texts/")}
    assert elsewhere.pop("dumps/foreign/safe.py", set()) <= {"pickle.Unpickler"}
    assert elsewhere == {}


def test_the_recorder_needs_numpy_and_pyarrow_only() -> None:
    modules = {module for path in (PACKAGE / "recorder").glob("*.py") for module in imports(path)}
    others = {module for module in modules if not module.startswith("mismatchctl.recorder")}
    assert {module.split(".")[0] for module in others} - sys.stdlib_module_names == {"numpy", "pyarrow"}
    assert {module.split(".")[0] for module in imports(PACKAGE / "__init__.py")} <= sys.stdlib_module_names


NAMED = re.compile(
    rf"(?<![a-z])({'|'.join(name.replace('_', '[-_ ]?') for name in FRAMEWORKS if name != 'roll')})(?![a-z])",
    re.IGNORECASE,
)
"""A framework's name in any spelling; the one that is a word of English is looked for by itself."""
ROLL = re.compile(r"\bROLL\b|^roll$|['\"]roll['\"]")


def off_the_shelves() -> list[Path]:
    """Every file of the package, and every template, that stands on no shelf."""
    files = [path for folder in (PACKAGE, ROOT / "reports_templates") for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts]
    return [path for path in files if not {*FRAMEWORKS, "layers"} & {*path.relative_to(ROOT).parts[2:3]}]


def constants(code: types.CodeType) -> Iterator[str]:
    """The strings that a module holds, as the compiler has put them together."""
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from constants(value)
        for text in value if isinstance(value, (tuple, frozenset)) else (value,):
            if isinstance(text, str):
                yield text


def named_in(path: Path, text: str) -> list[str]:
    """The lines and strings that name a framework."""
    said = text.splitlines() + ([*constants(compile(text, str(path), "exec"))] if path.suffix == ".py" else [])
    return [line for line in said if NAMED.search(line) or ROLL.search(line)]


def test_frameworks_are_named_on_their_shelves_only() -> None:
    """Outside neither code, text, comment nor template knows one, but for the lines that register them.

    What advice says of them is a shelf's; `layers` has a file per comparator, a tool that is called as its framework.
    """
    files = off_the_shelves()
    assert len(files) > 300 and PACKAGE / "frameworks/plain.py" in files
    for path in files:
        text = path.read_text()
        if path == PACKAGE / "frameworks/__init__.py":
            before, lines, after = re.split(
                r"(?s)(^MODULES = {.*?)(?=^_SPELLINGS)", text, maxsplit=1, flags=re.MULTILINE
            )
            assert sorted(re.findall(r"mismatchctl\.frameworks\.(\w+)", lines)) == sorted(FRAMEWORKS)
            text = before + after
        assert not named_in(path, text), path


SPELT = (
    'x = "verl"', "# as TRL does", "said = 've' 'rl'", 'said = "ms-" + "swift"', "NeMo_RL = 1", "f('roll')",
    "x = {'a': 'prime-rl@2026'}",
)  # fmt: skip


@pytest.mark.parametrize("line", SPELT)
def test_no_spelling_of_a_name_is_overlooked(line: str) -> None:
    assert named_in(Path("module.py"), f"def f(x):\n    {line}\n    return 'overlap, control, real'\n")


def test_a_shelf_knows_no_other_shelf() -> None:
    for path in sources():
        shelf = path.relative_to(PACKAGE / "frameworks").parts[0] if room(path) == "frameworks" else ""
        if shelf not in FRAMEWORKS:
            continue
        others = {
            module.split(".")[2] for module in imports(path) if module.startswith("mismatchctl.frameworks.registry.")
        }
        forked = {"slime"} if shelf == "miles" else set()
        assert not (others & set(FRAMEWORKS)) - {shelf} - forked, path


def test_reference_documents_are_those_that_the_code_gives() -> None:
    documents = runpy.run_path(str(ROOT / "docs" / "generate.py"))["DOCUMENTS"]
    for name, document in documents.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == document(), "run `make docs`"
