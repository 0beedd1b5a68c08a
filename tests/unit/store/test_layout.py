import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.store import layout

NUMBER = st.integers(0, 10**8)


def test_keys_are_those_of_the_design():
    checksum = "0" * 31 + "f"
    assert layout.part(12, 3, 4, checksum) == f"groups/000012/000003-000004-{checksum}.arrow"
    assert layout.seal(12) == "groups/000012/seal.json"
    assert layout.draws(0) == "draws/000000.arrow"
    assert layout.ledger(1) == "iterations/000001/ledger.json"
    assert layout.manifest(10, 2) == "checkpoints/000010-000002/manifest.json"
    assert layout.evaluation("a-10", "math") == "evals/a-10/math.json"
    assert layout.scores("abc", 3) == "scores/abc/000003.arrow"
    assert layout.quarantine("groups/x") == "quarantine/groups/x"


@settings(deadline=None)
@given(NUMBER, NUMBER, NUMBER)
def test_names_can_be_read_back(a, b, c):
    checksum = f"{c:032x}"
    name = layout.parse_part(layout.part(a, b, c, checksum))
    assert name == layout.PartName(a, b, c, checksum) and name.key == layout.part(a, b, c, checksum)
    assert layout.parse_draws(layout.draws(a)) == a
    assert layout.parse_seal(layout.seal(a)) == a
    assert layout.parse_manifest(layout.manifest(a, b)) == (a, b)
    assert layout.parse_epoch(layout.epoch(a)) == (a, "owner")
    assert layout.parse_epoch(layout.alive(a, b)) == (a, "alive")
    assert layout.parse_epoch(layout.ended(a)) == (a, "ended")
    for kind in ("batch", "ledger", "sync"):
        assert layout.parse_iteration(getattr(layout, kind)(a)) == (a, kind)


@pytest.mark.parametrize(
    "key", ["epochs/probe-1", "groups/000001/seal.json.bak", "draws/x.arrow", "run.json", ""]
)
def test_other_keys_are_left_alone(key):
    for parse in (
        layout.parse_part, layout.parse_draws, layout.parse_seal, layout.parse_epoch,
        layout.parse_iteration, layout.parse_manifest,
    ):  # fmt: skip
        assert parse(key) is None


def test_names_sort_like_numbers():
    assert sorted(layout.draws(n) for n in (10, 9, 100)) == [layout.draws(n) for n in (9, 10, 100)]
    with pytest.raises(ValueError, match="-1"):
        layout.draws(-1)


def test_layout_and_sample_need_no_torch():
    code = (
        "import slime_core.sample, slime_core.store.layout, sys; "
        "sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
