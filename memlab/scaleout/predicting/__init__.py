"""Prediction of memory and time of each rank, and of how many GPUs of which kind are enough."""

from memlab.scaleout.predicting.how_many import how_many
from memlab.scaleout.predicting.ranks import compare_ranks, predict_ranks

__all__ = ["compare_ranks", "how_many", "predict_ranks"]
