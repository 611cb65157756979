"""Rules of the layout: layers, import cycles, file sizes, unique names, heavy packages and parsers."""

import ast
import re
import runpy
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mismatchctl.io.yaml import parse_toml
from tests.paths import ROOT

PACKAGE = ROOT / "mismatchctl"

LAYERS = (
    *("errors", "recorder", "io", "core", "corrections", "measure", "results", "stats"),
    *("frameworks", "data", "diagnosis", "api", "report", "cli"),
)
"""Folders in order. Each imports only from itself and from the folders before it."""
LOOSE = {"__init__", "__main__", "errors"}
MAX_FILES = 210
MAX_LINES = 800
"""Largest number of lines of a file."""

FRAMEWORKS = sorted(path.parent.name for path in (PACKAGE / "frameworks").glob("*/presets.yaml"))

ONLY_IN = {
    "numba": ("core/compiler.py", "core/machine_code.py", "measure/kernels/loops.py"),
    "torch": ("corrections/tensors.py", "measure/kernels/", "api/checkpoint.py"),
    "transformers": ("api/checkpoint.py",),
    "matplotlib": ("report/figures/matplotlib_backend.py", "report/notebook.py", "results/views.py"),
    "jinja2": ("report/",),
    "rich": ("report/", "cli/"),
    "typer": ("cli/",),
}
"""Heavy packages, and the files or folders that may import them."""


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str) -> Iterator[str]:
    """Return the package's modules that a module imports, also for type checkers or by a string."""
    path = modules()[name]
    loggers = {
        id(argument)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger")
        for argument in node.args
    }
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules() else node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "." in node.value
            and id(node) not in loggers
        ):
            yield node.value


@cache
def graph() -> dict[str, set[str]]:
    return {name: {other for other in imported(name) if other in modules()} - {name} for name in modules()}


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_every_module_is_in_a_layer() -> None:
    loose = {path.stem for path in PACKAGE.glob("*.py")}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert loose == LOOSE
    assert folders == {*LAYERS} - {"errors"}


@pytest.mark.parametrize("name", [name for name in modules() if layer(name) in LAYERS])
def test_imports_follow_the_layers(name: str) -> None:
    allowed = LAYERS[: LAYERS.index(layer(name)) + 1]
    assert [other for other in graph()[name] if layer(other) not in allowed and other != "mismatchctl"] == []


