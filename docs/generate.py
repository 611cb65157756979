"""Write the reference pages and the JSON Schemas from the code. A test checks that the files are up to date."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

import mismatchctl as mm
from mismatchctl.api import inputs
from mismatchctl.api.compare.comparison import Comparison
from mismatchctl.cli.main import app
from mismatchctl.core.formatting import escape_markdown
from mismatchctl.core.schema import COLUMNS, POSITIVE_TOLERANCE
from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.corrections.presets import TRAIT_TITLES, list_traits
from mismatchctl.data.importers.rows import TOKEN_COLUMNS, all_layouts
from mismatchctl.diagnosis.causes.registry import CAUSES, load_texts
from mismatchctl.diagnosis.diagnosis import diagnosis_schema
from mismatchctl.frameworks.adapter import FileLayout
from mismatchctl.frameworks.glossary import describe_names
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.frameworks.registry import load_presets as all_presets
from mismatchctl.io import __version__
from mismatchctl.io.yaml import read_data
from mismatchctl.measure.columns import PAIRS, POLICY_NAMES, Pair
from mismatchctl.measure.metrics.evaluation import pair_metrics
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.measure.metrics.registry import FACETS, MISMATCH_METRICS, SPLITS, Facet, correction_metrics
from mismatchctl.measure.reduction import MOST_VALUES
from mismatchctl.results.model import result_schema

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.oracles.tolerances import ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCES  # noqa: E402

NOTICE = "<!-- Written by docs/generate.py (make docs); edit the code instead. -->\n"


def contract() -> str:
    """Return the page on the dump format."""
    names: dict[str, list[str]] = {}
    for alias, canonical in column_aliases().items():
        names.setdefault(canonical, []).append(f"`{alias}`")
    rows = [
        f"| `{column.name}` | {'yes' if column.required else ''} | {column.kind.value} | {column.unit} "
        f"| {column.meaning} | {', '.join(sorted(names.get(column.name, [])))} |"
        for column in COLUMNS
    ]
    return "\n".join(
        [
            "# Dump format",
            NOTICE,
            "This page lists the columns of a dump. A dump has one row per sequence, with lists that contain one value",
            "per token, or it has one row per token. Dumps with one row per token also need the columns `sequence_id`",
            "and `position`. You can add your own columns. For example, `analyze --by domain` shows the metrics for",
            f"each value of the column `domain`. For this, a column can have at most {MOST_VALUES:,} different values.",
            "",
            "| column | required | values | unit | meaning | also known as |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "- The Arrow type of a list can be list, large_list or fixed_size_list. Floats can have 16, 32 or 64",
            "  bits. A mask can be boolean, integer or float.",
            "- Rows may be padded on either side, because the mask marks the valid tokens. Masked positions may",
            "  have any value, including NaN.",
            "- The log-probs of valid tokens must be finite and at most 0. mismatchctl accepts rounding errors",
            f"  of up to {POSITIVE_TOLERANCE:g} above 0.",
            "- Each path that you pass is a run, unless the dump has a `run` column. Rows of one step form a group,",
            "  and sequences of one prompt form a cluster. Two runs may use the same ids.",
            "- If an optional column of a file is empty in all rows, mismatchctl treats the column as absent.",
            "- You can pass files, folders (read recursively, in natural order), globs and Hive folders (`step=12/`).",
            "",
        ]
    )


def metrics() -> str:
    """Return the page on metrics."""
    example = Correction(name="example", gates=(Gate(level="min", keep=(1e-4, None)),))
    return "\n".join(
        [
            "# Metrics",
            NOTICE,
            "This page defines every metric. Log-probs and their differences are in nats.",
            "The key of a metric never changes. A mean has a standard error and a 95% interval, which treat the",
            "responses to one prompt as one cluster. If the dump lacks prompt ids, each response is a cluster. If a",
            "few clusters or rare weights dominate a value, its interval is too narrow. The field `tail` is then",
            "`heavy_tail`, and `covers` contains the real coverage ([methods](../methods/gate.md#intervals)). If a",
            "metric is undefined, its value is null, and the field `status` contains the reason.",
            "",
            "The last column lists the names of the metric in the logs of frameworks. The names after *similar* belong",
            "to metrics with another definition. The text after such a name describes the difference.",
            "`mismatchctl metrics NAME` explains a logged name.",
            "",
            "## Mismatch",
            *_table(MISMATCH_METRICS),
            *(line for pair in PAIRS[1:] for line in (f"## {pair.section}, with {_columns(pair)}", *_pair_table(pair))),
            *(
                line
                for facet in FACETS
                for line in (
                    f"## {facet.section}" + (f", with {_columns(facet)}" if facet.needs else ""),
                    *_table(facet.metrics),
                )
            ),
            "## Corrections",
            "The table shows a correction with one gate, a veto. Keys with `gate0_` belong to the first gate of a",
            "correction, and keys with `gate1_` to the second gate.",
            "",
            *_table(correction_metrics(example)),
            "",
            "## Accuracy",
            "`tests/measure/test_accuracy.py` computes the metrics with 60 digits, for log ratios of 1e-12 to 100.",
            "The relative error of a metric is at most the value in the table, or its absolute error is at most",
            f"{ABSOLUTE_TOLERANCE:g}. Counts are exact. The test leaves out k-hat, z and the worst share.",
            "",
            "| largest relative error | metrics |",
            "|---|---|",
            *(
                f"| {bound:g} | {', '.join(f'`{key}`' for key, own in RELATIVE_TOLERANCES.items() if own == bound)} |"
                for bound in sorted(set(RELATIVE_TOLERANCES.values()))
            ),
            "",
        ]
    )


def _pair_table(pair: Pair) -> list[str]:
    """Return the metrics of a pair of policies: a list of the metrics of the mismatch, and a table of the others."""
    others = [metric for metric in pair_metrics(pair) if metric in SPLITS.get(pair.name, ()) or _names(metric)]
    sides = ((POLICY_NAMES[pair.policy], "trainer"), (POLICY_NAMES[pair.reference], "rollout"))
    instead = " and ".join(f"the {other} instead of the {name}" for other, name in sides if other != name)
    names = ", ".join(f"`{metric.key}`" for metric in pair_metrics(pair) if metric not in others)
    text = f"Metrics of the first table, computed for {instead}: {names}."
    return ["", text, *(_table(others) if others else [""])]


def _columns(of: Pair | Facet) -> str:
    either = " or ".join(f"`{column}`" for column in of.either) if isinstance(of, Facet) else ""
    return " and ".join([*(f"`{column}`" for column in sorted(of.needs)), *([either] if either else [])])


def _table(found: Iterable[Metric]) -> list[str]:
    rows = [
        "| "
        + " | ".join(
            _cell(text)
            for text in (
                f"`{metric.key}`",
                metric.unit,
                metric.definition,
                metric.meaning,
                metric.source,
                _names(metric),
            )
        )
        + " |"
        for metric in found
    ]
    return [
        "",
        "| key | unit | definition | meaning | source | in frameworks |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def _names(metric: Metric) -> str:
    """Return the frameworks' names of a metric, then the names of similar metrics after "similar"."""
    lines = describe_names(metric)
    return "<br>".join([*lines.get("known as", []), *(f"similar: {line}" for line in lines.get("similar", []))])


