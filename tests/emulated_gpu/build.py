"""Builds the emulated libraries for the torch that is installed, once for each version.

1. What torch's libraries leave undefined and what NVIDIA's define is read from the files themselves. Functions whose results
   torch reads are written by hand (`libraries/*.cpp`); each of the others becomes a stub that returns 0, success.
   Stubs of functions that create something put a fresh zeroed block where their first argument points.
2. The folder is named after the versions and the text of the sources: what is there fits, what does not fit is built anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.emulated_gpu.errors import EmulationError

HERE = Path(__file__).parent
SOURCES = HERE / "libraries"
BUILT = HERE.parents[1] / "build" / "emulated_gpu"
OPERATORS = "operators.so"
ORDER = "order"
TESTED_TORCH = "2.14.1"
_CUDA_MAJOR = "13"
_GIB = 2**30
_DISK_BYTES = _GIB // 2
_HEADERS = {  # a header, and the package of pip that brings it
    "cuda_runtime_api.h": "nvidia-cuda-runtime",
    "crt/host_defines.h": "nvidia-cuda-crt",
    "nv/target": "nvidia-cuda-cccl",
    "cublas_api.h": "nvidia-cublas",
    "cudnn.h": "nvidia-cudnn-cu13",
    "nccl.h": "nvidia-nccl-cu13",
    "nvrtc.h": "nvidia-cuda-nvrtc",
}
_RUNTIME = "libcudart"
_SOURCES_OF_THE_RUNTIME = ("device.cpp", "memory.cpp", "streams.cpp", "kernels.cpp")
# libraries whose symbols carry no version, by the prefix of what they define
_UNVERSIONED = {
    "nccl": "libnccl.so.2",
    "cusparseLt": "libcusparseLt.so.0",
    "cuFile": "libcufile.so.0",
    "nvshmem": "libnvshmem_host.so.3",
    "curand": "libcurand.so.10",
}
_DRIVER = "libcuda.so.1"
_MONITOR = "libnvidia-ml.so.1"
_OF_CUDA = re.compile(
    r"^(cuda|__cuda|cu[A-Z]|cublas|cudnn|cusparse|cufft|curand|cusolver|nccl|cupti|nvrtc|nvshmem|cuFile|nvml)"
)
_CREATES = re.compile(r"Create|LtInit$")


@dataclass(frozen=True)
class Torch:
    """The torch that is installed.

    Args:
        version: as `torch.__version__`.
        cuda: as `torch.version.cuda`; None of a CPU build.
        site: the folder of packages it is in.
    """

    version: str
    cuda: str | None
    site: Path


def installed_torch() -> Torch:
    """The torch of this interpreter, found without importing it.

    Raises:
        EmulationError: there is none.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise EmulationError(
            f"{sys.executable} has no torch; pip install torch=={TESTED_TORCH} (a CUDA build, several GB)"
        )
    folder = Path(spec.origin).parent
    said = dict(re.findall(r"^(\w+)(?:: [^=\n]+)? = '?([^'\n]+)'?$", (folder / "version.py").read_text(), re.MULTILINE))
    return Torch(said["__version__"], None if said["cuda"] == "None" else said["cuda"], folder.parent)


def check_torch(torch: Torch) -> None:
    """Refuse what the emulation was not written for.

    Raises:
        EmulationError: a CPU build, or another version of torch or CUDA.
    """
    if torch.cuda is None:
        raise EmulationError(
            f"torch {torch.version} is a CPU build, which has no CUDA code to run; "
            f"pip install torch=={TESTED_TORCH} in an environment of its own (a CUDA build, several GB)"
        )
    if torch.version.partition("+")[0] != TESTED_TORCH or torch.cuda.partition(".")[0] != _CUDA_MAJOR:
        raise EmulationError(
            f"torch {torch.version} with CUDA {torch.cuda}: the emulated GPU is written for torch {TESTED_TORCH} "
            f"with CUDA {_CUDA_MAJOR}; pip install torch=={TESTED_TORCH}"
        )


