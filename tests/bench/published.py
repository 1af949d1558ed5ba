"""Predictions beside published tables, without a GPU, without weights, and with nothing fitted to the tables.

python -m tests.bench.published            predict and write tests/bench/results/published/predicted.json
python -m tests.bench.published --show     show what was predicted last

What differs between a row and today's libraries is said by its table (`Table.about`). Where that can be put back, the row is
predicted twice: as the installed libraries would train, and as theirs did.

Not here, though published:

- torchtitan's Llama 3.1 8B on 8 and 128 GPUs: its ranks gather weights in bf16 and keep the result of every second product, where
  memlab's ranks gather in fp32 and keep all products or none.
- LitGPT's rows with LoRA, with weights quantised, and of inference.
- BERT and ESM of https://github.com/huggingface/peft/issues/1469: rows and tokens of its batches were not to be read.
- Rows with `torch.compile`, but for two of torchtune's, and with FSDP1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memlab import Workload
from memlab.hardware.gpus import gpu, usable_bytes
from memlab.predicting import predict_all
from memlab.records.prediction import Prediction
from memlab.units import GIB, MIB
from tests.bench.__main__ import versions
from tests.bench.published_models import (
    EAGER_OF_2022,
    LLAMA_7B,
    STABLELM_3B,
    TORCHTUNE,
    AdamOf2023,
    bert_large,
    gpt_from_scratch,
    lit_adapter,
    llama_3b,
    llama_8b,
    mistral_7b,
    vit_large,
)

PATH = Path(__file__).parent / "results" / "published" / "predicted.json"
GB = 10**9


@dataclass(frozen=True)
class Case:
    """What is predicted: a workload under a plan."""

    make: Callable[..., Workload]
    plan: str = ""


@dataclass(frozen=True)
class Line:
    """One row of a published table, and how it is predicted.

    Args:
        name: the row.
        published: memory, in the table's unit.
        case: what is predicted.
        theirs: the same with what their libraries did differently put back; None where nothing is.
        speed: samples or tokens per second, as published; None where there is none, or it is of something else.
    """

    name: str
    published: float
    case: Case
    theirs: Case | None = None
    speed: float | None = None


@dataclass(frozen=True)
class Table:
    """One published table.

    Args:
        title: model and GPU.
        source: its address.
        gpu: name in the catalogue.
        unit: bytes in a unit of it.
        unit_name: name of that unit there.
        lines: its rows.
        about: what it counts, what differs from today's libraries, and why rows are off.
        counts_reserved: whether it counts what the allocator reserves; otherwise what tensors take.
        process_bytes: what it counts besides.
        counts_tokens: whether speeds are of tokens.
        is_of_lengths: whether it has the longest text, in tokens, that fits; what makes the workload is then given tokens.
    """

    title: str
    source: str
    gpu: str
    unit: int
    unit_name: str
    lines: tuple[Line, ...]
    about: str
    counts_reserved: bool = True
    process_bytes: int = 0
    counts_tokens: bool = True
    is_of_lengths: bool = False


@dataclass(frozen=True)
class Row:
    """A published row beside its prediction.

    Args:
        name: the row.
        published: bytes, or tokens.
        allocated_bytes: predicted peak of tensors.
        reserved_bytes: predicted peak of the allocator.
        predicted: what measures the same as the published number.
        theirs: the same, with their libraries.
        published_speed: samples or tokens per second.
        predicted_speed: likewise.
    """

    name: str
    published: int
    allocated_bytes: int
    reserved_bytes: int
    predicted: int
    theirs: int | None
    published_speed: float | None
    predicted_speed: float | None

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of the published number; negative when too low."""
        return self.predicted / self.published - 1

    @property
    def error_of_theirs(self) -> float | None:
        """The same with their libraries."""
        return None if self.theirs is None else self.theirs / self.published - 1

    @property
    def speed_ratio(self) -> float | None:
        """Predicted by published speed."""
        return self.predicted_speed / self.published_speed if self.predicted_speed and self.published_speed else None


# Gradients that outlive the step are there in the forward pass, as in the second half of a batch twice as large.
_TWICE = "--accumulate 2"

_BERT_2022 = partial(bert_large, attention=EAGER_OF_2022)
_BERT_2022_TWICE = partial(bert_large, attention=EAGER_OF_2022, rows=8)


