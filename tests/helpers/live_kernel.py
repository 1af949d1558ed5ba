"""A kernel that is talked to message by message, as front ends do."""

from __future__ import annotations

import json
import queue
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.environment import with_path

_ROOT = Path(__file__).parents[2]
_PATIENCE_SECONDS = 120.0


class LiveKernel:
    """A kernel and a front end that sends what it likes.

    Attributes:
        messages: what came on iopub, by the id of the request it belongs to.
    """

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager = manager
        self._client = client
        self.messages: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self._came: list[dict[str, Any]] = []

    def send(self, code: str) -> str:
        """Send a cell, without waiting; returns its id."""
        return str(self._client.execute(code.strip("\n"), stop_on_error=False))

    def run(self, code: str) -> str:
        """Run a cell to its end, which must be a good one; returns its id."""
        cell = self.send(code)
        self.until_over(cell)
        assert not self.errors(cell), self.errors(cell)
        return cell

    def value(self, expression: str) -> Any:
        """What an expression is worth in the notebook."""
        return json.loads(self.text(self.run(f"import json\nprint(json.dumps({expression}))")))

    def until_over(self, cell: str) -> None:
        """Wait for the end of a cell."""
        self._until(lambda: self.is_over(cell))

    def is_over(self, cell: str) -> bool:
        """Whether a cell has ended, as far as messages have been read."""
        return any(self._says(message, "idle") for message in self.messages[cell])

    def until_printed(self, cell: str, text: str) -> None:
        """Wait until a cell, running or not, has printed something."""
        self._until(lambda: text in self.text(cell))

    def text(self, cell: str) -> str:
        """What a cell has printed so far."""
        return "".join(m["content"]["text"] for m in self.messages[cell] if m["msg_type"] == "stream")

    def shown(self, cell: str) -> list[dict[str, Any]]:
        """What a cell has displayed so far, by format."""
        kinds = ("display_data", "execute_result")
        return [m["content"]["data"] for m in self.messages[cell] if m["msg_type"] in kinds]

    def errors(self, cell: str) -> list[str]:
        """Names of the errors a cell shows."""
        return [m["content"]["ename"] for m in self.messages[cell] if m["msg_type"] == "error"]

    def completed(self, code: str) -> list[str]:
        """What the last word of a line may become."""
        asked = self._client.complete(code)
        while True:
            reply: dict[str, Any] = self._client.get_shell_msg(timeout=_PATIENCE_SECONDS)
            if reply["parent_header"].get("msg_id") == asked:
                return list(reply["content"]["matches"])

    def subshell(self) -> str:
        """Make a subshell; returns its id."""
        reply = self._control("create_subshell_request", {})
        return str(reply["content"]["subshell_id"])

    def delete_subshell(self, subshell: str) -> None:
        """End a subshell."""
        self._control("delete_subshell_request", {"subshell_id": subshell})

    def click(self, comm_id: str, state: Mapping[str, Any], subshell: str | None = None) -> str:
        """Send what a widget sends when somebody has used it; returns the message's id."""
        return self._to_widget(comm_id, {"method": "update", "state": dict(state), "buffer_paths": []}, subshell)

    def tell(self, comm_id: str, content: Mapping[str, Any], subshell: str | None = None) -> str:
        """Send a widget a message of its own kind; returns the message's id."""
        return self._to_widget(comm_id, {"method": "custom", "content": dict(content)}, subshell)

    def until_shown(
        self, comm_id: str, words_of: Callable[[dict[str, Any]], str], text: str
    ) -> tuple[float, str]:  # fmt: skip
        """Wait until the kernel has a widget show words with a text in them.

        Args:
            comm_id: of the widget.
            words_of: the words in a state that the widget is given.
            text: what to wait for.

        Returns:
            When (`perf_counter`), and the words.
        """
        shown: list[tuple[float, str]] = []

        def is_shown() -> bool:
            for message in self._fresh():
                content = message["content"]
                if message["msg_type"] == "comm_msg" and content.get("comm_id") == comm_id:
                    words = words_of(content["data"].get("state", {}))
                    if text in words:
                        shown.append((time.perf_counter(), words))
            return bool(shown)

        self._until(is_shown)
        return shown[0]

    def _to_widget(self, comm_id: str, data: dict[str, Any], subshell: str | None) -> str:
        message = self._client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self._client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def _fresh(self) -> list[dict[str, Any]]:
        """Messages that have come since this was last asked."""
        fresh, self._came = self._came, []
        return fresh

    def interrupt(self) -> None:
        """Press the interrupt button."""
        self._manager.interrupt_kernel()

    def shut_down(self) -> None:
        """Shut the kernel down as a front end does; it must end by itself."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        self._client.shutdown()
        while self._manager.is_alive():
            assert time.monotonic() < deadline, "the kernel does not end"
            time.sleep(0.05)

    def _control(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        request = self._client.session.msg(kind, content)
        self._client.control_channel.send(request)
        while True:
            reply: dict[str, Any] = self._client.get_control_msg(timeout=_PATIENCE_SECONDS)
            if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                assert reply["content"]["status"] == "ok", reply["content"]
                return reply

    def _until(self, is_so: Any) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, (
                f"waited in vain; the newest messages: {list(self.messages.items())[-3:]}"
            )
            try:
                message = self._client.get_iopub_msg(timeout=1.0)
            except queue.Empty:
                continue
            self.messages[message["parent_header"].get("msg_id", "")].append(message)
            self._came.append(message)

    @staticmethod
    def _says(message: dict[str, Any], state: str) -> bool:
        return message["msg_type"] == "status" and message["content"]["execution_state"] == state


@contextmanager
def live_kernel(*paths: str) -> Iterator[LiveKernel]:
    """Start a kernel; it is gone afterwards.

    Args:
        paths: folders with other versions of packages.
    """
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(env={**with_path(*paths, _ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=_PATIENCE_SECONDS)
        yield LiveKernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
