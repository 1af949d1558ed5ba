"""Workloads of published tables, and what the libraries of their time did differently.

Where transformers has the model, it is transformers' one. Otherwise it is written here as far as its memory goes: the same sizes
and operators, and nothing else. None has weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import nn
from torch.optim import Optimizer
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from memlab import Workload

EAGER_OF_2022, TORCHTUNE = "eager_of_2022", "torchtune"  # kinds of attention

_GPT_WIDTH, _GPT_HEADS, _GPT_LAYERS = 768, 12, 12
_VIT_WIDTH, _VIT_HEADS, _VIT_LAYERS, _VIT_PATCH = 1024, 16, 24, 16
_LIT_WIDTH, _LIT_HEADS, _LIT_TOKENS = 4096, 32, 128  # tokens in one call of the output layer


@dataclass(frozen=True)
class LitSizes:
    """Sizes of a model of LitGPT.

    Args:
        words: size of the vocabulary, rounded up.
        layers: number of blocks.
        inner: width of the feed-forward part.
        is_llama: as Llama: RMSNorm, gated SiLU, no biases, every number of a head rotated; otherwise as GPT-NeoX: LayerNorm,
            GELU, biases, a quarter rotated, attention and feed-forward part beside each other.
    """

    words: int
    layers: int
    inner: int
    is_llama: bool


STABLELM_3B = LitSizes(50688, 16, 16384, is_llama=False)
LLAMA_7B = LitSizes(32000, 32, 11008, is_llama=True)


def bert_large(*, rows: int = 4, attention: str = "eager") -> Workload:
    """BERT-large on 512 tokens. It was run without fused kernels: attention and AdamW go op by op."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    model = _empty(
        lambda: BertForSequenceClassification(BertConfig(**sizes, num_labels=2, attn_implementation=attention))
    )
    # labels of the article are all zero
    batch = {"input_ids": torch.randint(100, 30000, (rows, 512)), "labels": torch.zeros(rows, dtype=torch.long)}
    return Workload(
        model, torch.optim.AdamW(model.parameters(), weight_decay=0.0, foreach=False), batch=batch, name="BERT-large"
    )


def llama_3b(*, attention: str = "sdpa") -> Workload:
    """The shape of Llama 3.2 3B in bf16. Its optimizer is a fused one: 24.9 GiB leave no room for another."""
    sizes = {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8}
    config = LlamaConfig(
        **sizes, intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True, max_position_embeddings=131072,
        use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    model = _empty(lambda: LlamaForCausalLM(config), torch.bfloat16)
    model.tie_weights()  # which empty weights are no longer
    ids = torch.randint(0, config.vocab_size, (2, 4096))  # [b, s]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Workload(model, optimizer, batch={"input_ids": ids, "labels": ids.clone()}, name="Llama 3.2 3B")


def llama_8b(tokens: int, *, of_liger: str = "") -> Workload:
    """Llama 3.1 8B in bf16 on one text.

    Args:
        tokens: of the text.
        of_liger: which parts save what Liger's kernels do: "norms", "parts" (and feed-forward parts), or neither.
    """
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(
        **sizes, intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072, use_cache=False
    )
    model = _empty(lambda: LlamaForCausalLM(config), torch.bfloat16)
    if of_liger:
        for norm in (each for each in model.modules() if isinstance(each, LlamaRMSNorm)):
            norm.__class__ = LigerNorm
    if of_liger == "parts":
        for block in model.model.layers:
            block.mlp.__class__ = LigerFeedForward
    ids = torch.zeros(1, tokens, dtype=torch.long)  # [b, s]
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model, optimizer, batch={"input_ids": ids, "labels": ids.clone()}, name="Llama 3.1 8B")


def mistral_7b() -> Workload:
    """Mistral 7B in fp16 on 4 × 4096 tokens, as transformers' Trainer has it."""
    model = _empty(lambda: MistralForCausalLM(MistralConfig(use_cache=False)), torch.float16)
    ids = torch.randint(0, 32000, (4, 4096))  # [b, s]
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model, optimizer, batch={"input_ids": ids, "labels": ids.clone()}, name="Mistral 7B")


def gpt_from_scratch(*, dtype: torch.dtype = torch.float32, is_fused: bool = True, **kinds: bool) -> Workload:
    """The GPT of rasbt's book on 8 × 1024 tokens; `kinds` as of `GptFromScratch`."""
    tokens = 1024
    model = _empty(lambda: GptFromScratch(tokens, **kinds), dtype)
    ids = torch.randint(0, 50257, (8, tokens))  # [b, s]
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused, foreach=not is_fused)
    return Workload(model, optimizer, batch=(ids, ids.clone()), loss_fn=_loss_of_tokens, name="GPT from scratch")


