"""State that a model's forward can change or leave behind beside its output, and restoring it.

Numbered rules:

1. Looked at is what the model can reach (`reach`), and small frozen parameters.
2. A `Surroundings` knows how all of it was. `effects` lists what has changed since, by name; `restore` puts it back.
3. A tensor that is written in place is seen by its version, or by its values where it is known to change: writes through `.data`
   and those of BatchNorm leave the version alone. Copies are kept of small tensors that are no parameters, and of whatever was
   seen to change before.
4. Hooks that a forward registers are no effects: functions cannot be compared. They are put back with the rest, and are those of its
   first run again once its effects are written (`register`).
5. Generators of random numbers among it are `Surroundings.generators`, and are put back by who runs the forward (`rng`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import RefusalError
from memlab.runtime.aliases import KEEP_WHOLE, Storage, overwrite, put_back, same_values
from memlab.runtime.containers import Container, Effect, Items
from memlab.runtime.dispatch import StorageWatch
from memlab.runtime.lifetimes import storage_of
from memlab.runtime.modules import ModuleMembers
from memlab.runtime.reach import LIBRARIES, SMALL_BYTES, ModuleHooks, Walk

_FIELD = "accumulation"
_IN_PLACE = ", in place"
# frozen parameters up to this size are looked at: codebooks, running statistics kept as parameters
_SMALL_PARAMETER_BYTES = 8 * 1024**2


class Surroundings(Walk):
    """State beside the outputs that a model's forward may change, as it is now.

    Attributes:
        generators: of random numbers, which the forward may draw from.
    """

    most_containers = 20_000
    left_alone = LIBRARIES
    attributes_left_alone = frozenset(
        {
            "_parameters", "_modules", "_buffers", "training", "forward", "__getstate__", "__deepcopy__", "_compiled_call_impl", "_is_full_backward_hook",
            # recurrent layers list their weights there, which stand-ins replace
            "_flat_weights", "_flat_weight_refs",
            # the whole program hangs on these
            "_trainer", "_fabric", "trainer", "fabric", *(name for name in vars(nn.Module()) if "hook" in name),
            "_non_persistent_buffers_set",
        }
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        # of effects by which tensors are known to change, copies of which are kept whatever their size
        changing: Collection[str] = (),
        *,
        complete: bool = False,  # keep copies of all tensors
        without_buffers_of: type | tuple[type, ...] = (),  # kinds of modules whose buffers are left alone
        buffers_alone: bool = False,  # look at nothing but buffers
        frozen: bool = True,  # look at small frozen parameters as well
    ) -> None:
        super().__init__(own := [*model.modules()])
        self._changing = frozenset(name.removesuffix(_IN_PLACE) for name in changing)
        self._complete = complete
        self._frozen = frozen
        self._buffers_alone = buffers_alone
        self._without_buffers_of = without_buffers_of
        self._tensors: list[_Tensor] = []
        self._model = model
        self._members = ModuleMembers(own)
        self._written: list[_Tensor] = []  # weights that train, where runs under `writing` have written to them
        self._glances: list[Any] = []  # of the containers, which seldom change
        self._registered: list[ModuleHooks] = []  # as the first run that changed them left them
        named = [*model.named_modules()]
        for path, module in named:
            self._of_module(path, module)
        self._tables_of(named)
        self._follow_classes()

    def beside(self, model: nn.Module, name: str) -> None:
        new = [(f"{name}.{path}" if path else name, each) for path, each in model.named_modules() if self._is_new(each)]
        for path, module in new:
            self._of_module(path, module, is_own=False)
        self._tables_of(new)

    def _tables_of(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self.buffers_made([each for each in named if not isinstance(each[1], self._without_buffers_of)])
        if not self._buffers_alone:
            self.parameter_attributes(named)

    def _of_module(self, path: str, module: nn.Module, *, is_own: bool = True) -> None:
        if self._buffers_alone:
            self.buffers(path, module)
            return
        self.module(path, module, buffers=not isinstance(module, self._without_buffers_of))
        for name, parameter in module._parameters.items():
            if parameter is None or not self._frozen or (is_own and parameter.requires_grad):
                continue
            if _bytes_of(parameter) <= _SMALL_PARAMETER_BYTES:
                self.met_tensor(parameter, f"parameter {path}.{name}" if path else f"parameter {name}")

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that it has met."""
        return (each.tensor for each in self._tensors)

    def derived(self) -> dict[str, torch.Tensor]:
        """Return the tensors with a graph that it has met, by name: of earlier calls, or the loop's."""
        return {each.name: each.tensor for each in self._tensors if each.tensor.grad_fn is not None}

    def effects(self) -> dict[str, Effect]:
        """Return what has changed since, by name; a tensor that was written to and then replaced is there twice."""
        found: dict[str, Effect] = {}
        for effect in self._effects():
            name = effect.name
            while name in found:
                name += _IN_PLACE
            found[name] = effect if name == effect.name else replace(effect, name=name)
        return found

    def _effects(self) -> Iterator[Effect]:
        for container, before in self._changed():
            yield from container.effects(before)
        for tensor in self._tensors:
            if tensor.is_changed():
                yield Effect(tensor.name, "written", tensor.before, tensor.copy(), tensor.write)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Context within which all is as it was; afterwards it is again as it is now."""
        # large tensors of which there is no copy stay as they are
        now = [each for each in self._effects() if not (each.kind == "written" and each.before is None)]
        hooks = [ModuleHooks(each.attributes) for each in self._hooks]
        self.restore(strict=False)
        try:
            yield
        finally:
            self.restore(strict=False)
            for effect in now:
                effect.write(effect.value)
            for each in hooks:
                each.restore()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context of runs after which weights that train, too, are put back: a copy is made of each that is written to."""
        known = {id(each.tensor) for each in self._written}
        watch = StorageWatch()
        for name, weight in self._model.named_parameters():
            if weight.requires_grad and id(weight) not in known and _is_plain(weight):
                place = _place_of(weight)
                kept = _Tensor(name, weight, keep=False, on_host=True)
                watch.protect_storage(place, partial(self._about_to_write, kept, place))
        with watch:
            yield

    def _about_to_write(self, weight: _Tensor, place: int) -> None:
        # one that is offloaded has another place by then
        if weight not in self._written and _place_of(weight.tensor) == place:
            weight.keep()
            self._written.append(weight)

    def written(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights that runs under `writing` have written to, by name."""
        return [(each.name, each.tensor) for each in self._written]

    def begin_again(self, *, strict: bool = True) -> None:
        """Put everything back for a run that is to be made again, or for nothing: what it has made (parameters, parts) goes."""
        self._members.take_away_others()
        self.restore(strict=strict)

    def restore(self, *, strict: bool = True) -> None:
        """Put everything back as it was.

        Args:
            strict: else tensors of which there is no copy stay as they are.

        Raises:
            RefusalError: a large tensor was changed of which there is no copy.
        """
        for container, before in self._changed():
            for effect in [*container.effects(before)]:
                if effect.kind == "appended":
                    container.fill(before)
                else:
                    effect.write(effect.before)
        changed = [each for each in self._hooks if each.are_changed]
        self._registered = self._registered or [ModuleHooks(each.attributes) for each in changed]
        for each in changed:
            each.restore()
        for weight in self._written:
            weight.put_back()
        self._written.clear()
        for tensor in self._tensors:
            if tensor.is_changed():
                if tensor.before is None:
                    if not strict:
                        continue
                    raise RefusalError(
                        _FIELD, f"the forward pass has begun to change {tensor.name} in place", KEEP_WHOLE
                    )
                tensor.put_back()

    def register(self) -> None:
        """Have the hooks again that the first run has left, which `restore` took away."""
        for each in self._registered:
            each.restore()

    def met(self, container: Container) -> Items:
        self._glances.append(container.glance())
        return super().met(container)

    def _changed(self) -> Iterator[tuple[Container, Items]]:
        """Containers that may hold something else by now, each with what it held."""
        for (container, before), glance in zip(self._contents, self._glances, strict=True):
            if not container.is_as(glance):
                yield container, before

    def met_tensor(self, tensor: torch.Tensor, name: str) -> None:
        if self._is_new(tensor) and _is_plain(tensor) and not isinstance(tensor, FakeTensor):
            # on a twin nothing is lost, and copies would be in every pass that is traced
            is_complete = self._complete and not self._passed_by
            compares = is_complete or name in self._changing
            # those that are known to change are compared in every call
            on_host = _bytes_of(tensor) > SMALL_BYTES and name not in self._changing
            keep = compares or (_is_copied(tensor) and is_complete is self._complete)
            self._tensors.append(_Tensor(name, tensor, keep=keep, compares=compares, on_host=on_host))


class Copies(Surroundings):
    """Sizes of the copies that are kept of a model's tensors, of fakes among them, in bytes; none is made."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.sizes: list[int] = []
        super().__init__(model, **options)

    def met_tensor(self, tensor: torch.Tensor, name: str) -> None:
        if self._is_new(tensor) and _is_plain(tensor) and (self._complete or _is_copied(tensor)):
            self.sizes.append(_bytes_of(tensor))


def _is_copied(tensor: torch.Tensor) -> bool:
    # frozen parameters are many, and seldom written to: of those a copy is kept that have been
    return _bytes_of(tensor) <= SMALL_BYTES and not isinstance(tensor, nn.Parameter)


def _is_plain(tensor: torch.Tensor) -> bool:
    return not (tensor.is_inference() or tensor.is_nested or tensor.is_meta)


def _place_of(tensor: torch.Tensor) -> int:
    return storage_of(tensor) if torch._C._has_storage(tensor) else 0


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Tensor:
    """A tensor that may be written in place; a copy of it may lie on the host, as the device may be full."""

    def __init__(
        self, name: str, tensor: torch.Tensor, *, keep: bool, compares: bool = False, on_host: bool = False
    ) -> None:
        self.name = name
        self.tensor = tensor
        self._home = torch.device("cpu") if on_host else tensor.device
        self._version = tensor._version
        self._storage = Storage(tensor)
        self._compares = compares
        self._copy: Any = None
        if keep:
            self.keep()

    @property
    def before(self) -> Any:
        """Return its values before; None where it has been written to and there is no copy."""
        if self._copy is None:
            return self._storage.values if self._storage.is_another else None
        return self._copy.to(self.tensor.device)

    def keep(self) -> None:
        self._copy = self.tensor.detach().to(self._home, copy=True)

    def is_changed(self) -> bool:
        if self.tensor._version != self._version or self._storage.is_another:
            return True
        return self._compares and not same_values(self.tensor.detach().to(self._home), self._copy)

    def put_back(self) -> None:
        """Give it what it had before."""
        before = self.before
        self._storage.give_back()
        self.write(before)
        self._version = self.tensor._version

    def copy(self) -> Any:
        return self.tensor.detach().clone()

    def write(self, value: Any) -> None:
        if self.tensor.shape != value.shape:
            put_back(self.tensor, value)
            return
        with torch.no_grad():
            overwrite(self.tensor.detach(), value)
