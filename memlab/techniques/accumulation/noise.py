"""The same random numbers for rows that run together and apart, so that the two can be compared.

Numbered rules:

1. The run together comes first, and what it draws is kept, in order. Each run of some of its rows is then given, at the same
   place in the order, the rows of those numbers that are its own. Numbers whose shape does not depend on the rows (noise on
   weights) are the same for all.
2. Where a draw has several numbers for each row, they are one row's after another's, or one view's of all rows after
   another's. Where a model draws row by row, the runs apart take what was drawn one after another (`Order`).
3. Dropout inside of an attention kernel cannot be given numbers: it is left out on both sides.
4. A part that is run again, in the same pass or in the backward pass (`repeat`), draws what its first run drew: it starts from the
   random state that one started from, so each draw is known by the state of its generator. In the backward pass a draw
   from any other state is left as it is.

Which operators draw is what torch says of them (`torch.Tag.nondeterministic_seeded`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from memlab.runtime import accelerator
from memlab.runtime.dispatch import WatchingMode
from memlab.runtime.lifetimes import storage_of
from memlab.runtime.rng import drawn_on

LOW_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    }
)


class Order(Enum):
    """Places of some rows' own numbers among those that all rows have drawn."""

    ROWS = "row by row"
    VIEWS = "view by view"  # of rows that are called several times together, as crops of an image
    IN_TURN = "draw by draw"  # rows apart go on where those before ended, instead of taking a share of each draw


class StrangeDrawError(Exception):
    """Rows apart ask for random numbers that rows together did not draw in this order."""


_aten = torch.ops.aten
# operators that tell which target does not count
_IGNORING = frozenset({_aten.nll_loss_forward, _aten.nll_loss2d_forward})
_COMPARISONS = frozenset({_aten.ne.Scalar, _aten.eq.Scalar})
# operators whose numbers lie in a range that is asked for, as numbers of rows do
_OF_A_RANGE = frozenset({_aten.randperm, _aten.randint, _aten.randint_like, _aten.random_})


# operators by which a model chooses what to do from values it has computed
_CHOOSING = frozenset(
    {_aten.nonzero.default, _aten.masked_select.default, _aten.topk.default, _aten.sort.default, _aten.sort.stable}
    | {_aten.argsort.default, _aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim}
    | {_aten.bucketize.Tensor, _aten.searchsorted.Tensor, _aten.unique_consecutive.default, _aten._unique2.default}
)


