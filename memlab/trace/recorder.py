"""`Recorder`: a ledger for fake steps, which also prices every operator.

Rules beyond those of the ledger:

1. Tensors of integers run for real as long as they are small, and so do floats that a model makes from nothing
   (a mask of ones: what it computes may depend on whether all are); everything that grows with the model is fake, and
   so is what is random. Real floats that something fake is written to have no values any more, and count as fake.
2. A fake has no value. Asked for one outside of the model (by an optimizer, a technique, a loop), the answer is
   the one that means "nothing special": True, or 1. Asked by the model itself, the step cannot be predicted: the
   answer would decide what it computes.
3. An operator that reaches a live tensor of floats is refused: the twin must never touch what it was made from.
4. Of a loop that treats its items alike (`memlab.runtime.rounds`) three rounds and the last are run. Where the third does
   what the second did, and nothing of the second is left after it, those in between are noted as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
)

from memlab.errors import TraceError
from memlab.hardware.roofline import Kind, Work
from memlab.measuring.ledger import ADD, Ledger
from memlab.measuring.observation import RECOMPUTE
from memlab.measuring.operator_effects import effect_of
from memlab.runtime.dispatch import MATRIX_PRODUCTS, defers
from memlab.runtime.touch import own_class
from memlab.runtime.tree import tensors_in
from memlab.trace.fast_fakes import FastFakes, Recipe
from memlab.trace.hidden_memory import Temporaries
from memlab.trace.work import may_cross, work_of
from memlab.units import MIB

_MOST_REAL_BYTES = 16 * MIB
_aten = torch.ops.aten
_VALUES = frozenset(
    (_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default, _aten.allclose.default)
)
_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
# those of which CUDA's kernel makes the last result first
_BACKWARDS = frozenset((_aten.native_dropout.default,))
_DEVICE = torch.ops.prim.device.default
_ROUNDS = 3

# called with an operator and its arguments
Inside = Callable[[Any, tuple[Any, ...], dict[str, Any]], Temporaries | None]


@dataclass(frozen=True, slots=True)
class Priced:
    """One operator's work, and when it ran."""

    event: int  # number of births and deaths recorded before it
    work: Work  # what it had to do
    moment: int  # what ran (see `memlab.measuring.observation`)


@dataclass(frozen=True, slots=True)
class Hidden:
    """Temporaries of one operator."""

    begin: int  # number of births and deaths recorded before its results
    event: int  # number recorded before the operator is over
    inside: Temporaries
    moment: int  # what ran

    def peaks(self) -> Iterator[tuple[int, int]]:
        """Yield bytes that live together, and how many births and deaths come before."""
        if held_bytes := self.inside.held_bytes:
            yield self.begin, held_bytes
        for size_bytes in self.inside.levels():
            yield self.event, size_bytes


