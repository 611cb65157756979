"""Predictions match known distributions and simulations with a known truth."""

import math
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from scipy import stats

from mismatchctl.api.predict import (
    LENGTH_GRID,
    SequenceSample,
    predict_at_length,
    predict_at_step,
    predict_batch_rejection,
    student_quantile,
)
from mismatchctl.corrections.model import Correction
from mismatchctl.results.growth import fit_growth
from tests.factories.sequence_samples import read_sample

Floats = NDArray[np.float64]
GEOMETRIC = Correction.model_validate({"name": "geo", "gates": [{"level": "geometric", "keep": [0.999, None]}]})
SEQUENCE = Correction.model_validate(
    {"name": "seq", "weight": {"level": "sequence", "truncate": 2}, "gates": [{"level": "sequence", "keep": [0.5, 2]}]}
)
VETO = Correction.model_validate({"name": "veto", "gates": [{"level": "min", "keep": [0.9, None]}]})
CORRECTIONS = [GEOMETRIC, SEQUENCE, VETO]


def write(folder: Path, sequences: list[Floats], prompts: list[str], steps: list[int], files: int = 1) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"step": step, "prompt_id": prompt, "rollout_log_probs": [-1.0] * len(x), "train_log_probs": (x - 1.0).tolist()}
        for x, prompt, step in zip(sequences, prompts, steps, strict=True)
    ]
    for number in range(files):
        pq.write_table(pa.Table.from_pylist(rows[number::files]), folder / f"{number}.parquet", row_group_size=7)
    return str(folder)


def noise(random: np.random.Generator, count: int, length: int, scale: float = 0.05) -> list[Floats]:
    """Make log ratios with a mean ratio of 1."""
    return [random.normal(-(scale**2) / 2, scale, length).clip(None, 0.99) for _ in range(count)]


