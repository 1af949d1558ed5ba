"""The page about predictions and torch's allocator is that of the results."""

from tests.bench.allocator_accuracy import PAGE, page


def test_the_page_shows_the_results() -> None:
    assert PAGE.read_text() == page()
