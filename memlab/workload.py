"""`Workload`: the live objects a plan is applied to, and finding them.

A workload is found by looking, never by importing a framework: wrappers of Accelerate, Fabric and
DDP are recognised by the attribute they keep their inner object under, so memlab needs none of them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from memlab.errors import WorkloadError

# attribute that holds the inner object, by class name of the wrapper
_MODEL_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "_FabricModule": "_original_module"}
_OPTIMIZER_WRAPPERS = {"AcceleratedOptimizer": "optimizer"}


@dataclass(frozen=True)
class Batch:
    """The arguments of one model call, kept by reference."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

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


class Workload:
    """A model, what updates it, and optionally what a step looks like.

    Args:
        model: the model to train; Accelerate, Fabric and DDP wrappers are looked through.
        optimizer: its optimizer, a sequence of them, or None when it is made later (it is then found
            at its first step).
        batch: arguments of one model call, for `measure` and `compare`: a mapping (keyword arguments), a
            tuple (positional) or a single tensor. With `loss_fn`, a pair of inputs and target.
        loss_fn: called as ``loss_fn(output, target)``; None when the model returns its own loss.
        scheduler: learning-rate scheduler, kept as it is by measurements.
        name: how reports call it; by default the model's class.

    Attributes:
        trained_on: the device, while an engine keeps parameters elsewhere between uses.

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
        self.model = unwrap_model(model)
        self.optimizers: list[torch.optim.Optimizer] = [unwrap_optimizer(one) for one in _given(optimizer)]
        self.batch = batch
        self.loss_fn = loss_fn
        self.scheduler = scheduler
        self.name = name or _model_name(self.model)
        self.trained_on: torch.device | None = None
        self._check()

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
        """Where the first trainable parameter lives, or is trained."""
        if self.trained_on is not None:
            return self.trained_on
        return next(p for p in self.model.parameters() if p.requires_grad).device

    def describe(self) -> str:
        """Model, size, optimizer and device in one line."""
        optimizers = " + ".join(type(o).__name__ for o in self.optimizers) or "optimizer made later"
        return f"{self.name} {_size(self.model)} · {optimizers} · {self.device}"

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

        Names the cell uses come first, then those that its functions use; among them a Trainer stands for its
        model and optimizer. When the cell assigns a name anew, what the name held before is not looked at.

        Args:
            namespace: variables by name, such as the notebook's.
            cell: source about to run; may be empty.
            model: name of the variable to use as the model, to choose among several.
            optimizer: name of the variable to use as the optimizer.

        Returns:
            The workload, or None when there is no candidate (it may be created in the cell).

        Raises:
            WorkloadError: a named variable is missing or is no model, or several models qualify.
        """
        live = {name: value for name, value in namespace.items() if not name.startswith("_")}
        used, assigned = names_in(cell)
        chosen_model = _chosen(live, model, "--model", nn.Module) if model else None
        chosen_optimizer = _chosen(live, optimizer, "--optimizer", torch.optim.Optimizer) if optimizer else None
        if chosen_model is None:
            candidates = _candidate_models(live, used, assigned, has_cell=bool(cell))
            if len(candidates) > 1:
                listed = ", ".join(f"{name} ({type(m).__name__})" for name, m in candidates.items())
                raise WorkloadError(
                    f"several models found: {listed}; name the one to use with --model {next(iter(candidates))}"
                )
            if not candidates:
                return None
            chosen_model = next(iter(candidates.values()))
        elif model and isinstance(_trainer_model(live[model]), nn.Module):
            chosen_model = _trainer_model(live[model])
        assert chosen_model is not None
        found = (
            [chosen_optimizer]
            if chosen_optimizer is not None
            else _optimizers_for(unwrap_model(chosen_model), live, assigned)
        )
        return cls(chosen_model, found)

    @classmethod
    def from_trainer(cls, trainer: Any) -> Workload:
        """The workload of a `transformers.Trainer`; its optimizer may still be unmade.

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


def find_model(namespace: Mapping[str, Any], cell: str, name: str | None = None) -> nn.Module | None:
    """Find the model whose calls a cell makes, trainable or not.

    Args:
        namespace: the notebook's variables.
        cell: source of the cell, as Python.
        name: of the variable to use, where the cell names several.

    Returns:
        The model that the cell names, itself or through what holds one as `model` (a pipeline, a Trainer); None when
        it names none, and its first call must tell.

    Raises:
        WorkloadError: a named variable is missing or holds no model, or the cell names several.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> find_model({"model": model, "x": 1}, "y = model(x)") is model
        True
    """
    live = {key: value for key, value in namespace.items() if not key.startswith("_")}
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
        listed = ", ".join(f"{key} ({type(m).__name__})" for key, m in named.items())
        raise WorkloadError(f"several models found: {listed}; name the one to use with --model {next(iter(named))}")
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
    """The optimizer inside wrappers of Accelerate and Fabric."""
    name = type(optimizer).__name__
    if name.startswith("Fabric") and hasattr(optimizer, "_optimizer"):
        return unwrap_optimizer(optimizer._optimizer)
    attribute = _OPTIMIZER_WRAPPERS.get(name)
    return unwrap_optimizer(getattr(optimizer, attribute)) if attribute else optimizer


def steps_some_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer updates at least one parameter of a model."""
    own = {id(p) for p in model.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


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

    Args:
        names: variables, of which the functions count.
        live: variables by name.

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


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def _chosen(live: Mapping[str, Any], name: str, flag: str, kind: type) -> Any:
    if name not in live:
        close = ", ".join(n for n, v in live.items() if isinstance(v, kind)) or "none"
        raise WorkloadError(f"{flag} {name}: no variable of that name; candidates here: {close}")
    value = live[name]
    if isinstance(value, kind):
        return value
    if kind is nn.Module and _trainer_model(value) is not None:
        return _trainer_model(value)
    raise WorkloadError(f"{flag} {name}: {name} is a {type(value).__name__}, expected a torch {kind.__name__}")


def _trainer_model(value: Any) -> nn.Module | None:
    """The model of something that trains one: it has a model and a train method, and is no module."""
    if isinstance(value, nn.Module) or not callable(getattr(type(value), "train", None)):
        return None
    model = getattr(value, "model", None)
    return model if isinstance(model, nn.Module) else None


def _candidate_models(
    live: Mapping[str, Any], used: list[str], assigned: set[str], *, has_cell: bool
) -> dict[str, nn.Module]:
    models = {name: value if isinstance(value, nn.Module) else _trainer_model(value) for name, value in live.items()}
    trainable = {
        name: unwrap_model(m)
        for name, m in models.items()
        if m is not None and any(p.requires_grad for p in m.parameters())
    }
    for names in (used, names_read_by(used, live)):
        in_cell = {name: trainable[name] for name in names if name in trainable and name not in assigned}
        if in_cell:
            return _outermost(in_cell)
    if has_cell and assigned:
        return {}
    return _outermost({name: m for name, m in trainable.items() if name not in assigned})


def _outermost(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Drop aliases, and modules that are part of another candidate."""
    distinct = {id(m): (name, m) for name, m in reversed(list(models.items()))}
    inner = {id(part) for _, m in distinct.values() for part in m.modules() if part is not m}
    return {name: m for name, m in reversed(list(distinct.values())) if id(m) not in inner}


def _optimizers_for(model: nn.Module, live: Mapping[str, Any], assigned: set[str]) -> list[torch.optim.Optimizer]:
    values = [value for name, value in live.items() if name not in assigned]
    optimizers = [v for v in values if _is_optimizer(v)]
    optimizers += [
        o for v in values if _trainer_model(v) is not None and _is_optimizer(o := getattr(v, "optimizer", None))
    ]
    distinct = {id(o): o for o in map(unwrap_optimizer, optimizers)}
    return [o for o in distinct.values() if steps_some_of(o, model)]


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
