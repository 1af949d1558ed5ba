"""How far predictions are off: models × plans, each predicted and then measured on the device at hand.

python -m tests.bench.accuracy            measure and write tests/bench/results/accuracy/<device>.json
python -m tests.bench.accuracy --show     show what was measured last, on every device

The device is the first CUDA GPU, with models that fill gigabytes; without one it is the CPU, counted by the ledger,
with small models. Predictions are made before anything is measured, and are not calibrated by it.

Steps are timed with the plans in turns. On a CPU their CPU time counts, which other processes lengthen less than the clock's;
torch is to have one thread there (`OMP_NUM_THREADS=1`). The lowest time of the even turns and that of the odd ones are two
measurements of a plan, and tell how much noise there is.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from memlab import Workload, measure
from memlab.errors import RefusalError
from memlab.measuring.runs import rehearsal, training_step
from memlab.plan import Plan
from memlab.predicting import predict_all
from memlab.predicting.targets import interval_seconds
from tests.bench.__main__ import slug, versions
from tests.bench.find_plan import kendall_tau

RESULTS = Path(__file__).parent / "results" / "accuracy"
STEPS = 3
TURNS = 6
AGREEING = 0.95  # of the plans, whose two measurements differ by no more than what is taken for noise
PLANS = (
    "",
    "--accumulate 2",
    "--accumulate 4",
    "--checkpoint",
    "--checkpoint selective",
    "--bf16",
    "--precision pure-bf16",
    "--adam8bit",
    "--optim adafactor",
    "--offload optimizer",
    "--offload activations",
    "--chunk-loss",
    "--accumulate 4 --bf16",
    "--accumulate 2 --checkpoint --bf16 --adam8bit",
    "--accumulate 4 --checkpoint --bf16 --adam8bit --offload optimizer --chunk-loss",
)


@dataclass(frozen=True)
class Pair:
    """One model under one plan, predicted and measured.

    Args:
        model: name of the model.
        plan: label of the plan.
        predicted_bytes: peak of allocated bytes.
        measured_bytes: likewise.
        predicted_reserved_bytes: peak of reserved bytes; None off CUDA.
        measured_reserved_bytes: likewise.
        predicted_seconds: time of a step.
        measured_seconds: likewise, of the fastest one in even turns, and in odd ones: what others do on the machine only makes
            steps longer.
    """

    model: str
    plan: str
    predicted_bytes: int
    measured_bytes: int
    predicted_reserved_bytes: int | None
    measured_reserved_bytes: int | None
    predicted_seconds: float
    measured_seconds: tuple[float, float]

    @property
    def seconds(self) -> float:
        """The measured time of a step."""
        return min(self.measured_seconds)

    @property
    def allocated_error(self) -> float:
        """How far the predicted allocated peak is off, as a share of the measured one; negative when too low."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def reserved_error(self) -> float | None:
        """The same of the reserved peak; None off CUDA."""
        if self.predicted_reserved_bytes is None or self.measured_reserved_bytes is None:
            return None
        return self.predicted_reserved_bytes / self.measured_reserved_bytes - 1


# -- models ------------------------------------------------------------------------------------


def gpt2(large: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A decoder with learnt positions and a tied head."""
    sizes = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 512}
    small = {"n_layer": 3, "n_head": 4, "n_embd": 128, "vocab_size": 8192, "n_positions": 64}
    model = GPT2LMHeadModel(
        GPT2Config(
            **(sizes if large else small), bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )  # fmt: skip
    return model, _tokens(50257 if large else 8192, 512 if large else 64)


def gpt2_with_dropout(large: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The same with dropout."""
    sizes = {"n_layer": 6, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 512}
    small = {"n_layer": 2, "n_head": 4, "n_embd": 128, "vocab_size": 4096, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**(sizes if large else small), bos_token_id=0, eos_token_id=0))
    return model, _tokens(50257 if large else 4096, 512 if large else 64)


