"""The table, the HTML and the picture of an ablation."""

from __future__ import annotations

import doctest
import io
from dataclasses import replace
from html.parser import HTMLParser
from types import ModuleType

import pytest
import samples

from memlab.plan import Plan
from memlab.records import Measurement, out_of_memory
from memlab.records.ablation import Ablation, AblationRow
from memlab.report import ablation, html, image, text
from memlab.report.segments import BUDGET
from memlab.units import GIB

REASON = "accumulation: GPT2 has BatchNorm (1); replace it by GroupNorm"


def row(technique: str, what: str, measurement: Measurement | None, **more: object) -> AblationRow:
    plan = measurement.plan if measurement is not None else technique
    predicted = (
        samples.prediction(plan, measurement.peak_allocated_bytes / GIB, 1.2) if measurement is not None else None
    )
    return replace(AblationRow(technique, plan, what, measurement, predicted), **more)  # type: ignore[arg-type]


def found(budget_bytes: int | None = None) -> Ablation:
    """Rows of every kind."""
    first = samples.measurement("as written", 9.1, 1.31)
    chunked = samples.measurement("--chunk-loss", 7.0, 1.30)
    checkpointed = samples.measurement("--checkpoint --chunk-loss", 1.1, 0.98)
    useless = samples.measurement("--checkpoint --offload activations --chunk-loss", 1.1, 0.4)
    return Ablation("memfit ablation · gpt2 124M · AdamW · cuda:0", (
        row("", "the loop as it is", first),
        row("--chunk-loss", "Chunked loss; same gradient", chunked),
        row("--accumulate 4", "Gradient accumulation: 4 micro-batches; same gradient", None, refused=REASON, kept=False),
        row("--checkpoint", "Checkpointing: every block; same gradient", checkpointed),
        row("--offload activations", "Offload: activations; same gradient", useless, kept=False),
    ), budget_bytes)  # fmt: skip


def ran_out() -> Ablation:
    """The first row ran out of memory."""
    first = out_of_memory(Plan(), samples.DEVICE, 10 * GIB, "Tried to allocate 1.20 GiB")
    return replace(found(6 * GIB), rows=(row("", "the loop as it is", first), *found().rows[1:]),
                   events=("ended at the first row that fits; not tried: --bf16",))  # fmt: skip