def _bert(plan: str, mib: float, samples_per_second: float) -> Line:
    # of the same width: memlab refuses --fp16 where a function of one's own would be given scaled gradients, as that softmax is
    as_then = plan.replace("--fp16", "--bf16")
    # from their second micro-batch on, gradients are there
    theirs = Case(_BERT_2022, as_then) if "--accumulate" in plan else Case(_BERT_2022_TWICE, f"{_TWICE} {as_then}")
    return Line(plan or "as written", mib, Case(bert_large, plan), theirs, samples_per_second)


_ALL = "--accumulate 4 --checkpoint --fp16"
BERT = Table(
    "BERT-large, 4 × 512 tokens, V100 16GB", "https://huggingface.co/docs/transformers/v4.18.0/en/performance",
    "V100 16GB", MIB, "MiB",
    (
        _bert("", 14949, 8.86),
        _bert("--accumulate 4", 8681, 7.75),
        _bert("--accumulate 4 --checkpoint", 6775, 5.99),
        _bert("--fp16", 13939, 18.64),
        _bert(_ALL, 7275, 10.09),
        _bert("--optim adafactor", 12295, 7.96),
        _bert(f"{_ALL} --optim adafactor", 4847, 9.06),
        _bert("--adam8bit", 13085, 9.15),
        _bert(f"{_ALL} --adam8bit", 5363, 10.35),
    ),
    "What NVML saw of the whole GPU after training: the most the allocator reserved, and 1341 MiB that the article states for a "
    "process with one tensor (1343, of which 2 are that tensor's segment). Put back (January 2022, torch 1.10, transformers "
    "4.15): gradients were zeroed, not dropped; softmax saved its input besides its result; a mask in fp32 was added to the "
    "scores. Not put back: that AdamW had one temporary of the largest parameter's size, 119 MiB, where torch's has two.",
    process_bytes=(1343 - 2) * MIB, counts_tokens=False,
)  # fmt: skip


def _llama(name: str, gib: float, plan: str, tokens_per_second: float | None = None) -> Line:
    return Line(name, gib, Case(llama_3b, plan), Case(_LLAMA_TORCHTUNE, plan), tokens_per_second)


_LLAMA_TORCHTUNE = partial(llama_3b, attention=TORCHTUNE)
LLAMA = Table(
    "Llama 3.2 3B in bf16, 2 × 4096 tokens, A100 80GB", "https://github.com/meta-pytorch/torchtune", "A100 80GB", GIB, "GiB",
    (
        _llama("as written", 60.0, "", 7075),
        _llama("--chunk-loss (theirs compiled)", 42.9, "--chunk-loss"),
        _llama("--checkpoint --chunk-loss (theirs compiled)", 24.9, "--checkpoint --chunk-loss"),
    ),
    "Peak of active bytes. Put back: keys and values are repeated for every head before attention. Rows that were compiled, which "
    "memlab does not predict, are no like for like.",
    counts_reserved=False,
)  # fmt: skip

_BF16 = torch.bfloat16
GPT = Table(
    "GPT of 163M parameters, 8 × 1024 tokens, A100 40GB",
    "https://github.com/rasbt/LLMs-from-scratch/tree/main/ch05/10_llm-training-speed", "A100 40GB", GIB, "GB",
    (
        Line("written operator by operator", 26.2617, Case(partial(gpt_from_scratch, has_mask=True, is_fused=False)), speed=12525),
        Line("mask made in each call", 26.2422, Case(partial(gpt_from_scratch, is_fused=False)), speed=12526),
        Line("tf32", 26.2422, Case(partial(gpt_from_scratch, is_fused=False), "--precision tf32"), speed=27648),
        Line("fused AdamW", 26.2422, Case(gpt_from_scratch, "--precision tf32"), speed=28399),
        Line("weights in bf16", 13.7871, Case(partial(gpt_from_scratch, dtype=_BF16)), speed=45486),
        Line(
            "torch's LayerNorm and GELU", 11.5645, Case(partial(gpt_from_scratch, dtype=_BF16, has_layers=True)), speed=55256
        ),
        Line(
            "torch's attention", 5.9004, Case(partial(gpt_from_scratch, dtype=_BF16, has_layers=True, has_kernel=True)),
            speed=91901,
        ),
    ),
    "What the allocator had reserved after the first epoch (torch 2.6); each row keeps what those above it changed. Which A100 it "
    "was is not said; no number of memory depends on it. The rows after these were compiled.",
)  # fmt: skip


