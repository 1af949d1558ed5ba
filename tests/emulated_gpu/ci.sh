#!/usr/bin/env bash
# torch's CUDA build on the emulated GPU: an environment of its own, the build, and a sample of what runs on it. Says the
# seconds of each part. What cannot be installed is a failure: these tests are the only ones that run memlab's CUDA lines.
# With `torch` it installs torch alone, most of its 5 GB: `.ci/run` has that done beside other tests.
set -euo pipefail
cd "$(dirname "$0")/../.."

environment=build/emulated_gpu/environment
python=$environment/bin/python
torch=$(sed -n 's/^TESTED_TORCH = "\(.*\)"$/\1/p' tests/emulated_gpu/build.py)
part() { printf '\n== emulated GPU: %s (%s s so far)\n' "$*" "$SECONDS"; }

part "an environment with torch $torch, its CUDA build"
mkdir -p build/emulated_gpu
grep -v '^torch==' constraints.txt >build/emulated_gpu/constraints.txt
python3 -m venv "$environment"
packages=("torch==$torch" nvidia-cuda-crt nvidia-cuda-cccl)
[ "${1:-}" = torch ] || packages+=(-e '.[lab,test]')
if ! "$python" -m pip install -q --no-compile -c build/emulated_gpu/constraints.txt "${packages[@]}"; then
  echo "emulated GPU: torch $torch (CUDA build, some 5 GB) could not be installed into $environment, see above;" \
    "it needs Linux, Python 3.11 or newer, a package index and disk ($(df -h --output=avail . | tail -1 | tr -d ' ') are free)" >&2
  exit 1
fi

if [ "${1:-}" = torch ]; then exit 0; fi

emulated() { "$python" -m tests.emulated_gpu --minutes 20 "$@"; }
tests=(python -m pytest -q -p no:cacheprovider)
part "building"
emulated

part "the emulation itself: allocator, late streams, two devices, values"
emulated --values --late --devices 2 -- "${tests[@]}" tests/emulated_gpu/test_emulated.py

part "memory, without values"
emulated -- "${tests[@]}" tests/gpu/test_measure.py tests/gpu/test_choices.py

part "behaviour, with values and late streams"
emulated --values --late -- "${tests[@]}" tests/gpu/test_measure.py tests/gpu/test_loops_cuda.py tests/gpu/test_own_code_cuda.py \
  tests/gpu/test_contracts.py::test_updates_in_the_backward_pass_are_the_same
part "done"
