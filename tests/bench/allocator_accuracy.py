"""Predicted peaks against torch's own CUDA allocator, at real sizes, on the emulated GPU (or a real one).

python -m tests.emulated_gpu --gpu T4 -- python -m tests.bench.allocator_accuracy [--models a,b] [--plans a;b]
python -m tests.bench.allocator_accuracy --write        docs/allocator_accuracy.md from the results

Each plan of a model runs in a process of its own, from a fresh model and an empty cache, in both modes of the allocator;
predictions are made before. On an emulated GPU nothing is computed, and where torch reads values (how many different
tokens there are) it reads zeros, as it does on a real one. Splits of a batch are not judged, which would take memory of its own
in the first step. What was measured before on the same GPU is kept, unless it is measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf
from torch import nn

from memlab import Workload, fit
from memlab.allocator import Settings
from memlab.measuring.runs import training_step
from memlab.plan import Plan
from memlab.predicting.plan_predictor import PlanPredictor
from memlab.predicting.plans import predicted_by
from memlab.runtime.observer import Observer
from tests.bench import accuracy
from tests.bench.__main__ import slug, versions
from tests.bench.accuracy import PLANS, RESULTS, Summary
from tests.emulated_gpu.unvalued import HAS_VALUES, IS_EMULATED, unjudged, without_judgement

PAGE = Path(__file__).parents[2] / "docs" / "allocator_accuracy.md"
MODES = {"default": "", "expandable": "expandable_segments:True"}
STEPS = 3
_WORST = 12

Made = tuple[nn.Module, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Row:
    """One model under one plan in one mode of the allocator.

    Args:
        model: name of the model.
        plan: label of the plan.
        mode: of the allocator.
        allocated: peak of allocated bytes, predicted and counted by torch.
        reserved: likewise, of reserved bytes.
    """

    model: str
    plan: str
    mode: str
    allocated: tuple[int, int]
    reserved: tuple[int, int]

    @property
    def allocated_error(self) -> float:
        """How far the prediction is off, as a share of what torch counted; negative when too low."""
        return self.allocated[0] / self.allocated[1] - 1

    @property
    def reserved_error(self) -> float:
        """The same of reserved bytes."""
        return self.reserved[0] / self.reserved[1] - 1


# -- models ------------------------------------------------------------------------------------------


def _text(rows: int = 8, length: int = 512) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


def _images(rows: int = 16) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.empty(rows, 3, 224, 224), "labels": torch.zeros(rows, dtype=torch.int64)}


def mistral() -> Made:
    """A decoder whose query heads share keys and values."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 12}
    return hf.MistralForCausalLM(hf.MistralConfig(**sizes, num_key_value_heads=4, vocab_size=32000)), _text(4)


def qwen3() -> Made:
    """A decoder that norms queries and keys."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16}
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, num_key_value_heads=8, vocab_size=32000)), _text(4)


def opt() -> Made:
    """A decoder with attention masks."""
    sizes = {"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    return hf.OPTForCausalLM(hf.OPTConfig(**sizes)), _text(4)


def bart() -> Made:
    """An encoder and a decoder with biases."""
    return hf.BartForConditionalGeneration(hf.BartConfig(d_model=768, encoder_layers=6, decoder_layers=6)), _text(
        8, 256
    )


def whisper() -> Made:
    """Convolutions before an encoder and a decoder."""
    each = {"layers": 6, "ffn_dim": 2048, "attention_heads": 8}
    sizes = {f"{part}_{size}": count for part in ("encoder", "decoder") for size, count in each.items()}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(d_model=512, **sizes)), {
        "input_features": torch.empty(4, 80, 3000),
        "labels": _text(4, 200)["labels"],
    }


def convnext() -> Made:
    """Depthwise convolutions in both memory formats."""
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=10)), _images()


class Tagger(nn.Module):
    """torch's own encoder layers, which return a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20_000, 512)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 8)
        self.head = nn.Linear(512, 20_000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        scores = self.head(self.encoder(self.embedding(input_ids)))  # [b, s, v]
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def encoder() -> Made:
    """torch's own encoder."""
    return Tagger(), _text(8, 256)


def _of_benchmark(make: Callable[[bool], Made]) -> Callable[[], Made]:
    return lambda: make(True)


MODELS: dict[str, Callable[[], Made]] = {
    **{make.__name__: _of_benchmark(make) for make in accuracy.MODELS},
    **{make.__name__: make for make in (mistral, qwen3, opt, bart, whisper, convnext, encoder)},
}


# -- measuring ---------------------------------------------------------------------------------------


def workload_of(name: str) -> Workload:
    """A model on the GPU, without weights where nothing is computed, and a fresh AdamW."""
    made, batch = _made(name)
    model = copy.deepcopy(made)
    # weights that are tied get memory once, as by `.to("cuda")`
    model = (model._apply(functools.cache(_without_values)) if IS_EMULATED else model.to("cuda")).train()
    if isinstance(model, hf.PreTrainedModel):
        model.tie_weights()
    on_device = {key: torch.zeros(value.shape, dtype=value.dtype, device="cuda") for key, value in batch.items()}
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch=on_device, name=name)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cuda")


