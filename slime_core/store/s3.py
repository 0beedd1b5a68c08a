"""The five verbs on S3 and what speaks its language, through botocore.

An object is created by a PUT with `If-None-Match: *`; large ones by a multipart upload that is
completed under the same condition. Whatever passes by itself (throttling, 5xx, time-outs, lost
connections) is tried again until a deadline; everything else is one named error.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec.config
from botocore import UNSIGNED
from botocore.config import Config
from botocore.session import get_session

from slime_core.errors import ConfigError, LostRaceError, StoreError
from slime_core.store.backend import Data, Entry, check_key
from slime_core.store.retries import retried
from slime_core.store.s3_errors import TROUBLE, translate

T = TypeVar("T")
SINGLE_PUT_BYTES = 64 * 2**20
UPLOAD_PART_BYTES = 32 * 2**20
MOST_UPLOAD_PARTS = 9000
UPLOAD_THREADS = 4
WRITER = "slime-writer"


@dataclass(frozen=True)
class S3Options:
    """How the server is reached. What is None comes from the environment as botocore knows it
    (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, profiles, roles).

    Attributes:
        deadline_s: how long one call may be tried again.
    """

    endpoint_url: str | None = None
    region: str | None = None
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    anonymous: bool = False
    deadline_s: float = 60.0
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0

    @classmethod
    def from_fsspec(cls) -> S3Options:
        """The options that fsspec's configuration (its files, FSSPEC_S3_...) names for s3."""
        found = fsspec.config.conf.get("s3", {})
        client = found.get("client_kwargs", {})
        return cls(
            endpoint_url=found.get("endpoint_url") or client.get("endpoint_url"),
            region=client.get("region_name"),
            key=found.get("key"),
            secret=found.get("secret"),
            token=found.get("token"),
            anonymous=bool(found.get("anon", False)),
        )


def _environment() -> tuple[tuple[str, str], ...]:
    """What botocore reads besides the options."""
    return tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))


@cache
def _client(options: S3Options, environment: tuple[tuple[str, str], ...]) -> Any:
    """One client a process for equal options and an equal environment, from which it takes what
    the options leave out: making one takes long, and threads may share it."""
    config = Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        retries={"total_max_attempts": 1},
        max_pool_connections=16,
        **({"signature_version": UNSIGNED} if options.anonymous else {}),
    )
    try:
        return get_session().create_client(
            "s3",
            region_name=options.region,
            endpoint_url=options.endpoint_url,
            aws_access_key_id=options.key,
            aws_secret_access_key=options.secret,
            aws_session_token=options.token,
            config=config,
        )
    except TROUBLE as error:
        raise translate(error, "s3://") from error


