"""Foretelling what plans cost: memory and time of one plan, or of a whole lattice, before any is applied."""

from memlab.predicting.how_many import how_many
from memlab.predicting.plans import predict, predict_all, predict_each
from memlab.predicting.ranks import compare_ranks, predict_ranks
from memlab.predicting.snapshots import save_snapshot

__all__ = ["compare_ranks", "how_many", "predict", "predict_all", "predict_each", "predict_ranks", "save_snapshot"]