def simulated(log_ratio: Floats) -> SequenceSample:
    """Measure a dump with the log ratios [S, T], four responses to a prompt, in one step."""
    count, tokens = log_ratio.shape
    ends = np.minimum(LENGTH_GRID, tokens) - 1
    each = (log_ratio, np.expm1(log_ratio) - log_ratio, np.expm1(log_ratio))
    return SequenceSample(
        np.full(count, "run", object), np.zeros(count, np.uint64), (np.arange(count) // 4).astype(np.uint64),
        np.full(count, tokens), np.zeros((count, 0)),
        np.stack([values.cumsum(axis=1)[:, ends] for values in each], axis=2),
        np.minimum.accumulate(log_ratio, axis=1)[:, ends], np.maximum.accumulate(log_ratio, axis=1)[:, ends],
    )  # fmt: skip


def sample(path: str, corrections: list[Correction] = CORRECTIONS) -> SequenceSample:
    found = read_sample([path], corrections)
    return found.of_run(str(found.run[0]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[SequenceSample, str]:
    random = np.random.default_rng(0)
    lengths = random.integers(20, 400, 160)
    sequences = [x for length in lengths for x in noise(random, 1, int(length))]
    path = write(tmp_path_factory.mktemp("dumps") / "plain", sequences, [f"p{i // 4}" for i in range(160)], [0, 1] * 80)
    return sample(path), path


def test_kept_tokens_and_prefixes_match_the_tokens(tmp_path: Path) -> None:
    x = np.round(np.random.default_rng(1).normal(0, 0.1, 100), 4)
    found = sample(write(tmp_path / "run", [x, x[:10]], ["a", "b"], [0, 0]))
    order = np.argsort(found.tokens)
    assert found.tokens[order].tolist() == [10, 100]
    long = order[1]
    for octave, length in enumerate(LENGTH_GRID[:4]):
        first = x[: min(length, 100)]
        assert found.sums[long, octave, 0] == pytest.approx(first.sum(), abs=1e-6)
        assert found.sums[long, octave, 1] == pytest.approx((np.expm1(first) - first).sum(), rel=1e-5)
        assert found.sums[long, octave, 2] == pytest.approx(np.expm1(first).sum(), abs=1e-5)
        assert found.lowest[long, octave] == pytest.approx(first.min(), abs=1e-6)
        assert found.highest[long, octave] == pytest.approx(first.max(), abs=1e-6)
    kept = [x.mean() >= math.log(0.999), abs(x.sum()) <= math.log(2), x.min() >= math.log(0.9)]
    assert found.kept[long].tolist() == [100.0 * flag for flag in kept]


def test_order_files_and_threads_do_not_matter(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    sequences = noise(random, 60, 40)
    prompts, steps = [f"p{i // 3}" for i in range(60)], [i % 3 for i in range(60)]
    one = sample(write(tmp_path / "a" / "run", sequences, prompts, steps))
    mixed = random.permutation(60)
    columns = ([values[i] for i in mixed] for values in (sequences, prompts, steps))
    other = sample(write(tmp_path / "b" / "run", *columns, files=4))  # type: ignore[arg-type]
    for number, correction in enumerate(CORRECTIONS):
        assert predict_batch_rejection(one, number, 32) == predict_batch_rejection(other, number, 32)
        assert predict_at_length(one, correction, 500) == predict_at_length(other, correction, 500)


def rejecting(plain: SequenceSample, flags: NDArray[np.bool_], clusters: NDArray[np.uint64]) -> SequenceSample:
    kept = np.where(flags, 0.0, plain.tokens)[:, None]
    return replace(plain, kept=kept, cluster=clusters, step=np.zeros_like(plain.step))


@pytest.mark.parametrize("rejected", [0, 1, 8, 80])
def test_single_sequences_follow_the_beta_binomial(plain: tuple[SequenceSample, str], rejected: int) -> None:
    own = plain[0]
    flags = np.arange(len(own)) < rejected
    alone = rejecting(own, flags, np.arange(len(own), dtype=np.uint64))
    found = predict_batch_rejection(alone, 0, 64)
    law = stats.betabinom(64, rejected + 0.5, len(own) - rejected + 0.5)
    assert found.value == rejected / len(own)
    assert found.interval is not None
    for end, share in zip(found.interval, (0.05, 0.95), strict=True):
        assert law.cdf(64 * end - 1.5) < share + 0.02
        assert law.cdf(64 * end + 1.5) > share - 0.02


def test_small_batches_follow_the_dirichlet_multinomial(plain: tuple[SequenceSample, str]) -> None:
    """The exact distribution of five prompts out of eight of unequal size, enumerated."""
    rejected, size = np.array([3, 1, 0, 0, 2, 5, 0, 1]), np.array([3, 8, 5, 2, 4, 5, 7, 6])
    clusters = np.repeat(np.arange(8, dtype=np.uint64), size)
    flags = np.concatenate([np.arange(count) < bad for bad, count in zip(rejected, size, strict=True)])
    own = replace(rejecting(plain[0]._select(np.arange(40)), flags, clusters), step=np.zeros(40, np.uint64))
    found = predict_batch_rejection(own, 0, 25)
    mean, fraction = size.mean(), rejected.sum() / size.sum()
    scatter = ((rejected - fraction * size) ** 2).sum() / size.sum() * 8 / 7
    half = 0.5 * np.clip(scatter / (fraction * (1 - fraction)), 1, mean) / mean
    rejected, size = np.append(rejected, [mean, 0]), np.append(size, [mean, mean])
    law = stats.dirichlet_multinomial([*[1] * 8, half, half], 5)
    counts = np.array([np.bincount(each, minlength=10) for each in combinations_with_replacement(range(10), 5)])
    share, chance = (counts @ rejected) / (counts @ size), law.pmf(counts)
    assert found.interval is not None
    for end, tail in zip(found.interval, (0.025, 0.975), strict=True):
        assert chance[share < end - 1e-9].sum() < tail + 0.01
        assert chance[share < end + 1e-9].sum() > tail - 0.01


def test_larger_batches_narrow_and_shared_prompts_widen_intervals(plain: tuple[SequenceSample, str]) -> None:
    own = plain[0]
    flags = np.arange(len(own)) % 4 == 0

    def width(sequences: int, clusters: NDArray[np.uint64]) -> float:
        low, high = predict_batch_rejection(rejecting(own, flags, clusters), 0, sequences).interval or (0, 0)
        return high - low

    alone = np.arange(len(own), dtype=np.uint64)
    together = np.where(flags, alone // 16, 1000 + alone // 16)
    assert width(512, alone) < width(64, alone) < width(64, together)


@pytest.mark.slow
def test_stricter_thresholds_reject_more(plain: tuple[SequenceSample, str]) -> None:
    def rejected(bound: float, level: str, length: int) -> float:
        gate = {"level": level, "keep": [bound, None]}
        value = predict_at_length(plain[0], Correction.model_validate({"gates": [gate]}), length)[0].value
        assert value is not None
        return value

    for level in ("geometric", "sequence", "min"):
        values = [rejected(bound, level, 1000) for bound in (0.1, 0.5, 0.9, 0.99, 0.999, 1.0)]
        assert values == sorted(values), level


@pytest.mark.slow
def test_different_steps_are_flagged_and_equal_ones_rarely(plain: tuple[SequenceSample, str]) -> None:
    own = plain[0]
    clusters = np.arange(len(own), dtype=np.uint64)
    step = (np.arange(len(own)) // 20).astype(np.uint64)
    growing = np.random.default_rng(3).random(len(own)) < (step + 1) / 10
    flagged = replace(rejecting(own, growing, clusters), step=step)
    assert predict_batch_rejection(flagged, 0, 64).status.startswith("not stationary")
    random = np.random.default_rng(4)
    false = sum(
        predict_batch_rejection(
            replace(rejecting(own, random.random(len(own)) < 0.3, clusters), step=step), 0, 64
        ).status
        != "ok"
        for _ in range(60)
    )
    assert false <= 8  # 5% of 60, plus chance


def test_predictions_at_longer_lengths_match_normal_sums(plain: tuple[SequenceSample, str]) -> None:
    """The mean log ratio of L tokens is normal with mean about -scale^2/2 and standard deviation scale/sqrt(L)."""
    scale, length = 0.05, 1600
    geometric, *_ = predict_at_length(plain[0], GEOMETRIC, length)
    truth = stats.norm.cdf((math.log(0.999) + scale**2 / 2) / (scale / math.sqrt(length)))
    assert geometric.value == pytest.approx(truth, abs=0.07)
    assert geometric.interval is not None
    assert geometric.interval[0] <= truth <= geometric.interval[1]
    sequence, ess = predict_at_length(plain[0], SEQUENCE, length)
    mean, spread = -(scale**2) / 2 * length, scale * math.sqrt(length)
    law = stats.norm(mean, spread)
    inside = law.cdf(math.log(2)) - law.cdf(-math.log(2))
    assert sequence.value == pytest.approx(1 - inside, abs=0.06)
    ratios = np.exp(law.rvs(200_000, random_state=5))
    kept = np.where((ratios >= 0.5) & (ratios <= 2), ratios, 0.0)
    assert ess.quantity == "ess_sequence"
    assert ess.value == pytest.approx(kept.mean() ** 2 / (kept**2).mean(), abs=0.06)
    veto, *_ = predict_at_length(plain[0], VETO, length)
    token = stats.norm.cdf((math.log(0.9) + scale**2 / 2) / scale)
    assert veto.value == pytest.approx(1 - (1 - token) ** length, abs=0.02)
    for prediction in (geometric, sequence, veto):
        assert prediction.check is not None
        assert prediction.check.error < 0.12
        assert prediction.check.lengths[0] == 2 * prediction.check.start


def planted(random: np.random.Generator, bias: Floats, length: int) -> SequenceSample:
    """Make responses of noise plus a bias per response, four to a prompt."""
    return simulated(random.normal(-0.0002, 0.02, (len(bias), length)) + bias[:, None])


def test_sequence_bias_remains_at_longer_lengths() -> None:
    """From 256 to 4,096 tokens, noise nearly vanishes and the bias does not."""
    random, bound = np.random.default_rng(8), math.log(1.002)
    gate = Correction.model_validate({"gates": [{"level": "geometric", "keep": [1 / 1.002, 1.002]}]})
    for scale in (0.0, 0.002):
        biased, *_ = predict_at_length(planted(random, random.normal(0, scale, 512), 256), gate, 4096)
        law = stats.norm(-0.0002, math.hypot(scale, 0.02 / math.sqrt(4096)))
        truth = law.cdf(-bound) + law.sf(bound)
        assert biased.value == pytest.approx(truth, abs=0.06)
        assert biased.interval is not None
        assert biased.interval[0] <= truth <= biased.interval[1] < 0.85


def test_prediction_errors_widen_the_interval_or_refuse(
    plain: tuple[SequenceSample, str],
) -> None:
    """The noise ends after 64 tokens, so first tokens do not predict later ones."""
    log_ratio = np.random.default_rng(9).normal(0, 0.05, (256, 256))
    log_ratio[:, 64:] *= 0.01
    fading, *_ = predict_at_length(simulated(log_ratio), SEQUENCE, 1024)
    healthy, *_ = predict_at_length(plain[0], SEQUENCE, 1024)
    assert healthy.interval is not None
    assert healthy.interval[1] - healthy.interval[0] < 0.5
    assert fading.check is not None
    assert healthy.check is not None
    assert fading.check.miss > 2 * healthy.check.miss
    assert fading.interval is not None
    assert fading.interval[1] - fading.interval[0] > healthy.interval[1] - healthy.interval[0]
    assert fading.status.startswith("the prediction has an error of")
    beyond, *_ = predict_at_length(simulated(log_ratio), SEQUENCE, 1 << 15)
    assert (beyond.value, beyond.interval) == (None, None)
    assert beyond.status.startswith("not predicted, because the interval would be ")


def test_corrections_without_a_model_are_refused(plain: tuple[SequenceSample, str]) -> None:
    odd = Correction.model_validate({"gates": [{"statistic": "k2", "level": "mean", "keep": [None, 0.1]}]})
    prediction, *_ = predict_at_length(plain[0], odd, 1000)
    assert prediction.value is None
    assert "no prediction for mean K2" in prediction.status
    weights = Correction.model_validate({"weight": {"level": "token", "truncate": 2}})
    prediction, *more = predict_at_length(plain[0], weights, 1000)
    assert (prediction.value, prediction.status, more) == (0.0, "no gate rejects sequences", [])


def test_trends_are_extrapolated_with_an_interval() -> None:
    random = np.random.default_rng(6)
    hits = 0
    for _ in range(100):
        steps = np.arange(30)
        noisy = np.exp(0.05 * steps + random.normal(0, 0.2, 30))
        found = predict_at_step("rejected_tokens", steps.tolist(), (1e-4 * noisy).tolist(), 20)
        assert found.interval is not None
        later = 1e-4 * math.exp(0.05 * 49 + random.normal(0, 0.2))
        hits += found.status == "ok" and found.interval[0] <= later <= found.interval[1]
    assert 82 <= hits <= 97


def test_missing_trends_are_reported() -> None:
    random = np.random.default_rng(7)
    found = [
        predict_at_step("rejected_tokens", list(range(30)), (1e-4 * np.exp(random.normal(0, 0.2, 30))).tolist(), 50)
        for _ in range(100)
    ]
    assert sum(prediction.status == "no trend" for prediction in found) >= 95
    constant = predict_at_step("rejected_sequences", list(range(10)), [0.0] * 10, 5)
    assert constant.status == "no trend"
    few = predict_at_step("rejected_tokens", [1, 2, "three", None], [0.1, 0.2, 0.3, None], 5)
    assert (few.value, few.interval) == (None, None)
    assert few.status == "2 numbered steps are too few for a trend"


@pytest.mark.parametrize("end", [12, 20])
def test_finished_changes_keep_their_level(end: int) -> None:
    """After a jump or a rise of eight steps, a line through all steps would exceed the new level."""
    random, hits, steps = np.random.default_rng(8), 0, np.arange(30)
    height = 1.5 * np.clip((steps - 11) / (end - 11), 0, 1)
    for _ in range(100):
        values = 1e-4 * np.exp(height + random.normal(0, 0.2, 30))
        found = predict_at_step("rejected_tokens", steps.tolist(), values.tolist(), 20)
        assert found.interval is not None
        later = 1e-4 * math.exp(1.5 + random.normal(0, 0.2))
        over = found.status.startswith("no trend since step ")
        hits += over and found.interval[0] <= later <= found.interval[1]
    assert hits >= 80


def test_predictions_use_the_growth_of_the_summary() -> None:
    random = np.random.default_rng(9)
    for slope in (0.0, 0.02, 0.05):
        for _ in range(20):
            values = (1e-4 * np.exp(slope * np.arange(30) + random.normal(0, 0.2, 30))).tolist()
            reported = fit_growth(list(range(30)), values, [None] * 30)
            assert reported.changed == (
                predict_at_step("rejected_tokens", list(range(30)), values, 5).status != "no trend"
            )


def test_predicted_fractions_stay_between_0_and_1() -> None:
    values = [min(0.03 * step, 1.0) for step in range(1, 31)]
    found = predict_at_step("rejected_sequences", list(range(30)), values, 100)
    assert found.interval is not None
    assert 0.9 < found.interval[0] <= found.interval[1] <= 1


@pytest.mark.parametrize("freedom", [2.0, 2.5, 4.0, 11.0, 300.0])
def test_student_quantiles_match_scipy(freedom: float) -> None:
    for probability in (0.95, 0.975):
        assert student_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-4)