def llama(large: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A decoder with rotary positions and grouped keys and values."""
    width, layers, vocabulary = (1024, 12, 32000) if large else (128, 3, 4096)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=int(2.75 * width), num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=1024, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens(vocabulary, 512 if large else 48)


def bert(large: bool) -> tuple[nn.Module, dict[str, Any]]:
    """An encoder with a classifier."""
    width, layers = (768, 12) if large else (128, 3)
    config = BertConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        vocab_size=30522 if large else 4096, num_labels=2,
    )  # fmt: skip
    batch = _tokens(4096, 256 if large else 64)
    return BertForSequenceClassification(config), {**batch, "labels": torch.arange(8) % 2}


def t5(large: bool) -> tuple[nn.Module, dict[str, Any]]:
    """An encoder and a decoder."""
    width, layers = (512, 6) if large else (128, 2)
    config = T5Config(
        d_model=width, d_kv=64, d_ff=4 * width, num_layers=layers, num_heads=width // 64,
        vocab_size=32128 if large else 4096, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), _tokens(4096, 256 if large else 32)


def vit(large: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A vision transformer."""
    width, layers, pixels = (768, 12, 224) if large else (128, 3, 64)
    config = ViTConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        image_size=pixels, patch_size=16 if large else 8, num_labels=10,
    )  # fmt: skip
    rows = 16 if large else 8
    batch = {"pixel_values": torch.randn(rows, 3, pixels, pixels), "labels": torch.arange(rows) % 10}
    return ViTForImageClassification(config), batch


class Convolutions(nn.Module):
    """A residual net with group norm, which returns its loss."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(_Residual(width) for _ in range(blocks))
        self.leave = nn.Linear(width, 10)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(self.enter(pixels), 2)  # [b, c, h, w]
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.leave(hidden.mean((2, 3))), labels)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.two(F.silu(self.one(self.norm(hidden))))


def convolutions(large: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A convolution net."""
    rows, pixels = (32, 64) if large else (8, 32)
    batch = {"pixels": torch.randn(rows, 3, pixels, pixels), "labels": torch.arange(rows) % 10}
    return Convolutions(*((256, 12) if large else (64, 4))), batch


def _tokens(vocabulary: int, length: int, rows: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (rows, length))  # [b, s]
    return {"input_ids": ids, "labels": ids.clone()}


MODELS: tuple[Callable[[bool], tuple[nn.Module, dict[str, Any]]], ...] = (
    gpt2,
    gpt2_with_dropout,
    llama,
    bert,
    t5,
    vit,
    convolutions,
)


# -- measuring ---------------------------------------------------------------------------------


def workload_of(make: Callable[[bool], tuple[nn.Module, dict[str, Any]]], device: torch.device) -> Workload:
    """A model of the size that the device is for, with its moments."""
    torch.manual_seed(0)
    model, batch = make(device.type == "cuda")
    model = model.to(device).train()
    on_device = {name: value.to(device) for name, value in batch.items()}
    workload = Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch=on_device, name=make.__name__)
    training_step(workload)  # libraries have their workspaces, moments exist
    return workload


def examine(workload: Workload, say: Callable[[str], None], turns: int = TURNS) -> list[Pair]:
    """Predict all plans, then measure those that apply; one that runs out of memory is left out, and said. Without turns no times."""
    predictions = predict_all(workload, plans=PLANS, progress=lambda line: None)
    peaks = []
    for number, (flags, predicted) in enumerate(zip(PLANS, predictions, strict=True), 1):
        say(f"{workload.name} {number} of {len(PLANS)}: {predicted.plan}")
        if predicted.refused:
            _require_refusal(workload, flags)
            continue
        if (measured := _measured(workload, flags)) is None:
            say("  ran out of memory")
            continue
        peaks.append((predicted, measured))
    say(f"{workload.name}: times")
    seconds = seconds_in_turns(workload, [predicted.plan for predicted, _ in peaks], turns)
    return [
        Pair(
            model=workload.name,
            plan=predicted.plan,
            predicted_bytes=predicted.peak_allocated_bytes,
            measured_bytes=measured.peak_allocated_bytes,
            predicted_reserved_bytes=predicted.peak_reserved_bytes,
            measured_reserved_bytes=measured.peak_reserved_bytes,
            predicted_seconds=predicted.step_seconds,
            measured_seconds=seconds[predicted.plan],
        )
        for predicted, measured in peaks
    ]


