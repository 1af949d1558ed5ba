// Memory: anonymous pages of this process (they cost nothing until written), counted against the size of a device.
// Pages of devices are shared mappings: RLIMIT_DATA, which bounds what the host may take, does not count those.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <map>

#include "state.h"

using namespace emulated;
namespace {
struct Range {
  size_t bytes;
  int device, kind;
};
std::map<char *, Range> &ranges = *new std::map<char *, Range>;
size_t used[MAX_DEVICES];

std::map<char *, Range>::iterator range_of(const void *at) {
  auto found = ranges.upper_bound((char *)at);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return (char *)at < found->first + found->second.bytes ? found : ranges.end();
}

void *pages(size_t bytes, int sharing) {
  int flags = sharing | MAP_ANONYMOUS | (sharing == MAP_SHARED ? MAP_NORESERVE : 0);
  void *at = mmap(nullptr, round_up(bytes ? bytes : 1, PAGE), PROT_READ | PROT_WRITE, flags, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}
}  // namespace

API bool emulated_take(int device, size_t bytes) {
  Lock lock(mutex);
  touch_context(device);
  if (used[device] + gpu.context + bytes > gpu.total) return false;
  used[device] += bytes;
  return true;
}
API void emulated_give(int device, size_t bytes) {
  Lock lock(mutex);
  used[device] -= bytes;
}
API size_t emulated_used(int device) {
  Lock lock(mutex);
  return used[device] + (emulated_has_context(device) ? gpu.context : 0);
}
API void emulated_note(void *at, size_t bytes, int device, int kind) {
  Lock lock(mutex);
  ranges[(char *)at] = {bytes, device, kind};
}
API void emulated_forget(void *at) {
  Lock lock(mutex);
  ranges.erase((char *)at);
}
API bool emulated_range(const void *at, void **base, size_t *bytes) {
  Lock lock(mutex);
  auto found = range_of(at);
  if (found == ranges.end()) return false;
  *base = found->first;
  *bytes = found->second.bytes;
  return true;
}
API void emulated_release(void *at, size_t bytes) { madvise(at, bytes, MADV_REMOVE); }
API void emulated_fill(void *at, int value, size_t bytes) {
  if (value == 0 && bytes >= 64 * PAGE) {
    Lock lock(mutex);
    auto found = range_of(at);
    if (found != ranges.end() && found->second.kind == DEVICE) {  // zeros are pages given back
      char *end = (char *)at + bytes;
      char *first = (char *)round_up((size_t)at, PAGE), *behind = (char *)((size_t)end & ~(PAGE - 1));
      memset(at, 0, first - (char *)at);
      emulated_release(first, behind - first);
      memset(behind, 0, end - behind);
      return;
    }
  }
  memset(at, value, bytes);
}

static cudaError_t device_malloc(void **at, size_t bytes, const char *where) {
  *at = nullptr;
  if (!devices) return fail(cudaErrorNoDevice, where);
  touch_context(current);
  if (!bytes) return cudaSuccess;
  size_t taken = round_up(bytes, bytes < MIB ? 512 : SEGMENT);
  if (!emulated_take(current, taken)) return fail(cudaErrorMemoryAllocation, where);
  *at = pages(taken, MAP_SHARED);
  if (!*at) {
    emulated_give(current, taken);
    return fail(cudaErrorMemoryAllocation, "mmap");
  }
  emulated_note(*at, taken, current, DEVICE);
  return cudaSuccess;
}
static cudaError_t device_free(void *at) {
  if (!at) return cudaSuccess;
  catch_up_all();  // as cudaFree waits for the device
  Lock lock(mutex);
  auto found = ranges.find((char *)at);
  if (found == ranges.end() || found->second.kind != DEVICE) return fail(cudaErrorInvalidValue, "cudaFree");
  emulated_give(found->second.device, found->second.bytes);
  munmap(at, round_up(found->second.bytes, PAGE));
  ranges.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaMalloc(void **at, size_t bytes) { return device_malloc(at, bytes, "cudaMalloc"); }
API cudaError_t cudaMallocAsync(void **at, size_t bytes, cudaStream_t) { return device_malloc(at, bytes, "cudaMallocAsync"); }
API cudaError_t cudaMallocManaged(void **at, size_t bytes, unsigned) { return device_malloc(at, bytes, "cudaMallocManaged"); }
API cudaError_t cudaFree(void *at) { return device_free(at); }
API cudaError_t cudaFreeAsync(void *at, cudaStream_t) { return device_free(at); }
API cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  if (!devices) return fail(cudaErrorNoDevice, "cudaMemGetInfo");
  touch_context(current);
  *total = gpu.total;
  *free = gpu.total - emulated_used(current);
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void **at, size_t bytes, unsigned) {
  *at = pages(bytes, MAP_PRIVATE);
  if (!*at) return fail(cudaErrorMemoryAllocation, "cudaHostAlloc");
  emulated_note(*at, round_up(bytes ? bytes : 1, PAGE), current, HOST);
  return cudaSuccess;
}
API cudaError_t cudaMallocHost(void **at, size_t bytes) { return cudaHostAlloc(at, bytes, 0); }
API cudaError_t cudaFreeHost(void *at) {
  if (!at) return cudaSuccess;
  catch_up_all();
  Lock lock(mutex);
  auto found = ranges.find((char *)at);
  if (found == ranges.end()) return fail(cudaErrorInvalidValue, "cudaFreeHost");
  munmap(at, found->second.bytes);
  ranges.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void *at, size_t bytes, unsigned) {
  Lock lock(mutex);
  if (range_of(at) != ranges.end()) return fail(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister");
  ranges[(char *)at] = {bytes, current, HOST};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *at) {
  catch_up_all();
  Lock lock(mutex);
  if (!ranges.erase((char *)at)) return fail(cudaErrorHostMemoryNotRegistered, "cudaHostUnregister");
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
  *device = host;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *at) {
  memset(attributes, 0, sizeof *attributes);
  Lock lock(mutex);
  auto found = range_of(at);
  if (found == ranges.end()) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = (void *)at;
    return cudaSuccess;
  }
  attributes->device = found->second.device;
  attributes->devicePointer = (void *)at;
  attributes->type = found->second.kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  if (found->second.kind == HOST) attributes->hostPointer = (void *)at;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) {
  *pool = (cudaMemPool_t)(size_t)1;
  return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value) {
  *(size_t *)value = emulated_used(current);
  return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc *, size_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
API cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void *value) {
  *(size_t *)value = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void *) { return cudaSuccess; }

#define REFUSED(name)                                                                                          \
  extern "C" __attribute__((visibility("default"))) cudaError_t refused_##name() __asm__(#name);                \
  cudaError_t refused_##name() { return fail(cudaErrorNotSupported, #name); }
REFUSED(cudaIpcGetMemHandle)
REFUSED(cudaIpcOpenMemHandle)
REFUSED(cudaIpcCloseMemHandle)
REFUSED(cudaIpcGetEventHandle)
REFUSED(cudaIpcOpenEventHandle)
REFUSED(cudaStreamBeginCapture)
REFUSED(cudaStreamBeginCaptureToGraph)
REFUSED(cudaStreamEndCapture)
REFUSED(cudaStreamUpdateCaptureDependencies)
REFUSED(cudaGraphAddNode)
REFUSED(cudaGraphConditionalHandleCreate)
REFUSED(cudaGraphInstantiateWithFlags)
REFUSED(cudaGraphLaunch)
REFUSED(cudaGraphGetNodes)
REFUSED(cudaGraphNodeGetDependencies)
REFUSED(cudaGraphRetainUserObject)
REFUSED(cudaUserObjectCreate)
REFUSED(cudaUserObjectRelease)
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
