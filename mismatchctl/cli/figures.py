"""`--figures DIR`: the figures of a report as files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatchctl.cli.flags import OUTPUTS
from mismatchctl.cli.output import check_places, holds_dump, on_disk, write
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.render.document import Document
    from mismatchctl.render.figures.figure import Figure


class Picture(str, Enum):
    """What figures are written as."""

    svg = "svg"
    png = "png"
    pdf = "pdf"


FigureFolder = Annotated[
    Path | None,
    typer.Option("--figures", metavar="DIR", help="Write figures, each with CSV.", rich_help_panel=OUTPUTS),
]
FigureFormat = Annotated[Picture, typer.Option("--figure-format", help="Of --figures.", rich_help_panel=OUTPUTS)]


def check_folder(folder: Path | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse, before any work, a folder that figures cannot be written to.

    Raises:
        ConfigError: it is a file, its parent is not there, or it holds the dump that is read.
    """
    if folder is None:
        return
    on_disk(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--figures {folder}: is a file; name a folder")
    if not folder.exists() and not folder.parent.is_dir():
        raise ConfigError(f"--figures {folder}: the folder {folder.parent} does not exist; create it first")
    if holds_dump(folder, inputs):
        raise ConfigError(f"--figures {folder}: holds the dump that is read; name a folder of their own")


def write_page(page: Document, html: Path | None, folder: Path | None, picture: Picture, *, force: bool) -> None:
    """Write a page, its figures as files, or both."""
    if html is not None:
        from mismatchctl.render.to import html as to

        write([(html, to.html(page).encode())])
    if folder is not None:
        from mismatchctl.render.figures.export import figures_of_page

        write_figures(figures_of_page(page), folder, picture, force=force)


def write_figures(figures: Mapping[str, Figure], folder: Path, picture: Picture, *, force: bool) -> None:
    """Write every figure with its numbers, and the captions of all; the folder is made if it is not there."""
    from mismatchctl.render.figures.export import files

    made = list(files(figures, picture.value))
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--figures {folder}: cannot be made: {error.strerror or error}") from None
    check_places(*(folder / name for name, _ in made), force=force)
    write((folder / name, make()) for name, make in made)
