// NCCL among processes of one machine: collectives through shared memory, done when the call returns.
//
// A communicator is a file in /dev/shm named after its unique id: a barrier, and one slot of bytes for each rank. What is
// larger than a slot goes piece by piece. Point-to-point messages and several ranks within one process are refused.
#include <fcntl.h>
#include <nccl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "core.h"

namespace {
constexpr size_t SLOT = 1 << 20;
struct Shared {
  std::atomic<int> arrived, generation;
  int64_t notes[62];  // by rank: the color of a split
  char slots[];
};
struct Communicator {
  int rank, ranks, splits;
  std::string name;
  Shared *shared;
};
std::map<int, double> &scales = *new std::map<int, double>;  // of PreMulSum operations, by their number
std::mutex &mutex = *new std::mutex;

Communicator *C(ncclComm_t handle) { return (Communicator *)handle; }
size_t shared_bytes(int ranks) { return sizeof(Shared) + ranks * SLOT; }
char *slot(Communicator *c, int rank) { return c->shared->slots + rank * SLOT; }

void barrier(Communicator *c) {
  if (c->ranks == 1) return;
  int generation = c->shared->generation.load();
  if (c->shared->arrived.fetch_add(1) + 1 == c->ranks) {
    c->shared->arrived.store(0);
    c->shared->generation.store(generation + 1);
    return;
  }
  for (int spins = 0; c->shared->generation.load() == generation; spins++) {
    if (spins < 100) sched_yield();
    else usleep(50);
  }
}

ncclResult_t join(ncclComm_t *handle, int rank, int ranks, const std::string &name) {
  if (ranks > (int)(sizeof(Shared::notes) / sizeof(int64_t))) return ncclInvalidUsage;
  auto c = new Communicator{rank, ranks, 0, name, nullptr};
  if (ranks == 1) {
    c->shared = (Shared *)calloc(1, shared_bytes(1));
  } else {
    int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, shared_bytes(ranks))) return ncclSystemError;
    void *at = mmap(nullptr, shared_bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return ncclSystemError;
    c->shared = (Shared *)at;
    barrier(c);
    if (rank == 0) shm_unlink(name.c_str());  // all have it; it goes with the last of them
  }
  *handle = (ncclComm_t)c;
  return ncclSuccess;
}
ncclResult_t leave(ncclComm_t handle) {
  Communicator *c = C(handle);
  if (!c) return ncclSuccess;
  if (c->ranks == 1) free(c->shared);
  else munmap(c->shared, shared_bytes(c->ranks));
  delete c;
  return ncclSuccess;
}
std::string name_of(const ncclUniqueId &id) { return std::string("/emulated-nccl-") + std::string(id.internal, 32); }

struct Bfloat16 {
  uint16_t bits;
  Bfloat16() = default;
  Bfloat16(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    bits = value != value ? 0x7fc0 : (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
  }
  operator float() const {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
  }
};

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 1;
  }
}

template <class Value, class Sum>
void reduce_slots(Communicator *c, char *to, size_t count, int operation) {
  double scale = 1;
  bool is_scaled = false;
  if (operation >= (int)ncclNumOps) {
    std::lock_guard<std::mutex> lock(mutex);
    scale = scales[operation];
    is_scaled = true;
  }
  for (size_t i = 0; i < count; i++) {
    Sum sum{};
    for (int rank = 0; rank < c->ranks; rank++) {
      Sum value = (Sum)((Value *)slot(c, rank))[i];
      if (is_scaled) value = (Sum)(value * scale);
      if (rank == 0) sum = value;
      else if (operation == ncclProd) sum = sum * value;
      else if (operation == ncclMax) sum = std::max(sum, value);
      else if (operation == ncclMin) sum = std::min(sum, value);
      else sum = sum + value;
    }
    if (operation == ncclAvg) sum = (Sum)(sum / c->ranks);
    ((Value *)to)[i] = (Value)sum;
  }
}
void reduce_slots(Communicator *c, void *to, size_t count, ncclDataType_t type, int operation) {
  char *at = (char *)to;
  switch (type) {
    case ncclInt8: return reduce_slots<int8_t, int>(c, at, count, operation);
    case ncclUint8: return reduce_slots<uint8_t, unsigned>(c, at, count, operation);
    case ncclInt32: return reduce_slots<int32_t, int64_t>(c, at, count, operation);
    case ncclUint32: return reduce_slots<uint32_t, uint64_t>(c, at, count, operation);
    case ncclInt64: return reduce_slots<int64_t, int64_t>(c, at, count, operation);
    case ncclUint64: return reduce_slots<uint64_t, uint64_t>(c, at, count, operation);
    case ncclFloat16: return reduce_slots<_Float16, float>(c, at, count, operation);
    case ncclBfloat16: return reduce_slots<Bfloat16, float>(c, at, count, operation);
    case ncclFloat64: return reduce_slots<double, double>(c, at, count, operation);
    default: return reduce_slots<float, float>(c, at, count, operation);
  }
}

// piece by piece: every rank puts its piece into its slot, then `use` reads the slots
template <class Use>
void exchange(Communicator *c, const void *from, size_t bytes, Use use) {
  for (size_t done = 0; done < bytes; done += SLOT) {
    size_t piece = std::min(SLOT, bytes - done);
    if (from) memcpy(slot(c, c->rank), (const char *)from + done, piece);
    barrier(c);
    use(done, piece);
    barrier(c);
  }
}
void reduce(Communicator *c, const void *from, void *to, size_t count, ncclDataType_t type, int operation) {
  exchange(c, from, count * size_of(type), [&](size_t done, size_t piece) {
    if (to) reduce_slots(c, (char *)to + done, piece / size_of(type), type, operation);
  });
}
}  // namespace

API ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
API const char *ncclGetErrorString(ncclResult_t error) {
  return error == ncclSuccess ? "no error" : "the emulated NCCL has collectives among processes and nothing else";
}
API const char *ncclGetLastError(ncclComm_t) { return ""; }
API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  memset(id, 0, sizeof *id);
  char text[33];
  snprintf(text, sizeof text, "%08x%016llx%08lx", getpid(), (unsigned long long)now.tv_sec, now.tv_nsec);
  memcpy(id->internal, text, 32);
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t *c, int ranks, ncclUniqueId id, int rank) { return join(c, rank, ranks, name_of(id)); }
API ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int ranks, ncclUniqueId id, int rank, ncclConfig_t *) {
  return join(c, rank, ranks, name_of(id));
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int ranks, int rank, int, ncclUniqueId *id, ncclConfig_t *) {
  return join(c, rank, ranks, name_of(*id));
}
API ncclResult_t ncclCommInitAll(ncclComm_t *c, int ranks, const int *) {
  return ranks == 1 ? join(c, 0, 1, "") : ncclInvalidUsage;  // the ranks of one process would wait for each other
}
API ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *made, ncclConfig_t *) {
  Communicator *c = C(parent);
  c->shared->notes[c->rank] = ((int64_t)color << 32) | (uint32_t)key;
  barrier(c);
  int rank = 0, ranks = 0;
  for (int each = 0; each < c->ranks; each++) {
    int64_t note = c->shared->notes[each];
    if ((int)(note >> 32) != color) continue;
    ranks++;
    int other = (int)(uint32_t)note;
    rank += other < key || (other == key && each < c->rank);
  }
  barrier(c);
  std::string name = c->name + "-" + std::to_string(c->splits++) + "-" + std::to_string(color);
  if (color < 0) {  // NCCL_SPLIT_NOCOLOR
    *made = nullptr;
    return ncclSuccess;
  }
  return join(made, rank, ranks, name);
}
API ncclResult_t ncclCommDestroy(ncclComm_t c) { return leave(c); }
API ncclResult_t ncclCommAbort(ncclComm_t c) { return leave(c); }
API ncclResult_t ncclCommCount(const ncclComm_t c, int *count) { *count = C(c)->ranks; return ncclSuccess; }
API ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank) { *rank = C(c)->rank; return ncclSuccess; }
API ncclResult_t ncclCommCuDevice(const ncclComm_t, int *device) { *device = emulated_current(); return ncclSuccess; }
API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) { *error = ncclSuccess; return ncclSuccess; }
API ncclResult_t ncclMemAlloc(void **at, size_t bytes) {
  *at = aligned_alloc(emulated::PAGE, emulated::round_up(bytes, emulated::PAGE));
  return ncclSuccess;
}
API ncclResult_t ncclMemFree(void *at) { free(at); return ncclSuccess; }
API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *operation, void *scalar, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t) {
  static int next = (int)ncclNumOps;
  std::lock_guard<std::mutex> lock(mutex);
  double value = type == ncclFloat64    ? *(double *)scalar
                 : type == ncclFloat16  ? (double)*(_Float16 *)scalar
                 : type == ncclBfloat16 ? (double)(float)*(Bfloat16 *)scalar
                                        : *(float *)scalar;
  scales[next] = value;
  *operation = (ncclRedOp_t)next++;
  return ncclSuccess;
}
API ncclResult_t ncclRedOpDestroy(ncclRedOp_t operation, ncclComm_t) {
  std::lock_guard<std::mutex> lock(mutex);
  scales.erase((int)operation);
  return ncclSuccess;
}

API ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t c, cudaStream_t stream) {
  emulated_catch_up(stream);
  reduce(C(c), from, to, count, type, operation);
  return ncclSuccess;
}
API ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root, ncclComm_t c, cudaStream_t stream) {
  emulated_catch_up(stream);
  reduce(C(c), from, C(c)->rank == root ? to : nullptr, count, type, operation);
  return ncclSuccess;
}
API ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t c, cudaStream_t stream) {
  emulated_catch_up(stream);
  for (int rank = 0; rank < C(c)->ranks; rank++)
    reduce(C(c), (const char *)from + rank * count * size_of(type), rank == C(c)->rank ? to : nullptr, count, type, operation);
  return ncclSuccess;
}
API ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t handle, cudaStream_t stream) {
  emulated_catch_up(stream);
  Communicator *c = C(handle);
  exchange(c, c->rank == root ? from : nullptr, count * size_of(type),
           [&](size_t done, size_t piece) { memcpy((char *)to + done, slot(c, root), piece); });
  return ncclSuccess;
}
API ncclResult_t ncclBcast(void *at, size_t count, ncclDataType_t type, int root, ncclComm_t handle, cudaStream_t stream) {
  return ncclBroadcast(at, at, count, type, root, handle, stream);
}
API ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t handle, cudaStream_t stream) {
  emulated_catch_up(stream);
  Communicator *c = C(handle);
  size_t bytes = count * size_of(type);
  exchange(c, from, bytes, [&](size_t done, size_t piece) {
    for (int rank = 0; rank < c->ranks; rank++) memcpy((char *)to + rank * bytes + done, slot(c, rank), piece);
  });
  return ncclSuccess;
}
API ncclResult_t ncclAlltoAll(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) { return ncclInvalidUsage; }
API ncclResult_t ncclGather(const void *, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclInvalidUsage; }
API ncclResult_t ncclSend(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclInvalidUsage; }
API ncclResult_t ncclRecv(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclInvalidUsage; }
