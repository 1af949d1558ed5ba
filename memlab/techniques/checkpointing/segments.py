"""Choice of the parts to recompute in a model without repeated blocks.

Rules:

1. A candidate is a module within the model, or consecutive children of a plain `nn.Sequential`.
2. Before anything is known, parts are cut so that each has about half the square root of all layers with weight matrices:
   the square root would be best if layers kept equally much (Chen et al., https://arxiv.org/abs/1604.06174), but the first ones
   of a model for images keep far more than the others.
3. The first training call of the model measures what every module's graph keeps (`look`). From then on the parts are those
   for which what is kept between them plus the largest of them is least.
4. A part does not begin with what writes to its input, as an activation in place does: its input would have to be copied.
5. A part that frees less than a hundredth of what the model keeps is left alone, and so is the model as a whole, as
   recomputing everything at once frees nothing where memory is highest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from memlab.techniques.checkpointing.rerun import Part

# of all that is kept, below which recomputing a part is not worth it
_LEAST_SHARE = 0.01
# limits of the largest part that are tried
_MOST_LIMITS = 24


def first_parts(model: nn.Module) -> list[Part]:
    """Parts cut by their number of layers, of which each has more than a single layer.

    Example:
        >>> model = nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(4, 4), nn.GELU())))
        >>> [part.span for part in first_parts(model)]
        [(0, 4), (4, 8), (8, 12), (12, 16), (16, 18)]
        >>> first_parts(nn.Linear(4, 4))
        []
    """
    most = max(1, round(math.sqrt(_layers(model)) / 2))
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[tuple[int, tuple[int, int] | None], Part] = {}
    for owner, span in _cut(model, model, most):
        found.setdefault((id(owner), span), part_of(owner, span, names))
    return list(found.values())


def part_of(owner: nn.Module, span: tuple[int, int] | None, names: dict[int, str]) -> Part:
    """A part with the name that people know it by."""
    name = names.get(id(owner)) or type(owner).__name__
    if span is None:
        return Part(owner, name)
    keys = list(owner._modules)[slice(*span)]
    return Part(owner, f"{name}[{keys[0]}..{keys[-1]}]", span)


def _cut(module: nn.Module, model: nn.Module, most: int) -> Iterator[tuple[nn.Module, tuple[int, int] | None]]:
    if is_plain_sequential(module):
        yield from _cut_run(module, model, most)
        return
    may_be_one = module is not model and not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and _layers(module) > 0
    is_small = may_be_one and _layers(module) <= most
    found = [] if is_small else [cut for child in module.children() for cut in _cut(child, model, most)]
    if found:
        yield from found
    elif may_be_one and _has_inside(module):
        yield module, None


def _cut_run(sequential: nn.Module, model: nn.Module, most: int) -> Iterator[tuple[nn.Module, tuple[int, int] | None]]:
    start, inside = 0, 0
    children = list(sequential.children())
    if len(children) != len(sequential._modules):  # the same child twice, which `children` gives once
        children = [child for child in sequential._modules.values() if child is not None]
    for place, child in enumerate(children):
        layers = _layers(child)
        if inside and inside + layers > most:
            yield from _run_of(sequential, children, start, place)
            start, inside = place, 0
        if layers > most:
            yield from _run_of(sequential, children, start, place)
            yield from _cut(child, model, most)
            start = place + 1
        else:
            inside += layers
    yield from _run_of(sequential, children, start, len(children))


def _run_of(
    sequential: nn.Module, children: Sequence[nn.Module], start: int, stop: int
) -> Iterator[tuple[nn.Module, tuple[int, int] | None]]:
    run = children[start:stop]
    is_single_layer = len(run) == 1 and not _has_inside(run[0])
    if run and not is_single_layer and any(_layers(child) for child in run):
        yield sequential, (start, stop)


def _has_inside(module: nn.Module) -> bool:
    """Return whether a module may keep more for its backward pass than its input and its output: it is no single layer of torch's."""
    is_users = not type(module).__module__.startswith("torch.nn.")
    return is_users or isinstance(module, nn.RNNBase) or any(True for _ in module.children())


def is_plain_sequential(module: nn.Module) -> bool:
    """Return whether calling a module calls its children one after the other, and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _layers(module: nn.Module) -> int:
    """Layers with a weight matrix."""
    return sum(
        any(p is not None and p.dim() >= 2 for p in part._parameters.values()) or _is_computed(part)
        for part in module.modules()
    )


def _is_computed(module: nn.Module) -> bool:
    """Return whether a layer's weight is made of other parameters (parametrizations, weight norm)."""
    return "parametrizations" in module._modules


# --- by what was measured ---------------------------------------------------------------------------


@dataclass(eq=False)
class Node:
    """One call of a module in the first training call, and what it keeps for the backward pass."""

    module: nn.Module  # that was called
    inputs: dict[int, int] = field(default_factory=dict)  # bytes of the storages that came in, by number
    input_key: int | None = None  # number of the storage of its first tensor
    output_key: int | None = None  # number of the storage of its only output
    own_bytes: int = 0  # what its graph keeps beside inputs and output, as far as its parts are not recomputed
    cost: float = 0.0  # of running it, in operations
    writes: bool = False  # it writes to its inputs
    is_fixed: bool = False  # its calls must stay whole or be left alone: it gave other results when it was run again
    children: list[Node] = field(default_factory=list)  # calls within it, in order
    hidden: int = 0  # bytes of its own that children recomputed together did not show
    alive: dict[int, int] = field(default_factory=dict)  # bytes of the inputs of children that it keeps, by number
    recomputed: bool = False  # it was, in this call, so that it kept nothing

    @property
    def rest_bytes(self) -> int:
        """Return what it keeps beside its children."""
        return max(0, self.own_bytes + self.hidden - sum(0 if c.recomputed else c.own_bytes for c in self.children))

    @property
    def all_bytes(self) -> int:
        """Return what it keeps where nothing is recomputed."""
        return self.rest_bytes + sum(child.all_bytes for child in self.children)

    @property
    def may_be_part(self) -> bool:
        return not self.is_fixed and all(child.may_be_part for child in self.children)


