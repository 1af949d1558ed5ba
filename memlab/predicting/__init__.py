"""Prediction of memory and time: of one plan, of all plans, and of each rank, before any is applied.

- `plans`: `predict` and `predict_all`; `predictor`: steps of plans composed of `segments`, which are traced once (`passes`)
- `targets`: the device to predict for; `reserved`: two steps replayed through the simulated allocator; `snapshots`: a predicted memory snapshot
- `ranks`, `zero3_linear`: several processes; `how_many`: how many GPUs of which kind
"""

from memlab.predicting.how_many import how_many
from memlab.predicting.plans import predict, predict_all, predict_each
from memlab.predicting.ranks import compare_ranks, predict_ranks
from memlab.predicting.snapshots import save_snapshot

__all__ = ["compare_ranks", "how_many", "predict", "predict_all", "predict_each", "predict_ranks", "save_snapshot"]