def _vit(name: str, gb: float, plan: str = "", **settings: Any) -> Line:
    if "--accumulate" not in plan:
        plan, settings["rows"] = f"{_TWICE} {plan}", 2 * settings["rows"]
    theirs = {"optimizer": AdamOf2023, **settings, "is_of_2023": True}
    return Line(name, gb, Case(partial(vit_large, **settings), plan), Case(partial(vit_large, **theirs), plan))


VIT = Table(
    "ViT-L/16, images of 224 × 224, A100 40GB", "https://github.com/rasbt/pytorch-memory-optim/blob/main/logs.md",
    "A100 40GB", GB, "GB",
    (
        _vit("fp32, 64 images", 26.79, rows=64),
        _vit("the same with Fabric", 26.84, rows=64),
        _vit("16-mixed", 18.21, "--fp16", rows=64),
        _vit("bf16-true", 13.82, rows=64, dtype=_BF16),
        _vit("bf16-true, 16 images", 5.69, rows=16, dtype=_BF16),
        _vit("bf16-true, 16 images in 4 micro-batches", 3.91, "--accumulate 4", rows=16, dtype=_BF16),
        _vit(
            "the same with SGD", 2.02, "--accumulate 4", rows=16, dtype=_BF16, optimizer=torch.optim.SGD
        ),
    ),
    "The most the allocator reserved, in 10⁹ bytes. The loop drops its gradients after the forward pass, so they are in its peak. "
    "Put back (torch 2.1 of 23 June 2023): the flash kernel of then laid its result out batch first, of which "
    "`nn.MultiheadAttention` takes a copy that stays for the backward pass (0.6 GB for 64 images); Adam had a second temporary of "
    "the parameters' size, 0.6 GB, which is the peak where micro-batches are small. The GPU is not named; only the kernel of "
    "attention depends on it. Its README says 32 images, the script and the 703 batches of its log say 64.",
)  # fmt: skip

LITGPT = Table(
    "LitGPT with LLaMA-Adapter, bf16, one text, A100 40GB",
    "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md", "A100 40GB", GB, "GB",
    (
        Line("StableLM 3B, adapter", 9.10, Case(partial(lit_adapter, STABLELM_3B, tokens=1034))),
        Line("Llama 2 7B, adapter", 19.98, Case(partial(lit_adapter, LLAMA_7B, tokens=1304))),
        Line("StableLM 3B, adapter v2", 10.71, Case(partial(lit_adapter, STABLELM_3B, tokens=1034, is_second=True))),
        Line("Llama 2 7B, adapter v2", 25.51, Case(partial(lit_adapter, LLAMA_7B, tokens=1304, is_second=True))),
    ),
    "Most bytes allocated, in 10⁹, of the longest text (1034 and 1304 tokens), with which its scripts begin; commit 8641822, torch "
    "2.1. Their loop also holds the logits through the backward pass, at most 0.05 GB more.",
    counts_reserved=False,
)  # fmt: skip

_ADAPTERS = "--lora r=16,alpha=16,targets=q_proj,k_proj,v_proj,o_proj"
MISTRAL = Table(
    "Mistral 7B in fp16, 4 × 4096 tokens, A100 80GB",
    "https://github.com/foundation-model-stack/fms-acceleration/blob/main/scripts/benchmarks/refs/a100_80gb.csv",
    "A100 80GB", GB, "GB",
    (
        Line("--checkpoint", 72.971724288, Case(mistral_7b, "--checkpoint"), speed=2775.237),
        Line(f"--checkpoint {_ADAPTERS}", 26.108963328, Case(mistral_7b, f"--checkpoint {_ADAPTERS}"), speed=3597.611),
        Line(f"--checkpoint {_ADAPTERS} --base nf4", 15.860019712, Case(mistral_7b, f"--checkpoint {_ADAPTERS} --base nf4")),
    ),
    "Most bytes allocated, in 10⁹, of transformers' Trainer with gradient checkpointing (2024). The first peak is in AdamW's step, the "
    "second in the loss. Not put back: transformers of then shifted the logits in a copy.",
    counts_reserved=False,
)  # fmt: skip

