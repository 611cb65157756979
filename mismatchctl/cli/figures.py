"""`--figures DIR`: the figures of a report as files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from mismatchctl.cli.flags import output_option
from mismatchctl.cli.output import page_files, write
from mismatchctl.cli.places import check_places, holds_dump, on_disk
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.render.document import Document
    from mismatchctl.render.figures.figure import Figure


@dataclass(frozen=True)
class FigureFlags:
    """Whether figures become files, where and as what."""

    figures: Annotated[Path | None, output_option(metavar="DIR", help="Write figures, each with CSV.")] = None
    figure_format: Annotated[Literal["svg", "png", "pdf"], output_option(help="Of --figures.")] = "svg"

    def check(self, inputs: Iterable[str | Path | None] = ()) -> None:
        """Refuse, before any work, a folder that figures cannot be written to.

        Raises:
            ConfigError: it is a file, its parent is not there, or it holds the dump that is read.
        """
        folder = self.figures
        if folder is None:
            return
        on_disk(folder)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--figures {folder}: is a file; name a folder")
        if not folder.exists() and not folder.parent.is_dir():
            raise ConfigError(f"--figures {folder}: the folder {folder.parent} does not exist; create it first")
        if holds_dump(folder, inputs):
            raise ConfigError(f"--figures {folder}: holds the dump that is read; name a folder of their own")

    def write_page(self, made: Callable[[], Document], html: Path | None, *, force: bool) -> None:
        """Write a page, its figures as files, or both."""
        if html is None and self.figures is None:
            return
        from mismatchctl.render.figures.export import figures_of_page

        page = made()
        write(page_files(lambda: page, html))
        self.write(lambda: figures_of_page(page), force=force)

    def write(self, drawn: Callable[[], Mapping[str, Figure]], *, force: bool) -> None:
        """Write every figure with its numbers, and the captions of all; the folder is made if it is not there."""
        if self.figures is None:
            return
        from mismatchctl.render.figures.export import files

        folder, made = self.figures, list(files(drawn(), self.figure_format))
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--figures {folder}: cannot be made: {error.strerror or error}") from None
        check_places(*(folder / name for name, _ in made), force=force)
        write((folder / name, make()) for name, make in made)
