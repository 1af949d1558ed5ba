"""Finding linear layers, and the feed-forward parts of a model: two of them around a wider intermediate result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.runtime.autocast import without_autocast
from memlab.runtime.fp32_products import exact_products
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.rng import Randomness
from memlab.runtime.stand_ins import is_ours
from memlab.runtime.surroundings import Surroundings
from memlab.techniques.accumulation.noise import Noise, StrangeDrawError

# methods that hold the feed-forward part of a block that has no module for it: BERT and its kin, and torch's own
_METHODS = ("feed_forward_chunk", "_ff_block")
# up to this much of the widest weight is no attention that happens to look alike: low-rank adapters
_ADAPTER_SHARE = 1 / 8
# relative difference up to which two results of the same rows count as equal: in fp32, and in half precision
_TOLERANCE, _LOW_TOLERANCE = 1e-4, 3e-2


@dataclass(frozen=True)
class Linear:
    """A linear layer with a plain weight: `nn.Linear` itself or Transformers' `Conv1D`; subclasses compute otherwise."""

    module: nn.Module
    inputs: int
    outputs: int

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight  # type: ignore[return-value]

    @property
    def is_transposed(self) -> bool:
        """Return whether the weight is [inputs, outputs]."""
        return type(self.module) is not nn.Linear

    @property
    def weight_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


@dataclass(frozen=True)
class FeedForward:
    """A part of a model that treats every row alike, with a result in between that is wider than what goes in."""

    owner: nn.Module  # the module it is the method of
    method: str  # its name: "forward", or one of a block
    linears: tuple[Linear, ...]  # the layers onto the intermediate result and away from it

    @property
    def weight_bytes(self) -> int:
        """Bytes of the largest weight."""
        return max(linear.weight_bytes for linear in self.linears)


def linear_of(module: nn.Module) -> Linear | None:
    """A module as a linear layer; None for others, among them layers whose weight is computed or packed.

    Example:
        >>> linear_of(nn.Linear(3, 4)).outputs, linear_of(nn.ReLU())
        (4, None)
    """
    is_conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    if not (type(module) is nn.Linear or is_conv1d):  # scripted modules have no tables to look into
        return None
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return None
    outputs, inputs = weight.shape if type(module) is nn.Linear else reversed(weight.shape)
    return Linear(module, inputs, outputs)


def linears_of(module: nn.Module) -> list[Linear]:
    """The linear layers within a module, each once."""
    return [linear for part in module.modules() if (linear := linear_of(part)) is not None]


def feed_forwards(model: nn.Module) -> list[FeedForward]:
    """The feed-forward parts of a model, innermost ones only; never the model as a whole.

    Example:
        >>> block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> [part.method for part in feed_forwards(nn.Sequential(block, nn.Linear(8, 2)))]
        ['forward']
    """
    return [part for child in model.children() for part in _within(child)]


def _within(module: nn.Module) -> Iterator[FeedForward]:
    found = [part for child in module.children() for part in _within(child)]
    if found:
        yield from found
        return
    around = _around_a_wide_result(linears_of(module))
    if around is None:
        return
    method = next((name for name in _METHODS if callable(getattr(type(module), name, None))), None)
    if method is None and _has_nothing_else(module, around):
        method = "forward"
    if method is not None:
        yield FeedForward(module, method, around)


def _around_a_wide_result(linears: list[Linear]) -> tuple[Linear, ...] | None:
    """The layers onto a result wider than what went in and what comes out, and away from it; twice as wide with a gate."""
    for down in sorted(linears, key=lambda linear: -linear.weight.numel()):
        onto = [up for up in linears if up.inputs == down.outputs and up.outputs in (down.inputs, 2 * down.inputs)]
        if onto and down.inputs > down.outputs:
            away = [other for other in linears if (other.inputs, other.outputs) == (down.inputs, down.outputs)]
            return (*onto, *away)
    return None


def _has_nothing_else(module: nn.Module, around: tuple[Linear, ...]) -> bool:
    """Return whether all other parameters belong to norms over features, or to adapters."""
    largest = max(linear.weight.numel() for linear in around)
    own = {id(linear.module) for linear in around}

    def belongs(part: nn.Module) -> bool:
        if not part._parameters or id(part) in own:
            return True
        if type(part).__name__.endswith(("LayerNorm", "RMSNorm")):
            return True
        linear = linear_of(part)
        return linear is not None and linear.weight.numel() <= _ADAPTER_SHARE * largest

    return all(belongs(part) for part in module.modules())


def has_hooks(part: FeedForward) -> bool:
    """Return whether the loop has put hooks on modules within a part; they would be called for each tile."""
    # its own are called once, around it
    inner = (module for module in part.owner.modules() if module is not part.owner)
    hooks = (
        hook
        for module in inner
        for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        for hook in vars(module).get(name, {}).values()
    )
    return not all(map(is_ours, hooks))


def treats_rows_alike(part: FeedForward) -> bool:
    """Return whether rows give the same alone as beside others, as seen on three rows of noise with the same random numbers.

    A part whose forward changes state would change it once for each tile, and so does not. Where weights have no values, in a
    prediction, rows are taken to be treated alike.
    """
    weight = part.linears[0].weight
    if isinstance(weight, FakeTensor):
        return True
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, part.linears[0].inputs, generator=generator, device="cpu").to(weight)
    before = Surroundings(part.owner)
    random = Randomness(before.generators)
    try:
        with torch.no_grad(), without_autocast(), exact_products():
            return all(_are_alike(part, rows, dim) for dim in (0, 1)) and not before.effects()
    except (RuntimeError, TypeError, ValueError, IndexError, StrangeDrawError) as error:
        if is_out_of_memory(error):
            raise
        return False  # it takes something else than rows of features
    finally:
        before.restore(strict=False)
        random.restore()


def _are_alike(part: FeedForward, rows: torch.Tensor, dim: int) -> bool:
    """Return whether rows that follow one another in a dimension, the batch's or that of positions, give the same alone."""
    call, drawn = getattr(part.owner, part.method), Noise()
    with drawn:
        together, apart = call(rows.unsqueeze(1 - dim)), []
        for row in range(len(rows)):
            drawn.give(row, row + 1, of=len(rows))
            apart.append(call(rows[row].view(1, 1, -1)))
    if not isinstance(together, torch.Tensor) or together.shape[:-1] != rows.unsqueeze(1 - dim).shape[:-1]:
        return False
    alone = torch.cat(apart, dim)
    tolerance = _LOW_TOLERANCE if alone.dtype.itemsize < 4 else _TOLERANCE
    return bool(torch.allclose(together, alone, 0.0, tolerance * float(alone.abs().max())))
