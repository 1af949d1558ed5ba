"""A seeded generator of small models and loops: features of what people write, drawn at random.

A drawn `Case` makes the same model, the same batches and the same loop every time it is asked. `run` does a few steps and
returns everything that a person could look at afterwards.
"""

# ruff: noqa: NPY002 # the global generators are what is to be tested

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from memlab import RefusalError, Workload, fit
from memlab.techniques._split import row_ranges

ROWS, LENGTH, WIDTH, CLASSES = 6, 3, 8, 3


class Pair(NamedTuple):
    """A named tuple, as people return it."""

    hidden: torch.Tensor
    logits: Any


FEATURES: dict[str, tuple[str, ...]] = {
    "norm": ("none", "layer", "group", "batch", "spectral", "centred", "instance"),
    "noise": ("none", "dropout", "gaussian", "weights", "numpy", "python", "attention dropout"),
    "state": ("none", "counter", "calls", "average", "total", "python sum", "queue"),
    "capture": ("none", "attribute", "hook dict", "hook list", "detached list", "floats", "global list", "object"),
    "loss": (
        "mean", "sum", "targets", "class weights", "row weights", "regularised", "balanced", "contrastive", "root", "loop",
        "loop on capture", "loop contrastive",
    ),
    "output": ("plain", "dict", "tuple", "named tuple", "dataclass", "object", "metrics"),
    "input": ("tensor", "recurrent state", "list", "mask", "packed"),
}  # fmt: skip
# with which the gradient of the whole batch is another one than that of hand-written accumulation only by random numbers
STOCHASTIC = frozenset({"dropout", "gaussian", "weights", "numpy", "python", "attention dropout"})
SEEN: list[torch.Tensor] = []


