"""A training run that is awkward to hand over: tied weights, a frozen block, two groups, odd sizes, a scheduler, clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from memlab import Workload


def gpt2() -> Workload:
    """A GPT-2 of three blocks, the first frozen, with rates that fall."""
    torch.manual_seed(0)
    sizes = {"n_embd": 36, "n_layer": 3, "n_head": 4, "vocab_size": 131, "n_positions": 33}
    config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()
    for parameter in model.transformer.h[0].parameters():
        parameter.requires_grad_(False)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 5e-4},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 30)
    return Workload(model, optimizer, scheduler=scheduler)


_DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 131, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def llama() -> Workload:
    """A Llama of two blocks with grouped heads and tied embeddings, whose config says how it is cut for tensor parallelism."""
    torch.manual_seed(0)
    return _with_falling_rates(LlamaForCausalLM(LlamaConfig(**_DECODER, tie_word_embeddings=True)))


def qwen() -> Workload:
    """A Qwen3 of the same size, which normalises single heads, with embeddings of its own."""
    torch.manual_seed(0)
    return _with_falling_rates(Qwen3ForCausalLM(Qwen3Config(**_DECODER, head_dim=8, tie_word_embeddings=False)))


def _with_falling_rates(model: nn.Module) -> Workload:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    return Workload(model, optimizer, scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 30))


def texts(steps: int) -> list[torch.Tensor]:
    """Batches of ids, one with ignored targets: [5, 17]."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 131, (5, 17), generator=generator) for _ in range(steps)]


def trained(workload: Workload, batches: Sequence[torch.Tensor], *, clips: bool = True) -> list[float]:
    """Train as people do; losses."""
    (optimizer,) = workload.optimizers
    losses = []
    for ids in batches:
        labels = ids.clone()
        labels[0, 3:] = -100  # rows weigh unequally
        loss = workload.model(input_ids=ids, labels=labels).loss
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(workload.model.parameters(), 0.3)
        optimizer.step()
        workload.scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def regressed(workload: Workload, batches: Sequence[torch.Tensor]) -> list[float]:
    """Losses of a plain net that is to return the first three columns of its rows."""
    (optimizer,) = workload.optimizers
    losses = []
    for batch in batches:
        loss = (workload.model(batch) - batch[:, :3]).square().mean()  # [b, 3]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_by_own_criterion(workload: Workload, batches: Sequence[torch.Tensor]) -> list[float]:
    """The same with a loss the loop makes from the outputs."""
    (optimizer,) = workload.optimizers
    losses = []
    for ids in batches:
        logits = workload.model(input_ids=ids).logits  # [b, s, v]
        assert logits.shape[:2] == ids.shape
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_in_odd_ways(workload: Workload, batches: Sequence[torch.Tensor]) -> list[float]:
    """A step with each batch, in ways that loops are also written in; one after the other, over and over."""
    (optimizer,) = workload.optimizers
    ways = [_by_hand, _by_logits_too, _with_a_lost_loss, _without_targets_at_first]
    losses = []
    for number, ids in enumerate(batches):
        losses += ways[number % len(ways)](workload, ids)
        nn.utils.clip_grad_norm_(workload.model.parameters(), 0.3)
        optimizer.step()
        workload.scheduler.step()
        optimizer.zero_grad()
    return losses


def _by_hand(workload: Workload, ids: torch.Tensor) -> list[float]:
    """Gradients of two calls add up; they are dropped between a call and its backward pass, where there are none yet."""
    losses = []
    for part in (ids, ids.flip(0)):
        loss = workload.model(input_ids=part, labels=part).loss
        if not losses:
            workload.optimizers[0].zero_grad()
        (loss / 2).backward()
        losses.append(loss.item())
    return losses


def _by_logits_too(workload: Workload, ids: torch.Tensor) -> list[float]:
    """The model's loss, and one made from its logits."""
    output = workload.model(input_ids=ids, labels=ids)
    loss = output.loss + output.logits.logsumexp(-1).square().mean() / 100
    loss.backward()
    return [loss.item()]


def _with_a_lost_loss(workload: Workload, ids: torch.Tensor) -> list[float]:
    """A loss that is looked at and not trained on."""
    lost = workload.model(input_ids=ids.flip(1), labels=ids).loss
    loss = workload.model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [lost.item(), loss.item()]


def _without_targets_at_first(workload: Workload, ids: torch.Tensor) -> list[float]:
    """The rows that a first rank gets have no targets."""
    labels = ids.clone()
    labels[:3] = -100
    loss = workload.model(input_ids=ids, labels=labels).loss
    loss.backward()
    return [loss.item()]
