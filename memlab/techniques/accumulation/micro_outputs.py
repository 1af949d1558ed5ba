"""`MicroOutputs`: what micro-batches return and leave behind, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memlab.runtime.aliases import same_values
from memlab.runtime.containers import Effect
from memlab.runtime.lazy import LAZY_FROM_BYTES, LazyTensor, real
from memlab.runtime.tree import Structure, flatten
from memlab.techniques.accumulation.merge import Chain, Join, Merge, UnsettledError, closed, opened
from memlab.techniques.accumulation.merge import equal as _is_same
from memlab.techniques.accumulation.sharing import Sharing
from memlab.techniques.accumulation.split import Division, Outputs
from memlab.techniques.accumulation.verdict import SplitVerdict, start_of, unjudged


@dataclass
class Joined:
    """One output, gathered over micro-batches."""

    join: Join | None  # where it is joined; None for scalars and values all micro-batches share
    weights: list[float] | None  # one per micro-batch for a scalar, else None
    rows: Sequence[int]  # of each micro-batch
    shape: torch.Size  # shape of one part; where it is joined only the sum counts
    dtype: torch.dtype
    device: torch.device
    differentiable: bool = False
    waits: bool = False  # whether it is computed on demand, as its first part has decided for all
    sizes: list[int] = field(default_factory=list)  # size of each part where it is joined
    # detached parts until a backward pass is over, empty when the output is computed on demand
    parts: list[torch.Tensor] = field(default_factory=list)
    whole: torch.Tensor | None = None  # with the parts in their places, where they are not kept

    def put(self, part: torch.Tensor) -> None:
        """Write a part to its place in the whole, as long as parts have equal shapes; the first tells how large that is."""
        assert self.join is not None
        dim, done = self.join.dim, self.sizes[:-1]
        if not done and part.is_contiguous() and not self.join.is_inner and part.size(dim) % self.rows[0] == 0:
            of_all = part.size(dim) // self.rows[0] * sum(self.rows)
            self.whole = part.new_empty([*part.shape[:dim], of_all, *part.shape[dim + 1 :]])
        if self.whole is not None:
            alike = [*part.shape[:dim], *part.shape[dim + 1 :]] == [
                *self.whole.shape[:dim],
                *self.whole.shape[dim + 1 :],
            ]
            if alike and part.size(dim) == self.whole.size(dim) // sum(self.rows) * self.rows[len(done)]:
                self.parts = [self.whole]
                self.whole.narrow(dim, sum(done), part.size(dim)).copy_(part)
                return
            self.parts = [*torch.split(self.whole.narrow(dim, 0, sum(done)), done, dim)]
            self.whole = None
        self.parts.append(part)

    def value(self) -> torch.Tensor:
        if self.whole is not None:
            return self.whole
        if self.weights is not None:
            weighted = [part * weight for part, weight in zip(self.parts, self.weights, strict=True) if weight]
            return torch.stack(weighted).sum(0) if weighted else torch.zeros_like(self.parts[0])
        if self.join is None:
            return self.parts[0].clone()
        return self.join.of(self.parts, self.rows)

    def whole_shape(self) -> list[int]:
        assert self.join is not None
        return [*self.shape[: self.join.dim], sum(self.sizes), *self.shape[self.join.dim + 1 :]]

    def share(self, gradient: torch.Tensor, index: int, shape: torch.Size) -> torch.Tensor | None:
        """The part of the joined output's gradient that belongs to one micro-batch."""
        if self.weights is not None:
            return gradient * self.weights[index]
        if self.join is None:
            return gradient if index == 0 else None
        return self.join.share(gradient, index, self.sizes, self.rows, shape)


