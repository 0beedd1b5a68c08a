"""What is said about options that launch scripts carry and that change nothing here."""

from slime_core.check.findings import Findings
from slime_core.check.options import check_megatron
from tests.unit.config.trees import small


def notes(**overrides) -> list[str]:
    findings = Findings()
    assert check_megatron(small(**overrides), "cpu", None, findings)
    return findings.notes


def test_a_seq_length_below_what_the_run_makes_is_a_note():
    short = notes(megatron={"seq_length": 7}, rollout_max_response_len=8)
    assert short == [
        "--seq-length 7 is shorter than the 8 tokens that a sequence may have; it bounds nothing "
        "here, sequences are packed"
    ]
    assert notes(megatron={"seq_length": 8}, rollout_max_response_len=8) == []
    assert notes(megatron={"seq_length": 8}, rollout_max_context_len=9)
