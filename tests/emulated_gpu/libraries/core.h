// What the stand-ins for CUDA's libraries share. The runtime (libcudart) defines it; the others link to the runtime.
#pragma once
#include <stddef.h>

#define API extern "C" __attribute__((visibility("default")))

namespace emulated {
constexpr size_t MIB = 1 << 20;
constexpr size_t PAGE = 4096;
constexpr size_t SEGMENT = 2 * MIB;  // what cudaMalloc rounds large requests to
inline size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
enum Kind { HOST = 1, DEVICE = 2 };
}  // namespace emulated

extern "C" {
bool emulated_take(int device, size_t bytes);  // counts memory of a device; false when it has not so much left
void emulated_give(int device, size_t bytes);
size_t emulated_used(int device);  // with the context's bytes
size_t emulated_total();
int emulated_devices();
int emulated_current();
const char *emulated_name();
bool emulated_has_context(int device);
void emulated_note(void *at, size_t bytes, int device, int kind);  // an address range that CUDA knows
void emulated_forget(void *at);
bool emulated_range(const void *at, void **base, size_t *bytes);
bool emulated_has_values();
void emulated_fill(void *at, int value, size_t bytes);
void emulated_release(void *at, size_t bytes);  // gives back pages of a device; they read as zeros
void emulated_catch_up(void *stream);           // does what a stream was asked to do, and what it waits for
}
