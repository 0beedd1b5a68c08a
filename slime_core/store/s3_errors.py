"""What goes wrong with S3, as one named error each."""

from __future__ import annotations

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError

from slime_core.errors import (
    AccessError,
    LostRaceError,
    MissingError,
    SlimeError,
    StoreError,
    UnavailableError,
)

TROUBLE = (ClientError, BotoCoreError)
_PASSING = {
    "ConditionalRequestConflict", "InternalError", "OperationAborted", "RequestLimitExceeded",
    "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
    "TooManyRequests", "BandwidthLimitExceeded",
}  # fmt: skip
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "RequestExpired", "ExpiredTokenException"}
_REFUSED = {
    "AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed", "Forbidden",
    "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch",
}  # fmt: skip
_FIX = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or fsspec's configuration"


def translate(error: Exception, name: str) -> SlimeError:
    """The error that callers see; UnavailableError if another attempt may help.

    Args:
        name: URL of the object.
    """
    if isinstance(error, ClientError):
        return _of_answer(error, name)
    no_credentials = (
        boto.NoCredentialsError,
        boto.PartialCredentialsError,
        boto.CredentialRetrievalError,
        boto.ProfileNotFound,
        boto.TokenRetrievalError,
        boto.UnauthorizedSSOTokenError,
    )
    if isinstance(error, no_credentials):
        return AccessError(f"{name}: there are no usable credentials ({error}): {_FIX}")
    away = (
        boto.ConnectionError,
        boto.HTTPClientError,
        boto.IncompleteReadError,
        boto.ChecksumError,
    )
    if isinstance(error, away):
        return UnavailableError(f"{name}: the server cannot be reached or went away ({error})")
    return StoreError(f"{name}: {error}")


def _of_answer(error: ClientError, name: str) -> SlimeError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    told = error.response.get("Error", {}).get("Message", "") or code
    if code in ("PreconditionFailed", "412") or status == 412:
        return LostRaceError(f"{name} exists already")
    if code == "NoSuchBucket":
        return StoreError(f"{name}: the bucket does not exist; create it or correct --store-url")
    if code in ("NoSuchKey", "404") or (status == 404 and code != "NoSuchUpload"):
        return MissingError(f"{name} is not there")
    if code in _EXPIRED:
        return AccessError(f"{name}: the credentials have expired ({told}): renew them")
    if code == "RequestTimeTooSkewed":
        return AccessError(f"{name}: this machine's clock is wrong ({told}): set it")
    if code in _PASSING or status in (429, 500, 502, 503, 504):
        return UnavailableError(f"{name}: the server asks to come later ({code}, HTTP {status})")
    if code in _REFUSED or status in (401, 403):
        return AccessError(f"{name}: the server refuses these credentials ({code}): {_FIX}")
    if code == "NotImplemented" or status == 501:
        return StoreError(f"{name}: the server cannot create on a condition ({told})")
    return StoreError(f"{name}: {code} (HTTP {status}): {told}")