@dataclass
class Result:
    """An output of a kind of its own."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Custom:
    """Another, without a decorator."""

    def __init__(self, logits: torch.Tensor, loss: torch.Tensor | None) -> None:
        self.logits, self.loss = logits, loss


@dataclass(frozen=True)
class Case:
    """One drawn loop.

    Args:
        seed: of weights and batches.
        chosen: for each feature what was drawn.
    """

    seed: int
    chosen: tuple[tuple[str, str], ...]

    def __getitem__(self, name: str) -> str:
        return dict(self.chosen)[name]

    @property
    def is_stochastic(self) -> bool:
        return self["noise"] in STOCHASTIC

    def __str__(self) -> str:
        return f"{self.seed}: " + ", ".join(f"{k}={v}" for k, v in self.chosen if v not in ("none", "plain", "tensor"))


def cases(count: int, first: int = 0) -> Iterator[Case]:
    """So many cases, each with two or three features that are out of the ordinary."""
    for seed in range(first, first + count):
        drawn = random.Random(seed)
        chosen = {name: kinds[0] for name, kinds in FEATURES.items()}
        for name in drawn.sample([*FEATURES], drawn.choice((1, 2, 2, 3, 4))):
            chosen[name] = drawn.choice(FEATURES[name])
        if chosen["loss"] == "loop on capture" and chosen["capture"] not in ("attribute", "hook dict"):
            chosen["capture"] = drawn.choice(("attribute", "hook dict"))
        yield Case(seed, tuple(chosen.items()))


class Net(nn.Module):
    """The model of a case: an encoder over places, a head over classes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        torch.manual_seed(case.seed)
        enter: nn.Module = nn.Linear(4, WIDTH)
        if case["norm"] == "spectral":
            enter = nn.utils.parametrizations.spectral_norm(enter)
        self.enter = enter
        self.rnn = nn.GRU(WIDTH, WIDTH, 2, batch_first=True) if case["input"] in ("recurrent state", "packed") else None
        norms: dict[str, Callable[[], nn.Module]] = {
            "layer": lambda: nn.LayerNorm(WIDTH), "group": lambda: nn.GroupNorm(2, WIDTH),
            "batch": lambda: nn.BatchNorm1d(WIDTH), "instance": lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True),
        }  # fmt: skip
        self.norm = norms.get(case["norm"], nn.Identity)()
        self.dropout = nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.zeros(4, WIDTH))
        self.register_buffer("balance", torch.tensor([0.2, 1.0, 3.0]))
        self.calls, self.total, self.log = 0, 0.0, []
        self.features: torch.Tensor | None = None

    def forward(self, inputs: Any, targets: torch.Tensor, *rest: torch.Tensor) -> Any:
        case = self.case
        if case["input"] == "list":
            inputs = torch.stack([each / (1 + each.size(0) * 0) for each in inputs])
        if case["input"] == "packed":
            inputs = nn.utils.rnn.pad_packed_sequence(inputs, batch_first=True, total_length=LENGTH)[0]
        hidden = torch.tanh(self.enter(inputs))  # [b, t, d]
        if self.rnn is not None:
            hidden, state = self.rnn(hidden, *(rest[:1] if case["input"] == "recurrent state" else ()))
        if case["input"] == "mask":
            hidden = hidden * rest[0][..., None]
        hidden = self._normed(hidden)
        hidden = self._noisy(hidden)
        self._update(hidden)
        if case["capture"] == "attribute":
            self.features = hidden
        elif case["capture"] == "floats":
            self.log.append(float(hidden.detach().mean()))
        elif case["capture"] == "global list":
            SEEN.append(hidden.mean(1))
        logits = self.head(hidden)  # [b, t, c]
        loss = self._loss(hidden, logits, targets, rest)
        if case["input"] == "recurrent state" and loss is None:
            return logits, state
        return self._output(hidden, logits, loss, targets)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.case["norm"] in ("batch", "group", "instance"):
            return self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        if self.case["norm"] == "centred" and self.training:
            return hidden - hidden.mean(0)
        return self.norm(hidden)

    def _noisy(self, hidden: torch.Tensor) -> torch.Tensor:
        noise = self.case["noise"]
        if noise == "dropout":
            return self.dropout(hidden)
        if noise == "gaussian":
            return hidden + 0.1 * torch.randn_like(hidden)
        if noise == "weights":
            return hidden @ (torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))
        if noise == "numpy":
            return hidden + 0.1 * torch.from_numpy(np.random.standard_normal(tuple(hidden.shape))).float()
        if noise == "python":
            return hidden * random.uniform(0.5, 1.5)
        if noise == "attention dropout":
            return self.attention(hidden, hidden, hidden)[0]
        return hidden

    @torch.no_grad()
    def _update(self, hidden: torch.Tensor) -> None:
        state = self.case["state"]
        if state == "counter":
            self.counter += 1
        elif state == "calls":
            self.calls += 1
        elif state == "average":
            self.average.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
        elif state == "total":
            self.average += hidden.sum((0, 1))
        elif state == "python sum":
            self.total += float(hidden.detach().sum())
        elif state == "queue":
            self.queue = torch.cat([self.queue, hidden.mean(1)])[-4:]

    def _loss(self, hidden: Any, logits: torch.Tensor, targets: torch.Tensor, rest: Any) -> torch.Tensor | None:
        kind = self.case["loss"]
        flat, goal = logits.flatten(0, 1), targets.flatten()
        if kind.startswith("loop"):
            return None
        if kind == "sum":
            return F.cross_entropy(flat, goal, reduction="sum")
        if kind == "class weights":
            return F.cross_entropy(flat, goal, weight=self.balance)
        if kind == "row weights":
            weights = rest[-1]
            each = F.cross_entropy(flat, goal.clamp(min=0), reduction="none").view_as(targets).mean(1)
            return (each * weights).sum() / weights.sum()
        loss = F.cross_entropy(flat, goal)
        if kind == "mean":
            return F.cross_entropy(flat, goal.clamp(min=0))
        if kind == "regularised":
            return loss + 0.01 * sum(p.square().sum() for p in self.parameters())
        if kind == "balanced":
            share = F.one_hot(goal.clamp(min=0), CLASSES).float().mean(0)
            return F.cross_entropy(flat, goal.clamp(min=0), weight=1 / (share + 0.1))
        if kind == "contrastive":
            rows = hidden.mean(1)
            return F.cross_entropy(rows @ rows.t(), torch.arange(len(rows)))
        return loss.sqrt() if kind == "root" else loss

    def _output(self, hidden: Any, logits: torch.Tensor, loss: torch.Tensor | None, targets: torch.Tensor) -> Any:
        kind = self.case["output"]
        if kind == "dict":
            return {"logits": logits, "loss": loss, "name": "net"}
        if kind == "tuple":
            return logits, loss, hidden
        if kind == "named tuple":
            return Pair(hidden, {"logits": logits, "loss": loss})
        if kind == "dataclass":
            return Result(logits, loss, {"hidden": [hidden]})
        if kind == "object":
            return Custom(logits, loss)
        if kind == "metrics":
            right = (logits.argmax(-1) == targets).sum()
            return {"logits": logits, "loss": loss, "right": right, "rows": len(targets)}
        return logits if loss is None else loss


