"""Counters that an engine reports with each finished request, summed over a sample."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


def first_of(meta_info: dict[str, Any], *names: str) -> Any:
    """The first of these entries that is there and not None."""
    return next((meta_info[name] for name in names if meta_info.get(name) is not None), None)


def count_of(meta_info: dict[str, Any], *names: str) -> int:
    """The same as an integer, 0 where none is there."""
    return int(first_of(meta_info, *names) or 0)


@dataclass
class SpecInfo:
    """Counters of speculative decoding, summed over the requests of a sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted draft tokens by proposed ones; 0 where nothing was proposed."""
        drafted = self.spec_draft_token_num
        return self.spec_accept_token_num / drafted if drafted else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens completed by one verification pass; 0 where there was none."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: dict[str, Any]) -> None:
        """Adds the counters of one finished request (both of SGLang's spellings are known)."""
        self.spec_accept_token_num += count_of(
            meta_info, "spec_accept_token_num", "spec_num_correct_drafts", "spec_accepted_drafts"
        )
        self.spec_draft_token_num += count_of(
            meta_info, "spec_draft_token_num", "spec_num_proposed_drafts", "spec_proposed_drafts"
        )
        self.spec_verify_ct += count_of(meta_info, "spec_verify_ct")
        self.completion_token_num += count_of(
            meta_info, "completion_tokens", "completion_token_num"
        )

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, int]) -> SpecInfo:
        return cls(**data)


@dataclass
class PrefixCacheInfo:
    """How much of the prompts the engine found in its prefix cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        total = self.total_prompt_tokens
        return self.cached_tokens / total if total else 0.0

    def add(self, meta_info: dict[str, Any]) -> None:
        """Adds the counters of one finished request."""
        self.cached_tokens += count_of(meta_info, "cached_tokens")
        self.total_prompt_tokens += count_of(meta_info, "prompt_tokens")

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, int]) -> PrefixCacheInfo:
        return cls(**data)
