"""The unit of rollout: one prompt with one response, and everything known about it.

Field names are slime's. Plain Python and numpy only: plug-ins, graders and the store all import
this module, so it must stay light.
"""

from __future__ import annotations

import base64
import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from slime_core.counters import PrefixCacheInfo, SpecInfo, first_of
from slime_core.errors import DataError


class Status(enum.Enum):
    """How far a sample got. ABORTED can be continued; FAILED may hold partial output."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_STATUS_OF_FINISH = {
    "stop": Status.COMPLETED,
    "length": Status.TRUNCATED,
    "abort": Status.ABORTED,
}


@dataclass(frozen=True)
class Span:
    """A stretch of response tokens that came from one source.

    Attributes:
        start: index of the first token within the response.
        length: tokens in it.
        weight_version: version that produced them, "" for tokens no model produced.
        trainable: whether they may enter the loss.
    """

    start: int
    length: int
    weight_version: str = ""
    trainable: bool = True


@dataclass
class Sample:
    """One prompt, its response, reward and bookkeeping.

    The trained sequence is `tokens` = prompt + response; everything "per response token" has
    `response_length` entries. Attributes that are not fields are kept by `to_dict`/`from_dict` and
    by the store.

    Attributes:
        group_index: id of the prompt's group, a counter over the run.
        index: id of the sample, a counter over the run.
        rollout_id: what fan-out siblings share; None stands for a rollout of its own.
        attempt: how often the group was begun before.
        tokens: [prompt + response] ids.
        loss_mask: [response_length], 1 enters the loss.
        rollout_log_probs: [response_length], 0.0 where no model produced the token.
        spans: who produced which response tokens; empty or covering all of them, in order.
        rollout_top_p_token_ids: [sum of kept] vocabulary ids kept by top-p.
        rollout_top_p_token_offsets: [response_length + 1] offsets into them.
        rollout_routed_experts: int32 [len(tokens) - 1, layers, topk].
        teacher_log_probs: [response_length].
        remove_sample: zeroes the mask; the reward still counts in the group's normalisation.
    """

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    attempt: int = 0
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: Any = None
    teacher_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    Status: ClassVar[type[Status]] = Status
    SpecInfo: ClassVar[type[SpecInfo]] = SpecInfo
    PrefixCacheInfo: ClassVar[type[PrefixCacheInfo]] = PrefixCacheInfo

    def to_dict(self) -> dict[str, Any]:
        """A shallow dict of all attributes; status by value, nested records as dicts."""
        data = dict(self.__dict__)
        data["status"] = self.status.value
        data["spans"] = [asdict(span) for span in self.spans]
        data["spec_info"] = self.spec_info.to_dict()
        data["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`; unknown keys come back as attributes."""
        known = {name: value for name, value in data.items() if name in FIELD_NAMES}
        if "status" in known:
            known["status"] = Status(known["status"])
        if "spans" in known:
            known["spans"] = [Span(**span) for span in known["spans"]]
        if "spec_info" in known:
            known["spec_info"] = SpecInfo.from_dict(known["spec_info"])
        if "prefix_cache_info" in known:
            known["prefix_cache_info"] = PrefixCacheInfo.from_dict(known["prefix_cache_info"])
        sample = cls(**known)
        for name, value in data.items():
            if name not in FIELD_NAMES:
                sample.__dict__[name] = value
        return sample

    def get_reward_value(self, args: Any) -> float:
        """The reward, or its entry `args.reward_key` where that is set.

        Raises:
            DataError: a key is configured that this reward does not have, or the reverse.
        """
        key = getattr(args, "reward_key", None)
        if isinstance(self.reward, dict):
            if not key:
                raise DataError(f"{self.describe()} has a reward of many values: set --reward-key")
            if key not in self.reward:
                raise DataError(
                    f"{self.describe()} has no reward {key!r}, only {list(self.reward)}"
                )
            return self.reward[key]
        if key:
            raise DataError(f"--reward-key {key} is set, but {self.describe()} has {self.reward!r}")
        return self.reward  # type: ignore[return-value]

    @property
    def effective_response_length(self) -> int:
        """Response tokens that enter the loss."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def prompt_length(self) -> int:
        """Tokens before the response."""
        return len(self.tokens) - self.response_length

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
        weight_version: str | None = None,
    ) -> None:
        """Adds response tokens; the only way a response should grow.

        Args:
            args: settings with num_layers and moe_router_topk (routed experts) and rollout_top_p.
            tokens: [n] ids.
            log_probs: [n], required for trainable tokens, None for others (tool output).
            trainable: whether a model produced them and the loss may use them.
            meta_info: the engine's `meta_info` for the request.
            text: what they decode to, appended to `response`.
            update_terminal_info: take status, versions and counters from `meta_info` if it says
                that the request has finished.
            weight_version: the span's version where it is not `meta_info["weight_version"]`.

        Raises:
            DataError: lengths that do not match; the sample is then unchanged.
        """
        count = len(tokens)
        self._check_append(count, log_probs, trainable)
        meta_info = meta_info or {}
        before = dict(self.__dict__)
        try:
            self._backfill()
            self.tokens = [*self.tokens, *tokens]
            self.loss_mask = [*(self.loss_mask or []), *[int(trainable)] * count]
            known = log_probs if log_probs is not None else [0.0] * count
            self.rollout_log_probs = [*(self.rollout_log_probs or []), *known]
            version = weight_version or str(meta_info.get("weight_version") or "")
            self.spans = _joined(
                self.spans,
                Span(self.response_length, count, version if trainable else "", trainable),
            )
            self.response_length += count
            self.response += text or ""
            self._append_nucleus(args, count, trainable, meta_info)
            if meta_info.get("routed_experts") is not None:
                self._set_routed_experts(args, meta_info)
            self.check_lengths()
            if update_terminal_info and meta_info.get("finish_reason"):
                self._finish(meta_info)
        except DataError:
            self.__dict__ = before
            raise

    def check_lengths(self) -> None:
        """Raises DataError where a per-token field does not have one entry a response token."""
        if self.response_length > len(self.tokens):
            raise DataError(
                f"{self.describe()}: response_length {self.response_length} exceeds "
                f"the {len(self.tokens)} tokens"
            )
        expected = {
            "loss_mask": self.response_length,
            "rollout_log_probs": self.response_length,
            "teacher_log_probs": self.response_length,
            "rollout_top_p_token_offsets": self.response_length + 1,
        }
        for name, length in expected.items():
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise DataError(f"{self.describe()}: {name} has {len(value)} entries, not {length}")
        covered = sum(span.length for span in self.spans)
        if self.spans and covered != self.response_length:
            raise DataError(
                f"{self.describe()}: spans cover {covered} of {self.response_length} tokens"
            )

    def describe(self) -> str:
        """What messages call it."""
        return f"sample {self.index} of group {self.group_index}"

    def _check_append(self, count: int, log_probs: Sequence[float] | None, trainable: bool) -> None:
        if not trainable:
            if log_probs is not None:
                raise DataError(f"{self.describe()}: tokens that are not trained take no log_probs")
            return
        if log_probs is None:
            raise DataError(f"{self.describe()}: trainable tokens need log_probs")
        if len(log_probs) != count:
            raise DataError(f"{self.describe()}: {len(log_probs)} log_probs for {count} tokens")
        trained_before = self.loss_mask is None or any(self.loss_mask)
        if self.response_length and self.rollout_log_probs is None and trained_before:
            raise DataError(
                f"{self.describe()}: its first {self.response_length} response tokens have no "
                "log_probs, so trainable ones cannot follow"
            )

    def _backfill(self) -> None:
        """Gives tokens that were set without this method their mask, log-probs and spans."""
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        if not self.spans and self.response_length:
            version = self.weight_versions[-1] if self.weight_versions else ""
            spans: list[Span] = []
            for start, mask in enumerate(self.loss_mask):
                spans = _joined(spans, Span(start, 1, version if mask else "", bool(mask)))
            self.spans = spans

    def _append_nucleus(
        self, args: Any, count: int, trainable: bool, meta_info: dict[str, Any]
    ) -> None:
        ids = first_of(meta_info, "top_p_token_ids", "top_p_kept_token_ids")
        offsets = first_of(meta_info, "top_p_token_offsets", "top_p_kept_token_offsets")
        replayed = float(getattr(args, "rollout_top_p", 1.0) or 1.0) != 1.0
        if ids is None and not replayed and self.rollout_top_p_token_offsets is None:
            return
        if ids is None or not trainable:
            if trainable:
                raise DataError(f"{self.describe()}: top-p replay needs the kept ids of the engine")
            ids, offsets = [], [0] * (count + 1)
        if offsets is None or len(offsets) != count + 1:
            raise DataError(
                f"{self.describe()}: {0 if offsets is None else len(offsets)} top-p offsets "
                f"for {count} tokens"
            )
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(ids):
            raise DataError(
                f"{self.describe()}: top-p offsets run from {offsets[0]} to {offsets[-1]}, "
                f"not from 0 to {len(ids)}"
            )
        old_count = self.response_length - count
        old_offsets = self.rollout_top_p_token_offsets or [0] * (old_count + 1)
        old_ids = self.rollout_top_p_token_ids or []
        self.rollout_top_p_token_ids = [*old_ids, *map(int, ids)]
        self.rollout_top_p_token_offsets = [
            *old_offsets,
            *(old_offsets[-1] + int(offset) for offset in offsets[1:]),
        ]

    def _set_routed_experts(self, args: Any, meta_info: dict[str, Any]) -> None:
        flat = int32_array(meta_info["routed_experts"])
        start = int(meta_info.get("routed_experts_start_len") or 0)
        old = (
            None
            if self.rollout_routed_experts is None
            else np.asarray(self.rollout_routed_experts, dtype=np.int32)
        )
        layers = getattr(args, "num_layers", None) or (old.shape[1] if old is not None else None)
        topk = getattr(args, "moe_router_topk", None) or (old.shape[2] if old is not None else None)
        if not layers or not topk:
            raise DataError(
                f"{self.describe()}: routed experts need num_layers and moe_router_topk"
            )
        rows = len(self.tokens) - 1 - start
        if flat.size != rows * layers * topk:
            raise DataError(
                f"{self.describe()}: {flat.size} routed experts are not "
                f"{rows} rows x {layers} layers x top {topk}"
            )
        new = flat.reshape(rows, layers, topk)
        if start and (old is None or old.shape[0] < start):
            raise DataError(f"{self.describe()}: routed experts begin at {start}, but none precede")
        self.rollout_routed_experts = (
            np.concatenate([old[:start], new]) if start and old is not None else new
        )

    def _finish(self, meta_info: dict[str, Any]) -> None:
        reason = meta_info["finish_reason"]
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind not in _STATUS_OF_FINISH:
            raise DataError(f"{self.describe()}: unknown finish reason {reason!r}")
        self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if meta_info.get("weight_version") is not None:
            self.weight_versions = [*self.weight_versions, str(meta_info["weight_version"])]
        self.status = _STATUS_OF_FINISH[kind]


FIELD_NAMES = frozenset(item.name for item in fields(Sample))


def _joined(spans: list[Span], new: Span) -> list[Span]:
    """Adds a span, as part of the last one where source and version are the same."""
    if not new.length:
        return spans
    if spans:
        last = spans[-1]
        if (last.weight_version, last.trainable) == (new.weight_version, new.trainable):
            longer = Span(last.start, last.length + new.length, last.weight_version, last.trainable)
            return [*spans[:-1], longer]
    return [*spans, new]


def int32_array(value: Any) -> np.ndarray:
    """Flat int32 from base64 text, raw bytes, a numpy array, a CPU tensor or nested lists."""
    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, dtype=np.int32).copy()
    return np.array(value, dtype=np.int32).reshape(-1)