class S3Backend:
    """Objects of a bucket below a prefix."""

    clock_resolution_s = 1.0

    def __init__(
        self, url: str, options: S3Options | None = None, patience_s: float | None = None
    ) -> None:
        """Opens nothing yet: the first call does.

        Args:
            url: `s3://bucket/prefix`.
            patience_s: how long one call may be tried again, and how long an answer may take.

        Raises:
            ConfigError: no bucket.
        """
        parts = urlsplit(url)
        if not parts.netloc:
            raise ConfigError(f"store {url}: name a bucket, as in s3://bucket/prefix")
        self._bucket = parts.netloc
        self._prefix = unquote(parts.path).strip("/")
        self.url = f"s3://{self._bucket}" + (f"/{self._prefix}" if self._prefix else "")
        self._options = options or S3Options.from_fsspec()
        if patience_s is not None:
            self._options = replace(
                self._options, deadline_s=patience_s, read_timeout_s=max(1.0, patience_s)
            )
        self._client = _client(self._options, _environment())

    def put_new(self, key: str, data: Data) -> None:
        view = memoryview(data).cast("B")
        token = uuid.uuid4().hex
        attempts = itertools.count()
        create = self._create_whole if len(view) <= SINGLE_PUT_BYTES else self._create_in_parts
        try:
            create(key, view, token, attempts)
        except LostRaceError:
            # An attempt whose answer never came may have been the one that created the object.
            if next(attempts) < 2 or self._writer(key) != token:
                raise

    def get(self, key: str) -> bytes:
        return self._read(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        return self._read(key, Range=f"bytes={start}-{start + length - 1}")

    def list(self, prefix: str = "") -> list[Entry]:
        full = self._name(prefix) if prefix else (f"{self._prefix}/" if self._prefix else "")
        cut = len(self._prefix) + 1 if self._prefix else 0
        found: list[Entry] = []
        more: dict[str, str] = {}
        while True:
            answer = self._call("list_objects_v2", prefix, Prefix=full, **more)
            found += [
                Entry(item["Key"][cut:], item["Size"], item["LastModified"].timestamp())
                for item in answer.get("Contents", ())
            ]
            if not answer.get("IsTruncated"):
                return sorted(found, key=lambda entry: entry.key)
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        self._call("delete_object", key, Key=self._name(check_key(key)))

    def local_path(self, key: str) -> Path | None:
        return None

    def _create_whole(
        self, key: str, view: memoryview, token: str, attempts: itertools.count[int]
    ) -> None:
        name, body = self._name(check_key(key)), bytes(view)

        def attempt() -> None:
            next(attempts)
            self._client.put_object(
                Bucket=self._bucket, Key=name, Body=body, IfNoneMatch="*", Metadata={WRITER: token}
            )

        self._retried(key, attempt)

    def _create_in_parts(
        self, key: str, view: memoryview, token: str, attempts: itertools.count[int]
    ) -> None:
        name = self._name(check_key(key))
        upload = self._call("create_multipart_upload", key, Key=name, Metadata={WRITER: token})
        of_upload = {"Key": name, "UploadId": upload["UploadId"]}
        size = max(UPLOAD_PART_BYTES, -(-len(view) // MOST_UPLOAD_PARTS))

        def send(number: int) -> dict[str, Any]:
            start = (number - 1) * size
            body = bytes(view[start : start + size])
            sent = self._call("upload_part", key, PartNumber=number, Body=body, **of_upload)
            return {"PartNumber": number, "ETag": sent["ETag"]}

        def complete() -> None:
            next(attempts)
            self._client.complete_multipart_upload(
                Bucket=self._bucket, IfNoneMatch="*", MultipartUpload={"Parts": parts}, **of_upload
            )

        try:
            with ThreadPoolExecutor(UPLOAD_THREADS, "s3-upload") as pool:
                parts = list(pool.map(send, range(1, -(-len(view) // size) + 1)))
            self._retried(key, complete)
        except StoreError:
            if self._writer(key) == token:
                return  # it was completed by an attempt whose answer never came
            with suppress(StoreError):  # what is left of an upload is no object; buckets expire it
                self._call("abort_multipart_upload", key, **of_upload)
            raise

    def _read(self, key: str, **more: str) -> bytes:
        name = self._name(check_key(key))

        def attempt() -> bytes:
            try:
                return self._client.get_object(Bucket=self._bucket, Key=name, **more)["Body"].read()
            except self._client.exceptions.ClientError as error:
                if error.response["Error"].get("Code") == "InvalidRange":
                    return b""  # it starts at the object's end or behind it
                raise

        return self._retried(key, attempt)

    def _writer(self, key: str) -> str | None:
        """The token of whoever created an object."""
        answer = self._call("head_object", key, Key=self._name(key))
        return answer.get("Metadata", {}).get(WRITER)

    def _call(self, operation: str, key: str, **arguments: Any) -> Any:
        def attempt() -> Any:
            return getattr(self._client, operation)(Bucket=self._bucket, **arguments)

        return self._retried(key, attempt)

    def _retried(self, key: str, action: Callable[[], T]) -> T:
        name, limit_s = f"{self.url}/{key}", self._options.deadline_s
        return retried(name, limit_s, action, TROUBLE, translate, self._read_credentials)

    def _read_credentials(self) -> None:
        _client.cache_clear()
        self._client = _client(self._options, _environment())

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key
