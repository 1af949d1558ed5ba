"""The fault harness: small training runs in which memory runs out where it is told to.

One *run* trains a family of models for a few steps as its users would write it. In one of the steps `Faults` watches
every operator and raises at those allocations it was told; between the steps nothing fails. What can be compared
afterwards is in `Outcome`.

Models are in double precision wherever the plan has no precision of its own: what a repetition in micro-batches adds
up in another order then differs by 1e-15, and a gradient that was lost, or counted twice, by 1.
"""

from __future__ import annotations

import copy
import gc
import math
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from memlab import Workload, fit
from memlab.allocator.sizes import SMALL_BLOCK_BYTES
from memlab.measuring.ledger import Ledger, defers
from memlab.measuring.operator_effects import OperatorEffect, effect_of
from memlab.records import Rescue
from tests.loops.cases import Tower, bert_classifier, gpt2

Optimizer = torch.optim.Optimizer

STEPS = 3
LONG = bool(os.environ.get("MEMLAB_LONG"))
TEXT = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 16.00 GiB."


class Faults(TorchDispatchMode):
    """Counts the operators that allocate, and raises out of memory at some of them.

    Args:
        at: which ones fail, counted from 1 over the whole watched time, retries included.
        lasting_from: from this allocation on every one fails; None for never.

    Attributes:
        count: allocations so far.
        failed: names of the operators that failed.
    """

    def __init__(self, at: Collection[int] = (), lasting_from: int | None = None) -> None:
        super().__init__()
        self.at = frozenset(at)
        self.lasting_from = lasting_from
        self.count = 0
        self.failed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and defers(types):
            return NotImplemented
        draws = torch.Tag.nondeterministic_seeded in func.tags
        generator = (kwargs or {}).get("generator") or torch.default_generator
        random = generator.get_state() if draws else None
        out = func(*args, **(kwargs or {}))
        if not _allocates(func, out, args, kwargs):
            return out
        self.count += 1
        if self.count in self.at or (self.lasting_from is not None and self.count >= self.lasting_from):
            self.failed.append(str(func))
            if random is not None:
                generator.set_state(random)  # memory runs out before anything is drawn
            out = args = kwargs = None  # the traceback keeps this frame, and must not keep them
            raise torch.OutOfMemoryError(TEXT)
        return out


class Refusals(Faults):
    """One on a GPU, whose own allocator runs out: it gets no new segments, and what is free in those it has is held.

    From the allocation on that is to fail the first that is the GPU's fails, where the kernel asks for it, with the
    allocator's own error.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.failed or self.count + 1 < min(self.at, default=math.inf):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if types and defers(types):
            return NotImplemented
        try:
            with _nothing_left():
                out = func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            self.count += 1
            self.failed.append(str(func))
            raise
        self.count += _allocates(func, out, args, kwargs)  # beside the GPU
        return out


@contextmanager
def _nothing_left() -> Iterator[None]:
    """A GPU of which everything that is free is taken."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-9)
    held = []
    try:
        holes = [
            (hole["size"], segment["segment_type"])
            for segment in torch.cuda.memory_snapshot()
            for hole in segment["blocks"]
            if hole["state"] == "inactive"
        ]
        for size, pool in sorted(holes, reverse=True):
            while pool == "small" and size > SMALL_BLOCK_BYTES:  # such a request is served by the other pool
                held.append(_taken(SMALL_BLOCK_BYTES))
                size -= SMALL_BLOCK_BYTES
            held.append(_taken(size))
        yield
    finally:
        held.clear()  # an error's traceback keeps this frame
        torch.cuda.set_per_process_memory_fraction(1.0)


def _taken(size_bytes: int) -> torch.Tensor | None:
    with suppress(torch.OutOfMemoryError), _disable_current_modes():
        return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    return None