def seconds_in_turns(workload: Workload, plans: Sequence[str], turns: int) -> dict[str, tuple[float, float]]:
    """The time of a step under each plan, measured twice: in even turns, and in odd ones."""
    on_gpu = workload.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    shortest: dict[str, list[float]] = {plan: [math.inf, math.inf] for plan in plans}
    for turn in range(turns):
        # what is slow for a while is so for plans at either end of the list
        for plan in plans if turn % 4 < 2 else plans[::-1]:
            gc.collect()
            with rehearsal(workload, Plan.of_label(plan)):
                for step in range(2 + STEPS):  # the first two look at the model and make what is kept
                    start = clock()
                    training_step(workload)
                    if on_gpu:
                        torch.cuda.synchronize()
                    if step >= 2:
                        shortest[plan][turn % 2] = min(shortest[plan][turn % 2], clock() - start)
    return {plan: (even, odd) for plan, (even, odd) in shortest.items()}


def _measured(workload: Workload, flags: str) -> Any:
    """A measurement from an empty cache; None when the plan does not fit."""
    gc.collect()
    if workload.device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        return measure(workload, flags, 1)
    except torch.OutOfMemoryError:
        return None


def _require_refusal(workload: Workload, flags: str) -> None:
    try:
        measure(workload, flags, 1)
    except RefusalError:
        return
    raise AssertionError(f"{workload.name} was said to refuse {Plan.parse(flags).label}, and does not")


