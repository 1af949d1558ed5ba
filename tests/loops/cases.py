"""Tiny models, each with its batches and the loss a user would write for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

VOCABULARY = 2048  # large enough for a chunked loss
IGNORED = -100

Batch = Any
LossOf = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One model and how it is trained.

    Args:
        build: makes the model; the same one after the same seed.
        batch: the batch of a step, the same for the same step.
        loss: what the loop writes: the model call and what it does with the output.
        has_blocks: whether the model repeats a block, so that checkpointing applies.
        has_head: whether it has a linear layer onto 2048 or more classes.
        learning_rate: of AdamW, such that the loss falls and 100 steps stay comparable.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: LossOf
    has_blocks: bool = True
    has_head: bool = False
    learning_rate: float = 1e-3

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)

    def on(self, device: str) -> Case:
        """The same case with its model and batches on a device."""

        def batch(step: int) -> Batch:
            return tree_map(lambda leaf: leaf.to(device), self.batch(step))

        return replace(self, build=lambda: self.build().to(device), batch=batch)


# -- batches -----------------------------------------------------------------------------------


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def tokens(step: int, rows: int = 8, length: int = 12) -> torch.Tensor:
    """Sequences that can be learnt: each token follows from the one before."""
    start = torch.randint(0, 64, (rows, 1), generator=_generator(step))
    return (start + 3 * torch.arange(length)) % 64


def ragged_labels(inputs: torch.Tensor, step: int) -> torch.Tensor:
    """Labels of which every row counts another number, one row a single one."""
    rows, length = inputs.shape
    kept = torch.randint(2, length, (rows,), generator=_generator(step))
    kept[step % rows] = 2
    return inputs.where(torch.arange(length) < kept[:, None], IGNORED)


def causal_batch(step: int) -> dict[str, torch.Tensor]:
    inputs = tokens(step)
    labels = ragged_labels(inputs, step)
    return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "labels": labels}


def masked_batch(step: int) -> dict[str, torch.Tensor]:
    inputs = tokens(step)
    hidden = torch.rand(inputs.shape, generator=_generator(step)) < 0.3
    hidden[:, 0] |= ~hidden.any(1)
    return {"input_ids": inputs.masked_fill(hidden, 1), "labels": inputs.where(hidden, IGNORED)}


def seq2seq_batch(step: int) -> dict[str, torch.Tensor]:
    inputs = tokens(step)
    return {"input_ids": inputs, "labels": ragged_labels(inputs.flip(1).contiguous(), step)}


def sentence_batch(step: int) -> dict[str, torch.Tensor]:
    inputs = tokens(step)
    lengths = torch.randint(4, 13, (8, 1), generator=_generator(step))
    return {
        "input_ids": inputs,
        "attention_mask": (torch.arange(12) < lengths).long(),
        "labels": (inputs[:, 0] > 31).long(),
    }


@functools.cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)


def digits_batch(step: int) -> dict[str, torch.Tensor]:
    images, targets = _digits()
    rows = torch.randint(0, len(images), (8,), generator=_generator(step))
    return {"pixel_values": images[rows], "labels": targets[rows]}


def pairs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(10, 16, generator=_generator(step))
    return inputs, (inputs[:, :4].sum(1) > 0).long() + 2 * (inputs[:, 4] > 0).long()


def time_first(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = tokens(step).t().contiguous()  # [t, b]
    return inputs, inputs.roll(-1, 0)


# -- plain modules -----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(F.gelu(self.up(self.norm(hidden)))))


class Tower(nn.Module):
    """Returns logits."""

    def __init__(self, width: int = 32, classes: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.leave = nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(hidden)


class SelfJudging(nn.Module):
    """Returns its loss and nothing else."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tower = Tower(dropout=dropout)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.tower(inputs), targets)


