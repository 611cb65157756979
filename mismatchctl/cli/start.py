"""`mismatchctl demo` and `mismatchctl init`: the first commands of a new user."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatchctl.cli import output as out
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.api.integration import Edit, Integration

RUNS = ("dense", "moe")
SAMPLE_FOLDER = "sample_data"
CI = "ci"
_CI_STEPS = """\
Next: set MODEL and ENGINE in ci/record.py, then record a first dump and save it as the baseline.

    python ci/record.py --out dumps/
    mismatchctl gate dumps/ --save-baseline ci/mismatch.json --accept

Commit the files. From then on the job compares each change with ci/mismatch.json.
"""
_AFTER_THE_FIRST_STEP = "After the first training step: mismatchctl init {} --check dumps/"
BACKUP_SUFFIX = ".orig"


def demo(
    folder: Path = Path("demo"), copy: Path | None = None, open_: bool = False, force: bool = False, quiet: bool = False
) -> None:
    """Analyze two sample runs and write a report.

    The sample runs are part of the package, so no network is needed.
    """
    if copy is not None:
        _copy_samples(copy, force, quiet)
        return
    out.make_folder(folder)
    report, saved = folder / "report.html", folder / "result.json"
    out.check_output_paths(report, saved, force=force)
    from mismatchctl.api.analyze.analyze import analyze
    from mismatchctl.frameworks.registry import default_corrections, load_presets
    from mismatchctl.io.files import find_packaged_folder
    from mismatchctl.report.pages.analyze import analyze_screen, document

    samples = find_packaged_folder(SAMPLE_FOLDER)
    with out.write_together(quiet), out.progress_bar(quiet) as progress:
        presets = [preset.correction for preset in load_presets().values()]
        runs = [str(samples / run) for run in RUNS]
        result = analyze(runs, default_corrections(), progress=progress, presets=presets)
        out.write_files(out.render_page_files(lambda: document(result), report))
        out.write_files([(saved, result.to_json().encode())])
    if open_:
        out.open_page(report)
    if not quiet:
        following = "mismatchctl demo --copy sample_data && mismatchctl diagnose sample_data/moe"
        out.print_page(analyze_screen(result, [], asked=False, following=following, report=str(report)))
    out.print_message(f"The report is in {report}. Open it in a browser.", quiet)


def _copy_samples(folder: Path, force: bool, quiet: bool) -> None:
    from mismatchctl.io.files import find_packaged_folder

    samples = find_packaged_folder(SAMPLE_FOLDER)
    files = [(folder / run / file.name, file) for run in RUNS for file in sorted((samples / run).glob("*.parquet"))]
    for run in RUNS:
        out.make_folder(folder / run)
    for place, file in files:
        if place.exists() and not force and place.read_bytes() != file.read_bytes():
            raise ConfigError(
                f"{place}: another file has this name. Choose another folder, or overwrite the file with --force"
            )
    out.write_files((place, file.read_bytes()) for place, file in files)
    out.print_message(f"wrote {len(files)} files to {folder}", quiet)
    out.print_message(f"Next: mismatchctl analyze {' '.join(str(folder / run) for run in RUNS)}", quiet)


def init(
    name: str,
    write: bool = False,
    patch: Path | None = None,
    root: Path | None = None,
    check: str | None = None,
    framework: str = "",
    gitlab: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> None:
    """Print or insert the code that records a dump, or set up a CI job.

    `mismatchctl init NAME` prints the code for a framework, and the file and line where you have to insert it.
    `mismatchctl init ci` writes a recording script, a file of prompts and a CI workflow to the working directory.
    """
    if name == CI:
        if write or patch or root or check:
            raise ConfigError("init ci only accepts the options --framework, --gitlab and --force")
        return _write_ci(framework, gitlab, force, quiet)
    if framework or gitlab:
        raise ConfigError("--framework and --gitlab only work with: mismatchctl init ci")
    from mismatchctl.api.integration import read_integration

    integration = read_integration(name)
    if root is not None and not root.is_dir():
        raise ConfigError(
            f"--root {root}: {'this is a file' if root.exists() else 'the folder does not exist'}; check the path"
        )
    if check is not None:
        _check_dump(check)
    elif write or patch is not None:
        _patch(integration, patch, root, quiet)
    else:
        typer.echo(_describe(integration, root), nl=False)
    return None


def _describe(integration: Integration, root: Path | None) -> str:
    from mismatchctl.api.integration import find_source

    name, version = integration.name, integration.version
    installed = f"{version} is installed" if version else "not installed here"
    lines = [f"# {name}: {installed}. The places below were checked with {integration.tried}."]
    if integration.overrides:
        file, pattern = integration.overrides
        source = find_source(file, root)
        text = "" if source is None else source.read_text(encoding="utf-8")
        match = re.search(pattern, text)
        place = f"{source}:{text.count(chr(10), 0, match.start()) + 1}" if match else file
        if source is not None and match is None:
            place = f"{source}, which has no `{pattern}`: this version was not tested"
        lines.append(f"# uses {place}")
    for number, edit in enumerate(integration.edits, 1):
        where = _place_of_edit(edit, find_source(edit.file, root)) if edit.file else edit.title
        lines += ["", f"# {number}. {where}", edit.code.rstrip("\n")]
    script = "record.py" if integration.edits[-1].title.endswith("record.py") else "train.py"
    own = any(not edit.file for edit in integration.edits)
    lines += ["", *([f"# {integration.note}"] if integration.note else [])]
    lines.append(f"# Insert: mismatchctl init {name} {f'--patch {script}' if own else '--write'}")
    return "\n".join([*lines, f"# {_AFTER_THE_FIRST_STEP.format(name)}", ""])


def _place_of_edit(edit: Edit, source: Path | None) -> str:
    if source is None:
        return f"{edit.file} (not found here; use --root to pass the checkout that contains this file)"
    text = source.read_text(encoding="utf-8")
    at = edit.find(text)
    if at is None:
        return f"{source}: the place for this code was not found in this version. See docs/integrations"
    number = text.count("\n", 0, at)
    line = text.splitlines()[number if edit.before else number - 1].strip()
    return f"{source}:{number + 1 if edit.before else number}, {'before' if edit.before else 'after'} `{line}`"


def _patch(integration: Integration, patch: Path | None, root: Path | None, quiet: bool) -> None:
    from mismatchctl.api.integration import find_source

    if patch is not None:
        patch = patch.resolve()  # if it is a link, patch its target
        text = _read(patch) if patch.exists() else ""
        try:
            targets = [(patch, text, integration.edits_for(patch, text))]
        except ConfigError:
            if patch.exists():
                raise
            raise ConfigError(f"{patch}: the file does not exist; check the path") from None
    else:
        targets = []
        for file, edits in integration.edits_by_file().items():
            if not file:
                raise ConfigError(f"the code belongs in {edits[0].title}; pass that file with --patch FILE")
            source = find_source(file, root)
            if source is None:
                raise ConfigError(
                    f"{file}: not found. Use --root to pass the checkout or site-packages folder that contains it"
                )
            targets.append((source, _read(source), edits))
    modes = {path: path.stat().st_mode for path, _, _ in targets if path.exists()}
    written = [file for target in targets for file in _patched_files(*target)]
    with out.write_together(quiet):
        out.write_files(written)
    for path, mode in modes.items():
        if path.stat().st_mode != mode:
            path.chmod(mode)
    if not written:
        out.print_message("the files already contain the code, so no file was changed", quiet)
    if integration.note:
        out.print_message(integration.note, quiet)
    out.print_message(_AFTER_THE_FIRST_STEP.format(integration.name), quiet)


def _patched_files(path: Path, text: str, edits: list[Edit]) -> list[tuple[Path, bytes]]:
    """Return the patched file and its backup, or [] if the file is already patched."""
    from mismatchctl.api.integration import patch_text, remove_patch

    out.require_local_path(path)
    unix = text.replace("\r\n", "\n")
    try:
        patched = patch_text(unix, edits)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if patched == unix:
        return []
    ends = "\r\n" if "\r\n" in text else "\n"
    files = [(path, patched.replace("\n", ends).encode())]
    if text and remove_patch(unix) == unix:  # not patched before, so there is no backup yet
        files.append((path.with_name(path.name + BACKUP_SUFFIX), text.encode()))
    return files


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a folder; pass a Python file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected a Python file in UTF-8") from None


def _check_dump(path: str) -> None:
    from mismatchctl.api.analyze.analyze import analyze
    from mismatchctl.results.summary import run_status

    for name, run in analyze([path], []).runs.items():
        judged = run_status(run)
        typer.echo(out.escape_text(f"{judged.status:<5}  {name}: {judged.text}"))


def _write_ci(framework: str, gitlab: bool, force: bool, quiet: bool) -> None:
    from mismatchctl.api.integration import ci_files

    files = {Path(name): text for name, text in ci_files(framework, gitlab=gitlab).items()}
    changed = {path: text for path, text in files.items() if not path.exists() or _read(path) != text}
    if existing := [str(path) for path in changed if path.exists() and not force]:
        raise ConfigError(f"{existing[0]}: this file already exists. To overwrite the file, add --force")
    for path in changed:
        out.make_folder(path.parent)
    with out.write_together(quiet):
        out.write_files((path, text.encode()) for path, text in changed.items())
    if quiet:
        return
    if gitlab:
        typer.echo("Add to .gitlab-ci.yml: include: {local: ci/gitlab.yml}")
    typer.echo(_CI_STEPS, nl=False)