def vit_large(
    *,
    rows: int,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = torch.optim.Adam,
    is_of_2023: bool = False,
) -> Workload:
    """Torchvision's ViT-L/16 on images."""
    model = _empty(lambda: VitLarge(is_of_2023=is_of_2023), dtype)
    batch = (torch.zeros(rows, 3, 224, 224, dtype=dtype), torch.zeros(rows, dtype=torch.long))
    return Workload(model, optimizer(model.parameters()), batch=batch, loss_fn=_loss_of_images, name="ViT-L/16")


def lit_adapter(sizes: LitSizes, *, tokens: int, is_second: bool = False) -> Workload:
    """A model of LitGPT with LLaMA-Adapter, in bf16, on one text."""
    model = _empty(lambda: LitAdapter(sizes, is_second=is_second), torch.bfloat16)
    ids = torch.randint(0, sizes.words, (1, tokens))  # [b, s]
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    return Workload(model, optimizer, batch=(ids, ids.clone()), loss_fn=LitAdapter.loss, name="LitGPT with adapter")


def _empty(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Any:
    with init_empty_weights(include_buffers=False):
        model = make()
    return model.to(dtype).train()


def _loss_of_tokens(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _loss_of_images(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets)  # Fabric returns results in fp32


class GptFromScratch(nn.Module):
    """The GPT of 163M parameters (the output layer has weights of its own) that rasbt's book writes operator by operator.

    Args:
        tokens: longest row.
        has_mask: whether every block holds the causal mask in fp32; otherwise it is made in every call.
        has_layers: whether normalisation and GELU are torch's.
        has_kernel: whether attention is torch's, and its three projections one.
    """

    def __init__(
        self, tokens: int, *, has_mask: bool = False, has_layers: bool = False, has_kernel: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50257, _GPT_WIDTH)
        self.places = nn.Embedding(tokens, _GPT_WIDTH)
        self.dropout = nn.Dropout(0.1)
        norm = nn.LayerNorm if has_layers else _Norm
        blocks = []
        for _ in range(_GPT_LAYERS):
            attention = _Attention() if has_kernel else _WrittenAttention(tokens if has_mask else None)
            activation = nn.GELU("tanh") if has_layers else _Gelu()
            inner = nn.Sequential(
                nn.Linear(_GPT_WIDTH, 4 * _GPT_WIDTH), activation, nn.Linear(4 * _GPT_WIDTH, _GPT_WIDTH)
            )
            blocks.append(nn.Sequential(*(_Residual(norm(_GPT_WIDTH), part) for part in (attention, inner))))
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm(_GPT_WIDTH)
        self.head = nn.Linear(_GPT_WIDTH, 50257, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(self.embedding(ids) + places)  # [b, s, d]
        return self.head(self.norm(self.blocks(x)))


class _Residual(nn.Module):
    def __init__(self, norm: nn.Module, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part, self.dropout = norm, part, nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.part(self.norm(x))) + x


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(_GPT_WIDTH, 3 * _GPT_WIDTH, bias=False)
        self.out = nn.Linear(_GPT_WIDTH, _GPT_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, _GPT_HEADS, -1)).permute(2, 0, 3, 1, 4)  # [3, b, h, s, d]
        dropout = 0.1 if self.training else 0.0
        context = F.scaled_dot_product_attention(*qkv, dropout_p=dropout, is_causal=True)
        return self.out(context.transpose(1, 2).flatten(2))


class _WrittenAttention(nn.Module):
    def __init__(self, tokens: int | None) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(_GPT_WIDTH, _GPT_WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(_GPT_WIDTH, _GPT_WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mask", None if tokens is None else torch.ones(tokens, tokens).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, query, value = (
            part(x).unflatten(-1, (_GPT_HEADS, -1)).transpose(1, 2) for part in (self.key, self.query, self.value)
        )  # [b, h, s, d]
        scores = query @ key.transpose(2, 3)  # [b, h, s, s]
        mask = torch.ones(scores.shape[-2:], device=x.device).triu(1) if self.mask is None else self.mask
        scores.masked_fill_(mask.bool(), -math.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, -1))
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class _Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3))))


