"""Calls that only run forward, in words."""

from __future__ import annotations

from dataclasses import replace

from memlab.records import Category
from memlab.records.comparison import Comparison
from memlab.records.inference import BatchAdvice, CacheUse, CallKind, CallRecord, InferenceRecord
from memlab.report import html, inference, tables, text
from memlab.report.segments import CATEGORIES

CALL = CallRecord(CallKind.GENERATE, 4, 16, 80, 20, 2.0, 0.5, 2048, None, 1024)
RECORD = InferenceRecord(
    "bf16", "cpu", (CALL,), {"parameters": 1024, "KV cache": 1024}, cache=CacheUse(8192, 4, 32, 8192, "2 × …")
)
ADVICE = BatchAdvice(12, 4096, 1024, 256, (4,))


def test_a_receipt_has_the_table_and_the_lines() -> None:
    receipt = Comparison("inference · a model", (RECORD.measurement,), inference.lines(RECORD))
    shown = text.table(tables.comparison(receipt)).splitlines()
    assert shown[0] == "inference · a model"
    assert shown[3].split()[:4] == ["--inference", "--bf16", "2.0", "KiB"]
    assert shown[4].startswith("generate: 1 call, the largest of 4 rows × 16 tokens; prefill 128 tokens/s, decode 50.7")
    page = html.table(tables.comparison(receipt))
    assert "KV cache 1.0 KiB" in page
    assert "by its formula 8.0 KiB" in page


def test_every_category_has_a_look() -> None:
    assert set(Category) <= set(CATEGORIES)


def test_a_cache_without_a_formula_and_one_in_larger_storages() -> None:
    assert inference.cache_line(CacheUse(2048, 2, 8)) == (
        "KV cache: 2.0 KiB for 2 rows × 8 tokens, 128 B a token; the model's configuration gives no formula"
    )
    assert inference.cache_line(CacheUse(2048, 2, 0)).startswith("KV cache: 2.0 KiB for 2 rows; ")
    assert inference.cache_line(CacheUse(2048, 2, 8, 1024, "…")).endswith("in larger storages than their tokens need")


def test_advice_says_how_it_is_known() -> None:
    assert inference.batch_line(ADVICE, RECORD) == (
        "batch: up to 12 rows of as many tokens fit into 4.0 KiB (1.0 KiB + 256 B a row, from 4 rows, all growth "
        "attributed to rows)"
    )
    assert "from two sizes" in inference.batch_line(replace(ADVICE, sizes=(2, 4)), RECORD)
    assert inference.batch_line(replace(ADVICE, rows=0), RECORD).startswith("batch: not one row fits into 4.0 KiB")
