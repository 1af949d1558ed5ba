"""Models and optimizers among a notebook's variables: found by looking at what a cell uses."""

from __future__ import annotations

import ast
import dis
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from memlab.errors import WorkloadError
from memlab.runtime.ownership import is_made, live_optimizers, stepped_by, steps_some_of, unwrap_model, unwrap_optimizer

if TYPE_CHECKING:
    from memlab.runtime.workload import Workload

_Kind = TypeVar("_Kind")
# variables of IPython's own that hold values
_OF_SHELL = frozenset({"In", "Out"})
# packages whose objects are not looked into: they hold the shell, and with it all variables there are or were, as `exit`
# and `quit` do; or they are memlab's own, such as a workload of an earlier cell
_SHELLS = frozenset({"IPython", "ipykernel", "memlab"})
# how far and how long is looked into what a variable holds
_DEEPEST, _MOST_ITEMS, _MOST_LOOKED_AT = 3, 50, 500


class SeveralModelsError(WorkloadError):
    """Several models may be the one that is meant."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.models = dict(models)
        listed = ", ".join(f"{name} ({type(m).__name__})" for name, m in models.items())
        super().__init__(f"several models found: {listed}; name the one to use with --model {next(iter(models))}")


def model_and_optimizers(
    namespace: Mapping[str, Any], cell: str, *, model: str | None, optimizer: str | None
) -> tuple[nn.Module, list[torch.optim.Optimizer]] | None:
    """Return the model that a cell trains and its optimizers, as `Workload.find` says; None where there is no candidate."""
    live = _visible(namespace)
    used, assigned = names_in(cell, live)
    chosen_model = _chosen(live, model, "--model", nn.Module) if model else None
    chosen_optimizer = _chosen(live, optimizer, "--optimizer", torch.optim.Optimizer) if optimizer else None
    if chosen_model is None:
        candidates = _candidate_models(live, used, assigned, has_cell=bool(cell))
        candidates = {name: _called_part(m, live, cell) for name, m in candidates.items()}
        if chosen_optimizer is not None and any(steps_some_of(chosen_optimizer, m) for m in candidates.values()):
            candidates = {name: m for name, m in candidates.items() if steps_some_of(chosen_optimizer, m)}
        if len(candidates) > 1:
            candidates = _stepped(candidates, live, used, assigned)
        candidates = {name: m for name, m in candidates.items() if is_made(unwrap_model(m))}
        if len(candidates) > 1:
            raise SeveralModelsError(candidates)
        if not candidates:
            return None
        chosen_model = next(iter(candidates.values()))
    found = (
        [chosen_optimizer]
        if chosen_optimizer is not None
        else _optimizers_for(unwrap_model(chosen_model), live, assigned)
    )
    return chosen_model, found


def name_of(model: nn.Module, namespace: Mapping[str, Any]) -> str:
    """Return the name of a model where there are several: the shortest way to it from a variable, or its class.

    Example:
        >>> nets = {"actor": nn.Linear(2, 2)}
        >>> name_of(nets["actor"], {"nets": nets}), name_of(nn.Linear(2, 2), {"nets": nets})
        ("nets['actor']", 'Linear')
    """
    live = _visible(namespace)
    held = ((way, unwrap_model(each)) for name in live for way, each in _held(name, live[name], nn.Module))
    parts = ((way, path, part) for way, each in held for path, part in each.named_modules())
    ways = [f"{way}.{path}" if path else way for way, path, part in parts if part is model]
    return min(ways, key=lambda way: way.count(".") + way.count("["), default=type(model).__name__)


def is_held(model: nn.Module, namespace: Mapping[str, Any]) -> bool:
    """Return whether a variable holds a model: itself, around it, or in what it holds.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> is_held(model, {"nets": [nn.Sequential(model)]}), is_held(model, {"model": nn.Linear(2, 2)})
        (True, False)
    """
    live = _visible(namespace)
    held = (each for name in live for _, each in _held(name, live[name], nn.Module))
    return any(unwrap_model(each) is model or any(part is model for part in each.modules()) for each in held)


def find_model(namespace: Mapping[str, Any], cell: str, name: str | None = None) -> nn.Module | None:
    """Find the model whose calls a cell makes, trainable or not.

    Returns:
        The model that the cell names, itself or through what holds one as `model` (a pipeline, a Trainer); None when
        it names none, and its first call must tell.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> find_model({"model": model, "x": 1}, "y = model(x)") is model
        True
    """
    live = _visible(namespace)
    if name:
        held = _held_model(live.get(name))
        return unwrap_model(held if held is not None else _chosen(live, name, "--model", nn.Module))
    used, assigned = names_in(cell, live)
    named: dict[str, nn.Module] = {}
    for names in (used, names_read_by(used, live)):
        models = {
            key: held for key in names if key not in assigned and (held := _held_model(live.get(key))) is not None
        }
        named = named or _outermost({key: unwrap_model(model) for key, model in models.items()})
    if len(named) > 1:
        raise SeveralModelsError(named)
    return next(iter(named.values()), None)


def _held_model(value: Any) -> nn.Module | None:
    """A module with parameters, or that of something which calls or trains one."""
    if not isinstance(value, nn.Module):
        acts = callable(value) or callable(getattr(type(value), "train", None))
        value = getattr(value, "model", None) if acts and not isinstance(value, type) else None
    has_parameters = isinstance(value, nn.Module) and next(value.parameters(), None) is not None
    return value if has_parameters else None


def names_in(cell: str, live: Mapping[str, Any] | None = None) -> tuple[list[str], set[str]]:
    """Names a cell reads, in order of appearance, and names it assigns: at top level, and variables with models or optimizers anywhere.

    Magics and syntax the parser does not know give no names; the cell then decides nothing.

    Example:
        >>> names_in("for fold in folds: model, n = make(), 1", {"model": nn.Linear(2, 2), "n": 1})
        (['fold', 'folds', 'model', 'n', 'make'], {'model'})
    """
    try:
        tree = ast.parse(cell)
    except SyntaxError:
        return [], set()
    made_again = {name for name, value in (live or {}).items() if isinstance(value, (nn.Module, torch.optim.Optimizer))}
    assigned = _assigned_by(tree.body) | (_assigned_by(_in_own_scope(tree)) & made_again)
    nodes = sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.Name)), key=lambda node: (node.lineno, node.col_offset)
    )
    return list(dict.fromkeys(node.id for node in nodes)), assigned


def _assigned_by(statements: Iterable[ast.AST]) -> set[str]:
    return {
        target.id
        for statement in statements
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        for target in ast.walk(statement)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    }


def _in_own_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Everything in a cell that runs in its own scope: loops and conditions, not what is within functions and classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child
            yield from _in_own_scope(child)


def names_read_by(names: Sequence[str], live: Mapping[str, Any]) -> list[str]:
    """Variables that functions read, and the functions they call, and so on.

    Returns:
        The names that are read there, in order, without those given.

    Example:
        >>> model, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> def train():
        ...     return model(torch.ones(2))
        >>> names_read_by(["train"], {"train": train, "model": model, "other": other})
        ['model']
    """
    reached = dict.fromkeys(names)
    waiting = list(names)
    while waiting:
        code = getattr(live.get(waiting.pop(0)), "__code__", None)
        new = [name for name in _global_names(code) if name in live and name not in reached]
        reached.update(dict.fromkeys(new))
        waiting += new
    return list(reached)[len(dict.fromkeys(names)) :]


def _global_names(code: Any) -> Iterator[str]:
    """Names a function's code looks up outside of it, functions inside it included."""
    if not isinstance(code, CodeType):
        return
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        yield from _global_names(constant)


