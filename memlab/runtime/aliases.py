"""Stand-ins for parameters, so that a part of a step is run beside the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.runtime.lifetimes import own_aliases, storage_of
from memlab.runtime.touch import own_class

_FIELD = "accumulation"
KEEP_WHOLE = "use --checkpoint or --offload activations, which keep the batch whole"


class Aliases:
    """Leaves that share storage with a model's trainable parameters and take their place for a while."""

    def __init__(self, model: nn.Module) -> None:
        by_id: dict[int, torch.Tensor] = {}
        self._sites: list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]] = []
        self.originals: list[nn.Parameter] = []
        self.aliases: list[torch.Tensor] = []
        for module, name, parameter in _trainable(model):
            if id(parameter) not in by_id:
                by_id[id(parameter)] = stand_in_for(parameter, parameter.detach())
                self.originals.append(parameter)
                self.aliases.append(by_id[id(parameter)])
            self._sites.append((module, name, parameter, by_id[id(parameter)]))
        own_aliases.add(self)
        self.own = {id(alias): own for alias, own in zip(self.aliases, self.originals, strict=True)}
        # all may be frozen for a part of each step
        self.device = next(model.parameters()).device
        self._places = [(id(module), name, id(parameter)) for module, name, parameter, _ in self._sites]
        self._recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]

    def in_place(self) -> AbstractContextManager[None]:
        """Modules see the aliases; what was there comes back whatever happens."""
        return self._seen([alias for _, _, _, alias in self._sites])

    @contextmanager
    def originals_in_place(self) -> Iterator[list[torch.Tensor]]:
        """Modules see the originals: those of the call, where `torch.func.functional_call` made it with other tensors.

        As views, whose gradients are not handed to hooks of the originals; these come in their order.
        """
        views = {id(original): original.view_as(original) for original in self.originals}
        with self._seen([views[id(original)] for _, _, original, _ in self._sites]):
            yield [*views.values()]

    @contextmanager
    def _seen(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        # not always the originals: `torch.func.functional_call` puts other tensors there for the length of a call
        before = [module._parameters[name] for module, name, _, _ in self._sites]
        try:
            for (module, name, _, _), tensor in zip(self._sites, tensors, strict=True):
                module._parameters[name] = tensor  # type: ignore[assignment] # as `functional_call` does
            self._refresh_recurrent()
            yield
        finally:
            for (module, name, _, _), parameter in zip(self._sites, before, strict=True):
                module._parameters[name] = parameter
            self._refresh_recurrent()

    def serve(self, model: nn.Module) -> bool:
        """Return whether these are still the parameters a model trains, all of them where they were, with the data they have now."""
        now = [(id(module), name, id(parameter)) for module, name, parameter in _trainable(model)]
        return now == self._places and all(
            original.data_ptr() == alias.data_ptr() and original.dtype is alias.dtype
            for original, alias in zip(self.originals, self.aliases, strict=True)
        )

    def follow(self) -> None:
        """Share the data that the parameters have now, after a change of plans gave them other data."""
        for original, alias in zip(self.originals, self.aliases, strict=True):
            if storage_of(original) != storage_of(alias) and alias.grad is None:
                alias.data = original.data

    def deliver(self) -> bool:
        """Add gradients that were left on aliases to those of the parameters; whether there were any."""
        is_any = False
        for original, alias in zip(self.originals, self.aliases, strict=True):
            if alias.grad is not None:
                gradient, alias.grad = alias.grad, None
                original.grad = gradient if original.grad is None else original.grad.add_(gradient)
                is_any = True
        return is_any

    def _refresh_recurrent(self) -> None:
        # recurrent layers keep a second list of references to their weights
        for module in self._recurrent:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]

    @contextmanager
    def originals_untouched(self, model_name: str) -> Iterator[None]:
        """Refuse models that reach a parameter past their modules: its gradient would be counted wrongly."""
        # tensors that `functional_call` puts in their places have no gradient of their own, and warn when asked for it
        before = GradientsBefore(parameter for parameter in self.originals if parameter.is_leaf)
        yield
        if before.are_changed():
            raise RefusalError(
                _FIELD,
                f"{model_name} reaches a parameter through another reference than its modules' attributes",
                KEEP_WHOLE,
            )

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Hand over the gathered gradients, so that autograd may keep them without a copy."""
        gradients = [alias.grad for alias in self.aliases]
        self.give_gradients([None] * len(gradients))
        return gradients

    def give_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Have these as the gathered ones."""
        for alias, gradient in zip(self.aliases, gradients, strict=True):
            alias.grad = gradient