class TiedLanguageModel(nn.Module):
    """Embedding and head are one parameter, used twice."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), "logits": logits}


class TimeFirstLSTM(nn.Module):
    """Sequence-first: the batch is dimension 1."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.lstm = nn.LSTM(width, width, num_layers=2)
        self.leave = nn.Linear(width, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.leave(self.lstm(self.embed(inputs))[0])


class TimeFirstTransformer(nn.Module):
    """torch's own encoder in its default layout, [t, b, d]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.leave = nn.Linear(width, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(inputs), device=inputs.device)
        return self.leave(self.encoder(self.embed(inputs), mask=mask))


class TwoTowers(nn.Module):
    """Embeds both sides of a pair; what is trained on is how they compare over the whole batch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tower = Tower(classes=8, dropout=dropout)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.tower(left), dim=1), F.normalize(self.tower(right), dim=1)


# -- Transformers models -----------------------------------------------------------------------


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": VOCABULARY, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=16,
        )
    )  # fmt: skip


def _bert_config(**more: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **more,
    )  # fmt: skip


def bert_classifier() -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_bert_config(num_labels=2))


def masked_bert() -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(_bert_config())


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=VOCABULARY, dropout_rate=0.0,
        decoder_start_token_id=0, initializer_factor=0.1,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=2,
        num_channels=1, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def partly_frozen() -> nn.Module:
    """GPT-2 of which only the attention's projections and the last norm are trained, as adapters would be."""
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "attn.c_attn" in name or "ln_f" in name
    return model


class PromptTuning(nn.Module):
    """A frozen language model behind trained input embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2().requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(3, 32) * 0.02)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        embedded = self.inner.transformer.wte(input_ids)  # [b, t, d]
        prompted = torch.cat([self.prompt.expand(len(input_ids), -1, -1), embedded], 1)
        unscored = labels.new_full((len(labels), len(self.prompt)), IGNORED)
        return self.inner(inputs_embeds=prompted, labels=torch.cat([unscored, labels], 1))


def prompted_batch(step: int) -> dict[str, torch.Tensor]:
    inputs = tokens(step)
    return {"input_ids": inputs, "labels": ragged_labels(inputs, step)}


# -- losses as users write them ----------------------------------------------------------------


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def loss_in_dict(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch)["loss"]


def model_is_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(*batch)


def criterion(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def criterion_of_tokens(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def criterion_on_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


def in_batch_negatives(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, _ = batch
    left, right = model(inputs, inputs.roll(1, 1))
    similarity = left @ right.t() / 0.1  # [b, b]
    positives = torch.arange(len(left), device=left.device)
    return (F.cross_entropy(similarity, positives) + F.cross_entropy(similarity.t(), positives)) / 2


CASES: dict[str, Case] = {
    "gpt2": Case(gpt2, causal_batch, own_loss, has_head=True),
    "llama": Case(llama, causal_batch, own_loss, has_head=True),
    "bert-classifier": Case(bert_classifier, sentence_batch, own_loss),
    "masked-bert": Case(masked_bert, masked_batch, own_loss, has_head=True),
    "t5": Case(t5, seq2seq_batch, own_loss, has_head=True),
    "vit": Case(vit, digits_batch, own_loss),
    "module-loss": Case(SelfJudging, pairs, model_is_loss),
    "module-logits": Case(Tower, pairs, criterion),
    "contrastive": Case(TwoTowers, pairs, in_batch_negatives),
    "lstm": Case(TimeFirstLSTM, time_first, criterion_of_tokens, has_blocks=False),
    "time-first": Case(TimeFirstTransformer, time_first, criterion_of_tokens),
    "frozen": Case(partly_frozen, causal_batch, own_loss, has_head=True),
    "prompt-tuning": Case(PromptTuning, prompted_batch, own_loss, has_head=True),
    "tied": Case(TiedLanguageModel, prompted_batch, loss_in_dict, has_head=True),
    "tied-criterion": Case(TiedLanguageModel, prompted_batch, criterion_on_logits, has_head=True),
}