def _named(live: Mapping[str, Any], used: Sequence[str], assigned: Collection[str]) -> list[str]:
    """Return the variables that a cell uses, or functions that it uses do; not what it makes itself."""
    return [name for name in (*used, *names_read_by(used, live)) if name in live and name not in assigned]


def is_trained_by(workload: Workload, namespace: Mapping[str, Any], cell: str) -> bool:
    """Return whether a cell trains this workload for certain: it uses an optimizer of the model, or makes nothing itself."""
    live = _visible(namespace)
    used, assigned = names_in(cell, live)
    named = _named(live, used, assigned)
    optimizers = _optimizers_held(live, named)
    return not assigned or any(own is each for own in workload.optimizers for each in optimizers)


def stale_optimizers(namespace: Mapping[str, Any], cell: str) -> list[str]:
    """Return what to say about optimizers whose model was made again: the cell uses both, and the one updates nothing of the other.

    Returns:
        A line for each; none where parameters are variables of their own, as in the optimization of an image.

    Example:
        >>> optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        >>> print(*stale_optimizers({"model": nn.Linear(2, 2), "optimizer": optimizer}, "model(x); optimizer.step()"))
        `optimizer` updates none of `model`'s parameters; make it again: optimizer = SGD(model.parameters(), ...)
    """
    live = _visible(namespace)
    used, assigned = names_in(cell, live)
    named = _named(live, used, assigned)
    optimizers = {name: live[name] for name in named if isinstance(live[name], torch.optim.Optimizer)}
    if not optimizers:
        return []
    models = _trainable(live, named)
    waiting = [way for way, model in models.items() if not any(steps_some_of(o, model) for o in optimizers.values())]
    if not waiting:
        return []
    held = _tensors_held(live)
    lines = []
    for name, optimizer in optimizers.items():
        if held.isdisjoint(stepped_by(optimizer)):
            kind = type(unwrap_optimizer(optimizer)).__name__
            again = f"make it again: {name} = {kind}({waiting[0]}.parameters(), ...)"
            lines.append(f"`{name}` updates none of `{waiting[0]}`'s parameters; {again}")
    return lines


