"""What ranks say is heard once, whole and in order."""

from __future__ import annotations

from pathlib import Path

from memlab.scaleout.messages import SAID, STEP, MessageReader, Sender


def test_messages_are_heard_once_and_only_when_complete(tmp_path: Path) -> None:
    listener = MessageReader(tmp_path, 2)
    assert [*listener.news()] == []
    first, second = Sender(tmp_path, 0), Sender(tmp_path, 1)
    first.say(STEP, step=1, loss=None)
    second.say(SAID, text="zwei\n")
    heard = [*listener.news()]
    assert [(m.rank, m.kind, m.content) for m in heard] == [
        (0, STEP, {"step": 1, "loss": None}),
        (1, SAID, {"text": "zwei\n"}),
    ]
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('{"kind": "step", "at"')
    assert [*listener.news()] == []
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write(': 1.0, "step": 2}\n')
    assert [m.content for m in listener.news()] == [{"step": 2}]
