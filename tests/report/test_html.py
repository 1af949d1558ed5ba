"""The HTML receipt: well formed, escaped, readable by screen readers and in either theme."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import samples

from memlab.records.comparison import Comparison
from memlab.report import html, tables


class _Reader(HTMLParser):
    """Collects the tree's tags and texts; fails on tags that do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def read(comparison: Comparison) -> _Reader:
    return _Reader(html.table(tables.comparison(comparison)))


def test_one_table_with_caption_and_scopes() -> None:
    reader = read(samples.comparison())
    scopes = [attributes["scope"] for attributes in reader.named("th")]
    assert len(reader.named("table")) == len(reader.named("caption")) == 1
    assert scopes.count("row") == 4
    assert scopes.count("col") == 8
    assert [cell["colspan"] for cell in reader.named("td") if "colspan" in cell] == ["8", "8"]
    assert samples.TITLE in reader.texts
    assert samples.EVENT in reader.texts


def test_every_figure_of_the_text_receipt_is_there() -> None:
    texts = read(samples.comparison()).texts
    for figure in ("10.89 GiB", "5.05 GiB", "−54 %", "671", "2e-7", "1.00 GiB", "−16 %"):
        assert figure in texts
    assert "1.27 ± 3 %" in "".join(texts)  # a line may break before the spread


def test_text_is_escaped() -> None:
    evil = '<script>alert(1)</script> & "quotes"'
    measurement = replace(samples.measurement(evil, 1, 1), notes=(evil,), breakdown={evil: 5})
    source = html.table(tables.comparison(Comparison(evil, (measurement,), (evil,))))
    assert "<script" not in source
    reader = _Reader(source)
    assert reader.texts.count(evil) >= 4
    assert reader.named("script") == []


def test_either_theme_and_no_script() -> None:
    source = html.table(tables.comparison(samples.crowded()))
    styles = ";".join(re.findall(r'style="([^"]*)"', source))
    assert "<style" not in source
    assert not re.search(r"(?<!-)color:(?!inherit)", styles)
    assert all(value == "transparent" for value in re.findall(r"background:([^;\"]+)", styles))
    assert not re.search(r"https?:|url\(", source)


def test_bars_are_drawn_to_one_scale_and_spoken() -> None:
    source = html.table(tables.comparison(samples.comparison()))
    widths = [
        sum(float(width) for width in re.findall(r"width:([0-9.]+)%", bar))
        for bar in re.findall(r'<div role="img".*?</div>', source)
    ]
    peaks = [measurement.peak_allocated_bytes for measurement in samples.comparison().measurements]
    assert [round(width / 100 * max(peaks) / peak, 2) for width, peak in zip(widths, peaks, strict=True)] == [1.0] * 4
    labels = [bar["aria-label"] for bar in read(samples.comparison()).named("div") if "role" in bar]
    assert labels[1] == (
        "parameters 471.0 MiB, gradients 471.0 MiB, optimizer state 952.3 MiB, activations 2.80 GiB, "
        "temporaries 409.6 MiB"
    )


def test_without_styles_a_bar_is_said_in_words() -> None:
    source = html.table(tables.comparison(samples.comparison()))
    bars = [_Reader(bar).texts for bar in re.findall(r'<div role="img".*?</div>', source)]
    assert "".join(bars[1]) == "parameters 9 % gradients 9 % optimizer state 18 % activations 55 % temporaries 8 % "
    assert len(bars) == 4


def test_what_the_last_cell_ran_is_marked_among_others() -> None:
    compared = samples.comparison()
    source = html.table(tables.comparison(replace(compared, latest=(compared.measurements[-1].plan,))))
    assert source.count(">this cell</span>") == 1
    assert "this cell" not in html.table(tables.comparison(compared))


def test_flags_do_not_break_inside() -> None:
    source = html.table(tables.comparison(samples.crowded()))
    for flag in ("--checkpoint every:2", "--optim paged-adam8bit", "--chunk-loss"):
        assert f'<span style="white-space:nowrap">{flag}</span>' in source


def test_it_stays_small() -> None:
    assert len(html.table(tables.comparison(samples.crowded()))) < 20_000


def test_categories_stand_apart_on_pages_without_styles() -> None:
    assert re.sub("<[^>]*>", "", html.keys(("parameters", "gradients"), "")) == "at the peak: parameters gradients"
