"""Where metrics go."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from slime_core.errors import ConfigError

TIMEOUT_S = 10.0


class Tracking(Block):
    """An MLflow server or database. A configuration names it as `mlflow_tracking_uri: block:NAME`.

    A run whose configuration gives no experiment takes the one of the block.
    """

    _block_type_name = "slime Tracking"
    _block_type_slug = "slime-tracking"

    uri: str = Field(description="http(s):// of an MLflow server, or a database URL.")
    experiment: str | None = Field(default=None, description="Name of the experiment.")
    token: SecretStr | None = Field(default=None, description="Bearer token of the server.")

    def environment(self) -> dict[str, str]:
        """How MLflow's client finds the token, in clear."""
        if self.token is None:
            return {}
        return {"MLFLOW_TRACKING_TOKEN": self.token.get_secret_value()}

    def check(self) -> str:
        """Asks the server for its experiments, or looks whether the database can be written.

        Raises:
            ConfigError: it does not answer, refuses, or cannot be written.
        """
        if self.uri.startswith(("http://", "https://")):
            return self._check_server()
        if not self.uri.startswith("sqlite:///"):
            raise ConfigError(
                f"MLflow at {self.uri}: only http(s):// and sqlite:/// can be checked"
            )
        path = Path(self.uri.removeprefix("sqlite:///"))
        existing = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not os.access(existing, os.W_OK):
            raise ConfigError(f"MLflow database {path}: {existing} cannot be written")
        return f"{path} can be written"

    def _check_server(self) -> str:
        token = self.environment().get("MLFLOW_TRACKING_TOKEN")
        try:
            answer = httpx.get(
                f"{self.uri.rstrip('/')}/api/2.0/mlflow/experiments/search",
                params={"max_results": 1},
                headers={"Authorization": f"Bearer {token}"} if token else {},
                timeout=TIMEOUT_S,
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"MLflow at {self.uri} does not answer: {error}") from error
        if answer.status_code in (401, 403):
            raise ConfigError(f"MLflow at {self.uri} refuses the token ({answer.status_code})")
        if answer.status_code != 200:
            raise ConfigError(f"MLflow at {self.uri} answers with {answer.status_code}")
        return f"{self.uri} answers"
