"""The list of all contests, in the order of the table."""

from __future__ import annotations

from tests.bench.peers import (
    accumulation,
    activation_offload,
    bert_table,
    checkpointing,
    chunked_loss,
    eight_bit,
    finding,
    gradient_release,
    optimizer_offload,
    switching,
)
from tests.bench.peers.records import Contest

CONTESTS: tuple[Contest, ...] = (
    *bert_table.CONTESTS,
    *accumulation.CONTESTS,
    *checkpointing.CONTESTS,
    *chunked_loss.CONTESTS,
    *eight_bit.CONTESTS,
    *gradient_release.CONTESTS,
    *activation_offload.CONTESTS,
    *optimizer_offload.CONTESTS,
    *finding.CONTESTS,
    *switching.CONTESTS,
)
BY_NAME = {each.name: each for each in CONTESTS}
