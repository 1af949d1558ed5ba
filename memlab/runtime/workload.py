"""`Workload`: the live objects a plan is applied to, and finding them.

A workload is found by looking, never by importing a framework: wrappers of Accelerate, Fabric and
DDP are recognised by the attribute they keep their inner object under, so memlab needs none of them.
"""

from __future__ import annotations

import ast
import copy
import gc
import inspect
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress, islice
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from memlab.errors import WorkloadError
from memlab.runtime.tree import tensors_in

if TYPE_CHECKING:
    from memlab.session.tape import Tape

_Kind = TypeVar("_Kind")

# variables of IPython's own that hold values
_OF_SHELL = frozenset({"In", "Out"})
# packages whose objects are not looked into: they hold the shell, and with it all variables there are or were, as `exit`
# and `quit` do; or they are memlab's own, such as a workload of an earlier cell
_SHELLS = frozenset({"IPython", "ipykernel", "memlab"})
# how far and how long is looked into what a variable holds
_DEEPEST, _MOST_ITEMS, _MOST_LOOKED_AT = 3, 50, 500

# attribute that holds the inner object, by class name of the wrapper
_MODEL_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "_FabricModule": "_original_module"}


@dataclass(frozen=True)
class Batch:
    """The arguments of one model call, kept by reference."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors of the call, in order."""
        return tuple(tensors_in((self.args, self.kwargs)))

    @property
    def rows(self) -> int:
        """Rows: the first dimension of the first tensor that has one; 0 without any."""
        for tensor in self.tensors:  # this and `tokens` without generators: they are asked in every step
            if tensor.dim():
                return tensor.size(0)  # nested tensors have no shape
        return 0

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(map(torch.Tensor.numel, self.tensors))

    @property
    def tokens(self) -> int:
        """Tokens: its `input_ids`, or its first positional matrix of integers; 0 without either."""
        for holder in (self.kwargs, *self.args):
            if (
                not isinstance(holder, torch.Tensor)
                and isinstance(holder, Mapping)
                and isinstance(holder.get("input_ids"), torch.Tensor)
            ):
                return int(holder["input_ids"].numel())
        for value in self.args:
            if _is_token_matrix(value):
                return int(value.numel())
        return 0

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shapes and dtypes of its tensors: what of it decides what a step needs.

        Example:
            >>> Batch.of({"inputs": torch.zeros(2, 3)}).shapes
            (((2, 3), 'torch.float32'),)
        """
        return tuple((tuple(each.shape), str(each.dtype)) for each in self.tensors)

    @property
    def copied(self) -> Batch:
        """The same tensors in other lists, dicts and tuples: a model, or the loop, may write to its own.

        Example:
            >>> batch = Batch(({"inputs": torch.zeros(2, 3)},), {})
            >>> batch.copied.args[0].pop("inputs") is batch.args[0]["inputs"]
            True
        """
        return Batch(*tree_map(lambda leaf: leaf, (self.args, dict(self.kwargs))))

    @classmethod
    def of(cls, batch: Any) -> Batch:
        """Read what people hand over as a batch: keyword arguments, positional arguments or one input."""
        if isinstance(batch, Batch):
            return batch
        if isinstance(batch, Mapping):
            return cls((), dict(batch))
        if isinstance(batch, (tuple, list)):
            return cls(tuple(batch), {})
        return cls((batch,), {})


def _is_token_matrix(value: Any) -> bool:
    is_matrix = isinstance(value, torch.Tensor) and value.dim() == 2
    return is_matrix and not value.is_floating_point() and value.dtype is not torch.bool


class SeveralModelsError(WorkloadError):
    """Several models may be the one that is meant."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.models = dict(models)
        listed = ", ".join(f"{name} ({type(m).__name__})" for name, m in models.items())
        super().__init__(f"several models found: {listed}; name the one to use with --model {next(iter(models))}")


