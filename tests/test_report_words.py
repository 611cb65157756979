from __future__ import annotations

import numpy as np
import pytest

from mismatchctl.render.numbers import bytes_size, estimate, estimate_or_reason, missing, number
from mismatchctl.render.text import are_bytes, clean, short, token_text
from mismatchctl.render.trend import standing, trend


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "nats", "–"),
        (float("nan"), "nats", "–"),
        (12_345_678.0, "tokens", "12,345,678"),
        (0.0, "fraction", "0 %"),
        (1.0, "fraction", "100 %"),
        (0.0123, "fraction", "1.23 %"),
        (0.99998, "fraction", "99.9980 %"),
        (1e-7, "fraction", "1.00e-7"),
        (1.0000213, "ratio", "1.000021"),
        (1 - 1e-12, "fraction", "1 − 1.0e-12"),
        (5.36e-4, "nats/token", "5.36e-4"),
        (0.00123456, "nats", "0.00123"),
        (23.349, "nats", "23.3"),
        (-0.0, "nats", "0"),
        (2.5e7, "-", "2.50e7"),
    ],
)
def test_numbers_tell_their_size(value: float | None, unit: str, text: str) -> None:
    assert number(value, unit) == text


@pytest.mark.parametrize(
    ("value", "se", "unit", "text"),
    [
        (5.36e-4, 2.1e-5, "nats/token", "(5.36 ± 0.21)e-4"),
        (3e-6, 2e-5, "nats", "(0.3 ± 2.0)e-5"),
        (0.132, 0.004, "fraction", "13.20 ± 0.40 %"),
        (1.00002, 3e-6, "ratio", "1.0000200 ± 0.0000030"),
        (123_456.0, 230.0, "-", "123,456 ± 230"),
        (12.3, 0.0, "nats", "12.3"),
        (1.0, 4e-18, "ratio", "1.00"),
        (None, None, "nats", "–"),
    ],
)
def test_estimates_share_their_last_place(value: float | None, se: float | None, unit: str, text: str) -> None:
    assert estimate(value, se, unit) == text


def test_undefined_has_a_reason() -> None:
    assert missing("no valid token") == "– (no valid token)"
    assert missing("ok") == "–"
    assert estimate_or_reason(None, None, "nats", "K3 is 0") == "– (K3 is 0)"
    assert estimate_or_reason(2.0, None, "nats", "ok") == "2.00"


def test_sizes() -> None:
    assert [bytes_size(size) for size in (0, 999, 66_183, 4_200_000)] == ["0 B", "999 B", "66.2 kB", "4.20 MB"]


def test_text_from_outside_is_visible() -> None:
    assert clean("a\x1b[0m\u202eb\u200bc\n\t\u00a0d") == "a␛[0m⟨U+202E⟩b⟨U+200B⟩c↵⇥ d"
    assert clean("schön 猫 שלום") == "schön 猫 שלום"
    assert short("x" * 30, 5) == "xxxx…"


def test_token_ids_read_as_text_only_where_they_are_bytes() -> None:
    assert are_bytes([[104, 105], None, [256]])
    assert not are_bytes([[104, 105], [50_000]])
    assert not are_bytes([None, []])
    assert token_text([104, 195, 169, 10, 256], True) == "hé↵⟨256⟩"
    assert token_text([255], True) == "\\xff"
    assert token_text([104, 105], False) == "104 105"


def test_standing_names_the_range() -> None:
    assert standing(None) == "undefined"
    assert standing(0.0).startswith("exactly 0")
    assert standing(1e-7) == "below what dense models usually show"
    assert standing(1e-4) == "within what dense models usually show"
    assert "mixtures of experts" in standing(1e-2, 1e-4)
    assert standing(5.0) == "above what even mixtures of experts usually show"
    assert standing(1.1e-3, 1e-4).endswith("across the border")


def test_a_jump_is_found_where_it_is() -> None:
    values = [1e-4] * 6 + [5e-4] * 6
    found = trend(list(range(12)), list(values), [0.05 * value for value in values])
    assert found.factor == pytest.approx(5.0, rel=1e-3)
    assert found.between == (5, 6)
    assert found.direction == "up"
    assert found.brief == "▲ 5.00-fold, step 5 to 6"
    fell = trend(list(range(12)), values[::-1], [0.05 * value for value in values[::-1]])
    assert fell.words.startswith("fell 5.00-fold (")


def test_a_ramp_is_found_with_its_ends() -> None:
    values = np.exp(np.log(1e-4) + np.clip((np.arange(40) - 10) / 20, 0, 1) * np.log(8))
    found = trend(list(range(40)), values.tolist(), (0.02 * values).tolist())
    assert found.between == (10, 30)
    assert found.factor == pytest.approx(8.0, rel=0.02)


@pytest.mark.parametrize("steps", [2, 4, 12, 100])
@pytest.mark.parametrize("scatter", [0.0, 0.3])
def test_noise_alone_is_no_trend(steps: int, scatter: float) -> None:
    noise = np.random.default_rng(7)
    alarms = 0
    for _ in range(60):
        values = 1e-3 * np.exp(noise.normal(0, 0.2, steps) + noise.normal(0, scatter, steps))
        alarms += trend(list(range(steps)), values.tolist(), (0.2 * values).tolist()).factor is not None
    assert alarms <= 3


def test_scatter_beyond_the_errors_is_not_called_steady() -> None:
    values = [1e-4, 9e-4] * 8
    found = trend(list(range(16)), list(values), [1e-6] * 16)
    assert found.factor is None
    assert found.words.startswith("goes up and down over 16 steps by more than its errors")


def test_series_without_a_trend_say_so() -> None:
    assert trend([0], [1e-3], [1e-4]).words == "one step only"
    assert trend([0, 1], [None, None], [None, None]).words == "undefined at every step"
    assert trend([0, 1], [0.0, 0.0], [None, None]).words == "0 at all 2 steps"
    assert trend([0, 1], [0.0, 1e-3], [None, None]).words == "0 at 1 of 2 steps, up to 0.00100 at others"
    steady = trend(list(range(10)), [1e-3] * 10, [1e-4] * 10)
    assert steady.words.startswith("no change over 10 steps beyond the errors")
