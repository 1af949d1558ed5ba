// Kernels: registered and counted by name, never run. EMULATED_GPU_REPORT (a file, or - for standard error) tells how often.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "state.h"

using namespace emulated;
namespace {
struct Kernel {
  const char *name;
  size_t launches;
};
struct Variable {
  size_t bytes;
  void *at;
};
std::unordered_map<const void *, Kernel> &kernels = *new std::unordered_map<const void *, Kernel>;
std::unordered_map<const void *, Variable> &variables = *new std::unordered_map<const void *, Variable>;
thread_local struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} configuration;

void report() {
  const char *to = getenv("EMULATED_GPU_REPORT");
  if (!to || !*to) return;
  FILE *file = strcmp(to, "-") ? fopen(to, "a") : stderr;
  if (!file) return;
  std::vector<std::pair<size_t, const char *>> launched;
  size_t total = 0;
  for (auto &[address, kernel] : kernels)
    if (kernel.launches) launched.push_back({kernel.launches, kernel.name}), total += kernel.launches;
  std::sort(launched.rbegin(), launched.rend());
  fprintf(file, "emulated GPU: process %d launched %zu kernels of %zu names\n", getpid(), total, launched.size());
  for (auto &[count, name] : launched) fprintf(file, "%8zu %s\n", count, name ? name : "?");
  if (file != stderr) fclose(file);
}
const int is_reported = atexit(report);

cudaError_t launched(const void *kernel) {
  Lock lock(mutex);
  touch_context(current);
  kernels[kernel].launches++;
  return cudaSuccess;
}
}  // namespace

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void **)stream = configuration.stream;
  return cudaSuccess;
}
API void **__cudaRegisterFatBinary(void *) { return (void **)new void *[4](); }
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API char __cudaInitModule(void **) { return 1; }
API void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {
  kernels[host] = {name, 0};
}
API void __cudaRegisterVar(void **, char *host, char *, const char *, int, size_t bytes, int, int) { variables[host] = {bytes, nullptr}; }
API void __cudaRegisterManagedVar(void **, void **host, char *, const char *, int, size_t bytes, int, int) { variables[host] = {bytes, nullptr}; }
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **, size_t, cudaStream_t) { return launched((const void *)kernel); }
API cudaError_t cudaLaunchKernel(const void *kernel, dim3, dim3, void **, size_t, cudaStream_t) { return launched(kernel); }
API cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3, dim3, void **, size_t, cudaStream_t) { return launched(kernel); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *kernel, void **) { return launched(kernel); }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->maxDynamicSharedSizeBytes = 49152;
  // torch's builds have no code for 8.9; those cards run that of 8.6
  attributes->binaryVersion = attributes->ptxVersion = gpu.major * 10 + (gpu.minor == 9 ? 6 : gpu.minor);
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int block, size_t shared) {
  int by_threads = gpu.threads / std::max(block, 32);
  int by_shared = shared ? (int)(gpu.shared / (shared + 1024)) : gpu.blocks;
  *count = std::max(1, std::min({by_threads, by_shared, gpu.blocks}));
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int block, size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, block, shared);
}
API cudaError_t cudaGetSymbolAddress(void **at, const void *symbol) {
  Lock lock(mutex);
  auto found = variables.find(symbol);
  if (found == variables.end()) return fail(cudaErrorInvalidSymbol, "cudaGetSymbolAddress");
  if (!found->second.at) found->second.at = calloc(1, found->second.bytes + 64);
  *at = found->second.at;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, cudaMemcpyKind) {
  void *at;
  if (cudaError_t error = cudaGetSymbolAddress(&at, symbol)) return error;
  memcpy((char *)at + offset, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *, cudaJitOption *, void **, unsigned, cudaLibraryOption *, void **, unsigned) {
  *library = (cudaLibrary_t)calloc(1, 64);
  return cudaSuccess;
}
API cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }
API cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t, const char *name) {
  *kernel = (cudaKernel_t)strdup(name);
  return cudaSuccess;
}
