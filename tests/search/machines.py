"""Synthetic machines whose true costs are known, for searches that take no time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memlab.plan import Loss, Offloaded, OptimizerChoice, Plan, Precision
from memlab.plan.space import plan_space
from memlab.records import Measurement, Prediction, out_of_memory
from memlab.records.comparison import FoundPlan
from memlab.search.deciding import Search
from memlab.search.finding import best_of_trials

PLANS = plan_space(rows=16)
SETTINGS = (
    "accumulation",
    "checkpointing",
    "precision",
    "optimizer",
    "optimizer offload",
    "activations offload",
    "loss",
)


def setting(plan: Plan, name: str) -> str:
    if name.endswith(" offload"):
        return "" if plan.tier_of(Offloaded(name.removesuffix(" offload"))) is None else name
    return f"{name} {getattr(plan, name)}" if name in plan.changes() else ""


NAMED = {plan: ["overall", *filter(None, (setting(plan, name) for name in SETTINGS))] for plan in PLANS}
NAMES = sorted({name for named in NAMED.values() for name in named})


@dataclass
class Machine:
    """True costs of plans, in the units of a step as written, and how predictions of them are wrong.

    Costs add up as those of a real step do: arithmetic times precision and recomputation, plus launches of
    micro-batches, plus the update, plus transfers.
    """

    seed: int
    time_error: float = 0.0
    memory_error: float = 0.0
    noise: float = 0.01
    refused: Callable[[Plan], str] = lambda plan: ""
    ran: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.draw = draw
        self.update, self.launch = draw.uniform(0.03, 0.4), draw.uniform(0.005, 0.08)
        self.recompute = draw.uniform(0.15, 0.4)
        self.selective = draw.uniform(0.2, 0.9) * self.recompute
        self.bf16 = draw.choice([draw.uniform(0.35, 0.9), draw.uniform(0.9, 2)])
        self.pure, self.tiles, self.adam8bit = draw.uniform(0.85, 1.1), draw.uniform(-0.05, 0.1), draw.uniform(0.7, 4)
        self.move_state, self.move_activations = draw.uniform(0.05, 0.8), draw.uniform(0.05, 0.8)
        self.parameters, self.activations, self.logits = (
            draw.uniform(0.1, 1),
            draw.uniform(0.3, 4),
            draw.uniform(0.05, 1.5),
        )
        self.kept = draw.uniform(0.3, 0.7)
        self.time_errors = {name: 1 + draw.uniform(-self.time_error, self.time_error) for name in NAMES}
        self.memory_errors = {name: 1 + draw.uniform(-self.memory_error, self.memory_error) for name in NAMES}

    def seconds(self, plan: Plan) -> float:
        extra = {"off": 0, "selective": self.selective, "full": self.recompute}[plan.checkpointing]
        extra += self.tiles if plan.loss is Loss.CHUNKED else 0
        half = {Precision.KEEP: 1, Precision.BF16: self.bf16}.get(plan.precision, self.bf16 * self.pure)
        seconds = half * (1 + extra) + self.launch * (plan.accumulation - 1)
        eight_bit = plan.optimizer is OptimizerChoice.ADAM8BIT
        seconds += self.update * (self.adam8bit if eight_bit else 1)
        if plan.tier_of(Offloaded.OPTIMIZER):
            seconds += self.move_state * (0.25 if eight_bit else 1)
        if plan.tier_of(Offloaded.ACTIVATIONS):
            left = {"off": 1, "selective": 0.5, "full": 0.15}[plan.checkpointing]
            seconds += self.move_activations * left * (1 if plan.precision is Precision.KEEP else 0.5)
        return seconds

    def peak_bytes(self, plan: Plan) -> int:
        half = 1 if plan.precision is Precision.KEEP else 0.5
        activations = self.activations * half * {"off": 1, "selective": self.kept, "full": 0.15}[plan.checkpointing]
        activations *= 0.15 if plan.tier_of(Offloaded.ACTIVATIONS) else 1
        logits = self.logits * half * (0.1 if plan.loss is Loss.CHUNKED else 1)
        state = self.parameters * (0.5 if plan.optimizer is OptimizerChoice.ADAM8BIT else 2)
        if plan.tier_of(Offloaded.OPTIMIZER):
            state = 0.02 * self.parameters
        own = self.parameters * (0.5 if plan.precision is Precision.PURE_BF16 else 1)
        return round((own + state + own / 2 + (activations + logits) / plan.accumulation) * 2**30)

    def predictions(self, plans: Sequence[Plan] = PLANS) -> list[Prediction]:
        return [self.prediction(plan) for plan in plans]

    def prediction(self, plan: Plan) -> Prediction:
        named = NAMED[plan]
        seconds = self.seconds(plan) * math.prod(self.time_errors[name] for name in named)
        peak = self.peak_bytes(plan) * math.prod(self.memory_errors[name] for name in named)
        # what the predictor says of its own errors is true
        doubt = (1 + self.memory_error) ** len(named)
        slow = (1 + self.time_error) ** len(named)
        return Prediction(plan.label, "synthetic", round(peak), None, 0, {}, (), seconds, 8, 0,
                          (math.floor(peak / doubt), math.ceil(peak * doubt)), (seconds / slow, seconds * slow),
                          refused=self.refused(plan))  # fmt: skip

    def run(self, plan: Plan, budget_bytes: int) -> Measurement:
        self.ran.append(plan)
        if self.peak_bytes(plan) > budget_bytes:
            return out_of_memory(plan, "synthetic", budget_bytes, "Tried to allocate 1 GiB")
        seconds = tuple(self.seconds(plan) * (1 + self.draw.uniform(-self.noise, self.noise)) for _ in range(3))
        return Measurement(plan.label, "synthetic", self.peak_bytes(plan), None, 0, {}, (), seconds, 8, 0)

    def find(self, budget_bytes: int, trials: int = 3, plans: Sequence[Plan] = PLANS) -> FoundPlan:
        known = Search("synthetic", budget_bytes, plans, self.predictions(plans))
        return best_of_trials(known, lambda plan: self.run(plan, budget_bytes), trials, lambda line: None)

    def best_seconds(self, budget_bytes: int) -> float:
        return min(self.seconds(plan) for plan in PLANS if self.peak_bytes(plan) <= budget_bytes)

    def budget(self, share: float) -> int:
        """A budget between the smallest plan (0) and the largest (1), on a logarithmic scale."""
        peaks = sorted(self.peak_bytes(plan) for plan in PLANS)
        return math.ceil(peaks[0] * (peaks[-1] / peaks[0]) ** share)