def _cell(text: str) -> str:
    """Escape vertical bars, which would end the cell."""
    return text.replace("|", "\\|")


def presets() -> str:
    """Return the page on presets and correction files."""
    every = list_traits(all_presets())
    rows = ["| " + " | ".join(_cell(str(value)) for value in row.values()) + " |" for row in every]
    return "\n".join(
        [
            "# Presets and correction files",
            NOTICE,
            "A preset is a correction with a name. This page lists all presets and the fields of a correction file.",
            "`mismatchctl presets --table` prints the same table, and `presets show NAME` prints a preset as YAML.",
            "The table distinguishes three policies. *rollout* sampled the tokens. *train* is the trainer before the",
            "update, and *current* is the trainer during the update. *Old policy* is the policy in the denominator of",
            "PPO's ratio. In bypass mode, the trainer only computes the log-probs of *current*, and PPO's ratio or the",
            "importance weight is current/rollout. In the column *corrects*, *rollout to train* means that a weight is",
            "train/rollout. *Batch invariant* is verl's term for corrections with three policies. PPO's clip then",
            "limits an update by the same amount for every batch size.",
            "",
            "| " + " | ".join(TRAIT_TITLES.values()) + " |",
            "|" + "---|" * len(TRAIT_TITLES),
            *rows,
            "",
            *_correction_files(),
        ]
    )


