"""`sweep` shows, writes and explains the same predictions as `predict`."""

import json

import pytest

from mismatchctl.api.predict import predict_at_length, predict_batch_rejection
from mismatchctl.api.sweep.result import ForecastRequest
from mismatchctl.api.sweep.study import Study, ThresholdAxis
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.corrections.model import Correction
from tests.cli.command import run
from tests.factories.sequence_samples import read_sample
from tests.paths import SAMPLE_DATA

MOE = str(SAMPLE_DATA / "moe")
GEOMETRIC = Correction.model_validate({"name": "geo", "gates": [{"level": "geometric", "keep": [0.99, 1.01]}]})
STUDY = Study(GEOMETRIC, (ThresholdAxis.parse("gates.0.keep", "1.001:1.05:30:log"),))


@pytest.mark.slow
def test_predictions_match_single_points() -> None:
    found = sweep([MOE], [STUDY], outlook=ForecastRequest(batch=64, lengths=(512,), ahead=3))
    assert [forecast.point for forecast in found.forecasts] == [0, 4, 8, 12, 17, 21, 25, 29]
    for forecast in (found.forecasts[0], found.forecasts[5]):
        correction = STUDY.correction_at(forecast.point)
        alone = read_sample([MOE], [correction]).of_run("moe")
        rejected, tokens, length, *later = forecast.predictions
        assert rejected == predict_batch_rejection(alone, 0, 64)
        assert tokens == predict_batch_rejection(alone, 0, 64, "tokens")
        assert [length] == predict_at_length(alone, correction, 512)
        assert [prediction.quantity for prediction in later] == ["rejected_sequences", "rejected_tokens"]
        row = found.rows("moe", "geo").row(forecast.point, named=True)
        assert rejected.value == pytest.approx(row["rejected_sequences"], rel=1e-12)
        assert tokens.value == pytest.approx(row["rejected_tokens"], rel=1e-12)


def test_no_prediction_without_the_option() -> None:
    assert sweep([MOE], [STUDY]).forecasts == ()


def test_predictions_are_printed_with_model_and_check() -> None:
    flags = ["--geo", "1.01,1.02", "--batch", "32", "--at-length", "4096", "--at-step", "+5"]
    printed = run("sweep", MOE, *flags, code=0, COLUMNS="140")
    for words in ("of 32 sequences", "4,096 tokens per response", "+5 steps", "Model: ", "Test on the dump: "):
        assert words in printed.stdout, words
    data = json.loads(run("sweep", MOE, *flags, "--json").stdout)
    assert [len(forecast["predictions"]) for forecast in data["predictions"]] == [5, 5]
    first = data["predictions"][0]["predictions"][0]
    assert first["interval"][0] <= first["value"] <= first["interval"][1]


def test_a_length_of_zero_is_refused() -> None:
    run("sweep", MOE, "--geo", "1.01,1.02", "--at-length", "0", code=2)