def _allocates(func: Any, out: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator has made a storage; those that write in place or return a view have not."""
    if effect_of(func) != OperatorEffect.BIRTH:
        return False
    made = [t for t in tree_iter(out) if isinstance(t, torch.Tensor) and t.numel() and not t.is_meta]
    given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
    return any(tensor.untyped_storage()._cdata not in given for tensor in made)


class Noted(torch.autograd.Function):
    """Notes the sizes of gradients."""

    seen: ClassVar[list[float]] = []

    @staticmethod
    def forward(_context: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Noted.seen.append(float(gradient.norm()))
        return gradient


# -- families ----------------------------------------------------------------------------------

Moment = Callable[[str], None]
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """A model and the loop around it.

    Args:
        build: makes the model.
        batch: the batch of a step.
        train: one step from the model call to `optimizer.step()`; returns losses. It calls its last argument when the
            forward pass is over ("forwarded") and before the optimizer steps ("step").
        plans: those the family is trained under.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    train: Callable[[nn.Module, Any, Batch, Moment], list[torch.Tensor]]
    plans: tuple[str, ...]


_COMMON_PLANS = (
    "",
    "--accumulate 2",
    "--checkpoint",
    "--checkpoint selective",
    "--offload activations",
    "--offload optimizer",
    "--adam8bit",
    "--bf16",
    "--precision pure-bf16",
    "--accumulate 2 --checkpoint --offload activations",
    "--checkpoint --adam8bit --offload optimizer",
)
_PARAMS = ("--offload params", "--checkpoint --offload params,optimizer")
_EVERYTHING = "--accumulate 2 --checkpoint --offload activations,optimizer"


def _tokens(step: int) -> Batch:
    drawn = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, 2048, (4, 8), generator=drawn)
    labels = ids.clone()
    for row in range(4):
        labels[row, 8 - 2 * row :] = -100
    return {"input_ids": ids, "labels": labels}


def _long_tokens(step: int) -> Batch:
    ids = torch.randint(0, 2048, (8, 16), generator=torch.Generator().manual_seed(100 + step))
    return {"input_ids": ids, "labels": ids.clone()}


def _train_language_model(model: nn.Module, optimizer: Any, batch: Batch, at: Moment) -> list[torch.Tensor]:
    """Labels inside, so the model computes its loss."""
    loss = model(**batch).loss
    at("forwarded")
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    at("step")
    optimizer.step()
    return [loss.detach()]


def _sentences(step: int) -> Batch:
    drawn = torch.Generator().manual_seed(100 + step)
    lengths = torch.tensor([[3], [8], [5], [6]])
    return {
        "input_ids": torch.randint(0, 2048, (4, 8), generator=drawn),
        "attention_mask": (torch.arange(8) < lengths).long(),
        "targets": torch.randint(0, 2, (4,), generator=drawn),
    }


def _train_classifier(model: nn.Module, optimizer: Any, batch: Batch, at: Moment) -> list[torch.Tensor]:
    """A criterion of the loop's own, a penalty on the weights, and clipping."""
    logits = model(batch["input_ids"], batch["attention_mask"]).logits
    at("forwarded")
    penalty = sum(p.square().sum() for p in model.parameters())
    loss = F.cross_entropy(logits / 0.7, batch["targets"]) + 1e-4 * penalty
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    at("step")
    optimizer.step()
    return [loss.detach()]


def _pairs(step: int) -> Batch:
    drawn = torch.Generator().manual_seed(100 + step)
    return {
        "inputs": torch.randn(2, 6, 16, generator=drawn),
        "targets": torch.randint(0, 4, (2, 6), generator=drawn),
    }


def _train_tower(model: nn.Module, optimizer: Any, batch: Batch, at: Moment) -> list[torch.Tensor]:
    """Accumulation by hand over two calls, with a gradient scaler that is unscaled before clipping."""
    scaler = torch.amp.GradScaler(batch["inputs"].device.type, init_scale=2.0**4, growth_interval=1000)
    losses = []
    for half, targets in zip(batch["inputs"], batch["targets"], strict=True):
        loss = F.cross_entropy(model(half), targets) / 2
        at("forwarded")
        scaler.scale(loss).backward()
        losses.append(loss.detach())
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    at("step")
    scaler.step(optimizer)
    return losses