def batch(case: Case, step: int) -> tuple[Any, ...]:
    """The arguments of one call."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    rows = 4 if step == 2 else ROWS  # the last batch is smaller
    inputs: Any = torch.randn(rows, LENGTH, 4, generator=generator)
    targets = torch.randint(0, CLASSES, (rows, LENGTH), generator=generator)
    if case["loss"] in ("targets", "regularised", "class weights"):
        targets[1, 1:] = -100
    rest: list[torch.Tensor] = []
    if case["input"] == "recurrent state":
        rest.append(torch.randn(2, rows, WIDTH, generator=generator))
    elif case["input"] == "mask":
        rest.append((torch.rand(rows, LENGTH, generator=generator) > 0.3).float())
    elif case["input"] == "list":
        inputs = [*inputs]
    elif case["input"] == "packed":
        lengths = torch.randint(1, LENGTH + 1, (rows,), generator=generator)
        inputs = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
    if case["loss"] == "row weights":
        rest.append(torch.rand(rows, generator=generator) + 0.1)
    return inputs, targets, *rest


def loss_of(case: Case, model: Net, output: Any, targets: torch.Tensor, captured: dict[str, Any]) -> torch.Tensor:
    """What the loop differentiates."""
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        output = output.logits
    if isinstance(output, (Result, Custom)):
        output = vars(output)
    if isinstance(output, tuple):
        output = {"logits": output[0], "loss": output[1] if output[1] is None or output[1].dim() == 0 else None}
    if isinstance(output, dict) and output["loss"] is not None:
        return output["loss"]
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    logits = output["logits"] if isinstance(output, dict) else output
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    if case["loss"] == "loop on capture":
        features = model.features if case["capture"] == "attribute" else captured["out"]
        return loss + features.square().mean()
    if case["loss"] == "loop contrastive":
        rows = logits.mean(1)
        return loss + F.cross_entropy(rows @ rows.t(), torch.arange(len(rows)))
    return loss


class Kept:
    """Where a hook keeps what it sees."""

    def __init__(self) -> None:
        self.seen: torch.Tensor | None = None


def run(case: Case, flags: str, steps: int = 3) -> dict[str, Any]:
    """Train, and gather what there is to see.

    Raises:
        RefusalError: the plan does not apply; what was gathered until then is its `seen`.
    """
    SEEN.clear()
    model = Net(case)
    captured: dict[str, Any] = {}
    kept, listed = Kept(), []
    hooks: dict[str, Callable[..., None]] = {
        "hook dict": lambda _m, _i, out: captured.update(out=out),
        "hook list": lambda _m, _i, out: listed.append(out),
        "detached list": lambda _m, _i, out: listed.append(out.detach().mean(-1)),
        "object": lambda _m, _i, out: setattr(kept, "seen", out),
    }
    if case["capture"] in hooks:
        model.enter.register_forward_hook(hooks[case["capture"]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    losses, gradients = [], []

    def seen() -> dict[str, Any]:
        return {
            "losses": losses, "gradients": gradients,
            "weights": [p.detach().clone() for p in model.parameters()],
            "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
            "attributes": (model.calls, model.total, list(model.log)),
            "features": None if model.features is None else model.features.detach(),
            "captured": [each.detach() for each in (*captured.values(), *listed, *SEEN)],
            "object": None if kept.seen is None else kept.seen.detach(),
            "random": (torch.rand(2), random.random(), np.random.rand(2)),
        }  # fmt: skip

    def train() -> None:
        for step in range(steps):
            arguments = batch(case, step)
            output = model(*arguments)
            loss = loss_of(case, model, output, arguments[1], captured)
            optimizer.zero_grad()
            loss.backward()
            gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            losses.append(loss.detach())
            optimizer.step()

    if not flags:
        train()
        return seen()
    with fit(Workload(model, optimizer), flags):
        try:
            train()
        except RefusalError as refusal:
            refusal.seen = seen()  # type: ignore[attr-defined]
            raise
        return seen()


def by_hand(case: Case, parts: int, steps: int = 3) -> list[list[torch.Tensor | None]]:
    """Gradients of accumulation written by hand, for a loss that is a mean over rows."""
    model = Net(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    gradients = []
    for step in range(steps):
        arguments = batch(case, step)
        rows = len(arguments[1])
        optimizer.zero_grad()
        for start, stop in row_ranges(rows, min(parts, rows)):
            part = tuple(each[start:stop] for each in arguments)
            loss = loss_of(case, model, model(*part), part[1], {})
            (loss * (stop - start) / rows).backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return gradients


def difference(found: Any, expected: Any, path: str = "") -> str:
    """Where two gathered runs are apart by more than 1e-5 relative; empty where nowhere."""
    if isinstance(expected, dict):
        return next(filter(None, (difference(found[k], v, f"{path}/{k}") for k, v in expected.items())), "")
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return f"{path}: {len(found)} things for {len(expected)}"
        return next(
            filter(
                None, (difference(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(found, expected, strict=True)))
            ),
            "",
        )
    if expected is None or found is None:
        return "" if expected is found else f"{path}: {found} for {expected}"
    if isinstance(expected, float):
        return "" if math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-5) else f"{path}: {found} for {expected}"
    one, other = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    if one.shape != other.shape:
        return f"{path}: shape {tuple(one.shape)} for {tuple(other.shape)}"
    apart = float((one - other).norm() / other.norm().clamp(min=0.1)) if other.numel() else 0.0
    return "" if apart <= 1e-5 else f"{path}: {apart:.1e} off"