def results_on(device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """All models under all plans."""
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu {threads} thread{'s' * (threads > 1)}"
    pairs: list[Pair] = []
    for make in MODELS:
        workload = workload_of(make, device)
        pairs += examine(workload, say)
        del workload
        gc.collect()
    return {"device": name, "versions": versions(), "pairs": [asdict(pair) for pair in pairs]}


def pairs_in(results: dict[str, Any]) -> list[Pair]:
    """The pairs of saved results."""
    return [Pair(**pair) for pair in results["pairs"]]


def save(results: dict[str, Any]) -> Path:
    """Write results beside those of other devices."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{slug(results['device'])}.json"
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return path


# -- showing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """How far a set of predictions is off.

    Args:
        count: of predictions.
        median: of the distances, whichever way.
        percentile_95: of the same.
        under: the most by which one was too low, as a positive share.
        over: the most by which one was too high.
    """

    count: int
    median: float
    percentile_95: float
    under: float
    over: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Summary:
        """The summary of signed errors.

        Example:
            >>> Summary.of([0.0, -0.02, 0.01])
            Summary(count=3, median=0.01, percentile_95=0.02, under=0.02, over=0.01)
        """
        sizes = sorted(abs(error) for error in errors)
        place = math.ceil(0.95 * len(sizes)) - 1
        return cls(len(sizes), statistics.median(sizes), sizes[place], max(0.0, -min(errors)), max(0.0, *errors))


def tau_of(pairs: Sequence[Pair]) -> float:
    """Kendall's tau of the predicted ranking of plans by time, against the measured one."""
    return kendall_tau([pair.predicted_seconds for pair in pairs], [pair.seconds for pair in pairs])


@dataclass(frozen=True)
class Times:
    """How well the times of one model's plans are predicted.

    Args:
        tau: Kendall's, of the predicted ranking against the measured one.
        noise: by how much two measurements of a plan differ at most, for most plans, as a share.
        tau_beyond_noise: tau over the pairs of plans that differ by more than that.
        decided: number of these pairs, as a share of all.
        tau_of_two: tau of one measurement against the other.
        worst: the most by which a plan is off after calibrating on the one as written, as a share of the measured time.
        covered: share of the plans whose measured time lies within the predicted interval then.
    """

    tau: float
    noise: float
    tau_beyond_noise: float
    decided: float
    tau_of_two: float
    worst: float
    covered: float

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Times:
        """Those of the pairs of one model, the first as written."""
        differences = sorted(max(pair.measured_seconds) / pair.seconds - 1 for pair in pairs)
        noise = differences[math.ceil(AGREEING * len(differences)) - 1]
        signs = [
            (a.predicted_seconds - b.predicted_seconds) * (a.seconds - b.seconds)
            for a, b in combinations(pairs, 2)
            if max(a.seconds, b.seconds) > (1 + noise) * min(a.seconds, b.seconds)
        ]
        factor = pairs[0].seconds / pairs[0].predicted_seconds
        calibrated = [factor * pair.predicted_seconds for pair in pairs]
        errors = [predicted / pair.seconds - 1 for predicted, pair in zip(calibrated, pairs, strict=True)]
        intervals = (interval_seconds(predicted, calibrated=True) for predicted in calibrated)
        covered = [low <= pair.seconds <= high for (low, high), pair in zip(intervals, pairs, strict=True)]
        return cls(
            tau=tau_of(pairs),
            noise=noise,
            tau_beyond_noise=sum(math.copysign(1, sign) for sign in signs) / max(1, len(signs)),
            decided=len(signs) / math.comb(len(pairs), 2),
            tau_of_two=kendall_tau(*zip(*(pair.measured_seconds for pair in pairs), strict=True)),
            worst=max(errors, key=abs),
            covered=statistics.mean(covered),
        )


def times_table(results: Mapping[str, Any], *, of_plans: bool = False) -> str:
    """The report of times on one device, as Markdown; or every plan's."""
    groups = by_model(pairs_in(results))
    if of_plans:
        lines = ["| model | plan | predicted | measured | ratio, calibrated |", "|---|---|--:|--:|--:|"]
        for name, pairs in groups.items():
            factor = pairs[0].seconds / pairs[0].predicted_seconds
            for pair in pairs:
                times = f"{1e3 * pair.predicted_seconds:.1f} ms | {1e3 * pair.seconds:.1f} ms"
                lines.append(
                    f"| {name} | {pair.plan} | {times} | {factor * pair.predicted_seconds / pair.seconds:.2f} |"
                )
        return "\n".join(lines)
    lines = [
        "| model | tau | noise | tau of pairs beyond it | these | tau of two measurements | worst, calibrated | within the interval |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, pairs in groups.items():
        each = Times.of(pairs)
        lines.append(
            f"| {name} | {each.tau:.2f} | {each.noise:.1%} | {each.tau_beyond_noise:.2f} | {each.decided:.0%} | "
            f"{each.tau_of_two:.2f} | {each.worst:+.0%} | {each.covered:.0%} |"
        )
    return "\n".join(lines)


def by_model(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """The pairs of each model."""
    return {name: list(of_model) for name, of_model in groupby(pairs, key=lambda pair: pair.model)}


def table(results: dict[str, Any]) -> str:
    """The report of one device, as Markdown."""
    pairs = pairs_in(results)
    has_reserved = any(pair.reserved_error is not None for pair in pairs)
    header = ["model", "plans", "median", "95 %", "worst under", "worst over"]
    header += [f"reserved: {name}" for name in header[2:]] if has_reserved else []
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    groups = by_model(pairs)
    for name, of_model in [*groups.items(), ("all", pairs)]:
        cells = [name, str(len(of_model)), *_cells([pair.allocated_error for pair in of_model])]
        if has_reserved:
            cells += _cells([pair.reserved_error for pair in of_model if pair.reserved_error is not None])
        lines.append(cells)
    words = f"{results['device']} · torch {results['versions']['torch']} · peaks predicted against measured"
    return "\n".join([words, "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def _cells(errors: Sequence[float]) -> list[str]:
    found = Summary.of(errors)
    return [f"{share:.2%}" for share in (found.median, found.percentile_95, found.under, found.over)]


def main() -> None:
    """Parse the command line, then measure or show."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.accuracy", description=__doc__)
    parser.add_argument("--show", action="store_true", help="show the results in the repository, measure nothing")
    if parser.parse_args().show:
        for path in sorted(RESULTS.glob("*.json")):
            if ".allocator" not in path.suffixes:  # those of `allocator_accuracy`
                found = json.loads(path.read_text())
                print(table(found), times_table(found), times_table(found, of_plans=True), sep="\n\n", end="\n\n")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = results_on(device, lambda line: print(line, flush=True))
    path = save(results)
    print(
        f"\n{table(results)}\n\n{times_table(results)}\n\nwritten to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
    )


if __name__ == "__main__":
    main()
