"""Gradient accumulation that the loop does not see: the model call splits its own batch.

Numbered rules of the mechanism:

1. The call is split into micro-batches along the batch dimension. Each runs on *aliases* of the
   parameters, leaves that share their storage, so that its gradients gather beside the user's own
   and no hook of the user's (or of DDP's) fires before the sum is complete.
2. *Fused form*, when the model returns its loss: forward and backward of each micro-batch run at
   once inside one autograd function, each loss weighted by its share of the batch's loss. The
   loop's ``loss.backward()`` then only scales the gathered gradients and hands them over.
3. *Replay form*, when the loop computes the loss from the outputs: outputs are computed without
   gradients (the last micro-batch keeps its graph), the loop's loss gives their gradient, and the
   backward pass runs each micro-batch again under its saved random state. Exact for any loss.
4. Outputs beside the loss are joined. If the loop derives gradients from them after all, they come
   by replay. Large ones are computed only when looked at.
5. Under a loop's own fp16 autocast the inner backward is scaled by the factor the loop's scaler
   used last, because the loop's own scaling comes too late for it.
6. The first batch of each shape, and under each condition (`conditions`), is judged (`judge`): run together and apart in train mode with the same random
   numbers, it has to give the same, or the plan is refused with what differs. What cannot be told then (a forward that
   does something new, values that were alike by chance) is judged when it comes. A model that chooses by values (routed experts) is
   judged again with the second batch, the fourth, the eighth, and so on: one batch may not tell what another does.
7. Each micro-batch begins with the buffers, attributes and lists the call began with; what they leave is put together and
   written once (`surroundings`, `merge`), so that it is what the whole batch would have left. Where memory did not suffice to judge,
   a call that leaves anything is refused, and a split that nobody asked for (a rescue) altogether if not even what is returned could be compared.
8. A later batch that cannot be split is run whole, and the receipt says so: a loop that has come so far goes on. A batch of
   fewer rows than micro-batches is split as far as it goes, unless the plan is on trial and an earlier one can come back.

Gradients agree with the unsplit batch to rounding (tested at 1e-6 relative in fp32). Random numbers drawn by the model are those of
a hand-written loop over the micro-batches under the same random state, not those of one call for all rows; those of Python and
NumPy are those of the one call.

Source of the replay form: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup", https://arxiv.org/abs/2101.06983
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from memlab.errors import MemlabError, RefusalError, first_line
from memlab.plan import BatchNorm, Plan, Precision
from memlab.runtime import accelerator
from memlab.runtime.aliases import KEEP_WHOLE
from memlab.runtime.backward import around_backward_passes
from memlab.runtime.graphs import refuse_within_checkpoint
from memlab.runtime.hooks import chained, is_compiled
from memlab.runtime.mechanisms import ChangedParameters, LoopChecks, SeenInCalls, brought
from memlab.runtime.modules import CacheOff, refuse_kept_weights
from memlab.runtime.out_of_memory import is_out_of_memory, release
from memlab.runtime.rng import Randomness
from memlab.runtime.surroundings import Copies, Surroundings
from memlab.runtime.workload import Workload
from memlab.techniques.accumulation.batchnorm import BATCH_NORM
from memlab.techniques.accumulation.conditions import Conditions
from memlab.techniques.accumulation.judge import Judge
from memlab.techniques.accumulation.known_verdicts import KnownVerdicts, Shape, shape_of
from memlab.techniques.accumulation.merge import OtherConditionsError, UnsettledError
from memlab.techniques.accumulation.micro import Learnt, MicroRun
from memlab.techniques.accumulation.probe import Probe
from memlab.techniques.accumulation.split import Call, Division, Layout, row_ranges
from memlab.techniques.accumulation.verdict import SplitVerdict
from memlab.techniques.base import Description, ModelCall, Reduces, Technique, Traits
from memlab.techniques.checkpointing.compiled import uncompiled

_FULL = (Precision.KEEP, Precision.FP32)
# of one call, while other conditions are found than those before
_MOST_TRIES = 4


class Accumulation(Technique, LoopChecks, SeenInCalls):
    """Split every training batch into micro-batches; the gradient is that of the whole batch.

    Known limitations: a second backward through the same loss of a model that returns one is not possible; neither are models
    that write to their arguments. What a forward changes in objects of libraries, or in its ways through other threads, is not looked at.

    Over 300 lines: whether a call is split, judged, run whole or refused is decided in one place, from the same conditions.
    """

    field = "accumulation"
    traits = Traits(Reduces.ACTIVATIONS)
    descriptions = (
        Description(
            flags="--accumulate N",
            saves="activations and logits ÷ N",
            costs="smaller kernels, which use a GPU less well; with a separate loss function each forward pass runs twice",
            exactness="same gradient (≤ 1e-6 relative in fp32); dropout and noise are drawn for each micro-batch, as by hand",
            gives_nothing="the peak is in the optimizer step, or is mostly parameters, gradients and moments; refused with BatchNorm unless `--batchnorm micro` is given, and where rows depend on each other",
        ),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.applies = False
        # while it is attached
        self._model: nn.Module
        self._batch_norms: list[tuple[str, nn.Module]] = []
        # by condition
        self._probes: dict[int, Probe] = {}
        self._name = ""
        self._is_fake = self._is_compiled = False
        self._conditions = Conditions()
        self._cache_off = CacheOff(self.field)
        self._condition = 0  # that of the last call
        self._verdicts = KnownVerdicts()
        self._has_split = False
        self._runs: weakref.WeakSet[MicroRun] = weakref.WeakSet()  # whose graphs are there
        self._learnt = Learnt(refused=lambda refusal: self.host.refused(refusal))

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        return plan.accumulation, plan.batchnorm

    @property
    def _per_part(self) -> tuple[type[nn.Module], ...]:
        return BATCH_NORM if self.plan.batchnorm is BatchNorm.MICRO else ()

    def copied_bytes(self, model: nn.Module) -> int:
        """Return bytes of copies of buffers and the like that a split call of a model keeps until its backward pass is over."""
        return sum(Copies(model, without_buffers_of=self._per_part).sizes)

    def check_modes(self, workload: Workload) -> None:
        self._refuse_batch_norm(self._batch_norms_of(workload.model), workload.name)

    def _batch_norms_of(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Modules that would take statistics of each part, unasked."""
        modules = () if self._per_part else model.named_modules()
        return [each for each in modules if isinstance(each[1], BATCH_NORM)]

    def _refuse_batch_norm(self, batch_norms: Sequence[tuple[str, nn.Module]], model_name: str) -> None:
        for name, module in batch_norms:
            if module.training:
                raise RefusalError(
                    self.field,
                    f"{model_name} has BatchNorm ({name}), whose statistics depend on the whole batch",
                    "add --batchnorm micro for statistics of each micro-batch, as in accumulation written by hand, "
                    "or use --checkpoint or --offload activations, which keep the batch whole",
                )

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        self._model, self._name = workload.model, workload.name
        self._batch_norms = self._batch_norms_of(workload.model)
        self._is_compiled = self._learnt.needs_graph = is_compiled(workload.model)
        self._is_fake = not workload.has_values
        undo.callback(self._forget)
        around_backward_passes(self._around_backward, undo)

    @contextmanager
    def _around_backward(self, roots: Sequence[Any], inputs: Sequence[Any] | None) -> Iterator[None]:
        for run in [*self._runs]:
            try:
                run.backward_begins(roots, inputs)
            except RefusalError as refusal:
                refusal.in_loop = True
                run.told(refusal)
                raise
        yield

    def _probe_of(self, whole: Call) -> Probe:
        """Return what is known of calls under the present conditions, as far as they are known before it runs."""
        if not self._condition:
            surroundings = self._surroundings()
            if surroundings.unreadable:
                raise RefusalError(
                    self.field,
                    f"{self._name} reads {surroundings.unreadable[0]}, which cannot be put back before the next micro-batch",
                    KEEP_WHOLE,
                )
            self._condition = self._condition_of(whole, surroundings)
        if self._condition not in self._probes:
            self._probes[self._condition] = Probe(self._model, self._name, self._per_part, self._as_changed)
        return self._probes[self._condition]

    def _as_changed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward with parameters as other techniques have made them."""
        below = [each.evaluate for each in self.host.techniques() if brought([each], ChangedParameters)]
        return chained(below, self._model.forward)(*args, **kwargs)

    def _forget(self) -> None:
        del self._model
        self._batch_norms.clear()
        self._probes.clear()
        self._verdicts, self._conditions, self._condition = KnownVerdicts(), Conditions(), 0

    def step_begins(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self._learnt.compute_waiting()

    def step_ended(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        self._learnt.updates += 1
        self._cache_off.step_ended()

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        whole = Call.of(args, self._cache_off.options(self._model, self._name, kwargs))
        try:
            for _ in range(_MOST_TRIES):
                # under other conditions it is split in the next try
                with suppress(OtherConditionsError):
                    return self._split(call, whole, self._probe_of(whole))
            self._refuse_changing()
        except RefusalError as refusal:
            if not self._has_split:
                raise
            # the loop has come this far under the plan: a batch that cannot be split must not end it
            self._note_once("a batch is run whole", f"a batch is run whole, since {refusal.reason}")
        return call(*args, **kwargs)

    def _refuse_changing(self) -> NoReturn:
        raise RefusalError(
            self.field,
            f"what {self._name} reads, returns or leaves behind changes from call to call",
            KEEP_WHOLE,
        )

    def _split(self, call: ModelCall, whole: Call, probe: Probe) -> Any:
        """Run a call in micro-batches.

        Raises:
            RefusalError: it cannot be split; nothing of it is left behind.
            OtherConditionsError: it is under other conditions than the last call; likewise.
        """
        self._refuse_batch_norm(self._batch_norms, self._name)
        refuse_kept_weights(self.field, self._model, self._name)
        refuse_within_checkpoint(self.field, self._name)
        try:
            with self._uncompiled():
                layout = probe.layout(whole)
        except RefusalError:
            self._try(call, whole)
            raise
        self.applies = True
        self._learnt.needs_graph |= probe.needs_graph
        parts = min(self.plan.accumulation, layout.rows)
        if 1 < parts < self.plan.accumulation and not self._has_split and self.host.on_trial():
            raise RefusalError(
                self.field,
                f"--accumulate {self.plan.accumulation} needs at least {self.plan.accumulation} rows in a batch of {self._name}, "
                f"this one has {parts}",
                f"use --accumulate {parts} or larger batches",
            )
        if parts < self.plan.accumulation:
            self._note_once(
                "fewer rows than micro-batches",
                f"a batch of fewer rows than micro-batches ({layout.rows} of {self.plan.accumulation}) is split as far as it goes",
            )
        if parts <= 1:
            return whole.run(call)
        micro_batches = [layout.take(whole, start, stop) for start, stop in row_ranges(layout.rows, parts)]
        with self._uncompiled():
            weights = probe.weights(whole, layout, micro_batches)
        if any(not any(shares) for shares in weights.values()):
            # no target anywhere: the model's own answer (0/0) is the right one
            return whole.run(call)
        for last_try in (False, True):
            run: MicroRun | None = None
            try:
                verdict = self._verdict(call, whole, layout, parts)
                division = Division(micro_batches, layout, weights, probe.joins(whole), layout.view(whole))
                check = partial(self._check_condition, whole)
                run = MicroRun(
                    self._model, call, division, self._learnt, verdict=verdict, per_part=self._per_part, check=check,
                    refuses_effects=verdict is None and not self._is_fake,
                )  # fmt: skip
                output = run.outputs()
                self._has_split = True
                self._runs.add(run)
                return output
            except UnsettledError:
                # a forward that does something new, or values that were alike by chance: this batch is judged as well
                assert run is not None
                run.start_over()
                self._verdicts.forget(self._shape_of(whole, layout, parts))
                if last_try:
                    self._refuse_changing()
            except Exception as error:
                if is_out_of_memory(error) or isinstance(error, (MemlabError, OtherConditionsError)):
                    raise
                if run is not None:
                    run.start_over()
                self._raise_as_the_whole_would(call, whole, error)
        raise AssertionError

    def _raise_as_the_whole_would(self, call: ModelCall, whole: Call, error: Exception) -> NoReturn:
        """Raise what the model raises for the whole batch; where it raises nothing, micro-batches are to blame."""
        self._try(call, whole)
        raise RefusalError(
            self.field,
            f"{self._name} does not run on some rows of a batch: {first_line(error)}",
            KEEP_WHOLE,
        ) from None

    def _try(self, call: ModelCall, whole: Call) -> None:
        """Run the whole batch and leave nothing behind; what the model raises is the loop's own error."""
        snapshot = Surroundings(self._model, complete=True)
        randomness = Randomness(snapshot.generators)
        handled = sys.exception()
        with snapshot.writing():
            try:
                whole.run(call)
            except Exception as error:
                # what is handled here came of the split: shown before the loop's own error it would be that a second time
                first: BaseException = error
                while first.__context__ is not None and first.__context__ is not handled:
                    first = first.__context__
                first.__context__ = None
                raise
        snapshot.begin_again()
        randomness.restore()

    def _verdict(self, call: ModelCall, whole: Call, layout: Layout, parts: int) -> SplitVerdict | None:
        """Return what the judge says of calls of this shape under these conditions; asked once for each."""
        if self._is_fake:
            return None
        grain = math.gcd(*(stop - start for start, stop in row_ranges(layout.rows, parts)))
        asked = self._verdicts.ask(self._shape_of(whole, layout, parts), layout.rows, grain)
        known = asked.verdict
        if isinstance(known, (RefusalError, tuple)):
            # else it is looked at when it runs
            self._check_condition(whole, self._surroundings())
        if isinstance(known, RefusalError):
            raise known.with_traceback(None)
        if not isinstance(known, tuple):
            return known
        try:
            found = self._judged(call, whole, layout, parts, asked.starts) or asked.before
        except RefusalError as refusal:
            asked.note_refusal(refusal)
            raise
        except Exception as error:
            if asked.before is None or not is_out_of_memory(error):
                raise
            release(error)
            return asked.before
        if accelerator.is_accelerator(next(self._model.parameters()).device):
            accelerator.empty_cache()  # rows together reserve more than the steps that follow need
        if found is not None:
            probe = self._probes.pop(self._condition)
            self._conditions.leave_out([*found.left, *found.changing, *layout.lists_in(whole)])
            self._condition = self._condition_of(whole, self._surroundings())
            self._probes[self._condition] = probe
        # under the conditions that are known by now
        self._verdicts.at(self._shape_of(whole, layout, parts), asked).note_verdict(found)
        return found

    def _surroundings(self) -> Surroundings:
        return Surroundings(self._model, without_buffers_of=self._per_part)

    def _condition_of(self, whole: Call, before: Surroundings) -> int:
        return self._conditions.key(whole.by_list(), before.contents)

    def _check_condition(self, whole: Call, before: Surroundings) -> None:
        """Raise `OtherConditionsError` where a call is under other conditions than the last one."""
        condition = self._condition_of(whole, before)
        if condition != self._condition:
            self._condition = condition
            raise OtherConditionsError

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """Run the model's own code where it is compiled: a look at some rows is made once, and would be compiled for them."""
        return uncompiled() if self._is_compiled else nullcontext()

    def _judged(
        self, call: ModelCall, whole: Call, layout: Layout, parts: int, starts: set[Any]
    ) -> SplitVerdict | None:
        with self._uncompiled():
            is_low = self.plan.precision not in _FULL
            judge = Judge(self._model, self._name, self._probe_of(whole), self._per_part, is_low=is_low)
            verdict = judge.judge(call, whole, layout, parts)
        self._learnt.needs_graph |= verdict is not None and verdict.needs_graph
        for each in brought(self.host.techniques(), SeenInCalls):
            each.trial_over()
        self.host.only_tried()
        if verdict is None and not judge.compared_rows and self.host.of_rescue() and not self._has_split:
            reason = f"there is no memory for two rows of a batch of {self._name}, to see whether it may be split"
            raise RefusalError(self.field, reason, f"ask for it: --accumulate {self.plan.accumulation}")
        if verdict is None:
            seen = f"what {judge.compared_rows} of {layout.rows} rows return was compared, no gradients"
            if not judge.compared_rows:
                seen = "only a few rows were looked at"
            self._note_once("no memory", f"no memory to see whether the batch may be split: {seen}")
            return None
        if verdict.draws:
            self._note_once(
                "draws random numbers",
                f"{self._name} draws random numbers: each micro-batch draws its own, as in accumulation written by hand, "
                "so losses differ from those of whole batches as they do from seed to seed",
            )
        if verdict.rows < layout.rows:
            self._note_once(
                "memory for",
                f"memory for {verdict.rows} of {layout.rows} rows to see whether the batch may be split"
                + (f", of {judge.compared_rows} what is returned" if judge.compared_rows > verdict.rows else ""),
            )
        starts |= verdict.starts
        return replace(verdict, starts=frozenset(starts))

    def _shape_of(self, whole: Call, layout: Layout, parts: int) -> Shape:
        return self._condition, *shape_of(self._model, whole, layout, parts)

    def _note_once(self, kind: str, line: str) -> None:
        if not any(kind in note for note in self.notes):
            self.notes.append(line)
