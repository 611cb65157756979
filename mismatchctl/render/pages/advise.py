"""The page of `advise`: what to fix first, else the ranking with its prices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mismatchctl.advise import Advice, Advised, Ahead
from mismatchctl.advise.words import against_yours, called, headline
from mismatchctl.numbers import DASH
from mismatchctl.render.document import (
    BRIEF,
    USUAL,
    Code,
    Columns,
    Document,
    Figures,
    Head,
    Headline,
    Later,
    Note,
    Section,
    Table,
)
from mismatchctl.render.tables import words
from mismatchctl.render.text import clean
from mismatchctl.texts.yaml_written import dump_yaml


def document(found: Mapping[str, Advice]) -> Document:
    """The advice for each run."""
    made = Document(Headline("", what="advise"))
    return made.add(
        *(
            section(": ".join(filter(None, (run, headline(a)))), f"advice-{index}", a)
            for index, (run, a) in enumerate(found.items())
        )
    )


def section(title: str, anchor: str, advice: Advice) -> Section:
    """The advice for one run."""
    made = Section(clean(title), anchor)
    if advice.fix_first is not None:
        made.add(Note(advice.fix_first.summary), Note(f"do: {advice.fix_first.advice}"))
    if not advice.advice:
        return made.add(*(Note(f"{note}.", "quiet") for note in advice.notes), Note(""))
    made.add(_table(advice), *(Note(f"{clean(against_yours(own, advice.advice[0]))}.") for own in advice.yours))
    made.add(*(Note(f"{text}.") for text in (*_others(advice), *_how_sure(advice))))
    made.add(Later(lambda: [_picture(advice, anchor)]), *(Note(f"{note}.", "quiet") for note in advice.notes))
    config = advice.advice[0].config
    return made.add(Code("as configuration:", dump_yaml(config), reach=USUAL) if config else None)


def _others(advice: Advice) -> Iterator[str]:
    """What ties with the first, and why the next one lost."""
    first, *others = advice.advice
    ties = [_called(own) for own in others if own.ties]
    if ties:
        yield f"{' and '.join(filter(None, (', '.join(ties[:-1]), ties[-1])))} cannot be told from {_called(first)}"
    behind = next((own for own in others if not own.ties), None)
    if behind is not None:
        times = f", with {behind.mse / first.mse:.3g} times its error" if first.mse else ""
        yield f"{_called(behind)} stands behind {_called(first)}{times}: {behind.why}"


def _called(own: Advised) -> str:
    return clean(called(own.name))


def _how_sure(advice: Advice) -> Iterator[str]:
    shares = (
        (advice.stable, "random halves of the prompts advise the same"),
        (advice.stable_later, "cuts between earlier and later steps do"),
    )
    told = [f"{share:.0%} of {what}" for share, what in shares if share is not None]
    if told:
        yield f"{'; '.join(told)}, up to ties"
    if advice.outlook is not None:
        yield advice.outlook.text
    for own in advice.advice:
        if own.kept_length_difference is not None:
            reward, length = own.kept_reward_difference, own.kept_length_difference
            of = "" if reward is None else f"a mean reward {abs(reward):.3g} {'lower' if reward < 0 else 'higher'} and "
            yield (
                f"{clean(own.name)} rejects whole responses of {of}{abs(length):.3g} tokens "
                f"{'shorter' if length < 0 else 'longer'} than those it keeps"
            )


def _picture(advice: Advice, anchor: str) -> Figures:
    """All candidates in both parts of the error."""
    from mismatchctl.render.figures.advice import advice_figure  # draws: a terminal need not wait for it

    return Figures([advice_figure(advice, f"{anchor}-front")])


def _table(advice: Advice) -> Table:
    scale = advice.uncorrected
    columns: Columns[Advised] = (
        ("correction", lambda own: words(own.name, "name")),
        (Head("error", about="of one update's gradient; that of no correction is 1", drop=0),
         lambda own: f"{own.mse / scale:.3f}"),
        (Head("bias²", about="its part that more data does not take away, as far as it is beyond noise", drop=4),
         lambda own: f"{own.bias2_counted / scale:.3f}"),
        (Head("variance", about="its part that more data takes away", drop=5),
         lambda own: f"{own.variance / scale:.3f}"),
        (Head("rejected", about="share of the tokens", drop=0),
         lambda own: f"{own.rejected_tokens:.1%}" if own.rejected_tokens else "0"),
        (Head("ESS", about="effective sample size of the tokens", drop=1), lambda own: f"{own.ess:.2f}"),
        (Head("next batch", about="sequences rejected, with a 90 % interval", drop=2),
         lambda own: _ahead(own.next_batch)),
        (Head("twice as long", about="sequences rejected of responses twice as long", drop=3),
         lambda own: _ahead(own.twice_the_length)),
        (Head("why", numeric=False, drop=6), lambda own: words(own.why, "prose")),
    )  # fmt: skip
    every = [*advice.advice, *advice.yours]
    return Table.of("Corrections, the best first", every, columns, reach=BRIEF)


def _ahead(ahead: Ahead | None) -> str:
    if ahead is None or ahead.value is None:
        return DASH
    if ahead.interval is None or ahead.value == ahead.interval[0] == ahead.interval[1]:
        return f"{ahead.value:.1%}"
    return f"{ahead.value:.1%} [{ahead.interval[0]:.0%}, {ahead.interval[1]:.0%}]"
