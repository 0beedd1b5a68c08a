"""Adam whose states lie in the host's memory and visit the device in parts, for their update.

The arithmetic is torch's own, on the device and element by element, so every bit is that of the
run without it. Moments come and go in parts of a bounded size. Float32 masters of bf16 weights are
on the device for the length of a step, when activations and logits are gone: Megatron copies them
into the weights itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.optim.adam import adam as update

from slime_core.megatron.host_memory import PIECE_BYTES, cut, host_pieces, packed

FLOAT_BYTES = 4
PART_ELEMENTS = 2**24
"""Of each moment on the device at a time: 64 MiB, and torch's own temporaries take as much."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdam(torch.optim.Adam):
    """Takes the place of a torch.optim.Adam or AdamW that has not stepped yet.

    `state` and, between steps, `data` of masters are tensors of the host, so whatever reads or
    writes a checkpoint needs no room on the device.

    Attributes:
        host_bytes: what lies in the host's memory.
    """

    def __init__(
        self,
        adam: torch.optim.Adam,
        masters: Iterable[torch.Tensor],
        device: torch.device,
        fraction: float = 1.0,
        part_elements: int = PART_ELEMENTS,
    ) -> None:
        """Moves masters and makes the moments, zeros.

        Args:
            masters: those of its parameters that no model has views of.
            fraction: of the elements; the first parameters that have so many go to the host.

        Raises:
            TrainerError: the host has no room for them.
        """
        names = ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")
        # torch takes leaves only, and the shards of float32 weights are views.
        super().__init__([torch.empty(0)], **{name: adam.defaults[name] for name in names})
        self.param_groups = adam.param_groups
        self._device, self._part = device, part_elements
        self._decoupled = bool(adam.defaults["decoupled_weight_decay"])
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        away = first_part([parameter.numel() for parameter in own], fraction)
        wanted = {id(master) for master in masters}
        self._masters = [parameter for parameter in own[:away] if id(parameter) in wanted]
        held = [parameter for parameter in own[:away] for _ in MOMENTS] + self._masters
        room = iter(_room(held, pinned=device.type == "cuda"))
        for number, parameter in enumerate(own):
            moments = [
                next(room) if number < away else torch.zeros_like(parameter) for _ in MOMENTS
            ]
            self.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                **dict(zip(MOMENTS, moments, strict=True)),
            }
        for master in self._masters:
            master.data = next(room).copy_(master.data)
        self.host_bytes = sum(tensor.numel() * FLOAT_BYTES for tensor in held)

    @contextmanager
    def taking_gradients(self) -> Iterator[None]:
        """Masters can be given gradients of the device; their values cannot be read meanwhile."""
        held = [master.data for master in self._masters]
        zero = torch.zeros((), dtype=torch.float32, device=self._device)
        try:
            for master, host in zip(self._masters, held, strict=True):
                master.data = zero.expand(host.shape)
            yield
        finally:
            for master, host in zip(self._masters, held, strict=True):
                master.data = host

    @contextmanager
    def masters_on_device(self) -> Iterator[None]:
        """Around a step and what copies its outcome into weights."""
        held = [master.data for master in self._masters]
        try:
            for master, host in zip(self._masters, held, strict=True):
                master.data = host.to(self._device, non_blocking=True, copy=True)
            yield
        finally:
            for master, host in zip(self._masters, held, strict=True):
                master.data = host.copy_(master.data, non_blocking=True)
            if self._device.type == "cuda":  # whoever reads the host's tensors next does not wait
                torch.cuda.synchronize()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have gradients. Within `masters_on_device`."""
        assert closure is None
        for group in self.param_groups:
            stepped = [one for one in group["params"] if one.grad is not None]
            for parts in cut([one.numel() for one in stepped], self._part):
                self._update(group, [(stepped[index], start, stop) for index, start, stop in parts])
            for parameter in stepped:
                self.state[parameter]["step"] += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies states into those of the host, where torch would move them to the device."""
        own = [self.state[one] for group in self.param_groups for one in group["params"]]
        super().load_state_dict({**state_dict, "state": {}})
        parameters = (one for group in self.param_groups for one in group["params"])
        for index, (parameter, state) in enumerate(zip(parameters, own, strict=True)):
            given = state_dict["state"][index]
            for name in MOMENTS:
                state[name].copy_(given[name])
            self.state[parameter] = state | {"step": given["step"].clone()}

    def _update(
        self, group: dict[str, Any], parts: Sequence[tuple[torch.Tensor, int, int]]
    ) -> None:
        """A step of parts (parameter, start, stop), whose step counts stay what they are."""
        hosts = [[_part(self.state[one][name], *at) for one, *at in parts] for name in MOMENTS]
        here = [
            [host.to(self._device, non_blocking=True, copy=host.device.type == "cpu")
             for host in of_moment]
            for of_moment in hosts
        ]  # fmt: skip
        moments, squares = here
        update(
            [_part(one.detach(), *at) for one, *at in parts],
            [_part(one.grad, *at) for one, *at in parts if one.grad is not None],
            moments,
            squares,
            [],
            [self.state[one]["step"].clone() for one, *_ in parts],
            foreach=group.get("foreach"),
            decoupled_weight_decay=self._decoupled,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for of_moment, updated in zip(hosts, here, strict=True):
            for host, value in zip(of_moment, updated, strict=True):
                host.copy_(value, non_blocking=True)


def first_part(sizes: Sequence[int], fraction: float) -> int:
    """How many of the first tensors have at least this fraction of all elements."""
    wanted = fraction * sum(sizes)
    return next((n for n, sum_ in enumerate(accumulate(sizes), 1) if sum_ >= wanted), len(sizes))


def _room(tensors: Sequence[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
    """float32 zeros of the host, each of the shape of one of `tensors`."""
    places, sizes = packed([one.numel() for one in tensors], PIECE_BYTES // FLOAT_BYTES)
    blocks = host_pieces(
        sizes,
        torch.float32,
        pinned=pinned,
        who="optimizer_cpu_offload cannot begin",
        fix="leave it out, or use more ranks: they share the states",
    )
    return [
        blocks[number][start : start + one.numel()].view(one.shape).zero_()
        for one, (number, start) in zip(tensors, places, strict=True)
    ]


def _part(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor.view(-1)[start:stop]
