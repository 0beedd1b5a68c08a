"""SGLang servers that stand already."""

from __future__ import annotations

import httpx
from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from slime_core.errors import EngineError

TIMEOUT_S = 10.0


class SGLangEndpoints(Block):
    """Addresses of SGLang servers. Runs start engines of their own so far; `check()` looks at
    these."""

    _block_type_name = "slime SGLangEndpoints"
    _block_type_slug = "slime-sglang-endpoints"

    urls: list[str] = Field(description="Addresses such as http://10.0.0.5:30000.", min_length=1)
    api_key: SecretStr | None = Field(default=None, description="Key that the servers ask for.")

    def check(self) -> str:
        """Asks every server whether it is well.

        Raises:
            EngineError: one does not answer, or says no; names it.
        """
        headers = {}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key.get_secret_value()}"
        for url in self.urls:
            try:
                answer = httpx.get(f"{url.rstrip('/')}/health", headers=headers, timeout=TIMEOUT_S)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise EngineError(f"engine {url} does not answer: {error}") from error
            if answer.status_code != 200:
                raise EngineError(f"engine {url} answers /health with {answer.status_code}")
        return f"{len(self.urls)} engines are well"
