"""State that a model, or a part of one, reads beside its inputs and parameters, so that it can be run again as it was.

Rules:

1. State is whatever the part's modules, and objects among its arguments, can reach (`reach`), and the random states of torch,
   Python and NumPy. Objects of torch's and memlab's own machinery are left alone: those of an engine hold gathered
   parameters for a moment only.
2. It is remembered by reference before a run. Running again puts the references back first, and afterwards what was
   there meanwhile. So counters count once, a cache is filled once, and an attribute keeps the tensor it got in the first run.
3. Tensors that a run writes to are copied beforehand: small ones always, since some operators write to running statistics
   without a trace, and those that the part has been seen to write to. Any others are watched. Running again writes to a copy.
   So are small parameters without gradients of the user's own modules, but for those a plan has frozen: some keep running statistics there. Others are watched
   where that is asked for, in the first run of a part.
4. A tensor with a graph is remembered without it; else steps would hold each other's graphs.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.runtime.aliases import Storage, put_back, stand_in_for
from memlab.runtime.containers import ABSENT, Items, Mapping
from memlab.runtime.lifetimes import storage_of
from memlab.runtime.reach import SMALL_BYTES, ModuleHooks, Walk
from memlab.runtime.rng import Randomness
from memlab.runtime.touch import own_class

# containers that are looked into
_OF_A_MODEL, _OF_A_PART = 20_000, 300
_StandIns = dict["KeptTensor", torch.Tensor]
Place = tuple[int, Any]  # of a value in the state: the number of its container, and its key there
# attributes of modules that are no state; `training` is, as a loop may switch modes between forward and backward
_NO_STATE = (frozenset(vars(nn.Module())) - {"training"}) | {
    *("forward", "__getstate__", "__deepcopy__", "_compiled_call_impl"),
    "_external_params",  # DeepSpeed's, of parameters of other modules that a module was seen to read (attention does)
}
_COPIED = (torch.Tensor, FakeTensor)
_FROZEN = (nn.Parameter, FakeTensor)


# parameters that a plan has frozen: they are weights, which no forward pass keeps statistics in
weights_that_wait: MutableMapping[torch.Tensor, None] = WeakTensorKeyDictionary()


class Written:
    """Tensors that a part has been seen to write to."""

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        self._by_id[id(tensor)] = weakref.ref(tensor)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        found = self._by_id.get(id(tensor))
        return found is not None and found() is tensor


class KeptTensor:
    """A tensor of the state, as it is before a run."""

    __slots__ = ("__weakref__", "_copy", "_held", "_seen", "_storage", "_version")

    def __init__(self, tensor: torch.Tensor, *, copied: bool) -> None:
        self._seen = weakref.ref(tensor)
        self._held = tensor if tensor.grad_fn is None else tensor.detach().requires_grad_(tensor.requires_grad)
        self._copy: torch.Tensor | None = None
        self._version = tensor._version
        self._storage = Storage(self._held, of_parameters=not copied)
        if copied:
            self.copy()

    @property
    def storage_key(self) -> int:
        return storage_of(self._held)

    @property
    def is_copied(self) -> bool:
        return self._copy is not None

    @property
    def was_replaced(self) -> bool:
        """Return whether a run gets another tensor in its place: one that it may write to, or one in the storage it had."""
        return self.is_copied or self._storage.is_another

    @property
    def derives(self) -> bool:
        """Return whether gradients come to it."""
        return self._held.requires_grad

    def values(self) -> torch.Tensor:
        """Return a leaf of its own that shares its memory."""
        return self._held.detach().requires_grad_()

    def copy(self, *, on_host: bool = False) -> torch.Tensor | None:
        """Keep its values, on its device or on the host; returns the tensor that modules refer to."""
        if self._copy is None:
            values = self._held.detach() if self._storage.values is None else self._storage.values
            self._copy = values.to("cpu" if on_host else values.device, copy=True)
        return self._seen()

    def run_ended(self) -> bool:
        """Keep its values where a run has given it another storage; whether that is so. Techniques move parameters between runs."""
        is_another = self._storage.is_another
        if is_another:
            self.copy()
        if isinstance(self._held, nn.Parameter):
            self._storage = Storage(self._held)
        return is_another

    def as_it_was(self, *, with_graph: bool = False) -> torch.Tensor:
        """Return the tensor, with the graph that the caller has kept, or a copy that may be written to."""
        values = self._storage.values if self._copy is None and self._storage.is_another else self._copy
        if values is None:
            seen = self.seen if with_graph else None
            return self._held if seen is None else seen
        return stand_in_for(self._held, values.to(self._held.device, copy=True))

    @property
    def original(self) -> torch.Tensor:
        """The tensor that modules refer to; without its graph where nobody holds that any more."""
        seen = self.seen
        return self._held if seen is None else seen

    @property
    def is_as_copied(self) -> bool:
        """Return whether it holds what was copied; writes to `.data` leave its version alone."""
        return (
            self._copy is not None
            and not self.is_written
            and torch.equal(self._held.detach().to(self._copy.device), self._copy)
        )

    @property
    def is_written(self) -> bool:
        """Return whether the tensor has been written to since."""
        return self._held._version != self._version or self._storage.is_another

    def write_back(self) -> None:
        """Give it the values it had, unnoticed by a graph that has saved it: what a run writes, its backward does not read."""
        self._storage.give_back()
        if self._copy is not None:
            put_back(self._held, self._copy)

    @property
    def seen(self) -> torch.Tensor | None:
        """The tensor that modules refer to."""
        return self._seen()


@dataclass
class Repetition:
    """A run under the state of an earlier one."""

    counts: bool = False  # its state is the one to go on with, instead of that of the earlier run


class State(Walk):
    """The state before a run."""

    attributes_left_alone = _NO_STATE

    def __init__(
        self,
        modules: Iterable[nn.Module],
        objects: Iterable[Any],
        written: Written,
        device: torch.device,
        most_containers: int = _OF_A_PART,
        *,
        frozen: bool = False,  # watch all parameters without gradients
    ) -> None:
        super().__init__(own := [*modules])
        self.most_containers = most_containers
        self._written = written
        self._device, self._watches_frozen = device, frozen
        self._tensors: dict[int, KeptTensor] = {}
        self.beside_it: list[nn.Module] = []  # modules that are reached and not among these, as a teacher's in a list
        for module in own:
            self._of_module(module)
        self._tables_of(own)
        self._follow_classes()
        # containers and tensors; those that follow belong to the objects
        self._modules_hold, own_tensors = len(self._contents), len(self._tensors)
        for value in objects:
            self.look_at(value, "", 0)
        self._follow_classes()
        if self._tensors:
            tensors = self._tensors
            self._contents = [
                (container, {key: _held(value, tensors) for key, value in items.items()})
                if _may_hold(items, tensors)
                else (container, items)
                for container, items in self._contents
            ]
        self._tensors_kept = list(self._tensors.values())
        self.own_tensors = self._tensors_kept[:own_tensors]  # those that modules refer to
        self._tensors.clear()
        self._seen.clear()
        self.random = Randomness(self.generators)

    @classmethod
    def of_model(
        cls, model: nn.Module, device: torch.device, objects: Iterable[Any] = (), written: Written | None = None
    ) -> State:
        """Return the state of a whole model, which is looked into further than a part that is run at every step."""
        return cls(model.modules(), objects, Written() if written is None else written, device, _OF_A_MODEL)

    def beside(self, model: nn.Module, name: str) -> None:
        for module in model.modules():
            if self._is_new(module) and not self.is_full:
                self.beside_it.append(module)
                self._of_module(module)
                self._tables_of([module])

    def _tables_of(self, modules: Sequence[nn.Module]) -> None:
        numbered = [(str(number), module) for number, module in enumerate(modules)]
        self.buffers_made(numbered)
        self.parameter_attributes(numbered)

    def _of_module(self, module: nn.Module) -> None:
        self.module("", module)
        if module._parameters:
            self.met(_Parameters(module._parameters))
            self.met(_Trains(module._parameters))
        if module._parameters and (self._watches_frozen or self._written or _keeps_statistics(module)):
            self._keep_parameters(module)

    @property
    def tensors(self) -> Sequence[KeptTensor]:
        """Return those that modules and arguments refer to."""
        return self._tensors_kept

    @contextmanager
    def again(self, *, with_graphs: bool = False) -> Iterator[Repetition]:
        """Context in which the state is as it was, with its graphs for a run that is derived through; afterwards it is what it has become since."""
        repetition = Repetition()
        now = [(container, container.read()) for container, _ in self._contents]
        hooks_now = [ModuleHooks(each.attributes) for each in self._hooks]
        random_now = self.random.taken_again()
        stand_ins = {kept: kept.as_it_was(with_graph=with_graphs) for kept in self._tensors_kept}
        try:
            self.put_back(stand_ins)
            self.random.restore()
            yield repetition
        finally:
            if repetition.counts:
                self._put_originals(stand_ins)
            else:
                random_now.restore()
                for container, items in reversed(now):
                    container.fill(items)
                for hooks in hooks_now:
                    hooks.restore()

    def restore(self, instead: _StandIns | None = None) -> None:
        """Put everything back, values of tensors included, for good; some tensors have others in their places."""
        self.put_back(instead)
        for kept in self._tensors_kept:
            kept.write_back()
        self.random.restore()

    def put_back(self, instead: _StandIns | None = None) -> None:
        """Have everything hold what it held, with other tensors in place of some that are kept."""
        stand_ins = {kept: kept.original for kept in self._tensors_kept} | (instead or {})
        for container, items in self._contents:
            container.fill({key: _instead(value, stand_ins) for key, value in items.items()})
        for hooks in self._hooks:
            hooks.restore()

    def news(self) -> dict[Place, Any]:
        """Return the values that were not there before, in what modules refer to: other runs get other arguments."""
        found: dict[Place, Any] = {}
        for number, (container, before) in enumerate(self._contents[: self._modules_hold]):
            for key, value in container.read().items():
                was = before.get(key, ABSENT)
                if value is not was and not (type(was) is KeptTensor and was.seen is value):
                    found[number, key] = value
        return found

    def put(self, values: dict[Place, Any]) -> None:
        """Put values in places that `news` has named."""
        for number, there in itertools.groupby(values, operator.itemgetter(0)):
            container, _ = self._contents[number]
            container.fill(container.read() | {place[1]: values[place] for place in there})

    def learn(self) -> None:
        """Note which tensors have been written to since, so that the next state keeps copies of them."""
        for kept in self._tensors_kept:
            if kept.is_written:
                self._written.add(kept.original)

    def _put_originals(self, stand_ins: _StandIns) -> None:
        """Put back the originals of copies, which the first run has written to."""
        originals = {id(copy): kept.seen for kept, copy in stand_ins.items() if kept.was_replaced}
        for container, _ in self._contents:
            now = container.read()
            container.fill({key: originals.get(id(value), value) for key, value in now.items()})

    def _keep_parameters(self, module: nn.Module) -> None:
        """Keep those that no gradient comes to, and all of a module beside the others: no backward pass updates those."""
        keeps_statistics = _keeps_statistics(module)
        is_beside = bool(self.beside_it) and self.beside_it[-1] is module
        for parameter in module._parameters.values():
            # what a technique or an engine keeps elsewhere, or in another form, is no statistic
            if (
                parameter is None
                or own_class(parameter) not in _FROZEN
                or (parameter.requires_grad and not is_beside)
                or parameter.device != self._device
            ):
                continue
            size_bytes = parameter.untyped_storage().nbytes()
            is_small = keeps_statistics and size_bytes <= SMALL_BYTES and parameter not in weights_that_wait
            copied = is_small or parameter in self._written
            if size_bytes and (copied or self._watches_frozen) and not parameter.is_inference():
                self._tensors.setdefault(id(parameter), KeptTensor(parameter, copied=copied))

    def met_tensor(self, tensor: torch.Tensor, name: str) -> None:
        is_parameter = isinstance(tensor, nn.Parameter)
        if id(tensor) in self._tensors or own_class(tensor) not in (_FROZEN if is_parameter else _COPIED):
            return
        if is_parameter and (tensor.requires_grad or tensor.device != self._device):
            return  # a technique keeps it elsewhere
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_inference():
            return
        is_small = tensor.grad_fn is None and tensor.numel() * tensor.element_size() <= SMALL_BYTES
        self._tensors[id(tensor)] = KeptTensor(tensor, copied=is_small or tensor in self._written)


class _Parameters(Mapping):
    """A module's parameters: others for the length of a call, under `torch.func.functional_call`."""

    def fill(self, items: Items) -> None:
        for name, value in items.items():
            now = self.held[name] if name in self.held else None  # noqa: SIM401 - of torch.jit, no dict
            # an engine that shards parameters changes them by itself
            if now is not value and "DTensor" not in (type(now).__name__, type(value).__name__):
                self.held[name] = value


