// Streams, events and copies.
//
// 1. As a rule all is done when a call returns.
// 2. With EMULATED_GPU_LATE, a stream other than the default one does nothing before somebody waits for it: the host
//    (synchronize), the default stream (an event of it), or a kernel queued on the stream itself. A computation that
//    forgot to wait then reads old bytes, and memory that was given back too early is copied from after it was reused.
//    A copy to or from the host is late on the default stream as well, until the next kernel there.
// 3. Asking a late stream or event whether it is done does nothing: torch's allocator asks at every turn. From the ten thousandth
//    time on it does one piece of its work, so that a loop that asks comes to an end.
// 4. A copy that involves memory which is not pinned is done at once, as CUDA stages it.
#include <string.h>
#include <time.h>

#include <deque>
#include <functional>
#include <memory>
#include <set>

#include "state.h"

using namespace emulated;
namespace {
struct Stream;
struct Moment {  // of an event, when it was last recorded
  Stream *stream;
  bool reached;
  timespec at;
  unsigned asked = 0;
};
using MomentPointer = std::shared_ptr<Moment>;
struct Event {
  MomentPointer latest;
};
struct Work {
  std::function<void()> run;  // or:
  MomentPointer awaited, recorded;
};
struct Stream {
  int priority;
  unsigned flags;
  std::deque<Work> pending;
  unsigned asked = 0;
};

constexpr unsigned queries_without_progress = 10000;
std::set<Stream *> &streams = *new std::set<Stream *>;
Stream &default_stream = *new Stream{};

Stream *stream_of(cudaStream_t handle) { return (size_t)handle > 4 ? (Stream *)handle : &default_stream; }
void reach(Moment &moment) {
  clock_gettime(CLOCK_MONOTONIC, &moment.at);
  moment.reached = true;
}
void do_one(Stream *stream);
void run_until(const MomentPointer &moment) {
  while (!moment->reached && !moment->stream->pending.empty()) do_one(moment->stream);
}
void do_one(Stream *stream) {
  Work work = std::move(stream->pending.front());
  stream->pending.pop_front();
  if (work.run) work.run();
  if (work.awaited) run_until(work.awaited);
  if (work.recorded) reach(*work.recorded);
}
void catch_up(Stream *stream) {
  while (!stream->pending.empty()) do_one(stream);
}
// runs work now, or when somebody waits for the stream
cudaError_t enqueue(cudaStream_t handle, bool may_be_late, std::function<void()> run, bool even_on_default = false) {
  Lock lock(mutex);
  Stream *stream = stream_of(handle);
  if (late && may_be_late && (stream != &default_stream || even_on_default)) {
    stream->pending.push_back({std::move(run), nullptr, nullptr});
    return cudaSuccess;
  }
  catch_up(stream);
  run();
  return cudaSuccess;
}
bool is_known(const void *at) {
  void *base;
  size_t bytes;
  return emulated_range(at, &base, &bytes);
}
}  // namespace

namespace emulated {
void catch_up_all() {
  if (!late) return;
  Lock lock(mutex);
  catch_up(&default_stream);
  for (Stream *each : streams) catch_up(each);
}
}  // namespace emulated
API void emulated_catch_up(void *stream) {
  if (!late) return;
  Lock lock(mutex);
  catch_up(stream_of((cudaStream_t)stream));
}

API cudaError_t cudaDeviceSynchronize() {
  touch_context(current);
  catch_up_all();
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  touch_context(current);
  Lock lock(mutex);
  *stream = (cudaStream_t)*streams.insert(new Stream{priority, flags, {}}).first;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Lock lock(mutex);
  Stream *stream = stream_of(handle);
  catch_up(stream);
  if (streams.erase(stream)) delete stream;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  emulated_catch_up(stream);
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Lock lock(mutex);
  Stream *stream = stream_of(handle);
  if (stream->pending.empty()) return cudaSuccess;
  if (++stream->asked > queries_without_progress) do_one(stream);
  return cudaErrorNotReady;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  Lock lock(mutex);
  const MomentPointer &moment = ((Event *)event)->latest;
  if (moment && !moment->reached) stream_of(handle)->pending.push_back({nullptr, moment, nullptr});
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
  *flags = stream_of(stream)->flags;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                         const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned) {
  return enqueue(stream, true, [=] { call(stream, cudaSuccess, data); });
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
  return enqueue(stream, true, [=] { call(data); });
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  touch_context(current);
  *event = (cudaEvent_t) new Event{};
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock(mutex);
  delete (Event *)event;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  Lock lock(mutex);
  Stream *stream = stream_of(handle);
  auto moment = std::make_shared<Moment>(Moment{stream, false, {}});
  ((Event *)event)->latest = moment;
  if (stream->pending.empty()) reach(*moment);
  else stream->pending.push_back({nullptr, nullptr, moment});
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(mutex);
  const MomentPointer &moment = ((Event *)event)->latest;
  if (!moment || moment->reached) return cudaSuccess;
  if (++moment->asked > queries_without_progress) do_one(moment->stream);
  return cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock(mutex);
  if (const MomentPointer &moment = ((Event *)event)->latest) run_until(moment);
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  Lock lock(mutex);
  const MomentPointer &from = ((Event *)begin)->latest, &to = ((Event *)end)->latest;
  if (!from || !to) return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
  if (!from->reached || !to->reached) return cudaErrorNotReady;
  *milliseconds = (float)((to->at.tv_sec - from->at.tv_sec) * 1e3 + (to->at.tv_nsec - from->at.tv_nsec) * 1e-6);
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  bool may_be_late = late && is_known(to) && is_known(from);
  return enqueue(stream, may_be_late, [=] { memmove(to, from, bytes); }, kind != cudaMemcpyDeviceToDevice);
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
  return enqueue(nullptr, false, [=] { memmove(to, from, bytes); });
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
API cudaError_t cudaMemcpyPeer(void *to, int, const void *from, int, size_t bytes) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
static void copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height) {
  for (size_t row = 0; row < height; row++) memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                                  cudaMemcpyKind, cudaStream_t stream) {
  bool may_be_late = late && is_known(to) && is_known(from);
  return enqueue(stream, may_be_late, [=] { copy_rows(to, to_pitch, from, from_pitch, width, height); });
}
API cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind) {
  return enqueue(nullptr, false, [=] { copy_rows(to, to_pitch, from, from_pitch, width, height); });
}
API cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
  return enqueue(stream, true, [=] { emulated_fill(at, value, bytes); });
}
API cudaError_t cudaMemset(void *at, int value, size_t bytes) {
  return enqueue(nullptr, false, [=] { emulated_fill(at, value, bytes); });
}
API cudaError_t cudaMemset2DAsync(void *at, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
  return enqueue(stream, true, [=] {
    for (size_t row = 0; row < height; row++) memset((char *)at + row * pitch, value, width);
  });
}
