// An accelerator for tests: memory of the host behind an allocator with counters and a size, streams, events, pinned memory and random
// numbers of its own. Every operator is computed on the CPU.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

size_t rounded(size_t size) {
  return std::max<size_t>(512, (size + 511) / 512 * 512);
}

// --- memory ------------------------------------------------------------------------------------------

// Blocks that are freed are kept for requests of their size; all of them go back before memory runs out.
struct Memory final : c10::DeviceAllocator {
  std::mutex mutex;
  c10::CachingDeviceAllocator::DeviceStats stats;
  std::multimap<size_t, void*> cached;
  std::unordered_map<void*, std::pair<size_t, size_t>> taken; // rounded and requested bytes
  size_t total = size_t(4) << 30;
  double share = 1.0;

  static constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

  void give_back() {
    for (auto& [size, block] : cached) {
      std::free(block);
      stats.reserved_bytes[kAll].decrease(size);
    }
    cached.clear();
  }

  void* take(size_t requested) {
    std::lock_guard<std::mutex> lock(mutex);
    const size_t size = rounded(requested);
    void* block = nullptr;
    auto found = cached.find(size);
    if (found != cached.end()) {
      block = found->second;
      cached.erase(found);
    } else {
      const auto limit = static_cast<size_t>(share * static_cast<double>(total));
      auto reserved = [&] { return static_cast<size_t>(stats.reserved_bytes[kAll].current); };
      if (reserved() + size > limit) {
        stats.num_alloc_retries += 1;
        give_back();
      }
      if (reserved() + size > limit) {
        stats.num_ooms += 1;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "probe out of memory. Tried to allocate ", requested, " bytes. Limit ", limit, " bytes, of which ",
            reserved(), " bytes are reserved");
      }
      TORCH_CHECK(posix_memalign(&block, 512, size) == 0, "the host has no memory");
      stats.reserved_bytes[kAll].increase(size);
    }
    taken[block] = {size, requested};
    stats.allocated_bytes[kAll].increase(size);
    stats.active_bytes[kAll].increase(size);
    stats.requested_bytes[kAll].increase(requested);
    return block;
  }

  void drop(void* block) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto [size, requested] = taken.at(block);
    taken.erase(block);
    cached.emplace(size, block);
    stats.allocated_bytes[kAll].decrease(size);
    stats.active_bytes[kAll].decrease(size);
    stats.requested_bytes[kAll].decrease(requested);
  }

  static void deleter(void* block);

  c10::DataPtr allocate(size_t size) override {
    void* block = size ? take(size) : nullptr;
    return {block, block, &deleter, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &deleter;
  }
  void copy_data(void* dest, const void* source, std::size_t count) const override {
    std::memcpy(dest, source, count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex);
    give_back();
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*each)[kAll].reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex);
    return {total - static_cast<size_t>(stats.reserved_bytes[kAll].current), total};
  }
};

Memory memory;
REGISTER_ALLOCATOR(kType, &memory)

void Memory::deleter(void* block) {
  if (block) {
    memory.drop(block);
  }
}

// Pinned memory is the host's own, and is known by its address.
struct Pinned final : c10::Allocator {
  static std::mutex mutex;
  static std::set<const void*> blocks;

  static void deleter(void* block) {
    std::lock_guard<std::mutex> lock(mutex);
    blocks.erase(block);
    std::free(block);
  }
  c10::DataPtr allocate(size_t size) override {
    void* block = nullptr;
    TORCH_CHECK(posix_memalign(&block, 512, rounded(size)) == 0, "the host has no memory");
    std::lock_guard<std::mutex> lock(mutex);
    blocks.insert(block);
    return {block, block, &deleter, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &deleter;
  }
  void copy_data(void* dest, const void* source, std::size_t count) const override {
    std::memcpy(dest, source, count);
  }
};
std::mutex Pinned::mutex;
std::set<const void*> Pinned::blocks;
Pinned pinned;

// --- streams and events: work is done at once, so all are in order -----------------------------------

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> streams{0};

using Clock = std::chrono::steady_clock;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream of(c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
  }
  c10::Stream getStream(c10::Device) const override {
    return of(current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return of(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return of(++streams);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return of(++streams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = of(current_stream);
    current_stream = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) {
      *event = new Clock::time_point();
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto passed = *static_cast<Clock::time_point*>(second) - *static_cast<Clock::time_point*>(first);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- random numbers ----------------------------------------------------------------------------------

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed = c10::default_rng_seed_val) : at::CPUGeneratorImpl(seed) {
    device_ = kDevice;
  }
};

at::Generator& generator() {
  static at::Generator own = at::make_generator<Generator>(1234);
  return own;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned;
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(Pinned::mutex);
    return Pinned::blocks.count(data) > 0;
  }
  at::Device getDeviceFromPtr(void*) const override {
    return kDevice;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto grown = memory.allocate(size);
    if (size && impl->nbytes()) {
      std::memcpy(grown.get(), impl->data(), std::min(size, impl->nbytes()));
    }
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(size);
  }
};
Hooks hooks;
const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// --- tensors -----------------------------------------------------------------------------------------

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

// The same bytes as a tensor of the CPU.
at::Tensor seen_by_cpu(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) {
    return tensor;
  }
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  seen_by_cpu(dst).copy_(seen_by_cpu(self));
  return dst;
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  const size_t needed = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.dtype().itemsize(), static_cast<size_t>(self.storage_offset()));
  if (needed > self.storage().nbytes()) {
    hooks.resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() != dst.sizes()) {
    resize_(dst, self.sizes(), std::nullopt);
  }
  return copy_from(self, dst, false);
}

at::Tensor& set_(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_(self, std::move(storage), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Scalar local_scalar(const at::Tensor& self) {
  return at::_local_scalar_dense(seen_by_cpu(self));
}

// What draws random numbers draws them from the generator it is given, or the device's, which the CPU's stands in for meanwhile.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  auto drawn = generator();
  for (auto at = stack->size() - op.schema().arguments().size(); at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isGenerator()) {
      drawn = value.toGenerator();
      value = c10::IValue();
    }
  }
  auto cpu = at::detail::getDefaultCPUGenerator();
  const auto before = cpu.get_state().clone();
  cpu.set_state(drawn.get_state());
  at::native::cpu_fallback(op, stack);
  drawn.set_state(cpu.get_state());
  cpu.set_state(before);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

// --- what Python asks --------------------------------------------------------------------------------

TORCH_LIBRARY(probe, m) {
  m.def("set_total(int size) -> ()", [](int64_t size) { memory.total = static_cast<size_t>(size); });
  m.def("set_share(float share) -> ()", [](double share) { memory.share = share; });
  m.def("share() -> float", []() { return memory.share; });
  m.def("seed(int seed) -> ()", [](int64_t seed) { generator().set_current_seed(static_cast<uint64_t>(seed)); });
  m.def("random_state() -> Tensor", []() { return generator().get_state().clone(); });
  m.def("set_random_state(Tensor state) -> ()", [](const at::Tensor& state) { generator().set_state(state); });
}

} // namespace