class Noise(WatchingMode):
    """Keeps random numbers, then gives them out again.

    Example:
        >>> noise = Noise()
        >>> with noise:
        ...     together = torch.rand(4)
        >>> noise.give(1, 3, of=4)
        >>> with noise:
        ...     apart = torch.rand(2)
        >>> bool((apart == together[1:3]).all())
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[tuple[Any, list[Any], list[torch.Tensor]]] = []
        self._giving = False
        self._order = Order.ROWS
        self._next = 0
        self._rows = (0, 0, 0)
        self._born: list[weakref.ref[torch.UntypedStorage]] = []
        self._repeating = False
        self._given_at: dict[bytes, list[torch.Tensor]] = {}
        # whether an operator of the run together computed in half precision or in less
        self.computes_low = False
        self.ignored: dict[int, None] = {}  # targets that losses ignore, or that whole numbers are held against
        self.chooses = False  # whether the run together takes indices, or numbers of Python, from what it has computed
        self.has_views = False  # whether draws had several numbers for each row along a dimension
        self.draws_inside = False  # whether dropout inside of a kernel was left out (rule 3)

    @property
    def survivors(self) -> set[int]:
        """Addresses of storages made by the run together that are still in use."""
        alive = (reference() for reference in self._born)
        return {storage._cdata for storage in alive if storage is not None}

    @property
    def any_drawn(self) -> bool:
        """Return whether the run together drew anything."""
        return bool(self._drawn)

    def give(self, start: int, stop: int, *, of: int, order: Order = Order.ROWS) -> None:
        """Give the numbers that belong to some rows from now on.

        Args:
            start: the first of the rows.
            stop: the one after the last.
            of: how many rows ran together.
            order: which of them these are.
        """
        self._giving, self._repeating = True, False
        self._given_at = {}
        self._rows = (start, stop, of)
        self._order = order
        if not (order is Order.IN_TURN and start):
            self._next = 0

    def repeat(self) -> None:
        """Give what the last run drew once more, and keep nothing, until numbers of other rows are given."""
        self._repeating = True

    def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._answered(func, args, kwargs)
        if getattr(func, "overloadpacket", None) in _IGNORING:
            self.ignored[args[4]] = None
        elif func in _COMPARISONS and type(args[1]) is int and not args[0].is_floating_point():
            self.ignored[args[1]] = None
        if not self._giving and not self._repeating:
            self.chooses |= func in _CHOOSING and _is_computed(args[0])
            # a view of what was there before (of a global that is looked at, say) is not made here; what is written to is
            tensors = () if _writes(func) else (each for each in args if isinstance(each, torch.Tensor))
            given = {storage_of(each) for each in tensors if each.layout is torch.strided}
            given |= {each._cdata for each in args if isinstance(each, torch.UntypedStorage)}  # `set_`
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self.computes_low |= tensor.dtype in LOW_DTYPES
                    if tensor.layout is torch.strided and storage_of(tensor) not in given:
                        self._born.append(weakref.ref(tensor.untyped_storage()))
        return result

    def _answered(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        inner, draws = _kind_of(func)
        if inner is not None:
            rate, args, kwargs = _without_dropout(inner, args, kwargs)
            self.draws_inside |= bool(rate)
        if not draws or _is_idle(func, args):
            return func(*args, **kwargs)
        place = _state_of(func, args, kwargs)
        result = func(*args, **kwargs)
        numbers = _numbers_of(func, args, kwargs, result)
        given = self._given_at.get(place)
        if given is not None and [value.shape for value in given] != [number.shape for number in numbers]:
            given = None
        if not self._giving:
            if given is None and not self._repeating:
                self._given_at[place] = [tensor.detach().clone() for tensor in numbers]
                self._drawn.append((func, _numbers_in(args, kwargs), self._given_at[place]))
            return result
        if given is None:
            if self._repeating:
                return result
            given = self._given_at[place] = self._given(func, _numbers_in(args, kwargs), numbers)
        if func is torch.ops.aten.native_dropout.default:
            result[0].copy_(args[0] * given[0] / (1 - args[1]) if args[1] < 1 else torch.zeros_like(args[0]))
        for tensor, value in zip(numbers, given, strict=True):
            tensor.copy_(value)
        return result

    def _given(self, func: Any, asked: list[Any], numbers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._next >= len(self._drawn):
            raise StrangeDrawError
        drawn_by, asked_before, drawn = self._drawn[self._next]
        self._next += 1
        if drawn_by is not func or len(drawn) != len(numbers):
            raise StrangeDrawError
        if func.overloadpacket in _OF_A_RANGE and asked != asked_before:  # numbers of rows of a larger batch
            raise StrangeDrawError
        return [self._share(kept, wanted.shape) for kept, wanted in zip(drawn, numbers, strict=True)]

    def _share(self, kept: torch.Tensor, wanted: torch.Size) -> torch.Tensor:
        if kept.shape == wanted:
            return kept
        start, stop, rows = self._rows
        if self._order is Order.IN_TURN or kept.dim() != len(wanted):
            raise StrangeDrawError
        differing = [dim for dim in range(kept.dim()) if kept.size(dim) != wanted[dim]]
        dim = differing[0]
        if len(differing) > 1 or kept.size(dim) % rows or wanted[dim] * rows != kept.size(dim) * (stop - start):
            raise StrangeDrawError
        each = kept.size(dim) // rows
        self.has_views |= each > 1
        if self._order is Order.VIEWS:
            views = kept.reshape(*kept.shape[:dim], each, rows, *kept.shape[dim + 1 :])
            return views.narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)
        return kept.narrow(dim, start * each, (stop - start) * each)


def _is_computed(value: Any) -> bool:
    """Return whether values are none of the tokens or labels that a loop gives."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _numbers_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    return [each for each in (*args, *kwargs.values()) if isinstance(each, (int, float, bool))]


def _state_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Return what an operator is asked for beside tensors, and the state of the generators that it may draw from."""
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
    states = [generator.get_state() for generator in given] or [torch.get_rng_state()]
    device = drawn_on(args, kwargs)
    if not given and (there := accelerator.random_state(device)) is not None:
        states.append(there)
    return b"".join(
        [f"{func}{device}{_numbers_in(args, kwargs)}".encode(), *(state.numpy().tobytes() for state in states)]
    )


@functools.cache
def _writes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.is_mutable)


@functools.cache
def _kind_of(func: Any) -> tuple[int | None, bool]:
    """Position of an argument that says how much a fused kernel drops, and whether an operator draws otherwise."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None, False
    names = [argument.name for argument in schema.arguments]
    inner = (
        "dropout_p" if "dropout_p" in names else "dropout" if "dropout" in names and "cudnn" in func.name() else None
    )
    if inner is not None:
        return names.index(inner), False
    return None, torch.Tag.nondeterministic_seeded in func.tags


def _without_dropout(
    place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return the share that a kernel was to drop, and arguments by which it drops nothing."""
    if place < len(args):
        return args[place], (*args[:place], 0.0, *args[place + 1 :]), kwargs
    name = "dropout_p" if "dropout_p" in kwargs else "dropout"
    return kwargs.get(name), args, {**kwargs, name: 0.0} if name in kwargs else kwargs


def _is_idle(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether dropout drops nothing here."""
    return func is torch.ops.aten.native_dropout.default and (args[2] is False or args[1] == 0)


def _numbers_of(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> list[torch.Tensor]:
    """The tensors that hold what an operator has drawn: what it returned, and what it wrote to."""
    if func is torch.ops.aten.native_dropout.default:
        return [result[1]]
    found = [
        each for each in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(each, torch.Tensor)
    ]
    for place, argument in enumerate(func._schema.arguments):  # type: ignore[attr-defined]
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor) and all(value is not each for each in found):
                found.append(value)
    return found
