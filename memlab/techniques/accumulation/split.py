"""Splitting a model call into micro-batches: calls, layouts, outputs and the rules by which losses may add up.

A batch may be dimension 0 or 1 of its tensors; a loss may be a mean over rows, a mean over targets
that are not ignored, a sum, or a sum that the loop has divided already. None of this is written on
the model, so it is *probed* (`probe`): a few rows are run together and apart, without
gradients, and the rule that puts the parts together to the whole is kept. Models that no rule fits
are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memlab.runtime.tree import Structure, flatten, values_of
from memlab.techniques.accumulation.merge import Join

_IGNORED_TARGET = -100


@dataclass(frozen=True)
class Call:
    """Arguments of a model call, flattened."""

    leaves: tuple[Any, ...]
    spec: Structure

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        leaves, spec = flatten((tuple(args), dict(kwargs)))
        return cls(tuple(leaves), spec)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what two calls have in common that split alike: the same arguments, the same ones of them tensors."""
        return self.spec, tuple(leaf.dim() if isinstance(leaf, torch.Tensor) else -1 for leaf in self.leaves)

    def run(self, call: Callable[..., Any]) -> Any:
        args, kwargs = self.spec.put(self.leaves)
        return call(*args, **kwargs)

    def with_leaves(self, leaves: Sequence[Any]) -> Call:
        return Call(tuple(leaves), self.spec)

    def listed(self) -> Call:
        """Return the same arguments with each list of tensors, dicts, numbers or texts as one leaf, which may have an item per row."""
        args, kwargs = self.spec.put(self.leaves)
        leaves, spec = flatten((args, kwargs), lambda value: value is not args and _is_list_of_rows(value))
        return Call(tuple(leaves), spec)

    def by_list(self) -> dict[str, Any]:
        """Return what is in the arguments, by how one writes it; all that is in one list stands together."""
        whole = args, _kwargs = self.spec.put(self.leaves)
        leaves, spec = flatten(
            whole, lambda value: type(value) in (list, tuple) and value is not whole and value is not args
        )
        together = (tuple(flatten(leaf)[0]) if type(leaf) in (list, tuple) else leaf for leaf in leaves)
        return dict(zip(spec.names(), together, strict=True))


def _is_list_of_rows(value: Any) -> bool:
    return (
        type(value) in (list, tuple)
        and len(value) > 0
        and (
            all(isinstance(item, torch.Tensor) and item.dim() for item in value)
            or all(isinstance(item, dict) and item for item in value)
            or all(isinstance(item, (int, float, str)) for item in value)
        )
    )


