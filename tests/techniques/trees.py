"""Models of many kinds of module trees, made from a seed: what checkpointing has to serve without knowing it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Residual(nn.Module):
    def __init__(self, body: nn.Module, *, in_place: bool) -> None:
        super().__init__()
        self.body, self.in_place = body, in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_place:
            return x + self.body(x)
        h = self.body(x) * 1.0
        h += x
        return h


class Branches(nn.Module):
    """Several outputs in a dictionary, which another module gets by keyword."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.split, self.join = Split(left, right), Join()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(**self.split(x))


class Split(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"left": self.left(x), "right": self.right(x)}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, *, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.mix(torch.cat([left, right], 1))


class UNet(nn.Module):
    def __init__(self, down: nn.Module, middle: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down, self.middle, self.up, self.join = down, middle, up, Join()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        h = F.interpolate(self.middle(F.max_pool2d(skip, 2)), scale_factor=2)
        return self.up(self.join(left=skip, right=h))


@dataclass
class Pair:
    """What some modules return and take: no container that torch knows."""

    value: torch.Tensor
    log: list[float]


class MakesPair(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(self.body(x), [float(x.detach().mean())])


class TakesPair(nn.Module):
    """Writes into the object it is given."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, pair: Pair) -> torch.Tensor:
        pair.log.append(float(pair.value.detach().mean()))
        pair.value = pair.value * (1 + 0.01 * len(pair.log))
        return self.body(pair.value)


class ThroughPair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = MakesPair(first), TakesPair(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = self.first(x)
        return self.second(pair) + pair.value * len(pair.log)


class StochasticDepth(nn.Module):
    """Left out at random, by whichever random numbers."""

    def __init__(self, body: nn.Module, source: str) -> None:
        super().__init__()
        self.body, self.source = body, source
        self.own = random.Random(3)
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = {
            "python": random.random,
            "numpy": np.random.rand,
            "torch": lambda: float(torch.rand(())),
            "own": self.own.random,
            "generator": lambda: float(torch.rand((), generator=self.generator)),
        }[self.source]()
        if self.training and drawn < 0.5:
            return x
        return x + drawn * self.body(x)


class Counting(nn.Module):
    """Counts in an attribute, a buffer and a list, and computes with the counts."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("running", torch.zeros(WIDTH))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        self.seen.append(float(x.detach().sum()))
        h = (x - self.running[:, None, None]) * (1 + 0.1 * self.calls) * (1 + 0.1 * self.count)
        self.running = 0.9 * self.running + 0.1 * x.detach().mean((0, 2, 3))
        if self.last is not None:
            h = h + 0.1 * self.last.mean()
        h = self.body(h)
        self.last = h.detach()
        return h


class LargeState(nn.Module):
    """A buffer too large to be copied without need, which every forward writes to."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("table", torch.linspace(0, 1, 40_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.table[:100].sum().clone()
        self.table.mul_(0.9)
        return self.body(x * scale * 0.1)


class DependsOnData(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) if x.detach().sum() > 0 else self.right(x)


class Twice(nn.Module):
    """The same module twice, with something that returns nothing in between."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.look = body, Watcher()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        assert self.look(h) is None
        return self.body(h)


class Watcher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def forward(self, x: torch.Tensor) -> None:
        self.means.append(float(x.detach().mean()))


class Rows(nn.Module):
    """A recurrent layer over rows of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(2).transpose(1, 2)
        return self.layer(rows)[0].transpose(1, 2).reshape(x.shape)


class WritesFirst(nn.Module):
    """Its body begins with an activation in place, and what it writes to is used once more."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(inplace=True), body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2.0
        return h + self.body(h)


class Swish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class Attention(nn.Module):
    """Over places, with a mask by keyword, and weights beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x.flatten(2).transpose(1, 2))
        made, weights = self.layer(rows, rows, rows, attn_mask=torch.zeros(rows.size(1), rows.size(1)))
        return x + made.transpose(1, 2).reshape(x.shape) * (1 + weights.mean())


class Dense(nn.Module):
    """Each part gets the list of all results so far, and appends its own."""

    def __init__(self, bodies: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Appends(body) for body in bodies)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for part in self.parts:
            part(features)
        return torch.stack(features).mean(0)


class Appends(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, features: list[torch.Tensor]) -> None:
        features.append(self.body(torch.stack(features).sum(0)))


class Supervised(nn.Module):
    """Keeps a loss of its own, which the loop adds."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.extra_loss: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        self.extra_loss = h.square().mean()
        return h


class Experts(nn.Module):
    """Each image goes to one of three experts."""

    def __init__(self, bodies: list[nn.Module]) -> None:
        super().__init__()
        self.gate, self.bodies = nn.Linear(WIDTH, len(bodies)), nn.ModuleList(bodies)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x.mean((2, 3))).softmax(-1)
        made = torch.zeros_like(x)
        for number, body in enumerate(self.bodies):
            rows = (scores.argmax(-1) == number).nonzero().flatten()
            if len(rows):
                made.index_add_(0, rows, (body(x[rows]) * scores[rows, number, None, None, None]).to(made.dtype))
        return made


class Reversed(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient * ctx.saved_tensors[0].tanh()


class Unusual(nn.Module):
    """Its body, and something around it that is seldom seen."""

    KINDS = (
        "function", "own checkpoint", "autocast", "no_grad", "tensor hook", "fft", "view in place", "straight through", "teacher",
        "recurrent state", "cache", "generator", "optional", "identity", "error", "double", "chunks", "parent's parameter",
    )  # fmt: skip

    def __init__(self, body: nn.Module, kind: str) -> None:
        super().__init__()
        self.body, self.kind = body, kind
        self.scale = nn.Parameter(torch.ones(WIDTH, 1, 1))
        self.scaled = Calls(lambda x: x * self.scale)
        self.cache: dict[str, Any] = {}
        self.inner = Yields(body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind, body = self.kind, self.body
        if kind == "function":
            return Reversed.apply(body(x))
        if kind == "own checkpoint":
            return checkpoint(body, x, use_reentrant=False)
        if kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                h = body(x)
            return h.float()
        if kind == "no_grad":
            with torch.no_grad():
                h = body(x)
            return x + h * self.scale
        if kind == "tensor hook":
            h = body(x)
            if h.requires_grad:
                h.register_hook(lambda gradient: gradient * 0.5)
            return h
        if kind == "fft":
            return torch.fft.ifft2(torch.fft.fft2(body(x)) * self.scale).real
        if kind == "view in place":
            h = body(x) * 1.0
            h[:, 0] += x[:, 1]
            h[0].mul_(0.5)
            return h
        if kind == "straight through":
            h = body(x)
            return h + (h.sign() - h).detach()
        if kind == "teacher":
            with torch.no_grad():
                target = body(x)
            return body(x) - 0.1 * target
        if kind == "recurrent state":
            before = self.cache.get("state")
            self.cache["state"] = body(x if before is None else x + 0.1 * before).detach()
            return x + self.cache["state"] * self.scale
        if kind == "cache":  # filled and emptied within a call
            self.cache["h"] = body(x)
            return self.scaled(self.cache.pop("h"))
        if kind == "generator":
            return sum(self.inner(x))
        if kind == "optional":
            return Join2()(body(x), None, scale=None)
        if kind == "identity":
            return Watches()(x).view_as(x) + body(x)
        if kind == "error":
            try:
                raise ValueError("tried")
            except ValueError:
                return body(x)
        if kind == "double":
            return body(x.double().float() * 1.0)
        if kind == "chunks":
            return torch.cat([body(part) for part in x.chunk(2)])
        return self.scaled(body(x))


class Calls(nn.Module):
    """A function with variables of its own."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Yields(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        yield self.body(x)
        yield x * 0.5


class Join2(nn.Module):
    def forward(self, x: torch.Tensor, other: torch.Tensor | None, *, scale: float | None) -> torch.Tensor:
        return x if other is None or scale is None else x + other * scale


class Watches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _convolution(draw: random.Random) -> nn.Module:
    layer = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
    wrap = draw.choice(["", "", "", "old spectral", "spectral", "old weight", "weight"])
    if wrap == "old spectral":
        return nn.utils.spectral_norm(layer)
    if wrap == "old weight":
        with __import__("warnings").catch_warnings():
            __import__("warnings").simplefilter("ignore")
            return nn.utils.weight_norm(layer)
    if wrap == "spectral":
        return parametrizations.spectral_norm(layer)
    return parametrizations.weight_norm(layer) if wrap == "weight" else layer


def _layers(draw: random.Random) -> list[nn.Module]:
    norm = draw.choice([
        lambda: nn.BatchNorm2d(WIDTH), lambda: nn.BatchNorm2d(WIDTH, momentum=None), lambda: nn.GroupNorm(2, WIDTH),
        lambda: nn.InstanceNorm2d(WIDTH, affine=True, track_running_stats=True), nn.Identity,
    ])()  # fmt: skip
    act = draw.choice([
        lambda: nn.ReLU(inplace=True), lambda: nn.LeakyReLU(0.1, inplace=True), nn.GELU, Swish, nn.Sigmoid,
    ])()  # fmt: skip
    dropped = [nn.Dropout(0.2)] if draw.random() < 0.3 else []
    return [_convolution(draw), norm, act, *dropped]


def _body(draw: random.Random) -> nn.Module:
    layers = [layer for _ in range(draw.randint(1, 3)) for layer in _layers(draw)]
    return nn.Sequential(*layers)


def _block(draw: random.Random, depth: int = 0) -> nn.Module:
    def inner() -> nn.Module:
        return _block(draw, depth + 1) if depth < 1 and draw.random() < 0.4 else _body(draw)

    made = draw.choice([
        lambda: _body(draw), lambda: Residual(inner(), in_place=draw.random() < 0.5), lambda: Branches(inner(), inner()),
        lambda: UNet(inner(), inner(), inner()), lambda: ThroughPair(inner(), inner()), lambda: Counting(inner()),
        lambda: StochasticDepth(inner(), draw.choice(["python", "numpy", "torch", "own", "generator"])),
        lambda: LargeState(inner()), lambda: DependsOnData(inner(), inner()), lambda: Twice(inner()), Rows,
        lambda: WritesFirst(inner()), Attention, lambda: Dense([inner(), inner()]), lambda: Supervised(inner()),
        lambda: Experts([inner(), inner(), inner()]), *[lambda: Unusual(inner(), draw.choice(Unusual.KINDS))] * 6,
        lambda: nn.Sequential(inner(), inner()),
    ])  # fmt: skip
    return made()


class Net(nn.Module):
    """Blocks one after the other, as attributes or in a list, with functions between them."""

    def __init__(self, blocks: list[nn.Module], *, listed: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.names = [f"block{number}" for number in range(len(blocks))]
        if listed:
            self.blocks = nn.ModuleList(blocks)
        else:
            for name, block in zip(self.names, blocks, strict=True):
                setattr(self, name, block)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        h = torch.tanh(self.stem(images))
        for block in self.blocks if hasattr(self, "blocks") else [getattr(self, name) for name in self.names]:
            h = block(h)
        logits = self.head(h.mean((2, 3)))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


_LOOPS = (
    "two forwards",
    "evaluates",
    "twice backward",
    "autograd.grad",
    "by hand",
    "breaks off",
    "penalty",
    "backward hook",
)


class Case:
    """One model with what its loop needs.

    Args:
        seed: all of it follows from it.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = random.Random(seed)
        self.model = self._made(draw)
        self.has_features = draw.random() < 0.3
        self.feature = random.Random(seed).choice(FEATURES)
        self.flags = draw.choice(["--checkpoint"] * 3 + ["--checkpoint every:2", "--checkpoint selective"])
        self.loop = draw.choice(["plain"] * 3 + [*_LOOPS])
        self.images = torch.randn(4, 3, 8, 8)
        self.labels = torch.randint(0, 3, (4,))

    def _made(self, draw: random.Random) -> nn.Module:
        torch.manual_seed(self.seed)
        blocks = [_block(draw) for _ in range(draw.randint(2, 5))]
        if draw.random() < 0.15:
            blocks.append(blocks[0])  # shared
        self.is_sequential = draw.random() < 0.4
        if self.is_sequential:
            parts = [nn.Conv2d(3, WIDTH, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()]
            return nn.Sequential(*parts, nn.Linear(WIDTH, 3))
        return Net(blocks, listed=draw.random() < 0.4)

    def _loss(self, model: nn.Module) -> torch.Tensor:
        if self.is_sequential:
            loss = F.cross_entropy(model(self.images), self.labels)
        else:
            loss = model(self.images, labels=self.labels)["loss"]
        extra = [m.extra_loss for m in model.modules() if isinstance(m, Supervised) and m.extra_loss is not None]
        return loss + 0.1 * sum(extra)

    def another(self) -> nn.Module:
        """The same model once more: those with torch's older spectral norm cannot be copied."""
        return self._made(random.Random(self.seed)).train()

    def trained(self, model: nn.Module, steps: int = 3) -> dict[str, Any]:
        """Train a model for some steps; returns all that it leaves."""
        features: list[torch.Tensor] = []
        statistics = Statistics()
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        hooks = []
        if self.has_features:
            made = self.feature
            watched = convolutions[len(convolutions) // 2]
            hooks.append(watched.register_forward_hook(lambda _m, _i, out: features.append(made(out))))
            hooks.append(watched.register_forward_pre_hook(statistics.update))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - what loops have
        torch.manual_seed(1)
        if self.loop == "backward hook":
            hooks.append(
                convolutions[0].register_full_backward_hook(lambda _m, _i, out: seen.append(float(out[0].sum())))
            )
        losses, seen = [], []
        for step in range(steps):
            if self.loop == "evaluates":
                model.eval()
                with torch.no_grad():
                    losses.append(self._loss(model))
                model.train()
            elif self.loop == "breaks off" and step == 1:
                with contextlib.suppress(RuntimeError):
                    model(self.images[:, :2])
            features.clear()
            loss = self._loss(model)
            if self.loop == "two forwards":
                loss = loss + self._loss(model)
            for feature in features:
                loss = loss + 0.01 * feature.square().mean()
            seen.append(len(features))
            if not (self.loop == "by hand" and step % 2):
                optimizer.zero_grad()
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if self.loop == "autograd.grad":
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
            elif self.loop == "penalty":
                gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
                (loss + 0.1 * sum(g.square().sum() for g in gradients if g is not None)).backward()
            else:
                loss.backward(retain_graph=self.loop == "twice backward")
                if self.loop == "twice backward":
                    loss.backward()
            seen.append(len(features))
            features.clear()
            optimizer.step()
            losses.append(loss.detach())
        for hook in hooks:
            hook.remove()
        return {
            "losses": losses,
            "gradients": [parameter.grad for parameter in model.parameters()],
            "state": dict(model.state_dict()),
            "attributes": [_plain(vars(module)) for module in model.modules()],
            "features": seen,
            "statistics": statistics.products,
            "random": (torch.rand(2), random.random(), float(np.random.rand())),  # noqa: NPY002
            "generators": [
                (m.own.random(), torch.rand(1, generator=m.generator))
                for m in model.modules()
                if isinstance(m, StochasticDepth)
            ],
        }


class Statistics:
    """What preconditioners gather in hooks: products of what layers are given."""

    def __init__(self) -> None:
        self.products = torch.zeros(())

    def update(self, _module: nn.Module, given: Any) -> None:
        rows = given[0].detach().flatten(1)
        self.products = self.products * 0.9 + rows.T @ rows


# what a hook on a layer keeps for a penalty
FEATURES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda output: output,
    lambda output: output.abs() * output,
    lambda output: output.flatten(1) @ output.flatten(1).T,
]


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if not name.startswith("_") and isinstance(value, (int, float, list, torch.Tensor, type(None)))
    }


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two things differ by a single bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if torch.equal(one.nan_to_num(), other.nan_to_num()) else [path]
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [found for key in one for found in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)}"]
        return [f for n, (a, b) in enumerate(zip(one, other, strict=True)) for f in differences(a, b, f"{path}[{n}]")]
    same = one == other or (one != one and other != other)
    return [] if same else [f"{path}: {one} and {other}"]
