"""`mismatchctl demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli.options import ForceOption, OpenOption, QuietOption
from mismatchctl.cli.output import (
    check_output_paths,
    page_opener,
    print_message,
    print_page,
    progress_bar,
    render_page_files,
    require_local_path,
    write_files,
    write_together,
)
from mismatchctl.errors import ConfigError

RUNS = ("dense", "moe")
SAMPLE_FOLDER = "sample_data"


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the report and the Result.")] = Path("demo"),
    copy: Annotated[
        Path | None,
        typer.Option(help="Write the sample runs to this folder instead, to try other commands.", show_default=False),
    ] = None,
    open_: OpenOption = False,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Analyze two small sample runs, print the summary and write a report.

    The runs are part of the package. The network is not used.
    """
    if copy is not None:
        _copy_samples(copy, force, quiet)
        return
    _make_folder(out)
    report, saved = out / "report.html", out / "result.json"
    check_output_paths(report, saved, force=force)
    open_page = page_opener(report, wanted=open_)
    from mismatchctl.api.analyze.analyze import analyze
    from mismatchctl.api.defaults import corrections_or_default
    from mismatchctl.io.files import find_packaged_folder
    from mismatchctl.report.pages.analyze import document

    samples = find_packaged_folder(SAMPLE_FOLDER)
    with write_together(quiet), progress_bar(quiet) as progress:
        result = analyze([str(samples / run) for run in RUNS], corrections_or_default(None), progress=progress)
        write_files(render_page_files(lambda: document(result), report))
        write_files([(saved, result.to_json().encode())])
    open_page()
    if not quiet:
        print_page(document(result))
    print_message(f"The report is in {report}. Open it in a browser.", quiet)
    print_message("Next: mismatchctl demo --copy sample_data, then mismatchctl diagnose sample_data/moe", quiet)


def _copy_samples(folder: Path, force: bool, quiet: bool) -> None:
    """Copy the sample runs to `folder`/dense and `folder`/moe."""
    from mismatchctl.io.files import find_packaged_folder

    samples = find_packaged_folder(SAMPLE_FOLDER)
    files = [(folder / run / file.name, file) for run in RUNS for file in sorted((samples / run).glob("*.parquet"))]
    for run in RUNS:
        _make_folder(folder / run)
    for place, file in files:
        if place.exists() and not force and place.read_bytes() != file.read_bytes():
            raise ConfigError(f"{place}: exists already and is not the sample. Name another folder, or add --force.")
    write_files((place, file.read_bytes()) for place, file in files)
    print_message(f"wrote {len(files)} files to {folder}", quiet)
    print_message(f"Next: mismatchctl analyze {' '.join(str(folder / run) for run in RUNS)}", quiet)


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents."""
    require_local_path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: the folder cannot be created: {error.strerror or error}") from None
