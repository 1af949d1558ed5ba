"""A seeded generator of small models and loops: features of what people write, drawn at random.

A drawn `Case` makes the same model, the same batches and the same loop every time it is asked. `run` does a few steps and
returns everything that a person could look at afterwards.
"""

# ruff: noqa: NPY002 # the global generators are what is to be tested

from __future__ import annotations

import math
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from memlab import RefusalError, Workload, fit
from memlab.techniques.accumulation.split import row_ranges

LENGTH, WIDTH, CLASSES = 3, 8, 3


class Pair(NamedTuple):
    """A named tuple, as people return it."""

    hidden: torch.Tensor
    logits: Any


FEATURES: dict[str, tuple[str, ...]] = {
    "norm": (
        "none", "layer", "group", "batch", "spectral", "centred", "instance", "old spectral", "weight norm", "old weight norm",
        "frozen batch", "largest of batch",
    ),
    "noise": (
        "none", "dropout", "gaussian", "weights", "numpy", "python", "attention dropout", "drop path", "layer drop", "each row",
        "numpy rows", "shuffled rows", "own generator", "own numpy", "own python", "places", "rrelu", "gumbel", "sampled",
    ),
    "state": (
        "none", "counter", "calls", "average", "total", "python sum", "queue", "codebook", "annealed", "last hidden", "deque",
        "array", "largest", "replaced", "kept rows", "dictionary",
    ),
    "capture": (
        "none", "attribute", "hook dict", "hook list", "detached list", "floats", "global list", "object", "auxiliary list",
        "auxiliary", "slots", "class", "tuple",
    ),
    "loss": (
        "mean", "sum", "targets", "class weights", "row weights", "regularised", "balanced", "contrastive", "root", "loop",
        "loop on capture", "loop contrastive", "focal", "smoothed", "row sums", "router", "items", "learned", "variance",
        "one number", "each row", "two", "loop each row", "loop triplets", "penalty",
    ),
    "output": (
        "plain", "dict", "tuple", "named tuple", "dataclass", "object", "metrics", "slots", "ordered", "only loss", "nothing",
        "nested",
    ),
    "input": (
        "tensor", "recurrent state", "list", "mask", "packed", "keywords", "dict", "dataclass", "time first", "square mask",
        "row masks", "texts", "lengths", "numpy", "numbers", "graph", "segments",
    ),
    "loop": (
        "plain", "evaluates", "two forwards", "twice", "closure", "clips", "reads after the step", "autograd.grad", "retains",
        "no gradients", "scales",
    ),
    "batch": ("usual", "one first", "two first", "empty", "growing", "uneven", "one"),
    "dtype": ("float32", "float64"),
    "optimizer": ("sgd", "momentum", "adamw"),
}  # fmt: skip
# rows of each step's batch
_SIZES = {
    "usual": (6, 6, 4), "one first": (1, 6, 6), "two first": (2, 6, 6), "empty": (6, 0, 6), "growing": (3, 5, 7),
    "uneven": (6, 5, 6), "one": (1, 1),
}  # fmt: skip
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}
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


class Slots:
    """Another, which has no dictionary."""

    __slots__ = ("logits", "loss")

    def __init__(self, logits: torch.Tensor, loss: torch.Tensor | None) -> None:
        self.logits, self.loss = logits, loss


@dataclass
class Batch:
    """Arguments in an object."""

    inputs: torch.Tensor
    targets: torch.Tensor


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
        # numbers of Python and NumPy are those of the untouched call
        return self["noise"] not in ("none", "python", "numpy", "numpy rows", "own python", "own numpy")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each step's batch."""
        return _SIZES[self["batch"]]

    def __str__(self) -> str:
        drawn = (f"{name}={kind}" for name, kind in self.chosen if kind != FEATURES[name][0])
        return f"{self.seed}: " + ", ".join(drawn)


