"""The transformers model behind the engine: loading, prefill and decode."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_core.engines.embedded.kv import DecodeCache, KVPool, LayerKV
from slime_core.engines.embedded.routed import RouteTap
from slime_core.engines.embedded.steady import steady
from slime_core.errors import EngineError

log = logging.getLogger(__name__)
Prefilled = tuple[torch.Tensor, list[LayerKV]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SERVED_LAYERS = {"full_attention", "sliding_attention"}
PROBE_TOKENS = 8
ALIGNMENT_BYTES = 64


class ServedModel:
    """A causal language model with its head apart from its body.

    Attributes:
        module: the transformers model.
        config: its config.json as a dict.
        vocab_size: rows of the output head; token ids are below it.
        max_context: tokens that the model (or its attention window) can hold.
    """

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        dtype: str = "auto",
        deterministic: bool = False,
        routes: bool = False,
    ) -> None:
        """Loads the model and checks that its logits are those of its output head.

        Args:
            deterministic: a row's results do not depend on the rows computed with it.
            routes: what routers choose is kept for `routed`.

        Raises:
            EngineError: no such folder, a file is missing or damaged, weights are missing, or
                an architecture that the engine cannot serve.
        """
        self.config = read_config(path)
        self.device = torch.device(device)
        self.module = load_module(path, self.config, dtype).to(self.device)
        _align(self.module)
        if deterministic:
            steady(self.module)
        layers = int(self.config.get("num_hidden_layers") or 0)
        self._tap = RouteTap(self.module, layers) if routes else None
        self.vocab_size = int(self.module.get_output_embeddings().weight.shape[0])
        self.max_context = _max_context(self.module.config)
        self.body = self.module.base_model
        parameters = inspect.signature(self.body.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._check_head()

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    def prefill(self, prompts: Sequence[list[int]], width: int) -> Prefilled:
        """Runs whole prompts, padded on the right.

        Args:
            prompts: token ids, each at most `width` long.
            width: padded length.

        Returns:
            Hidden states [prompts, width, hidden] (only a prompt's own positions mean anything),
            and per layer keys and values [prompts, kv heads, width, head dim].
        """
        from transformers.cache_utils import DynamicCache

        tokens = torch.zeros((len(prompts), width), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        cache = DynamicCache()
        hidden = self._run(tokens.to(self.device), cache)
        layers: list[Any] = list(cache.layers)
        return hidden, [(layer.keys, layer.values) for layer in layers]

    def decode(self, pool: KVPool, width: int) -> torch.Tensor:
        """Feeds each row its newest token.

        Args:
            pool: the rows; positions 0 to length - 2 of each are computed.
            width: positions that attention reads, at least the longest row's length.

        Returns:
            Hidden states [pool.rows, hidden]; rows behind len(pool.requests) mean nothing.
        """
        spare = pool.rows - len(pool.requests)
        fed = [request.newest for request in pool.requests] + [0] * spare
        columns = [request.length - 1 for request in pool.requests] + [0] * spare
        at = torch.tensor(columns, device=self.device)
        visible = torch.arange(width, device=self.device)[None, :] <= at[:, None]
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(~visible, float("-inf"))
        hidden = self._run(
            torch.tensor(fed, device=self.device)[:, None],
            DecodeCache(pool.layers, at, width),
            attention_mask=mask[:, None, None, :],
            position_ids=at[:, None],
        )
        return hidden[:, -1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [..., vocab] of hidden states [..., hidden]."""
        return self.module.get_output_embeddings()(hidden).float()

    def routed(self, rows: int, width: int) -> np.ndarray | None:
        """int32 [rows, width, layers, k]: the experts of the last pass, if they are kept.

        Args:
            rows, width: of that pass (width 1 in a decode).
        """
        return None if self._tap is None else self._tap.last(rows, width)

    def _run(self, tokens: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
        options[self._cache_name] = cache
        output = self.body(input_ids=tokens, use_cache=True, return_dict=True, **options)
        return output.last_hidden_state

    def _check_head(self) -> None:
        """Some architectures scale or cap their logits behind the head; they are refused."""
        tokens = torch.arange(PROBE_TOKENS, device=self.device)[None] % self.vocab_size
        with torch.inference_mode():
            whole = self.module(input_ids=tokens).logits.float()
            parts = self.logits(self.body(input_ids=tokens).last_hidden_state)
        if not torch.allclose(whole, parts, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise EngineError(
                f"{type(self.module).__name__} changes its logits after the output head, which "
                f"the embedded engine does not reproduce; serve it with SGLang"
            )


def read_config(path: str) -> dict[str, Any]:
    """Reads config.json of a model folder."""
    file = Path(path) / "config.json"
    try:
        return json.loads(file.read_text())
    except FileNotFoundError as error:
        raise EngineError(
            f"{file} does not exist; --model-path must be a folder with a Hugging Face model"
        ) from error
    except (OSError, ValueError) as error:
        raise EngineError(f"{file} cannot be read: {error}") from error


def load_module(path: str, config: dict[str, Any], dtype: str) -> Any:
    """Loads the class that config.json names, without the detour over the auto classes.

    Raises:
        EngineError: weights are missing, damaged or of other shapes than config.json says.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        module, info = _model_class(config).from_pretrained(
            path,
            dtype=DTYPES.get(dtype, "auto"),
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise EngineError(f"the model in {path} cannot be loaded: {error}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise EngineError(f"{path} lacks {len(missing)} weights, first {missing[0]}")
    if info["unexpected_keys"]:
        log.warning("%s: weights not used: %s", path, sorted(info["unexpected_keys"])[:5])
    return module.eval().requires_grad_(False)


def _align(module: torch.nn.Module) -> None:
    """Moves weights that lie in a mapped file to memory of their own.

    Matrix products round differently at other memory alignments, and in a file the alignment
    depends on the length of its header: two files with equal weights would give unequal bits.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()


def _model_class(config: dict[str, Any]) -> Any:
    family = str(config.get("model_type", ""))
    architecture = (config.get("architectures") or [""])[0]
    name = f"transformers.models.{family}.modeling_{family}"
    if family.isidentifier() and architecture.isidentifier():
        try:
            return getattr(importlib.import_module(name), architecture)
        except (ModuleNotFoundError, AttributeError):
            log.info("no class %s in %s, asking the auto class", architecture, name)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _max_context(config: Any) -> int:
    """The model's limit; with sliding layers their window, inside which they attend to all."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - SERVED_LAYERS:
        raise EngineError(
            f"the embedded engine serves attention layers only, this model has "
            f"{', '.join(sorted(kinds - SERVED_LAYERS))}; serve it with SGLang"
        )
    limit = int(getattr(config, "max_position_embeddings", 0) or 2048)
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in kinds or (window is not None and not kinds)
    if sliding and window:
        log.info("sliding attention: the context is limited to the window of %d tokens", window)
        limit = min(limit, int(window))
    return limit