def circles() -> list[list[str]]:
    """Return strongly connected components of more than one file (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph()[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            members = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(members) > 1:
                found.append(members)

    for node in graph():
        if node not in index:
            visit(node)
    return found


def test_files_do_not_import_each_other_in_circles() -> None:
    assert circles() == []


def test_files_have_a_readable_size() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    assert len(lengths) <= MAX_FILES


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


PARSERS = {
    "json": {"load", "loads", "JSONDecoder"},
    "yaml": {"load", "load_all", "safe_load", "safe_load_all", "full_load", "compose", "parse", "scan"},
    "tomllib": {"load", "loads"},
    "tomli": {"load", "loads"},
    "configparser": {"ConfigParser", "RawConfigParser"},
    "ast": {"literal_eval"},
    "pickle": {"load", "loads", "Unpickler"},
}
"""Functions that parse text or execute data."""


@cache
def external(path: Path) -> list[str]:
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


@pytest.mark.parametrize("package", ONLY_IN)
def test_heavy_packages_are_imported_in_few_places(package: str) -> None:
    users = [
        str(path.relative_to(PACKAGE))
        for path in modules().values()
        if package in {module.split(".")[0] for module in external(path)}
    ]
    assert users and [user for user in users if not user.startswith(ONLY_IN[package])] == []


def parsers_called(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.module in PARSERS:
            found |= {f"{node.module}.{a.name}" for a in node.names if a.name in PARSERS[node.module]}
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found |= {f"{owner}.{node.attr}"} if node.attr in PARSERS.get(owner, ()) else set()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found |= {node.func.id} if ast.unparse(node) != "exec('')" else set()  # which reads no text
    return found


def test_every_dependency_is_imported_and_has_a_reason() -> None:
    wanted = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = {re.split(r"[^\w-]", line)[0] for line in wanted}
    table = re.search(r"## Dependencies\n(.*?)\n## ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    assert table and set(re.findall(r"[\w-]+", " ".join(re.findall(r"^\| ([^|]+) \|", table[1], re.M)))) >= names
    roots = {line.split(".")[0] for path in modules().values() for line in external(path)}
    assert {{"pyyaml": "yaml"}.get(name, name) for name in names} <= roots


def test_parquet_footers_are_checked_before_pyarrow_reads_them() -> None:
    opens = re.compile(r"\bpq\.(ParquetFile|read_\w+)\(")
    users = [path for path in modules().values() if opens.search(path.read_text()) and path.name != "parquet_footer.py"]
    assert users and [path for path in users if "check_footer(" not in path.read_text()] == []


def test_text_is_parsed_only_in_io() -> None:
    users = {str(path.relative_to(PACKAGE)): parsers_called(path) for path in modules().values()}
    elsewhere = {user: found for user, found in users.items() if found and not user.startswith("io/")}
    assert elsewhere.pop("data/importers/pickles.py", set()) <= {"pickle.Unpickler"}
    assert elsewhere.pop("data/engines.py") == {"pickle.loads"}  # of its own memory
    assert elsewhere.pop("cli/help.py") == {"tomllib.loads"}  # help.toml of the package, without importing yaml
    assert elsewhere == {}


def test_the_recorder_needs_only_numpy_and_pyarrow() -> None:
    modules = {module for path in (PACKAGE / "recorder").glob("*.py") for module in external(path)}
    others = {module for module in modules if not module.startswith("mismatchctl.recorder")}
    assert {module.split(".")[0] for module in others} - sys.stdlib_module_names == {"numpy", "pyarrow"}
    assert {module.split(".")[0] for module in external(PACKAGE / "__init__.py")} <= {
        *sys.stdlib_module_names,
        "mismatchctl",
    }


NAMED = re.compile(
    rf"(?<![a-z])({'|'.join(name.replace('_', '[-_ ]?') for name in FRAMEWORKS if name != 'roll')})(?![a-z])",
    re.IGNORECASE,
)
"""The name of a framework in any spelling, except `trl` in English words."""
ROLL = re.compile(r"\bROLL\b|^roll$|['\"]roll['\"]")


def neutral_files() -> list[Path]:
    files = [path for folder in (PACKAGE, ROOT / "reports_templates") for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts]
    return [path for path in files if not {*FRAMEWORKS, "layer_reports.py"} & {*path.relative_to(ROOT).parts[2:3]}]


def constants(code: types.CodeType) -> Iterator[str]:
    """Yield the strings of a module after constant folding."""
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from constants(value)
        for text in value if isinstance(value, (tuple, frozenset)) else (value,):
            if isinstance(text, str):
                yield text


def named_in(path: Path, text: str) -> list[str]:
    said = text.splitlines() + ([*constants(compile(text, str(path), "exec"))] if path.suffix == ".py" else [])
    return [line for line in said if NAMED.search(line) or ROLL.search(line)]


def test_only_adapters_name_frameworks() -> None:
    """Outside their folders, no code, comment or template names a framework. The registry lists them."""
    files = neutral_files()
    assert PACKAGE / "frameworks/adapter.py" in files
    for path in files:
        if path != PACKAGE / "frameworks/registry.py":
            assert not named_in(path, path.read_text(encoding="utf-8")), path


SPELLINGS = (
    'x = "verl"', "# as TRL does", "said = 've' 'rl'", 'said = "ms-" + "swift"', "NeMo_RL = 1", "f('roll')",
    "x = {'a': 'prime-rl@2026'}",
)  # fmt: skip


@pytest.mark.parametrize("line", SPELLINGS)
def test_every_spelling_of_an_import_is_checked(line: str) -> None:
    assert named_in(Path("module.py"), f"def f(x):\n    {line}\n    return 'overlap, control, real'\n")


def test_adapters_do_not_import_each_other() -> None:
    for path in modules().values():
        folder = path.parent.name
        if path.parent.parent != PACKAGE / "frameworks":
            continue
        others = {module.split(".")[2] for module in external(path) if module.startswith("mismatchctl.frameworks.")}
        forked = {"slime"} if folder == "miles" else set()
        assert not (others & set(FRAMEWORKS)) - {folder} - forked, path


def test_reference_pages_are_up_to_date() -> None:
    documents = runpy.run_path(str(ROOT / "docs" / "generate.py"))["DOCUMENTS"]
    for name, document in documents.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == document(), "run `make docs`"


def test_the_version_is_written_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of `mismatchctl.io.__version__`, `make docs` changes each file that names a version to install."""
    monkeypatch.setattr("mismatchctl.io.__version__", "7.8.9")
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    texts = [generate["DOCUMENTS"][name]() for name in generate["PINNED"]]
    assert all("7.8.9" in text for text in texts)
    named = re.compile(r"mismatchctl(@v|==|-)\d+\.\d|\.yml@v\d")
    places = ("*.md", "*.yml", "docs/**/*.md", "templates/**/*.yml", ".github/**/*.yml")
    pages = {path for pattern in places for path in ROOT.glob(pattern)}
    found = {path for path in pages if named.search(path.read_text(encoding="utf-8"))}
    assert found == {(ROOT / "docs" / name).resolve() for name in generate["PINNED"]}
