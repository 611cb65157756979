"""First screen and page of `advise`: what to fix first, the configuration to paste, and the ranking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mismatchctl.api.advise import advice as api
from mismatchctl.core.formatting import escape_terminal, format_command
from mismatchctl.io.yaml import dump_yaml
from mismatchctl.report import document as doc
from mismatchctl.report.tables import MAX_RUNS, text_cell
from mismatchctl.results.summary import STATUSES, first_sentence, percent

MAX_CONFIG_LINES = 12
"""Maximum lines of a configuration on the first screen."""


def advise_screen(found: Mapping[str, api.RunAdvice], paths: Sequence[str], *, full: bool = False) -> doc.Document:
    """Build the first screen: the advice, the configuration to paste, and the runner-up. `full` adds the reasons."""
    order = sorted(found, key=lambda run: STATUSES.index(api.advice_status(found[run])))
    advice = found[order[0]]
    if len(found) == 1:
        title, parts = f"{order[0]}: {api.advice_headline(advice)}", _screen_parts(advice)
    else:
        changes = sum(api.advice_status(own) != "OK" for own in found.values())
        title, parts = f"{changes} of {len(found)} runs need a fix or a correction", _runs_parts(found, order)
    screen = doc.Document(doc.Headline(title, status=api.advice_status(advice)))
    screen.add(doc.Section("", "advice").add(*parts))
    if full:
        screen.sections += document(found).sections
    screen.commands = [*([] if full else [("Reasons", "-v")]), ("Next", _next_command(advice, paths))]
    return screen


def _screen_parts(advice: api.RunAdvice) -> Iterator[doc.DocumentPart]:
    if advice.fix_first is not None:
        rows = [("do", first_sentence(advice.fix_first.advice))]
        failed = api.advice_status(advice) == "FAIL"
        yield doc.Facts(rows + [("else", f"if that is ruled out, use {own.title}") for own in advice.advice[:failed]])
        if failed:
            return
    if not advice.advice:
        yield doc.Facts([("yours", note) for note in advice.notes[1:]])
        return
    best, second = advice.advice[0], advice.runner_up
    if best.name != "none":
        yield _config_part(advice)
    rows = [("known", best.outcome)] if best.outcome else []
    if best.name == "none" and advice.default is not None:
        price = f"{percent(1 - advice.default.ess)} of the ESS"
        rows.append(("by default", f"documents recommend {advice.default.title} anyway; its price here: {price}"))
    if second is not None:
        text = api.candidate_label("none") if second.name == "none" else f"{second.title}: {api.describe_gain(second)}"
        text += ", not significantly worse" if second.ties else ""
        rows.append(("runner-up", f"{text}{f'; {second.outcome}' if second.outcome else ''}"))
    for own in advice.yours:
        text = api.compare_with_yours(own, best).removeprefix("yours: ")
        rows.append(("yours", f"{text}{f'; {own.outcome}' if own.outcome else ''}"))
    if advice.growth is not None:
        rows.append(("trend", f"K3 grew {advice.growth:.3g}x within this dump: repeat the advice on its last steps"))
    size = f"{advice.sequences:,} sequences of {advice.prompts:,} prompts, {advice.batch:,} per update"
    yield doc.Facts([*rows, ("data", f"{advice.severity} mismatch; {size}")])


def _config_part(advice: api.RunAdvice) -> doc.Code:
    best = advice.advice[0]
    title = "As YAML (for a framework's keys: --for NAME):"
    lines = dump_yaml(best.config if advice.framework else best.correction).splitlines()
    if advice.framework:
        title = f"Paste into {advice.framework}:"
        lines = lines if best.config else [f"{advice.framework} has no keys for it"]
    more = [f"({len(lines) - MAX_CONFIG_LINES} more lines: -v)"] if len(lines) > MAX_CONFIG_LINES else []
    return doc.Code(title, "\n".join([*lines[:MAX_CONFIG_LINES], *more]), reach=doc.TERMINAL_AND_PAGE)


def _runs_parts(found: Mapping[str, api.RunAdvice], order: Sequence[str]) -> Iterator[doc.DocumentPart]:
    columns: doc.TableColumns[str] = (
        ("run", lambda run: doc.TableCell(escape_terminal(run), kind="name")),
        (doc.ColumnHeader("status", numeric=False, drop=0), lambda run: api.advice_status(found[run])),
        (doc.ColumnHeader("advice", numeric=False, drop=1, flexible=True), lambda run: api.advice_headline(found[run])),
    )
    yield doc.Table.of("", order[:MAX_RUNS], columns, reach=doc.EVERYWHERE)
    if len(order) > MAX_RUNS:
        yield doc.Note(f"{len(order) - MAX_RUNS} more runs: -v")


def _next_command(advice: api.RunAdvice, paths: Sequence[str]) -> str:
    if advice.fix_first is not None:
        return format_command("diagnose", paths)
    if not advice.advice:
        return format_command("sweep", paths)
    if advice.advice[0].name == "none" and advice.growth is not None:
        return format_command("diagnose", paths)
    if advice.advice[0].name == "none":
        return format_command("gate", paths, "--save-baseline ok.json --accept")
    return format_command("analyze", paths, f"-c {advice.advice[0].name}")


def document(found: Mapping[str, api.RunAdvice]) -> doc.Document:
    """Build the page of the advice for each run."""
    made = doc.Document(doc.Headline("", subtitle="advise"))
    for index, (run, advice) in enumerate(found.items()):
        title = ": ".join(filter(None, (run, api.advice_headline(advice))))
        made.add(_advice_section(doc.Section(escape_terminal(title), f"advice-{index}"), advice))
    return made


def _advice_section(section: doc.Section, advice: api.RunAdvice) -> doc.Section:
    notes = [doc.Note(f"{note}.", "quiet") for note in advice.notes]
    if advice.fix_first is not None:
        section.add(doc.Note(advice.fix_first.summary), doc.Note(advice.fix_first.advice))
    if not advice.advice:
        return section.add(*notes)

    def figure() -> Iterator[doc.Figures]:
        from mismatchctl.report.figures.bars import advice_figure  # slow import, only needed for HTML

        yield doc.Figures([advice_figure(advice, f"{section.anchor}-front")])

    yours = (escape_terminal(api.compare_with_yours(own, advice.advice[0])) for own in advice.yours)
    reasons = (*yours, *_describe_others(advice), *_describe_confidence(advice))
    section.add(_ranking_table(advice), *(doc.Note(f"{text}.") for text in reasons))
    section.add(doc.DeferredSection(figure), *notes)
    for own in filter(None, (advice.advice[0], advice.runner_up)):
        config = own.config if advice.framework else own.correction
        if config and own.name != "none":
            name = f"{own.name}{f' for {advice.framework}' if advice.framework else ''}:"
            section.add(doc.Code(name, dump_yaml(config), reach=doc.TERMINAL_AND_PAGE))
    return section


def _describe_others(advice: api.RunAdvice) -> Iterator[str]:
    """Describe ties with the first correction, and why the next one is worse."""

    def name(own: api.RankedCorrection) -> str:
        return escape_terminal(api.candidate_label(own.name))

    first, *others = advice.advice
    ties = [name(own) for own in others if own.ties]
    if ties:
        names = " and ".join(filter(None, (", ".join(ties[:-1]), ties[-1])))
        yield f"Not significantly worse than {name(first)}: {names}"
    behind = next((own for own in others if not own.ties), None)
    if behind is not None and first.mse:
        yield f"{name(behind)} has {behind.mse / first.mse:.3g} times the error of {name(first)}: {behind.why}"


def _describe_confidence(advice: api.RunAdvice) -> Iterator[str]:
    if advice.stable is not None:
        yield f"Same advice, or a tie, in {percent(advice.stable)} of random halves of the prompts"
    for own in (*advice.advice, *advice.yours):
        if own.outcome:
            yield f"{escape_terminal(own.name)}: {own.outcome}"


def _ranking_table(advice: api.RunAdvice) -> doc.Table:
    scale = advice.uncorrected
    columns: doc.TableColumns[api.RankedCorrection] = (
        ("correction", lambda own: text_cell(own.name, "name")),
        (doc.ColumnHeader("error", description="gradient error of an update, scaled by the best factor", drop=0),
         lambda own: f"{own.mse / scale:.3f}"),
        (doc.ColumnHeader("bias²", description="part of the error that more data does not remove", drop=4),
         lambda own: f"{max(own.bias2, 0.0) / scale:.3f}"),
        (doc.ColumnHeader("variance", description="part of the error that more data removes", drop=5),
         lambda own: f"{own.variance / scale:.3f}"),
        (doc.ColumnHeader("rejected", description="rejected share of the tokens", drop=0),
         lambda own: f"{own.rejected_tokens:.1%}" if own.rejected_tokens else "0"),
        (doc.ColumnHeader("loss scale", description="factor on the loss", drop=1), lambda own: f"{own.loss_scale:.3g}"),
        (doc.ColumnHeader("ESS", description="effective sample size of tokens", drop=1), lambda own: f"{own.ess:.2f}"),
        (doc.ColumnHeader("why", numeric=False, drop=6), lambda own: text_cell(own.why, "prose")),
    )  # fmt: skip
    every = [*advice.advice, *advice.yours]
    return doc.Table.of("Corrections, best first", every, columns, reach=doc.EVERYWHERE)