def stale_in_step(
    optimizer: torch.optim.Optimizer, model: nn.Module, name: str, namespace: Mapping[str, Any]
) -> str | None:
    """Return what to say of an optimizer that steps beside a model, where it was made before some of that: None for nothing.

    Some of the model then has gradients and no optimizer, and some of what the optimizer updates has no gradient and is in no
    variable any more.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model[1] = nn.Linear(2, 1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> print(stale_in_step(optimizer, model, "Sequential", {"model": model}))
        the SGD that steps was made before 1.weight and 1 more of Sequential, which it does not update; make it again
    """
    own = {id(p) for p in model.parameters()}
    parameters = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    without = {id(p) for p in parameters if p.grad is None and id(p) not in own}
    if not without:
        return None
    # all that lives is looked through, which takes longer than a short cell may
    updated = {key for each in live_optimizers() for key in stepped_by(each)}
    left_out = [way for way, p in model.named_parameters() if p.grad is not None and id(p) not in updated]
    if not left_out or without <= _tensors_held(_visible(namespace)):
        return None
    kind = type(unwrap_optimizer(optimizer)).__name__
    if not steps_some_of(optimizer, model):
        return f"the {kind} that steps updates none of {name}'s parameters; make it again"
    more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
    return (
        f"the {kind} that steps was made before {left_out[0]}{more} of {name}, which it does not update; make it again"
    )


def _tensors_held(live: Mapping[str, Any]) -> set[int]:
    """Identities of the tensors that variables hold, and of the parameters of their modules."""
    held = {id(p) for name in live for _, m in _held(name, live[name], nn.Module) for p in m.parameters()}
    return held | {id(p) for name in live for _, p in _held(name, live[name], torch.Tensor)}


