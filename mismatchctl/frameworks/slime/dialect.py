"""slime's arguments as a Correction, and a Correction as slime's arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import PrivateAttr, ValidationError

from mismatchctl.correction import Correction, Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.slime.arguments import ICEPOP_PATH, LEVELS, MIS_PATH, Arguments
from mismatchctl.validation import explained

Effect = Literal["mask", "zero"]


class SlimeCorrection(Correction):
    """A Correction that remembers the arguments it came from: which metrics slime logs depends on more than it says."""

    _arguments: Arguments = PrivateAttr()


def correction_of(arguments: Arguments, name: str, effect: Effect) -> Correction:
    """What the arguments do to weights and tokens.

    Args:
        arguments: slime's arguments.
        name: how the correction is called.
        effect: whether rejected tokens leave the denominators (`mask`) or stay in them (`zero`): the version's affair.

    Raises:
        ConfigError: slime would run it, but no Correction says it.
    """
    try:
        correction = SlimeCorrection(
            name=name,
            weight=_weight(arguments),
            gates=_gates(arguments, effect),
            loss="ppo_bypass" if arguments.use_rollout_logprobs else "ppo",
        )
    except ValidationError as error:
        raise ConfigError(explained(error, Correction)) from error
    correction._arguments = arguments
    return correction


def _weight(arguments: Arguments) -> Weight | None:
    if not arguments.weighs:
        return None
    bounds = (arguments.tis_clip_low, arguments.tis_clip)
    if arguments.function == "vanilla":
        return Weight(clip=bounds)
    if arguments.function == "icepop":
        return Weight(zero=bounds)
    low, high = arguments.tis_bounds
    return Weight.model_validate(
        {
            "level": arguments.tis_level,
            "truncate": high if arguments.tis_mode == "truncate" else None,
            "clip": (low, high) if arguments.tis_mode == "clip" else None,
            "normalize": arguments.tis_level if arguments.tis_batch_normalize else "none",
            "normalize_over": "micro_batch",
        }
    )


def _gates(arguments: Arguments, effect: Effect) -> tuple[Gate, ...]:
    gates = []
    if arguments.weighs and arguments.function == "mis" and arguments.tis_mode == "mask":
        gates.append({"level": arguments.tis_level, "keep": arguments.tis_bounds})
    if arguments.rejects:
        gates.append({"level": arguments.rs_level, "keep": arguments.rs_bounds})
    if arguments.vetoes and arguments.rs_veto_threshold > 0:  # type: ignore[operator]  # 0 never fires
        gates.append({"level": "min", "keep": (arguments.rs_veto_threshold, None), "clamp": "none"})
    return tuple(Gate.model_validate({**gate, "effect": effect}) for gate in gates)


def arguments_of(correction: Correction, effect: Effect) -> tuple[Arguments, list[str], list[str]]:
    """A Correction in slime's arguments.

    Returns:
        arguments: what can be said.
        unsaid: what slime can't do.
        otherwise: what slime does, but otherwise than the Correction says.
    """
    known = correction._arguments if isinstance(correction, SlimeCorrection) else Arguments()
    if isinstance(correction, SlimeCorrection):
        again = correction_of(known, correction.name, effect)
        if (again.weight, again.gates, again.loss) == (correction.weight, correction.gates, correction.loss):
            return known, [], []
    return _Translation(correction, effect).said(known)


class _Translation:
    """One Correction on its way into slime's arguments."""

    def __init__(self, correction: Correction, effect: Effect) -> None:
        self.weight, self.gates, self.loss = correction.weight, list(correction.gates), correction.loss
        self.effect = effect
        self.unsaid: list[str] = correction.rare
        self.otherwise: list[str] = []

    def said(self, known: Arguments) -> tuple[Arguments, list[str], list[str]]:
        """The arguments beside those already `known` (of the loss), and what is left over."""
        if self.loss == "policy_gradient":
            self.unsaid.append("loss policy_gradient: slime's policy loss is always clipped")
        correcting: dict[str, Any] = {"use_tis": False, "get_mismatch_metrics": False, "custom_tis_function_path": None}
        if self.weight is not None:
            correcting = self._built_in(self.weight) or self._mis(self.weight)
        elif self.gates:
            self.unsaid.append("gates without weights: slime rejects only beside them")
        if self.weight is not None and self.weight.source != "train/rollout":
            self.unsaid.append(f"weights of {self.weight.source}: slime's are train/rollout")
        bypass = self.loss == "ppo_bypass"
        return replace(known, use_rollout_logprobs=bypass, **correcting), self.unsaid, self.otherwise

    def _built_in(self, weight: Weight) -> dict[str, Any] | None:
        """IcePop, or the built-in clip: what comes from mis normalizes over micro-batches, this one does not."""
        plain = weight.level == "token" and weight.normalize == "none" and not self.gates
        if weight.zero is not None:
            if not plain:
                self.unsaid.append("weights of 0 outside an interval beside gates, normalization or another level")
            path: str | None = ICEPOP_PATH
        elif plain and weight.clip is not None and weight.normalize_over == "group":
            path = None
        else:
            return None
        low, high = weight.bounds
        return {"use_tis": True, "custom_tis_function_path": path, "tis_clip_low": low, "tis_clip": high}

    def _mis(self, weight: Weight) -> dict[str, Any]:
        low, high = weight.bounds
        said: dict[str, Any] = {
            "use_tis": True,
            "custom_tis_function_path": MIS_PATH,
            "tis_level": weight.level,
            "tis_mode": "clip" if weight.clip else "truncate",
            "tis_lower_bound": low if weight.clip else None,
            "tis_upper_bound": high,
            "tis_batch_normalize": weight.normalize != "none",
        }
        if weight.normalize not in ("none", weight.level):
            self.unsaid.append(f"{weight.level} weights normalized per {weight.normalize}: slime takes the same level")
        if weight.normalize != "none" and weight.normalize_over == "group":
            self.otherwise.append("weights normalized over the group: slime takes each micro-batch by itself")
        rejection, vetoes = self._sorted_gates()
        if weight.clip is None and weight.truncate is None and rejection and rejection[0].level == weight.level:
            low, high = _interval(rejection.pop(0))
            said |= {"tis_mode": "mask", "tis_lower_bound": low, "tis_upper_bound": high}
        return said | self._rejection(rejection, vetoes)

    def _rejection(self, rejection: list[Gate], vetoes: list[Gate]) -> dict[str, Any]:
        if len(rejection) > 1 or len(vetoes) > 1:
            self.unsaid.append("more than one rejection gate and one veto")
        low, high = _interval(rejection[0]) if rejection else (0.0, float("inf"))
        return {
            "use_rs": bool(rejection or vetoes),
            "rs_level": rejection[0].level if rejection else "token",
            "rs_lower_bound": low if rejection or vetoes else None,
            "rs_upper_bound": high if rejection or vetoes else None,
            "rs_veto_threshold": vetoes[0].keep[0] if vetoes else None,
        }

    def _sorted_gates(self) -> tuple[list[Gate], list[Gate]]:
        """Rejection gates and vetoes; others are noted as what slime can't say."""
        rejection, vetoes = [], []
        for gate in self.gates:
            if gate.is_veto and gate.keep[1] is None and _is_plain(gate, clamp="none"):
                vetoes.append(gate)
            elif gate.level in LEVELS and _is_plain(gate, clamp="aggregate"):
                rejection.append(gate)
            else:
                self.unsaid.append(
                    f"gate {gate.title}: slime has ratios of train/rollout with both bounds, and its veto"
                )
        if any(gate.effect != self.effect for gate in self.gates):
            stay = "stay in" if self.effect == "zero" else "leave"
            self.otherwise.append(f"in this version all rejected tokens {stay} the denominators")
        return rejection, vetoes


def _is_plain(gate: Gate, clamp: str) -> bool:
    """Whether a gate is a ratio of train/rollout over whole sequences, with nothing special about it but its clamp."""
    own = {"level", "keep", "effect"}
    return gate.model_dump(exclude=own) == Gate(keep=(0.0, 1.0)).model_dump(exclude=own) | {"clamp": clamp}


def _interval(gate: Gate) -> tuple[float, float]:
    low, high = gate.keep
    return (0.0 if low is None else low), (float("inf") if high is None else high)
