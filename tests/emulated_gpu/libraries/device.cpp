// Devices: how many, what they say of themselves, errors. What is asked of a device is read from the environment once.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <utility>

#include "state.h"

namespace emulated {
Properties &gpu = *new Properties{};
int devices = 0;
bool verbose = false, late = false;
thread_local int current = 0;
std::recursive_mutex &mutex = *new std::recursive_mutex;
namespace {
thread_local cudaError_t last = cudaSuccess;
bool context[MAX_DEVICES];

const char *setting(const char *name, const char *otherwise = "") {
  const char *value = getenv(name);
  return value && *value ? value : otherwise;
}

// name=Tesla T4;major=7;...
std::map<std::string, std::string> fields(const std::string &text) {
  std::map<std::string, std::string> found;
  for (size_t from = 0; from < text.size();) {
    size_t end = std::min(text.find(';', from), text.size()), equals = text.find('=', from);
    if (equals < end) found[text.substr(from, equals - from)] = text.substr(equals + 1, end - equals - 1);
    from = end + 1;
  }
  return found;
}

// CUDA_VISIBLE_DEVICES hides devices; the rest are numbered anew, and all are alike
int visible(int all) {
  const char *listed = getenv("CUDA_VISIBLE_DEVICES");
  if (!listed) return all;
  int count = 0;
  for (const char *at = listed; *at;) {
    char *end;
    long index = strtol(at, &end, 10);
    if (end == at || index < 0 || index >= all) break;  // as CUDA does: what follows an unknown one is hidden
    count++;
    if (*end != ',') break;
    at = end + 1;
  }
  return count;
}

// an initializer, as it needs those above; functions marked as constructors run before them
const bool is_set_up = [] {
  auto values = fields(setting("EMULATED_GPU"));
  auto number = [&](const char *name) { return values.count(name) ? strtoull(values[name].c_str(), nullptr, 10) : 0ull; };
  gpu = {values["name"], (int)number("major"), (int)number("minor"), (int)number("multiprocessors"), (int)number("threads"),
         (int)number("blocks"), (int)number("bus_bits"), number("total"), number("context"), number("shared"),
         number("shared_optin"), number("l2")};
  devices = visible(std::min(atoi(setting("EMULATED_GPU_DEVICES", "0")), MAX_DEVICES));
  verbose = *setting("EMULATED_GPU_VERBOSE");
  late = *setting("EMULATED_GPU_LATE");
  return true;
}();

// the library that gives operators values needs torch's, which are loaded by the time that devices are counted; an operator that
// is under way when it is loaded has no values
void load_operators() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char *path = setting("EMULATED_GPU_OPERATORS");
    if (!*path || !dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD)) return;  // another program than torch's
    if (!dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
      fprintf(stderr, "emulated GPU: %s\n", dlerror());
      abort();
    }
  });
}
}  // namespace

cudaError_t fail(cudaError_t error, const char *where) {
  last = error;
  if (verbose) fprintf(stderr, "emulated GPU: %s -> %d\n", where, (int)error);
  return error;
}

void touch_context(int device) {
  if (device < 0 || device >= devices || context[device]) return;
  context[device] = true;
  load_operators();
}
}  // namespace emulated
using namespace emulated;

API int emulated_devices() { return devices; }
API int emulated_current() { return current; }
API size_t emulated_total() { return gpu.total; }
API const char *emulated_name() { return gpu.name.c_str(); }
API bool emulated_has_context(int device) { return device >= 0 && device < devices && context[device]; }
API bool emulated_has_values() {
  static const bool has = *setting("EMULATED_GPU_VALUES");
  return has;
}

API cudaError_t cudaGetDeviceCount(int *count) {
  *count = devices;
  if (devices && emulated_has_values()) load_operators();
  return devices ? cudaSuccess : fail(cudaErrorNoDevice, "cudaGetDeviceCount");
}
API cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return devices ? cudaSuccess : fail(cudaErrorNoDevice, "cudaGetDevice");
}
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices) return fail(devices ? cudaErrorInvalidDevice : cudaErrorNoDevice, "cudaSetDevice");
  current = device;
  touch_context(device);
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *version) {
  *version = devices ? CUDART_VERSION : 0;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
  if (device < 0 || device >= devices) return fail(cudaErrorInvalidDevice, "cudaGetDeviceProperties");
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", gpu.name.c_str());
  memcpy(p->uuid.bytes, "emulated-device", 15);
  p->uuid.bytes[15] = (char)device;
  p->totalGlobalMem = gpu.total;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = gpu.major;
  p->minor = gpu.minor;
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = gpu.multiprocessors;
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
  p->pciBusID = 0x10 + device;
  p->asyncEngineCount = 2;
  p->memoryBusWidth = gpu.bus_bits;
  p->l2CacheSize = (int)gpu.l2;
  p->maxThreadsPerMultiProcessor = gpu.threads;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = p->managedMemory = 1;
  p->sharedMemPerMultiprocessor = gpu.shared;
  p->cooperativeLaunch = p->hostRegisterSupported = p->memoryPoolsSupported = 1;
  p->computePreemptionSupported = p->concurrentManagedAccess = 1;
  p->sharedMemPerBlockOptin = gpu.shared_optin;
  p->maxBlocksPerMultiProcessor = gpu.blocks;
  p->reservedSharedMemPerBlock = 1024;
  p->clusterLaunch = gpu.major >= 9;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= devices) return fail(cudaErrorInvalidDevice, "cudaDeviceGetAttribute");
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrTotalConstantMemory: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrClockRate: *value = 1500000; break;
    case cudaDevAttrMemoryClockRate: *value = 5000000; break;
    case cudaDevAttrMultiProcessorCount: *value = gpu.multiprocessors; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = gpu.bus_bits; break;
    case cudaDevAttrL2CacheSize: *value = (int)gpu.l2; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = gpu.threads; break;
    case cudaDevAttrComputeCapabilityMajor: *value = gpu.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = gpu.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)gpu.shared; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)gpu.shared_optin; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = gpu.blocks; break;
    case cudaDevAttrTextureAlignment: *value = 512; break;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrManagedMemory: case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrHostRegisterSupported: case cudaDevAttrCanMapHostMemory: case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrComputePreemptionSupported: *value = 1; break;
    case cudaDevAttrAsyncEngineCount: *value = 2; break;
    case cudaDevAttrPciBusId: *value = 0x10 + device; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02X:00.0", 0x10 + device);
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) {
  *can = one != other;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

API cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last; }
API const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}
API const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "the emulated GPU has neither CUDA graphs nor memory shared among processes";
    default: return "an error that the emulated GPU has no words for";
  }
}

// the driver's functions by name, from the emulated driver
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult *status) {
  static void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *found = driver ? dlsym(driver, name) : nullptr;
  if (!*found && driver) *found = dlsym(driver, (std::string(name) + "_v2").c_str());
  if (verbose && !*found) fprintf(stderr, "emulated GPU: the driver has no %s\n", name);
  if (status) *status = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPoint(const char *name, void **found, unsigned long long flags,
                                        cudaDriverEntryPointQueryResult *status) {
  return cudaGetDriverEntryPointByVersion(name, found, 0, flags, status);
}
