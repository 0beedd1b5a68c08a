"""The wire form of tensors: what SGLang writes is read, anything else is refused."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.engines.tensor_wire import (
    WireError,
    parse_tensors,
    serialize_bucket,
    serialize_tensors,
)

NAMED = [
    ("a", torch.arange(12, dtype=torch.float32).view(3, 4)),
    ("odd", torch.arange(3, dtype=torch.bfloat16)),
    ("b", torch.arange(6, dtype=torch.float64).view(2, 3).t()),
    ("p", torch.nn.Parameter(torch.ones(2))),
]
READER = """
import sys
from slime_core.engines.tensor_wire import parse_tensors
payload, form = sys.stdin.read().split()
for name, tensor in parse_tensors(payload, None if form == "pairs" else form):
    print(name, tensor.dtype, list(tensor.shape), float(tensor.double().sum()))
"""


def pickled(content) -> str:
    return base64.b64encode(pickle.dumps(content)).decode()


@pytest.mark.parametrize(
    ("write", "form"), [(serialize_tensors, "pairs"), (serialize_bucket, "flattened_bucket")]
)
def test_another_process_reads_what_was_written(write, form):
    payload = write(NAMED)
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input=f"{payload} {form}",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    expected = [
        f"{name} {tensor.dtype} {list(tensor.shape)} {float(tensor.detach().double().sum())}"
        for name, tensor in NAMED
    ]
    assert done.stdout.split("\n")[:-1] == expected


@pytest.mark.parametrize(
    ("write", "form"), [(serialize_tensors, None), (serialize_bucket, "flattened_bucket")]
)
def test_round_trip_is_exact(write, form):
    for (name, tensor), (other, back) in zip(NAMED, parse_tensors(write(NAMED), form), strict=True):
        assert name == other and torch.equal(tensor, back) and tensor.dtype == back.dtype


def test_the_sharing_strategy_is_left_alone():
    before = torch.multiprocessing.get_sharing_strategy()
    serialize_tensors(NAMED)
    assert torch.multiprocessing.get_sharing_strategy() == before


def test_a_plain_forking_pickle_is_read():
    """What SGLang's own serializer writes: a list of pairs by the multiprocessing pickler."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        raw = bytes(ForkingPickler.dumps([(name, tensor.detach()) for name, tensor in NAMED]))
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    assert torch.equal(parse_tensors(base64.b64encode(raw).decode())[0][1], NAMED[0][1])


class Call:
    """Pickles into a call of anything."""

    def __init__(self, function, *arguments) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def test_a_payload_cannot_run_code(tmp_path):
    mark = tmp_path / "mark"
    for function, arguments in (
        (os.system, (f"touch {mark}",)),
        (eval, (f"open({str(mark)!r}, 'w')",)),
        (subprocess.Popen, (["touch", str(mark)],)),
        (getattr, (str(mark), "system")),
        (torch.load, (str(mark),)),
        (torch.save, ({}, str(mark))),
    ):
        with pytest.raises(WireError, match="may not name"):
            parse_tensors(pickled([("a", Call(function, *arguments))]))
    assert not mark.exists()


def test_state_and_extensions_are_refused():
    setting = b"\x80\x04ctorch.multiprocessing.reductions\nrebuild_tensor\n}\x8c\x01aK\x01sb."
    with pytest.raises(WireError, match="may not set the state"):
        parse_tensors(base64.b64encode(setting).decode())
    with pytest.raises(WireError, match="extensions"):
        parse_tensors(base64.b64encode(b"\x80\x02\x82\x01.").decode())
    with pytest.raises(WireError, match="persistent"):
        parse_tensors(base64.b64encode(b"Pid\n.").decode())


@pytest.mark.parametrize(
    ("payload", "form", "says"),
    [
        ("not base64!", None, "base64"),
        (None, None, "base64"),
        ("", None, "cannot be read"),
        (base64.b64encode(b"garbage").decode(), None, "cannot be read"),
        (pickled({"a": 1}), None, "list of"),
        (pickled([("a", 1)]), None, "list of"),
        (pickled([1]), "flattened_bucket", "needs flattened_tensor"),
        (pickled([]), "my.loader", "load_format 'my.loader'"),
    ],
)
def test_other_content_is_refused(payload, form, says):
    with pytest.raises(WireError, match=says):
        parse_tensors(payload, form)


def test_a_bucket_that_does_not_fit_is_refused():
    payload = base64.b64decode(serialize_bucket(NAMED))
    broken = payload.replace(b"end_idx", b"end_idy")
    with pytest.raises(WireError, match="does not fit"):
        parse_tensors(base64.b64encode(broken).decode(), "flattened_bucket")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_noise_gives_a_typed_error(noise):
    with contextlib.suppress(WireError):
        parse_tensors(base64.b64encode(noise).decode())
