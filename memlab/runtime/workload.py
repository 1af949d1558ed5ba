"""`Workload`: the live objects a plan is applied to."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memlab.errors import WorkloadError
from memlab.runtime.accelerator import compute_capability, is_accelerator
from memlab.runtime.namespace import model_and_optimizers, trainer_model
from memlab.runtime.ownership import steps_some_of, unwrap_model, unwrap_optimizer

if TYPE_CHECKING:
    from memlab.session.tape import Tape


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
        has_values: whether its tensors hold values; those of a prediction's twin do not.

    Raises:
        WorkloadError: not a module, no trainable parameter, or an optimizer that steps none of the
            model's parameters.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> workload = Workload(model, torch.optim.AdamW(model.parameters()))
        >>> workload.describe()
        'Linear 10 · AdamW · cpu'
    """

    has_values = True

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
        same._model, same.optimizers = weakref.ref(self.model), [*self.optimizers]
        return same

    def drop_optimizers(self) -> None:
        """Drop the optimizers, where the model is held weakly: nobody trains by this workload any more."""
        if isinstance(self._model, weakref.ref):
            self.optimizers.clear()

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
        return next((p for p in trained if is_accelerator(p.device)), trained[0]).device

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Return that of the device; None where it is no GPU of NVIDIA's."""
        return compute_capability(self.device)

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
        cell names, if it names any. Of one within another the cell trains the one that it calls, if that has all that is
        updated; else the outer one. When the cell assigns a name anew, what the name held before is not looked at.

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
        found = model_and_optimizers(namespace, cell, model=model, optimizer=optimizer)
        return None if found is None else cls(*found)

    @classmethod
    def from_trainer(cls, trainer: Any) -> Workload:
        """The workload of a `transformers.Trainer`; its optimizer may be made later.

        Raises:
            WorkloadError: the object has no model.
        """
        model = trainer_model(trainer)
        if model is None:
            raise WorkloadError(
                f"{type(trainer).__name__} has no model; pass a transformers.Trainer, or use Workload(model=…)"
            )
        optimizer = getattr(trainer, "optimizer", None)
        return cls(model, optimizer, scheduler=getattr(trainer, "lr_scheduler", None))


def _given(optimizer: Any) -> list[torch.optim.Optimizer]:
    given = [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if not isinstance(given, Sequence) or not all(isinstance(one, torch.optim.Optimizer) for one in given):
        raise WorkloadError(
            f"optimizer: expected a torch.optim.Optimizer, a sequence of them or None, got {type(optimizer).__name__}"
        )
    return list(given)


def describe_all(workloads: Sequence[Workload]) -> str:
    """Several models, their optimizers and their device in one line.

    Example:
        >>> describe_all([Workload(nn.Linear(4, 2), name="actor"), Workload(nn.Linear(4, 1), name="critic")])
        'actor 10 + critic 5 · no optimizer yet · cpu'
    """
    optimizers = {id(one): type(one).__name__ for each in workloads for one in each.optimizers}
    models = " + ".join(f"{each.name} {_size(each.model)}" for each in workloads)
    return f"{models} · {' + '.join(optimizers.values()) or 'no optimizer yet'} · {workloads[0].device}"


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
