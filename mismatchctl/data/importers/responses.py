"""Responses of inference engines: OpenAI-compatible completions and chat, vLLM and SGLang.

Each choice becomes a row with the log-probs of its tokens. Log-probs of the prompt are kept in a column of their own,
because a trainer's side is often measured by scoring prompt and response together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mismatchctl.errors import DataError

PROMPT_LOG_PROBS = "prompt_log_probs"
"""Log-probs of the prompt's tokens without the first, which has none."""
_WRAPPERS = ("response", "body", "result", "output")
"""Keys under which scripts and batch jobs store the response, next to an id."""
_IDS = ("custom_id", "id", "request_id", "rid", "sequence_id")
_TOKEN = re.compile(r"token_id:(\d+)")

Record = Mapping[str, Any]


def is_response(record: Record) -> bool:
    return _body(record) is not None


def read_responses(records: Iterable[Record], path: Path) -> list[dict[str, Any]]:
    """Return one row per choice: id, log-probs, token ids, prompt and finish reason."""
    rows: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        try:
            found = list(_rows(record))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"is not a complete response of an engine ({type(error).__name__}: {error})"
            raise DataError(problem, file=str(path), row=number) from None
        if not found:
            raise DataError("is not a response of an engine", file=str(path), row=number)
        for row in found:
            if row.get("rollout_log_probs") is None and row.get(PROMPT_LOG_PROBS) is None:
                remedy = "request them: logprobs=1 (vLLM, OpenAI), return_logprob=true (SGLang), logprobs=true (chat)"
                raise DataError("the response contains no log-probs", file=str(path), row=number, remedy=remedy)
        rows += found
    return rows


def _body(record: Any) -> tuple[str, Record] | None:
    """Return the kind of a response, and the response without the wrapper that a script added."""
    if not isinstance(record, Mapping):
        return None
    if isinstance(record.get("meta_info"), Mapping):
        return "sglang", record
    choices = record.get("choices")
    if isinstance(choices, list) and (not choices or isinstance(choices[0], Mapping)):
        return "openai", record
    outputs = record.get("outputs")
    if isinstance(outputs, list) and (
        record.get("prompt_logprobs") is not None
        or any(isinstance(one, Mapping) and "token_ids" in one for one in outputs)
    ):
        return "vllm", record
    if isinstance(record.get("prompt_logprobs"), list):
        return "vllm", record
    return next((found for name in _WRAPPERS if (found := _body(record.get(name))) is not None), None)


def _rows(record: Record) -> Iterator[dict[str, Any]]:
    kind, body = _body(record) or ("", {})
    outer = (
        {name: value for name, value in record.items() if isinstance(value, (str, int, float))}
        if body is not record
        else {}
    )
    read = {"sglang": _sglang, "openai": _openai, "vllm": _vllm}.get(kind)
    if read is None:
        return
    found = list(read(body))
    for number, row in enumerate(found):
        name = next((outer[key] for key in _IDS if key in outer), row.pop("id", None))
        row.pop("id", None)
        row["id"] = None if name is None else f"{name}:{number}" if len(found) > 1 else str(name)
        yield {**{key: value for key, value in outer.items() if key not in _IDS}, **row}


def _openai(body: Record) -> Iterator[dict[str, Any]]:
    for choice in sorted(body["choices"], key=lambda one: one.get("index") or 0):
        found = choice.get("logprobs")
        row: dict[str, Any] = {"id": body.get("id"), "finish_reason": choice.get("finish_reason")}
        if isinstance(found, Mapping) and isinstance(found.get("content"), list):
            row["rollout_log_probs"] = [_number(one["logprob"]) for one in found["content"]]
            tokens = [one.get("token") for one in found["content"]]
        elif isinstance(found, Mapping) and isinstance(found.get("token_logprobs"), list):
            row["rollout_log_probs"] = [_number(one) for one in found["token_logprobs"]]
            tokens = found.get("tokens") or []
        else:
            tokens = []
        ids = choice.get("token_ids")
        row["token_ids"] = ids if isinstance(ids, list) else _token_ids(tokens)
        row |= _kept_tokens(choice.get("sampling_mask"))
        prompt = choice.get("prompt_token_ids", body.get("prompt_token_ids"))
        yield row | _prompt(prompt, choice.get("prompt_logprobs", body.get("prompt_logprobs")))


