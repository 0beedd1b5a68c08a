"""Threads for copies of states: many beside a GPU, and the trainer's own again afterwards."""

import os

import pytest
import torch

from slime_core.megatron import host_memory


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(host_memory.dist, "get_world_size", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_copies_beside_a_gpu_have_eight_threads_and_the_rest_its_own():
    with host_memory.copy_threads(on_gpu=True):
        assert torch.get_num_threads() == 8
    assert torch.get_num_threads() == 1


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr(host_memory.dist, "get_world_size", lambda: 8)
    with host_memory.copy_threads(on_gpu=True):
        assert torch.get_num_threads() == 4
    monkeypatch.setattr(host_memory.dist, "get_world_size", lambda: 64)
    with host_memory.copy_threads(on_gpu=True):
        assert torch.get_num_threads() == 1


def test_a_cpu_keeps_its_threads_and_an_error_gives_them_back():
    with host_memory.copy_threads(on_gpu=False):
        assert torch.get_num_threads() == 1
    with pytest.raises(OSError, match="full"), host_memory.copy_threads(on_gpu=True):
        raise OSError("full")
    assert torch.get_num_threads() == 1
