"""The page of `advise`: what to fix first, or the ranking of corrections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mismatchctl.api.advise.advice import (
    ExpectedRejection,
    RankedCorrection,
    RunAdvice,
    advice_headline,
    candidate_label,
    compare_with_yours,
)
from mismatchctl.core.formatting import DASH, escape_terminal
from mismatchctl.io.yaml import dump_yaml
from mismatchctl.report.document import (
    EVERYWHERE,
    TERMINAL_AND_PAGE,
    Code,
    ColumnHeader,
    DeferredSection,
    Document,
    Figures,
    Headline,
    Note,
    Section,
    Table,
    TableColumns,
)
from mismatchctl.report.tables import text_cell


def document(found: Mapping[str, RunAdvice]) -> Document:
    """Build the page of the advice for each run."""
    doc = Document(Headline("", subtitle="advise"))
    return doc.add(
        *(
            advice_section(": ".join(filter(None, (run, advice_headline(a)))), f"advice-{index}", a)
            for index, (run, a) in enumerate(found.items())
        )
    )


def advice_section(title: str, anchor: str, advice: RunAdvice) -> Section:
    """Build the section of one run."""
    section = Section(escape_terminal(title), anchor)
    if advice.fix_first is not None:
        section.add(Note(advice.fix_first.summary), Note(f"do: {advice.fix_first.advice}"))
    if not advice.advice:
        return section.add(*(Note(f"{note}.", "quiet") for note in advice.notes), Note(""))
    section.add(
        _ranking_table(advice),
        *(Note(f"{escape_terminal(compare_with_yours(own, advice.advice[0]))}.") for own in advice.yours),
    )
    section.add(*(Note(f"{text}.") for text in (*_describe_others(advice), *_describe_confidence(advice))))
    section.add(
        DeferredSection(lambda: [_error_figure(advice, anchor)]), *(Note(f"{note}.", "quiet") for note in advice.notes)
    )
    config = advice.advice[0].config
    return section.add(Code("as configuration:", dump_yaml(config), reach=TERMINAL_AND_PAGE) if config else None)


def _describe_others(advice: RunAdvice) -> Iterator[str]:
    """Describe ties with the first correction, and why the next one is worse."""
    first, *others = advice.advice
    ties = [_format_name(own) for own in others if own.ties]
    if ties:
        names = " and ".join(filter(None, (", ".join(ties[:-1]), ties[-1])))
        yield f"{names} cannot be told from {_format_name(first)}"
    behind = next((own for own in others if not own.ties), None)
    if behind is not None:
        times = f", with {behind.mse / first.mse:.3g} times its error" if first.mse else ""
        yield f"{_format_name(behind)} stands behind {_format_name(first)}{times}: {behind.why}"


def _format_name(own: RankedCorrection) -> str:
    return escape_terminal(candidate_label(own.name))


def _describe_confidence(advice: RunAdvice) -> Iterator[str]:
    shares = (
        (advice.stable, "random halves of the prompts advise the same"),
        (advice.stable_later, "cuts between earlier and later steps do"),
    )
    percentages = [f"{share:.0%} of {what}" for share, what in shares if share is not None]
    if percentages:
        yield f"{'; '.join(percentages)}, up to ties"
    if advice.outlook is not None:
        yield advice.outlook.text
    for own in advice.advice:
        if own.kept_length_difference is not None:
            reward, length = own.kept_reward_difference, own.kept_length_difference
            of = "" if reward is None else f"a mean reward {abs(reward):.3g} {'lower' if reward < 0 else 'higher'} and "
            yield (
                f"{escape_terminal(own.name)} rejects whole responses of {of}{abs(length):.3g} tokens "
                f"{'shorter' if length < 0 else 'longer'} than those it keeps"
            )


def _error_figure(advice: RunAdvice, anchor: str) -> Figures:
    """Draw the errors of all candidates."""
    from mismatchctl.report.figures.bars import advice_figure  # slow import, only needed for HTML

    return Figures([advice_figure(advice, f"{anchor}-front")])


def _ranking_table(advice: RunAdvice) -> Table:
    scale = advice.uncorrected
    columns: TableColumns[RankedCorrection] = (
        ("correction", lambda own: text_cell(own.name, "name")),
        (ColumnHeader("error", description="gradient error of an update after the best scalar", drop=0),
         lambda own: f"{own.mse / scale:.3f}"),
        (ColumnHeader(
            "bias²", description="its part that more data does not remove", drop=4),
         lambda own: f"{max(own.bias2, 0.0) / scale:.3f}"),
        (ColumnHeader("variance", description="its part that more data removes", drop=5),
         lambda own: f"{own.variance / scale:.3f}"),
        (ColumnHeader("rejected", description="share of the tokens", drop=0),
         lambda own: f"{own.rejected_tokens:.1%}" if own.rejected_tokens else "0"),
        (ColumnHeader("loss scale", description="factor on the loss", drop=1), lambda own: f"{own.loss_scale:.3g}"),
        (ColumnHeader("ESS", description="effective sample size of the tokens", drop=1), lambda own: f"{own.ess:.2f}"),
        (ColumnHeader("next batch", description="sequences rejected, with a 90 % interval", drop=2),
         lambda own: _format_expectation(own.next_batch)),
        (ColumnHeader("twice as long", description="sequences rejected of responses twice as long", drop=3),
         lambda own: _format_expectation(own.twice_the_length)),
        (ColumnHeader("why", numeric=False, drop=6), lambda own: text_cell(own.why, "prose")),
    )  # fmt: skip
    every = [*advice.advice, *advice.yours]
    return Table.of("Corrections, the best first", every, columns, reach=EVERYWHERE)


def _format_expectation(ahead: ExpectedRejection | None) -> str:
    if ahead is None or ahead.value is None:
        return DASH
    if ahead.interval is None or ahead.value == ahead.interval[0] == ahead.interval[1]:
        return f"{ahead.value:.1%}"
    return f"{ahead.value:.1%} [{ahead.interval[0]:.0%}, {ahead.interval[1]:.0%}]"
