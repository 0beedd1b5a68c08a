"""Adam with its states in the host's memory computes the bits of torch's own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from slime_core.megatron.host_adam import HostAdam, first_part
from slime_core.megatron.host_memory import ALIGNED, cut, packed

CPU = torch.device("cpu")
SHAPES = [(7, 300), (5,), (4096,), (1,)]


def groups() -> list[dict[str, object]]:
    """Two groups, one without decay."""
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=draw) for shape in SHAPES]
    return [{"params": made[:2]}, {"params": made[2:], "weight_decay": 0.0, "lr": 3e-3}]


def parameters(adam: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in adam.param_groups for one in group["params"]]


def give_gradients(adam: torch.optim.Optimizer, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for one in parameters(adam):
        one.grad = torch.randn(one.shape, generator=draw)


def hosted(kind: type[torch.optim.Adam], part: int, fraction: float = 1.0) -> HostAdam:
    adam = kind(groups(), lr=1e-2, weight_decay=0.1)
    masters = parameters(adam)[::2]
    return HostAdam(adam, masters, CPU, fraction, part)


def step(adam: HostAdam, number: int) -> None:
    with adam.taking_gradients():
        give_gradients(adam, number)
    with adam.masters_on_device():
        adam.step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(("part", "fraction"), [(1024, 1.0), (2**24, 1.0), (512, 0.3)])
def test_every_bit_is_that_of_torch(kind, part, fraction):
    plain, host = kind(groups(), lr=1e-2, weight_decay=0.1), hosted(kind, part, fraction)
    places = {id(one): one.data_ptr() for one in parameters(host)}
    for number in range(3):
        give_gradients(plain, number)
        plain.step()
        step(host, number)
        for ours, theirs in zip(parameters(host), parameters(plain), strict=True):
            assert torch.equal(ours, theirs)
            assert all(torch.equal(host.state[ours][n], v) for n, v in plain.state[theirs].items())
    assert {id(one): one.data_ptr() for one in parameters(host)} == places


def test_states_of_one_are_loaded_by_the_other_and_stay_on_the_host():
    plain = torch.optim.AdamW(groups(), lr=1e-2, weight_decay=0.1)
    give_gradients(plain, 0)
    plain.step()
    host = hosted(torch.optim.AdamW, 1000)
    places = [host.state[one]["exp_avg"].data_ptr() for one in parameters(host)]
    host.load_state_dict(plain.state_dict())
    assert [host.state[one]["exp_avg"].data_ptr() for one in parameters(host)] == places
    for ours, theirs in zip(parameters(host), parameters(plain), strict=True):
        assert host.state[ours]["exp_avg_sq"].abs().sum() > 0
        assert all(torch.equal(host.state[ours][n], v) for n, v in plain.state[theirs].items())
    again = torch.optim.AdamW(groups(), lr=1e-2, weight_decay=0.1)
    again.load_state_dict(host.state_dict())
    assert torch.equal(
        again.state[parameters(again)[2]]["exp_avg"], plain.state[parameters(plain)[2]]["exp_avg"]
    )


def test_masters_hold_no_memory_of_the_device_while_they_take_gradients():
    host = hosted(torch.optim.AdamW, 1000)
    before = [one.data_ptr() for one in parameters(host)]
    master = parameters(host)[0]
    with host.taking_gradients():
        assert master.shape == SHAPES[0]
        assert master.untyped_storage().nbytes() == 4
    with host.masters_on_device():
        assert master.data_ptr() != before[0]
        assert parameters(host)[1].data_ptr() == before[1], "a model has views of it"
    assert [one.data_ptr() for one in parameters(host)] == before


def test_a_fraction_takes_the_first_parameters():
    assert [first_part([4, 4, 2], f) for f in (0.1, 0.4, 0.41, 1.0)] == [1, 1, 2, 3]
    assert first_part([], 1.0) == 0
    one, whole = hosted(torch.optim.AdamW, 9, 0.3), hosted(torch.optim.AdamW, 9)
    assert one.host_bytes == 4 * 3 * 2100, "two moments and a master"
    assert whole.host_bytes == 4 * (2 * (2100 + 5 + 4096 + 1) + 2100 + 4096)


def test_tensors_are_cut_into_parts_of_one_size():
    assert list(cut([5, 0, 3, 9, 2], 4)) == [
        [(0, 0, 4)],
        [(0, 4, 5), (2, 0, 3)],
        [(3, 0, 4)],
        [(3, 4, 8)],
        [(3, 8, 9), (4, 0, 2)],
    ]
    assert list(cut([1, 6], 4)) == [[(0, 0, 1), (1, 0, 3)], [(1, 3, 6)]]
    assert list(cut([], 4)) == []


def test_tensors_share_blocks_and_never_overlap():
    sizes = [100, 3000, 0, 64, 900, 1000, 1]
    places, blocks = packed(sizes, 1024)
    assert max(blocks) <= 4096, "a block as large as the largest tensor, a power of two"
    assert len(blocks) == 2
    spans = sorted((*place, size) for place, size in zip(places, sizes, strict=True) if size)
    for (block, start, size), (other, begin, _) in pairwise(spans):
        assert other > block or begin >= start + size
    assert all(start + size <= blocks[block] for block, start, size in spans)
    assert all(start % ALIGNED == 0 for _, start, _ in spans)
