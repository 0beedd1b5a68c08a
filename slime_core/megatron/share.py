"""Values of a pack's read positions, of which each context-parallel rank holds a share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime_core.megatron import parallel


@dataclass(frozen=True)
class Share:
    """Which of a pack's P read positions lie on this rank, see PackShare."""

    own: torch.Tensor
    order: torch.Tensor
    most: int

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Values of all P positions, on every rank. A collective of the context-parallel ranks.

        All of these ranks compute the same from the result, so each takes the gradient of its own
        positions alone, and gradients add up over ranks as they do over data-parallel ones.

        Args:
            values: [own, ...], at this rank's positions.

        Returns:
            [P, ...]
        """
        if self.most == 0:
            return values  # nothing is read anywhere
        return _Whole.apply(values, self.own, self.order, self.most)  # type: ignore[return-value]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, values: torch.Tensor, own: torch.Tensor, order: torch.Tensor, most: int
    ) -> torch.Tensor:
        ctx.save_for_backward(own)
        group = parallel.context_group()
        filled = values.new_zeros(most, *values.shape[1:])
        filled[: len(own)] = values
        out = values.new_empty(group.size() * most, *values.shape[1:])
        dist.all_gather_into_tensor(out, filled, group=group)
        return out.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        (own,) = ctx.saved_tensors
        return grads[0].index_select(0, own), None, None, None