class VitLarge(nn.Module):
    """Torchvision's ViT-L/16 for images of 224 × 224 and ten classes.

    Args:
        is_of_2023: whether attention in 16 bits lays its result out batch first, as the flash kernel of torch < 2.2 did. Its
            rows are put in `nn.MultiheadAttention`'s own order afterwards, which then takes a copy.
    """

    def __init__(self, *, is_of_2023: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, _VIT_WIDTH, _VIT_PATCH, _VIT_PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, _VIT_WIDTH))
        self.places = nn.Parameter(torch.zeros(1, (224 // _VIT_PATCH) ** 2 + 1, _VIT_WIDTH))
        self.blocks = nn.Sequential(*(_VitBlock(is_of_2023) for _ in range(_VIT_LAYERS)))
        self.norm = nn.LayerNorm(_VIT_WIDTH)
        self.head = nn.Linear(_VIT_WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)  # [b, s, d]
        x = torch.cat([self.first.expand(len(images), -1, -1), patches], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class _VitBlock(nn.Module):
    def __init__(self, is_of_2023: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_VIT_WIDTH), nn.LayerNorm(_VIT_WIDTH)
        self.attention = _VitAttention(is_of_2023)
        self.inner = nn.Sequential(
            nn.Linear(_VIT_WIDTH, 4 * _VIT_WIDTH), nn.GELU(), nn.Linear(4 * _VIT_WIDTH, _VIT_WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(self.norm1(x)) + x
        return x + self.inner(self.norm2(x))


class _VitAttention(nn.Module):
    """The operators of `nn.MultiheadAttention` with `batch_first`, whose kernel cannot be reached."""

    def __init__(self, is_of_2023: bool) -> None:
        super().__init__()
        self.is_of_2023 = is_of_2023
        self.qkv, self.out = nn.Linear(_VIT_WIDTH, 3 * _VIT_WIDTH), nn.Linear(_VIT_WIDTH, _VIT_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.qkv(x.transpose(0, 1))  # [s, b, 3 d]
        parts = projected.unflatten(-1, (3, -1)).movedim(-2, 0).contiguous()
        qkv = (part.unflatten(-1, (_VIT_HEADS, -1)).permute(1, 2, 0, 3) for part in parts)  # [b, h, s, d]
        context = F.scaled_dot_product_attention(*qkv).transpose(1, 2)
        if self.is_of_2023:
            context = context.contiguous()
        tokens = context.transpose(0, 1).flatten(0, 1).flatten(1)  # [s b, h d]
        return self.out(tokens).view(x.shape[1], x.shape[0], -1).transpose(0, 1)


class LitAdapter(nn.Module):
    """A frozen model of LitGPT in which LLaMA-Adapter trains prompts and gates, from the third block on.

    Args:
        sizes: sizes of the model.
        is_second: whether scales and biases of all products train as well, and normalisation (LLaMA-Adapter V2).
    """

    def __init__(self, sizes: LitSizes, *, is_second: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, _LIT_WIDTH)
        self.blocks = nn.ModuleList(_LitBlock(sizes, number >= 2, is_second) for number in range(sizes.layers))
        self.norm = _lit_norm(sizes)
        self.head = _lit_linear(_LIT_WIDTH, sizes.words, has_bias=False, is_second=is_second)
        rotated = _LIT_WIDTH // _LIT_HEADS if sizes.is_llama else _LIT_WIDTH // _LIT_HEADS // 4
        self.angles = 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
        trained = ("prompt", "gate", "scale", "shift", "norm") if is_second else ("prompt", "gate")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in trained))

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        places = torch.outer(torch.arange(ids.shape[1], device=ids.device), self.angles.to(ids.device)).repeat(1, 2)
        turns = places.cos(), places.sin()  # in fp32
        x = self.words(ids)  # [b, s, d]
        for block in self.blocks:
            x = block(x, turns)
        # Fabric returns results in fp32
        return [self.head(tokens).float() for tokens in self.norm(x).split(_LIT_TOKENS, 1)]

    @staticmethod
    def loss(logits: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        parts = zip(logits, targets.split(_LIT_TOKENS, 1), strict=True)
        return torch.cat(
            [F.cross_entropy(one.flatten(0, 1), other.flatten(), reduction="none") for one, other in parts]
        ).mean()


class _LitBlock(nn.Module):
    def __init__(self, sizes: LitSizes, has_prompt: bool, is_second: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm1, self.norm2 = _lit_norm(sizes), _lit_norm(sizes)
        linear = partial(_lit_linear, has_bias=not sizes.is_llama, is_second=is_second)
        self.qkv, self.out = linear(_LIT_WIDTH, 3 * _LIT_WIDTH), linear(_LIT_WIDTH, _LIT_WIDTH)
        self.ups = nn.ModuleList(linear(_LIT_WIDTH, sizes.inner) for _ in range(2 if sizes.is_llama else 1))
        self.down = linear(sizes.inner, _LIT_WIDTH)
        self.prompt = nn.Parameter(torch.zeros(1, 10, _LIT_WIDTH)) if has_prompt else None
        self.gate = nn.Parameter(torch.zeros(1, 1, _LIT_HEADS, 1)) if has_prompt else None

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        attended = self.attended(self.norm1(x), turns)
        if self.sizes.is_llama:
            x = attended + x
            return self.fed(self.norm2(x)) + x
        return self.fed(self.norm2(x)) + attended + x

    def fed(self, x: torch.Tensor) -> torch.Tensor:
        if self.sizes.is_llama:
            gate, up = (each(x) for each in self.ups)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.ups[0](x)))

    def attended(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        query, key, value = self.projected(x)
        query, key = _turned(query, *turns), _turned(key, *turns)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)  # [b, s, h, d]
        if self.prompt is not None:
            _, key, value = self.projected(self.prompt)
            mask = torch.ones(x.shape[1], key.shape[2], dtype=torch.bool, device=x.device)
            y = y + self.gate * F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)
        return self.out(y.flatten(2))

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = self.qkv(x).unflatten(-1, (_LIT_HEADS, 3, -1)).permute(0, 2, 3, 1, 4)  # [b, h, 3, s, d]
        return heads.unbind(2)


def _turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    turned, kept = x[..., : cosines.shape[-1]], x[..., cosines.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = (turned * cosines + torch.cat((-second, first), -1) * sines).type_as(x)
    return torch.cat((turned, kept), -1)


def _lit_norm(sizes: LitSizes) -> nn.Module:
    return _RmsNorm() if sizes.is_llama else nn.LayerNorm(_LIT_WIDTH)


def _lit_linear(width: int, to: int, *, has_bias: bool, is_second: bool) -> nn.Module:
    linear = nn.Linear(width, to, bias=has_bias)
    return _ScaledLinear(linear) if is_second else linear


class _RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_LIT_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = x.float()
        scale = torch.rsqrt((numbers * numbers).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * (numbers * scale)).type_as(x)


class _ScaledLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.shift = nn.Parameter(torch.zeros(linear.out_features))
        self.scale = nn.Parameter(torch.ones(linear.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (self.linear(x) + self.shift)


def eager_of_2022(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as transformers 4.15 and torch 1.10 computed it."""
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5  # [b, h, s, s]
    mask = torch.zeros(query.shape[0], 1, 1, key.shape[2]) if attention_mask is None else attention_mask
    weights = _SoftmaxThatSavesItsInput.apply(scores + mask)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def attention_of_torchtune(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention with keys and values repeated for every head."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))  # [b, h, s, d]
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(1, 2).contiguous(), None


class _SoftmaxThatSavesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, scores: torch.Tensor) -> torch.Tensor:
        weights = F.softmax(scores.float(), -1)  # autocast runs softmax in fp32
        context.save_for_backward(scores, weights)
        return weights

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        scores, weights = context.saved_tensors
        return torch._softmax_backward_data(gradient, weights, -1, scores.dtype)


class LigerNorm(LlamaRMSNorm):
    """RMSNorm as Liger's kernel saves it: the input as it is, and a number for each row."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _SavesRows.apply(hidden_states, self.weight, self.variance_epsilon)


class LigerFeedForward(LlamaMLP):
    """A feed-forward part as Liger's kernel saves it: the two wide products, over which it writes their gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(_SavesProducts.apply(self.gate_proj(x), self.up_proj(x)))


class _SavesRows(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        scale = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()  # [..., 1]
        context.save_for_backward(x, weight, scale)
        return torch.mul(x, scale.to(x.dtype)).mul_(weight)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = context.saved_tensors
        low = scale.to(x.dtype)
        scaled = x * low
        of_weight = (gradient * scaled).flatten(0, -2).sum(0)
        passed = gradient.mul_(weight)  # in the place of what came, as the kernel writes it
        along = (passed * scaled).mean(-1, keepdim=True)
        return passed.sub_(scaled.mul_(along)).mul_(low), of_weight, None


class _SavesProducts(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = context.saved_tensors
        of_gate = up.mul_(gradient)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, F.silu(gate, inplace=True).mul_(gradient)


class AdamOf2023(torch.optim.Adam):
    """Adam with two temporaries of the parameters' size, as before torch 2.1, where torch's has one; without bias corrections."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        for each in parameters:
            if not self.state[each]:
                self.state[each] = {name: torch.zeros_like(each) for name in ("exp_avg", "exp_avg_sq")}
        gradients = [each.grad for each in parameters]
        means, squares = ([self.state[each][name] for each in parameters] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_addcdiv_(parameters, means, torch._foreach_add(roots, 1e-8), -1e-3)


AttentionInterface.register(EAGER_OF_2022, eager_of_2022)
AttentionInterface.register(TORCHTUNE, attention_of_torchtune)
