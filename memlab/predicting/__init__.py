"""Prediction of memory and time, of one plan and of all plans, before any is applied.

- `plans`: `predict` and `predict_all`; `plan_predictor`: steps of plans composed of `segments`, which are traced once (`passes`)
- `targets`: the device to predict for; `reserved`: two steps replayed through the simulated allocator; `snapshots`: a predicted memory snapshot
"""

from memlab.predicting.plans import predict, predict_all, predict_each, predicting
from memlab.predicting.snapshots import save_snapshot

__all__ = ["predict", "predict_all", "predict_each", "predicting", "save_snapshot"]
