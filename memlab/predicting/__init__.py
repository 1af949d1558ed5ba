"""Foretelling what plans cost: memory and time of one plan, or of a whole lattice, before any is applied."""

from memlab.predicting.plans import predict, predict_all, predict_each
from memlab.predicting.snapshots import save_snapshot

__all__ = ["predict", "predict_all", "predict_each", "save_snapshot"]