class MicroOutputs:
    """Outputs of micro-batches, and what they left elsewhere, gathered one micro-batch after another."""

    def __init__(self, division: Division, verdict: SplitVerdict | None, *, repeats: bool) -> None:
        self._division = division  # the micro-batches, with what is known of how their outputs are put together
        # of the judge: how the rest of what the parts give is put together; None where nobody looked
        self._verdict = verdict
        self._repeats = repeats  # whether micro-batches run a second time, which decides nothing
        self.template: Outputs  # structure of the model's output, from the newest micro-batch
        self.sharing = Sharing()
        self.joined: dict[int, Joined] = {}  # outputs with a place in the graph, by position
        self.eager: list[int] = []  # positions of those that were computed
        self._spec: Structure | None = None
        self._places: list[tuple[Effect, int]] = []  # of each leaf left elsewhere
        self._plain: dict[int, list[Any]] = {}

    @property
    def loss(self) -> int:
        """Position of the loss among the outputs."""
        return self.template.loss

    # -- gathering -----------------------------------------------------------------------------

    def note_left(self, effects: Mapping[str, Effect]) -> None:
        """Note where a micro-batch has left something; the first one's places are those of all.

        Raises:
            UnsettledError: the places held something else before than when the judge looked.
        """
        if self._places:
            return
        judged = None if self._repeats else self._verdict
        if judged is not None and start_of(effects, self._division.layout.rows) not in judged.starts:
            raise UnsettledError
        for effect in effects.values():
            count = len(flatten(closed(effect))[0])
            self._places += [(replace(effect, value=None), place) for place in range(count)]

    def add(self, outputs: Outputs, *, keeps_large: bool, keeps_parts: bool = True) -> None:
        """Add what one micro-batch gave.

        Args:
            outputs: that.
            keeps_large: whether large outputs are kept, instead of computed again when the loop looks at them.
            keeps_parts: whether parts are kept until `drop_parts`, instead of the whole alone.

        Raises:
            UnsettledError: it is something else than other micro-batches gave, or the judge saw.
        """
        is_first = self._spec is None
        if self._verdict is not None and not (
            (is_first or outputs.spec == self._spec) and self._verdict.knows(outputs)
        ):
            raise UnsettledError
        self._spec = outputs.spec
        self.template = outputs.without_tensors()
        for position, leaf in enumerate(outputs.leaves):
            if self._is_plain(position, leaf):
                value = real(leaf).detach() if isinstance(leaf, torch.Tensor) else leaf
                self._plain.setdefault(position, []).append(value)
            elif isinstance(leaf, torch.Tensor):
                self._add_joined(position, leaf, keeps_large=keeps_large, keeps_parts=keeps_parts)

    def _add_joined(self, position: int, leaf: torch.Tensor, *, keeps_large: bool, keeps_parts: bool) -> None:
        joined = self.joined.get(position)
        if joined is None:
            joined = self._new_joined(position, leaf)
            joined.waits = not keeps_large and joined.join is not None and self._may_wait(leaf)
        if joined.join is not None:
            joined.sizes.append(leaf.size(joined.join.dim))
        if joined.waits:
            # logits of a chunked loss are not computed for this
            joined.differentiable |= isinstance(leaf, LazyTensor) or leaf.requires_grad
            return
        value = real(leaf)
        joined.differentiable |= value.requires_grad or (self._repeats and value.is_floating_point())
        merge = self._merge_of(position)
        if keeps_parts or joined.join is None or (merge is not None and merge.others):
            joined.parts.append(value.detach())
        else:
            joined.put(value.detach())

    def _may_wait(self, leaf: torch.Tensor) -> bool:
        """Return whether an output is left out until somebody looks at it: a large one, or one not computed anyway."""
        rows = self._division.rows
        size_bytes = leaf.numel() * leaf.element_size() * sum(rows) / max(1, rows[0])
        return isinstance(leaf, LazyTensor) or size_bytes > LAZY_FROM_BYTES

    def _is_plain(self, position: int, leaf: Any) -> bool:
        """Return whether a leaf is put together outside of the graph."""
        if self._verdict is None:
            return False
        if not isinstance(leaf, torch.Tensor):
            return True
        merge = self._merge_of(position)
        if position < self.template.returned:
            return merge is not None and not merge.has_graph and merge.kind in ("change", "sum", "largest", "smallest")
        return merge is None or not merge.has_graph

    def _new_joined(self, position: int, leaf: torch.Tensor) -> Joined:
        merge, rows = self._merge_of(position), self._division.rows
        if merge is not None:
            join = merge.join if merge.kind == "join" else None
            weights = merge.weights(rows)
        else:
            join, weights = self._known_join(position)
        joined = self.joined[position] = Joined(join, weights, rows, leaf.shape, leaf.dtype, leaf.device)
        return joined

    def _known_join(self, position: int) -> tuple[Join | None, list[float] | None]:
        """Return where an output is joined, or the weight of each part, as the probe has found."""
        joins = self._division.joins
        # of one row, an output for each row looks like a scalar
        is_scalar = position in self.template.scalars and not (position < len(joins) and joins[position] is not None)
        weights = self._division.weights.get(position) if is_scalar else None
        if is_scalar and weights is None:
            parts = len(self._division.micro_batches)
            weights = [1 / parts] * parts
        return None if is_scalar else joins[position], weights

    def _merge_of(self, position: int) -> Merge | None:
        """Return how the judge found that an output or something left elsewhere is put together."""
        if self._verdict is None:
            return None
        if position < self.template.returned:
            return self._verdict.merges.get(position)
        effect, place = self._places[position - self.template.returned]
        left = self._verdict.left.get(effect.name)
        return left.merges[place] if left is not None and left.merges is not None else None

    # -- putting together ----------------------------------------------------------------------

    def values(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the joined outputs that were computed, and those among them that have no gradient.

        Raises:
            UnsettledError: they do not agree with what the judge has found.
            RefusalError: one that nobody has judged has no rows, and is another one for each part.
        """
        shared = self.sharing.positions
        self.eager = [position for position, each in self.joined.items() if each.parts and position not in shared]
        joined = [self.joined[position] for position in self.eager]
        values = [one.value() for one in joined]
        for position in self.eager if self._verdict is None and not self._repeats else ():
            one = self.joined[position]
            if (
                one.weights is None
                and one.join is None
                and not all(same_values(one.parts[0], each) for each in one.parts)
            ):
                raise unjudged(
                    f"{self.template.name_of(position)} has no rows, and is another one for each part of a batch"
                )
        for position in self.eager if self._verdict is not None and not self._repeats else ():
            merge = self._merge_of(position)
            if merge is not None and (merge.others or merge.kind == "same"):
                merge.value(None, self.joined[position].parts, self._division.rows)
        return values, [value for value, one in zip(values, joined, strict=True) if not one.differentiable]

    def leaves(self, values: Sequence[torch.Tensor]) -> list[Any]:
        """Return the leaves of the whole output, and of what is left elsewhere."""
        leaves = list(self.template.leaves)
        for position, value in zip(self.eager, values, strict=True):
            leaves[position] = value
        for position in self._plain.keys() - self.sharing.positions:
            parts = self._plain[position]
            leaves[position] = self._plain_value(position, parts)
        return leaves

    def waiting(self) -> dict[int, Joined]:
        """Return the outputs that are computed only when somebody looks at them, by position."""
        others = {*self.eager, *self.sharing.positions}
        return {position: joined for position, joined in self.joined.items() if position not in others}

    def leave(self, leaves: Sequence[Any]) -> None:
        """Write what the forward leaves elsewhere, put together."""
        if not self._places:
            return
        values = self.template.left(leaves)
        for effect in {effect.name: effect for effect, _ in self._places}.values():
            effect.write(opened(values[effect.name]))

    def _plain_value(self, position: int, parts: list[Any]) -> Any:
        """A value without a gradient, of the values that parts gave."""
        effect, place, left = None, 0, None
        if position >= self.template.returned:
            effect, place = self._places[position - self.template.returned]
            left = self._verdict.left.get(effect.name) if self._verdict is not None else None
        if isinstance(parts[0], Chain):
            return Chain.of(parts, left.merges if left is not None else (), self._division.rows)
        merge = self._merge_of(position)
        if merge is not None:
            before = None
            if any(each.kind == "change" for each in (merge, *merge.others)) and effect is not None:
                before = [*flatten(effect.before)[0], *[None] * (place + 1)][place]
                if before is None:
                    raise UnsettledError
            return merge.value(before, parts, self._division.rows)
        if all(_is_same(part, parts[0]) for part in parts):
            return parts[0]
        raise UnsettledError

    # -- going back ----------------------------------------------------------------------------

    def shares(
        self, outputs: Outputs, wanted: Mapping[int, torch.Tensor], index: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return outputs of one micro-batch, each with its part of the gradient that the loop sends."""
        pairs = []
        for position, gradient in wanted.items():
            leaf = real(outputs.leaves[position])
            share = self.joined[position].share(gradient, index, leaf.shape)
            if share is not None and leaf.requires_grad:
                pairs.append((leaf, share.reshape(leaf.shape)))
        return pairs

    def has_rule(self, position: int) -> bool:
        """Return whether a rule says how an output's gradient is that of its parts; without one a scalar is their mean."""
        is_scalar = self.joined[position].weights is not None
        is_known = position in self._division.weights or (
            self._verdict is not None and position in self._verdict.merges
        )
        return is_known or not is_scalar or position >= self.template.returned

    def drop_parts(self) -> None:
        """Let go of the parts of outputs: the backward pass is over."""
        for joined in self.joined.values():
            joined.parts.clear()
