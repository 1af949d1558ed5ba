"""Looking into modules: repeated blocks, and calls of one block or of a whole model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from memlab.errors import RefusalError


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks a model repeats: members of every outermost list with two or more of one class.

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


def in_use(block: nn.Module) -> AbstractContextManager[None]:
    """Context in which a block's forward can be run by itself, whatever technique keeps its parameters elsewhere.

    Example:
        >>> with in_use(nn.Linear(2, 2)):
        ...     pass
    """
    uses = (getattr(hook, "in_use", None) for hook in block._forward_pre_hooks.values())
    use = next((use for use in uses if use is not None), nullcontext)
    return use()


class Modes:
    """Modes of modules (training or evaluation), and which of their parameters train, at one moment; to be entered again."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modes = [(module, module.training) for module in modules]
        parameters = (each for module, _ in self._modes for each in module._parameters.values() if each is not None)
        self._trained = [(each, each.requires_grad) for each in parameters if each.is_leaf]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context in which they are as they were."""
        modules = [(module, mode) for module, mode in self._modes if module.training is not mode]
        parameters = [(each, trains) for each, trains in self._trained if each.requires_grad is not trains]
        for module, mode in modules:
            module.training = mode
        for parameter, trains in parameters:
            parameter.requires_grad = trains
        try:
            yield
        finally:
            for module, mode in modules:
                module.training = not mode
            for parameter, trains in parameters:
                parameter.requires_grad = not trains


class ParameterHooks:
    """Hooks that parameters have at one moment, to take away those that a call which is made again has registered."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = [*parameters]
        # most have none, and this is made for each call where memory can run out
        self._before = {
            id(each): [*map(set, self._tables(each))] for each in self._parameters if any(self._tables(each))
        }

    def take_away_others(self) -> None:
        """Leave those that were there."""
        for parameter in self._parameters:
            for table, before in zip(self._tables(parameter), self._before.get(id(parameter), ((), ())), strict=True):
                for number in table.keys() - before:
                    del table[number]

    @staticmethod
    def _tables(parameter: torch.Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
        return parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}


class ModuleMembers:
    """Parts and parameters that modules have at one moment, to take away those that a forward pass makes.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> members = ModuleMembers([*model.modules()])
        >>> model.append(nn.Linear(2, 2)).scale = nn.Parameter(torch.ones(2))
        >>> members.take_away_others()
        >>> len(model), [*model._parameters]
        (1, [])
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # those of torch.jit have no dictionaries, and make nothing
        plain = [module for module in modules if isinstance(module._modules, dict)]
        self._before = [(module, dict(module._modules), dict(module._parameters)) for module in plain]
        self._hooks = ParameterHooks(p for _, _, each in self._before for p in each.values() if p is not None)

    def take_away_others(self) -> None:
        """Give modules the parts they had, and no other parameters; and parameters no other hooks."""
        self._hooks.take_away_others()
        for module, parts, had in self._before:
            for name in [name for name in module._parameters if had.get(name) is None]:
                if name in had:
                    module._parameters[name] = None
                else:
                    del module._parameters[name]
            for name in [name for name in module._modules if name not in parts]:
                del module._modules[name]
            for name, part in parts.items():
                if name not in module._modules or module._modules[name] is not part:
                    module._modules[name] = part


@contextmanager
def parameters_made(model: nn.Module) -> Iterator[list[str]]:
    """Context that gives, when it is over, the names of parameters which a model has got within, by itself or in new parts."""
    registered: list[nn.Parameter] = []
    found: list[str] = []

    def heard(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            registered.append(parameter)

    handle = register_module_parameter_registration_hook(heard)
    try:
        yield found
    finally:
        handle.remove()
    if registered:
        made = {id(parameter) for parameter in registered}
        found += [name for name, each in model.named_parameters() if id(each) in made]


def refuse_kept_weights(field: str, model: nn.Module, name: str) -> None:
    """Refuse a call whose parametrized weights are computed once for several calls, with a graph that they share."""
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, model.modules())):
        raise RefusalError(
            field,
            f"the loop calls {name} within torch.nn.utils.parametrize.cached(), which keeps weights and their graphs from call "
            "to call",
            "call it outside of cached()",
        )


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, whose annotations may name what is not there: since Python 3.14 nobody looks before."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def accepts_use_cache(model: nn.Module) -> bool:
    """Return whether the model call has a `use_cache` argument, as Transformers decoders do."""
    forward = inspect.getattr_static(type(model), "forward", None)  # of torch.jit's modules it is no function
    return callable(forward) and "use_cache" in signature_of(forward).parameters


def _without_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with the key-value cache off.

    A recomputed or split forward would fill it twice. The exception: `_needs_cache`.
    """
    if not _needs_cache(kwargs) and (accepts_use_cache(model) or "use_cache" in kwargs):
        return {**kwargs, "use_cache": False}
    return dict(kwargs)


# what a key-value cache is called in arguments and outputs; `cache` since Transformers 5.24
CACHE_NAMES = ("past_key_values", "past_key_value", "cache", "cache_params", "mems")
CACHE_NAMES_OF_DECODERS = ("past_key_values", "cache")


def _needs_cache(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is another one without a cache: by its absence models tell packed rows and cached beginnings."""
    return any(kwargs.get(name) is not None for name in (*CACHE_NAMES_OF_DECODERS, "position_ids"))


class CacheOff:
    """Switches key-value caches off in the calls of a technique whose forward runs again or in parts, and would fill them twice."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._was_on = False  # in a call of this step

    def options(self, model: nn.Module, name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a call without a cache.

        Raises:
            RefusalError: the loop asks for one, which it may read or hand to the next call.
        """
        may_ask = kwargs.get("use_cache") is not False and any(name in kwargs for name in CACHE_NAMES_OF_DECODERS)
        asks = kwargs.get("use_cache") is True or may_ask
        if asks and not _needs_cache(kwargs) and (kwargs.get("use_cache") or _configs_with_cache(model)):
            raise RefusalError(
                self._field,
                f"the loop asks {name} for a key-value cache (use_cache, past_key_values), which a forward pass that runs "
                "again, or in parts, would fill twice",
                "hand over use_cache=False, or a cache of the loop's own with --checkpoint",
                is_late=self._was_on,
                in_loop=True,
            )
        made = _without_cache(model, kwargs)
        self._was_on |= made.get("use_cache") is False and kwargs.get("use_cache") is not False
        return made

    def step_ended(self) -> None:
        self._was_on = False


def _configs_with_cache(model: nn.Module) -> list[Any]:
    configs = {id(c): c for m in model.modules() if (c := vars(m).get("config"))}
    return [config for config in configs.values() if getattr(config, "use_cache", None) is True]


@contextmanager
def cache_off(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Context of a call in which models within the model keep no key-value cache, unless the call says whether they do.

    A wrapper (PEFT's, or one's own) has no such argument itself; what decides is then the configuration of the model within.
    """
    is_given = "use_cache" in kwargs or _needs_cache(kwargs)
    switched = [] if is_given else _configs_with_cache(model)
    try:
        for config in switched:
            config.use_cache = False
        yield
    finally:
        for config in switched:
            config.use_cache = True


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Context of memlab's own work, which the loop's hooks of every module and every optimizer are not to see."""
    homes = [sys.modules[kind.__module__] for kind in (nn.Module, Optimizer)]
    found = [value for home in homes for name, value in vars(home).items() if name.startswith("_global_")]
    hooks = [(table, dict(table)) for table in found if isinstance(table, dict)]
    try:
        for table, _ in hooks:
            table.clear()
        yield
    finally:
        for table, before in hooks:
            table.update(before)
