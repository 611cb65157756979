import pytest

from mismatchctl.core.formatting import (
    escape_terminal,
    format_bytes,
    format_estimate,
    format_estimate_or_reason,
    format_label,
    format_number,
    shorten,
    shorten_exponents,
)
from mismatchctl.data.tokenizer import load_vocabulary


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "nats", "–"),
        (float("nan"), "nats", "–"),
        (12_345_678.0, "tokens", "12,345,678"),
        (0.0, "fraction", "0%"),
        (1.0, "fraction", "100%"),
        (0.0123, "fraction", "1.23%"),
        (0.99998, "fraction", "99.998%"),
        (0.999902, "fraction", "99.99%"),
        (0.99951, "fraction", "99.95%"),
        (0.9987, "fraction", "99.9%"),
        (1.0002, "fraction", "100.02%"),
        (12.345, "fraction", "1,234%"),
        (1e-7, "fraction", "1.00e-7"),
        (1.0000213, "ratio", "1.000021"),
        (1 - 1e-12, "fraction", "1 − 1.0e-12"),
        (1 + 2**-52, "fraction", "100%"),
        (1 - 2**-52, "ratio", "1.00"),
        (5.36e-4, "nats/token", "5.36e-4"),
        (0.00123456, "nats", "0.00123"),
        (23.349, "nats", "23.3"),
        (-0.0, "nats", "0"),
        (2.5e7, "-", "2.50e7"),
    ],
)
def test_numbers_are_formatted_by_size(value: float | None, unit: str, text: str) -> None:
    assert format_number(value, unit) == text


@pytest.mark.parametrize(
    ("value", "se", "unit", "text"),
    [
        (5.36e-4, 2.1e-5, "nats/token", "(5.36 ± 0.41)e-4"),
        (3e-6, 2e-5, "nats", "(0.3 ± 3.9)e-5"),
        (0.132, 0.004, "fraction", "13.2 ± 0.78%"),
        (1.00002, 3e-6, "ratio", "1.000020 ± 0.0000059"),
        (123_456.0, 230.0, "-", "123,456 ± 450"),
        (-7.990022255e-6, 6.3e-14, "nats/token", "-7.99e-6 ± 1.2e-13"),
        (0.00417, 1e-12, "nats/token", "0.00417 ± 2.0e-12"),
        (12_345.678, 3e-4, "-", "12,346 ± 5.9e-4"),
        (0.5, 1e-10, "fraction", "50.0 ± 2.0e-8%"),
        (0.99998, 1e-7, "fraction", "99.99800 ± 0.000020%"),
        (1 + 2e-7, 1e-9, "ratio", "1 + 2.0e-7 ± 2.0e-9"),
        (1e-9, 0.003, "nats", "0.0000 ± 0.0059"),
        (2e7, 1e3, "-", "(2.0000 ± 0.00020)e7"),
        (1234567.0, 500.0, "-", "(1.2346 ± 0.00098)e6"),
        (0.99974, 3.8e-5, "", "0.99974 ± 0.000074"),
        (1 - 5e-8, 2e-8, "fraction", "1 − 5.0e-8 ± 3.9e-8"),
        (100_000.0, 50_000.0, "-", "100,000 ± 98,000"),
        (12.3, 0.0, "nats", "12.3"),
        (1.0, 4e-18, "ratio", "1.00"),
        (None, None, "nats", "–"),
    ],
)
def test_an_estimate_has_three_digits_and_its_interval_two(
    value: float | None, se: float | None, unit: str, text: str
) -> None:
    assert format_estimate(value, se, unit) == text


def test_a_skewed_interval_shows_its_ends() -> None:
    """A value ± half the interval would contain values that the interval excludes."""
    assert format_estimate(0.448, 0.1, "fraction", (0.03, 0.95)) == "45 ± 46%"
    assert format_estimate(0.00245, 0.003, "nats/token", (4.04e-4, 0.0148)) == "0.00245 (4.04e-4 to 0.0148)"
    assert format_estimate(6.2e-5, 0.1, "fraction", (0.0, 0.5)) == "0.00620% (0% to 50.0%)"
    assert format_estimate(1.0, 0.1, "", (1.0, 1.0)) == "1.00 ± 0.20"
    assert format_estimate(0.448, None, "fraction", (0.03, 0.95)) == "44.8%"


def test_undefined_values_show_their_reason() -> None:
    assert format_estimate_or_reason(None, None, "", "no valid token") == "– (no valid token)"
    assert format_estimate_or_reason(None, None, "", "ok") == "–"
    assert format_estimate_or_reason(None, None, "nats", "K3 is 0") == "– (K3 is 0)"
    assert format_estimate_or_reason(2.0, None, "nats", "ok") == "2.00"


def test_exponents_have_no_leading_zeros() -> None:
    text = shorten_exponents("6.94e-07 to 1e+03, 1.5e-12, one-05 and 2e+20")
    assert text == "6.94e-7 to 1e3, 1.5e-12, one-05 and 2e20"
    assert (format_label(float("nan")), format_label(1e-7), format_label(2.0)) == ("NaN", "1e-7", "2")


def test_byte_sizes_are_formatted() -> None:
    assert [format_bytes(size) for size in (0, 999, 66_183, 4_200_000)] == ["0 B", "999 B", "66.2 kB", "4.20 MB"]


def test_control_characters_are_made_visible() -> None:
    assert escape_terminal("a\x1b[0m\u202eb\u200bc\n\t\u00a0d") == "a␛[0m⟨U+202E⟩b⟨U+200B⟩c↵⇥ d"
    assert escape_terminal("schön 猫 שלום") == "schön 猫 שלום"
    assert shorten("x" * 30, 5) == "xxxx…"


def test_token_ids_decode_as_text_only_if_they_are_bytes() -> None:
    assert [load_vocabulary(None, ids).name for ids in ([[104, 105], None, [256]], [[104, 50_000]], [None, []])] == [
        "bytes", "ids", "ids",
    ]  # fmt: skip
    read = load_vocabulary("bytes", []).text
    assert read([104, 195, 169, 10, 256]) == "hé\n⟨256⟩" and read([255]) == "\\xff" and read(None) == ""
    assert load_vocabulary("ids", []).text([104, 105]) == "⟨104⟩⟨105⟩"