class _Trains(Mapping):
    """Flags of a module's parameters that train: a loop may freeze some for a call, or after it."""

    def read(self) -> Items:
        parameters = self.held.items()
        return {name: each.requires_grad for name, each in parameters if each is not None and each.is_leaf}

    def fill(self, items: Items) -> None:
        for name, trains in self.read().items():
            if items.get(name, trains) is not trains:
                self.held[name].requires_grad = not trains


def _keeps_statistics(module: nn.Module) -> bool:
    """Return whether a module is the user's own, or a list of parameters for such a one; torch's keep theirs in buffers."""
    is_own = not type(module).__module__.startswith("torch.")
    return bool(module._parameters) and (is_own or isinstance(module, (nn.ParameterList, nn.ParameterDict)))


def _may_hold(items: Items, tensors: dict[int, KeptTensor]) -> bool:
    values = items.values()
    return not tensors.keys().isdisjoint(map(id, values)) or tuple in map(type, values)


def _held(value: Any, tensors: dict[int, KeptTensor]) -> Any:
    if type(value) is tuple:
        held = tuple(_held(item, tensors) for item in value)
        return value if all(a is b for a, b in zip(held, value, strict=True)) else held
    return tensors.get(id(value), value) if isinstance(value, torch.Tensor) else value


def _instead(value: Any, stand_ins: _StandIns) -> Any:
    if type(value) is KeptTensor:
        return stand_ins[value]
    if type(value) is tuple and any(type(item) in (KeptTensor, tuple) for item in value):
        return tuple(_instead(item, stand_ins) for item in value)
    return value