CAUSE_SECTIONS = {
    "Log-probs recorded wrong": (
        "constant_column", "probabilities_not_logs", "wrong_sign", "wrong_log_base", "log_densities", "cumulative",
        "sequence_means", "low_precision_logging", "clamped", "other_token_recorded", "identical",
    ),
    "Rows, tokens and masks": (
        "length_mismatch", "misaligned", "packed_columns", "reversed_rows", "swapped_rows", "duplicated_rows",
        "mask_wrong", "unmasked_padding", "padding_or_sentinel", "unsampled_tokens",
    ),
    "Different tokens or context": (
        "edited_response", "retokenized", "context_mismatch", "position_mismatch", "engine_state", "stale_prefix",
    ),
    "Sampling settings": (
        "temperature", "truncated_sampling", "raw_logprobs", "sampling_settings", "logit_penalty", "logit_bias",
        "logit_softcap", "other_vocabulary",
    ),
    "Model weights": (
        "stale_policy", "weights_never_updated", "stale_worker", "stale_step", "growing_mismatch", "weights_differ",
        "quantized_rollout", "other_model",
    ),
    "Precision and kernels": (
        "moe_routing", "cache_quantization", "batch_dependent_kernels", "numerical_noise", "unexplained",
    ),
}  # fmt: skip
"""The ids of the causes in each table of the guide on causes."""

ADVICE_WORDS = 20
"""Approximate length of an advice in the guide on causes."""


def causes() -> str:
    """Return the guide on causes with the output of its command and new tables of all causes."""
    text, mark, _ = _with_outputs(Path(__file__).parent / "guides/causes.md").partition(
        "<!-- docs/generate.py writes the tables below. -->\n"
    )
    every = {cause.id: cause for cause in CAUSES}
    lines = [text + mark]
    for title, keys in CAUSE_SECTIONS.items():
        lines += [f"### {title}", "", "| cause | how it shows | what to do first |", "|---|---|---|"]
        for key in keys:
            cause, advice = every.pop(key), load_texts()[key]["advice"].replace("{settings}", "")
            lines.append(f"| {cause.title}<br>`{key}` | {_cell(cause.shows)} | {_cell(_shorten(advice))} |")
        lines.append("")
    if every:
        raise ValueError(f"CAUSE_SECTIONS does not contain {', '.join(every)}")
    return "\n".join(lines)


def _shorten(text: str) -> str:
    """Return the first sentence of a text, one more if it is short, and all others that fit into `ADVICE_WORDS`."""
    kept, *others = re.split(r"(?<=[.!?]) (?=[A-Z`])", text)
    for sentence in others:
        if len(kept.split()) > ADVICE_WORDS // 2 and len(f"{kept} {sentence}".split()) > ADVICE_WORDS:
            break
        kept = f"{kept} {sentence}"
    return kept


def _correction_files() -> list[str]:
    """Return the fields of a correction file."""
    schema = Correction.model_json_schema()
    lines = [
        "## Correction files",
        "",
        "`-c FILE` and `-c '{...}'` read a correction as YAML, TOML or JSON. `mismatchctl presets show NAME` prints a",
        "preset in this form. `--config FILE` reads the configuration of a framework ([guide](../guides/configs.md)).",
        "",
        "```yaml",
        "name: mine",
        "weight: {level: token, clip: [0.5, 2], normalize: token}",
        "gates:",
        "  - {level: geometric, keep: [0.99, 1.01]}",
        "  - {level: min, keep: [1.0e-4, null]}   # a veto",
        "```",
        "",
    ]
    for title, model in (("Correction", schema), *schema["$defs"].items()):
        lines += [f"### {title}", "", "| field | values | default | meaning |", "|---|---|---|---|"]
        for name, field in model["properties"].items():
            values, default = _values(field), json.dumps(field["default"]) if "default" in field else ""
            meaning = _cell(_plain(field.get("description", "")))
            lines.append(f"| `{name}` | {values} | {f'`{default}`' if default else ''} | {meaning} |")
        lines.append("")
    return lines


