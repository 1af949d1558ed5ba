"""`memlab.build`: a model made on its device in its target format, without a full-precision copy on the host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab.building import pretrained
from memlab.building.files import listed, load_weights
from memlab.building.gradual import built_gradually
from memlab.building.target import BuildTarget
from memlab.errors import BuildError

__all__ = ["build"]

_FACTORIES = (
    "a callable without arguments, a Transformers configuration, (model class, configuration), "
    "a folder written by save_pretrained, or (model class, folder)"
)


def build(
    factory: Any,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    weights: str | os.PathLike[str] | None = None,
    strict: bool = True,
) -> nn.Module:
    """Make a model on its device in its target format, one tensor at a time.

    Use it instead of `factory().to(device, dtype)`, which holds the whole model on the host in full precision. This function
    holds at most 32 MiB or the two newest tensors there, and the buffers.

    *Fresh weights* are the ones of `factory().to(device, dtype)` under the same seed, bit for bit and on every device: they are
    drawn on the CPU in full precision, then rounded and moved. There are two differences. Tensors that the factory makes with a
    dtype of their own (`dtype=torch.float32`, `.float()`: rotary frequencies, a router in fp32) keep it; `.to` would
    cast them. And where a factory computes on weights again after 32 MiB of others were made (`weight.mul_(0.5)` in a
    second round), they are rounded once more. The CPU's random state advances as it would; no device's is used.

    *Weights from files* are read in pieces and cast on the way. For Transformers that is its own `from_pretrained`, so the
    model comes in eval mode and formats are what Transformers decides. Buffers that are not in files are computed.

    Default dtype and default device are afterwards what they were; if it raises, so is the CPU's random state.

    Args:
        factory: a callable without arguments (a class, a function) that returns a module; a Transformers configuration; a tuple of
            a Transformers class and a configuration; a folder that `save_pretrained` wrote; or a tuple of class and folder.
        device: device of the finished model.
        dtype: `torch.float32`, `torch.bfloat16`, `torch.float16`, `torch.float64`, or fp32, bf16, fp16, fp64. Without it, the
            factory's, the configuration's or the folder's own.
        weights: for a callable, a safetensors file, an index of shards, or a folder of either, with the names of
            `state_dict()`; a tied tensor may stand there under any of its names.
        strict: whether weights that are missing in files, or that the model does not have, are an error.

    Returns:
        The model.

    Raises:
        BuildError: a factory, device, dtype or weights that cannot be used; the message says what is allowed.
        MissingExtraError: transformers, accelerate (from a folder to a GPU) or safetensors is needed and not installed.

    Known limitations:
        A dtype that is copied from another tensor (`dtype=weight.dtype`) counts as one of the factory's own. Weights are loaded by name, without a module's own `_load_from_state_dict`. Scripted modules are not watched
        while they are made.

    Example:
        >>> import memlab
        >>> model = memlab.build(lambda: nn.Linear(8, 2), dtype="bf16")
        >>> model.weight.dtype
        torch.bfloat16
    """
    target = BuildTarget.parse(device, dtype)
    with _surroundings_kept():
        return _made(factory, target, None if weights is None else Path(weights), strict)


def _made(factory: Any, target: BuildTarget, weights: Path | None, strict: bool) -> nn.Module:
    model_class, source = _class_and_source(factory)
    if model_class is None and callable(source):
        return _from_callable(source, target, weights, strict)
    if weights is not None:
        raise BuildError(
            f"weights={str(weights)!r} go with a callable; for Transformers, give their folder as the factory"
        )
    if pretrained.is_config(source):
        return _from_config(model_class or pretrained.class_for(source), source, target)
    folder = Path(source)
    with _random_state_kept(strict):
        return pretrained.from_folder(model_class, folder, target, strict=strict)


def _class_and_source(factory: Any) -> tuple[Any, Any]:
    """Take a factory apart into a class of Transformers, if one is given, and what it is made from."""
    if isinstance(factory, nn.Module):
        raise BuildError(f"{type(factory).__name__} is built already: give what makes it, {_FACTORIES}")
    if pretrained.is_model_class(factory):
        raise BuildError(f"{factory.__name__} is not enough: give ({factory.__name__}, configuration or folder)")
    model_class, source = factory if isinstance(factory, tuple) and len(factory) == 2 else (None, factory)
    is_source = isinstance(source, (str, os.PathLike)) or pretrained.is_config(source)
    if is_source and (model_class is None or pretrained.is_model_class(model_class)):
        return model_class, source
    if model_class is None and callable(source):
        return None, source
    raise BuildError(f"factory {factory!r}: expected {_FACTORIES}")


def _from_config(model_class: Any, config: Any, target: BuildTarget) -> nn.Module:
    dtype = target.dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
    make = partial(pretrained.from_config, model_class, config)
    model = _from_callable(make, BuildTarget(target.device, dtype), None, True)
    pretrained.note_dtype(model, dtype)
    return model


def _from_callable(factory: Callable[[], Any], target: BuildTarget, weights: Path | None, strict: bool) -> nn.Module:
    draw = weights is None or not strict  # what is overwritten anyway need not be drawn
    model: nn.Module
    with _random_state_kept(not draw):
        model, gradual = built_gradually(factory, target.device, target.dtype or torch.get_default_dtype(), draw=draw)
        _check(model, factory)
        gradual.finish(model)
        if weights is not None:
            load_weights(model, weights, strict=strict)
    return model


def _check(model: Any, factory: Callable[[], Any]) -> None:
    if not isinstance(model, nn.Module):
        raise BuildError(f"factory {factory!r} returned {type(model).__name__}, not a torch.nn.Module")
    named = [*model.named_parameters(), *model.named_buffers()]
    nowhere = [name for name, tensor in named if tensor.is_meta]
    if nowhere:
        raise BuildError(
            f"the factory left tensors without values on the meta device: {listed(nowhere)}; make them there"
        )


@contextmanager
def _surroundings_kept() -> Iterator[None]:
    """The user's default dtype and device come back; the factory itself works on the CPU."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        with _random_state_kept(False), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)


@contextmanager
def _random_state_kept(always: bool) -> Iterator[None]:
    """Put the CPU's random state back: when something raises, or always."""
    before = torch.get_rng_state()
    try:
        yield
    except BaseException:
        torch.set_rng_state(before)
        raise
    if always:
        torch.set_rng_state(before)
