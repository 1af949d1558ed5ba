"""Foretelling what plans cost: memory and time of one plan, or of a whole lattice, before any is applied."""

from memlab.predicting.plans import predict, predict_all

__all__ = ["predict", "predict_all"]
