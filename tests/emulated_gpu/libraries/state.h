// The runtime's own state; see device.cpp and memory.cpp.
#pragma once
#include <cuda_runtime_api.h>

#include <mutex>
#include <string>

#include "core.h"

namespace emulated {
constexpr int MAX_DEVICES = 16;

struct Properties {  // of every device, from EMULATED_GPU (see launch.py)
  std::string name;
  int major, minor, multiprocessors, threads, blocks, bus_bits;
  size_t total, context, shared, shared_optin, l2;
};

extern Properties &gpu;
extern int devices;
extern bool verbose, late;
extern thread_local int current;
extern std::recursive_mutex &mutex;  // never destroyed: other libraries end after this one
using Lock = std::lock_guard<std::recursive_mutex>;

cudaError_t fail(cudaError_t error, const char *where);
void touch_context(int device);
void catch_up_all();
}  // namespace emulated
