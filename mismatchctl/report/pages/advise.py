"""Terminal output and report page of `advise`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mismatchctl.api.advise import advice as api
from mismatchctl.core.formatting import format_command, format_number, shorten
from mismatchctl.corrections.labels import short_number
from mismatchctl.frameworks.registry import load_presets
from mismatchctl.io.yaml import dump_yaml
from mismatchctl.report import document as doc
from mismatchctl.report.figures.figure import MAX_NAME, MUTED, Axis, Figure, Marks
from mismatchctl.report.tables import by_severity, runs_headline, runs_table
from mismatchctl.results.summary import RunStatus, first_sentence, percent

MAX_CONFIG_LINES = 12
_GROWTH = "K3 grew {}x within this dump. Run advise again on the last steps"


def advise_screen(found: Mapping[str, api.RunAdvice], paths: Sequence[str], *, full: bool = False) -> doc.Document:
    """Build the terminal output. With `full`, add all sections of the page."""
    judged = _judge(found)
    advice = found[by_severity(judged)[0]]
    parts = [*(runs_table(judged, "advice") if len(found) > 1 else _screen_parts(advice))]
    parts += [] if full else doc.alarms(advice.warnings)
    screen = doc.Document(_headline(judged)).add(doc.Section("", "advice").add(*parts))
    if full:
        screen.sections += document(found).sections
    screen.commands = [*([] if full else [("Reasons", "-v")]), ("Next", _next_command(advice, paths))]
    return screen


def _judge(found: Mapping[str, api.RunAdvice]) -> dict[str, RunStatus]:
    return {run: RunStatus(api.advice_status(own), api.advice_headline(own)) for run, own in found.items()}


def _headline(judged: Mapping[str, RunStatus]) -> doc.Headline:
    head = runs_headline(judged, f"0 of {len(judged)} runs need attention", "advise")
    head.title = head.title.removeprefix(": ")  # a run from in-memory tables has no name
    if len(judged) > 1 and len(texts := {one.text for one in judged.values()}) == 1:
        head.title = f"{texts.pop()} (all {len(judged)} runs)"
    return head


def _screen_parts(advice: api.RunAdvice) -> Iterator[doc.DocumentPart]:
    if advice.fix_first is not None:
        failed = api.advice_status(advice) == "FAIL"
        others = (("else", f"if the bug is ruled out, use {own.title}") for own in advice.advice[:failed])
        yield doc.Facts([("do", first_sentence(advice.fix_first.advice)), *others])
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
        price = f"On this dump, it would cost {percent(1 - advice.default.ess)} of the ESS"
        rows.append(("by default", f"Many guides recommend {advice.default.title}. {price}"))
    if second is not None:
        text = api.candidate_label("none") if second.name == "none" else f"{second.title}: {api.describe_gain(second)}"
        text += ", not significantly worse" if second.ties else ""
        rows.append(("runner-up", f"{text}{f'; {second.outcome}' if second.outcome else ''}"))
    for own in advice.yours:
        text = api.compare_with_yours(own, best).removeprefix("yours: ")
        rows.append(("yours", f"{text}{f'; {own.outcome}' if own.outcome else ''}"))
    if advice.growth is not None:
        rows.append(("trend", _GROWTH.format(format_number(advice.growth))))
    size = f"{advice.sequences:,} sequences in {advice.prompts:,} prompt groups, {advice.batch:,} sequences per update"
    yield doc.Facts([*rows, ("data", f"{size}; ESS loss with token weights ≤ 2: {advice.severity}")])


def _config_part(advice: api.RunAdvice) -> doc.Code:
    best = advice.advice[0]
    title = "The correction as YAML. To get the keys of a framework, add --for NAME:"
    lines = dump_yaml(best.config if advice.framework else best.correction).splitlines()
    if advice.framework:
        title = f"Paste into {advice.framework}:"
        lines = lines if best.config else [f"{advice.framework} has no keys for this correction"]
    if len(lines) > MAX_CONFIG_LINES:
        lines[MAX_CONFIG_LINES:] = [f"({len(lines) - MAX_CONFIG_LINES} more lines: -v)"]
    return doc.Code(title, "\n".join(lines), reach=doc.TERMINAL_AND_PAGE)


def _next_command(advice: api.RunAdvice, paths: Sequence[str]) -> str:
    best = advice.advice[0].name if advice.advice else ""
    if advice.fix_first is not None or (best == "none" and advice.growth is not None):
        return format_command("diagnose", paths)
    if best == "none":
        return format_command("gate", paths, "--save-baseline ok.json --accept")
    return format_command("analyze", paths, f"-c {best}") if best else format_command("sweep", paths)


def document(found: Mapping[str, api.RunAdvice]) -> doc.Document:
    made = doc.Document(_headline(_judge(found)))
    for index, (run, advice) in enumerate(found.items()):
        title = f"{run}: {api.advice_headline(advice)}" if len(found) > 1 else "Ranking"
        made.add(_advice_section(doc.Section(title, f"advice-{index}"), advice))
    return made


def _advice_section(section: doc.Section, advice: api.RunAdvice) -> doc.Section:
    notes = [*doc.alarms(advice.warnings), *(doc.Note(f"{one[0].upper()}{one[1:]}.", "quiet") for one in advice.notes)]
    if advice.fix_first is not None:
        section.add(doc.Note(advice.fix_first.summary), doc.Note(advice.fix_first.advice))
    if not advice.advice:
        return section.add(*notes)

    yours = (api.compare_with_yours(own, advice.advice[0]) for own in advice.yours)
    outcomes = (f"{own.name}: {own.outcome}" for own in (*advice.advice, *advice.yours) if own.outcome)
    trend = [] if advice.growth is None else [_GROWTH.format(format_number(advice.growth))]
    reasons = (*trend, *yours, *_describe_others(advice), *outcomes)
    section.add(_ranking_table(advice), *(doc.Note(f"{text}.") for text in reasons))
    section.add(doc.Figures([advice_figure(advice, f"{section.anchor}-front")]), *notes)
    for own in filter(None, (advice.advice[0], advice.runner_up)):
        config = own.config if advice.framework else own.correction
        if config and own.name != "none":
            form = f"configuration of {advice.framework}" if advice.framework else "a correction file"
            name = f"{own.name} as {form}:"
            section.add(doc.Code(name, dump_yaml(config), reach=doc.TERMINAL_AND_PAGE))
    return section


def _describe_others(advice: api.RunAdvice) -> Iterator[str]:
    first, *others = advice.advice
    ties = [api.candidate_label(own.name) for own in others if own.ties]
    if ties:
        names = " and ".join(filter(None, (", ".join(ties[:-1]), ties[-1])))
        yield f"These are not significantly worse than {api.candidate_label(first.name)}: {names}"
    behind = next((own for own in others if not own.ties), None)
    if behind is not None and first.mse:
        worse, best = (api.candidate_label(own.name) for own in (behind, first))
        reason = "" if first.name == "none" else f": {behind.why}"  # `why` is the difference from no correction
        yield f"{worse} has {format_number(behind.mse / first.mse)} times the error of {best}{reason}"


def _ranking_table(advice: api.RunAdvice) -> doc.Table:
    scale = advice.uncorrected
    columns = [
        doc.Column("correction", "name", "name"),
        doc.Column("error", lambda own: f"{own.mse / scale:.3f}", drop=0,
                   description="squared error of the gradient of one update, relative to no correction"),
        doc.Column("bias²", lambda own: f"{max(own.bias2, 0.0) / scale:.3f}", drop=4,
                   description="part of the error that remains with any amount of data"),
        doc.Column("variance", lambda own: f"{own.variance / scale:.3f}", drop=5,
                   description="part of the error that more data removes"),
        doc.Column("rejected", lambda own: f"{own.rejected_tokens:.1%}" if own.rejected_tokens else "0", drop=0,
                   description="share of rejected tokens"),
        doc.Column("loss scale", lambda own: short_number(own.loss_scale), drop=1,
                   description="factor by which the correction scales the loss"),
        doc.Column("ESS", lambda own: f"{own.ess:.2f}", drop=1, description="effective sample size of tokens"),
        doc.Column("why", "why", "prose", 6),
    ]  # fmt: skip
    every = [*advice.advice, *advice.yours]
    return doc.Table.of("Corrections, best first", every, columns, reach=doc.EVERYWHERE)


def advice_figure(advice: api.RunAdvice, name: str) -> Figure | None:
    if not advice.advice:
        return None
    errors = {own: (bias2, variance) for own, (bias2, variance, _) in advice.front.items()}
    errors |= {own.name: (max(own.bias2, 0.0), own.variance) for own in (*advice.advice, *advice.yours)}
    advised, yours = ({own.name for own in group} for group in (advice.advice, advice.yours))
    shipped = set(load_presets()) - {"none"} - advised - yours
    places = {own: tuple(part / advice.uncorrected for part in parts) for own, parts in errors.items()}
    floors = [min((place[side] for place in places.values() if place[side] > 0), default=0.0) for side in (0, 1)]
    marks = []
    for label, group, color in (
        ("candidates", set(errors) - advised - yours - shipped, MUTED), ("presets", shipped, MUTED),
        ("advised", advised, 0), ("yours", yours, 1),
    ):  # fmt: skip
        chosen = [own for own in places if own in group]
        across, up = ([max(places[own][side], floor) for own in chosen] for side, floor in enumerate(floors))
        names = [shorten(own, MAX_NAME) for own in chosen] if color != MUTED else []
        if chosen:
            marks.append(Marks("dots", label, across, up, color=color, hollow=label == "candidates", labels=names))
    title = f"Advice: {api.candidate_label(advice.advice[0].name)}"
    return Figure(
        name, f"{title} ({len(errors)} candidates were compared)" if len(errors) > 1 else title,
        "Lower left is better. More data reduces the variance but not the bias. A point at the left "
        "end has no significant bias.",
        Axis("bias²", "log" if floors[0] else "linear"), Axis("variance (falls with more data)", "log"), tuple(marks),
    )  # fmt: skip
