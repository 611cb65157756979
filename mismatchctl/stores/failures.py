"""What stores' clients say when they fail, as our own sentences: theirs may hold secrets."""

from __future__ import annotations

import re

from mismatchctl.errors import DataError
from mismatchctl.stores.store import printable

_REASONS = {
    r"NO_?SUCH_?BUCKET|bucket does not exist|Bucket '.*' not found": ("there is no such bucket", "bucket"),
    r"INVALID_?ACCESS_?KEY|SIGNATURE_?DOES_?NOT_?MATCH|INVALID_CLIENT_TOKEN|EXPIRED_?TOKEN|INVALID_?TOKEN"
    r"|UNRECOGNIZED_CLIENT|\b401\b|UNAUTHENTICATED|unauthorized|credentials": (
        "the credentials are missing or are not accepted",
        "credentials",
    ),
    r"ACCESS_?DENIED|\b403\b|PERMISSION_?DENIED|forbidden|gated": ("access is denied", "credentials"),
    r"PermanentRedirect|AuthorizationHeaderMalformed|\b301\b": ("the bucket is in another region", "region"),
    r"SLOW_?DOWN|INTERNAL_?FAILURE|Internal_?Error|SERVICE_UNAVAILABLE|\b50[0-4]\b": (
        "the store fails, again and again",
        "later",
    ),
    r"NETWORK_CONNECTION|curlCode|connect(ion )?(refused|reset|error)|resolve|name or service|timed? ?out"
    r"|UNAVAILABLE": ("the store cannot be reached", "network"),
}
"""Error text of the stores' clients -> what to say, and what the remedy is about."""

_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, of somebody who may list and read it",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "run `hf auth login`, or set HF_TOKEN",
}
_ENDPOINT = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "hf": "HF_ENDPOINT"}
_REMEDIES = {
    "bucket": "check the name, and the endpoint that is asked",
    "region": "leave AWS_ENDPOINT_URL unset, or name the endpoint and AWS_REGION of that bucket",
    "later": "run again later",
}


def failure(scheme: str, error: BaseException, path: str) -> DataError:
    """One sentence about a failing store. Its client's own words may hold secrets and are not repeated."""
    shown, text = printable(path), f"{type(error).__name__} {error}"
    if isinstance(error, FileNotFoundError):
        return DataError("there is no such object", file=shown, remedy="check the name, and that it was not deleted")
    for pattern, (problem, about) in _REASONS.items():
        if re.search(pattern, text, re.IGNORECASE):
            network = f"check the network, and {_ENDPOINT[scheme]} if it is set"
            remedies = {**_REMEDIES, "credentials": _CREDENTIALS[scheme], "network": network}
            return DataError(problem, file=shown, remedy=remedies[about])
    code = re.search(r"AWS Error \w+|HTTP status \d+", text)
    kind = code[0] if code else type(error).__name__
    return DataError(f"cannot be read ({kind})", file=shown, remedy="check the path and the store")
