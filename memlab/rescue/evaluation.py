"""`Evaluations`: calls without gradients (validation), run in parts of their rows where memory runs out.

Numbered rules:

1. Nothing is done before memory has run out: a call that fits is the loop's own.
2. Then graphs that can be made again are dropped and, where there were none, the rows are run in two parts, four, and so on. From then on
   calls as large as that one are run in parts at once.
3. Rows run together and apart have to give the same, as far as there is memory for both (`Judge.values_of`).
4. Where parts do not help, optimizer state and then parameters leave the device. Nothing that changes numbers is tried.
5. What draws random numbers, or writes to its arguments or to the model, is not run again: the state before the call is not known.

Outputs stay on the device, where the loop reads them. They differ from those of the whole call by what kernels round for another number
of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memlab.errors import MemlabError, RefusalError, first_line
from memlab.plan import Precision
from memlab.rescue.fallback import Place
from memlab.rescue.recovery import NothingFitsError
from memlab.runtime.backward import is_in_backward
from memlab.runtime.batch import Batch
from memlab.runtime.graphs import is_within_checkpoint
from memlab.runtime.hooks import is_compiled
from memlab.runtime.lazy import requires_grad
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.rng import Randomness
from memlab.runtime.surroundings import Surroundings
from memlab.runtime.tree import Structure, flatten
from memlab.techniques.accumulation.judge import Judge
from memlab.techniques.accumulation.known_verdicts import shape_of
from memlab.techniques.accumulation.merge import UnsettledError
from memlab.techniques.accumulation.micro_outputs import MicroOutputs
from memlab.techniques.accumulation.probe import Probe
from memlab.techniques.accumulation.split import Call, Division, Layout, Outputs, row_ranges
from memlab.techniques.accumulation.verdict import SplitVerdict
from memlab.techniques.checkpointing.compiled import uncompiled

if TYPE_CHECKING:
    from memlab.rescue.rescuer import Rescuer

Run = Callable[..., Any]  # goes through the techniques in force at the time

_DRAWS = "it draws random numbers"


class WholeError(Exception):
    """A call cannot be run in parts.

    Args:
        reason: why.
        again: whether it may be run again as a whole.
    """

    def __init__(self, reason: str, *, again: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.again = reason, again


class Evaluations:
    """Calls without gradients of one session's model."""

    _has_graphs = True  # whether calls have a graph where gradients are on

    def __init__(self, rescuer: Rescuer) -> None:
        self._rescuer = rescuer
        self._run: Run = _nothing  # that of the call under way
        self._probe = Probe(cast("nn.Module", None), "", run=self._called)
        self._verdicts: dict[Any, SplitVerdict | WholeError] = {}  # by plan and shape, since the model was last trained
        self._too_many = 0  # elements of the smallest batch that did not fit; 0 where all did
        self._fitting = 1  # elements of the parts that did
        self.is_under_way = False  # a generation that makes such calls

    def trained(self) -> None:
        """Note a training call: rows are compared anew after it."""
        self._verdicts.clear()

    def run(self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call, in parts where it does not fit.

        Raises:
            NothingFitsError: there is no memory for it in any way that is exact.
        """
        if self.is_under_way:  # a pass of a generation, which is run again as a whole
            return run(*args, **kwargs)
        elements = Batch(args, kwargs).elements if self._too_many else 0
        if elements and elements >= self._too_many:
            return self._rescued(run, args, kwargs, -(-elements // self._fitting), None)
        oom: BaseException | None = None
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, NothingFitsError) or not (is_out_of_memory(error) and self._serves(args, kwargs)):
                raise
            oom = error
        try:
            return self._rescued(run, args, kwargs, 1, oom)
        finally:
            oom = None  # a name would keep it, and what its frames hold, in a cycle

    def _serves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call that memory ran out for has no graph, and none around it counts its operators."""
        if self._has_graphs and torch.is_grad_enabled() and derives(self.model, args, kwargs):
            self._note(f"a call of {self._name} in eval mode keeps its graph: put torch.no_grad() around it")
            return False
        return not is_within_checkpoint() and not is_in_backward()

    def _rescued(
        self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: int, oom: BaseException | None
    ) -> Any:
        self._run = run
        self._probe.serve(self.model, self._name)
        try:
            return self._until_it_fits(run, args, kwargs, parts, oom)
        finally:
            oom, self._run = None, _nothing  # the session keeps no model
            self._probe.serve(None)

    def _until_it_fits(
        self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: int, oom: BaseException | None
    ) -> Any:
        rescuer, recovery = self._rescuer, self._rescuer.recovery
        whole, batch = Call.of(args, kwargs), Batch(args, kwargs)
        recovery.rows = batch.rows or 1
        recovery.work_begins()
        first = oom
        refused: WholeError | None = None
        dropped, plan = False, rescuer.session.plan
        while True:
            if oom is not None:
                # what is dropped may be enough
                if not dropped and rescuer.drop_graphs():
                    dropped = True
                    recovery.free(Place.EVALUATION, oom)
                elif refused is None and parts < recovery.rows:
                    parts = min(2 * parts, recovery.rows)
                    recovery.free(Place.EVALUATION, oom)
                else:
                    if refused is not None:
                        self._note(f"a call of {self._name} without gradients cannot be run in parts: {refused.reason}")
                    recovery.make_room(oom, Place.EVALUATION)
                oom = None
            try:
                if parts > 1:
                    output = self._in_parts(whole, parts)
                else:  # as the loop has called it, for the first time where parts that were known to fit turn out not to apply
                    output = run(*args, **kwargs) if first is None else self._again(args, kwargs)
            except WholeError as error:
                refused, parts = error.with_traceback(None), 1
                if first is None:
                    self._too_many = 0
                elif not error.again:
                    self._give_up(refused)
                    raise first from None
            except BaseException as error:
                if not is_out_of_memory(error):
                    recovery.forget()
                    raise
                oom = error
                first = first or error
            else:
                if parts > 1:
                    self._too_many = min(self._too_many or batch.elements, batch.elements)
                    self._fitting = max(1, batch.elements // parts)
                is_alike = parts == 1 and not dropped and rescuer.session.plan == plan
                how = f"its rows in {parts} parts" if parts > 1 else "the same in what was freed" if is_alike else ""
                recovery.settle(how)
                return output

    def _give_up(self, refused: WholeError) -> None:
        self._note(f"a call of {self._name} without gradients cannot be run again: {refused.reason}")
        self._rescuer.recovery.forget()

    # -- one attempt ---------------------------------------------------------------------------

    def _again(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a whole call that has failed once."""
        given = _as_given(args, kwargs)
        output = self.checked(Surroundings(self.model), lambda: self._run(*args, **kwargs))
        if _as_given(args, kwargs) != given:
            raise WholeError("it writes to its arguments", again=False)
        return output

    def checked(self, before: Surroundings, call: Callable[[], Any]) -> Any:
        """Run a call, or a part of one, and make sure that it might have run before."""
        random = Randomness(before.generators)
        output = call()
        changed = next(iter(before.effects()), "")
        if changed or not random.taken_again().equals(random):
            random.restore()
            before.restore(strict=False)
            raise WholeError(f"it changes {changed}" if changed else _DRAWS, again=False)
        return output

    def _in_parts(self, whole: Call, parts: int) -> Any:
        """Run a call in parts and return what the whole call would return."""
        if (kind := _written_to(whole.spec)) is not None:  # a cache, of which the failed call has filled a part
            raise WholeError(f"it is given a {kind.__name__}, which it may write to", again=False)
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                with self._uncompiled():
                    layout, verdict = self._judged(whole, parts)
                pieces = [layout.take(whole, *span) for span in row_ranges(layout.rows, min(parts, layout.rows))]
                weights = self._probe.weights(whole, layout, pieces)
            division = Division(pieces, layout, weights, self._probe.joins(whole), layout.view(whole))
            return self._joined(division, verdict)
        except UnsettledError:
            raise WholeError("what its parts return cannot be put together") from None
        except RefusalError as refusal:
            if refusal.technique != "accumulation":
                raise
            raise WholeError(refusal.reason) from None
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, (MemlabError, WholeError)):
                raise
            raise WholeError(f"it does not run on some of its rows: {first_line(error)}") from None

    def _joined(self, division: Division, verdict: SplitVerdict) -> Any:
        gathered, before = MicroOutputs(division, verdict, repeats=False), Surroundings(self.model)
        own = {id(each): each for each in (*before.tensors(), *self.model.parameters())}
        of = division.whole.leaves if division.whole is not None else ()
        for piece in division.micro_batches:
            outputs = Outputs.of(self.checked(before, partial(piece.run, self._run)))
            pairs = zip(piece.leaves, of, strict=True)
            given = {id(part): leaf for part, leaf in pairs if isinstance(part, torch.Tensor)}
            gathered.sharing.note(outputs.leaves, own | given)
            gathered.add(outputs.without_graph(), keeps_large=True, keeps_parts=False)
            del outputs
        values, _ = gathered.values()
        leaves = gathered.leaves(values)
        gathered.drop_parts()
        gathered.sharing.apply(leaves)
        return gathered.template.rebuild(leaves)

    def _judged(self, whole: Call, parts: int) -> tuple[Layout, SplitVerdict]:
        """Return how a call is split, and how what its parts return is put together."""
        layout = self._probe.layout(whole)
        if layout.rows < 2:
            raise WholeError("it has one row")
        shape = self._rescuer.session.plan, *shape_of(self.model, whole, layout, parts)
        known = self._verdicts.get(shape) or self._verdict(whole, layout, min(parts, layout.rows))
        if isinstance(known, WholeError) or not known.chooses:  # else it is looked at each time
            self._verdicts[shape] = known
        if isinstance(known, WholeError):
            raise known
        return layout, known

    def _verdict(self, whole: Call, layout: Layout, parts: int) -> SplitVerdict | WholeError:
        plan = self._rescuer.session.plan
        judge = Judge(
            self.model, self._name, self._probe, is_low=plan.precision not in (Precision.KEEP, Precision.FP32)
        )
        try:
            verdict = judge.values_of(self._called, whole, layout, parts)
        except RefusalError as refusal:
            return WholeError(refusal.reason)
        if verdict is None:
            return WholeError(
                judge.unseen or "there is no memory for two rows, to see whether they depend on each other"
            )
        return WholeError(_DRAWS, again=False) if verdict.draws else verdict

    # -- what it works with --------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self._rescuer.session.workload.model

    @property
    def _name(self) -> str:
        return self._rescuer.session.workload.name

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def _uncompiled(self) -> AbstractContextManager[Any]:
        return uncompiled() if is_compiled(self.model) else nullcontext()

    def _note(self, text: str) -> None:
        self._rescuer.session.log.note_not_rescued(text)


def _nothing() -> None:
    """Stand for a call where there is none."""


def _as_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what differs once a call has written to its arguments."""
    leaves, spec = flatten((args, dict(kwargs)))
    versions = [x._version for x in leaves if isinstance(x, torch.Tensor) and not x.is_inference()]
    return [spec, versions, *map(id, leaves)]


def _written_to(given: Structure) -> type | None:
    """Return the kind of an object among arguments that is neither a plain container nor a mapping; None where there is none."""
    if given.kind is not None and not issubclass(given.kind, (list, tuple, Mapping)):
        return given.kind
    return next(filter(None, map(_written_to, given.children)), None)


def derives(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call can have a graph: not with all frozen, as adapters are switched off for a reference."""
    return any(each.requires_grad for each in model.parameters()) or any(
        map(requires_grad, tree_leaves((args, kwargs)))
    )