# all of it but activations off the device
_ALST = "--checkpoint --offload optimizer,params"
_ALST_CHUNKED = f"{_ALST.replace('--checkpoint', '--checkpoint --chunk-loss')}"
_ALST_TILED = f"{_ALST_CHUNKED.replace('--offload', '--tile 32 --offload')},activations"


def _alst(tokens: int, gib: float, plan: str, of_liger: str = "") -> Line:
    theirs = Case(partial(llama_8b, tokens, of_liger=of_liger), plan) if of_liger else None
    return Line(f"{tokens:,} tokens, {plan}", gib, Case(partial(llama_8b, tokens), plan), theirs)


ALST = Table(
    "Llama 3.1 8B in bf16, one long text, H200",
    "https://github.com/snowflakedb/ArcticTraining/tree/2771b4b1b9c8cbb54895ccb940dcaa76d33bf7ef/projects/sequence-parallelism",
    "H200", GIB, "GiB",
    (
        _alst(65_000, 137.36, _ALST),
        _alst(300_000, 134.96, _ALST_CHUNKED, "parts"),
        _alst(650_000, 126.81, f"{_ALST_CHUNKED},activations", "parts"),
        _alst(1_200_000, 136.15, _ALST_TILED, "norms"),
    ),
    "What NVML saw of the whole GPU, from comments in the configurations of these runs (2025; DeepSpeed's ZeRO-3 with weights and moments "
    "on the host, flash-attention). Put back: Liger's kernels, where the loss is in chunks. Its RMSNorm saves its input as it is, where "
    "transformers' saves copies in fp32; its feed-forward part saves two wide products and writes their gradients over them, but in tiles "
    "theirs is transformers'. Not put back: expandable segments, which predictions for a GPU by its name do not assume (tensors alone: 124, "
    "120 and 111 GiB in the last three rows), tiles of 4,096 positions, and what ZeRO-3 holds of gathered weights. Why the last row is low "
    "is not known; NVML counts what the allocator keeps, which is nearly the whole GPU once a run has come near its end.",
)  # fmt: skip

LONGEST = Table(
    "Longest text of Llama 3.1 8B in bf16, H100 with 80 GB", "https://arxiv.org/abs/2506.13996",
    "H100 SXM", 1000, "thousand tokens",
    (
        Line(_ALST, 32, Case(llama_8b, _ALST)),
        Line(_ALST_TILED, 500, Case(llama_8b, _ALST_TILED), Case(partial(llama_8b, of_liger="norms"), _ALST_TILED)),
    ),
    "Longest texts that are predicted to fit: what is reserved, in 76.3 GiB. Theirs of 32,000 took 71.9 GiB, and 36,000 were \"close to oom\". "
    "Without Liger's RMSNorm 500,000 do not fit. With it more do than theirs, which were not limited by memory: 555,000 ended in an "
    "illegal access of a Triton kernel (555,000 × 4,096 numbers are more than 2³¹), says the configuration of the run.",
    is_of_lengths=True,
)  # fmt: skip

TABLES = (BERT, LLAMA, GPT, VIT, LITGPT, MISTRAL, ALST, LONGEST)


def predicted(table: Table, lines: Sequence[Line] | None = None) -> list[Row]:
    """The rows of a table, or some of them, beside their predictions."""
    lines = table.lines if lines is None else lines
    if table.is_of_lengths:
        return [_of_length(line, table) for line in lines]
    cases = [case for line in lines for case in (line.case, line.theirs) if case is not None]
    found = {}
    for make in dict.fromkeys(case.make for case in cases):
        of_it = [case for case in cases if case.make is make]
        predictions = predict_all(make(), table.gpu, plans=[case.plan for case in of_it], progress=_silent)
        for case, prediction in zip(of_it, predictions, strict=True):
            if prediction.refused:
                raise RuntimeError(f"{table.title}: {case.plan} is refused: {prediction.refused}")
            found[case] = prediction

    def compared(case: Case) -> int:
        each = found[case]
        return (each.needed_bytes if table.counts_reserved else each.peak_allocated_bytes) + table.process_bytes

    return [
        Row(
            line.name,
            round(line.published * table.unit),
            found[line.case].peak_allocated_bytes,
            found[line.case].needed_bytes,
            compared(line.case),
            line.theirs and compared(line.theirs),
            line.speed,
            line.speed and _speed(found[line.case], table),
        )
        for line in lines
    ]


