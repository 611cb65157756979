"""The registry, third part: metrics of what only some dumps hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mismatchctl.losses import KL_KINDS
from mismatchctl.measure.facets import KL, ROUTING, WIDTHS
from mismatchctl.measure.metrics.aggregation import AGGREGATIONS, SUFFIXES, WORDS, aggregated
from mismatchctl.measure.metrics.metric import Metric, Number, Totals

_ESTIMATES = {
    "k1": "x",
    "k2": "x^2 / 2",
    "k3": "exp(-x) - 1 + x",
    "low_var": "exp(-x) - 1 + x within +-10",
}
_SCHULMAN = "Schulman 2020, Approximating KL Divergence"
_NO_REFERENCE = "no sequence has ref_log_probs"


def kl_key(kind: str, aggregation: str = "token-mean", *, unbiased: bool = False) -> str:
    """The key of a KL to the reference policy."""
    return f"ref_{kind}{'_unbiased' if unbiased else ''}{SUFFIXES[aggregation]}"


def _kl(kind: str, aggregation: str, *, unbiased: bool) -> Metric:
    column = f"kl_{kind}{'_unbiased' if unbiased else ''}"
    weighted = f"exp(current - train) * ({_ESTIMATES[kind]})" if unbiased else _ESTIMATES[kind]
    return Metric(
        kl_key(kind, aggregation, unbiased=unbiased),
        f"KL to the reference policy: {kind}{', unbiased' if unbiased else ''}, {aggregation}",
        "nats/token" if aggregation != "seq-mean-token-sum" else "nats",
        f"{weighted}, x = current (train without it) minus ref log-prob: {WORDS[aggregation]}",
        "The penalty as the trainer would compute it" + (
            ", weighted with current / train so that its gradient is the KL's (DeepSeek-V3.2)." if unbiased
            else ": biased where the policy has moved since it sampled."
        ),
        _SCHULMAN,
        _NO_REFERENCE, aggregated(column, "kl_tokens", "kl_sequences", aggregation), better="",
    )  # fmt: skip


_KL = tuple(
    _kl(kind, aggregation, unbiased=unbiased)
    for kind in KL_KINDS
    for unbiased in (False, True)
    for aggregation in AGGREGATIONS
)


def _at_width(name: str) -> Callable[[Totals], Number]:
    """A column at the widest layer in which no token chooses an expert twice."""

    def value(t: Totals) -> Number:
        found = t[f"{name}@{WIDTHS[0]}"]
        for width in WIDTHS[1:]:
            found = np.where(np.real(t[f"repeats@{width}"]) == 0, t[f"{name}@{width}"], found)
        return found

    return value


_REROUTED, _REROUTED_K3 = _at_width("rerouted"), _at_width("rerouted_k3")
_NO_EXPERTS, _NONE = "no token has the experts of both sides", "the experts differ nowhere, or K3 is 0"
_ROUTING = (
    Metric(
        "routing_differs", "tokens routed otherwise", "fraction",
        "share of tokens whose sets of experts differ between rollout and train in some layer, of those with both",
        "0 under routing replay (R3), which this asserts; elsewhere what the router's noise flips.",
        "mismatchctl", _NO_EXPERTS, lambda t: _REROUTED(t) / t["routed"],
    ),
    Metric(
        "routing_sequences", "sequences with tokens routed otherwise", "fraction",
        "share of sequences with such a token, of those with experts of both sides",
        "How many responses are touched.", "mismatchctl", _NO_EXPERTS,
        lambda t: _at_width("rerouted_sequences")(t) / t["routed_sequences"],
    ),
    Metric(
        "routing_k3", "K3 where experts differ", "nats/token", "mean of exp(x) - 1 - x over such tokens",
        "Far above K3 elsewhere, where routing is what costs.", "mismatchctl", _NONE,
        lambda t: _REROUTED_K3(t) / _REROUTED(t),
    ),
    Metric(
        "routing_k3_elsewhere", "K3 where experts agree", "nats/token", "mean of exp(x) - 1 - x over the others",
        "What would be left with the routing replayed, about.", "mismatchctl", _NO_EXPERTS,
        lambda t: (t["routed_k3"] - _REROUTED_K3(t)) / (t["routed"] - _REROUTED(t)),
    ),
    Metric(
        "routing_k3_share", "K3 where experts differ, of all", "fraction",
        "sum of exp(x) - 1 - x over such tokens / over all with experts of both sides",
        "How much of the mismatch the routing is.", "mismatchctl", _NONE,
        lambda t: _REROUTED_K3(t) / t["routed_k3"],
    ),
)  # fmt: skip

FACET_METRICS: dict[str, tuple[Metric, ...]] = {KL: _KL, ROUTING: _ROUTING}
"""Metrics of each facet, by its name."""
SECTIONS = {KL: "KL to the reference policy", ROUTING: "Routing"}
"""What heads them."""