def _trainable(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Each place of a trainable parameter; tied ones have several."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                yield module, name, parameter


def stand_in_for(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a leaf with other data, of the class of a tensor and with its attributes: a forward may ask for both.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.gain = 0.5
        >>> other = stand_in_for(weight, torch.zeros(2))
        >>> type(other).__name__, other.gain, other.requires_grad
        ('Parameter', 0.5, True)
    """
    kind = own_class(tensor)
    if kind is torch.Tensor or issubclass(kind, nn.Parameter):
        made: torch.Tensor = torch.Tensor._make_subclass(kind, data, tensor.requires_grad)
        made.__dict__ = tensor.__dict__
        return made
    is_parameter = isinstance(tensor, nn.Parameter)
    made = nn.Parameter(data, tensor.requires_grad) if is_parameter else data.requires_grad_(tensor.requires_grad)
    vars(made).update({**vars(tensor), **vars(made)})  # a fake keeps what is its own in attributes as well
    return made


def version_of(gradient: torch.Tensor | None) -> int:
    """Return how often a gradient has been written to; -1 where there is none."""
    return -1 if gradient is None else gradient._version


class GradientsBefore:
    """Gradients of parameters at a moment.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> before = GradientsBefore([weight])
        >>> weight.grad = torch.ones(2)
        >>> before.are_changed(), weight.grad
        (True, None)
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._before = [(each, each.grad, version_of(each.grad)) for each in parameters]

    def are_changed(self) -> bool:
        """Return whether a parameter has another gradient by now, in whose place it gets the one it had, or a gradient was written to."""
        for parameter, gradient, version in self._before:
            if parameter.grad is not gradient:
                parameter.grad = gradient
                return True
            if version_of(gradient) != version:
                return True
        return False


class Storage:
    """Storage of a tensor at a moment; `tensor.data = ...` and `set_` give it another one, and leave its version alone or not.

    Example:
        >>> average = torch.zeros(2)
        >>> before = Storage(average)
        >>> average.data = torch.ones(2)
        >>> before.is_another, before.values
        (True, tensor([0., 0.]))
        >>> before.give_back()
        >>> average
        tensor([0., 0.])
    """

    __slots__ = ("_tensor", "values")

    def __init__(self, tensor: torch.Tensor, *, of_parameters: bool = False) -> None:
        self._tensor = tensor
        is_plain = own_class(tensor) is torch.Tensor or (of_parameters and own_class(tensor) is nn.Parameter)
        is_plain = is_plain and tensor.layout is torch.strided and tensor.grad_fn is None
        # what a transform of torch.func has left has no storage
        is_plain = is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        # the tensor as it was then, in that storage; None where no other one is looked for: techniques move parameters
        self.values = tensor.detach() if is_plain else None

    @property
    def is_another(self) -> bool:
        """Return whether the tensor has got another storage since."""
        there = storage_of(self._tensor) if self.values is not None else None
        return self.values is not None and storage_of(self.values) != there

    def give_back(self) -> None:
        """Give the tensor the storage it had: the other one may be that of another tensor, which is not to be written to."""
        if self.values is not None and self.is_another:
            self._tensor.data = self.values


def put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor values that it had, unnoticed by a graph that has saved it, and its size where that is another now."""
    if tensor.shape == values.shape:
        overwrite(tensor.data, values)
    else:
        tensor.data = values.clone()


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values to a tensor; of an expanded one, several of whose elements lie in one place, each place once.

    Example:
        >>> rows = torch.arange(3).expand(2, 3)
        >>> overwrite(rows, torch.tensor([[4, 5, 6], [4, 5, 6]]))
        >>> rows.tolist()
        [[4, 5, 6], [4, 5, 6]]
    """
    if tensor.layout is torch.strided and not tensor.is_nested and 0 in tensor.stride():
        once = tuple(slice(None) if stride else slice(0, 1) for stride in tensor.stride())
        tensor, values = tensor[once], values[once]
    tensor.copy_(values)


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors hold the same, what is no number included."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return bool(torch.equal(one, other) or ((one == other) | (one.isnan() & other.isnan())).all())


def is_in_shared_memory(tensor: torch.Tensor) -> bool:
    """Return whether other processes may read and write a tensor of the host's, and would not see another one in its place."""
    return tensor.device.type == "cpu" and bool(tensor.is_shared())  # type: ignore[no-untyped-call]