@functools.cache
def _made(name: str) -> Made:
    """A model without memory, or with the weights that a real GPU computes with."""
    torch.manual_seed(0)
    with torch.device("meta" if IS_EMULATED else "cpu"):
        return MODELS[name]()


def rows_of(name: str, flags: str) -> Iterator[Row]:
    """Predict a plan in all modes, then run it; what is refused or does not fit is said and left out."""
    predicted = {}
    predictor = PlanPredictor(workload_of(name))
    for mode, settings in MODES.items():
        predictor.target = replace(predictor.target, settings=Settings.parse(settings))
        predicted[mode] = predicted_by(predictor, Plan.parse(flags))
    del predictor
    for mode, prediction in predicted.items():
        if prediction.refused or prediction.peak_reserved_bytes is None:
            _say(f"{name} {prediction.plan}: {prediction.refused}")
            continue
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # they would hold segments of the plan before
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{mode == 'expandable'}")
        try:
            allocated, reserved = _peaks(workload_of(name), flags)
        except torch.OutOfMemoryError:
            _say(f"{name} {prediction.plan} {mode}: does not fit")
            continue
        yield Row(
            name,
            prediction.plan,
            mode,
            (prediction.peak_allocated_bytes, allocated),
            (prediction.peak_reserved_bytes, reserved),
        )


def _peaks(workload: Workload, flags: str) -> tuple[int, int]:
    # rows whose positions do not go up by one are taken for several texts, with masks: what has no values is
    one_text = patch("transformers.masking_utils.find_packed_sequence_indices", lambda _positions: None)
    no_values = one_text if IS_EMULATED else contextlib.nullcontext()
    with without_judgement(), unjudged(), no_values, fit(workload, flags, [_Judged()], rescue=False):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            training_step(workload)
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


