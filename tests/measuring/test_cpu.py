"""The CPU as a device."""

from memlab.measuring.cpu import CpuDevice


def test_the_device_says_what_it_is():
    assert CpuDevice().name == "CPU ledger"
    assert CpuDevice(2**32).name == "CPU ledger (capacity 4.00 GiB)"
    assert CpuDevice(2**32).ledger().capacity_bytes == 2**32
    assert CpuDevice().peaks(5) == (5, None)
    assert CpuDevice().driver_bytes() is None
