"""Looking into modules: repeated blocks, and patching a method of one instance."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

from torch import nn

from memlab.seams import class_forward


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks a model repeats: members of every outermost list with two or more of one class.

    Args:
        model: any module; Transformers models keep their layers in such lists.

    Returns:
        The blocks in order; empty when the model repeats none that has parameters.

    Example:
        >>> from torch import nn
        >>> tower = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
        >>> len(repeated_blocks(tower))
        3
    """
    blocks: list[nn.Module] = []
    _collect_blocks(model, blocks)
    return blocks


def _collect_blocks(module: nn.Module, blocks: list[nn.Module]) -> None:
    for child in [module] if isinstance(module, (nn.ModuleList, nn.Sequential)) else module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and _is_repetition(child):
            blocks.extend(member for member in child if _has_parameters(member))
        elif child is not module:
            _collect_blocks(child, blocks)
        else:
            for member in child.children():
                _collect_blocks(member, blocks)


def _is_repetition(container: nn.Module) -> bool:
    members = [member for member in container.children() if _has_parameters(member)]
    composite = all(any(True for _ in member.children()) for member in members)
    return len(members) >= 2 and composite and len({type(member) for member in members}) == 1


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def patch_forward(module: nn.Module, replacement: Callable[..., Any], undo: ExitStack, name: str = "forward") -> None:
    """Give one module instance another forward, or another method of that name, until undone."""
    instance = module.__dict__
    had, before = name in instance, instance.get(name)

    def restore() -> None:
        if had:
            instance[name] = before
        else:
            instance.pop(name, None)

    undo.callback(restore)
    instance[name] = _PatchedForward(module, replacement, name)


class Use(Protocol):
    """A pre-hook of a block that makes it ready to be run; it leaves a context for who runs its forward past hooks."""

    def in_use(self) -> AbstractContextManager[None]:
        """Context in which the block's forward can be run by itself, as a recomputation does."""


def in_use(block: nn.Module) -> AbstractContextManager[None]:
    """Context in which a block's forward can be run by itself, whatever technique keeps its parameters elsewhere.

    Example:
        >>> with in_use(nn.Linear(2, 2)):
        ...     pass
    """
    uses = (getattr(hook, "in_use", None) for hook in block._forward_pre_hooks.values())
    use = next((use for use in uses if use is not None), nullcontext)
    return use()


class _PatchedForward:
    """The forward of one module instance; a copy or a pickle of the module has the forward of its class.

    A bare function would be shared by copies, which would then compute with the parameters of the original.
    """

    def __init__(self, module: nn.Module, replacement: Callable[..., Any], name: str) -> None:
        # first: it takes over the attributes of what it wraps, which may be another of these
        functools.update_wrapper(self, replacement)
        self._module = module
        self._replacement = replacement
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replacement(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        return self if copied is None else class_forward(copied, self._name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return class_forward, (self._module, self._name)


def accepts_use_cache(model: nn.Module) -> bool:
    """Whether the model call has a `use_cache` argument, as Transformers decoders do."""
    return "use_cache" in inspect.signature(type(model).forward).parameters


def without_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with the key-value cache off.

    Training never reads it, and a recomputed or split forward would fill it twice.
    """
    if accepts_use_cache(model) or "use_cache" in kwargs:
        return {**kwargs, "use_cache": False}
    return dict(kwargs)