def _of_length(line: Line, table: Table) -> Row:
    """A row of the longest text that fits."""
    made: dict[int, Prediction] = {}

    def needed(case: Case, tokens: int) -> int:
        (made[tokens],) = predict_all(case.make(tokens), table.gpu, plans=[case.plan], progress=_silent)
        return made[tokens].needed_bytes

    published = round(line.published * table.unit)
    found = {
        case: longest(partial(needed, case), usable_bytes(gpu(table.gpu)), first=published)
        for case in (line.theirs, line.case)
        if case is not None
    }
    ours = made[found[line.case]]
    return Row(
        line.name, published, ours.peak_allocated_bytes, ours.needed_bytes, found[line.case],
        line.theirs and found[line.theirs], None, None,
    )  # fmt: skip


def longest(needed: Callable[[int], int], room_bytes: int, *, first: int) -> int:
    """Return the longest text, to a hundredth of the room, that fits.

    Example:
        >>> longest(lambda tokens: 1000 + 7 * tokens, 8000, first=700)
        994
    """
    known = {first: needed(first)}
    while min(known.values()) > room_bytes:
        known[min(known) // 2] = needed(min(known) // 2)
    while max(known.values()) <= room_bytes:
        known[2 * max(known)] = needed(2 * max(known))
    while True:
        low = max(tokens for tokens, size in known.items() if size <= room_bytes)
        high = min(tokens for tokens, size in known.items() if size > room_bytes)
        if known[low] >= 0.99 * room_bytes or high - low == 1:
            return low
        # nearly linear; a little less than the whole room, which the next guess then does not miss by a hair
        share = (0.995 * room_bytes - known[low]) / (known[high] - known[low])
        tokens = min(max(round(low + share * (high - low)), low + 1), high - 1)
        known[tokens] = needed(tokens)


def _speed(prediction: Any, table: Table) -> float:
    return prediction.tokens_per_second if table.counts_tokens else prediction.samples_per_second


def _silent(_: str) -> None:
    """Says nothing of progress."""


def page(results: dict[str, Any]) -> str:
    """All tables in Markdown."""
    return "\n\n".join(_table(table, rows_of(results, table)) for table in TABLES)


def rows_of(results: dict[str, Any], table: Table) -> list[Row]:
    """What was predicted of a table."""
    return [Row(**each) for each in results["tables"][table.title]]


def _table(table: Table, rows: Sequence[Row]) -> str:
    digits = 0 if table.unit == MIB else 2
    head = ["", f"published, {table.unit_name}", "predicted", "error", "with their libraries", "error", "speed"]
    cells = [
        [
            each.name,
            *(_number(size / table.unit, digits) for size in (each.published, each.predicted)),
            _percent(each.error),
            _number(each.theirs and each.theirs / table.unit, digits),
            _percent(each.error_of_theirs),
            _number(each.speed_ratio, 2, " ×"),
        ]
        for each in rows
    ]
    shown = [number for number in range(len(head)) if number < 4 or any(row[number] for row in cells)]
    lines = [[row[number] for number in shown] for row in (head, *cells)]
    lines.insert(1, ["---"] * len(shown))
    return (
        f"[{table.title}]({table.source})\n\n"
        + "\n".join(f"| {' | '.join(row)} |" for row in lines)
        + f"\n\n{table.about}"
    )


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    percent = round(100 * share, 1)
    return f"{percent:+.1f} %".replace("-", "−") if percent else "0.0 %"


def main() -> None:
    """Parse the command line, then predict or show."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.published", description=__doc__)
    parser.add_argument("--show", action="store_true", help="show the results in the repository, predict nothing")
    if not parser.parse_args().show:
        torch.manual_seed(0)
        tables = {table.title: [asdict(row) for row in predicted(table)] for table in TABLES}
        PATH.parent.mkdir(parents=True, exist_ok=True)
        PATH.write_text(json.dumps({"versions": versions(), "tables": tables}, indent=1, ensure_ascii=False) + "\n")
    print(page(json.loads(PATH.read_text())))


if __name__ == "__main__":
    main()
