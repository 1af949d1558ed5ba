"""Predictions beside published tables, without a GPU, without weights, and with nothing fitted to the tables.

python -m tests.bench.published            predict and write tests/bench/results/published/predicted.json
python -m tests.bench.published --show     show what was predicted last

Two tables:

1. BERT-large on a V100 16GB, https://huggingface.co/docs/transformers/v4.18.0/en/performance: batches of 4 × 512
   tokens. Memory is what NVML saw of the whole GPU after training: the most the allocator reserved, and 1341 MiB
   that the article states for a process with one tensor (1343, of which 2 are that tensor's segment).
   Different in January 2022 (torch 1.10, transformers 4.15), and put back in "theirs": gradients were zeroed, not
   dropped (torch < 2.0); softmax saved its input besides its result (torch < 1.11, see `softmax_backward_data` in
   transformers' pytorch_utils.py of then); an attention mask in fp32 was always added to the scores.
   Not put back: the AdamW of that Trainer, which had one temporary of the largest parameter's size, 119 MiB, where
   torch's has two.
2. Llama 3.2 3B on an A100 80GB, https://github.com/meta-pytorch/torchtune "Optimization flags": batches of
   2 × 4096 tokens in bf16. Memory is the peak of active bytes, which is compared with allocated bytes. Only rows
   whose plan memlab has; all but the first were compiled, which memlab does not predict: it is no like for like.
   The model is transformers' one. Different in torchtune, and put back in "theirs": keys and values are repeated for
   every head before attention.

Each table is thus predicted twice: as the installed libraries would train, and as theirs did.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import nn
from transformers import AttentionInterface, BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from memlab import Workload
from memlab.plan import Plan
from memlab.predicting import predict_all
from memlab.units import GIB, MIB
from tests.bench.__main__ import versions

RESULTS = Path(__file__).parent / "results" / "published"
BERT_GPU, LLAMA_GPU = "V100 16GB", "A100 80GB"
BERT_BASELINE_BYTES = (1343 - 2) * MIB
BERT_ROWS, BERT_TOKENS = 4, 512
LLAMA_ROWS, LLAMA_TOKENS = 2, 4096
_EAGER_OF_2022, _TORCHTUNE = "eager_of_2022", "torchtune"


@dataclass(frozen=True)
class Published:
    """One row of a published table.

    Args:
        plan: flags that say the same.
        memory_bytes: as published.
        speed: samples or tokens per second, as published; None where the row was compiled.
    """

    plan: str
    memory_bytes: int
    speed: float | None


@dataclass(frozen=True)
class Row:
    """A published row beside its prediction.

    Args:
        published: the row.
        allocated_bytes: predicted peak.
        reserved_bytes: predicted peak.
        process_bytes: predicted, with what the article states for a process; None where it counts tensors.
        speed: predicted, in the unit of the published one.
        theirs_bytes: the compared bytes, predicted with what their libraries did differently put back.
    """

    published: Published
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int | None
    theirs_bytes: int
    speed: float

    @property
    def compared_bytes(self) -> int:
        """What measures the same as the published number."""
        return self.allocated_bytes if self.process_bytes is None else self.process_bytes

    @property
    def ratio(self) -> float:
        """Predicted by published memory."""
        return self.compared_bytes / self.published.memory_bytes

    @property
    def ratio_of_theirs(self) -> float:
        """The same with their libraries."""
        return self.theirs_bytes / self.published.memory_bytes

    @property
    def speed_ratio(self) -> float | None:
        """Predicted by published speed."""
        return self.speed / self.published.speed if self.published.speed else None


def _bert_row(plan: str, mib: int, samples_per_second: float) -> Published:
    return Published(plan, mib * MIB, samples_per_second)


def _llama_row(plan: str, gib: float, tokens_per_second: float | None) -> Published:
    return Published(plan, round(gib * GIB), tokens_per_second)


_ALL = "--accumulate 4 --checkpoint --fp16"
BERT = (
    _bert_row("", 14949, 8.86),
    _bert_row("--accumulate 4", 8681, 7.75),
    _bert_row("--accumulate 4 --checkpoint", 6775, 5.99),
    _bert_row("--fp16", 13939, 18.64),
    _bert_row(_ALL, 7275, 10.09),
    _bert_row("--optim adafactor", 12295, 7.96),
    _bert_row(f"{_ALL} --optim adafactor", 4847, 9.06),
    _bert_row("--adam8bit", 13085, 9.15),
    _bert_row(f"{_ALL} --adam8bit", 5363, 10.35),
)
LLAMA = (
    _llama_row("", 60.0, 7075),
    _llama_row("--chunk-loss", 42.9, None),
    _llama_row("--checkpoint --chunk-loss", 24.9, None),
)


def bert_large(rows: int = BERT_ROWS, attention: str = "eager") -> Workload:
    """BERT-large as the article trains it. It was run without fused kernels: attention and AdamW go op by op."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    with init_empty_weights(include_buffers=False):
        model = BertForSequenceClassification(BertConfig(**sizes, num_labels=2, attn_implementation=attention))
    model.train()
    # labels of the article are all zero
    batch = {"input_ids": torch.randint(100, 30000, (rows, BERT_TOKENS)), "labels": torch.zeros(rows, dtype=torch.long)}
    return Workload(
        model, torch.optim.AdamW(model.parameters(), weight_decay=0.0, foreach=False), batch=batch, name="BERT-large"
    )


