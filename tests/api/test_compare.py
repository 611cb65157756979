"""Comparison of dumps with a known difference. The expected numbers are computed token by token in the tests."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.compare.compare import (
    PartMeans,
    adjust_p_values,
    compare,
    compare_metrics,
    contributions,
    permutation_p_values,
)
from mismatchctl.api.compare.comparison import (
    PRIMARY_METRICS,
    Change,
    Comparison,
    ContrastStatus,
    Decomposition,
    contrast_headline,
    format_carrier,
    judge_contrast,
)
from mismatchctl.core.batch import Float64s
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.errors import DataError
from mismatchctl.results.model import Value
from mismatchctl.stats.comparison import Allowance
from mismatchctl.stats.comparison import compare_samples as gate_compare
from mismatchctl.stats.resampling import adjust_holm
from mismatchctl.stats.samples import ClusterSample, build_run_sample, find_metric
from tests.factories.cluster_samples import sample as layered
from tests.factories.dump_pairs import BASE, Tokens, k3, make_tokens, pair, spread, write_tokens


def positions(tokens: Tokens) -> Float64s:
    return np.concatenate([np.arange(len(row), dtype=np.float64) for row in tokens.rollout])


def decomposition(found: Comparison, quantity: str) -> Decomposition:
    return next(d for d in found.contrasts[0].decompositions if d.quantity == quantity)


def carrier(found: Comparison, quantity: str) -> str:
    one = decomposition(found, quantity)
    assert one.carrier is not None
    return format_carrier(one, one.carrier)


def test_renamed_and_reordered_rows_do_not_differ(tmp_path: Path) -> None:
    rows = pq.read_table(write_tokens(tmp_path / "a", BASE, leave_out=("prompt_id",)))
    mixed = rows.take(np.random.default_rng(4).permutation(len(rows)))
    pq.write_table(mixed.drop_columns(["sequence_id"]), tmp_path / "b.parquet", row_group_size=7)
    (contrast,) = compare([str(tmp_path / "a"), str(tmp_path / "b.parquet")]).contrasts
    moved = {key: change.difference for key, change in contrast.changes.items() if change.difference}
    assert max(map(abs, moved.values()), default=0) < 1e-14  # rounding errors remain if terms nearly cancel
    assert not moved.keys() & {"k2", "k3", "ess_token", "ess_sequence", "prob_corr", "abs_diff_mean"}


def test_a_worse_worker_is_named(tmp_path: Path) -> None:
    other = BASE.scaled(lambda index, _, __: 2.0 if BASE.worker[index] == 3 else 1.0)
    found = pair(tmp_path, other)
    assert carrier(found, "worker") == "worker 3"
    assert decomposition(found, "step").carrier is None
    one = decomposition(found, "worker")
    # the shares of tokens do not change, so each contribution comes from K3
    owner = spread(BASE, BASE.worker)
    for part in one.parts:
        own = owner == part.label
        assert part.level == pytest.approx(
            (k3(other)[own].sum() - k3(BASE)[own].sum()) / len(owner), rel=1e-7, abs=1e-12
        )
        assert part.mix == pytest.approx(0, abs=1e-15)
        assert part.tokens == (own.mean(), own.mean())
    assert one.parts[0].label == 3
    assert one.parts[0].se is not None
    assert "worker 3 causes 100% of the change, with " in found.contrasts[0].says[2]


def test_a_range_of_positions_is_named(tmp_path: Path) -> None:
    found = pair(tmp_path, BASE.scaled(lambda _, place, __: np.where(place >= 63, 2.0, 1.0)))
    assert carrier(found, "position") == "positions from 64"
    one = decomposition(found, "position")
    assert one.carrier is not None
    assert one.carrier.carried == pytest.approx(1.0)
    late = positions(BASE) >= 63
    assert one.carrier.tokens == pytest.approx(late.mean())
    assert one.carrier.weight == pytest.approx(k3(BASE)[late].sum() / k3(BASE).sum())


def test_a_range_of_probabilities_is_named(tmp_path: Path) -> None:
    edge = 2.0  # nats: an edge of the bins
    found = pair(tmp_path, BASE.scaled(lambda _, __, rollout: np.where(-rollout >= edge, 2.0, 1.0)))
    assert carrier(found, "surprisal") == "probabilities below 0.135"


def test_a_change_of_mix_is_not_a_change_of_level(tmp_path: Path) -> None:
    base = BASE.scaled(lambda index, _, __: 3.0 if BASE.worker[index] == 0 else 1.0)
    worse = [row for row, worker in enumerate(base.worker) if worker == 0]
    doubled = base.chosen([*range(len(base.worker)), *worse])
    names = [f"{name}-{index}" for index, name in enumerate(doubled.name)]
    found = pair(tmp_path, replace(doubled, name=names), base)
    one = decomposition(found, "worker")
    assert one.level == pytest.approx(0, abs=1e-12)
    assert one.mix == pytest.approx(k3(doubled).mean() - k3(base).mean(), rel=1e-6)
    assert one.parts[0].label == 0


@pytest.mark.slow
@pytest.mark.parametrize("quantity", ["step", "worker", "position", "surprisal", "length"])
def test_mix_and_level_sum_to_the_difference(tmp_path: Path, quantity: str) -> None:
    other = make_tokens(7, noise=0.05, steps=4)
    found = pair(tmp_path, other)
    one = decomposition(found, quantity)
    difference = k3(other).mean() - k3(BASE).mean()
    assert one.difference == pytest.approx(difference, rel=1e-6)
    assert sum(part.mix + part.level for part in one.parts) == pytest.approx(difference, rel=1e-6)
    sizes = [abs(part.total) for part in one.parts]
    assert sizes == sorted(sizes, reverse=True)
    assert found.contrasts[0].changes["k3"].difference == pytest.approx(difference, rel=1e-6)


@pytest.mark.parametrize("quantity", ["step", "worker"])
def test_errors_of_contributions_use_shared_prompts(tmp_path: Path, quantity: str) -> None:
    """The same tokens have less noise in their change than on each side."""
    other = BASE.scaled(lambda _, __, ___: 1.2)
    change = k3(other) - k3(BASE)
    prompts = np.unique(np.repeat(BASE.prompt, [len(row) for row in BASE.rollout]), return_inverse=True)[1]
    where = spread(BASE, getattr(BASE, quantity))
    sizes = np.bincount(prompts)
    for part in decomposition(pair(tmp_path, other), quantity).parts:
        sums = np.bincount(prompts, np.where(where == part.label, change, 0.0))
        own = sums.sum() / len(change)
        assert part.total == pytest.approx(own, rel=1e-6)
        assert part.se == pytest.approx(np.sqrt(np.sum((sums - own * sizes) ** 2)) / len(change), rel=0.1)


def test_parts_with_one_prompt_have_no_error(tmp_path: Path) -> None:
    kept = BASE.prompt[BASE.step.index(1)]
    base = BASE.chosen([row for row, step in enumerate(BASE.step) if step != 1 or BASE.prompt[row] == kept])
    one = decomposition(pair(tmp_path, base.scaled(lambda _, __, ___: 1.2), base), "step")
    assert [part.se for part in one.parts if part.label == 1] == [None]


UNKNOWN = np.array([np.nan])


def test_contributions_match_hand_calculation() -> None:
    """K3 is 1 or 3 in half of the tokens, later 2 in a quarter and 3 in the rest: 2 rises to 2.75."""
    mix, level = contributions(
        PartMeans(np.array([5.0, 5]), np.array([1.0, 3]), UNKNOWN),
        PartMeans(np.array([1.0, 3]), np.array([2.0, 3]), UNKNOWN),
    )
    assert mix.tolist() == pytest.approx([-0.25 * (1.5 - 2.375), 0.25 * (3 - 2.375)])
    assert level.tolist() == pytest.approx([0.375 * 1, 0])


counts = hnp.arrays(np.float64, 5, elements=st.integers(0, 1000)).filter(lambda values: bool(values.sum()))


def test_errors_of_contributions_match_resampled_sequences(tmp_path: Path) -> None:
    """The errors contain both parts of a change: K3 of a step, and its share of the tokens."""
    draw, files, sides = np.random.default_rng(5), [], []
    for name, noise in (("before", 0.02), ("after", 0.05)):
        steps = np.repeat([0, 1, 2], 40)
        blocks = [draw.normal(0, noise * draw.uniform(0.5, 2), draw.integers(4, 60)) for _ in steps]
        rollout = [-draw.exponential(1, len(block)) - np.abs(block) for block in blocks]
        columns = {"step": steps, "rollout_log_probs": rollout, "train_log_probs": list(map(np.add, rollout, blocks))}
        files.append(str(tmp_path / f"{name}.parquet"))
        pq.write_table(pa.table(columns), files[-1])
        sums = np.array([(len(block), (np.expm1(block) - block).sum()) for block in blocks])
        drawn = np.einsum("rsc,scq->qrs", draw.poisson(1, (4000, 3, 40)), sums.reshape(3, 40, 2))
        sides.append(PartMeans(drawn[0], drawn[1] / drawn[0], UNKNOWN))
    found = decomposition(compare(files), "step")
    expected = np.std(sum(contributions(sides[0], sides[1])), axis=0)
    for part in found.parts:
        assert part.se == pytest.approx(expected[part.label], rel=0.1)


levels = hnp.arrays(np.float64, 5, elements=st.floats(0, 10))


@given(counts, levels, counts, levels)
def test_contributions_always_sum_to_the_difference(
    before: Float64s, was: Float64s, after: Float64s, now: Float64s
) -> None:
    sides = [PartMeans(n, np.where(n > 0, k, np.nan), UNKNOWN) for n, k in ((before, was), (after, now))]
    mix, level = contributions(sides[0], sides[1])
    difference = (after * now).sum() / after.sum() - (before * was).sum() / before.sum()
    assert (mix + level).sum() == pytest.approx(difference, abs=1e-9)
    back = contributions(sides[1], sides[0])
    assert (-back[0]).tolist() == pytest.approx(mix.tolist(), abs=1e-9)
    assert (-back[1]).tolist() == pytest.approx(level.tolist(), abs=1e-9)


def test_identical_dumps_do_not_differ(tmp_path: Path) -> None:
    found = pair(tmp_path, BASE)
    contrast = found.contrasts[0]
    for key, change in contrast.changes.items():
        assert change.difference in (0, None), key
        assert not change.significant
        assert change.better is None
    assert contrast.same_tokens
    assert contrast.paired.endswith(", with equal rollout and train log-probs")
    assert all(one.carrier is None for one in contrast.decompositions)
    assert judge_contrast(contrast) == ContrastStatus("OK", "same")
    assert contrast_headline(contrast).startswith("K3 is the same: ")


def test_a_proportional_change_names_no_part(tmp_path: Path) -> None:
    found = pair(tmp_path, BASE.scaled(lambda _, __, ___: 1.5))
    assert found.contrasts[0].changes["k3"].significant
    assert all(one.carrier is None for one in found.contrasts[0].decompositions)


def test_noise_alone_is_not_significant(tmp_path: Path) -> None:
    found = pair(tmp_path, make_tokens(1))
    assert not any(change.significant for change in found.contrasts[0].changes.values())
    assert judge_contrast(found.contrasts[0]).status == "OK"
    assert contrast_headline(found.contrasts[0]).startswith("no significant change: K3 changed by ")


def test_a_clear_change_is_significant_among_a_hundred_tests(tmp_path: Path) -> None:
    """4,096 relabelings alone cannot make one of more than 100 tests significant."""
    other = BASE.scaled(lambda _, __, ___: 3.0)
    paths = []
    for name, tokens in (("base", BASE), ("other", other)):
        rng = np.random.default_rng(8)
        moved = {
            column: [np.minimum(row + rng.normal(0, 0.02, len(row)), 0).tolist() for row in tokens.train]
            for column in ("current_log_probs", "ref_log_probs")
        }
        paths.append(str(write_tokens(tmp_path / f"{name}.parquet", tokens, **moved)))
    changes = compare(paths).contrasts[0].changes
    assert sum(change.p is not None for change in changes.values()) > 100
    for key in ("k3", "abs_diff_mean", "k2", "prob_diff_mean", "log_ppl_diff_abs", "share_off_1.05"):
        if key in changes:
            assert changes[key].significant, key
            assert (changes[key].p or 1) < 1e-4, key
    for key, change in changes.items():
        excluded = change.interval is not None and not change.interval[0] <= 0 <= change.interval[1]
        assert change.significant or bool(change.note) == (excluded and change.p is not None), key


def test_insignificant_changes_explain_an_interval_without_zero() -> None:
    value = Value(value=1.0)
    made = Change(reference=value, other=value, difference=0.5, interval=(0.1, 0.9))
    tested = {f"m{index}": made.model_copy(update={"p_alone": p}) for index, p in enumerate([0.01, 0.2, *[0.9] * 38])}
    tested["through zero"] = made.model_copy(update={"interval": (-0.1, 1.1), "p_alone": 0.9})
    (found,) = adjust_p_values([tested])
    assert found["m0"].note == "p = 0.01 for this metric alone, 0.41 after correction for 41 tests"
    assert found["m1"].note.startswith("p = 0.2: random swaps of clusters often give such a change")
    assert (found["through zero"].note, found["through zero"].significant) == ("", False)
    (few,) = adjust_p_values([{"m0": tested["m0"]}])
    assert (few["m0"].note, few["m0"].significant) == ("", True)


def test_a_change_of_most_tokens_is_reported_despite_a_noisy_mean() -> None:
    value = Value(value=1.0)
    made = Change(
        reference=value, other=Value(value=1.05), difference=0.05, relative=0.05, interval=(-0.02, 0.12),
        relative_interval=(-0.02, 0.12), p=0.001, significant=True, better=False,
    )  # fmt: skip
    contrast = SimpleNamespace(changes={"k3": made})
    words = "worse: K3 changed by +5% (95% CI -2% to +12%), significant for most tokens"
    assert contrast_headline(contrast) == words  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("new", "old"), [(16, 16), (8, 32)])
def test_main_metrics_are_rarely_significant_by_chance(new: int, old: int, tmp_path: Path) -> None:
    """In random splits of one dump, a main metric is significant in at most 5%."""
    (run,) = analyze([str(write_tokens(tmp_path / "a", make_tokens(5, prompts=300, steps=1)))]).runs.values()
    whole = build_run_sample(run)
    metrics = {key: find_metric(key) for key in PRIMARY_METRICS}
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(300):
        rows = rng.permutation(len(whole))[: new + old]
        sides = [replace(whole, keys=whole.keys[at], sums=whole.sums[at]) for at in (rows[:new], rows[new:])]
        sides = [replace(each, keys=np.sort(each.keys)) for each in sides]
        p = permutation_p_values(metrics, (sides[0], sides[1]))
        wrong += min(adjust_holm(list(p.values()))) < 0.05
    assert stats.binomtest(wrong, 300, 0.05, alternative="greater").pvalue > 0.01


def test_intervals_cover_and_directions_are_named(tmp_path: Path) -> None:
    found = pair(tmp_path, BASE.scaled(lambda _, __, ___: 1.5))
    for key, better in (("k3", False), ("ess_token", False), ("prob_corr", False), ("ratio_mean", False)):
        assert found.contrasts[0].changes[key].better is better
    back = compare([str(tmp_path / "other.parquet"), str(tmp_path / "base.parquet")])
    change = back.contrasts[0].changes["k3"]
    assert change.better
    assert change.interval is not None
    assert change.difference is not None
    assert change.interval[0] <= change.difference <= change.interval[1] < 0
    assert change.relative == pytest.approx(
        k3(BASE).mean() / k3(BASE.scaled(lambda _, __, ___: 1.5)).mean() - 1, rel=1e-6
    )
    assert back.contrasts[0].changes["tokens"].better is None


@pytest.mark.slow
def test_the_order_of_rows_does_not_change_the_comparison(tmp_path: Path) -> None:
    other = BASE.scaled(lambda index, place, _: 1.3 + 0.5 * (place > 30) * (index % 3))
    shuffled = other.chosen(np.random.default_rng(3).permutation(len(other.name)))
    straight, mixed = pair(tmp_path / "a", other), pair(tmp_path / "b", shuffled)
    for key, change in straight.contrasts[0].changes.items():
        same = mixed.contrasts[0].changes[key]
        assert same.difference == pytest.approx(change.difference, rel=1e-9, abs=1e-12), key
        assert same.p == pytest.approx(change.p, abs=1e-3), key
    assert mixed.contrasts[0].paired == straight.contrasts[0].paired
    assert mixed.contrasts[0].paired.endswith(", with equal rollout log-probs")


def test_corrections_are_compared(tmp_path: Path) -> None:
    """Rejections are counted in a loop. Corrections with different definitions are skipped."""
    gate = parse_correction({"name": "mine", "gates": [{"level": "token", "keep": [0.95, 1.05]}]}, "here")
    other = BASE.scaled(lambda _, __, ___: 2.0)
    paths = [str(write_tokens(tmp_path / f"{n}.parquet", t)) for n, t in (("base", BASE), ("other", other))]
    found = compare(paths, corrections=[gate]).contrasts[0].corrections["mine"]["rejected_tokens"]
    ratios = [np.exp(np.concatenate(t.train) - np.concatenate(t.rollout)) for t in (BASE, other)]
    before, after = (np.mean((ratio < 0.95) | (ratio > 1.05)) for ratio in ratios)
    assert (found.reference.value, found.other.value) == (pytest.approx(before), pytest.approx(after))
    assert found.significant
    assert found.interval is not None
    kept = tmp_path / "base.json"
    analyze(paths[:1], [gate.model_copy(update={"gates": ()})]).save(kept)
    assert compare([str(kept), paths[1]], corrections=[gate]).contrasts[0].corrections == {}


def test_results_replace_their_dumps(tmp_path: Path) -> None:
    other = BASE.scaled(lambda index, _, __: 2.0 if BASE.worker[index] == 1 else 1.0)
    dumps = pair(tmp_path, other)
    kept = tmp_path / "base.json"
    analyze([str(tmp_path / "base.parquet")], by=["worker"]).save(kept)
    mixed = compare([str(kept), str(tmp_path / "other.parquet")], by=["worker"])
    assert [side.kind for side in mixed.sides] == ["result", "dump"]
    for key, change in dumps.contrasts[0].changes.items():
        same = mixed.contrasts[0].changes[key]
        assert same.difference == pytest.approx(change.difference, rel=1e-6, abs=1e-12), key
        assert same.p == pytest.approx(change.p, abs=2e-3), key
    assert carrier(mixed, "worker") == "worker 1"


@pytest.mark.slow
def test_folded_tables_keep_steps_apart(tmp_path: Path) -> None:
    """With more clusters than a Result keeps, the errors of steps come from their own K3."""
    base = make_tokens(3, prompts=600, steps=2, longest=12)
    worse = base.scaled(lambda index, _, __: 3.0 if base.step[index] == 1 else 1.0)
    paths = [tmp_path / "base.json", tmp_path / "worse.json"]
    for path, tokens in zip(paths, (base, worse), strict=True):
        analyze([str(write_tokens(path.with_suffix(".parquet"), tokens))]).save(path)
    found = compare([str(path) for path in paths])
    assert carrier(found, "step") == "step 1"
    one = decomposition(found, "step")
    own = spread(base, base.step) == 1
    change = (k3(worse) - k3(base))[own].sum() / len(own)
    assert one.parts[0].level == pytest.approx(change, rel=1e-6)
    assert one.parts[0].se is not None
    assert found.contrasts[0].changes["k3"].significant


def test_the_runs_of_one_result_are_compared(tmp_path: Path) -> None:
    paths = [write_tokens(tmp_path / f"{name}.parquet", make_tokens(seed)) for seed, name in enumerate("abc")]
    kept = tmp_path / "all.json"
    analyze([str(path) for path in paths]).save(kept)
    found = compare([str(kept)])
    assert [side.name for side in found.sides] == ["a", "b", "c"]
    assert [contrast.other for contrast in found.contrasts] == ["b", "c"]
    with pytest.raises(DataError, match="needs two runs, found one"):
        compare([str(paths[0])])


@pytest.mark.slow
def test_many_comparisons_share_the_level(tmp_path: Path) -> None:
    """With more comparisons, the p-values of K3 never fall (Holm)."""
    base = write_tokens(tmp_path / "base.parquet", BASE)
    others = [write_tokens(tmp_path / f"{seed}.parquet", make_tokens(seed, noise=0.031)) for seed in range(1, 5)]
    alone = [compare([str(base), str(other)]).contrasts[0].changes["k3"].p for other in others]
    together = [contrast.changes["k3"].p for contrast in compare([str(base), *map(str, others)]).contrasts]
    assert all(float(a or 0) <= float(b or 0) for a, b in zip(alone, together, strict=True))


def test_equal_file_names_stay_distinct(tmp_path: Path) -> None:
    one, two = (write_tokens(tmp_path / name / "dump.parquet", BASE) for name in "ab")
    found = compare([str(one), str(two), str(one)])
    assert [side.name for side in found.sides] == [str(one), str(two), f"{one} (2)"]


def test_json_is_strict_and_is_read_back(tmp_path: Path) -> None:
    found = pair(tmp_path, make_tokens(4, noise=0.06))
    text = found.to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert Comparison.model_validate_json(text) == found


def test_k3_is_not_called_higher_if_most_tokens_fell() -> None:
    """K3 fell in most tokens and rose in the few tokens with most of K3."""
    rng = np.random.default_rng(0)

    def side(bulk: float, lost: int, first: int) -> ClusterSample:
        rollout = -rng.exponential(0.6, (24, 80))
        x = bulk * rng.normal(size=rollout.shape)
        x[:lost, 0] = -0.5
        return layered(rollout, x, first)

    reference, other = side(0.01, 16, 0), side(0.005, 18, 100)
    sums = [Value(value=float(each.column("k3").sum())) for each in (reference, other)]
    found = compare_metrics({"k3": sums[0]}, {"k3": sums[1]}, (reference, other))["k3"]
    assert found.difference is not None and found.difference > 0
    assert found.p_alone is not None and found.p_alone > 0.05
    assert gate_compare(reference, other, find_metric("k3"), Allowance()).p < 0.01  # a significant fall