@dataclass(frozen=True)
class Layout:
    """Leaves of a call that hold rows of the batch, and their dimensions."""

    rows: int  # rows of the batch
    # for each leaf that is split, its position and the dimension of the batch; the others go whole into every
    # micro-batch
    dims: tuple[tuple[int, int], ...]
    in_lists: bool = False  # rows are items of lists; leaves are those of `Call.listed`
    # where rows of different lengths follow one another in a leaf, its position and that of their lengths
    lengths: tuple[tuple[int, int], ...] = ()

    @property
    def split(self) -> tuple[int, ...]:
        """Positions of the leaves that are split."""
        return tuple(position for position, _ in self.dims)

    def dim_of(self, position: int) -> int:
        """Dimension of the batch in one of them."""
        return dict(self.dims)[position]

    def of(self, call: Call) -> Layout:
        """The same layout for another call of the kind."""
        position, dim = self.dims[0]
        return replace(self, rows=_rows(self.view(call).leaves[position], dim))

    def view(self, call: Call) -> Call:
        """The call with the leaves this layout counts."""
        return call.listed() if self.in_lists and not any(map(_is_list_of_rows, call.leaves)) else call

    def lists_in(self, call: Call) -> list[str]:
        """Return how one writes the lists of which each part gets items."""
        call = self.view(call)
        names = call.spec.names()
        return [names[i] for i in self.split if isinstance(call.leaves[i], (list, tuple))]

    def rows_in(self, part: Call) -> int:
        """Rows that a part of a call has."""
        position, dim = self.dims[0]
        return _rows(part.leaves[position], dim)

    def take(self, call: Call, start: int, stop: int) -> Call:
        def taken(leaf: Any, dim: int, ends: Sequence[int]) -> Any:
            if isinstance(leaf, (list, tuple)):
                return leaf[start:stop]
            rows = leaf.narrow(dim, ends[start], ends[stop] - ends[start])
            # as a smaller batch would be: of one with the time first, rows are not together, and `view` fails
            return rows if leaf.requires_grad or not leaf.is_contiguous() else rows.contiguous()

        return self._of_leaves(call, taken)

    def pick(self, call: Call, rows: Sequence[int]) -> Call:
        def picked(leaf: Any, dim: int, ends: Sequence[int]) -> Any:
            if isinstance(leaf, (list, tuple)):
                return type(leaf)(leaf[row] for row in rows)
            places = [place for row in rows for place in range(ends[row], ends[row + 1])]
            return leaf.index_select(dim, torch.tensor(places, device=leaf.device, dtype=torch.long))

        return self._of_leaves(call, picked)

    def _of_leaves(self, call: Call, part: Callable[[Any, int, Sequence[int]], Any]) -> Call:
        call = self.view(call)
        dims = dict(self.dims)
        ends = {i: [0, *accumulate(_numbers(call.leaves[of]))] for i, of in self.lengths}
        every = range(self.rows + 1)
        # models tell by identity that they are given one tensor several times
        parts = {
            (id(leaf), dims[i]): part(leaf, dims[i], ends.get(i, every))
            for i, leaf in enumerate(call.leaves)
            if i in dims
        }
        return call.with_leaves([parts[id(leaf), dims[i]] if i in dims else leaf for i, leaf in enumerate(call.leaves)])


def _rows(leaf: Any, dim: int) -> int:
    return len(leaf) if isinstance(leaf, (list, tuple)) else leaf.size(dim)


def is_sparse(leaf: Any) -> bool:
    """Return whether this is a tensor of which there are no views: one without storage of its own, or rows nested in a strided one."""
    if not isinstance(leaf, torch.Tensor):
        return False
    return leaf.layout is not (torch.jagged if leaf.is_nested else torch.strided)


def layouts_of(call: Call) -> list[Layout]:
    """Return the ways a call could be split, likeliest first: along dimension 0, then along lists, then along dimension 1.

    A square matrix among them may be a mask over positions that is as large as the batch by chance: such ways
    are followed by ones that leave such matrices whole. Where tensors differ (states of a recurrent layer have their batch
    in dimension 1), each is split where it has as many rows as the first. Ways for which numbers among the rows are the
    lengths of what follows one another in another tensor come before those that leave it whole.
    """
    found: list[Layout] = []
    sized = [(i, leaf) for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor) and not is_sparse(leaf)]
    for dim in (0, 1):
        sizes = [(i, leaf.size(dim)) for i, leaf in sized if leaf.dim() > dim]
        first = [sizes[0][1]] if sizes else []
        for rows in dict.fromkeys([max(size for _, size in sizes), *first] if dim and sizes else first):
            split = tuple((i, dim) for i, size in sizes if size == rows)
            without_squares = tuple(
                (i, dim) for i, _ in split if i == split[0][0] or call.leaves[i].shape != (rows, rows)
            )
            found += [Layout(rows, split), Layout(rows, without_squares)]
            for preferred in (0, 1):
                mixed = tuple(
                    (i, where)
                    for i, leaf in sized
                    if (where := dim if i == split[0][0] else _dim_with(leaf, rows, preferred)) is not None
                )
                found.append(Layout(rows, mixed))
        if dim == 0:
            found += _along_lists(call.listed())
    return list(dict.fromkeys(each for layout in found for each in (*_with_lengths(call, layout), layout)))


