"""Models and the optimizers that update them, both without what wraps them.

Wrappers of Accelerate, Fabric and DDP are recognised by the attribute they keep their inner object under, so memlab
imports none of these packages.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import nn

from memlab.runtime.modules import signature_of

_T = TypeVar("_T")
# attribute that holds the inner object, by class name of the wrapper
_MODEL_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "_FabricModule": "_original_module"}


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's own module inside wrappers of DDP, Accelerate and Fabric."""
    attribute = _MODEL_WRAPPERS.get(type(model).__name__)
    return unwrap_model(getattr(model, attribute)) if attribute else model


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that really updates, inside those that hold it and call its step.

    Accelerate, Fabric and Lightning wrap optimizers so, as do Lookahead and sharpness-aware minimisation.

    Example:
        >>> inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        >>> class Lookahead(torch.optim.Optimizer):
        ...     def __init__(self, base):
        ...         self.base, self.param_groups = base, base.param_groups
        >>> unwrap_optimizer(Lookahead(inner)) is inner
        True
    """
    passed: list[torch.optim.Optimizer] = []
    inner: torch.optim.Optimizer | None = optimizer
    while inner is not None:
        passed.append(inner)
        own = stepped_by(inner)
        held = (value for value in vars(inner).values() if isinstance(value, torch.optim.Optimizer))
        inner = next((each for each in held if each not in passed and not own.isdisjoint(stepped_by(each))), None)
    return passed[-1]


def parameters_in(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters of an optimizer, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


WITHOUT_VALUES = "{} has parameters without values: make it on cpu or cuda (memlab.build), load its weights, or call it once (lazy layers) first"


def is_made(model: nn.Module) -> bool:
    """Return whether the parameters of a model have values: those of lazy modules get them in the first call.

    Example:
        >>> is_made(nn.LazyLinear(2)), is_made(nn.Linear(2, 2, device="meta")), is_made(nn.Linear(2, 2))
        (False, False, True)
    """
    return not any(nn.parameter.is_lazy(p) or p.device.type == "meta" for p in model.parameters())


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's step evaluates the loss itself, as often as it needs it (LBFGS)."""
    return _requires_closure(type(optimizer).step)


@lru_cache(maxsize=16)  # it is asked in every measured step
def _requires_closure(step: Callable[..., Any]) -> bool:
    parameter = signature_of(step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def steps_some_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Return whether an optimizer updates at least one parameter of a model."""
    return not stepped_by(optimizer).isdisjoint(id(p) for p in model.parameters())


def steps_others(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Return whether an optimizer updates parameters that are none of a model's."""
    return not stepped_by(optimizer) <= {id(p) for p in model.parameters()}


def stepped_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the identities of the parameters that an optimizer updates."""
    # one whose making has failed may have no groups
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Every live optimizer that updates parameters of a model, wherever it is kept."""
    return [optimizer for optimizer in live_optimizers() if steps_some_of(optimizer, model)]


def live_optimizers() -> list[torch.optim.Optimizer]:
    """Every optimizer of this process that updates parameters itself."""
    distinct = {id(one): one for one in map(unwrap_optimizer, _live(torch.optim.Optimizer))}
    return list(distinct.values())


def live_modules() -> list[nn.Module]:
    """Every module of this process that has parts and parameters, wherever it is kept."""
    return [*filter(keeps_parameters, _live(nn.Module))]


def keeps_parameters(module: nn.Module) -> bool:
    """Return whether a module has its parameters where torch keeps them; one whose making has failed, or of TorchScript, has not."""
    return type(vars(module).get("_parameters")) is dict


def frozen_modules(among: Iterable[nn.Module], trained: Collection[int]) -> list[nn.Module]:
    """Modules with parameters none of which trains, without those within another one of them.

    Args:
        among: all that may count; nothing of theirs runs.
        trained: ids of parameters that train although they require no gradient now.

    Example:
        >>> student, teacher = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
        >>> frozen_modules([student, *teacher.modules()], ()) == [teacher]
        True
    """
    frozen: dict[int, nn.Module] = {}
    for module in among:
        parameters = [p for part in _with_parts(module) for p in vars(part)["_parameters"].values() if p is not None]
        if parameters and not any(p.requires_grad or id(p) in trained for p in parameters):
            frozen[id(module)] = module
    inner = {id(part) for module in frozen.values() for part in _with_parts(module)[1:]}
    return [module for key, module in frozen.items() if key not in inner]


def _with_parts(module: nn.Module) -> list[nn.Module]:
    """A module and all that it consists of, as far as torch keeps it in dictionaries."""
    found, waiting = dict[int, nn.Module](), [module]
    while waiting:
        part = waiting.pop()
        if id(part) not in found and keeps_parameters(part):
            found[id(part)] = part
            waiting += [each for each in vars(part)["_modules"].values() if isinstance(each, nn.Module)]
    return list(found.values())


def _live(base: type[_T]) -> list[_T]:
    """Every object of a class or one derived from it."""
    kinds: dict[int, type[Any]] = {}  # by id: not every class can be hashed
    waiting: list[type[Any]] = [base]
    while waiting:
        kind = waiting.pop()
        kinds[id(kind)] = kind
        waiting += [each for each in type.__subclasses__(kind) if id(each) not in kinds]
    live = gc.get_objects()
    return list(compress(live, map(kinds.__contains__, map(id, map(type, live)))))