class Workload:
    """A model, its optimizer, and optionally the batch and loss of a step.

    Args:
        model: the model to train; Accelerate, Fabric and DDP wrappers are looked through.
        optimizer: its optimizer, a sequence of them, or None when it is made later (it is then found
            at its first step).
        batch: arguments of one model call, for `measure` and `compare`: a mapping (keyword arguments), a
            tuple (positional) or a single tensor. With `loss_fn`, a pair of inputs and target.
        loss_fn: called as ``loss_fn(output, target)``; None when the model returns its own loss.
        scheduler: learning-rate scheduler, kept as it is by measurements.
        name: its name in reports; by default the model's class.

    Attributes:
        trained_on: the device, while an engine keeps parameters elsewhere between uses.
        tape: a step of the loop that trains it, where one was recorded.

    Raises:
        WorkloadError: not a module, no trainable parameter, or an optimizer that steps none of the
            model's parameters.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> workload = Workload(model, torch.optim.AdamW(model.parameters()))
        >>> workload.describe()
        'Linear 10 · AdamW · cpu'
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        batch: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        scheduler: Any = None,
        name: str = "",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise WorkloadError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        self._model: nn.Module | weakref.ref[nn.Module] = unwrap_model(model)
        self.optimizers: list[torch.optim.Optimizer] = [unwrap_optimizer(one) for one in _given(optimizer)]
        self.batch = batch
        self.loss_fn = loss_fn
        self.scheduler = scheduler
        self.name = name or _model_name(self.model)
        self.trained_on: torch.device | None = None
        self.tape: Tape | None = None
        self._check()

    @property
    def model(self) -> nn.Module:
        """The model, inside its wrappers."""
        if not isinstance(self._model, weakref.ref):
            return self._model
        model = self._model()
        if model is None:
            raise WorkloadError(f"{self.name} is deleted")
        return model

    def held_weakly(self) -> Workload:
        """Return the same workload, which keeps its model no longer than others do."""
        same = copy.copy(self)
        same._model = weakref.ref(self.model)
        return same

    def _check(self) -> None:
        if not any(p.requires_grad for p in self.model.parameters()):
            raise WorkloadError(
                f"{self.name} has no trainable parameter: set requires_grad on some, or put the training model in its place"
            )
        for optimizer in self.optimizers:
            if not steps_some_of(optimizer, self.model):
                raise WorkloadError(
                    f"{type(optimizer).__name__} steps no parameter of {self.name}: was the model rebuilt after the "
                    f"optimizer was made? Make the optimizer from this model's parameters()"
                )

    @property
    def device(self) -> torch.device:
        """Return where the first trainable parameter lives, or is trained: the first on a GPU where some are on the host."""
        if self.trained_on is not None:
            return self.trained_on
        # one may be frozen for a part of each step, as the judges of a CycleGAN are
        parameters = list(self.model.parameters())
        trained = [p for p in parameters if p.requires_grad] or parameters
        return next((p for p in trained if p.is_cuda), trained[0]).device

    def describe(self) -> str:
        """Model, size, optimizer and device in one line."""
        return describe_all([self])

    @classmethod
    def find(
        cls,
        namespace: Mapping[str, Any],
        cell: str = "",
        *,
        model: str | None = None,
        optimizer: str | None = None,
    ) -> Workload | None:
        """Look for a model and its optimizers among live variables.

        Names the cell uses come first, then those that its functions use; among them what holds models (a Trainer, an
        agent, a list) stands for them. Of several models those count whose parameters an optimizer holds; one that the
        cell names, if it names any. When the cell assigns a name anew, what the name held before is not looked at.

        Args:
            namespace: variables by name, such as the notebook's.
            cell: source about to run; may be empty.
            model: name of the variable to use as the model, to choose among several; with dots and brackets for what
                it holds, as in "agent.actor".
            optimizer: name of the variable to use as the optimizer.

        Returns:
            The workload, or None when there is no candidate (it may be created in the cell).

        Raises:
            SeveralModelsError: several models qualify.
            WorkloadError: a named variable is missing or is no model.
        """
        live = _visible(namespace)
        used, assigned = names_in(cell)
        chosen_model = _chosen(live, model, "--model", nn.Module) if model else None
        chosen_optimizer = _chosen(live, optimizer, "--optimizer", torch.optim.Optimizer) if optimizer else None
        if chosen_model is None:
            candidates = _candidate_models(live, used, assigned, has_cell=bool(cell))
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
        return cls(chosen_model, found)

    @classmethod
    def from_trainer(cls, trainer: Any) -> Workload:
        """The workload of a `transformers.Trainer`; its optimizer may be made later.

        Raises:
            WorkloadError: the object has no model.
        """
        model = _trainer_model(trainer)
        if model is None:
            raise WorkloadError(
                f"{type(trainer).__name__} has no model; pass a transformers.Trainer, or use Workload(model=…)"
            )
        optimizer = getattr(trainer, "optimizer", None)
        return cls(model, optimizer, scheduler=getattr(trainer, "lr_scheduler", None))


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
    return min(ways, key=lambda way: way.count(".") + way.count("["), default=_model_name(model))


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
    used, assigned = names_in(cell)
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
        own = _stepped_by(inner)
        held = (value for value in vars(inner).values() if isinstance(value, torch.optim.Optimizer))
        inner = next((each for each in held if each not in passed and not own.isdisjoint(_stepped_by(each))), None)
    return passed[-1]


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
    parameter = inspect.signature(step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def steps_some_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Return whether an optimizer updates at least one parameter of a model."""
    return not _stepped_by(optimizer).isdisjoint(id(p) for p in model.parameters())


