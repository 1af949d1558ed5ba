"""Tables, plots, the page, and that `docs/compared.md` says what the committed results say."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.bench.peers import page
from tests.bench.peers.__main__ import PAGE, RESULTS, records_in
from tests.bench.peers.causes import CAUSES
from tests.bench.peers.contests import CONTESTS
from tests.bench.peers.records import Contest, Contestant, Key, Measured, Record, Status
from tests.bench.readme import COMPARED, section_of


def never(job: object) -> Measured:
    raise AssertionError("nothing runs here")


WORK = Contest("work", "Some work", tuple(Contestant(name, title, never) for name, title in (("memlab", "ours"), ("peer", "theirs"), ("gone", "a third"))))  # fmt: skip


def record(contestant: str, number: int, seconds: float, peak_bytes: int) -> Record:
    measured = Measured({"peak_allocated_bytes": peak_bytes, "sample_seconds": seconds}, result_loss=1.0)
    return Record(key(contestant, number), "2026-01-02", Status.MEASURED, measured=measured)


def key(contestant: str, number: int) -> Key:
    return Key("work", contestant, number, "tiny", "cpu", "c0de", {"torch": "2"})


RECORDS = [
    *(record("memlab", each, 1.2, 2**20) for each in range(3)),
    *(record("peer", each, 1.0, 2**21) for each in range(3)),
    Record(key("gone", 0), "2026-01-02", Status.NOT_RUN, "gone not installed"),
]


@pytest.fixture
def sheet() -> page.Sheet:
    return page.sheets([WORK], RECORDS, ("tiny",))[0]


def test_text_has_a_line_for_every_peer(sheet: page.Sheet) -> None:
    assert page.text(sheet).splitlines() == [
        "cpu · tiny scale · 2026-01-02",
        "torch 2",
        "",
        "           memlab against  peak allocated  time           further",
        "Some work  theirs          0.50 × ahead    1.20 × behind",
        "",
        "Some work: a third: not run: gone not installed",
    ]


def test_the_section_names_what_falls_short_with_its_cause(sheet: page.Sheet) -> None:
    written = page.section([sheet], {("work/peer", "sample_seconds"): "a test needs one"})
    assert written == (
        "**cpu · tiny scale · 2026-01-02** (torch 2): 1 ahead, 1 behind.\n\n"
        "| work | memlab against | peak allocated | time | further |\n|---|---|---|---|---|\n"
        "| Some work | theirs | 0.50 × ahead | 1.20 × behind |  |\n\n"
        "Behind, and why:\n\n- Some work, against theirs, time per sample 1.20 ×: a test needs one.\n\n"
        "Not compared here (not run: gone not installed): a third."
    )
    assert "cause not known yet" in page.section([sheet], {})


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_by_itself_on_light_and_dark_and_needs_no_colour(sheet: page.Sheet) -> None:
    written = page.html([replace(sheet, device="cpu <1>")], {})
    tags = _Tags()
    tags.feed(written)
    assert tags.open == []
    assert {"table", "svg", "desc"} <= tags.seen
    assert "cpu &lt;1&gt;" in written
    assert "prefers-color-scheme:dark" in written
    assert not re.search(r"<script|src=|https?://", written)
    # ahead is a triangle, behind a square, and both are words beside it
    for mark, words in (('<path d="', "0.50 ahead"), ("<rect", "1.20 behind")):
        assert mark in written.partition("</desc>")[2]
        assert words in written
    assert "1.0 MiB" in written


def test_another_device_gets_a_sheet_of_its_own_at_its_largest_scale() -> None:
    small = [replace(each, key=replace(each.key, scale="small")) for each in RECORDS]
    gpu = [replace(each, key=replace(each.key, device="gpu", scale="full")) for each in RECORDS]
    found = page.sheets([WORK], [*RECORDS, *small, *gpu])
    assert [(each.device, each.scale) for each in found] == [("cpu", "small"), ("gpu", "full")]


def test_the_section_and_the_page_say_what_the_committed_results_say() -> None:
    found = page.sheets(CONTESTS, records_in(RESULTS))
    assert found
    assert section_of(COMPARED.read_text(), "peers") == page.section(found, CAUSES)
    assert PAGE.read_text() == page.html(found, CAUSES)


def test_everything_that_falls_short_has_its_cause() -> None:
    found = page.sheets(CONTESTS, records_in(RESULTS))
    short = {
        (pairing.name, ratio.measure.key) for sheet in found for pairing, ratio, _ in page.causes_of(sheet, CAUSES)
    }
    assert short <= CAUSES.keys()