def _values(field: dict[str, Any]) -> str:
    """Describe the values that a field of a JSON Schema accepts."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_values(part) for part in field["anyOf"]))
    if field.get("type") == "array":
        inner = field.get("items") or field.get("prefixItems", [{}])[0]
        return f"[{_values(inner)}, {_values(inner)}]" if "prefixItems" in field else f"list of {_values(inner)}"
    return {"object": "mapping"}.get(field.get("type", ""), field.get("type", ""))


def importers() -> str:
    """Return the page on framework files, with a new table for each layout between its marks."""
    text = (Path(__file__).parent / "reference/framework-files.md").read_text(encoding="utf-8")
    for layout in all_layouts().values():
        before, begin, rest = text.partition(f"<!-- {layout.framework}, from its layout -->\n")
        if not begin:
            raise ValueError(f"docs/reference/framework-files.md has no mark for {layout.framework}")
        _, end, after = rest.partition("<!-- end -->\n")
        text = before + begin + _layout(layout) + end + after
    return text


def _layout(layout: FileLayout) -> str:
    files = f"- Files: {', '.join(f'`{pattern}`' for pattern in layout.patterns)}"
    if not layout.columns:
        return f"\n{files}\n\n"
    axis = "prompt and response" if layout.prompt else "only the response"
    padding = "without padding" if layout.padding == "none" else f"with padding on the {layout.padding}"
    columns = [
        f"| `{column}` | `{name}` | {_about(layout, column) if column in TOKEN_COLUMNS else ''} |"
        for column, name in layout.columns.items()
    ]
    marks = ", ".join(map(str, layout.missing))
    missing = [f"- The framework writes a missing log-prob as {marks}. mismatchctl masks and counts such tokens."]
    return "\n".join(
        [
            "",
            files,
            f"- Rows: each row contains {axis}, {padding}.",
            f"- Mask: {layout.mask}.",
            *(missing if layout.missing else []),
            *(
                ["- If the files of several ranks have the same row, mismatchctl reads it once."]
                if layout.duplicates
                else []
            ),
            "",
            "| column | read from | entry t belongs to |",
            "|---|---|---|",
            *columns,
            "",
            "",
        ]
    )


def _about(layout: FileLayout, column: str) -> str:
    return "token t + 1" if column in layout.next_token else "token t"


def cli() -> str:
    """Return the page on commands, with the arguments and options of `--help`."""
    head = [
        "# Commands",
        NOTICE,
        "This page lists the options of each command, as `mismatchctl COMMAND -h` does. Some commands also exist as",
        "[Python functions](python.md). You can also set options in `[tool.mismatchctl]` of `pyproject.toml`, in",
        "`mismatchctl.toml`, or in environment variables (`MISMATCHCTL_*`). An option on the command line has",
        "priority. `mismatchctl doctor` lists the settings, with the file or variable that contains each setting.",
        "",
    ]
    return "\n".join([*head, *_commands(get_command(app), "mismatchctl")])


def _commands(command: Any, path: str) -> Iterator[str]:
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        if not inner.hidden:
            yield from _command(inner, f"{path} {name}")
            yield from _commands(inner, f"{path} {name}")


def _command(command: Any, path: str) -> Iterator[str]:
    taken = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    arguments = [one for one in taken if one.param_type_name == "argument"]
    usage = " ".join((one.metavar or one.name).upper() for one in arguments)
    yield from (f"## `{path}`", "", f"    {path} [OPTIONS] {usage}".rstrip(), "", _plain(command.help or ""), "")
    if taken:
        yield from ("| argument or option | default | meaning |", "|---|---|---|")
    for one in taken:
        spelt = ", ".join(f"`{word}`" for word in (*one.opts, *one.secondary_opts))
        named = f"`{(one.metavar or one.name).upper()}`" if one.param_type_name == "argument" else spelt
        yield f"| {named} | {_default(one)} | {_cell(_plain(one.help or ''))} |"
    yield ""


def _plain(text: str) -> str:
    return "\n".join(line.strip() for line in text.split("\f")[0].splitlines()).strip()


def _default(option: Any) -> str:
    value = option.default
    if option.required:
        return "required"
    if value in (None, "", (), False) or callable(value) or option.show_default is False:
        return ""
    return f"`{getattr(value, 'value', value)}`"


def schema() -> str:
    """The JSON Schema of a Result."""
    return json.dumps(result_schema(), indent=1) + "\n"


def comparison() -> str:
    """The JSON Schema of a Comparison."""
    schema = Comparison.model_json_schema(mode="serialization")
    return json.dumps(schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"}, indent=1) + "\n"


def diagnosis() -> str:
    """The JSON Schema of a diagnosis."""
    return json.dumps(diagnosis_schema(), indent=1) + "\n"


def python_reference() -> str:
    """Return the page on the Python API, with the signature of each public name."""
    functions = [name for name in mm.__all__ if not inspect.isclass(getattr(mm, name))]
    classes = [name for name in mm.__all__ if name not in functions]
    lines = [
        "# Python reference",
        NOTICE,
        "This page lists all functions and classes of mismatchctl. The [guide](../guides/python.md) shows examples.",
        "",
    ]
    lines += ["## Types of arguments", "", "| name | what it is |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(about)} |" for name, about in _aliases().items()]
    lines += ["", "## Functions", ""]
    for name in functions:
        lines += _callable(f"mm.{name}", getattr(mm, name), 3)
    lines += ["## Classes", ""]
    for name in classes:
        lines += _class(name, getattr(mm, name))
    return "\n".join(lines)


def _aliases() -> dict[str, str]:
    """Return the type aliases that signatures use, each with its docstring."""
    tree = ast.parse(inspect.getsource(inputs)).body
    pairs = itertools.pairwise(tree)
    return {
        node.target.id: f"{_plain(about.value.value)} `{_type(ast.unparse(node.value))}`"
        for node, about in pairs
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(about, ast.Expr)
        and isinstance(about.value, ast.Constant) and isinstance(about.value.value, str) and node.value is not None
    }  # fmt: skip


def _type(text: str) -> str:
    """Format a type: bars between alternatives, and quotes only around literals."""
    text = text if "Literal" in text else re.sub(r"[\"']", "", text)
    match = re.fullmatch(r"Union\[(.*)\]", text)
    return " | ".join(re.split(r", (?![^\[]*\])", match[1])) if match else text


def _class(name: str, kind: type) -> list[str]:
    lines = [f"### `mm.{name}`", "", inspect.getdoc(kind) or "", ""]
    if issubclass(kind, Exception):
        return lines
    for member in sorted(dir(kind)):
        made = inspect.getattr_static(kind, member)
        own = any(member in vars(base) for base in kind.__mro__ if base.__module__.startswith("mismatchctl"))
        if member.startswith("_") or not own:
            continue
        if inspect.isfunction(made):
            lines += _callable(f"{name}.{member}", made, 4)
        elif isinstance(made, property):
            lines += [f"#### `{name}.{member}`", "", _plain(inspect.getdoc(made) or ""), ""]
    return lines


def _callable(name: str, function: Any, level: int) -> list[str]:
    """Return the signature, the text and a table of the parameters."""
    found = inspect.signature(function)
    given = [one for one in found.parameters.values() if one.name != "self"]
    text, sections = _docstring(function)
    body = [f"    {line}," for line in _parameters(given)]
    returned = re.sub(r"[\"']", "", str(found.return_annotation))
    lines = [
        f"{'#' * level} `{name}`",
        "",
        "```python",
        *([f"{name}(", *body, f") -> {returned}"] if body else [f"{name}() -> {returned}"]),
        "```",
        "",
        text,
        "",
    ]
    if "Args" in sections:
        lines += ["| parameter | meaning |", "|---|---|"]
        lines += [f"| `{key.replace(', ', '`, `')}` | {_cell(about)} |" for key, about in sections["Args"]]
        lines.append("")
    for title in ("Returns", "Raises"):
        if title in sections:
            lines += [
                f"{title}: " + " ".join(f"`{key}`: {about}" if key else about for key, about in sections[title]),
                "",
            ]
    return lines


def _parameters(given: list[inspect.Parameter]) -> Iterator[str]:
    """Return each parameter with its type and default, and a star before the keyword-only parameters."""
    starred = False
    for one in given:
        if one.kind is one.VAR_POSITIONAL:
            starred = True
        elif one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        star = "*" if one.kind is one.VAR_POSITIONAL else ""
        default = "" if one.default is one.empty else f" = {one.default!r}"
        yield f"{star}{one.name}: {_type(str(one.annotation))}{default}"


def _docstring(function: Any) -> tuple[str, dict[str, list[tuple[str, str]]]]:
    """Return the text of a Google-style docstring, and its sections as (name, text)."""
    head, *rest = re.split(r"^(Args|Returns|Raises):\n", inspect.getdoc(function) or "", flags=re.MULTILINE)
    sections: dict[str, list[tuple[str, str]]] = {}
    for title, block in zip(rest[::2], rest[1::2], strict=True):
        lines = textwrap.dedent(block).strip().splitlines()
        found: list[tuple[str, str]] = []
        for line in lines:
            match = None if title == "Returns" else re.match(r"(\*?\w+(?:, \w+)*): (.*)", line)
            if match:
                found.append((match[1], match[2]))
            else:
                key, about = found.pop() if found else ("", "")
                found.append((key, f"{about} {line.strip()}".strip()))
        sections[title] = found
    examples = re.sub(r"^>>>.*(?:\n.+)*", "```pycon\n\\g<0>\n```", head.strip(), flags=re.MULTILINE)
    return examples, sections


def errors() -> str:
    """Return the error catalogue: the message of each command of errors.toml with its cause and fix."""
    data = read_data(Path(__file__).parent / "errors.toml")
    lines = [
        "# Errors and exit codes",
        NOTICE,
        "A command prints an error as one line on stderr, with the place, the problem and a remedy. A command writes",
        "its output files completely or not at all. In Python, a function raises `mm.ConfigError` if the command would",
        "exit with code 2, and `mm.DataError` if it would exit with code 4.",
        "",
        "| exit code | meaning | examples |",
        "|---|---|---|",
        *(f"| {code} | {meaning} | {examples} |" for code, meaning, examples in data["codes"]),
        "",
        "The messages below come from real commands. Most messages start with the file or the option that is wrong.",
    ]
    with workplace(data["files"]):
        for family in data["families"]:
            lines += ["", f"## {family['title']}", ""]
            lines += ["| message | exit code | cause | fix |", "|---|---|---|---|"]
            for command, cause, fix in family["errors"]:
                done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "1000"})
                message = done.stderr.strip().removeprefix("error: ")
                if done.exit_code in (0, 1) or not message or "\n" in message:
                    raise ValueError(f"{command}: exit code {done.exit_code}, {message!r}")
                lines.append(f"| `{escape_markdown(message, code=True)}` | {done.exit_code} | {cause} | {fix} |")
    return "\n".join([*lines, ""])


@contextlib.contextmanager
def workplace(files: dict[str, str]) -> Iterator[None]:
    """Change to a temporary folder that contains the files."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for name, text in files.items():
                Path(name).write_text(text.lstrip("\n"), encoding="utf-8")
            yield
        finally:
            os.chdir(before)


