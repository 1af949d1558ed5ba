"""The first batch of each shape is the judge: its rows are run together and apart, and have to give the same.

Numbered rules:

1. Both runs are as in training: in train mode, with gradients, through all techniques below, with the same random numbers
   (`noise`). Nothing is left behind by either: buffers, attributes, whatever hooks keep, random states and gradients are put
   back (`surroundings`).
2. Held against each other are outputs, the gradient of the loss (without one: of a random combination of the outputs) by every
   parameter and input, and everything left elsewhere. How the latter is put together is found out here as well (`merge`).
3. A gradient may differ by `TOLERANCE` of its size, or of a partial sum's where parts cancel, or of a twentieth of that of the
   largest gradient; an output by that share of its largest value. In half precision by `LOW_TOLERANCE`. Where a gradient differs
   by more, the run together is repeated with noise on its products (`rounding`), and may differ by some times as much as that
   changes it. Where half precision rounds more away than that (in sums over many rows), both are repeated in fp32.
4. It is done with all rows, or if memory does not suffice with those of one micro-batch. Where that is one row, and two do not fit,
   there is no judgement. What all rows, or as many as fit, return and leave is compared in either case, without gradients
   (`Judge.compared_rows`).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError, first_line
from memlab.runtime import accelerator
from memlab.runtime.autocast import CallContext
from memlab.runtime.fp32_products import exact_products
from memlab.runtime.lazy import as_saved
from memlab.runtime.lifetimes import storage_of
from memlab.runtime.out_of_memory import is_out_of_memory, release
from memlab.techniques.accumulation.agreement import DisagreementError, OtherResultsError
from memlab.techniques.accumulation.judgement import Judgement, SumsError
from memlab.techniques.accumulation.noise import Order, StrangeDrawError
from memlab.techniques.accumulation.probe import Probe
from memlab.techniques.accumulation.rounding import in_full
from memlab.techniques.accumulation.rows import unlike_rows
from memlab.techniques.accumulation.split import Call, Layout, row_ranges
from memlab.techniques.accumulation.verdict import SplitVerdict, unjudged

_FIELD = "accumulation"
# share of the free memory that the run together may be expected to take
_SHARE_OF_FREE = 0.7


class Judge:
    """Judges splits of one model's calls."""

    def __init__(
        self,
        model: nn.Module,
        name: str,  # how errors call it
        probe: Probe,  # knows how its losses add up
        per_part: tuple[type[nn.Module], ...] = (),  # kinds of modules that are to take their statistics from each part
        *,
        is_low: bool = False,  # whether the plan computes in half precision
    ) -> None:
        self._model = model
        self._name = name
        self._probe = probe
        # how many rows of the last call were run together and apart, at least without gradients
        self.compared_rows = 0
        self.unseen = ""  # why rows could not be run without gradients, where that is no lack of memory
        self._values: SplitVerdict | None = None  # of what was compared without gradients
        self._is_low = is_low or probe.is_low
        # of the last comparison: whether random numbers were drawn, and whether it has shown other results
        self.draws = self.differs = False
        # one comparison; it is given the call, and which rows of which layout
        self._attempt = partial(Judgement, model, name, probe, per_part, self._is_low)

    def judge(self, call: Callable[..., Any], whole: Call, layout: Layout, parts: int) -> SplitVerdict | None:
        """Return whether this call may be split into so many parts.

        Returns:
            What was found out; None if not even two rows can be run together, but one may.
        """
        whole = layout.view(whole)
        rows = layout.rows
        micro_rows = -(-rows // parts)
        ranges = row_ranges(rows, parts)
        compared = partial(self._compared_without_gradients, call, whole, layout, micro_rows)
        while True:
            oom: BaseException | None = None
            try:
                # steps of the plan run as many rows as a part has, so that only running them tells whether they fit
                if rows > max(2, micro_rows) and not self.has_room_for(call, whole, layout, rows):
                    raise torch.OutOfMemoryError("rows together are expected to take more memory than is free")
                verdict = self.compared(call, _some(whole, layout, rows), layout, ranges)
                self.compared_rows = rows if rows == layout.rows else compared(verdict)
                return verdict
            except BaseException as error:
                # a technique below may have no room for so many rows in the budget it was given
                is_of_another = isinstance(error, RefusalError) and error.technique != _FIELD
                if not (is_out_of_memory(error) or is_of_another):
                    raise
                if rows <= max(2, micro_rows) and micro_rows > 1:
                    raise
                oom = error
            release(oom)
            gc.collect()
            if rows <= 2:
                self.compared_rows = compared(None)
                return None
            rows = max(2, micro_rows)
            ranges = row_ranges(rows, 2)

    def values_of(self, call: Callable[..., Any], whole: Call, layout: Layout, parts: int) -> SplitVerdict | None:
        """The same of a call without gradients, of which values alone count.

        Raises:
            RefusalError: rows depend on each other, or something is left in the model.
        """
        whole = layout.view(whole)
        self.compared_rows = self._compared_without_gradients(call, whole, layout, -(-layout.rows // parts), None)
        return self._values

    def compared(
        self, call: Callable[..., Any], whole: Call, layout: Layout, ranges: list[tuple[int, int]]
    ) -> SplitVerdict:
        """Judge rows together and in parts of these rows; in half precision once more with less rounding, where they give something else."""
        try:
            with exact_products():
                return self._judged(call, whole, layout, ranges)
        except RefusalError as refusal:
            if refusal.technique != _FIELD or not (self._is_low or CallContext().is_on):
                raise
            # a traceback would hold this frame, which names it, and those that called it with what they return
            refused = refusal.with_traceback(None)
        release(refused)  # of the graphs that were compared
        # rounding may be most of a gradient; there may be no room in full precision, or code that takes no other
        with suppress(Exception), exact_products(), in_full():
            return self._judged(call, whole, layout, ranges)
        raise refused

    def _judged(
        self, call: Callable[..., Any], whole: Call, layout: Layout, ranges: list[tuple[int, int]]
    ) -> SplitVerdict:
        first: DisagreementError | None = None
        draws_on_host = False
        has_views = False
        for order in Order:
            if order is Order.VIEWS and not has_views:
                continue
            for goes_on in (self._probe.goes_on, not self._probe.goes_on):
                attempt = self._attempt(call, whole, layout, ranges)
                try:
                    return attempt.verdict(order=order, goes_on=goes_on)
                except SumsError:
                    attempt.put_back()
                    return attempt.verdict(order=order, goes_on=goes_on)
                except StrangeDrawError:
                    first = first or DisagreementError(
                        f"the random numbers that {self._name} draws do not follow the rows of its batch"
                    )
                    break
                except DisagreementError as disagreement:
                    first = first or disagreement.with_traceback(None)  # whose frames hold the graphs, and this name
                    draws_on_host = attempt.draws_on_host
                    if not draws_on_host:
                        break
                finally:
                    noise = attempt.noise
                    self.draws = noise.any_drawn or noise.draws_inside or attempt.draws_on_host
                    attempt.put_back()
            has_views = attempt.noise.has_views
            if not attempt.noise.any_drawn:
                break
        assert first is not None
        self.differs = isinstance(first, OtherResultsError)
        unless = (
            ", unless it is for the random numbers of Python or NumPy, which do not follow its rows"
            if draws_on_host
            else ""
        )
        raise RefusalError(_FIELD, first.reason + unless, first.instead)

    def _compared_without_gradients(
        self, call: Callable[..., Any], whole: Call, layout: Layout, micro_rows: int, verdict: SplitVerdict | None
    ) -> int:
        """Compare what rows return and leave, without gradients: all rows, or as many as fit; return how many.

        Raises:
            RefusalError: they give something else.
        """
        rows, known = layout.rows, verdict.rows if verdict is not None else 1
        while rows > known:
            is_seen = self._compares_values(call, _some(whole, layout, rows), layout, -(-rows // micro_rows), verdict)
            gc.collect()
            if is_seen:
                return rows
            rows //= 2
        return known if verdict is not None else 0

    def _compares_values(
        self, call: Callable[..., Any], whole: Call, layout: Layout, parts: int, verdict: SplitVerdict | None
    ) -> bool:
        """Compare what rows return and leave, without gradients; False where that cannot be seen."""
        ranges = row_ranges(layout.rows_in(whole), parts)
        goes_on = self._probe.goes_on if verdict is None else verdict.goes_on
        for order in Order if verdict is None else (verdict.order,):
            attempt = self._attempt(call, whole, layout, ranges)
            failure: BaseException | None = None
            try:
                with exact_products():
                    found = attempt.values(order=order, goes_on=goes_on)
            except StrangeDrawError:
                continue
            except DisagreementError as disagreement:
                if verdict is None and order is not Order.IN_TURN and attempt.noise.any_drawn:
                    continue
                raise RefusalError(_FIELD, disagreement.reason, disagreement.instead) from None
            except Exception as error:  # noqa: BLE001 - without memory, or without gradients, for which a model may not be made
                failure = error
                self.unseen = "" if is_out_of_memory(error) else first_line(error)
            else:
                if found.left and verdict is None:
                    raise unjudged(f"the forward pass changes {next(iter(found.left))}")
                self._values = found
                return True
            finally:
                attempt.put_back()
            release(failure)
        return False

    def has_room_for(self, call: Callable[..., Any], whole: Call, layout: Layout, rows: int) -> bool:
        """Return whether so many rows are expected to fit, by what two of them keep for the backward pass."""
        device = next(self._model.parameters()).device
        free_bytes = _free_bytes(device)
        if free_bytes is None:
            return True
        kept: dict[int, int] = {}
        own = {storage_of(p) for p in self._model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
            return as_saved(tensor)

        if sum(leaf.nbytes for leaf in whole.leaves if isinstance(leaf, torch.Tensor)) * 1000 < free_bytes:
            small = sum(p.numel() for p in self._model.parameters()) * 1000 < free_bytes
            if small:  # nothing this small can need that much
                return True
        attempt = self._attempt(call, whole, layout, [])
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                attempt.look(layout.take(whole, 0, 2))
        finally:
            attempt.put_back()
        gradients = sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)
        return sum(kept.values()) / 2 * rows + 2 * gradients < _SHARE_OF_FREE * free_bytes


def _some(whole: Call, layout: Layout, rows: int) -> Call:
    """Return so many rows of a call; where these are not all, such as are unlike each other."""
    return layout.take(whole, 0, rows) if rows == layout.rows else layout.pick(whole, unlike_rows(whole, layout, rows))


def _free_bytes(device: torch.device) -> int | None:
    if accelerator.is_accelerator(device):
        return max(0, accelerator.most_bytes(device) - accelerator.allocated_bytes(device))
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on this system
        return None
