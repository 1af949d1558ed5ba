"""What one trial teaches about other plans."""

from __future__ import annotations

import math

import pytest

from memlab.plan import Plan
from memlab.search.corrections import Corrections, settings_of

HALF, BOTH = Plan.parse("--bf16"), Plan.parse("--bf16 --accumulate 4")


def test_nothing_is_known_at_first() -> None:
    errors = Corrections(overall=0.3, setting=0.1)
    assert errors.expected(Plan()) == (0.0, 0.3)
    # precision by itself, and as one of its degrees, share the variance of one setting
    assert errors.expected(HALF)[1] == pytest.approx(math.hypot(0.3, 0.1))
    assert errors.expected(BOTH)[1] == errors.deviation_before(BOTH) == pytest.approx(math.sqrt(0.09 + 0.02))


def test_the_error_of_a_setting_is_told_from_that_of_all_plans() -> None:
    errors = Corrections(overall=1.0, setting=0.2)
    errors.learn(Plan(), 0.5, noise=0.001)
    errors.learn(HALF, 0.7, noise=0.001)
    assert errors.expected(Plan())[0] == pytest.approx(0.5, abs=0.01)
    assert errors.expected(HALF)[0] == pytest.approx(0.7, abs=0.01)
    # the setting's own error goes with it; what was not run is as uncertain as its settings
    assert errors.expected(BOTH)[0] == pytest.approx(0.7, abs=0.01)
    assert errors.expected(BOTH)[1] == pytest.approx(0.2, abs=0.01)
    assert errors.expected(Plan.parse("--adam8bit"))[0] == pytest.approx(0.5, abs=0.01)


def test_degrees_of_a_setting_share_half_of_their_error() -> None:
    errors = Corrections(overall=0.001, setting=0.1)
    errors.learn(Plan.parse("--accumulate 4"), 0.1, noise=0.001)
    assert errors.expected(Plan.parse("--accumulate 8"))[0] == pytest.approx(0.05, abs=0.002)


def test_a_noisy_trial_teaches_less() -> None:
    quiet, noisy = Corrections(0.1, 0.1), Corrections(0.1, 0.1)
    quiet.learn(HALF, 0.3, noise=0.01)
    noisy.learn(HALF, 0.3, noise=0.5)
    assert quiet.expected(HALF)[0] > 0.29 > 0.05 > noisy.expected(HALF)[0] > 0
    assert quiet.expected(HALF)[1] < noisy.expected(HALF)[1]


def test_each_thing_offloaded_is_a_setting() -> None:
    assert settings_of(Plan.parse("--offload optimizer,activations --fp16")) == {
        "precision": ("fp16",), "offload": ("optimizer", "activations"),
    }  # fmt: skip
    assert settings_of(Plan()) == {}


def test_a_doubtful_field_is_believed_less() -> None:
    errors = Corrections(overall=0.1, setting=0.1, has_doubts=True)
    spilled = Plan.parse("--offload activations")
    assert errors.expected(spilled)[1] == pytest.approx(math.hypot(0.1, 0.3))
    errors.learn(spilled, 1.0, noise=0.01)
    # nine parts in ten of the surprise are the setting's own
    assert errors.expected(spilled)[0] == pytest.approx(1.0, abs=0.01)
    assert errors.expected(Plan())[0] == pytest.approx(0.1, abs=0.01)