OUTPUT = re.compile(r"```console\n\$ (mismatchctl [^\n]+)\n(?!\$)[^`]*```")
"""A block with one command and its output."""


def _with_outputs(page: Path) -> str:
    """Return a page with the output of its commands computed again."""

    def block(match: re.Match[str]) -> str:
        done = CliRunner().invoke(app, shlex.split(match[1])[1:], env={"COLUMNS": "80"})
        return f"```console\n$ {match[1]}\n{done.stdout.rstrip()}\n```"

    before = Path.cwd()
    os.chdir(ROOT)
    try:
        return OUTPUT.sub(block, page.read_text(encoding="utf-8"))
    finally:
        os.chdir(before)


PINNED = ("../action.yml", "../.github/workflows/accept.yml", "../templates/mismatch.yml", "guides/ci.md",
          "../templates/ci/github.yml", "../templates/ci/gitlab.yml")  # fmt: skip
"""Files that install or call a version of mismatchctl."""


def _pin(name: str) -> str:
    """Return a file with the version of this package."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return re.sub(r"(mismatchctl(?:@v|==|-)|\.yml@v)\d+\.\d+\.\d+", rf"\g<1>{__version__}", text)


DOCUMENTS = {
    **{name: partial(_pin, name) for name in PINNED},
    "../README.md": partial(_with_outputs, ROOT / "README.md"),
    "guides/corrections.md": partial(_with_outputs, ROOT / "docs/guides/corrections.md"),
    "reference/dump-format.md": contract,
    "reference/metrics.md": metrics,
    "reference/presets.md": presets,
    "guides/causes.md": causes,
    "reference/errors.md": errors,
    "reference/commands.md": cli,
    "reference/python.md": python_reference,
    "reference/framework-files.md": importers,
    "reference/result.schema.json": schema,
    "reference/comparison.schema.json": comparison,
    "reference/diagnosis.schema.json": diagnosis,
}


if __name__ == "__main__":
    for name, document in DOCUMENTS.items():
        (Path(__file__).parent / name).write_text(document(), encoding="utf-8")
