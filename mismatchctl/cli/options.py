"""Options that several commands share: inputs, engines, outputs and corrections."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from mismatchctl.cli import output as out
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.corrections.model import Correction
    from mismatchctl.data.engines import Engine
    from mismatchctl.data.paths import DumpSource
    from mismatchctl.report.document import Document

BadDataPolicy = Literal["error", "skip", "mask"]


def _may_be_log(path: str) -> bool:
    names = (name for _, _, files in os.walk(path) for name in files)
    by_name = path.lower().endswith((".csv", ".json", ".jsonl", ".ndjson"))
    return by_name or "tfevents" in path or any("tfevents" in name for name in names)


@dataclass(frozen=True)
class PairOptions:
    """Options to read a dump from two files: the rollout's file and the trainer's file."""

    rollout: Path | None = None
    train: Path | None = None
    on: str = ""

    @property
    def keys(self) -> list[str]:
        return [name.strip() for name in self.on.split(",") if name.strip()]

    def sides(self) -> tuple[Path, Path] | None:
        if self.rollout is not None and self.train is not None:
            return self.rollout, self.train
        if self.rollout is not None or self.train is not None:
            raise ConfigError("--rollout and --train must be used together, with one file per side")
        if self.on:
            raise ConfigError("--on only works with --rollout and --train")
        return None


@dataclass(frozen=True)
class InputOptions(PairOptions):
    """Options for the dumps of a command: paths, or two files whose rows are matched by id."""

    paths: list[str] | None = None
    column: list[str] | None = None

    @property
    def names(self) -> list[str]:
        return self.paths or []

    @property
    def files(self) -> list[str | Path]:
        """Return all input files, to check that no output overwrites an input."""
        return [*self.names, *(self.sides() or ())]

    @property
    def words(self) -> list[str]:
        """Return these options as command-line arguments, to suggest another command for the same data."""
        sides = self.sides()
        on = ["--on", self.on] if self.on else []
        return self.names if sides is None else ["--rollout", str(sides[0]), "--train", str(sides[1]), *on]

    def sources(self, quiet: bool) -> Sequence[DumpSource]:
        """Return the paths of dumps, or the table that joins two files. Print a note about ids that one file lacks."""
        sides = self.sides()
        if sides is None:
            if not self.paths:
                raise ConfigError("missing argument DUMPS; pass a dump, or two files with --rollout and --train")
            return self.names
        if self.paths:
            raise ConfigError("pass DUMPS, or --rollout and --train, not both")
        from mismatchctl.data.conversion import pair
        from mismatchctl.data.formats import MemoryTable

        table, notes = pair(*sides, self.keys)
        for note in notes:
            out.print_message(note, quiet)
        return [MemoryTable.of(table, "{} with {}".format(*sides), run=sides[0].stem)]

    @property
    def rename(self) -> dict[str, str]:
        return parse_renames(self.column)

    def are_logs(self, given: Mapping[str, object]) -> bool:
        """Return True if the paths are metrics logs. If so, refuse the options in `given`, because they need a dump."""
        if self.sides() is not None or not any(map(_may_be_log, self.names)):
            return False
        from mismatchctl.api.metrics_log import is_run_log  # slow import

        logs = [path for path in self.names if is_run_log(path)]
        if not logs:
            return False
        if len(logs) < len(self.names):
            raise ConfigError(f"{logs[0]} is a metrics log; pass only logs or only dumps (see also analyze --against)")
        if needless := [name for name, value in given.items() if value]:
            raise ConfigError(f"{self.names[0]} is a metrics log without tokens; leave out {', '.join(needless)}")
        return True


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine that reads dumps: threads of this process, or a Ray cluster."""

    threads: int | None = None
    memory_limit: str | None = None
    engine: Literal["local", "ray"] = "local"
    address: str | None = None

    def build(self) -> Engine:
        if self.engine == "ray":
            if self.threads is not None or self.memory_limit is not None:
                raise ConfigError("--threads and --memory-limit do not work with --engine ray")
            from mismatchctl.data.engines import RayEngine

            return RayEngine(self.address)
        if self.address is not None:
            raise ConfigError("--address only works with --engine ray")
        from mismatchctl.data.engines import LocalEngine, parse_size

        return LocalEngine(self.threads, None if self.memory_limit is None else parse_size(self.memory_limit))