@pytest.mark.parametrize("module", [ablation])
def test_examples_in_the_docstrings(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_table_in_full() -> None:
    assert text.table(ablation.table(found(4 * GIB))) == (
        """\
memfit ablation · gpt2 124M · AdamW · cuda:0 · batch 8 × 512 · budget 4.00 GiB
technique                   peak allocated   predicted   vs before   vs first    tokens/s   predicted   vs before   vs first
────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
as written                       10.89 GiB   10.89 GiB           –          –   671 ± 3 %         614           –          –
    ↳ the loop as it is; the peak is in the forward pass, mostly activations
+ --chunk-loss                    8.79 GiB    8.79 GiB       −19 %      −19 %   666 ± 3 %         614        −1 %       −1 %
    ↳ Chunked loss; same gradient; the peak is in the forward pass, mostly activations
(+ --accumulate 4)                 refused           –           –          –           –           –           –          –
    ↳ Gradient accumulation: 4 micro-batches; same gradient; refused: accumulation: GPT2 has BatchNorm (1); replace it by GroupNorm
+ --checkpoint ✓ fits             2.89 GiB    2.89 GiB       −67 %      −73 %   502 ± 2 %       ≠ 614       −25 %      −25 %
    ↳ Checkpointing: every block; same gradient; fits 4.00 GiB, 1.11 GiB to spare; the peak is in the forward pass, mostly activations
(+ --offload activations)         2.89 GiB    2.89 GiB        ±0 %      −73 %   205 ± 2 %       ≠ 614       −59 %      −69 %
    ↳ Offload: activations; same gradient; no gain; the peak is in the forward pass, mostly activations; left out below
2 of 4 techniques kept: 10.89 GiB at 671 tokens/s → 2.89 GiB at 502 tokens/s (−73 % memory, −25 % tokens/s) with --checkpoint --chunk-loss
( ) left out of the rows below; before: the last row that was kept; predicted speeds are scaled by the first row that ran
≠ measured outside of what was predicted"""
    )


def test_where_the_first_ran_out_the_table_says_what_first_means() -> None:
    lines = text.table(ablation.table(ran_out())).splitlines()
    assert "> 10.00 GiB" in lines[3]
    assert lines[4].endswith("out of memory: Tried to allocate 1.20 GiB")
    assert "ended at the first row that fits; not tried: --bf16" in lines
    assert "first: + --chunk-loss, the first row that ran" in text.table(ablation.table(ran_out())).replace("\n  ", " ")


def test_samples_where_there_are_no_tokens() -> None:
    without = replace(found().rows[0].measurement, tokens_per_step=0)  # type: ignore[type-var]
    assert "samples/s" in text.table(ablation.table(Ablation("m", (row("", "the loop as it is", without),))))


def test_reserved_and_host_bytes_have_columns_where_there_are_any() -> None:
    assert "peak reserved" not in text.table(ablation.table(found()))
    rows = tuple(
        replace(each, measurement=each.measurement and replace(each.measurement, peak_reserved_bytes=11 * GIB, host_bytes=GIB))
        for each in found().rows
    )  # fmt: skip
    shown = text.table(ablation.table(replace(found(), rows=rows)))
    assert "peak reserved" in shown
    assert "offloaded" in shown
    assert max(map(len, shown.splitlines())) <= 148


class Rows(HTMLParser):
    """Texts of the cells, row by row, and whether tags are balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "tr" in self.open:
            self.rows[-1][-1] += data


def test_html_has_every_row_and_balanced_tags() -> None:
    read = Rows(html.table(ablation.table(found(4 * GIB))))
    assert read.open == []
    rows = [cells for cells in read.rows[1:] if len(cells) > 1]
    assert len({len(cells) for cells in rows}) == 1
    assert [cells[0] for cells in rows[1:]] == [
        "as writtenthe loop as it is",
        "+ --chunk-lossChunked loss; same gradient",
        "(+ --accumulate 4)Gradient accumulation: 4 micro-batches; same gradient",
        "+ --checkpoint ✓ fitsCheckpointing: every block; same gradient",
        "(+ --offload activations)Offload: activations; same gradient",
    ]
    # a note has the whole width below its row
    assert read.rows[read.rows.index(rows[3]) + 1] == [f"refused: {REASON}"]


def test_html_escapes_and_sets_back() -> None:
    shown = replace(found(), title="<script>", rows=(replace(found().rows[0], what="a < b"), *found().rows[1:]))
    page = html.table(ablation.table(shown))
    assert "<script" not in page
    assert "a &lt; b" in page
    assert page.count('opacity:.65">') == 4  # two rows, each with its note
    assert "dashed #D9534F" in html.table(ablation.table(ran_out()))


@pytest.mark.parametrize("shown", [found(4 * GIB), ran_out(), Ablation("m", found().rows[:1])])
def test_the_picture(shown: Ablation) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    png = image.ablation_png(shown)
    picture = Image.open(io.BytesIO(png))
    assert picture.width == 1584
    assert picture.height > 100 + 75 * len(shown.rows)
    assert picture.info["Description"].startswith(("1 of", "2 of", "as written"))
    assert (samples.share_of(BUDGET, png) > 1e-4) is (shown.budget_bytes is not None)


def test_the_sentence() -> None:
    assert ablation.sentence(found()) == (
        "2 of 4 techniques kept: 10.89 GiB at 671 tokens/s → 2.89 GiB at 502 tokens/s (−73 % memory, −25 % tokens/s) with "
        "--checkpoint --chunk-loss"
    )
    assert ablation.sentence(Ablation("m", ran_out().rows[:1])) == "as written: ran out of memory"