def _token_ids(tokens: Sequence[Any]) -> list[int] | None:
    """Return ids from `token_id:123`, which vLLM writes with return_tokens_as_token_ids."""
    matches = [_TOKEN.fullmatch(token) if isinstance(token, str) else None for token in tokens]
    return [int(match[1]) for match in matches if match] if matches and all(matches) else None


def _vllm(body: Record) -> Iterator[dict[str, Any]]:
    prompt = _prompt(body.get("prompt_token_ids"), body.get("prompt_logprobs"))
    for output in body.get("outputs") or [{}]:
        row: dict[str, Any] = {
            "id": body.get("request_id", body.get("id")),
            "finish_reason": output.get("finish_reason"),
        }
        ids, found = output.get("token_ids"), output.get("logprobs")
        row["token_ids"] = ids
        if isinstance(found, list) and isinstance(ids, list):
            if len(found) != len(ids):
                raise ValueError(f"{len(found)} log-probs for {len(ids)} tokens")
            row["rollout_log_probs"] = [_sampled(entry, token) for entry, token in zip(found, ids, strict=True)]
        yield row | prompt | _kept_tokens(output.get("sampling_mask"))


def _kept_tokens(mask: Any) -> dict[str, Any]:
    mask = mask.get("token_ids") if isinstance(mask, Mapping) else mask
    return {"kept_tokens": [len(ids) for ids in mask]} if isinstance(mask, list) else {}


def _sampled(entry: Any, token: int) -> float:
    """Return the log-prob of the sampled token. The first entry of a position may be another, more likely one."""
    if entry is None or isinstance(entry, (int, float)):
        return _number(entry)
    found = entry[str(token)] if str(token) in entry else entry[token]
    return _number(found["logprob"] if isinstance(found, Mapping) else found)


def _sglang(body: Record) -> Iterator[dict[str, Any]]:
    info = body["meta_info"]
    reason = info.get("finish_reason")
    row: dict[str, Any] = {
        "id": info.get("id", body.get("id")),
        "finish_reason": reason.get("type") if isinstance(reason, Mapping) else reason,
    }
    output = info.get("output_token_logprobs")
    if isinstance(output, list):
        row["rollout_log_probs"] = [_number(one[0]) for one in output]
        row["token_ids"] = [int(one[1]) for one in output]
    version = str(info.get("weight_version", ""))
    if version.isdecimal():
        row["rollout_version"] = int(version)
    given = info.get("input_token_logprobs")
    if isinstance(given, list) and given:
        row["prompt_token_ids"] = [int(one[1]) for one in given]
        row[PROMPT_LOG_PROBS] = [_number(one[0]) for one in given[1:]]
    yield row


def _prompt(ids: Any, found: Any) -> dict[str, Any]:
    """Return the prompt's tokens and their log-probs, if the response has them."""
    row: dict[str, Any] = {}
    if isinstance(ids, list):
        row["prompt_token_ids"] = ids
    if isinstance(found, list) and found:
        tokens = ids if isinstance(ids, list) and len(ids) == len(found) else [None] * len(found)
        row[PROMPT_LOG_PROBS] = [
            _sampled(entry, token) if token is not None or not isinstance(entry, Mapping) else _only(entry)
            for entry, token in zip(found[1:], tokens[1:], strict=True)
        ]
    return row


def _only(entry: Mapping[str, Any]) -> float:
    if len(entry) != 1:
        raise ValueError("prompt_logprobs has several tokens at one position; add prompt_token_ids")
    (found,) = entry.values()
    return _number(found["logprob"] if isinstance(found, Mapping) else found)


def _number(value: Any) -> float:
    """Return a log-prob. null, which vLLM writes for a token without one, is NaN."""
    return math.nan if value is None else float(value)
