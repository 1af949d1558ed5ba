"""`REPLACEMENTS`: the optimizers that can stand in for a user's Adam. All that is known of each stands in its row."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch

from memlab.errors import RefusalError
from memlab.extras import require
from memlab.plan import OptimizerChoice
from memlab.runtime.homes import stood_for
from memlab.runtime.modules import repeated_blocks
from memlab.techniques.base import Description
from memlab.techniques.optimizer import four_bit, low_rank, state_formats

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter


@dataclass(frozen=True)
class Replacement:
    """An optimizer in place of the user's."""

    make: Callable[[list[Parameter]], Optimizer]  # makes one for some parameters
    form: Callable[[], state_formats.StateFormat]  # makes the format of its state
    is_already: Callable[[Optimizer], bool]  # whether an optimizer needs no conversion
    notes: tuple[str, ...]  # what the log and the receipt say
    description: Description | None = None  # for the cheat sheet; None where nobody would look for it there
    settings: tuple[str, ...] = ("lr", "weight_decay", "betas", "eps")  # those of a group that it reads
    # of its learning rate to AdamW's for steps of AdamW's size; weight decay is divided by it, so that as much decays
    rate: float = 1.0
    package: str = ""  # what it needs to be installed
    kernel: str = ""  # the operator of that package which updates, and has kernels for some backends alone
    backends: tuple[str, ...] = ("cpu", "cuda", "xpu")  # that it is known to have them for
    dtypes: tuple[torch.dtype, ...] = ()  # of the parameters that it can update; empty for all
    adds_decay: bool = False  # whether it adds weight decay to the gradient, as Adam does and AdamW does not
    refuse: Callable[[Optimizer], None] = lambda _optimizer: None  # raises a refusal of its own
    # those of a model that it updates, where AdamW updates the others
    parameters: Callable[[torch.nn.Module], Collection[Parameter]] | None = None
    code: tuple[str, str] = ("", "")  # in exported code, an import and the call; empty where no call does it
    trainer: str = ""  # name in TrainingArguments; empty where it has none


def is_torch_adam(optimizer: Optimizer) -> bool:
    """Return whether it is torch's Adam, or made from it."""
    return isinstance(optimizer, torch.optim.Adam)


def is_bnb_adam(optimizer: Optimizer) -> bool:
    """Return whether it is an Adam of bitsandbytes."""
    own = any(kind.__module__.startswith("bitsandbytes.") for kind in type(optimizer).__mro__)
    return own and getattr(optimizer, "optimizer_name", "") == "adam"


def couples_decay(optimizer: Optimizer) -> bool:
    """Return whether weight decay goes through the moments, as in torch's Adam and unlike in AdamW."""
    groups = optimizer.param_groups
    return is_torch_adam(optimizer) and any(g["weight_decay"] and not g.get("decoupled_weight_decay") for g in groups)


def bnb_format_of(optimizer: Optimizer) -> state_formats.BnbAdamFormat:
    """The format of an Adam of bitsandbytes."""
    bits, smallest = (int(getattr(optimizer.args, name)) for name in ("optim_bits", "min_8bit_size"))  # type: ignore[attr-defined]
    return state_formats.BnbAdamFormat(bits, smallest, bool(getattr(optimizer, "is_paged", False)))


def matrices_of_blocks(model: torch.nn.Module) -> list[Parameter]:
    """Matrices that lie in the blocks a model repeats, and nowhere else; without embeddings.

    Example:
        >>> blocks = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)) for _ in range(2))
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Sequential(*blocks), torch.nn.Linear(4, 9))
        >>> [tuple(parameter.shape) for parameter in matrices_of_blocks(model)]
        [(4, 4), (4, 4)]
    """
    inside = {id(module) for block in repeated_blocks(model) for module in block.modules()}
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    others: set[int] = set()
    matrices: dict[int, Parameter] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(module) not in inside or isinstance(module, embeddings):
                others.add(id(parameter))
            elif parameter.dim() == 2 and parameter.is_floating_point():
                matrices[id(parameter)] = parameter
    return [parameter for key, parameter in matrices.items() if key not in others]


def _adafactor(parameters: list[Parameter]) -> Optimizer:
    kind = require("transformers").Adafactor
    settings = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    return kind(parameters, lr=0.0, **settings)  # type: ignore[no-any-return]