def built(say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of libraries for the torch that is installed; builds it if it is not there.

    Raises:
        EmulationError: a torch it is not written for, no compiler, no headers, too little disk, or a compiler's error.
    """
    torch = installed_torch()
    check_torch(torch)
    folder = BUILT / _key(torch)
    if folder.exists():
        return folder
    if missing := [tool for tool in ("g++", "readelf", "nm") if shutil.which(tool) is None]:
        raise EmulationError(f"no {' and no '.join(missing)} on the PATH; apt-get install g++")
    includes = [*torch.site.glob("nvidia/*/include"), *_toolkits()]
    packages = [name for header, name in _HEADERS.items() if not any((folder / header).exists() for folder in includes)]
    if packages:
        raise EmulationError(f"headers of CUDA are missing; pip install {' '.join(packages)}")
    BUILT.mkdir(parents=True, exist_ok=True)
    if (free_bytes := shutil.disk_usage(BUILT).free) < _DISK_BYTES:
        raise EmulationError(
            f"{free_bytes / _GIB:.2f} GiB are free at {BUILT}, building takes {_DISK_BYTES / _GIB:.2f} GiB; make room there"
        )
    with (BUILT / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=BUILT, prefix="building-") as name:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second finds it built
        if not folder.exists():
            made = Path(name) / "libraries"
            made.mkdir()
            _Build(torch, includes, made, say).run()
            made.rename(folder)
    return folder


def _toolkits() -> list[Path]:
    """Headers of a CUDA toolkit of the machine, for those that pip's packages lack."""
    compiler = shutil.which("nvcc")
    roots = [Path("/usr/local/cuda"), *([Path(compiler).resolve().parents[1]] if compiler else [])]
    return [root / "include" for root in roots if (root / "include").is_dir()]


def _key(torch: Torch) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    for library in sorted(_consumers(torch)):
        digest.update(f"{library.name} {library.stat().st_size}".encode())
    return f"torch-{torch.version.partition('+')[0]}-{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:16]}"


def _consumers(torch: Torch) -> list[Path]:
    """Libraries that call CUDA's."""
    version = (torch.cuda or "").replace(".", "")
    patterns = ("torch/lib/*.so", "torchvision/*.so", f"bitsandbytes/libbitsandbytes_cuda{version}.so")
    return [path for pattern in patterns for path in torch.site.glob(pattern)]


def _run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise EmulationError(f"{command[0]} failed: {lines[0] if lines else done.returncode}")
    return done.stdout


def _symbols(library: Path, *, defined: bool) -> list[tuple[str, str]]:
    """Functions of CUDA that a library defines, or that it wants of others, with their version."""
    found = []
    for line in _run("readelf", "--dyn-syms", "-W", library).splitlines():
        cells = line.split()
        is_function = len(cells) >= 8 and cells[0].rstrip(":").isdigit() and cells[3] in ("FUNC", "NOTYPE", "IFUNC")
        if is_function and (cells[6] != "UND") == defined:
            name, _, version = cells[7].partition("@")
            if _OF_CUDA.match(name):
                found.append((name, version.lstrip("@")))
    return found


def _needed(library: Path) -> list[str]:
    """Libraries of CUDA that a library is linked to; copies that wheels bring under other names use what comes first."""
    found = re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", _run("readelf", "-d", "-W", library))
    return [each for each in found if not re.search(r"\.[0-9a-f]{8}\.so", each)]


class _Build:
    """One build, into a folder."""

    def __init__(self, torch: Torch, includes: Sequence[Path], folder: Path, say: Callable[[str], None]) -> None:
        self.torch, self.folder, self._say = torch, folder, say
        self._flags = ["-fPIC", "-fvisibility=hidden", "-w", f"-I{SOURCES}", *(f"-I{path}" for path in includes)]
        self._wanted: dict[str, set[str]] = defaultdict(set)
        self._versions: dict[str, str] = {}

    def run(self) -> None:
        """Build all libraries and the list of them in the order they are loaded."""
        self._say(f"building for torch {self.torch.version}, once (about a minute)")
        self._look()
        order = sorted(self._wanted, key=lambda name: (not name.startswith(_RUNTIME), name))
        runtime = order[0]
        self._link(runtime, runtime)
        with ThreadPoolExecutor(2) as workers:
            operators = workers.submit(self._operators, runtime)
            list(workers.map(lambda name: self._link(name, runtime), order[1:]))
            operators.result()
        for scrap in self.folder.glob("*.scrap.*"):
            scrap.unlink()
        (self.folder / ORDER).write_text("\n".join(order) + "\n")

    def _look(self) -> None:
        """Find what is wanted of which library."""
        for library in _consumers(self.torch):
            for soname in _needed(library):
                self._wanted[soname] |= set()
            for name, said in _symbols(library, defined=False):
                version = re.sub(r" \(\d+\)$", "", said)
                soname = version
                if not version.startswith("lib"):
                    fitting = (soname for prefix, soname in _UNVERSIONED.items() if name.startswith(prefix))
                    soname = next(fitting, _DRIVER)
                self._wanted[soname].add(name)
                if version:
                    self._versions[soname] = version
        self._wanted[_DRIVER] |= set()
        self._wanted[_MONITOR] |= set()
        for text in self.torch.site.glob("triton/backends/nvidia/driver.c"):  # linked when Triton compiles a kernel
            names = set(re.findall(r"\bcu[A-Z]\w+", text.read_text()))
            self._wanted[_DRIVER] |= {name for name in names if not name.endswith("_t")}
        for path in self.torch.site.glob("nvidia/*/lib/*.so*"):
            if path.name in self._wanted and not path.name.startswith(_RUNTIME):
                self._wanted[path.name] |= {name for name, _ in _symbols(path, defined=True)}

    def _link(self, soname: str, runtime: str) -> None:
        stem = soname.split(".so")[0]
        names = _SOURCES_OF_THE_RUNTIME if soname == runtime else (f"{stem}.cpp",)
        objects = [self._compiled(stem, SOURCES / name) for name in names if (SOURCES / name).exists()]
        written = {
            line.split()[2]
            for each in objects
            for line in _run("nm", "-g", "--defined-only", each).splitlines()
            if len(line.split()) == 3
        }
        stubs = self._stubs(stem, sorted(self._wanted[soname] - written))
        version = self._versions.get(soname, "")
        script = self.folder / f"{stem}.scrap.map"
        script.write_text(f"{version} {{ global: *; }};\n")
        libraries = [] if soname == runtime else [f"-L{self.folder}", f"-l:{runtime}", "-Wl,-rpath,$ORIGIN"]
        _run("g++", "-shared", f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}", "-o", self.folder / soname,
             *objects, *stubs, "-ldl", "-lpthread", "-lrt", "-Wl,--no-as-needed", *libraries)  # fmt: skip

    def _compiled(self, stem: str, source: Path) -> Path:
        target = self.folder / f"{stem}.{source.stem}.scrap.o"
        _run("g++", "-std=c++17", "-O2", *self._flags, "-c", source, "-o", target)
        return target

    def _stubs(self, stem: str, names: Sequence[str]) -> list[Path]:
        lines = [".text"]
        for name in names:
            creates = _CREATES.search(name) and not name.startswith("nvshmem")
            lines += [f".globl {name}", f".type {name},@function", f"{name}:"]
            lines.append("jmp emulated_create" if creates else "xor %eax,%eax\nret")
        lines += ['.section .note.GNU-stack,"",@progbits', ""]
        text = self.folder / f"{stem}.scrap.S"
        text.write_text("\n".join(lines))
        creating = self.folder / f"{stem}.scrap.c"
        creating.write_text(
            '#include <stdlib.h>\n__attribute__((visibility("hidden")))\n'
            "int emulated_create(void **made) { if (made) *made = calloc(1, 256); return 0; }\n"
        )
        objects = [text.with_suffix(".S.scrap.o"), creating.with_suffix(".c.scrap.o")]
        for source, target in zip((text, creating), objects, strict=True):
            _run("gcc", "-fPIC", "-c", source, "-o", target)
        return objects

    def _operators(self, runtime: str) -> None:
        """The library over torch's dispatcher."""
        torch = self.torch.site / "torch"
        includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        target = self.folder / "operators.scrap.o"
        _run("g++", "-std=c++20", "-O1", *self._flags, *includes, "-c", SOURCES / "operators.cpp", "-o", target)
        libraries = ["-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda", f"-l:{runtime}"]
        _run("g++", "-shared", "-o", self.folder / OPERATORS, target, f"-L{torch / 'lib'}", f"-L{self.folder}",
             "-Wl,--no-as-needed", *libraries, "-Wl,-rpath,$ORIGIN", "-Wl,--unresolved-symbols=ignore-in-shared-libs")  # fmt: skip