def parse_renames(columns: Sequence[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in columns or ():
        canonical, equals, actual = text.partition("=")
        if not (canonical and equals and actual):
            raise ConfigError(f"--column {text}: write COLUMN=NAME, as in train_log_probs=old_log_probs")
        if found.setdefault(canonical, actual) != actual:
            raise ConfigError(f"--column {text}: {canonical} is already set to {found[canonical]}")
    return found


def parse_share(flag: str, text: str, most: float, remedy: str) -> float:
    """Parse a share such as `20%` or `0.2`. It must be from 0 to `most`."""
    from mismatchctl.io.yaml import parse_number

    try:
        found = parse_number(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= most:
        raise ConfigError(f"{flag} {text}: {remedy}")
    return found


@dataclass(frozen=True)
class OutputOptions:
    """Options for the outputs of a command: the terminal, JSON, HTML, Markdown and figures."""

    json: bool = False
    output: Path | None = None
    html: Path | None = None
    markdown: Path | None = None
    open_: bool = False
    figures: Path | None = None
    figure_format: Literal["svg", "png", "pdf"] = "svg"
    force: bool = False
    verbose: bool = False
    quiet: bool = False

    @property
    def printed(self) -> list[str]:
        """Return the options in use that write to stdout, such as `--json` or `-o -`."""
        places = {"-o": self.output, "--markdown": self.markdown}
        return [*["--json"] * self.json, *(f"{flag} -" for flag, place in places.items() if str(place) == "-")]

    @property
    def has_screen(self) -> bool:
        return not (self.quiet or self.printed)

    def check(self, *more: Path | None, inputs: Iterable[str | Path | None], baseline: Path | None = None) -> None:
        folder, inputs = self.figures, list(inputs)
        if len(self.printed) > 1:
            raise ConfigError(f"{self.printed[0]} and {self.printed[1]} both write to stdout; leave one of them out")
        files = [None if str(place) == "-" else place for place in (self.output, self.markdown)]
        out.check_output_paths(*files, self.html, *more, force=self.force, inputs=inputs, baseline=baseline)
        if self.open_ and self.html is None:
            raise ConfigError("--open needs --html FILE")
        if folder is None:
            return
        out.require_local_path(folder)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--figures {folder}: this is a file; choose a folder")
        if not folder.exists() and not folder.parent.is_dir():
            raise ConfigError(f"--figures {folder}: the folder {folder.parent} does not exist; create it first")
        if out.contains_dump(folder, inputs):
            raise ConfigError(f"--figures {folder}: this folder contains the input dump; choose another folder")

    def write(
        self, data: Callable[[], str], page: Callable[[], Document], save: Callable[[Path], None] | None = None
    ) -> None:
        """Write the requested files. `save` writes the `-o` file. Without `save`, the `-o` file contains `data()`."""
        markdown = None if str(self.markdown) == "-" else self.markdown
        out.write_files(out.render_page_files(page, self.html, markdown))
        if self.output is not None and str(self.output) != "-":
            (save or (lambda place: out.write_files([(place, data().encode())])))(self.output)
        if self.figures is not None:
            self.write_figures(self.figures, page())

    def write_figures(self, folder: Path, page: Document) -> None:
        """Write each figure as a picture and a CSV file, and all captions to one file."""
        from mismatchctl.report.figures.matplotlib_backend import figure_files, figures_of_page

        made, is_new = list(figure_files(figures_of_page(page), self.figure_format)), not folder.exists()
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--figures {folder}: cannot create the folder: {error.strerror or error}") from None
        out.check_output_paths(*(folder / name for name, _ in made), force=self.force)
        try:
            out.write_files((folder / name, make()) for name, make in made)
        except BaseException:
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def finish(
        self, data: Callable[[], str], page: Callable[[], Document], screen: Callable[[], Document],
        warnings: Callable[[], Iterable[str]] = tuple, save: Callable[[Path], None] | None = None,
    ) -> None:  # fmt: skip
        page = cache(page)
        with out.write_together(self.quiet):
            self.write(data, page, save)
        self.show(data, page, screen, warnings)

    def show(
        self, data: Callable[[], str], page: Callable[[], Document], screen: Callable[[], Document],
        warnings: Callable[[], Iterable[str]] = tuple,
    ) -> None:  # fmt: skip
        """With --open, open the HTML page. Then print the Markdown, the JSON or the terminal output."""
        if self.open_ and self.html is not None:
            out.open_page(self.html)
        if str(self.markdown) == "-":
            from mismatchctl.report.markdown import render_markdown

            typer.echo(render_markdown(page()), nl=False)
        elif self.printed:
            out.print_warnings(warnings(), self.quiet)
            typer.echo(data(), nl=False)
        elif not self.quiet:
            out.print_page(screen(), whole=self.verbose)


def select_corrections(
    named: Iterable[str] | None, configs: Iterable[str] | None = None, framework: str = "", *, quiet: bool = False
) -> list[Correction]:
    found: list[Correction] = []
    for text in named or ():
        if text.lstrip().startswith("{"):
            found.append(_parse_inline(text, {item.name for item in found}))
        else:
            found += load_corrections(text)
    for path in configs or ():
        found += _corrections_from_config(path, framework, quiet)
    return found


def _corrections_from_config(path: str, framework: str, quiet: bool) -> list[Correction]:
    from mismatchctl.frameworks.config_files import read_configurations

    configurations = read_configurations(path, framework)
    notes = []
    for written, correction in configurations:
        notes += written.framework.remarks(correction)
        if "@" not in framework:
            notes.append(f"read as {written.framework.dated}; choose another framework with --framework")
        if written.missing:
            notes.append(f"{', '.join(written.missing)} was not found, so the keys of that file count as not set")
    corrections = [correction for _, correction in configurations]
    if len(corrections) > 1:
        notes.append(
            f"the launches or calls in this file differ; all are compared: {', '.join(one.name for one in corrections)}"
        )
    for note in dict.fromkeys(notes):
        out.print_message(f"{path}: {note}", quiet)
    return corrections


def load_corrections(text: str) -> list[Correction]:
    from mismatchctl.corrections.presets import CORRECTION_SUFFIXES, read_corrections
    from mismatchctl.frameworks.registry import find_preset

    is_file = Path(text).suffix in CORRECTION_SUFFIXES
    try:
        if not is_file and os.sep in text:
            raise ConfigError(
                f"--correction {text}: the name of a correction file must end in {', '.join(CORRECTION_SUFFIXES)}"
            )
        return read_corrections(text) if is_file else [find_preset(text)]
    except ConfigError as error:
        from mismatchctl.frameworks.config_files import read_native_configs

        try:
            framework = read_native_configs(text)[0].framework.title
        except ConfigError:
            hint = "" if is_file or os.sep in text else "; `mismatchctl presets` lists them"
            raise ConfigError(f"{error}{hint}") from None
    raise ConfigError(f"--correction {text}: this is a configuration of {framework}; write --config {text} instead")


def _parse_inline(text: str, taken: set[str]) -> Correction:
    """Parse a correction from YAML text. A correction without a name gets a name that is not in `taken`."""
    from mismatchctl.corrections.presets import parse_correction
    from mismatchctl.io.yaml import parse_inline

    data = parse_inline(text, f"--correction {text}")
    if not isinstance(data, dict):
        raise ConfigError(f"--correction {text}: expected a mapping such as {{weight: {{truncate: 2}}}}")
    labels = ["inline", *(f"inline-{number}" for number in range(2, len(taken) + 2))]
    name = next(label for label in labels if label not in taken)
    return parse_correction({"name": name} | data, f"--correction {text}")
