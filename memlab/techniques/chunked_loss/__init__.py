"""Losses over a large vocabulary without the full logits.

The head, the linear layer onto the vocabulary, returns *deferred logits*: its input and its weight, standing in for their product.
What gives another number for each class (a cast, a temperature, a soft cap, `log_softmax`) stays deferred, and what gives few numbers
for each row (`cross_entropy`, `gather`, `logsumexp`, an entropy, a divergence) is computed over tiles of rows. Any other operation
computes the logits as usual, so a loop that reads them still gets them.

- `chunked_loss`: the technique
- `deferred`: deferred logits, and the operations that keep them so
- `tiles`: losses and other results for each row, tile by tile, and their gradients

Source of the idea: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", https://arxiv.org/abs/2411.09009
"""

from memlab.techniques.chunked_loss.chunked_loss import ChunkedLoss, large_heads

__all__ = ["ChunkedLoss", "large_heads"]
