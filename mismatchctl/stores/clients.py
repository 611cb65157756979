"""The clients of object stores, with their credentials from where each provider keeps them."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

from mismatchctl.errors import ConfigError

SCHEMES = ("s3", "gs", "hf")
ATTEMPTS = 5
"""How often a request is made that fails for a while."""
_RETRY_SECONDS = 20
_CONNECT_SECONDS, _REQUEST_SECONDS = 10, 60


@functools.lru_cache(maxsize=64)
def filesystem(scheme: str, bucket: str) -> Any:
    """The client of a bucket, as pyarrow has it."""
    return {"s3": _s3, "gs": _gcs, "hf": _hugging_face}[scheme](bucket)


def forget() -> None:
    """Connect anew at the next path: credentials or endpoints in the environment may have changed."""
    filesystem.cache_clear()


def _s3(bucket: str) -> Any:
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem, resolve_s3_region

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return S3FileSystem(
        endpoint_override=endpoint,
        region=None if endpoint else resolve_s3_region(bucket),  # whatever the environment says of others
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
    )


def _gcs(bucket: str) -> Any:
    from pyarrow.fs import GcsFileSystem

    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    scheme, _, host = emulator.rpartition("://")
    return GcsFileSystem(
        anonymous=bool(emulator),
        endpoint_override=host or None,
        scheme=scheme or ("http" if emulator else "https"),
        retry_time_limit=timedelta(seconds=_RETRY_SECONDS),
    )


def _hugging_face(bucket: str) -> Any:
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise ConfigError("hf:// needs a package more: pip install 'mismatchctl[hf]'") from None
    return PyFileSystem(FSSpecHandler(HfFileSystem()))