class Recorder(Ledger):
    """Watches a step on a twin: births, deaths and work."""

    def __init__(self, fakes: FastFakes, live: Iterable[torch.Tensor] = (), inside: Inside | None = None) -> None:
        super().__init__("cpu")
        self.priced: list[Priced] = []  # the operators that did work, in order
        self.hidden: list[Hidden] = []  # what lived inside operators, in order; not among the births and deaths
        # number of the storage that the first product of matrices filled, outside of backward and in it
        self.products: dict[bool, int] = {}
        self.in_model = False  # whether the model itself runs, rather than what surrounds it
        self._fakes = fakes

        self._valueless: set[int] = set()  # storages of real floats that something fake was written to
        self._live_storages = {tensor.untyped_storage()._cdata for tensor in live if tensor.is_floating_point()}
        self._inside = inside
        self._sums_in_place = inside is not None

    @property
    def events(self) -> int:
        """Number of births and deaths so far."""
        self._record_deaths()
        return len(self._events)

    @property
    def born(self) -> int:
        """Number of the last storage that was born."""
        return self._born

    def numbers_of(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Numbers of the storages that tensors lie in."""
        self._record_deaths()
        found = (self._live.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return [alive.number for alive in found if alive is not None]

    @contextmanager
    def model_runs(self) -> Iterator[None]:
        """While the model's own forward runs."""
        before, self.in_model = self.in_model, True
        try:
            yield
        finally:
            self.in_model = before

    def price_rerun(self, modules: int, *, selective: bool) -> None:
        """Note that some modules are about to run again, which takes more than their operators."""
        if self.watching:
            kind = Kind.SELECTIVE_RERUN if selective else Kind.RERUN
            self.priced.append(Priced(self.events, Work(kernels=0, kind=kind, parts=modules), RECOMPUTE))

    def rounds(self, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the items of a loop whose rounds are to be run: where nobody watches, one."""
        if not self.watching:
            yield from items[:1]
            return
        begun: list[tuple[int, int, int, int]] = []  # how much of each there is before a round
        for number, item in enumerate(items):
            if number <= _ROUNDS:
                begun.append((self.events, len(self.priced), len(self.hidden), self._born))
            left = len(items) - 1 - number
            if number == _ROUNDS and left > 0 and self._repeat(left, *begun[1:]):
                yield items[-1]
                return
            yield item

    def _repeat(self, times: int, first: Sequence[int], second: Sequence[int], end: Sequence[int]) -> bool:
        """Note the second of two rounds so many times again; False where those after it would do something else."""
        noted: tuple[list[Any], ...] = self._events, self.priced, self.hidden
        before, last = (
            [each[a:b] for each, a, b in zip(noted, begin, stop, strict=False)]
            for begin, stop in ((first, second), (second, end))
        )
        length, born = end[0] - second[0], end[3] - second[3]

        def later(rounds: int) -> list[Any]:
            """What the second did, as it would be so many rounds later."""
            events, priced, hidden = last
            at = rounds * length
            return [
                [(seconds, size, number + rounds * born, moment) for seconds, size, number, moment in events],
                [Priced(each.event + at, each.work, each.moment) for each in priced],
                [Hidden(each.begin + at, each.event + at, each.inside, each.moment) for each in hidden],
            ]

        events, *others = later(-1)
        is_like = [event[1:] for event in events] == [event[1:] for event in before[0]] and others == before[1:]
        left = [alive for alive in self._live.values() if alive.number > first[3]]
        if not is_like or self.owner or any(alive.number <= second[3] for alive in left):
            return False
        for rounds in range(1, times + 1):
            for each, more in zip(noted, later(rounds), strict=True):
                each.extend(more)
        for alive in left:
            alive.number += times * born
        self._born += times * born
        return True

    def begin(self, holdings: Any) -> None:
        super().begin(holdings)
        self.priced, self.hidden, self.products = [], [], {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if not self.watching:
            return func(*args, **(kwargs or {}))
        self._record_deaths()
        if FakeTensor not in types:
            if not self._is_valueless(args):
                return self._on_real(func, types, args, kwargs)
            if func in _VALUES:
                return self._value(func, args)
            with self._fakes.mode:
                return self._on_fakes(func, args, kwargs or {})
        if func in _VALUES:
            return self._value(func, args)
        if any(kind is not FakeTensor for kind in types) and defers(types):
            return NotImplemented
        return self._on_fakes(func, args, kwargs or {})

    def _on_fakes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin = len(self._events)
        with torch._C.DisableTorchFunction():  # a mode of functions must not see what is asked of tensors here
            try:
                out, recipe = self._fakes.run(func, args, kwargs)
            except _UNKNOWN as error:
                raise self._untraceable(func) from error
            schema = getattr(func, "_schema", None)  # operators of higher order have none
            if schema is not None and schema.is_mutable:
                self._note_written(schema.arguments, args, kwargs)
            # a fake that stands for a real tensor of integers, which is written to, is no other storage
            if effect_of(func) and not (recipe is not None and recipe.bears_nothing):
                in_backward = self._sums_in_place and self._in_backward()
                self._record(func, out)
                if func in MATRIX_PRODUCTS:
                    self._note_product(out)
                if in_backward and func is ADD:
                    self._note_sum(args[0], out)
            self._price(recipe, func, args, kwargs, out, begin)
        return out

    def _note_product(self, out: Any) -> None:
        in_graph = torch._C._current_graph_task_id() != -1
        for number in self.numbers_of(tensors_in([out])):
            self.products.setdefault(in_graph, number)

    def _is_valueless(self, args: tuple[Any, ...]) -> bool:
        return bool(self._valueless) and any(
            tensor.untyped_storage()._cdata in self._valueless for tensor in tensors_in([*args])
        )

    def _note_written(self, arguments: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember real tensors of floats that an operator on fakes has written to."""
        named = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
        for argument, value in named:
            if argument.is_write and type(value) is torch.Tensor and value.is_floating_point():
                self._valueless.add(value.untyped_storage()._cdata)

    def _died(self, alive: Any) -> None:
        self._valueless.discard(alive.key)
        super()._died(alive)

    def _on_real(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """An operator without a fake among its arguments: a factory, or one on integers."""
        if makes_from_nothing(func):
            is_known = self.in_model and _gives_values(func)
            if _elements(args) * 8 > _MOST_REAL_BYTES or (not is_known and _makes_floats(func, args, kwargs or {})):
                with self._fakes.mode:
                    return super().__torch_dispatch__(func, types, args, kwargs)
            return super().__torch_dispatch__(func, types, args, kwargs)
        if any(
            tensor.is_floating_point() and tensor.untyped_storage()._cdata in self._live_storages
            for tensor in tensors_in([*args])
            if own_class(tensor) in (torch.Tensor, torch.nn.Parameter)
        ):
            raise TraceError(
                f"{func} reaches a tensor of the live model past the copy a prediction is made on (a loss function or "
                f"hook that refers to the model?): hand it over as loss_fn=nn.Module, or measure the plan instead"
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _value(self, func: Any, args: tuple[Any, ...]) -> Any:
        if self.in_model:
            raise self._untraceable(func)
        if func is not _aten._local_scalar_dense.default:
            return True
        dtype = args[0].dtype
        return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1

    def _untraceable(self, func: Any) -> TraceError:
        return TraceError(
            f"what this model computes depends on values ({func}), which a prediction does not have", str(func)
        )

    def _record(self, func: Any, out: Any) -> None:
        if type(out) is FakeTensor:
            if out.fake_device.type == "meta":
                return  # made for its shape, as techniques do
            storage = out.untyped_storage()
            if storage._cdata not in self._live:
                self._track(storage)
            else:
                self._see(out, effect_of(func))
        else:
            is_backwards = func in _BACKWARDS and self._inside is not None
            self._see(out[::-1] if is_backwards else out, effect_of(func))
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _price(
        self, recipe: Recipe | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, begin: int
    ) -> None:
        known = None if recipe is None or may_cross(func) else recipe.cost
        if known is None:
            work = work_of(func, args, kwargs, out)
            inside = self._inside(func, args, kwargs) if work is not None and self._inside else None
            known = work, inside
            if recipe is not None:
                recipe.cost = known
        work, inside = known
        if work is None:
            return
        moment = self._now()
        self.priced.append(Priced(len(self._events), work, moment))
        if inside is not None:
            if inside.multiplies:
                self._note_product(out)
            hidden = Hidden(begin, len(self._events), inside, moment)
            self.hidden.append(hidden)
            for _, size_bytes in hidden.peaks():
                self.peak_bytes = max(self.peak_bytes, self._live_bytes + size_bytes)


@functools.cache
def makes_from_nothing(func: Any) -> bool:
    """Return whether an operator makes tensors without being given any."""
    schema = getattr(func, "_schema", None)
    return schema is not None and not any("Tensor" in str(argument.type) for argument in schema.arguments)


def _gives_values(func: Any) -> bool:
    """Return whether a factory's result follows from its arguments: it is neither random nor left without values."""
    return torch.Tag.nondeterministic_seeded not in func.tags and not func._schema.name.startswith("aten::empty")


def _makes_floats(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a factory's result holds floats, and more than one."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        numbers = [value for value in args if isinstance(value, (int, float))]
        counts = func._schema.name in ("aten::arange", "aten::full", "aten::scalar_tensor", "aten::randint")
        dtype = torch.get_default_dtype() if not counts or any(isinstance(n, float) for n in numbers) else torch.int64
    return bool(dtype.is_floating_point) and (_elements(args) > 1 or func._schema.name == "aten::arange")


def _elements(args: tuple[Any, ...]) -> int:
    size = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    return math.prod(size) if size else 1
