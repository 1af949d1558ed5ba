"""Key-value caches: finding their tensors, whoever made the cache, and what its formula says it takes.

A cache is known by the name it goes by in a call's arguments and in a model's output. What it is made of is found by
looking: tensors in tuples, lists, mappings and in the attributes of objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memlab.records.inference import CacheUse
from memlab.runtime.modules import CACHE_NAMES
from memlab.techniques.offload.spill import is_spilled

_FULL, _WINDOWED = "full_attention", ("sliding_attention", "chunked_attention")


def caches_in(values: Any) -> list[Any]:
    """Caches in keyword arguments or in a model's output."""
    if isinstance(values, Mapping):
        named = [values[name] for name in CACHE_NAMES if values.get(name) is not None]
        return list({id(each): each for each in named}.values())  # one may go by several names
    if isinstance(values, tuple):
        return [value for value in values if is_cache(value)]
    return []


def is_cache(value: Any) -> bool:
    """Return whether an object is a cache of Transformers, which memlab does not import."""
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in type(value).__mro__)


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor that something is made of; each object is looked at once."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (str, bytes, int, float, type, nn.Module)) or value is None or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from tensors_of(part, seen)


def bytes_of(tensors: Iterable[torch.Tensor], device_type: str) -> int:
    """Bytes of the storages that tensors lie in on a device, each counted once."""
    storages = {}
    for tensor in tensors:
        if tensor.device.type == device_type and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if not is_spilled(storage):
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a model's cache for each token.

    Example:
        >>> CacheShape((None, None), heads=2, head_dim=16).use(0, 4, 96, 0, torch.float32).formula
        '2 × 2 layers × 2 heads × 16 × 4 B × 96 tokens × 4 rows'
    """

    windows: tuple[int | None, ...]  # for each layer the most tokens it keeps; None for all
    heads: int  # key-value heads
    head_dim: int  # elements of a head
    cross_layers: int = 0  # layers that keep the tokens of an encoder as well

    def use(self, size_bytes: int, rows: int, tokens: int, cross_tokens: int, dtype: torch.dtype) -> CacheUse:
        """A measured cache, with what the formula says of it."""
        per_token = 2 * self.heads * self.head_dim * dtype.itemsize * rows
        kept = sum(tokens if window is None else min(tokens, window) for window in self.windows)
        predicted = per_token * (kept + self.cross_layers * cross_tokens)
        words = f"2 × {len(self.windows)} layers × {self.heads} heads × {self.head_dim} × {dtype.itemsize} B"
        counted = (
            f"{tokens} tokens" if any(w is None or w >= tokens for w in self.windows) else "the tokens in a window"
        )
        if self.cross_layers:
            counted = f"({counted} + {cross_tokens} of the encoder)"
        return CacheUse(size_bytes, rows, tokens, predicted, f"{words} × {counted} × {rows} rows")


def shape_of(model: nn.Module) -> CacheShape | None:
    """Return what a model keeps of each token, by its configuration; None when that does not say it, or keeps something else.

    Known limitations:
        Latent attention, linear attention and state-space layers have caches of other forms: they are measured only.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    layers = _number(config, "num_decoder_layers", "decoder_layers", "num_hidden_layers")
    queries = _number(config, "decoder_attention_heads", "num_attention_heads")
    if not layers or not queries or getattr(config, "kv_lora_rank", None):
        return None
    width = _number(config, "hidden_size", "d_model")
    head_dim = _number(config, "head_dim", "d_kv") or (width // queries if width else 0)
    windows = _windows(config, layers - (_number(config, "num_kv_shared_layers") or 0))
    if not head_dim or windows is None:
        return None
    cross_layers = layers if getattr(config, "is_encoder_decoder", False) else 0
    return CacheShape(windows, _number(config, "num_key_value_heads") or queries, head_dim, cross_layers)


def _windows(config: Any, layers: int) -> tuple[int | None, ...] | None:
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [_WINDOWED[0] if size else _FULL] * layers
    if not set(kinds) <= {_FULL, *_WINDOWED}:
        return None
    size = size or getattr(config, "attention_chunk_size", None)
    return tuple(None if kind == _FULL or size is None else size - 1 for kind in kinds[:layers])


def _number(config: Any, *names: str) -> int | None:
    """The first of several settings that is a number."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value), None)
