"""`Replica`: a copy of a model for an engine to take apart, so that the user's modules stay as they are.

1. Modules are new and of the same classes; parameters are new and share their data with the user's; buffers, hooks,
   configurations and whatever else a module holds are the same objects.
2. What leads from an attribute to a module or a parameter (lists, dicts, bound methods, partials) leads to the new one.
3. What the user changes on a module between calls (train or eval mode, a rate of dropout, a buffer, hooks) is carried
   over before a call; buffers that a call replaces, and attributes that it sets, are carried back.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.runtime.stand_ins import CALL, have_others, own_attributes
from memlab.runtime.tree import tensors_in

_MOST_ENTRIES = 10_000  # longer containers are data
_CONTAINERS = (list, tuple, dict, set)


class Replica:
    """A model and its replica.

    Raises:
        RefusalError: a module that cannot be replicated (scripted, compiled, with a function in place of its forward).

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> replica = Replica(model, "model").model
        >>> replica[0].weight is replica[1].weight, replica[0].weight is model[0].weight
        (True, False)
        >>> replica[0].weight.data_ptr() == model[0].weight.data_ptr()
        True
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._name = name
        self._made: dict[int, Any] = {}
        self._trained = {n: p.requires_grad for n, p in model.named_parameters()}
        self._users = model
        for parameter in model.parameters():
            self._made[id(parameter)] = made = nn.Parameter(parameter.detach(), parameter.requires_grad)
            vars(made).update(vars(parameter))  # attributes that a forward may read; an engine adds its own
        self._pairs: list[tuple[nn.Module, nn.Module, dict[str, Any]]] = []
        self._given: dict[nn.Module, dict[str, Any]] = {}  # what the replica of a module was given, or has set itself
        self.model: nn.Module = self._replica_of(model)
        self._users_of = {id(replica): module for module, replica, _ in self._pairs}
        # hooks of the outermost module run when the user's is called
        for key in [key for key in vars(model) if is_hooks(key)]:
            vars(self.model)[key] = type(vars(model)[key])()
        for module, replica, _ in self._pairs:
            self._require_own_forward(module, replica)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Each parameter of the user's, with its name and what the replica has in its place by now."""
        now = dict(self.model.named_parameters())
        for name, parameter in self._users.named_parameters():
            yield name, parameter, now[name]

    def follow(self) -> None:
        """Carry over what has changed on the user's modules."""
        self._require_same_parameters()
        for module, replica, seen in self._pairs:
            for key, value in own_attributes(module).items():
                if is_hooks(key):
                    if module is not self._users and seen[key] != (now := list(value)):
                        self._follow_hooks(vars(replica)[key], value, seen[key])
                        seen[key] = now
                elif value is not seen.get(key) and not _is_table(key) and key != "forward":
                    seen[key] = value
                    vars(replica)[key] = self._given[module][key] = self._mapped(value)
            replica._buffers.update(module._buffers)

    def _follow_hooks(self, table: dict[int, Any], hooks: dict[int, Any], known: list[int]) -> None:
        """Carry over hooks that the user has put on a module or taken off since; an engine's own stay where they are."""
        before = list(table.items())
        place = next((place for place, (number, _) in enumerate(before) if number in known), len(before))
        first, last = (
            {number: hook for number, hook in part if number not in known} for part in (before[:place], before[place:])
        )
        users = {number: table.get(number) or self._mapped(hook) for number, hook in hooks.items()}
        table.clear()
        table.update(first | users | last)

    def carry_back(self) -> list[str]:
        """Give the user's modules the buffers that a call has replaced, and the attributes that it has set.

        Returns:
            Names of attributes that were given tensors with a graph.
        """
        kept = []
        for module, replica, seen in self._pairs:
            for key, value in replica._buffers.items():
                if module._buffers.get(key) is not value:
                    module._buffers[key] = value
            # an engine sets attributes of its own
            names = _named_in(type(module))  # type: ignore[arg-type] # mypy asks for the hash of a module
            for key in names & vars(replica).keys() - {"forward"}:
                value = vars(replica)[key]
                if value is not self._given[module].get(key, self):
                    self._given[module][key] = value
                    vars(module)[key] = seen[key] = self._users_of.get(id(value), value)
                    kept += [key] if any(t.grad_fn is not None for t in tensors_in(value)) else []
        return kept

    def _require_same_parameters(self) -> None:
        for name, parameter in self._users.named_parameters():
            if self._trained.get(name) is not parameter.requires_grad:
                raise RefusalError(
                    "scale",
                    f"{name} of {self._name} was {'thawed' if parameter.requires_grad else 'frozen'} or exchanged, which an "
                    "engine that runs cannot follow",
                    "take it off first, and put it on again",
                )
            refuse_hooks(name, parameter)

    # -- making it -----------------------------------------------------------------------------

    def _replica_of(self, module: nn.Module) -> nn.Module:
        if id(module) in self._made:
            return self._made[id(module)]  # type: ignore[no-any-return] # a module's is one
        own = own_attributes(module)
        if isinstance(module, torch.jit.ScriptModule) or own.get(CALL) is not None:
            raise _not_replicable(f"{self._name} has a part that is compiled ({type(module).__name__})")
        replica = object.__new__(type(module))
        self._made[id(module)] = replica
        # of a table of hooks their numbers
        seen = {
            key: list(value) if is_hooks(key) else value
            for key, value in own.items()
            if is_hooks(key) or not _is_table(key)
        }
        self._pairs.append((module, replica, seen))
        for key, value in own.items():
            vars(replica)[key] = self._table(value) if _is_table(key) else self._mapped(value)
        self._given[module] = dict(vars(replica))
        return replica

    def _table(self, table: Any) -> Any:
        """A module adds to its tables, so they are always new."""
        return type(table)((key, self._mapped(value)) for key, value in table.items()) if table is not None else None

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._replica_of(value)
        if id(value) in self._made:
            return self._made[id(value)]
        if type(value) in _CONTAINERS and 0 < len(value) <= _MOST_ENTRIES:
            return self._mapped_container(value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self._replica_of(value.__self__))
        if type(value) is functools.partial:
            function, arguments, keywords = map(self._mapped, (value.func, value.args, value.keywords))
            return functools.partial(function, *arguments, **keywords)
        return value

    def _mapped_container(self, value: Any) -> Any:
        """The same object, unless something in it has a replica."""
        items = [*value.values()] if isinstance(value, dict) else [*value]
        self._made[id(value)] = value  # should it hold itself
        mapped = [*map(self._mapped, items)]
        del self._made[id(value)]
        if all(one is other for one, other in zip(items, mapped, strict=True)):
            return value
        return dict(zip(value, mapped, strict=True)) if isinstance(value, dict) else type(value)(mapped)

    def _require_own_forward(self, module: nn.Module, replica: nn.Module) -> None:
        forward = own_attributes(module).get("forward")
        if forward is None:
            return
        own = self._mapped(forward)
        if own is forward:
            raise _not_replicable(
                f"the forward of {type(module).__name__} was replaced by another function ({forward!r:.80})"
            )
        vars(replica)["forward"] = own
        if isinstance(own, types.MethodType) and own.__func__ is getattr(type(module), "forward", None):
            del vars(replica)["forward"]


def refuse_hooks(name: str, parameter: nn.Parameter) -> None:
    """An engine has parameters of its own, on which hooks of the user's would not run."""
    tables = (getattr(parameter, table, None) for table in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    # those of a plan that goes are memlab's
    if have_others(tables):
        raise RefusalError("scale", f"{name} has gradient hooks, which an engine would not run", "remove them first")


def _not_replicable(reason: str) -> RefusalError:
    return RefusalError(
        "scale", f"{reason}, and an engine needs a model of its own to take apart", "train without --scale"
    )


def is_hooks(key: str) -> bool:
    """Return whether an attribute of a module is a table of hooks, or of their options."""
    return key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


@functools.cache
def _named_in(kind: type) -> frozenset[str]:
    """Names in the methods of a class of the user's, and in code within them."""
    codes = [
        function.__code__
        for base in kind.__mro__
        if not base.__module__.startswith("torch.nn.")
        for function in vars(base).values()
        if isinstance(function, types.FunctionType)
    ]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(name for code in codes for name in code.co_names)


def _is_table(key: str) -> bool:
    return key in ("_parameters", "_buffers", "_modules") or is_hooks(key)