def _with_lengths(call: Call, layout: Layout) -> list[Layout]:
    """The same layout with whatever consists of rows whose lengths are among what it splits."""
    call = layout.view(call)
    whole = [
        (i, leaf.size(0))
        for i, leaf in enumerate(call.leaves)
        if i not in layout.split and isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    found = []
    for position in layout.split if whole else ():
        total = sum(_numbers(call.leaves[position]))
        lengths = tuple((i, position) for i, size in whole if size == total > 0)
        if lengths:
            found.append(replace(layout, dims=(*layout.dims, *((i, 0) for i, _ in lengths)), lengths=lengths))
    return found


def _numbers(leaf: Any) -> list[int]:
    """Return what may be lengths: a list of whole numbers, or a tensor of them, [rows]; else nothing."""
    if isinstance(leaf, torch.Tensor):
        is_number = leaf.dim() == 1 and not leaf.is_floating_point() and not leaf.is_complex()
        leaf = leaf.tolist() if is_number and not isinstance(leaf, FakeTensor) else []
    return [*leaf] if all(type(each) is int and each >= 0 for each in leaf) else []


def _along_lists(listed: Call) -> list[Layout]:
    lists = [(i, len(leaf)) for i, leaf in enumerate(listed.leaves) if _is_list_of_rows(leaf)]
    if not lists:
        return []
    rows = lists[0][1]
    beside = (
        (i, 0) for i, leaf in enumerate(listed.leaves) if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,)
    )
    return [Layout(rows, (*((i, 0) for i, size in lists if size == rows), *beside), in_lists=True)]


def _dim_with(leaf: torch.Tensor, rows: int, preferred: int) -> int | None:
    """Return where a tensor has so many rows; in three dimensions the preferred place, which for states is 1."""
    order = (1, 0) if preferred and leaf.dim() == 3 else (0, 1)
    return next((dim for dim in order if leaf.dim() > dim and leaf.size(dim) == rows), None)


