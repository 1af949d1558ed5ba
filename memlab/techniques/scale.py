"""An engine of PyTorch or DeepSpeed that trains the model in this process: FSDP2, or ZeRO 1, 2 and 3.

Engines sit above the session (`memlab.scaleout`), so this technique does not know them: what makes one is given to
it. It stands on the model alone; the rest of the plan applies where the engine has the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from memlab.errors import RefusalError
from memlab.plan import Plan
from memlab.plan.scale import ENGINE_MAKERS
from memlab.runtime.mechanisms import OwnMemory, WholeSteps
from memlab.runtime.workload import Workload
from memlab.techniques.base import Description, ModelCall, Reduces, Technique, Traits

Optimizer = torch.optim.Optimizer


class LiveEngine(OwnMemory, ABC):
    """An engine over live objects, in this process.

    Attributes:
        owns_steps: whether it does the optimizer's steps.
    """

    owns_steps = False

    @abstractmethod
    def check(self) -> None:
        """Refuse what it cannot serve; nothing is touched yet."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer it cannot serve."""

    @abstractmethod
    def start(self, storage_resized: Callable[[torch.UntypedStorage], None]) -> None:
        """Take the model over: wholly, or not at all."""

    @abstractmethod
    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take an optimizer over."""

    @abstractmethod
    def call(self, own: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a training forward; `own` is the one without an engine."""

    @abstractmethod
    def evaluate(self, own: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward in eval mode or without gradients."""

    def check_step(self) -> None:
        """Refuse a step with the gradients that are there."""

    def step(self, optimizer: Optimizer) -> bool:
        """Do a step, where it `owns_steps`; False when nothing was updated."""
        return False

    def step_ended(self) -> None:
        """A step is over."""

    def give_back_optimizer(self, optimizer: Optimizer) -> None:
        """Give an optimizer its state back; the engine stays as it is."""

    @abstractmethod
    def give_back(self) -> None:
        """Give the model its values back, in memory of its own, all of it or nothing; the engine stays as it is."""

    @abstractmethod
    def close(self) -> None:
        """End the engine; harmless when it never started."""


class Scaling(Technique, WholeSteps):
    """Hands the model to an engine."""

    field = "scale"
    descriptions = (
        Description(
            flags="--scale fsdp2|zero1|zero2|zero3",
            saves="with --offload, in this process: moments and weights; with --nproc P: each process keeps 1/P",
            costs="copies to and from host memory; communication between processes",
            exactness="bit for bit in one process; under ZeRO 3 the last bits differ where a gradient is a sum of three or more",
            gives_nothing="one process without --offload",
        ),
    )
    traits = Traits(Reduces.ENGINES, is_engine=True)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._engine: LiveEngine | None = None

    def brings(self) -> Iterable[object]:
        return (self, self._engine)

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        return plan

    def check(self, workload: Workload) -> None:
        if not workload.has_values:
            raise RefusalError(
                "scale", f"what {self.plan.scale} needs is not predicted", "measure it: %%memfit, or memlab.measure"
            )
        self._made_for(workload).check()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if self._engine is not None:
            self._engine.check_optimizer(optimizer)

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        self._engine = engine = self._made_for(workload)
        undo.callback(engine.give_back)
        engine.start(self.host.storage_resized)

    def attach_optimizer(self, optimizer: Optimizer, undo: ExitStack) -> None:
        undo.callback(self._at_work.give_back_optimizer, optimizer)
        self._at_work.add_optimizer(optimizer)

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._at_work.call(call, args, kwargs)

    def evaluate(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with_graph = torch.is_grad_enabled()
        # what an engine makes in its first call serves training as well
        with torch.inference_mode(mode=False), torch.set_grad_enabled(with_graph):
            return self._at_work.evaluate(call, args, kwargs)

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if not has_closure:
            self._at_work.check_step()

    def whole_step(self, optimizer: Optimizer) -> Callable[[], bool] | None:
        return partial(self._at_work.step, optimizer) if self._at_work.owns_steps else None

    def step_ended(self, optimizer: Optimizer, *, skipped: bool) -> None:
        self._at_work.step_ended()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    @property
    def _at_work(self) -> LiveEngine:
        assert self._engine is not None
        return self._engine

    def _made_for(self, workload: Workload) -> LiveEngine:
        engine: LiveEngine = ENGINE_MAKERS[-1](self.plan, workload)
        return engine