def cases(count: int, first: int = 0) -> Iterator[Case]:
    """So many cases, each with one to four features that are out of the ordinary."""
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

    shared: torch.Tensor | None = None

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        torch.manual_seed(case.seed)
        norms: dict[str, Callable[[nn.Module], nn.Module]] = {
            "spectral": nn.utils.parametrizations.spectral_norm, "old spectral": nn.utils.spectral_norm,
            "weight norm": nn.utils.parametrizations.weight_norm, "old weight norm": nn.utils.weight_norm,
        }  # fmt: skip
        self.enter = norms.get(case["norm"], nn.Sequential)(nn.Linear(4, WIDTH))
        self.rnn = nn.GRU(WIDTH, WIDTH, 2, batch_first=True) if case["input"] in ("recurrent state", "packed") else None
        layers: dict[str, Callable[[], nn.Module]] = {
            "layer": lambda: nn.LayerNorm(WIDTH), "group": lambda: nn.GroupNorm(2, WIDTH),
            "batch": lambda: nn.BatchNorm1d(WIDTH), "frozen batch": lambda: nn.BatchNorm1d(WIDTH).eval(),
            "instance": lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True),
        }  # fmt: skip
        self.norm = layers.get(case["norm"], nn.Identity)()
        self.dropout = nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.gate, self.log_scale = nn.Linear(WIDTH, 2), nn.Parameter(torch.zeros(()))
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.zeros(4, WIDTH))
        self.register_buffer("codes", torch.randn(3, WIDTH))
        self.register_buffer("balance", torch.tensor([0.2, 1.0, 3.0]))
        self.calls, self.total, self.log = 0, 0.0, []
        self.features: Any = None
        self.auxiliary: list[torch.Tensor] = []
        self.recent: deque[float] = deque(maxlen=3)
        self.counts, self.numbers = {"rows": 0}, np.zeros(WIDTH)
        self.torch_numbers = torch.Generator().manual_seed(7)
        self.numpy_numbers, self.python_numbers = np.random.default_rng(7), random.Random(7)
        self.last = torch.zeros(())
        self.to(getattr(torch, case["dtype"]))

    def forward(self, inputs: Any, targets: Any = None, *rest: Any, items: int = 1, **options: Any) -> Any:
        case = self.case
        if isinstance(inputs, dict):
            inputs, targets = inputs["inputs"], inputs["targets"]
        elif isinstance(inputs, Batch):
            inputs, targets = inputs.inputs, inputs.targets
        if case["input"] == "numpy":
            inputs = torch.from_numpy(inputs).to(self.head.weight.dtype)
        elif case["input"] == "time first":
            inputs = inputs.transpose(0, 1)
        elif case["input"] == "list":
            inputs = torch.stack([*inputs])
        elif case["input"] == "packed":
            inputs = nn.utils.rnn.pad_packed_sequence(inputs, batch_first=True, total_length=LENGTH)[0]
        hidden = torch.tanh(self.enter(inputs))  # [b, t, d]
        if self.rnn is not None:
            hidden, state = self.rnn(hidden, *(rest[:1] if case["input"] == "recurrent state" else ()))
        hidden = self._mixed(hidden, rest, options)
        hidden = self._noisy(self._normed(hidden))
        hidden = self._update(hidden)
        self._capture(hidden)
        logits = self.head(hidden)  # [b, t, c]
        loss = self._loss(hidden, logits, targets, rest, items)
        if case["input"] == "recurrent state" and loss is None:
            return logits, state
        return self._output(hidden, logits, loss, targets)

    def _mixed(self, hidden: torch.Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
        kind = self.case["input"]
        if kind == "mask":
            return hidden * rest[0][..., None]
        if kind in ("square mask", "row masks"):
            scores = hidden @ hidden.transpose(1, 2) + rest[0]
            return scores.softmax(-1) @ hidden
        if kind == "texts":
            return hidden * torch.tensor([float(len(text)) for text in rest[0]], dtype=hidden.dtype)[:, None, None]
        if kind == "lengths":
            places = torch.arange(LENGTH)[None] < torch.tensor(rest[0])[:, None]
            return hidden * places[..., None]
        if kind == "numbers":
            return hidden * options["scale"] if options["flag"] else hidden
        if kind == "graph":  # nodes of several graphs, and the graph of each
            sums = torch.zeros(int(rest[0].max()) + 1, WIDTH, dtype=hidden.dtype).index_add(0, rest[0], hidden.mean(1))
            return hidden + sums[rest[0]][:, None]
        if kind == "segments":  # several texts one after another in a row; those with the same number see each other
            same = rest[0][:, :, None] == rest[0][:, None, :]
            return (hidden @ hidden.transpose(1, 2)).masked_fill(~same, -1e9).softmax(-1) @ hidden
        return hidden

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.case["norm"] in ("batch", "group", "instance", "frozen batch"):
            return self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        if self.case["norm"] == "centred" and self.training:
            return hidden - hidden.mean(0)
        if self.case["norm"] == "largest of batch":
            return hidden / hidden.detach().abs().max()
        return self.norm(hidden)

    def _noisy(self, hidden: torch.Tensor) -> torch.Tensor:
        noise, shape, rows = self.case["noise"], tuple(hidden.shape), len(hidden)
        made: dict[str, Callable[[], torch.Tensor]] = {
            "dropout": lambda: self.dropout(hidden),
            "gaussian": lambda: hidden + 0.1 * torch.randn_like(hidden),
            "weights": lambda: hidden @ (torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH)).to(hidden.dtype),
            "numpy": lambda: hidden + 0.1 * torch.from_numpy(np.random.standard_normal(shape)).to(hidden.dtype),
            "python": lambda: hidden * random.uniform(0.5, 1.5),
            "attention dropout": lambda: self.attention(hidden, hidden, hidden)[0],
            "drop path": lambda: hidden * hidden.new_empty(rows, 1, 1).bernoulli_(0.7),
            "layer drop": lambda: hidden if random.random() < 0.5 else hidden + self.attention(hidden, hidden, hidden)[0],
            "each row": lambda: torch.stack([row * torch.rand(()) for row in hidden]) if rows else hidden,
            "numpy rows": lambda: hidden * torch.tensor([np.random.rand() for _ in hidden], dtype=hidden.dtype).view(-1, 1, 1),
            "shuffled rows": lambda: 0.7 * hidden + 0.3 * hidden[torch.randperm(rows)],
            "own generator": lambda: hidden + 0.1 * torch.randn(shape, generator=self.torch_numbers, dtype=hidden.dtype),
            "own numpy": lambda: hidden + 0.1 * torch.from_numpy(self.numpy_numbers.standard_normal(shape)).to(hidden.dtype),
            "own python": lambda: hidden * self.python_numbers.uniform(0.5, 1.5),
            "places": lambda: hidden * (torch.rand(shape[:2]) < 0.8)[..., None],
            "rrelu": lambda: F.rrelu(hidden, training=True),
            "gumbel": lambda: hidden * F.gumbel_softmax(self.gate(hidden))[..., :1],
            "sampled": lambda: hidden * (1 + torch.multinomial(self.gate(hidden).flatten(0, 1).softmax(-1), 1).view(*shape[:2], 1)),
        }  # fmt: skip
        return made.get(noise, lambda: hidden)()

    def _update(self, hidden: torch.Tensor) -> torch.Tensor:
        """Change what the model keeps; some of it is computed with."""
        state, seen = self.case["state"], hidden.detach()
        if state == "annealed":
            self.calls += 1
            return hidden * (1 + 0.5**self.calls)
        if state == "last hidden":
            hidden, self.last = hidden + 0.1 * self.last, seen.mean()
        elif state == "kept rows":  # states of a stream, carried from batch to batch
            before = self.__dict__.get("stream")
            self.stream = seen.mean(1)
            return hidden if before is None or before.shape != self.stream.shape else hidden + before[:, None]
        elif state == "codebook":
            nearest = torch.cdist(seen.flatten(0, 1), self.codes).argmin(-1)
            picked = F.one_hot(nearest, len(self.codes)).to(hidden.dtype)
            hidden = hidden + 0.1 * (self.codes[nearest].view_as(hidden) - seen)
            self.codes.mul_(0.9).add_(picked.t() @ seen.flatten(0, 1), alpha=0.1)
        with torch.no_grad():
            self._count(state, seen)
        return hidden

    def _count(self, state: str, seen: torch.Tensor) -> None:
        if state == "counter":
            self.counter += 1
        elif state == "calls":
            self.calls += 1
        elif state == "average":
            self.average.mul_(0.9).add_(seen.mean((0, 1)), alpha=0.1)
        elif state == "total":
            self.average += seen.sum((0, 1))
        elif state == "python sum":
            self.total += float(seen.sum())
        elif state == "queue":
            self.queue = torch.cat([self.queue, seen.mean(1)])[-4:]
        elif state == "deque":
            self.recent.append(float(seen.mean()))
        elif state == "array":
            self.numbers += seen.sum((0, 1)).numpy()
        elif state == "largest" and len(seen):
            self.average = torch.maximum(self.average, seen.amax((0, 1)))
        elif state == "replaced":
            self.average = 0.9 * self.average + 0.1 * seen.mean((0, 1))
        elif state == "dictionary":
            self.counts["rows"] += len(seen)

    def _capture(self, hidden: torch.Tensor) -> None:
        kind = self.case["capture"]
        if kind == "attribute":
            self.features = hidden
        elif kind == "tuple":
            self.features = (hidden, {"mean": hidden.mean(1)})
        elif kind == "slots":
            self.features = Slots(hidden, None)
        elif kind == "class":
            type(self).shared = hidden
        elif kind == "floats":
            self.log.append(float(hidden.detach().mean()))
        elif kind == "global list":
            SEEN.append(hidden.mean(1))
        elif kind == "auxiliary list":
            self.auxiliary.append(hidden.square().mean())
        elif kind == "auxiliary":
            self.features = hidden.square().mean()

    def _loss(self, hidden: Any, logits: Any, targets: torch.Tensor, rest: Any, items: int) -> torch.Tensor | None:
        kind = self.case["loss"]
        flat, goal = logits.flatten(0, 1), targets.flatten()
        known = goal.clamp(min=0)
        if kind.startswith("loop"):
            return None
        each = F.cross_entropy(flat, known, reduction="none").view_as(targets)
        if kind == "sum":
            return F.cross_entropy(flat, goal, reduction="sum")
        if kind == "class weights":
            return F.cross_entropy(flat, goal, weight=self.balance)
        if kind == "row weights":
            return (each.mean(1) * rest[-1]).sum() / rest[-1].sum()
        loss = F.cross_entropy(flat, goal)
        share = F.one_hot(known, CLASSES).to(flat.dtype).mean(0)
        rows = hidden.mean(1)
        chosen = self.gate(hidden).softmax(-1).flatten(0, 1)  # of two experts
        made: dict[str, Callable[[], torch.Tensor]] = {
            "mean": lambda: each.mean(),
            "regularised": lambda: loss + 0.01 * sum(p.square().sum() for p in self.parameters()),
            "balanced": lambda: F.cross_entropy(flat, known, weight=1 / (share + 0.1)),
            "contrastive": lambda: F.cross_entropy(rows @ rows.t(), torch.arange(len(rows))),
            "root": lambda: loss.sqrt(),
            "focal": lambda: ((1 - (-each).exp()).square() * each).mean(),
            "smoothed": lambda: F.cross_entropy(flat, goal, label_smoothing=0.1),
            "row sums": lambda: each.sum(1).mean(),
            "router": lambda: loss + 2 * (chosen.mean(0) * F.one_hot(chosen.argmax(-1), 2).to(flat.dtype).mean(0)).sum(),
            "items": lambda: each.sum() / items,
            "learned": lambda: each.mean() * (-self.log_scale).exp() + self.log_scale,
            "variance": lambda: each.mean() + F.relu(1 - (rows.var(0, unbiased=False) + 1e-3).sqrt()).mean(),
            "one number": lambda: each.mean().view(1),
            "each row": lambda: each.mean(1),
            "penalty": lambda: each.mean() + 0.1 * logits.logsumexp(-1).square().mean(),
        }  # fmt: skip
        return made.get(kind, lambda: loss)()

    def _output(self, hidden: Any, logits: Any, loss: torch.Tensor | None, targets: torch.Tensor) -> Any:
        kind, case = self.case["output"], self.case
        if case["loss"] == "two" and loss is not None:
            return {"classes": loss, "size": hidden.square().mean()}
        made: dict[str, Callable[[], Any]] = {
            "dict": lambda: {"logits": logits, "loss": loss, "name": "net"},
            "tuple": lambda: (logits, loss, hidden),
            "named tuple": lambda: Pair(hidden, {"logits": logits, "loss": loss}),
            "dataclass": lambda: Result(logits, loss, {"hidden": [hidden]}),
            "object": lambda: Custom(logits, loss),
            "slots": lambda: Slots(logits, loss),
            "ordered": lambda: OrderedDict(loss=loss, logits=logits),
            "nested": lambda: {"out": [{"logits": (logits,), "loss": loss}], "count": 3},
            "metrics": lambda: {
                "logits": logits, "loss": loss, "right": (logits.argmax(-1) == targets).sum(), "rows": len(targets),
            },
        }  # fmt: skip
        if kind == "nothing" and loss is not None:
            self.kept_loss = loss
            return None
        if kind == "only loss" and loss is not None:
            return (loss,)
        return made.get(kind, lambda: logits if loss is None else loss)()