class _Judged(Observer):
    """Counts peaks from where the split of a batch is judged, as a measurement does."""

    def only_tried(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measure(models: Sequence[str], plans: Sequence[str]) -> None:
    """Measure each plan in a process of its own, as what others leave decides where tensors lie; results are written as they come."""
    for name, flags in itertools.product(models, plans):
        device, rows = _in_a_process(name, flags)
        path = RESULTS / f"{slug(device)}.allocator.json"
        again = {(row["model"], row["plan"], row["mode"]) for row in rows}
        before = json.loads(path.read_text())["rows"] if path.exists() else []
        kept = [row for row in before if (row["model"], row["plan"], row["mode"]) not in again]
        if kept or rows:
            found = {"device": device, "versions": versions(), "rows": kept + rows}
            path.write_text(json.dumps(found, indent=1) + "\n")
        _say(f"{name} {Plan.parse(flags)}: {len(rows)} rows")


def _in_a_process(name: str, flags: str) -> tuple[str, list[dict[str, Any]]]:
    """The GPU's name and rows of a model as records; those before the process ended, if it did not end well."""
    # importing takes longer than a model; a process that has seen a real GPU must not be forked
    method = "fork" if IS_EMULATED else "spawn"
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context(method).Process(target=_send_rows, args=(sending, name, flags))
    process.start()
    sending.close()
    device, rows = "", []
    with contextlib.suppress(EOFError):
        device = receiving.recv()
        while True:
            rows.append(receiving.recv())
    process.join()
    if process.exitcode:
        _say(f"{name}: ended with status {process.exitcode}")
    return device, rows


def _send_rows(sending: Any, name: str, flags: str) -> None:
    sending.send(("emulated " if IS_EMULATED else "") + torch.cuda.get_device_name())
    for row in rows_of(name, flags):
        sending.send(asdict(row))


# -- showing -----------------------------------------------------------------------------------------


def page() -> str:
    """The page about all results, as Markdown."""
    lines = [
        "# Predictions against torch's allocator",
        "",
        "Peaks of training steps, predicted and counted by PyTorch's own CUDA caching allocator: on a real H100, and on *emulated* "
        "GPUs (`tests/emulated_gpu/`), where nothing was computed. Models have real sizes; each starts from a fresh model and an "
        "empty cache, and splits of a batch are not judged. Written by `python -m tests.bench.allocator_accuracy --write`.",
        "",
        "With expandable segments little depends on the order of requests; by default it does. Goals: 1 % of allocated bytes, 5 % of "
        "reserved bytes, and 3 % where reserved bytes are predicted too low.",
        "",
        "*On the H100* (torch 2.11) the rows that are off by more have these causes. `convolutions` and `convnext`: cuDNN takes "
        "workspaces for its convolutions, 74 MiB at a time in the former, which nothing tells beforehand. `encoder` under "
        "`--checkpoint selective`: a defect, mended since (exact now, emulated, in torch 2.11 and 2.14). Reserved bytes in the default "
        "mode: before torch 2.13 the allocator takes the free block with the lowest address, and addresses are the driver's; from "
        "2.13 on it is the oldest segment. Predictions with falling addresses, which this driver mostly gave, are no better (75 cells: 1.3 % "
        "off on average, 1.1 % with rising ones). `whisper` under `--precision pure-bf16` with expandable segments, 12 % too low: mended since "
        "(+0.1 %, emulated).",
        "",
        "*Emulated* rows are of 23 to 30 November. The newest are those of bart, whisper and gpt2_with_dropout, on the H100 and the T4 of t5, gpt2 and opt too, on the T4 of convolutions and "
        "convnext; of the others, those of vit, and on the A100 of convolutions, t5, encoder and mistral, are from before three mends of 29 November, found by comparing torch's recording of its "
        "allocator with the predicted requests, one by one: temporaries inside an operator are placed as torch does (copies of arguments before results, one group after another) and computed by their "
        "formula for each number of rows; the look that `--accumulate` takes gives its cache back; flash attention's split over keys is counted. Reserved bytes of single cells that were off by up to "
        "13.7 % are within 0.6 % since. What an operator takes inside and gives back was compared with the predictions for some 130 functions, forward and backward, in three types of numbers: "
        "nothing larger than 0.2 MiB is missing but for `topk`, `im2col` and `cdist`.",
        "",
        "Until 30 November weights that are tied had memory of their own for a moment when these models were made, and left holes that no model on a GPU leaves: t5, bart and whisper were off by 5 to 10 % in "
        "single cells for that (exact to 0.2 % now); and the plans of a model ran in one process, where what others left decided where tensors lay (whisper on the T4, 8.7 %). On the T4 four cells are outside the goals. "
        "`gpt2` and `whisper` under all settings are 5.6 and 6.0 % too high: their first steps differ from what is predicted (a mode of memlab's watches the look of `--accumulate`, where torch's math attention adds its "
        "mask to a copy; gradients of a tied weight are added into new memory in the first backward pass), and later ones find other holes. `convnext` under `--precision pure-bf16` and `convolutions` under `--accumulate 4 --bf16` "
        "are 3.2 and 3.0 % too low: without cuDNN torch lays out results of convolutions with channels last in another way than the trace does.",
    ]
    for path in sorted(RESULTS.glob("*.allocator.json")):
        found = json.loads(path.read_text())
        lines += ["", f"## {found['device']}, torch {found['versions']['torch']}", "", *_tables(_read(found))]
    return "\n".join(lines) + "\n"


def _read(found: dict[str, Any]) -> list[Row]:
    return [
        Row(**{**row, "allocated": tuple(row["allocated"]), "reserved": tuple(row["reserved"])})
        for row in found["rows"]
    ]


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    heads = ("median", "95 %", "worst under", "worst over")
    yield f"| model | cells | {' | '.join(heads)} | {' | '.join(f'reserved: {head}' for head in heads)} |"
    yield "|---|" + "---:|" * 9
    names = list(dict.fromkeys(row.model for row in rows))
    for name, of_model in [*((name, [row for row in rows if row.model == name]) for name in names), ("all", rows)]:
        shares = [
            share
            for errors in ([row.allocated_error for row in of_model], [row.reserved_error for row in of_model])
            for share in _shares(errors)
        ]
        yield f"| {name} | {len(of_model)} | {' | '.join(f'{share:.2%}' for share in shares)} |"
    yield ""
    yield "Furthest off:"
    yield ""
    yield "| model | plan | allocator | allocated, MiB | reserved, MiB |"
    yield "|---|---|---|---:|---:|"
    worst = sorted(rows, key=lambda row: max(abs(row.allocated_error), abs(row.reserved_error)), reverse=True)
    for row in worst[:_WORST]:
        cells = (_cell(row.allocated, row.allocated_error), _cell(row.reserved, row.reserved_error))
        yield f"| {row.model} | {row.plan} | {row.mode} | {' | '.join(cells)} |"


def _shares(errors: Sequence[float]) -> tuple[float, float, float, float]:
    found = Summary.of(errors)
    return found.median, found.percentile_95, found.under, found.over


def _cell(sizes: tuple[int, int], error: float) -> str:
    return f"{sizes[0] / 2**20:.0f} for {sizes[1] / 2**20:.0f} ({error:+.1%})"


def main() -> None:
    """Parse the command line, then measure, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.allocator_accuracy", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between")
    parser.add_argument("--plans", default=";".join(PLANS), help="flags, with semicolons between")
    parser.add_argument("--write", action="store_true", help="write the page, measure nothing")
    asked = parser.parse_args()
    if asked.write:
        PAGE.write_text(page())
        return
    if HAS_VALUES if IS_EMULATED else not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; an emulated one without --values")
    _measure(asked.models.split(","), asked.plans.split(";"))


if __name__ == "__main__":
    main()
