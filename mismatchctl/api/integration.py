"""Code snippets that record log-probs in a framework, and the places in the framework's code for them.

The snippets are the Python blocks in docs/integrations/FRAMEWORK.md. docs/integrations/places.yaml contains the places.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.io.files import find_packaged_folder
from mismatchctl.io.yaml import read_data

PAGES_FOLDER = "docs/integrations"
CI_FOLDER = "templates/ci"
_CI_FILES = {"record.py": "ci/record.py", "prompts.jsonl": "ci/prompts.jsonl"}
"""Name of a template in CI_FOLDER -> path of its copy in the user's repository."""
BEGIN, END = "# >>> mismatchctl init", "# <<< mismatchctl init"
_PATCHED = re.compile(rf"^[ ]*{BEGIN}\n.*?^[ ]*{END}\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Edit:
    """Code to insert into a file, before the line that matches `before` or after the line that matches `after`."""

    file: str
    title: str
    code: str
    before: str
    after: str
    replace: tuple[str, str] | None  # (old, new): calls of `old` after the code become calls of `new`

    def find(self, text: str) -> int | None:
        match = re.search(self.before or self.after, text, re.MULTILINE)
        if match is None:
            return None
        if self.before:
            return text.rfind("\n", 0, match.start()) + 1
        end = text.find("\n", match.end())
        return len(text) if end < 0 else end + 1

    def apply(self, text: str) -> str:
        """Return `text` with the code inserted. The code gets the indentation of the next line."""
        at = self.find(text)
        if at is None:
            raise ConfigError(
                f"the place for the code was not found: no text matches `{self.before or self.after}`. Insert the code "
                "by hand, or install the framework's version that docs/integrations names"
            )
        following = next((line for line in text[at:].splitlines() if line.strip()), "")
        indent = " " * (len(following) - len(following.lstrip()))
        block = textwrap.indent(f"{BEGIN}\n{self.code}{END}\n", indent)
        head = text[:at] + ("\n" if at and text[at - 1] != "\n" else "")
        tail = text[at:]
        if self.replace:
            old, new = self.replace
            tail = re.sub(rf"(?<![\w.]){old}\(", f"{new}(", tail)
        return head + block + tail


@dataclass(frozen=True)
class Integration:
    """The edits that insert recording code into the source files of a framework."""

    name: str
    packages: tuple[str, ...]
    tried: str
    note: str
    overrides: tuple[str, str] | None
    edits: tuple[Edit, ...]
    ci: Mapping[str, str]

    @property
    def version(self) -> str | None:
        for package in self.packages:
            try:
                return importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def edits_by_file(self) -> dict[str, list[Edit]]:
        files: dict[str, list[Edit]] = {}
        for edit in self.edits:
            files.setdefault(edit.file, []).append(edit)
        return files

    def edits_for(self, path: Path, text: str) -> list[Edit]:
        """Return the edits for this file. `text` must contain the lines that mark the places of the new code."""
        files = self.edits_by_file()
        for file, edits in files.items():
            if file and Path(file).name == path.name and all(edit.find(text) is not None for edit in edits):
                return edits
        for edits in files.values():
            if all(edit.find(text) is not None for edit in edits):
                return edits
        wanted = " or ".join(file or edits[0].title for file, edits in files.items())
        raise ConfigError(
            f"{path}: the place for the code was not found in this file. In {self.name} {self.tried}, the code belongs "
            f"in {wanted}. Pass that file, or insert the code by hand: `mismatchctl init {self.name}` prints it"
        )


def read_integration(name: str) -> Integration:
    """Read the edits that add recording code to a framework. Upper case, spaces, - and _ in its name do not matter."""
    places = _read_places()
    known = {re.sub("[-_ .]", "", each): each for each in places}
    found = known.get(re.sub("[-_ .]", "", name.lower()))
    if found is None:
        raise ConfigError(
            f"unknown framework {name!r}{suggestion(name, places)}. Write ci for a CI job, or one of "
            f"{', '.join(places)}"
        )
    place = places[found]
    overrides = place.get("overrides")
    return Integration(
        name=found,
        packages=tuple(place["packages"]),
        tried=str(place["tried"]),
        note=place.get("note", ""),
        overrides=overrides and (overrides["file"], overrides["at"]),
        edits=tuple(_read_edits(found, place["edits"])),
        ci=place.get("ci", {}),
    )


@cache
def _read_places() -> dict[str, Any]:
    places: dict[str, Any] = read_data(find_packaged_folder(PAGES_FOLDER) / "places.yaml")
    return places


def _read_edits(name: str, edits: Iterable[Mapping[str, Any]]) -> Iterator[Edit]:
    page = (find_packaged_folder(PAGES_FOLDER) / f"{name}.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    for edit in edits:
        code = _split_snippet(snippets[edit.get("snippet", 0)])[edit["part"]]
        replace = edit.get("replace")
        yield Edit(
            edit.get("file", ""), edit.get("title", ""), code, edit.get("before", ""), edit.get("after", ""),
            replace and (replace[0], replace[1]),
        )  # fmt: skip


def _split_snippet(code: str) -> dict[str, str]:
    """Split a snippet. Return "setup" (up to the line that creates the recorder), "hook" (other lines) and "all"."""
    created = next(node for node in ast.parse(code).body if "Recorder(" in ast.unparse(node))
    lines = code.splitlines(keepends=True)
    setup, hook = lines[: created.end_lineno], lines[created.end_lineno :]
    return {"all": code, "setup": "".join(setup), "hook": "".join(hook).lstrip("\n")}


def find_source(file: str, root: Path | None) -> Path | None:
    """Find a framework's source file in `root`, or by default in the working directory and installed packages."""
    parts = Path(file).parts
    package = next(part for part in parts if part != "src")
    folders = [root] if root else [Path.cwd(), *_package_parents(package)]
    for folder in folders:
        for candidate in (folder / file, folder.joinpath(*(part for part in parts if part != "src"))):
            if candidate.is_file():
                return candidate
    return None


def _package_parents(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    places = (spec.submodule_search_locations or ()) if spec else ()
    return [Path(place).parent for place in places] or [Path(entry) for entry in sys.path if entry]


def patch_text(text: str, edits: Iterable[Edit]) -> str:
    """Insert the code of all edits into the text of a file. If the text is already patched, replace the old code."""
    text = remove_patch(text)
    for edit in edits:
        text = edit.apply(text)
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"with the inserted code, the file would not be valid Python ({error})") from None
    return text


def remove_patch(text: str) -> str:
    return _PATCHED.sub("", text)


def ci_files(framework: str, *, gitlab: bool) -> dict[str, str]:
    """Return the files of a CI job, as {path: text}."""
    workflow = {"gitlab.yml": "ci/gitlab.yml"} if gitlab else {"github.yml": ".github/workflows/mismatch.yml"}
    folder = find_packaged_folder(CI_FOLDER)
    files = {place: (folder / name).read_text(encoding="utf-8") for name, place in {**_CI_FILES, **workflow}.items()}
    if framework:
        integration = read_integration(framework)
        if not integration.ci:
            raise ConfigError(
                f"{integration.name}: its engine and trainer run as a service, so a CI job cannot record them. "
                f"Record a training run (mismatchctl init {integration.name}) and gate its dump"
            )
        for constant, value in (("ENGINE", integration.ci["engine"]), ("TRAINER_DTYPE", integration.ci["dtype"])):
            files["ci/record.py"] = re.sub(
                rf'^{constant} = "\w+"', f'{constant} = "{value}"', files["ci/record.py"], count=1, flags=re.MULTILINE
            )
    return files