def _visible(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a notebook that are the user's own."""
    return {name: value for name, value in namespace.items() if not name.startswith("_") and name not in _OF_SHELL}


def _chosen(live: Mapping[str, Any], name: str, flag: str, kind: type) -> Any:
    variable = re.split(r"[.\[]", name, maxsplit=1)[0]
    if variable not in live:
        close = ", ".join(n for n, v in live.items() if isinstance(v, kind)) or "none"
        raise WorkloadError(f"{flag} {name}: no variable of that name; candidates here: {close}")
    held: dict[str, Any] = dict(_held(variable, live[variable], kind))
    # a shell's line loses quotes
    named = next((each for way, each in held.items() if _unquoted(way) == _unquoted(name)), None)
    if named is not None:
        return named
    if kind is nn.Module and trainer_model(live.get(name)) is not None:
        return trainer_model(live[name])
    if len(held) == 1 and name == variable:
        return next(iter(held.values()))
    if held:
        raise WorkloadError(f"{flag} {name}: {variable} holds {', '.join(held)}; name one of them")
    what = f"{variable} is a {type(live[variable]).__name__}"
    raise WorkloadError(f"{flag} {name}: {what}, expected a torch {kind.__name__}")


def _unquoted(way: str) -> str:
    return way.replace("'", "").replace('"', "")


def trainer_model(value: Any) -> nn.Module | None:
    """The model of something that trains one: it has a model and a train method, and is no module."""
    if isinstance(value, nn.Module) or not callable(getattr(type(value), "train", None)):
        return None
    model = getattr(value, "model", None)
    return model if isinstance(model, nn.Module) else None


def _held(name: str, value: Any, kind: type[_Kind]) -> Iterator[tuple[str, _Kind]]:
    """Yield what a variable holds of a kind: itself, in containers, in attributes of objects; by the way there."""
    waiting = deque([(name, value, 0)])
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_LOOKED_AT:
        name, value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            yield name, value
        elif depth < _DEEPEST:
            waiting += [(f"{name}{step}", inner, depth + 1) for step, inner in _parts(value)]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container or an object of a class of the user's holds, and the way there."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", inner) for key, inner in islice(value.items(), _MOST_ITEMS))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{number}]", inner) for number, inner in enumerate(value[:_MOST_ITEMS]))
    elif str(type(value).__module__).partition(".")[0] in _SHELLS:
        return
    elif not isinstance(value, (type, ModuleType, FunctionType, torch.Tensor, nn.Module, torch.optim.Optimizer)):
        # instance attributes only: a property may do anything
        yield from ((f".{key}", inner) for key, inner in getattr(value, "__dict__", {}).items())


def _candidate_models(
    live: Mapping[str, Any], used: list[str], assigned: set[str], *, has_cell: bool
) -> dict[str, nn.Module]:
    for names in (used, names_read_by(used, live)):
        in_cell = _trainable(live, (name for name in names if name in live and name not in assigned))
        if in_cell:
            return in_cell
    if has_cell and assigned:
        return {}
    return _trainable(live, (name for name in live if name not in assigned))


def _trainable(live: Mapping[str, Any], names: Iterable[str]) -> dict[str, nn.Module]:
    """Models with trainable parameters that variables hold; one that holds a single model stands for it."""
    trainable: dict[str, nn.Module] = {}
    for name in names:
        trained = trainer_model(live[name])
        held = {name: trained} if trained is not None else dict(_held(name, live[name], nn.Module))
        models = {way: unwrap_model(m) for way, m in held.items() if any(p.requires_grad for p in m.parameters())}
        models = _outermost(models)
        trainable |= {name: next(iter(models.values()))} if len(models) == 1 else models
    return _outermost(trainable)


def _stepped(
    models: Mapping[str, nn.Module], live: Mapping[str, Any], used: list[str], assigned: set[str]
) -> dict[str, nn.Module]:
    """Return those of several models whose parameters an optimizer holds that the cell uses; else that any holds; else all."""
    named = _named(live, used, assigned)
    for optimizers in (_optimizers_held(live, named), live_optimizers()):
        stepped = {name: m for name, m in models.items() if any(steps_some_of(each, m) for each in optimizers)}
        if stepped:
            return stepped
    return dict(models)


def _outermost(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Drop aliases, and modules that are part of another candidate."""
    distinct = {id(m): (name, m) for name, m in reversed(list(models.items()))}
    inner = {id(part) for _, m in distinct.values() for part in m.modules() if part is not m}
    return {name: m for name, m in reversed(list(distinct.values())) if id(m) not in inner}


def _called_part(model: nn.Module, live: Mapping[str, Any], cell: str) -> nn.Module:
    """Return the part of a model that a cell calls in its stead, and that has all which optimizers update; else the model.

    As of what keeps an average of weights beside the model that it holds.
    """
    names = _names_called(cell)
    for name in (*names, *names_read_by(names, live)):
        names += _globals_called(getattr(live.get(name), "__code__", None))
    called = [each for name in names if isinstance(each := live.get(name), nn.Module)]
    if any(each is model for each in map(unwrap_model, called)):
        return model
    stepped = {key for optimizer in live_optimizers() for key in stepped_by(optimizer)}
    updated = {id(parameter) for parameter in model.parameters()} & stepped
    own = {id(part) for part in model.modules()}
    parts = [part for part in map(unwrap_model, called) if id(part) in own]
    return next((part for part in parts if updated and updated <= {*map(id, part.parameters())}), model)


def _names_called(cell: str) -> list[str]:
    """Return the names that a cell calls itself."""
    try:
        tree = ast.parse(cell)
    except SyntaxError:
        return []
    return [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]


def _globals_called(code: Any) -> list[str]:
    """Return the names of globals that a function's code calls itself, functions inside it included."""
    if not isinstance(code, CodeType):
        return []
    steps = (step for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    within = [name for constant in code.co_consts for name in _globals_called(constant)]
    return [*(step.argval for step in steps if "NULL" in step.argrepr), *within]  # NULL stands before what is called


def _optimizers_for(model: nn.Module, live: Mapping[str, Any], assigned: set[str]) -> list[torch.optim.Optimizer]:
    held = _optimizers_held(live, (name for name in live if name not in assigned))
    return [optimizer for optimizer in held if steps_some_of(optimizer, model)]


def _optimizers_held(live: Mapping[str, Any], names: Iterable[str]) -> list[torch.optim.Optimizer]:
    """The optimizers that variables hold."""
    held = [optimizer for name in names for _, optimizer in _held(name, live[name], torch.optim.Optimizer)]
    return list({id(one): one for one in map(unwrap_optimizer, held)}.values())
