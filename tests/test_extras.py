"""Optional packages are imported as at the top of a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memlab.extras import require
from memlab.measuring.ledger import Ledger
from tests.helpers.ctrl_c import pythons_own_handler  # noqa: F401 - a fixture


@pytest.mark.usefixtures("pythons_own_handler")
def test_a_package_that_makes_tensors_is_imported_whole_whatever_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "import signal, torch",
        "signal.raise_signal(signal.SIGINT)",
        "table = torch.arange(4.0)",
        "last = table.sum()",
    )
    (tmp_path / "makes_tensors.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "makes_tensors", None)
    monkeypatch.delitem(sys.modules, "makes_tensors")  # as it is afterwards
    with torch.device("meta"), torch.inference_mode(), Ledger(capacity_bytes=8):
        with pytest.raises(torch.OutOfMemoryError):
            torch.arange(4.0, device="cpu")
        with pytest.raises(KeyboardInterrupt):  # which came while it waited
            require("makes_tensors")
        package = require("makes_tensors")
    assert float(package.last) == 6.0
    assert not package.table.is_inference()


@pytest.mark.parametrize("package", ["bitsandbytes", "peft"])
def test_nothing_is_printed_by_imports(package: str) -> None:
    pytest.importorskip(package)
    code = f"from memlab.extras import require; require({package!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert (ran.stdout, ran.stderr) == ("", "")
