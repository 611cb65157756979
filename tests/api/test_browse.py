"""The page of single tokens: the tokens that it shows, the effect of corrections, and escaped text."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.browse import TokenView, browse, parse_places
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.data.tokenizer import load_vocabulary
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.report.pages.tokens import render_tokens
from tests.cli.command import run
from tests.report.browser import TOO_WIDE, visit
from tests.report.page_parser import Parsed

GEOMETRIC = Correction(name="geo", gates=(Gate(level="geometric", keep=(0.98, 1.02)),))
MASKED = Correction(name="ice", weight=Weight(truncate=1.5), gates=(Gate(level="token", keep=(0.5, None)),))
ROWS = 12


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write sequences of 30 tokens, every fifth masked, in two steps. The last ratio of row 7 is exp(-3)."""
    random = np.random.default_rng(4)
    rollout = -0.5 - random.random((ROWS, 30))
    train = rollout + 0.05 * random.standard_normal((ROWS, 30))
    train[7, 29] = rollout[7, 29] - 3
    mask = np.ones((ROWS, 30), int)
    mask[:, ::5] = 0
    rollout[mask == 0] = np.nan
    hostile = np.array([*b"<script>alert(1)</script>&'\"\n\\"])[:30]
    experts = random.integers(0, 8, (ROWS, 30, 4))
    others = experts.copy()
    others[2, 6, 0] += 8
    table = {
        "rollout_log_probs": rollout.tolist(), "train_log_probs": train.tolist(), "response_mask": mask.tolist(),
        "token_ids": [np.resize(hostile, 30).tolist()] * ROWS, "step": [row // 6 for row in range(ROWS)],
        "rollout_version": list(range(ROWS)), "rollout_experts": experts.tolist(), "train_experts": others.tolist(),
    }  # fmt: skip
    place = tmp_path_factory.mktemp("browse") / "dump.parquet"
    pl.DataFrame(table).write_parquet(place)
    return place


@pytest.fixture(scope="module")
def found(dump: Path) -> TokenView:
    return browse([str(dump)], [("dump.parquet", 7), (str(dump), 2)], [GEOMETRIC, MASKED])


def test_rows_match_the_file(dump: Path, found: TokenView) -> None:
    table = pl.read_parquet(dump)
    assert [row.row for row in found.rows] == [7, 2]
    for row in found.rows:
        valid = np.array(table["response_mask"][row.row].to_list()) == 1
        assert row.mask.tolist() == valid.tolist()
        assert row.batch.train.tolist() == np.array(table["train_log_probs"][row.row].to_list())[valid].tolist()
        assert row.facts["rollout_version"] == row.row
        assert row.position.tolist() == np.flatnonzero(valid).tolist()
    assert found.rows[1].experts is not None
    assert np.flatnonzero(found.rows[1].experts).tolist() == [int(np.flatnonzero(valid).tolist().index(6))]


def test_experts_that_differ_are_counted_by_layer(tmp_path: Path) -> None:
    """The order of experts in a layer has no meaning. Two layers may use the same number."""
    table = {
        "rollout_log_probs": [[-1.0] * 4], "train_log_probs": [[-1.0] * 4], "response_mask": [[0, 1, 1, 1]],
        "rollout_experts": [[[0] * 6, [1, 2, 3, 4, 5, 6], [1, 2, 3, 1, 2, 4], [3, 2, 1, 6, 5, 4]]],
        "train_experts": [[[0] * 6, [2, 3, 4, 4, 5, 6], [1, 2, 4, 1, 2, 3], [1, 2, 3, 4, 5, 6]]],
    }  # fmt: skip
    pl.DataFrame(table).write_parquet(tmp_path / "dump.parquet")
    view = browse([str(tmp_path)], [("dump.parquet", 0)], [])
    experts = view.rows[0].experts
    assert experts is not None
    assert experts.tolist() == [1, 2, 0]


def test_token_states_follow_the_definition(found: TokenView) -> None:
    """A ratio below the bound is rejected. A weight above the truncation is set to the bound."""
    assert [one.correction for one in found.corrections] == [GEOMETRIC, MASKED]
    mean, masked = found.corrections
    ratio = np.exp(found.rows[0].log_ratio)
    assert ((mean.states[0] == 1) == (not 0.98 <= np.exp(found.rows[0].log_ratio.mean()) <= 1.02)).all()
    assert ((masked.states[0] == 1) == (ratio < 0.5)).all() and (ratio < 0.5).any()
    assert ((masked.states[0] == 2) == ((ratio >= 0.5) & (ratio > 1.5))).all()
    assert np.allclose(masked.weights[0], np.minimum(ratio, 1.5))
    assert [bool(text) for text in masked.reasons[0]] == (ratio < 0.5).tolist()


def test_the_page_escapes_text(found: TokenView) -> None:
    page = render_tokens(found)
    parsed = Parsed(page)
    assert len(parsed.all("script")) == 3  # the data, the shared script, and the script of this page
    assert not re.search(r"<script>alert", page)
    assert "<script>alert" in parsed.text.replace(" ", "")
    assert len(parsed.all("i")) >= 48
    assert len(page) < 200_000
    assert page == render_tokens(found)


def test_kept_tokens_are_counted_beyond_the_shown_part(found: TokenView, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is rejected as a whole only if no token of it is kept."""
    monkeypatch.setattr("mismatchctl.report.pages.tokens.MAX_TOKENS", 1)
    page = re.search(r'id="tokens">(.*?)</script>', render_tokens(found), re.DOTALL)
    assert page is not None
    data = json.loads(page[1])
    for applied, shown in zip(found.corrections, data["corrections"], strict=True):
        assert [len(own["states"]) for own in shown["sequences"]] == [1, 0]
        assert [own["kept"] for own in shown["sequences"]] == [int((states != 1).sum()) for states in applied.states]
    assert [own["total"] for own in data["sequences"]] == [row.batch.tokens for row in found.rows]


def test_rows_are_chosen_by_place_or_worst(dump: Path) -> None:
    result = analyze([str(dump)], [], findings=False)
    assert parse_places([], result)[0] == (str(dump), 7)
    assert parse_places(["a/b.parquet:3"], result) == [("a/b.parquet", 3)]
    for text in ("a.parquet", "a.parquet:x", ":3"):
        with pytest.raises(ConfigError, match="PATH:ROW"):
            parse_places([text], result)
    with pytest.raises(DataError, match="the dump does not contain this sequence"):
        browse([str(dump)], [(str(dump), ROWS)], [])
    with pytest.raises(DataError, match="does not contain a file of this name"):
        browse([str(dump)], [("other.parquet", 0)], [])


def test_vocabularies_decode_token_ids(tmp_path: Path) -> None:
    ids = np.array([0, 1, 2, 3, 99])
    byte_level = {"model": {"vocab": {"Ġhi": 0, "Ã©": 1, "Ċ": 2}}, "added_tokens": [{"id": 3, "content": "<|end|>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level))
    for named in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_vocabulary(named, [ids]).texts(ids) == [" hi", "é", "\n", "<|end|>", "⟨99⟩"]
    pieces = {"model": {"vocab": [["▁hi", -1.0], ["<0x0A>", -2.0], ["ß", -3.0]]}}
    (tmp_path / "b.json").write_text(json.dumps(pieces))
    assert load_vocabulary(tmp_path / "b.json", [ids]).texts(ids)[:3] == [" hi", "\n", "ß"]
    assert load_vocabulary("ids", [ids]).texts(ids)[:1] == ["⟨0⟩"]
    assert load_vocabulary(None, [np.array([104, 105])]).texts(np.array([104, 105])) == ["h", "i"]
    (tmp_path / "c.json").write_text('{"model": {"vocab": 3}}')
    for named in (tmp_path / "c.json", "no-such-encoding"):
        with pytest.raises(ConfigError, match="--tokenizer"):
            load_vocabulary(named, [ids])


def test_browse_writes_its_page(dump: Path, tmp_path: Path) -> None:
    page = tmp_path / "tokens.html"
    run("analyze", dump, "-c", "geo_rs", "--tokens", page, "--browse", f"{dump.name}:3", "--tokenizer", "bytes", code=0)
    assert "row 3" in page.read_text()
    run("analyze", dump, "--browse", f"{dump}:3", code=2)


@pytest.fixture(scope="module")
def address(found: TokenView, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("page") / "tokens.html"
    place.write_text(render_tokens(found), encoding="utf-8")
    return place.as_uri()


@pytest.mark.browser
def test_corrections_and_keys_work_in_a_browser(browser: Any, address: str, found: TokenView) -> None:
    for width in (1280, 390):
        assert visit(browser, address, width=width) == []
        assert browser.execute_script(TOO_WIDE) == []
    choose = """
      const choice = document.querySelector('[data-part="correction"]');
      choice.value = arguments[0];
      choice.dispatchEvent(new Event("change"));
      return document.querySelectorAll(".sequence .rejected").length;
    """
    for place, applied in enumerate(found.corrections):
        assert browser.execute_script(choose, place) == sum(int((states == 1).sum()) for states in applied.states)
    tokens = browser.find_element("css selector", ".tokens")
    tokens.send_keys("\ue014\ue014")
    reported = browser.find_element("css selector", ".token-info").text
    assert "log ratio" in reported and f"{found.rows[0].log_ratio[1]:.4g}" in reported
