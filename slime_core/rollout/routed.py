"""Experts that tokens went to in an engine: asked for with each request, kept in the sample. Pure.

A token that was sampled keeps the routes that it was sampled with: what goes on later, under newer
weights too, asks for the tokens behind those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.errors import EngineError
from slime_core.sample import Sample, int32_array

ROUTES, FIRST = "routed_experts", "routed_experts_start_len"


@dataclass(frozen=True)
class RouteAsk:
    """Of the model, by the names that Sample.append_response_tokens reads from its `args`.

    Attributes:
        num_layers: all of them, those without experts too.
        moe_router_topk: experts a token.
    """

    num_layers: int
    moe_router_topk: int

    def fields(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What a request for these samples has besides; an engine takes one start for all."""
        return {f"return_{ROUTES}": True, FIRST: min(map(_held, samples))}

    def told(self, sample: Sample, asked: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
        """An engine's meta_info with the routes that the sample does not have yet.

        Args:
            sample: before the answer's tokens are appended.
            asked: the request.

        Raises:
            EngineError: it told none, or those of another model.
        """
        found = meta.get(ROUTES)
        if found is None or not len(found):
            if (meta.get("finish_reason") or {}).get("type") == "abort":
                return {**meta, ROUTES: None}  # what goes on tells them
            raise EngineError(
                f"an engine told no {ROUTES}, which use_rollout_routing_replay needs: its model "
                "must have experts, and its option enable_return_routed_experts must stay on"
            )
        first, held = asked[FIRST], _held(sample)
        if first < held:
            try:
                rows = int32_array(found).reshape(-1, self.num_layers, self.moe_router_topk)
            except ValueError as error:
                raise EngineError(
                    f"{ROUTES} are not those of a model with {self.num_layers} layers and "
                    f"{self.moe_router_topk} experts a token: {error}"
                ) from error
            found = rows[held - first :]
        return {**meta, ROUTES: found, FIRST: held}


def _held(sample: Sample) -> int:
    """Tokens at the sample's beginning whose routes it has."""
    routes = sample.rollout_routed_experts
    return 0 if routes is None else len(routes)
