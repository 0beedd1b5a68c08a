"""What sglang.utils imports; nothing calls it."""


def _absent(*_args, **_kwargs):
    raise RuntimeError("IPython is not installed here")


HTML = display = clear_output = _absent
