"""The endpoints that change weights and memory."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from slime_core.engines.embedded.errors import RefusedRequestError, RefusedWeightsError
from slime_core.engines.embedded.frontend import Frontend, Update
from slime_core.engines.embedded.server import json_response, read_json
from slime_core.engines.tensor_wire import NamedTensors, WireError, parse_tensors

log = logging.getLogger(__name__)
NOT_HERE = (
    "the embedded engine does not take part in a broadcast group yet; use "
    "update_weights_from_disk or update_weights_from_tensor"
)


class WeightRoutes:
    """Weight updates in SGLang's shapes: {success, message}, 200 or 400."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def routes(self) -> list[Route]:
        handlers = {
            "/update_weights_from_disk": self.from_disk,
            "/update_weights_from_tensor": self.from_tensor,
            "/update_weight_version": self.version,
            "/release_memory_occupation": self.memory,
            "/resume_memory_occupation": self.memory,
            "/init_weights_update_group": self.not_here,
            "/destroy_weights_update_group": self.not_here,
            "/update_weights_from_distributed": self.not_here,
        }
        return [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]

    async def from_disk(self, http: HTTPRequest) -> Response:
        from slime_core.engines.embedded.weights import load_from_disk

        body = await read_json(http)
        path = body.get("model_path")
        if not isinstance(path, str) or not path:
            raise RefusedRequestError("model_path must name a folder with safetensors")
        return await self._update(body, lambda scheduler: load_from_disk(scheduler.model, path))

    async def from_tensor(self, http: HTTPRequest) -> Response:
        from slime_core.engines.embedded.weights import load_from_tensors

        body = await read_json(http)
        payloads = body.get("serialized_named_tensors")
        if not isinstance(payloads, list) or len(payloads) != 1:
            raise RefusedRequestError("serialized_named_tensors must be a list of one payload")
        named: NamedTensors
        try:
            named = parse_tensors(payloads[0], body.get("load_format"))
        except WireError as error:
            return _outcome(False, str(error))
        return await self._update(body, lambda scheduler: load_from_tensors(scheduler.model, named))

    async def _update(self, body: dict[str, Any], update: Update) -> Response:
        version = body.get("weight_version")
        if version is not None and not isinstance(version, str):
            raise RefusedRequestError(f"weight_version must be a string, got {version!r}")
        started_s = time.perf_counter()
        try:
            count = await self._frontend.update(
                update,
                version,
                flush_cache=body.get("flush_cache", True) is not False,
                abort_first=body.get("abort_all_requests") is True,
            )
        except RefusedWeightsError as error:
            return _outcome(False, str(error))
        took_ms = (time.perf_counter() - started_s) * 1e3
        message = f"Updated {count} tensors in {took_ms:.1f} ms."
        if version is not None:
            message += f" Weight version updated to {version}."
        log.info("%s", message)
        return _outcome(True, message)

    async def version(self, http: HTTPRequest) -> Response:
        """Renames the weights. Aborts all requests unless told not to: SGLang's default."""
        body = await read_json(http)
        version = body.get("new_version")
        if not isinstance(version, str):
            raise RefusedRequestError(f"new_version must be a string, got {version!r}")
        if body.get("abort_all_requests", True):
            await self._frontend.abort_all()
        await self._frontend.set_version(version)
        message = f"Weight version updated to {version}"
        return json_response({"success": True, "message": message, "new_version": version})

    async def memory(self, http: HTTPRequest) -> Response:
        """Nothing to release without a memory saver; SGLang answers the same."""
        await read_json(http, optional=True)
        return json_response(None)

    async def not_here(self, _: HTTPRequest) -> Response:
        return _outcome(False, NOT_HERE)


def _outcome(success: bool, message: str) -> Response:
    body = {"success": success, "message": message, "num_paused_requests": 0}
    return json_response(body, 200 if success else 400)