def row_ranges(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut rows into parts whose sizes differ by one at most.

    Example:
        >>> row_ranges(7, 3)
        [(0, 3), (3, 5), (5, 7)]
    """
    size, larger = divmod(rows, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(starts))


@dataclass(frozen=True)
class LossRule:
    """Weights by which losses of micro-batches make the loss of the batch."""

    name: str  # "rows", "sum", or what is counted in which leaf
    leaf: int = -1  # position of the leaf that is counted, or -1
    shifted: bool = False  # the first position of each row is not counted (next-token targets)
    counts_ones: bool = False  # count what is not zero (a mask) instead of what is not ignored
    ignored: int = _IGNORED_TARGET  # the target that is not counted
    # what a target of each class counts, [c]; None where all count alike
    class_weights: torch.Tensor | None = field(default=None, compare=False)

    def count(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return what the targets in a leaf count."""
        leaf = values_of(leaf)
        considered = leaf[..., 1:] if self.shifted else leaf
        if leaf.is_floating_point():
            return considered.double().sum()
        if self.class_weights is not None:
            counted = (considered >= 0) & (considered < len(self.class_weights))
            return (self.class_weights.double()[considered.where(counted, 0)] * counted).sum()
        return (considered != 0).sum() if self.counts_ones else (considered != self.ignored).sum()


def counts_by(rules: Sequence[LossRule], parts: Sequence[Call], layout: Layout) -> list[list[float]]:
    """Return what each part weighs by each rule, before dividing by the total.

    What is counted comes to the host in one transfer: each would have the host wait for all that a GPU has to do.
    """
    counted = [rule.count(part.leaves[rule.leaf]) for rule in rules if rule.leaf >= 0 for part in parts]
    device = next((count.device for count in counted if count.device.type != "cpu"), None)
    found = iter(torch.stack([count.to(device, torch.float64) for count in counted]).tolist() if counted else ())
    return [[float(layout.rows_in(part)) if rule.leaf < 0 else next(found) for part in parts] for rule in rules]


def weights_by(rules: Sequence[LossRule], parts: Sequence[Call], layout: Layout) -> list[list[float]]:
    """Return the weight of each part's loss in that of the batch, by each rule."""
    return [
        [1.0 if rule.name == "sum" else count / total if total else 0.0 for count in counts]
        for rule, counts in zip(rules, counts_by(rules, parts, layout), strict=True)
        for total in (sum(counts),)
    ]


def loss_rules(
    call: Call, layout: Layout, class_weights: Sequence[torch.Tensor] = (), ignored: Sequence[int] = ()
) -> list[LossRule]:
    """Every rule that could hold for this call; `ignored` are targets that the model may ignore beside torch's own."""
    rules = [LossRule("rows"), LossRule("sum")]
    for position in layout.split:
        leaf = call.leaves[position]
        if not isinstance(leaf, torch.Tensor) or leaf.is_complex():
            continue
        if leaf.is_floating_point():
            if leaf.dim() <= 2:  # weights of rows or of places in them
                rules.append(LossRule("weights", position))
            continue
        for shifted in (False, True) if leaf.dim() >= 2 else (False,):
            rules.append(LossRule("targets", position, shifted))
            rules += [LossRule("targets", position, shifted, ignored=each) for each in ignored]
            rules.append(LossRule("mask", position, shifted, counts_ones=True))
            rules += [LossRule("classes", position, shifted, class_weights=each) for each in class_weights]
    return rules


@dataclass(frozen=True)
class Division:
    """A call cut into micro-batches."""

    micro_batches: list[Call]  # the parts
    layout: Layout  # along which dimensions they were cut
    # for each scalar output that has a rule, the weight of each micro-batch in the whole batch
    weights: Mapping[int, list[float]]
    joins: tuple[Join | None, ...]  # for each output where it is joined, or None
    whole: Call | None = None  # the call; None where these are some of its parts

    @cached_property
    def rows(self) -> list[int]:
        """Rows of each micro-batch."""
        return [self.layout.rows_in(part) for part in self.micro_batches]


@dataclass(frozen=True)
class Outputs:
    """A model's output, flattened, with the place of its loss, followed by what it left elsewhere."""

    leaves: tuple[Any, ...]  # tensors and other values, in order
    spec: Structure  # how to put them together again: the output, and the values left elsewhere by name
    loss: int  # position of the loss, or -1 when there is none to build on
    scalars: tuple[int, ...]  # positions of all floating-point scalars of the output
    returned: int  # how many of the leaves belong to the output

    @classmethod
    def of(cls, output: Any, left: Mapping[str, Any] | None = None) -> Outputs:
        leaves, spec = flatten(output)
        scalars = tuple(i for i, leaf in enumerate(leaves) if _is_scalar(leaf))
        loss = _loss_position(output, leaves, scalars)
        others, other_spec = flatten(dict(left or {}))
        both = Structure(tuple, ("", "left"), (spec, other_spec), tuple)
        return cls((*leaves, *others), both, loss, scalars, len(leaves))

    def without_graph(self) -> Outputs:
        """Return the same values, as a call without gradients gives them."""
        return replace(self, leaves=tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in self.leaves))

    def without_tensors(self) -> Outputs:
        """The same structure holding no tensor, so that none is kept alive by it."""
        return replace(self, leaves=tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves))

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The output with these leaves; those left elsewhere may be missing."""
        return self.spec.children[0].put(leaves[: self.returned])

    def left(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Return what was left elsewhere, by name, with these leaves."""
        values: dict[str, Any] = self.spec.children[1].put(leaves[self.returned :])
        return values

    def name_of(self, position: int) -> str:
        """Return how errors call a leaf."""
        names = self.spec.names()
        if position >= self.returned:
            return re.sub(r"^left\[(['\"])(.*?)\1\]", r"\2", names[position])
        return f"output{names[position]}"


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() == 1 and leaf.dim() <= 1


def _loss_position(output: Any, leaves: list[Any], scalars: tuple[int, ...]) -> int:
    named = output.get("loss") if isinstance(output, Mapping) else None
    if named is None and not isinstance(output, (torch.Tensor, tuple, list)):
        named = getattr(output, "loss", None)
    if named is not None:
        return next((i for i in scalars if leaves[i] is named), -1)
    return scalars[0] if len(scalars) == 1 else -1
