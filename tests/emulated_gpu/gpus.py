"""The GPUs that can be emulated: what CUDA says of each. Names and capabilities are those of `memlab.hardware.gpus` (tested)."""

from __future__ import annotations

from dataclasses import dataclass

from tests.emulated_gpu.errors import EmulationError

# importing memlab imports torch, for which a command that only starts another one has no time
MIB = 2**20

# of the driver and CUDA, before anything is allocated; a share of a device made small by --memory
_CONTEXT_BYTES = 300 * MIB
_CONTEXT_SHARE = 8


@dataclass(frozen=True)
class Emulated:
    """What the CUDA runtime reports of a GPU.

    Args:
        device_name: as `torch.cuda.get_device_name` says it.
        capability: (major, minor), as `torch.cuda.get_device_capability` says it.
        total_bytes: as `torch.cuda.get_device_properties(0).total_memory` says it on such a GPU.
        multiprocessors: how many.
        threads: at most, on one multiprocessor.
        blocks: likewise.
        shared_bytes: shared memory of a multiprocessor.
        shared_optin_bytes: shared memory that a block may ask for.
        l2_bytes: cache.
        bus_bits: width of the memory's bus.
    """

    device_name: str
    capability: tuple[int, int]
    total_bytes: int
    multiprocessors: int
    threads: int
    blocks: int
    shared_bytes: int
    shared_optin_bytes: int
    l2_bytes: int
    bus_bits: int


# by the names of memlab.hardware.gpus. Sizes per multiprocessor: CUDA programming guide, table "Technical Specifications per
# Compute Capability"; total memory: what torch has printed on such cards
GPUS: dict[str, Emulated] = {
    "T4": Emulated("Tesla T4", (7, 5), 15_828_320_256, 40, 1024, 16, 65_536, 65_536, 4 * MIB, 256),
    "A10G": Emulated("NVIDIA A10G", (8, 6), 23_689_691_136, 80, 1536, 16, 102_400, 101_376, 6 * MIB, 384),
    "L4": Emulated("NVIDIA L4", (8, 9), 23_659_413_504, 58, 1536, 24, 102_400, 101_376, 48 * MIB, 192),
    "RTX 4090": Emulated(
        "NVIDIA GeForce RTX 4090", (8, 9), 25_386_352_640, 128, 1536, 24, 102_400, 101_376, 72 * MIB, 384
    ),
    "A100 40GB": Emulated(
        "NVIDIA A100-SXM4-40GB", (8, 0), 42_481_549_312, 108, 2048, 32, 167_936, 166_912, 40 * MIB, 5120
    ),
    "A100 80GB": Emulated(
        "NVIDIA A100-SXM4-80GB", (8, 0), 85_094_825_984, 108, 2048, 32, 167_936, 166_912, 40 * MIB, 5120
    ),
    "H100 SXM": Emulated(
        "NVIDIA H100 80GB HBM3", (9, 0), 85_028_765_696, 132, 2048, 32, 233_472, 232_448, 50 * MIB, 5120
    ),
    "B200": Emulated("NVIDIA B200", (10, 0), 191_510_806_528, 148, 2048, 32, 233_472, 232_448, 126 * MIB, 8192),
}
_BY_NAME = {name.casefold(): name for name in GPUS}


def properties(name: str, memory_bytes: int | None = None) -> str:
    """What the emulated runtime is told of a GPU, as `name=Tesla T4;major=7;...`.

    Args:
        name: one of `GPUS`, in any letter case.
        memory_bytes: size of its memory instead of its own.

    Raises:
        EmulationError: no such GPU.

    Example:
        >>> properties("t4").split(";")[:3]
        ['name=Tesla T4', 'major=7', 'minor=5']
    """
    known = _BY_NAME.get(name.strip().casefold())
    if known is None:
        raise EmulationError(f"--gpu {name}: not a GPU that is emulated; choose one of {', '.join(GPUS)}")
    found = GPUS[known]
    total_bytes = found.total_bytes if memory_bytes is None else memory_bytes
    values: dict[str, str | int] = {
        "name": found.device_name,
        "major": found.capability[0],
        "minor": found.capability[1],
        "total": total_bytes,
        "context": min(_CONTEXT_BYTES, total_bytes // _CONTEXT_SHARE),
        "multiprocessors": found.multiprocessors,
        "threads": found.threads,
        "blocks": found.blocks,
        "shared": found.shared_bytes,
        "shared_optin": found.shared_optin_bytes,
        "l2": found.l2_bytes,
        "bus_bits": found.bus_bits,
    }
    return ";".join(f"{key}={value}" for key, value in values.items())
