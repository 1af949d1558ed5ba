// The driver as far as torch asks for it: expandable segments (virtual memory), contexts, and modules of nvrtc.
#include <cuda.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <map>
#include <mutex>

#include "core.h"
#undef cuMemGetAddressRange
#undef cuLinkCreate
#undef cuLinkAddData

using namespace emulated;
namespace {
struct Piece {  // of a device's memory, which may be mapped at several places
  size_t bytes;
  int references;
  CUmemAllocationProp properties;
  bool on_device() const { return properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE; }
};
struct Mapping {
  Piece *piece;
  size_t bytes;
};
std::recursive_mutex &mutex = *new std::recursive_mutex;
std::map<char *, Mapping> &mappings = *new std::map<char *, Mapping>;
using Lock = std::lock_guard<std::recursive_mutex>;

void let_go(Piece *piece) {
  if (--piece->references) return;
  if (piece->on_device()) emulated_give(piece->properties.location.id, piece->bytes);
  delete piece;
}
}  // namespace

API CUresult cuInit(unsigned) { return emulated_devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
API CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int *count) { *count = emulated_devices(); return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
API CUresult cuDeviceGetName(char *text, int size, CUdevice) { strncpy(text, emulated_name(), size); return CUDA_SUCCESS; }
API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  memcpy(uuid->bytes, "emulated-device", 15);
  uuid->bytes[15] = (char)device;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
      attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) {
    *value = 1;
    return CUDA_SUCCESS;
  }
  static auto runtime = (int (*)(int *, int, int))dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute");  // numbered alike
  *value = 0;
  if (runtime) runtime(value, attribute, device);
  return CUDA_SUCCESS;
}
static CUcontext context_of(int device) { return (CUcontext)(size_t)(0x1000 + device); }
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  *active = emulated_has_context(device);
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = context_of(device); return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext *context) { *context = context_of(emulated_current()); return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxPopCurrent_v2(CUcontext *context) { return cuCtxGetCurrent(context); }
API CUresult cuCtxGetDevice(CUdevice *device) { *device = emulated_current(); return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the emulated driver";
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}

// ---- virtual memory: addresses are reserved once, pieces of a device are counted when they are made
API CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
  *bytes = SEGMENT;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void *found = mmap(nullptr, bytes + SEGMENT, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *at = round_up((size_t)found, SEGMENT);
  munmap(found, *at - (size_t)found);
  munmap((void *)(*at + bytes), (size_t)found + SEGMENT - *at);
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) { munmap((void *)at, bytes); return CUDA_SUCCESS; }
API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long) {
  auto piece = new Piece{bytes, 1, *properties};
  if (piece->on_device() && !emulated_take(properties->location.id, bytes)) {
    delete piece;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = (CUmemGenericAllocationHandle)piece;
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Lock lock(mutex);
  let_go((Piece *)handle);
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  Lock lock(mutex);
  auto piece = (Piece *)handle;
  piece->references++;
  mappings[(char *)at] = {piece, bytes};
  emulated_note((void *)at, bytes, piece->properties.location.id, DEVICE);
  return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *, size_t) {
  return mprotect((void *)at, bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  Lock lock(mutex);
  char *behind = (char *)at + bytes;
  for (auto each = mappings.lower_bound((char *)at); each != mappings.end() && each->first < behind;) {
    emulated_release(each->first, each->second.bytes);
    mprotect(each->first, each->second.bytes, PROT_NONE);
    emulated_forget(each->first);
    let_go(each->second.piece);
    each = mappings.erase(each);
  }
  return CUDA_SUCCESS;
}
API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *at) {
  Lock lock(mutex);
  auto found = mappings.upper_bound((char *)at);
  if (found == mappings.begin()) return CUDA_ERROR_INVALID_VALUE;
  --found;
  found->second.piece->references++;
  *handle = (CUmemGenericAllocationHandle)found->second.piece;
  return CUDA_SUCCESS;
}
API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
  *properties = ((Piece *)handle)->properties;
  return CUDA_SUCCESS;
}
API CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
  *total = emulated_total();
  *free = *total - emulated_used(emulated_current());
  return CUDA_SUCCESS;
}
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr at) {
  void *found;
  size_t size;
  if (!emulated_range((void *)at, &found, &size)) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = (CUdeviceptr)found;
  if (bytes) *bytes = size;
  return CUDA_SUCCESS;
}
API CUresult cuMemExportToShareableHandle(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
API CUresult cuPointerGetAttribute(void *, CUpointer_attribute, CUdeviceptr) { return CUDA_ERROR_INVALID_VALUE; }
API CUresult cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t count, CUstream stream) {
  emulated_catch_up(stream);
  for (size_t i = 0; i < count; i++) ((unsigned *)at)[i] = value;
  return CUDA_SUCCESS;
}
API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned) {
  emulated_catch_up(stream);
  *(unsigned *)at = value;
  return CUDA_SUCCESS;
}

// ---- modules: kernels that are compiled while a program runs are found, and launched without effect
template <class Handle>
static CUresult made(Handle *handle) {
  *handle = (Handle)calloc(1, 64);
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule *module, const void *) { return made(module); }
API CUresult cuModuleLoadDataEx(CUmodule *module, const void *, unsigned, CUjit_option *, void **) { return made(module); }
API CUresult cuModuleLoad(CUmodule *module, const char *) { return made(module); }
API CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *) { return made(function); }
API CUresult cuModuleGetGlobal_v2(CUdeviceptr *at, size_t *bytes, CUmodule, const char *) {
  static char block[1 << 16];
  if (at) *at = (CUdeviceptr)block;
  if (bytes) *bytes = sizeof block;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction, int, size_t) { *count = 2; return CUDA_SUCCESS; }
