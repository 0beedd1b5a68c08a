"""The device layer: lets Megatron, which addresses CUDA by name, run on a machine without a GPU.

`install("cpu")` redirects torch's device layer (never Megatron's own functions) so that "cuda"
means the CPU: tensor factories and `.to()` land on the CPU, streams and events become empty
shells, memory statistics read zero. It changes torch for the whole process, so it belongs only in
trainer processes, and it must run before the first import of megatron, which copies names out of
torch.cuda at import.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from slime_core.errors import ConfigError, TrainerError

CPU = torch.device("cpu")
_MARK = "_slime_flow_cpu_layer"

# Megatron says these about its own defaults; a reader of the logs can do nothing about them.
_EXPECTED_WARNINGS = (
    ".*(Transformer Engine|Apex).* not installed",
    "full scope is deprecated",
    "When using async grad allreduce",
    "The .grad attribute of a Tensor that is not a leaf",
)
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
    "zeros_like",
)
_NEW_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_SILENT = ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
_ZERO = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
)


def install(device: str) -> None:
    """Prepares this process for training on `device` ("cpu" or "cuda"). May be called again.

    Raises:
        ConfigError: another device name, or CUDA asked for where there is none.
        TrainerError: megatron was imported before the CPU layer could be installed.
    """
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|megatron)\.")
    if device == "cuda":
        if is_installed():
            raise TrainerError("the CPU device layer is installed; CUDA needs a fresh process")
        if not torch.cuda.is_available():
            raise ConfigError("device is 'cuda', but torch finds no CUDA GPU here; use 'cpu'")
        return
    if device != "cpu":
        raise ConfigError(f"device must be 'cpu' or 'cuda', not {device!r}")
    if is_installed():
        return
    if "megatron.core" in sys.modules:
        raise TrainerError(
            "megatron was imported before the CPU device layer; call device.install first"
        )
    # torch.compile would cost seconds for kernels that these sizes never earn back.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    torch.compile = _no_compile  # type: ignore[assignment]
    _redirect_tensors()
    _redirect_cuda()
    _redirect_distributed()
    setattr(torch.cuda, _MARK, True)


def is_installed() -> bool:
    """True where the CPU layer has been installed."""
    return getattr(torch.cuda, _MARK, False)


class Event:
    """torch.cuda.Event for work that is done when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at_s = time.perf_counter()

    def record(self, *_: Any) -> None:
        self._at_s = time.perf_counter()

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, as torch.cuda.Event reports them."""
        return (other._at_s - self._at_s) * 1e3


class Stream:
    """torch.cuda.Stream for work that is done when the call returns."""

    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class _Generators:
    """torch.cuda.default_generators: one device, whose generator is the CPU's."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


def _no_compile(model: Any = None, **_: Any) -> Any:
    return model if model is not None else (lambda function: function)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return CPU
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return value


def _returning(value: Any) -> Callable[..., Any]:
    # One function object per name: torch's tracer refuses two names for one object.
    return lambda *_, **__: value


@contextlib.contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _redirect_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    """For functions that take device= and pin_memory=."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return redirected


def _redirect_to(function: Callable[..., Any]) -> Callable[..., Any]:
    """For Tensor.to and Module.to, which also take the device by position."""

    @functools.wraps(function)
    def redirected(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(
            self, *map(_on_cpu, args), **{key: _on_cpu(value) for key, value in kwargs.items()}
        )

    return redirected


def _redirect_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type() reports CUDA type names: the distributed optimizer compares strings."""

    @functools.wraps(function)
    def redirected(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return function(self).replace("torch.", "torch.cuda.")
        plain = [arg.replace("cuda.", "") if isinstance(arg, str) else arg for arg in args]
        return function(self, *plain, **kwargs)

    return redirected


def _redirect_tensors() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _redirect_keywords(getattr(torch, name)))
    tensor: Any = torch.Tensor
    for name in _NEW_METHODS:
        setattr(tensor, name, _redirect_keywords(getattr(tensor, name)))
    tensor.to = _redirect_to(tensor.to)
    tensor.type = _redirect_type(tensor.type)
    tensor.cuda = lambda self, *_, **__: self
    tensor.pin_memory = lambda self, *_, **__: self
    tensor.record_stream = lambda self, stream: None
    module: Any = torch.nn.Module
    module.to = _redirect_to(module.to)
    module.cuda = lambda self, *_, **__: self


def _redirect_cuda() -> None:
    cuda: Any = torch.cuda
    stream = Stream()
    for name in _SILENT:
        setattr(cuda, name, _returning(None))
    for name in _ZERO:
        setattr(cuda, name, _returning(0))
    cuda.is_available = _returning(False)
    cuda.current_device = _returning(CPU)
    cuda.memory_stats = _returning({})
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream, cuda.default_stream = _returning(stream), _returning(stream)
    cuda.stream = cuda.device = _nothing
    cuda.get_rng_state = lambda *_, **__: torch.random.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.random.set_rng_state(state)
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.random.set_rng_state = cuda.set_rng_state
    cuda.manual_seed = lambda seed: _seed_cpu(seed)
    cuda.manual_seed_all = lambda seed: _seed_cpu(seed)
    cuda.default_generators = _Generators()
    cuda._lazy_call = lambda function, **_: function()
    properties = SimpleNamespace(
        major=0, minor=0, name="cpu", multi_processor_count=1, total_memory=0
    )
    cuda.get_device_properties = _returning(properties)
    cuda.get_device_capability = _returning((0, 0))
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _returning(None), _returning(None)


def _seed_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _ints(sizes: Any) -> list[int] | None:
    if sizes is None:
        return None
    return [int(size) for size in (sizes.tolist() if hasattr(sizes, "tolist") else sizes)]


def _redirect_distributed() -> None:
    """Two calls that gloo takes only in its own form."""
    distributed: Any = torch.distributed
    barrier, all_to_all = distributed.barrier, distributed.all_to_all_single

    @functools.wraps(barrier)
    def barrier_without_devices(
        group: Any = None, async_op: bool = False, device_ids: Any = None
    ) -> Any:
        return barrier(group=group, async_op=async_op)

    # Megatron hands split sizes over as tensors unless the data lies on a GPU.
    @functools.wraps(all_to_all)
    def all_to_all_with_ints(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return all_to_all(
            output,
            input,
            _ints(output_split_sizes),
            _ints(input_split_sizes),
            group=group,
            async_op=async_op,
        )

    distributed.barrier = barrier_without_devices
    distributed.all_to_all_single = all_to_all_with_ints
