"""Whether prompts and responses fit into the model's context."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.check.data import Scan, rendered
from slime_core.check.findings import Findings
from slime_core.check.tokenizer import CheckTokenizer
from slime_core.config.tree import RunConfig
from slime_core.data.readers import Row
from slime_core.weights.tables import ModelShape


@dataclass(frozen=True)
class Wanted:
    """The longest response that is asked for, and the field that says so."""

    field: str
    response_tokens: int


def check_lengths(
    config: RunConfig,
    shape: ModelShape,
    scans: list[tuple[Scan, Wanted]],
    tokenizer: CheckTokenizer | None,
    findings: Findings,
) -> None:
    """Compares the longest prompts plus the response with the context."""
    limit, name = _context(config, shape)
    if tokenizer is not None and tokenizer.size > shape.vocab_size:
        findings.problem(
            f"hf_checkpoint {config.rollout.hf_checkpoint}: the tokenizer knows {tokenizer.size} "
            f"tokens, but config.json has vocab_size {shape.vocab_size}: take both from one model"
        )
        return
    too_long: dict[str, tuple[int, str]] = {}  # field -> its longest sequence, and the sentence
    for number, (found, wanted) in enumerate(scans):
        prompt_tokens, row = _longest(found, tokenizer, findings)
        total = prompt_tokens + wanted.response_tokens
        most_tokens = config.rollout.rollout_max_context_len
        total = total if most_tokens is None else min(total, most_tokens)
        if number == 0:
            findings.fact("data", longest_prompt_tokens=prompt_tokens)
            _micro_batch(config, total, findings)
        if total > max(limit, too_long.get(wanted.field, (0, ""))[0]):
            most = limit - prompt_tokens
            fix = f"lower it to at most {most}" if most > 0 else "leave out such prompts"
            prompt = f"{prompt_tokens} tokens ({row.where if row else found.spec})"
            sentence = (
                f"{wanted.field} {wanted.response_tokens} + the longest prompt of {prompt} = "
                f"{total} tokens, but the model's context has {limit} ({name}): {fix}"
            )
            too_long[wanted.field] = (total, sentence)
    for _, sentence in too_long.values():
        findings.problem(sentence)


def _context(config: RunConfig, shape: ModelShape) -> tuple[int, str]:
    served = config.sglang.get("context_length")
    if type(served) is int and served < shape.max_positions:
        return served, "--sglang-context-length"
    return shape.max_positions, "max_position_embeddings"


def _longest(
    found: Scan, tokenizer: CheckTokenizer | None, findings: Findings
) -> tuple[int, Row | None]:
    """Tokens of the longest of the longest rows; 1 where they cannot be counted."""
    longest: tuple[int, Row | None] = (1, None)
    if tokenizer is None:
        return longest
    for row in found.longest:
        made = findings.attempt(lambda r=row: rendered(r, found, tokenizer))
        if made is None:
            return longest
        most = found.settings.rollout_max_prompt_len
        if most is None or len(made[1]) <= most:  # longer prompts are left out
            longest = max(longest, (len(made[1]), row), key=lambda item: item[0])
    return longest


def _micro_batch(config: RunConfig, total: int, findings: Findings) -> None:
    most = config.train.max_tokens_per_gpu
    if most is not None and total > most and config.train.overlong_policy == "error":
        findings.notes.append(
            f"a sequence may reach {total} tokens, more than max_tokens_per_gpu {most}: the first "
            "such one stops the run (overlong_policy error)"
        )
