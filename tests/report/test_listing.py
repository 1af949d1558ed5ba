"""Tables of prediction, as text and as HTML: predictions, and a found plan."""

from __future__ import annotations

import re
from dataclasses import replace

import samples
from test_html import _Reader

from memlab.records.comparison import FoundPlan
from memlab.report import html, tables, text
from memlab.report.tables import interval_speed, predictions_sentence
from memlab.units import GIB

FEW = [
    samples.prediction("--bf16", 6.0, 2.4),
    samples.prediction("as written", 10.0, 1.2),
    samples.prediction("--accumulate 4", 3.0, 1.1, host_bytes=GIB // 2, notes=("the loop's own loss is left out",)),
    samples.prediction("--accumulate 2 --checkpoint", 4.0, 0.9),
    samples.refused("--adam8bit", "optimizer: no 8-bit form of LBFGS; use --offload optimizer"),
    samples.refused("--adam8bit --bf16", "optimizer: no 8-bit form of LBFGS; use --offload optimizer"),
]


def test_a_table_with_a_budget_in_full() -> None:
    assert text.table(tables.predictions(FEW, 4 * GIB, title="memfit · gpt2 124M")) == (
        """\
memfit · gpt2 124M · 4 plans · 2 refused · budget 4.00 GiB
plan                          •    peak allocated   vs first   offloaded     samples/s   vs first   verdict
──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
as written                        10.00 GiB ± 1 %          –           –   1.20 ± 18 %          –   does not fit, 6.00 GiB too much
--accumulate 4                •    3.00 GiB ± 1 %      −70 %   512.0 MiB   1.10 ± 18 %       −8 %   fits, 1.00 GiB to spare
--accumulate 2 --checkpoint        4.00 GiB ± 1 %      −60 %           –   0.90 ± 18 %      −25 %   uncertain, 0 B to spare ± 41.0 MiB
--bf16                        •    6.00 GiB ± 1 %      −40 %           –   2.40 ± 18 %     +100 %   does not fit, 2.00 GiB too much
• no other plan needs less memory at this speed, or is faster in this memory
refused: 2 plans, such as --adam8bit: optimizer: no 8-bit form of LBFGS; use --offload optimizer
note on --accumulate 4: the loop's own loss is left out"""
    )


def test_hundreds_of_plans_say_how_to_see_the_rest() -> None:
    printed = text.table(
        tables.predictions(samples.plan_space(), 4 * GIB, how_to_see_all="%memfit predict --all shows them")
    )
    assert "… and 285 more (235 fit, 50 do not fit); %memfit predict --all shows them" in printed
    assert len(printed.splitlines()) < 45
    assert len(text.table(tables.predictions(samples.plan_space(), 4 * GIB, every=True)).splitlines()) > 300


def test_on_cuda_every_line_stays_within_a_page() -> None:
    reserved = [
        replace(p, peak_reserved_bytes=int(p.peak_allocated_bytes * 1.06), interval_seconds=(p.step_seconds / 2, p.step_seconds * 2))
        for p in samples.plan_space() if not p.refused
    ]  # fmt: skip
    lines = text.table(tables.predictions(reserved, 4 * GIB)).splitlines()
    assert "peak reserved" in lines[1]
    assert max(map(len, lines)) <= 155


def test_everything_refused_is_no_table() -> None:
    assert text.table(tables.predictions(FEW[-2:])).splitlines()[1:] == [
        "refused: 2 plans, such as --adam8bit: optimizer: no 8-bit form of LBFGS; use --offload optimizer"
    ]
    assert text.table(tables.predictions([])).splitlines()[-1] == "no plan was predicted"
    assert "<table" in html.table(tables.predictions(FEW[-2:]))


def test_a_wide_interval_is_a_range() -> None:
    plan = samples.prediction("--fp16", 2, 1.0)
    seconds = plan.step_seconds
    assert interval_speed(replace(plan, interval_seconds=(seconds / 2, seconds * 2))) == "1.00 (0.50–2.00)"
    assert interval_speed(replace(plan, interval_seconds=(seconds, seconds))) == "1.00"
    assert interval_speed(replace(plan, step_seconds=float("nan"))) == "–"
    assert interval_speed(replace(plan, samples_per_step=0)) == "8.00 s ± 15 %"


def test_a_found_plan_in_full() -> None:
    assert text.table(tables.found(samples.found())) == (
        """\
gpt2 124M · AdamW · cuda:0 · budget 4.00 GiB
trial  plan                      predicted    measured  off by  predicted samples/s  measured samples/s  outcome
────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
    1  --bf16 --chunk-loss        6.52 GiB  > 4.00 GiB       –          2.41 ± 18 %                   –  out of memory: Tried to allocate 393.00 MiB
    2  --accumulate 2 --bf16    ≠ 4.19 GiB    3.87 GiB  −7.7 %          2.38 ± 18 %          2.30 ± 3 %  fits, 133.1 MiB to spare; found
         --chunk-loss
found --accumulate 2 --bf16 --chunk-loss: 3.87 GiB of 4.00 GiB, 133.1 MiB to spare, 2.30 ± 3 % samples/s, verified in 2 trials
≠ measured outside of what was predicted
predicted and measured are the peak allocated; considered: 300 plans: 245 fit, 1 uncertain, 54 do not fit, 132 refused
refused: 72 plans, such as --adam8bit --offload optimizer: offload: the 8-bit state is small, and paged already; drop one of the two
refused: 60 plans, such as --accumulate 8 --checkpoint: accumulation: --accumulate 8 needs at least 8 rows in a batch of GPT2, this one has 4"""
    )


def test_what_ran_already_stands_beside_its_prediction() -> None:
    ran = (
        samples.measurement("--accumulate 2", 2, 1.29),
        samples.measurement("--offload activations --chunk-loss", 2, 0.2),
    )
    table = tables.predictions(samples.plan_space(), 4 * GIB, measurements=ran)
    heads = [column.title for column in table.columns]
    rows = {each.texts[0]: dict(zip(heads, each.texts, strict=True)) for each in table.rows}
    said = {plan: (rows[plan]["samples/s"], rows[plan]["measured"]) for plan in (each.plan for each in ran)}
    assert said == {
        "--accumulate 2": ("1.29 ± 18 %", "1.29 ± 3 %"),
        "--offload activations --chunk-loss": ("≠ 0.89 ± 18 %", "0.20 ± 2 %"),
    }
    assert rows["as written"]["measured"] == "–"
    assert "≠ measured outside of what was predicted" in table.foot
    assert "measured" not in [column.title for column in tables.predictions(samples.plan_space()).columns]


def test_a_trial_that_was_measured_above_the_budget() -> None:
    found = samples.found()
    above = replace(samples.measurement("--bf16", 4.1, 2.0), fits=False, peak_allocated_bytes=int(4.5 * GIB))
    tried: FoundPlan = replace(found, trials=(above, *found.trials))
    assert tables.found(tried).rows[0].texts[3] == "4.50 GiB"
    assert tables.found(tried).rows[0].texts[-1] == "does not fit, 512.0 MiB too much"


def test_html_has_every_number_and_either_theme() -> None:
    source = html.table(tables.predictions(FEW, 4 * GIB))
    reader = _Reader(source)
    for figure in ("3.00 GiB ± 1 %", "−70 %", "1.10 ± 18 %", "fits, 1.00 GiB to spare"):
        assert figure in "".join(reader.texts)
    scopes = [attributes["scope"] for attributes in reader.named("th")]
    assert (scopes.count("row"), scopes.count("col")) == (4, 8)
    styles = ";".join(re.findall(r'style="([^"]*)"', source))
    assert not re.search(r"(?<!-)color:(?!inherit)", styles)
    assert "dashed" in styles
    assert any(attributes.get("aria-label") == "Pareto-optimal" for attributes in reader.named("span"))


def test_html_escapes_and_stays_small() -> None:
    evil = '<script>alert(1)</script> & "quotes"'
    plans = [samples.prediction(evil, 1, 1, notes=(evil,)), samples.refused("--fp16", evil)]
    assert "<script" not in html.table(tables.predictions(plans, GIB, title=evil)) + html.table(
        tables.found(replace(samples.found(), title=evil))
    )
    assert len(html.table(tables.predictions(samples.plan_space(), 4 * GIB))) < 50_000


def test_one_sentence() -> None:
    assert predictions_sentence(FEW, 4 * GIB) == (
        "4 plans predicted for H100 SXM: 1 fit, 1 uncertain, 2 do not fit; as written needs 10.00 GiB at 1.20 samples "
        "per second; best is --accumulate 4 with 3.00 GiB at 1.10 samples per second."
    )
    assert predictions_sentence(FEW[-1:]) == "No plan can be predicted."