@dataclass(frozen=True)
class CheckpointSegment:
    """A part that may be chosen."""

    owner: nn.Module  # the module whose forward is replaced
    span: tuple[int, int] | None  # its children, or None for the module itself
    freed_bytes: int  # by recomputing it
    cost: float  # of that, in operations
    inputs: dict[int, int]  # bytes of storages that it keeps either way, by number


@dataclass(frozen=True)
class Segmentation:
    """Parts to recompute."""

    segments: tuple[CheckpointSegment, ...]  # in the order in which they run
    kept_bytes: int  # between them
    all_bytes: int  # that are kept where nothing is recomputed

    @property
    def needed_bytes(self) -> int:
        """Return what is kept between segments, and the largest of them."""
        return self.kept_bytes + max((segment.freed_bytes for segment in self.segments), default=0)


def best_segments(root: Node) -> Segmentation:
    """Choose segments so that what is kept between them plus the largest is least."""
    total = root.all_bytes
    sizes = sorted({size for size in _sizes(root) if size >= _LEAST_SHARE * total})
    if len(sizes) > _MOST_LIMITS:
        sizes = [sizes[round(place * (len(sizes) - 1) / (_MOST_LIMITS - 1))] for place in range(_MOST_LIMITS)]
    least = _LEAST_SHARE * total
    best = Segmentation((), total, total)
    for limit in sizes:
        kept, segments = _Cut(limit, least).within(root)
        found = Segmentation(tuple(segments), kept, total)
        if found.needed_bytes < best.needed_bytes:
            best = found
    return best


def _sizes(node: Node) -> Iterator[int]:
    """Bytes that candidates would free."""
    for child in node.children:
        yield child.all_bytes
        yield from _sizes(child)
    if _is_run(node):
        yield from (size for row in _run_sizes(node) for size in row)


def _is_run(node: Node) -> bool:
    return is_plain_sequential(node.module) and [id(c.module) for c in node.children] == [
        id(child) for child in node.module._modules.values()
    ]


def _run_sizes(node: Node) -> list[list[int]]:
    """Return what consecutive children keep: [first][how many - 1], in bytes."""
    children = node.children
    own = [child.all_bytes for child in children]
    table: list[list[int]] = []
    for start, first in enumerate(children):
        row, size, between = [], 0, dict[int, int]()
        for stop in range(start, len(children)):
            key = children[stop].input_key
            if stop > start and key is not None and key != first.input_key:
                between[key] = node.alive.get(key, 0)
            size += own[stop]
            passed_on = children[stop].output_key
            row.append(size + sum(bytes_ for key, bytes_ in between.items() if key != passed_on))
        table.append(row)
    return table


class _Cut:
    """Segments of at most so many bytes, with the least kept between them."""

    def __init__(self, limit: int, least: float) -> None:
        self._limit, self._least = limit, least

    def within(self, node: Node) -> tuple[int, list[CheckpointSegment]]:
        """Return what is kept within a node whose own call is not recomputed, and its segments."""
        if _is_run(node):
            return self._run(node)
        kept, segments = node.rest_bytes, []
        for child in node.children:
            child_kept, found = self._of(child)
            kept += child_kept
            segments += found
        return kept, segments

    def _of(self, node: Node) -> tuple[int, list[CheckpointSegment]]:
        freed = node.all_bytes
        if self._least <= freed <= self._limit and node.may_be_part and not node.writes:
            return 0, [CheckpointSegment(node.module, None, freed, _cost(node), node.inputs)]
        return self.within(node)

    def _run(self, node: Node) -> tuple[int, list[CheckpointSegment]]:
        children, sizes = node.children, _run_sizes(node)
        # from the end: the least that children from a place on keep
        best: list[tuple[int, list[CheckpointSegment]]] = [(0, [])]
        for start in range(len(children) - 1, -1, -1):
            first = children[start]
            came_in = first.input_key is None or first.input_key in node.inputs
            kept, inner = self.within(first)
            # written in place, one storage comes into two children
            is_counted = start > 0 and first.input_key == children[start - 1].input_key
            is_kept = not (came_in or is_counted or first.input_key is None)
            boundary = node.alive.get(first.input_key or 0, 0) if is_kept else 0
            after, segments = best[-1]
            found = (kept + boundary + after, [*inner, *segments])
            if not first.writes:
                entering = 0 if came_in else sum(first.inputs.values())
                for count, freed in enumerate(sizes[start], 1):
                    run = children[start : start + count]
                    if freed > self._limit or not run[-1].may_be_part:
                        break
                    after, segments = best[-count]
                    if freed >= self._least and entering + after < found[0]:
                        cost = sum(_cost(child) for child in run)
                        segment = CheckpointSegment(node.module, (start, start + count), freed, cost, first.inputs)
                        found = (entering + after, [segment, *segments])
            best.append(found)
        return best[-1]


def _cost(node: Node) -> float:
    ran_twice = any(child.recomputed for child in node.children)
    return sum(_cost(child) for child in node.children) if ran_twice else node.cost