def llama_3b(attention: str = "sdpa") -> Workload:
    """The shape of Llama 3.2 3B in bf16. Its optimizer is a fused one: 24.9 GiB leave no room for another."""
    sizes = {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8}
    config = LlamaConfig(
        **sizes, intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True, max_position_embeddings=131072,
        use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).train()
    model.tie_weights()  # which empty weights are no longer
    ids = torch.randint(0, config.vocab_size, (LLAMA_ROWS, LLAMA_TOKENS))  # [b, s]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Workload(model, optimizer, batch={"input_ids": ids, "labels": ids.clone()}, name="Llama 3.2 3B")


def predicted_bert(published: Sequence[Published] = BERT) -> list[Row]:
    """The rows of the BERT-large table."""
    plans = [row.plan for row in published]
    found = predict_all(bert_large(), BERT_GPU, plans=plans, progress=_silent)
    theirs_bytes = _reserved_of_2022(plans)
    return [
        Row(
            row,
            each.peak_allocated_bytes,
            each.needed_bytes,
            each.needed_bytes + BERT_BASELINE_BYTES,
            reserved_bytes + BERT_BASELINE_BYTES,
            each.samples_per_second,
        )
        for row, each, reserved_bytes in zip(published, found, theirs_bytes, strict=True)
    ]


def predicted_llama(published: Sequence[Published] = LLAMA) -> list[Row]:
    """The rows of the Llama table."""
    AttentionInterface.register(_TORCHTUNE, attention_of_torchtune)
    plans = [row.plan for row in published]
    found = predict_all(llama_3b(), LLAMA_GPU, plans=plans, progress=_silent)
    theirs = predict_all(llama_3b(_TORCHTUNE), LLAMA_GPU, plans=plans, progress=_silent)
    return [
        Row(row, each.peak_allocated_bytes, each.needed_bytes, None, other.peak_allocated_bytes, each.tokens_per_second)
        for row, each, other in zip(published, found, theirs, strict=True)
    ]


def _reserved_of_2022(plans: Sequence[str]) -> list[int]:
    """Reserved bytes where gradients outlive the step: as in the second half of a batch twice as large.

    Split batches are predicted as they are: from their second micro-batch on, gradients are there.
    """
    AttentionInterface.register(_EAGER_OF_2022, eager_of_2022)
    parsed = [Plan.parse(plan) for plan in plans]
    found: dict[Plan, int] = {}
    for halves, rows in ((2, 2 * BERT_ROWS), (None, BERT_ROWS)):
        asked = [plan for plan in parsed if (plan.accumulation == 1) is (halves is not None)]
        flags = [f"--accumulate {halves} {_flags(plan)}" if halves else _flags(plan) for plan in asked]
        predictions = predict_all(bert_large(rows, _EAGER_OF_2022), BERT_GPU, plans=flags, progress=_silent)
        found |= {plan: each.needed_bytes for plan, each in zip(asked, predictions, strict=True)}
    return [found[plan] for plan in parsed]


def _flags(plan: Plan) -> str:
    return "" if plan == Plan() else plan.label


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


def _silent(_: str) -> None:
    """Says nothing of progress."""


def predict_tables() -> dict[str, Any]:
    """Both tables, as they are written down."""
    tables = {"BERT-large · V100 16GB": predicted_bert(), "Llama 3.2 3B · A100 80GB": predicted_llama()}
    return {"versions": versions(), "tables": {name: [asdict(row) for row in rows] for name, rows in tables.items()}}


def show(results: dict[str, Any]) -> None:
    """Print tables."""
    for name, rows in results["tables"].items():
        print(f"\n{name} · torch {results['versions']['torch']}, transformers {results['versions']['transformers']}")
        print(
            f"{'':<54}{'published':>10}{'allocated':>10}{'reserved':>10}{'process':>10}{'ratio':>7}{'theirs':>10}{'ratio':>7}"
            f"{'published':>11}{'predicted':>10}{'ratio':>7}"
        )
        for row in (Row(**{**each, "published": Published(**each["published"])}) for each in rows):
            print(_line(row))
    print("\nMemory in MiB, speed in samples (BERT-large) or tokens (Llama) per second.")


def _line(row: Row) -> str:
    sizes = (row.published.memory_bytes, row.allocated_bytes, row.reserved_bytes, row.process_bytes)
    memory = "".join(f"{_number(size and size / MIB, 0):>10}" for size in sizes)
    theirs = f"{_number(row.theirs_bytes / MIB, 0):>10}{_number(row.ratio_of_theirs, 2):>7}"
    speed = f"{_number(row.published.speed, 2):>11}{_number(row.speed, 2):>10}{_number(row.speed_ratio, 2):>7}"
    return f"{row.published.plan or 'as written':<54}{memory}{_number(row.ratio, 2):>7}{theirs}{speed}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def main() -> None:
    """Parse the command line, then predict or show."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.published", description=__doc__)
    parser.add_argument("--show", action="store_true", help="show the results in the repository, predict nothing")
    path = RESULTS / "predicted.json"
    if not parser.parse_args().show:
        torch.manual_seed(0)
        RESULTS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(predict_tables(), indent=1, ensure_ascii=False) + "\n")
    show(json.loads(path.read_text()))


if __name__ == "__main__":
    main()