def batch(case: Case, step: int) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]:
    """The arguments of one call, and its targets."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    rows, dtype = case.sizes[step], getattr(torch, case["dtype"])
    length = LENGTH - (case["batch"] == "uneven" and step == 1 and case["input"] != "packed")
    inputs: Any = torch.randn(rows, length, 4, generator=generator, dtype=dtype)
    targets = torch.randint(0, CLASSES, (rows, length), generator=generator)
    if case["loss"] in ("targets", "regularised", "class weights", "smoothed"):
        targets[1:2, 1:] = -100
    rest: list[Any] = []
    options: dict[str, Any] = {"items": 17} if case["loss"] == "items" else {}
    kind = case["input"]
    if kind == "recurrent state":
        rest.append(torch.randn(2, rows, WIDTH, generator=generator, dtype=dtype))
    elif kind == "mask":
        rest.append((torch.rand(rows, length, generator=generator) > 0.3).to(dtype))
    elif kind == "square mask":
        rest.append(
            torch.zeros(length, length, dtype=dtype).masked_fill_(torch.ones(length, length).triu(1).bool(), -9.0)
        )
    elif kind == "row masks":
        rest.append(torch.randn(rows, length, length, generator=generator, dtype=dtype))
    elif kind == "texts":
        rest.append(["ab" * (1 + row % 3) for row in range(rows)])
    elif kind == "lengths":
        rest.append([1 + (row + step) % length for row in range(rows)])
    elif kind == "graph":
        rest.append(torch.arange(rows) // 2)
    elif kind == "segments":
        rest.append(torch.tensor([0, 0, 1])[:length].expand(rows, length))
    elif kind == "numbers":
        options |= {"scale": 0.5, "flag": True, "nothing": None}
    elif kind == "numpy":
        inputs = inputs.numpy()
    elif kind == "list":
        inputs = [*inputs]
    elif kind == "packed" and rows:
        lengths = torch.randint(1, length + 1, (rows,), generator=generator)
        inputs = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
    elif kind == "time first":
        inputs = inputs.transpose(0, 1)
    if case["loss"] == "row weights":
        rest.append(torch.rand(rows, generator=generator, dtype=dtype) + 0.1)
    if kind == "keywords":
        return (), {"inputs": inputs, "targets": targets, **options}, targets
    if kind in ("dict", "dataclass") and not rest:
        given = Batch(inputs, targets) if kind == "dataclass" else {"inputs": inputs, "targets": targets}
        return (given,), options, targets
    return (inputs, targets, *rest), options, targets


def loss_of(case: Case, model: Net, output: Any, targets: torch.Tensor, captured: dict[str, Any]) -> torch.Tensor:
    """What the loop differentiates."""
    if output is None:
        loss = model.kept_loss
    elif case["loss"] == "two":
        loss = sum(output.values()) if isinstance(output, dict) else output
    else:
        loss, logits = _parts(output)
        loss = _loop_loss(case, model, logits, targets, captured) if loss is None else loss
    if case["capture"] == "auxiliary":
        loss = loss + model.features
    elif case["capture"] == "auxiliary list":
        loss = loss + 0.1 * sum(model.auxiliary)
        model.auxiliary.clear()
    return loss.mean() if loss.dim() else loss


def _parts(output: Any) -> tuple[Any, Any]:
    """Loss and logits of an output."""
    if isinstance(output, dict) and "out" in output:
        return output["out"][0]["loss"], output["out"][0]["logits"][0]
    if isinstance(output, Pair):
        output = output.logits
    if isinstance(output, (Result, Custom, Slots)):
        return output.loss, output.logits
    if isinstance(output, dict):
        return output["loss"], output["logits"]
    if isinstance(output, tuple):
        return (output[0], None) if len(output) == 1 else (output[1] if len(output) == 3 else None, output[0])
    return (None, output) if output.dim() == 3 else (output, None)


def _loop_loss(case: Case, model: Net, logits: Any, targets: torch.Tensor, captured: dict[str, Any]) -> torch.Tensor:
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    rows = logits.mean(1)
    if case["loss"] == "loop on capture":
        features = model.features if case["capture"] == "attribute" else captured["out"]
        return loss + features.square().mean()
    if case["loss"] == "loop contrastive":
        return loss + F.cross_entropy(rows @ rows.t(), torch.arange(len(rows)))
    if case["loss"] == "loop each row":
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).sum(1).mean()
    if case["loss"] == "loop triplets":
        return (
            loss
            + F.relu(0.1 + (rows - rows.roll(1, 0)).square().sum(1) - (rows - rows.roll(2, 0)).square().sum(1)).mean()
        )
    return loss


class Kept:
    """Where a hook keeps what it sees."""

    def __init__(self) -> None:
        self.seen: torch.Tensor | None = None


class Loop:
    """A case under way.

    Args:
        case: what to train.
    """

    def __init__(self, case: Case) -> None:
        SEEN.clear()
        Net.shared = None
        self.case = case
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.model = Net(case)
        self.captured: dict[str, Any] = {}
        self.kept, self.listed = Kept(), []
        hooks: dict[str, Callable[..., None]] = {
            "hook dict": lambda _m, _i, out: self.captured.update(out=out),
            "hook list": lambda _m, _i, out: self.listed.append(out),
            "detached list": lambda _m, _i, out: self.listed.append(out.detach().mean(-1)),
            "object": lambda _m, _i, out: setattr(self.kept, "seen", out),
        }
        if case["capture"] in hooks:
            self.model.enter.register_forward_hook(hooks[case["capture"]])
        kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1), "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
        }  # fmt: skip
        self.optimizer = kinds[case["optimizer"]](self.model.parameters())
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        self.losses: list[torch.Tensor] = []
        self.gradients: list[list[torch.Tensor | None]] = []
        self.extra: list[Any] = []

    def loss(self, step: int, call: Callable[..., Any] | None = None) -> torch.Tensor:
        """The loss of one batch, of which what the loop looks at later is kept."""
        args, kwargs, targets = batch(self.case, step)
        output = (call or self.model)(*args, **kwargs)
        self.output = output
        return loss_of(self.case, self.model, output, targets, self.captured)

    def train(self, steps: int | None = None) -> None:
        """Do all steps, or so many."""
        for step in range(len(self.case.sizes) if steps is None else steps):
            self._step(step)

    def _step(self, step: int) -> None:
        kind, model, optimizer = self.case["loop"], self.model, self.optimizer
        if kind == "closure":
            self.losses.append(optimizer.step(lambda: self._backward(self.loss(step), clears=True)).detach())  # type: ignore[arg-type]
            return
        if kind == "evaluates":
            model.eval()
            with torch.no_grad():
                self.extra.append(self.loss(step).detach())
            model.train()
            if self.case["norm"] == "frozen batch":
                model.norm.eval()
        elif kind == "no gradients":
            with torch.no_grad():
                self.extra.append(self.loss(step))
        loss = self.loss(step)
        if kind == "two forwards":
            loss = loss + 0.5 * self.loss(step)
        elif kind == "scales":
            loss = loss / 4
        elif kind == "twice":
            self._backward(self.loss(step) / 2, clears=True)
            loss = loss / 2
        if kind == "autograd.grad":
            found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.grad = gradient
        else:
            self._backward(loss, clears=kind != "twice")
        if kind == "clips":
            self.extra.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        self.losses.append(loss.detach())
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        if kind == "reads after the step" and self.output is not None:
            self.extra += (
                [part.detach().sum() for part in _parts(self.output) if part is not None]
                if self.case["loss"] != "two"
                else []
            )

    def _backward(self, loss: torch.Tensor, *, clears: bool) -> torch.Tensor:
        if clears:
            self.optimizer.zero_grad()
        loss.backward(retain_graph=self.case["loop"] == "retains")
        return loss

    def seen(self) -> dict[str, Any]:
        """What there is to see."""
        model = self.model
        features = model.features.logits if isinstance(model.features, Slots) else model.features
        return {
            "losses": self.losses, "gradients": self.gradients, "extra": self.extra,
            "weights": [p.detach().clone() for p in model.parameters()],
            "moments": [value for state in self.optimizer.state.values() for value in state.values()],
            "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
            "attributes": (
                model.calls, model.total, list(model.log), list(model.recent), torch.from_numpy(model.numbers), model.counts,
                model.last, model.__dict__.get("stream"),
                sorted(name for name in vars(model) if not name.startswith("_")),
            ),
            "features": features, "class": Net.shared, "auxiliary": model.auxiliary,
            "captured": [*self.captured.values(), *self.listed, *SEEN], "object": self.kept.seen,
            "random": (torch.rand(2), random.random(), np.random.rand(2)),
            "own random": (
                torch.rand(2, generator=model.torch_numbers), model.numpy_numbers.random(2), model.python_numbers.random(),
            ),
        }  # fmt: skip


def run(case: Case, flags: str, steps: int | None = None) -> dict[str, Any]:
    """Train, and gather what there is to see.

    Raises:
        RefusalError: the plan does not apply; what was gathered until then is its `seen`.
    """
    loop = Loop(case)
    if not flags:
        loop.train(steps)
        return loop.seen()
    with fit(Workload(loop.model, loop.optimizer), flags) as session:
        try:
            loop.train(steps)
        except RefusalError as refusal:
            refusal.seen = loop.seen()  # type: ignore[attr-defined]
            raise
        return {**loop.seen(), "notes": session.notes}


def by_hand(case: Case, parts: int) -> dict[str, Any]:
    """Accumulation written by hand: for a loss of the model that is a mean over rows, or any loss of the loop."""
    loop = Loop(case)
    for step, rows in enumerate(case.sizes):
        whole = batch(case, step)
        loop.optimizer.zero_grad()
        outputs = []
        for start, stop in row_ranges(rows, min(parts, rows)):
            given, options, goal = _taken(whole, start, stop, rows)
            outputs.append(loop.model(*given, **options))
            if not case["loss"].startswith("loop"):
                loss = loss_of(case, loop.model, outputs[-1], goal, {})
                (loss * (stop - start) / rows).backward()
        if case["loss"].startswith("loop"):
            loss_of(case, loop.model, torch.cat(outputs), whole[2], {}).backward()
        loop.gradients.append([None if p.grad is None else p.grad.clone() for p in loop.model.parameters()])
        loop.optimizer.step()
    return loop.seen()


def _taken(value: Any, start: int, stop: int, rows: int) -> Any:
    """Some rows of arguments."""
    if isinstance(value, dict):
        return {key: _taken(each, start, stop, rows) for key, each in value.items()}
    if isinstance(value, Batch):
        return Batch(value.inputs[start:stop], value.targets[start:stop])
    if isinstance(value, tuple):
        return tuple(_taken(each, start, stop, rows) for each in value)
    is_split = isinstance(value, (list, torch.Tensor, np.ndarray)) and len(value) == rows
    return value[start:stop] if is_split else value


def difference(found: Any, expected: Any, tolerance: float = 1e-5, path: str = "") -> str:
    """Where two gathered runs are further apart, relatively; empty where nowhere."""
    if isinstance(expected, dict):
        pairs = [(found.get(key), value, key) for key, value in expected.items()]
    elif isinstance(expected, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(expected):
            return f"{path}: {found if found is None else len(found)} things for {len(expected)}"
        pairs = [(one, other, place) for place, (one, other) in enumerate(zip(found, expected, strict=True))]
    elif expected is None or found is None or isinstance(expected, str):
        return "" if expected is found or expected == found else f"{path}: {found} for {expected}"
    else:
        return _apart(found, expected, tolerance, path)
    return next(filter(None, (difference(a, b, tolerance, f"{path}/{key}") for a, b, key in pairs)), "")


def _apart(found: Any, expected: Any, tolerance: float, path: str) -> str:
    one, other = (torch.as_tensor(each).detach().double() for each in (found, expected))
    if one.shape != other.shape:
        return f"{path}: shape {tuple(one.shape)} for {tuple(other.shape)}"
    if not torch.equal(one.isnan(), other.isnan()):
        return f"{path}: {found} for {expected}"
    one, other = one.nan_to_num(), other.nan_to_num()
    apart = float((one - other).norm() / other.norm().clamp(min=0.1)) if other.numel() else 0.0
    return "" if apart <= tolerance and not math.isnan(apart) else f"{path}: {apart:.1e} off"
