"""Evidence for `find_plan`: every plan of a reduced plan_space is measured, and what the search finds is held against it.

python -m tests.bench.find_plan            measure and write tests/bench/results/find_plan/<device>.json
python -m tests.bench.find_plan --show     show what was measured last, on every device
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, ViTConfig
from transformers import ViTForImageClassification as Vit

from memlab import Workload, measure
from memlab.measuring.device import device_for
from memlab.measuring.runs import training_step
from memlab.plan import Plan
from memlab.predicting import predict_all
from memlab.records import Measurement, Prediction
from memlab.search.deciding import Search
from memlab.search.finding import best_of_trials, run_trial
from memlab.units import format_bytes
from tests.bench.__main__ import slug, versions

RESULTS = Path(__file__).parent / "results" / "find_plan"
# budgets as places between the smallest and the largest measured peak
BUDGETS = (0.1, 0.4, 0.8)
STEPS = 3
# the found and the best plan are timed against each other this often
PAIRS = 3


def gpt2(device: torch.device) -> Workload:
    """A small GPT-2 with a vocabulary that is large for it."""
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 192, "vocab_size": 8192, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    ids = torch.randint(0, 8192, (8, 48), device=device)  # [b, s]
    return _workload("gpt2", model, device, {"input_ids": ids, "labels": ids.clone()})


def bert(device: torch.device) -> Workload:
    """A BERT classifier."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 4, "intermediate_size": 768}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=4096, num_labels=2))
    ids = torch.randint(0, 4096, (8, 64), device=device)  # [b, s]
    return _workload("bert", model, device, {"input_ids": ids, "labels": torch.arange(8, device=device) % 2})


def vit(device: torch.device) -> Workload:
    """A vision transformer."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 4, "intermediate_size": 768}
    model = Vit(ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=10))
    pixels = torch.randn(8, 3, 64, 64, device=device)  # [b, c, h, w]
    return _workload("vit", model, device, {"pixel_values": pixels, "labels": torch.arange(8, device=device)})


def _workload(name: str, model: torch.nn.Module, device: torch.device, batch: dict[str, torch.Tensor]) -> Workload:
    model = model.to(device).train()
    workload = Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch, name=name)
    training_step(workload)  # moments exist
    return workload


WORKLOADS: tuple[Callable[[torch.device], Workload], ...] = (gpt2, bert, vit)


def reduced_plan_space() -> list[Plan]:
    """Two or three settings of each field: 36 plans."""
    words = product(
        ("", "--accumulate 2", "--accumulate 8"),
        ("", "--checkpoint"),
        ("", "--bf16"),
        ("", "--adam8bit", "--offload activations"),
    )
    return [Plan.parse(" ".join(filter(None, each))) for each in words]


def examine(workload: Workload) -> dict[str, Any]:
    """Measure every plan, then search at each budget."""
    plans = reduced_plan_space()
    predictions = predict_all(workload, plans=plans, progress=lambda line: None)
    applicable = [plan for plan, each in zip(plans, predictions, strict=True) if not each.refused]
    measured = {plan: measure(workload, plan, STEPS) for plan in applicable}
    by_label = {each.plan: each for each in predictions}
    pairs = [(by_label[plan.label], measured[plan]) for plan in applicable]
    peaks = sorted(each.needed_bytes for each in measured.values())
    budgets = [round(peaks[0] * (peaks[-1] / peaks[0]) ** share) for share in BUDGETS]
    return {
        "workload": workload.describe(),
        "plans": len(plans),
        "kendall tau of predicted and measured times": kendall_tau(
            [predicted.step_seconds for predicted, _ in pairs], [each.median_step_seconds for _, each in pairs]
        ),
        "worst under-prediction of the peak": max(
            each.needed_bytes / predicted.needed_bytes - 1 for predicted, each in pairs
        ),
        "searches": [searched(workload, plans, predictions, measured, budget_bytes) for budget_bytes in budgets],
        "measured": [
            [each.plan, each.needed_bytes, predicted.needed_bytes, each.median_step_seconds, predicted.step_seconds]
            for predicted, each in pairs
        ],
    }


def searched(
    workload: Workload,
    plans: Sequence[Plan],
    predictions: Sequence[Prediction],
    measured: dict[Plan, Measurement],
    budget_bytes: int,
) -> dict[str, Any]:
    """Search for one budget, and hold the result against the best of all measured plans that fit."""
    device = device_for(workload.device, budget_bytes)
    known = Search(workload.describe(), budget_bytes, plans, predictions)
    try:
        found = best_of_trials(
            known,
            lambda plan: run_trial(workload, plan, STEPS, device, budget_bytes),
            3,
            lambda line: print(f"  {line}"),
        )
    finally:
        device.close()
    fitting = [plan for plan, each in measured.items() if each.needed_bytes <= budget_bytes]
    best = min(fitting, key=lambda plan: measured[plan].median_step_seconds)
    return {
        "budget_bytes": budget_bytes,
        "plans that fit": len(fitting),
        "found": found.plan.label,
        "best": best.label,
        "share of best": share_of(workload, found.plan, best),
        "share of best in the table": measured[best].median_step_seconds / measured[found.plan].median_step_seconds,
        "trials": [[trial.plan, trial.fits] for trial in found.trials],
    }


def share_of(workload: Workload, found: Plan, best: Plan) -> float:
    """Speed of one plan as a share of another's, timed in turn: the best of many noisy times is too good by luck."""
    if found == best:
        return 1.0
    ratios = []
    for turn in range(PAIRS):
        order = (found, best) if turn % 2 else (best, found)
        seconds = {plan: measure(workload, plan, STEPS).median_step_seconds for plan in order}
        ratios.append(seconds[best] / seconds[found])
    return statistics.median(ratios)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Share of pairs in the same order less the share in the opposite one.

    Example:
        >>> kendall_tau([1, 2, 3], [10, 20, 30]), kendall_tau([1, 2, 3], [3, 2, 1])
        (1.0, -1.0)
    """
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(list(zip(first, second, strict=True)), 2)]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / max(1, len(signs))


def show(results: dict[str, Any]) -> None:
    """Print one machine's results."""
    print(f"\n{results['device']} · torch {results['versions']['torch']}")
    for each in results["workloads"]:
        tau = each["kendall tau of predicted and measured times"]
        under = each["worst under-prediction of the peak"]
        print(
            f"{each['workload']}: {each['plans']} plans, Kendall's tau {tau:.2f}, peak under-predicted by {under:.2%}"
        )
        for search in each["searches"]:
            print(
                f"  {format_bytes(search['budget_bytes']):>10}  {search['share of best']:6.1%} of the best of "
                f"{search['plans that fit']} after {len(search['trials'])} trials: {search['found']} (best: {search['best']})"
            )


def main() -> None:
    """Parse the command line, then measure or show."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.find_plan", description=__doc__)
    parser.add_argument("--show", action="store_true", help="show the results in the repository, measure nothing")
    if parser.parse_args().show:
        for path in sorted(RESULTS.glob("*.json")):
            show(json.loads(path.read_text()))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu {torch.get_num_threads()} threads"
    results: dict[str, Any] = {"device": name, "versions": versions(), "workloads": []}
    RESULTS.mkdir(parents=True, exist_ok=True)
    for make in WORKLOADS:
        print(f"measuring {make.__name__} …", flush=True)
        results["workloads"].append(examine(make(device)))
        # after each, so that a run that is broken off leaves what it has
        (RESULTS / f"{slug(name)}.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    show(results)


if __name__ == "__main__":
    main()
