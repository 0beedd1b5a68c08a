"""A stand-in: SGLang and transformers name torchvision at import and never call it for text.

Every submodule exists, every name in it is a class, and calling any of them raises.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

__version__ = "0.0.0"
_PREFIX = f"{__name__}."


class _Absent(type):
    """The class of all stand-in classes: attributes are their own names, calls raise."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def __call__(cls, *_args, **_kwargs):
        raise RuntimeError("torchvision is not installed here")


class _Module(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Absent(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(_PREFIX):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.append(_Finder())

from torchvision import io, ops, transforms  # noqa: E402, F401
