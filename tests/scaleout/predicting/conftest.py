"""What the tests of predicted ranks share with those of predictions: one thread."""

from tests.predicting.conftest import one_thread

__all__ = ["one_thread"]