def steps_others(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Return whether an optimizer updates parameters that are none of a model's."""
    return not _stepped_by(optimizer) <= {id(p) for p in model.parameters()}


def _stepped_by(optimizer: torch.optim.Optimizer) -> set[int]:
    # one whose making has failed may have no groups
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Every live optimizer that updates parameters of a model, wherever it is kept."""
    return [optimizer for optimizer in live_optimizers() if steps_some_of(optimizer, model)]


def live_optimizers() -> list[torch.optim.Optimizer]:
    """Every optimizer of this process that updates parameters itself."""
    kinds, waiting = set(), [torch.optim.Optimizer]
    while waiting:
        kind = waiting.pop()
        kinds.add(kind)
        waiting += [each for each in kind.__subclasses__() if each not in kinds]
    live = gc.get_objects()
    distinct = {id(one): one for one in map(unwrap_optimizer, compress(live, map(kinds.__contains__, map(type, live))))}
    return list(distinct.values())


def names_in(cell: str) -> tuple[list[str], set[str]]:
    """Names a cell reads, in order of appearance, and names it assigns at top level.

    Magics and syntax the parser does not know give no names; the cell then decides nothing.
    """
    try:
        tree = ast.parse(cell)
    except SyntaxError:
        return [], set()
    assigned = {
        target.id
        for statement in tree.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        for target in ast.walk(statement)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    }
    nodes = sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.Name)), key=lambda node: (node.lineno, node.col_offset)
    )
    return list(dict.fromkeys(node.id for node in nodes)), assigned


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


def _given(optimizer: Any) -> list[torch.optim.Optimizer]:
    given = [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if not isinstance(given, Sequence) or not all(isinstance(one, torch.optim.Optimizer) for one in given):
        raise WorkloadError(
            f"optimizer: expected a torch.optim.Optimizer, a sequence of them or None, got {type(optimizer).__name__}"
        )
    return list(given)


def is_trained_by(workload: Workload, namespace: Mapping[str, Any], cell: str) -> bool:
    """Return whether a cell trains this workload for certain: it uses an optimizer of the model, or makes nothing itself."""
    live = _visible(namespace)
    used, assigned = names_in(cell)
    named = [name for name in (*used, *names_read_by(used, live)) if name in live and name not in assigned]
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
    used, assigned = names_in(cell)
    named = [name for name in (*used, *names_read_by(used, live)) if name in live and name not in assigned]
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
        if held.isdisjoint(_stepped_by(optimizer)):
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
    updated = {key for each in live_optimizers() for key in _stepped_by(each)}
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
    if kind is nn.Module and _trainer_model(live.get(name)) is not None:
        return _trainer_model(live[name])
    if len(held) == 1 and name == variable:
        return next(iter(held.values()))
    if held:
        raise WorkloadError(f"{flag} {name}: {variable} holds {', '.join(held)}; name one of them")
    what = f"{variable} is a {type(live[variable]).__name__}"
    raise WorkloadError(f"{flag} {name}: {what}, expected a torch {kind.__name__}")


def _unquoted(way: str) -> str:
    return way.replace("'", "").replace('"', "")


def _trainer_model(value: Any) -> nn.Module | None:
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
    elif type(value).__module__.partition(".")[0] in _SHELLS:
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
        trainer_model = _trainer_model(live[name])
        held = {name: trainer_model} if trainer_model is not None else dict(_held(name, live[name], nn.Module))
        models = {way: unwrap_model(m) for way, m in held.items() if any(p.requires_grad for p in m.parameters())}
        models = _outermost(models)
        trainable |= {name: next(iter(models.values()))} if len(models) == 1 else models
    return _outermost(trainable)


def _stepped(
    models: Mapping[str, nn.Module], live: Mapping[str, Any], used: list[str], assigned: set[str]
) -> dict[str, nn.Module]:
    """Return those of several models whose parameters an optimizer holds that the cell uses; else that any holds; else all."""
    named = [name for name in (*used, *names_read_by(used, live)) if name in live and name not in assigned]
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


def _optimizers_for(model: nn.Module, live: Mapping[str, Any], assigned: set[str]) -> list[torch.optim.Optimizer]:
    held = _optimizers_held(live, (name for name in live if name not in assigned))
    return [optimizer for optimizer in held if steps_some_of(optimizer, model)]


def _optimizers_held(live: Mapping[str, Any], names: Iterable[str]) -> list[torch.optim.Optimizer]:
    """The optimizers that variables hold."""
    held = [optimizer for name in names for _, optimizer in _held(name, live[name], torch.optim.Optimizer)]
    return list({id(one): one for one in map(unwrap_optimizer, held)}.values())


def describe_all(workloads: Sequence[Workload]) -> str:
    """Several models, their optimizers and their device in one line.

    Example:
        >>> describe_all([Workload(nn.Linear(4, 2), name="actor"), Workload(nn.Linear(4, 1), name="critic")])
        'actor 10 + critic 5 · optimizer made later · cpu'
    """
    optimizers = {id(one): type(one).__name__ for each in workloads for one in each.optimizers}
    models = " + ".join(f"{each.name} {_size(each.model)}" for each in workloads)
    return f"{models} · {' + '.join(optimizers.values()) or 'optimizer made later'} · {workloads[0].device}"


def describe_model(model: nn.Module) -> str:
    """Model, size and device in one line.

    Example:
        >>> describe_model(nn.Linear(4, 2))
        'Linear 10 · cpu'
    """
    return f"{_model_name(model)} {_size(model)} · {next(model.parameters()).device}"


def _size(model: nn.Module) -> str:
    return _count(sum(p.numel() for p in model.parameters()))


def _model_name(model: nn.Module) -> str:
    return type(model).__name__


def _count(parameters: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)
