"""One S3 server for the tests of this folder."""

import pytest

from slime_core.store.fsspec_store import FsspecBackend
from slime_core.store.s3 import S3Backend, S3Options
from tests.s3 import ENVIRONMENT, moto_server, troubled, unique_prefix


@pytest.fixture(scope="session")
def s3_url():
    with moto_server() as url:
        yield url


@pytest.fixture
def s3(s3_url, request):
    return S3Backend(unique_prefix("t"), options(s3_url))


@pytest.fixture
def shaky(s3_url):
    """(a store behind a proxy, what makes the proxy's trouble)"""
    with troubled(s3_url) as (url, trouble):
        yield S3Backend(unique_prefix("t"), options(url, deadline_s=4, read_timeout_s=1)), trouble


@pytest.fixture
def opened(s3_url, monkeypatch):
    """(a store behind a proxy, what makes the proxy's trouble)"""
    with troubled(s3_url) as (url, trouble):
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        yield FsspecBackend(unique_prefix("f"), patience_s=3), trouble


def options(url: str, **more: object) -> S3Options:
    keys = {"key": "tester", "secret": "secret", "region": "us-east-1"}
    return S3Options(endpoint_url=url, **keys, **more)  # type: ignore[arg-type]
