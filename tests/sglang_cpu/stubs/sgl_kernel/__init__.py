"""A stand-in for SGLang's compiled kernels, which a CPU without AMX never calls for this model."""

import torch

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_ABSENT = "sgl_kernel is not installed here"


def copy_all_layer_kv_cache_cpu(*_args, **_kwargs):
    raise RuntimeError(_ABSENT)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args, **_kwargs):
        raise RuntimeError(f"{name}: {_ABSENT}")

    return absent