def _is_8bit(optimizer: Optimizer, *, paged: bool) -> bool:
    form = bnb_format_of(optimizer) if is_bnb_adam(optimizer) else None
    return form is not None and form.bits == 8 and (form.paged or not paged)


def _refuse_paging_off_cuda(optimizer: Optimizer) -> None:
    device = stood_for(optimizer.param_groups[0]["params"][0])
    if device.type != "cuda":
        reason = f"paged-adam8bit needs a CUDA GPU with unified memory, and the model is on {device}"
        raise RefusalError("optimizer", reason, "nearest: --adam8bit")


_CLOSE = "moments are kept in 8 bits; turning them into fp32 again is close, not bit-exact"
_8BIT_UPDATE = "bitsandbytes::optimizer_update_8bit_blockwise"
_NUMBERS = (torch.float32, torch.float16, torch.bfloat16)
# Lion moves each element by the learning rate; AdamW's steps have a root mean square of about a fifth of it, see torch.optim.Muon
_LION = 0.2
REPLACEMENTS: dict[OptimizerChoice, Replacement] = {
    OptimizerChoice.ADAMW: Replacement(
        torch.optim.AdamW, state_formats.TorchAdamFormat, lambda optimizer: is_torch_adam(optimizer) and not couples_decay(optimizer),
        ("moments are converted to fp32; going back to 8 bits is not bit-exact",),
        code=("", "torch.optim.AdamW(model.parameters(), lr=lr)"), trainer="adamw_torch",
    ),
    OptimizerChoice.ADAM8BIT: Replacement(
        lambda parameters: require("bitsandbytes").optim.AdamW8bit(parameters), state_formats.BnbAdamFormat, partial(_is_8bit, paged=False),
        (_CLOSE,),
        Description(
            flags="--adam8bit",
            saves="moments: 8 → 2.03 bytes per parameter",
            costs="two conversions an update",
            exactness="8-bit moments: loss within 0.1 % over 100 steps of fine-tuning",
            gives_nothing="the peak is mostly activations; parameters below 4096 elements stay as they are; refused for optimizers other than Adam and AdamW",
        ),
        package="bitsandbytes", kernel=_8BIT_UPDATE, dtypes=_NUMBERS,
        code=("import bitsandbytes", "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=lr)"), trainer="adamw_bnb_8bit",
    ),
    OptimizerChoice.PAGED_ADAM8BIT: Replacement(
        lambda parameters: require("bitsandbytes").optim.PagedAdamW8bit(parameters), partial(state_formats.BnbAdamFormat, paged=True),
        partial(_is_8bit, paged=True), (_CLOSE, "bitsandbytes returns paged memory only when the kernel ends"),
        Description(
            flags="--optim paged-adam8bit",
            saves="the same, and moments move to the host when memory is short",
            costs="copies while memory is short",
            exactness="as --adam8bit",
            gives_nothing="as --adam8bit; refused without CUDA",
        ),
        package="bitsandbytes", kernel=_8BIT_UPDATE, dtypes=_NUMBERS, refuse=_refuse_paging_off_cuda,
        code=("import bitsandbytes", "bitsandbytes.optim.PagedAdamW8bit(model.parameters(), lr=lr)"),
        trainer="paged_adamw_8bit",
    ),
    OptimizerChoice.ADAMW4BIT: Replacement(
        four_bit.FourBitAdamW, four_bit.FourBitFormat, lambda optimizer: type(optimizer).__name__ == "AdamW4bit",
        ("moments are kept in 4 bits; turning them into fp32 again is close, not bit-exact",),
        Description(
            flags="--optim adamw4bit",
            saves="moments: 8 → 1.06 bytes per parameter",
            costs="an update in slices, of 30 operators each",
            exactness="4-bit moments, as torchao's: loss within 2 % over 25 steps of small models",
            gives_nothing="the peak is mostly activations; parameters below 4096 elements, or of no multiple of 128, stay as they are",
        ),
        dtypes=_NUMBERS, code=("import torchao.optim", "torchao.optim.AdamW4bit(model.parameters(), lr=lr)"), trainer="adamw_torch_4bit",
    ),
    OptimizerChoice.LION8BIT: Replacement(
        lambda parameters: require("bitsandbytes").optim.Lion8bit(parameters), state_formats.BnbLionFormat,
        lambda optimizer: type(optimizer).__name__ in ("Lion8bit", "PagedLion8bit"),
        ("Lion goes on with Adam's first moment, at a fifth of the learning rate and five times the weight decay; the moments "
         "come back as they were until the first step, after that they start again from zero",),
        Description(
            flags="--optim lion8bit",
            saves="moments: 8 → 1.02 bytes per parameter",
            costs="a conversion an update",
            exactness="another algorithm, with AdamW's size of a step",
            gives_nothing="the peak is mostly activations",
        ),
        settings=("lr", "weight_decay"), rate=_LION, package="bitsandbytes", kernel=_8BIT_UPDATE, dtypes=_NUMBERS,
        code=("import bitsandbytes",
              f"bitsandbytes.optim.Lion8bit(model.parameters(), lr={_LION} * lr, weight_decay={0.01 / _LION:g})"),
        trainer="lion_8bit",
    ),
    OptimizerChoice.ADAFACTOR: Replacement(
        _adafactor, state_formats.AdafactorFormat, lambda optimizer: type(optimizer).__name__ == "Adafactor",
        ("Adafactor keeps row and column means of the second moment and no first moment; both come back as they "
         "were until the first step, after that the first moment starts again from zero",),
        Description(
            flags="--optim adafactor",
            saves="moments: 8 → 0.02 bytes per parameter",
            costs="row and column means instead of moments",
            exactness="another algorithm, without first moments",
            gives_nothing="the peak is mostly activations",
        ),
        settings=("lr", "weight_decay"), package="transformers", dtypes=(*_NUMBERS, torch.float64), trainer="adafactor",
        code=("from transformers.optimization import Adafactor",
              "Adafactor(model.parameters(), lr=lr, scale_parameter=False, relative_step=False, warmup_init=False)"),
    ),
    OptimizerChoice.SGD: Replacement(
        torch.optim.SGD, state_formats.NoMomentsFormat, lambda optimizer: isinstance(optimizer, torch.optim.SGD),
        ("SGD keeps no moments and may need another learning rate; the moments come back as they were until the "
         "first step, after that they start again from zero",),
        Description(
            flags="--optim sgd",
            saves="all moments",
            costs="no time per update, but often more steps",
            exactness="another algorithm",
            gives_nothing="the peak is mostly activations",
        ),
        settings=("lr", "weight_decay"), adds_decay=True,
        code=("", "torch.optim.SGD(model.parameters(), lr=lr)"), trainer="sgd",
    ),
    OptimizerChoice.MUON: Replacement(
        # scaled to AdamW's size of a step, so that a learning rate and a weight decay chosen for AdamW stay right
        lambda parameters: torch.optim.Muon(parameters, adjust_lr_fn="match_rms_adamw"), state_formats.MuonFormat,
        lambda optimizer: type(optimizer).__name__ == "Muon",
        ("Muon updates the matrices of blocks, with Adam's first moment as its momentum, and AdamW all else; the moments "
         "of those matrices come back as they were until the first step, after that they start again from zero",),
        Description(
            flags="--optim muon",
            saves="moments of the matrices in blocks: 8 → 4 bytes per parameter",
            costs="15 products of each matrix with another an update",
            exactness="another algorithm, at AdamW's learning rate; embeddings, heads, vectors and convolutions stay with AdamW",
            gives_nothing="the peak is mostly activations, or embeddings; refused without repeated blocks",
        ),
        settings=("lr", "weight_decay"), parameters=matrices_of_blocks,
    ),
    OptimizerChoice.APOLLO: Replacement(
        low_rank.Apollo, low_rank.LowRankFormat, lambda optimizer: type(optimizer).__name__ in ("APOLLO", "APOLLOAdamW"),
        ("APOLLO updates the matrices of blocks, with moments in a random subspace, and AdamW all else; the moments "
         "of those matrices come back as they were until the first step, after that they start again from zero",),
        Description(
            flags="--optim apollo",
            saves="moments of the matrices in blocks: 8 → 0.4 bytes per parameter at a width of 4096, 2 at 768",
            costs="a product of each matrix with a narrow one an update",
            exactness="another algorithm, with AdamW's size of a step; embeddings, heads, vectors and convolutions stay with AdamW",
            gives_nothing="the peak is mostly activations, or embeddings; refused without repeated blocks",
        ),
        dtypes=_NUMBERS, parameters=matrices_of_blocks,
    ),
}  # fmt: skip
