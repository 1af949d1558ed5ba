"""Ranks as a table, as a picture and as a number of GPUs."""

from __future__ import annotations

import io
from dataclasses import replace

from memlab.records import Fit
from memlab.records.ranks import Fewest, HowMany, PredictedRanks, RankPrediction
from memlab.report import html, image, ranks, text
from tests.helpers.needs import needs

GIB = 2**30
ZERO3 = RankPrediction(
    scale="--scale zero3",
    device="T4",
    ranks=2,
    rows=4,
    peak_allocated_bytes=6 * GIB,
    host_bytes=0,
    breakdown={"parameters": 2 * GIB, "gathered parameters": GIB, "communication buffers": 3 * GIB},
    divided={"parameters": 2 * GIB, "optimizer state": 4 * GIB},
    wire_bytes=5 * GIB,
    interval_bytes=(5 * GIB, 7 * GIB),
    notes=("outputs <large>",),
)
OFFLOADED = replace(ZERO3, scale="--scale zero3 --offload optimizer", host_bytes=4 * GIB)
REFUSED = replace(ZERO3, scale="--scale ddp --offload optimizer", refused="ddp keeps optimizer state on the device")
PREDICTED = PredictedRanks("gpt2", (ZERO3, OFFLOADED, REFUSED), {("--scale zero3", 2): 6 * GIB + 2**20})


def test_a_table_has_what_each_rank_keeps_and_sends() -> None:
    printed = text.table(ranks.table(PREDICTED))
    head, row = printed.splitlines()[1], printed.splitlines()[3]
    assert head.split("   ")[0] == "plan"
    assert row.split() == (
        [
            "--scale",
            "zero3",
            "2",
            "6.00",
            "GiB",
            "6.00",
            "GiB",
            "–",
            "2.00",
            "GiB",
            "–",
            "4.00",
            "GiB",
            "5.00",
            "GiB",
        ]  # measured, and nothing on the host
    )
    assert "4.00 GiB" in printed.splitlines()[4]
    assert "left out: ddp keeps optimizer state on the device" in printed
    assert "outputs &lt;large&gt;" in html.table(ranks.table(PREDICTED))


def test_columns_without_a_value_are_left_out() -> None:
    titles = [column.title for column in ranks.table(PredictedRanks("gpt2", (ZERO3,))).columns]
    assert "offloaded" not in titles
    assert "measured" not in titles


def test_a_verdict_follows_the_interval() -> None:
    fits = [ZERO3.verdict(size * GIB).fit for size in (4, 6, 8)]
    assert fits == [Fit.NO, Fit.UNCERTAIN, Fit.YES]
    assert REFUSED.verdict(80 * GIB).fit is Fit.NO


def test_how_many_has_a_line_for_each_gpu() -> None:
    found = HowMany(
        "gpt2",
        64,
        (
            Fewest("T4", 16 * GIB, "fsdp2", ZERO3),
            Fewest("T4", 16 * GIB, "ddp", None),
            Fewest("H200", 141 * GIB, "fsdp2", replace(ZERO3, ranks=1)),
        ),
        ("a note",),
    )
    listing = ranks.how_many(found)
    assert tuple(row.texts for row in listing.rows) == (
        ("T4", "16.00 GiB", "2 (6.00 GiB each)", "more than 64"),
        ("H200", "141.00 GiB", "1 (6.00 GiB each)", "–"),
    )
    assert "a note" in text.table(listing)
    assert found.of("H200", "ddp") is None


@needs(extra="matplotlib")
def test_a_picture_says_what_it_shows() -> None:
    from PIL import Image

    drawn = image.ranks_png(PREDICTED)
    assert drawn is not None
    picture = Image.open(io.BytesIO(drawn))
    assert picture.text["Title"] == "gpt2"  # type: ignore[attr-defined] # of PNG pictures
    assert "--scale zero3 on 2: 6.00 GiB a rank" in picture.text["Description"]  # type: ignore[attr-defined]
    assert image.ranks_png(PredictedRanks("gpt2", (REFUSED,))) is None
    assert ranks.sentence(PredictedRanks("gpt2", (REFUSED,))) == "gpt2: no engine applies"


def test_print_shows_the_tables() -> None:
    assert str(PREDICTED) == text.table(ranks.table(PREDICTED))
    assert PREDICTED._repr_html_() == html.table(ranks.table(PREDICTED))
    alone = str(ZERO3).splitlines()
    assert alone[0] == "a rank of 2 · T4"
    assert "6.00 GiB" in alone[3]
    found = HowMany("gpt2", 8, (Fewest("T4", 16 * GIB, "zero3", ZERO3),))
    assert str(found) == text.table(ranks.how_many(found))
