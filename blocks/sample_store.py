"""Where runs are stored, with the keys that open it."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from slime_core.store.backend import Backend, open_backend
from slime_core.store.probe import check_create_only


class SampleStore(Block):
    """The place that holds all runs: a folder, or a bucket of S3 and what speaks its language.

    A configuration names it as `store_url: block:NAME`.
    """

    _block_type_name = "slime SampleStore"
    _block_type_slug = "slime-sample-store"

    url: str = Field(description="Folder, file:// or s3://bucket/prefix that holds all runs.")
    endpoint_url: str | None = Field(
        default=None, description="Address of an S3 server that is not AWS."
    )
    region: str | None = Field(default=None, description="Region of the bucket.")
    access_key_id: SecretStr | None = Field(default=None, description="Who opens the bucket.")
    secret_access_key: SecretStr | None = Field(default=None, description="The key to that name.")
    session_token: SecretStr | None = Field(default=None, description="Token of temporary keys.")

    def environment(self) -> dict[str, str]:
        """How the store's client finds keys and address, secrets in clear."""
        found = {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_SESSION_TOKEN": self.session_token,
        }
        return {
            name: value.get_secret_value() if isinstance(value, SecretStr) else value
            for name, value in found.items()
            if value is not None
        }

    def backend(self) -> Backend:
        """The store itself, opened with the keys of this block."""
        if not self.url.startswith("s3://"):
            return open_backend(self.url)
        from slime_core.store.s3 import S3Backend, S3Options

        found = self.environment()
        options = S3Options(
            endpoint_url=found.get("AWS_ENDPOINT_URL"),
            region=found.get("AWS_DEFAULT_REGION"),
            key=found.get("AWS_ACCESS_KEY_ID"),
            secret=found.get("AWS_SECRET_ACCESS_KEY"),
            token=found.get("AWS_SESSION_TOKEN"),
        )
        return S3Backend(self.url, options)

    def check(self) -> str:
        """Creates, reads and deletes a small object, and says so.

        Raises:
            SlimeError: the store cannot be reached or written, or lets two writers create one
                object.
        """
        check_create_only(self.backend())
        return f"{self.url} can be written, and creates an object only once"