FAMILIES = {
    "gpt2": Family(
        gpt2, _tokens, _train_language_model, (*_COMMON_PLANS, *_PARAMS, "--chunk-loss", _EVERYTHING + " --chunk-loss")
    ),
    "gpt2-dropout": Family(lambda: gpt2(0.1), _tokens, _train_language_model, ("", "--accumulate 2", "--checkpoint")),
    # with activations that outweigh weights and state
    "gpt2-long": Family(gpt2, _long_tokens, _train_language_model, ()),
    "bert": Family(
        bert_classifier, _sentences, _train_classifier, (*_COMMON_PLANS, "--checkpoint every:2", _EVERYTHING)
    ),
    "tower": Family(Tower, _pairs, _train_tower, (*_COMMON_PLANS, *_PARAMS, "--checkpoint every:2", _EVERYTHING)),
}


def is_double(plan: str) -> bool:
    """Whether a family is trained in double precision under a plan."""
    return not any(word in plan for word in ("bf16", "fp16", "8bit"))


# -- runs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a run has come to, when the session is undone.

    Args:
        losses: of every model call.
        parameters: values.
        gradients: of the last step.
        moments: the optimizer's state in its own format.
        rates: learning rates of every step.
        drawn: a random number of the loop's own after every step.
        random: the state of the generator at the end.
        random_forwarded: the same after the last forward pass of the step that was watched.
        allocations: counted in the watched step.
        failed: operators that ran out of memory.
        plan: the plan it ended with.
        rescues: what was rescued.
        live_bytes: of all tensors made in the run, while the session is on and gradients are gone.
        peak_bytes: the highest of them.
    """

    losses: list[float]
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    moments: list[torch.Tensor]
    rates: list[float]
    drawn: list[float]
    random: torch.Tensor
    random_forwarded: torch.Tensor | None
    allocations: int
    failed: list[str]
    plan: str
    rescues: list[Rescue]
    live_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Switched:
    """A change of plans without any trouble, for the run that a rescued one is compared with.

    Args:
        plan: the new plan.
        place: where memory ran out, as a `Rescue` names it.
        random: the generator's state after the forward pass of that step, where the pass was run under the old plan.
    """

    plan: str
    place: str
    random: torch.Tensor | None = None


def train(
    family: str,
    plan: str = "",
    *,
    faults: Faults | None = None,
    rescue: Any = True,
    step: int = 1,
    switched: Switched | None = None,
    counted: bool = False,
    capacity_bytes: int | None = None,
    device: str = "cpu",
) -> Outcome:
    """Train for a few steps.

    Args:
        family: name of one.
        plan: flags of the plan at the beginning.
        faults: watches one step.
        rescue: as `memlab.fit` takes it.
        step: the step that is watched, or in which the plan changes; from 0.
        switched: change of plans in that step.
        counted: count bytes; else those of the outcome mean nothing.
        capacity_bytes: past which the ledger raises out of memory in all steps.
        device: where to.
    """
    torch.manual_seed(0)
    ledger = Ledger(capacity_bytes=capacity_bytes)
    with ledger if counted or capacity_bytes is not None else nullcontext():
        ledger.begin([])
        model = FAMILIES[family].build().train().to(device)
        model = model.double() if is_double(plan) else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return _Run(FAMILIES[family], model, optimizer, ledger, faults, step, switched).outcome(plan, rescue)


class _Run:
    def __init__(
        self,
        family: Family,
        model: nn.Module,
        optimizer: Optimizer,
        ledger: Ledger,
        faults: Faults | None,
        watched: int,
        switched: Switched | None,
    ) -> None:
        self._family, self._model, self._optimizer, self._ledger = family, model, optimizer, ledger
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (done + 1))
        self._faults, self._watched, self._switched = faults, watched, switched
        parameter = next(model.parameters())
        self._is_single, self._device = parameter.dtype is torch.float32, parameter.device
        # from which dropout draws
        self._generator = torch.cuda.default_generators[0] if parameter.is_cuda else torch.default_generator
        self._step = -1
        self._random_forwarded: torch.Tensor | None = None

    def outcome(self, plan: str, rescue: Any) -> Outcome:
        losses: list[float] = []
        rates: list[float] = []
        drawn: list[float] = []
        with fit(Workload(self._model, self._optimizer), plan, rescue=rescue) as session:
            self._session = session
            for self._step in range(STEPS):
                self._optimizer.zero_grad()
                losses += self._one_step()
                self._scheduler.step()
                rates += self._scheduler.get_last_lr()
                drawn.append(float(torch.rand(())))
            self._ledger.limit_bytes = float("inf")  # the loop is over
            gradients = [p.grad.detach().clone() for p in self._model.parameters() if p.grad is not None]
            self._optimizer.zero_grad()
            bytes_of_gradients = sum(g.nbytes for g in gradients)
            gc.collect()
            live_bytes, peak_bytes = self._ledger.live_bytes - bytes_of_gradients, self._ledger.peak_bytes
            ended = str(session.plan)
        return Outcome(
            losses=losses,
            parameters=[p.detach().clone() for p in self._model.parameters()],
            gradients=gradients,
            moments=_moments(self._optimizer),
            rates=rates,
            drawn=drawn,
            random=self._generator.get_state(),
            random_forwarded=self._random_forwarded,
            allocations=self._faults.count if self._faults is not None else 0,
            failed=list(self._faults.failed) if self._faults is not None else [],
            plan=ended,
            rescues=list(session.rescuer.rescues) if session.rescuer is not None else [],
            live_bytes=live_bytes,
            peak_bytes=peak_bytes,
        )

    def _one_step(self) -> list[float]:
        dtype = torch.get_default_dtype() if self._is_single else torch.float64
        drawn = self._family.batch(self._step).items()
        batch = {key: t.to(self._device, dtype if t.is_floating_point() else t.dtype) for key, t in drawn}
        is_watched = self._step == self._watched
        if (
            is_watched
            and self._switched is not None
            and self._switched.place in ("the forward pass", "the backward pass")
        ):
            self._session.switch(self._switched.plan, now=True)
        with self._faults if is_watched and self._faults is not None else nullcontext():
            losses = self._family.train(self._model, self._optimizer, batch, self._at)
        return [float(loss) for loss in losses]

    def _at(self, moment: str) -> None:
        if self._step != self._watched:
            return
        if moment == "forwarded":
            if self._switched is not None and self._switched.random is not None:
                self._generator.set_state(self._switched.random)
            self._random_forwarded = self._generator.get_state()
        elif self._switched is not None and self._switched.place in ("the loop's own code", "the optimizer's update"):
            self._session.switch(self._switched.plan, now=True)


def _moments(optimizer: Optimizer) -> list[torch.Tensor]:
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return [state[index][name].double() for index in sorted(state) for name in ("exp_avg", "exp_avg_sq", "step")]


# -- comparing ---------------------------------------------------------------------------------


def differences(found: Outcome, expected: Outcome, tolerance: float) -> list[str]:
    """What is further apart than a tolerance, relative to the largest number of its kind; counters must be equal."""
    pairs = {
        "losses": (_numbers(found.losses), _numbers(expected.losses)),
        **_named("parameter", found.parameters, expected.parameters),
        **_named("gradient", found.gradients, expected.gradients),
        **_named("first moment", found.moments[::3], expected.moments[::3]),
        **_named("second moment", found.moments[1::3], expected.moments[1::3]),
    }
    largest: dict[str, float] = {}
    for name, (_, right) in pairs.items():
        kind = name.rstrip("0123456789")
        largest[kind] = max(largest.get(kind, 1e-30), float(right.abs().max()))
    far = {name: float((a - b).abs().max()) / largest[name.rstrip("0123456789")] for name, (a, b) in pairs.items()}
    lines = [f"{name} {distance:.1e} apart" for name, distance in far.items() if not distance <= tolerance]
    lines += ["steps of the optimizer"] * (found.moments[2::3] != expected.moments[2::3])
    lines += ["learning rates"] * (found.rates != expected.rates)
    lines += ["random numbers of the loop"] * (found.drawn != expected.drawn)
    lines += ["random state"] * (not torch.equal(found.random, expected.random))
    return lines


def _numbers(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _named(
    kind: str, found: list[torch.Tensor], expected: list[torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    assert len(found) == len(expected)
    return {
        f"{kind} {i}": (a.double().cpu(), b.double().cpu())
        for i, (a, b) in enumerate(zip(found, expected, strict=True))
    }
