// Values: every operator that has a kernel for CUDA runs as ever, for its memory, and once more on the CPU over the same
// bytes, for its values. Loaded by the runtime when a device is first used.
//
// 1. The CUDA kernel comes first: what raises there (no memory left) has changed nothing. What it wrote in place (it may
//    set memory to zero, or copy) is put back before the CPU's turn.
// 2. 16-bit floats are computed in 32 bits and rounded once, as CUDA's kernels do.
// 3. Random operators draw on the CPU, seeded by the seed and the offset of CUDA's generator: who restores that generator's
//    state gets the same numbers. They are not the numbers of a GPU.
// 4. An operator without a kernel for the CPU is computed by a rule below; without one its floats become NaN, said once.
// 5. Without EMULATED_GPU_VALUES only those operators are stood in for whose shapes depend on values, and those of cuDNN's
//    attention: sizes are bounded, and nothing else is computed.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "core.h"

namespace {
using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// shapes that depend on values
const std::unordered_set<std::string> BY_VALUE = {
    "nonzero", "nonzero_static", "masked_select", "_unique2", "_unique", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "bincount", "repeat_interleave", "histc"};
// nothing to compute, or done by real copies; choices and handles that are the device's own
const std::unordered_set<std::string> LEFT = {
    "empty", "empty_strided", "_local_scalar_dense", "pin_memory", "_pin_memory", "is_pinned", "record_stream", "set_", "resize_",
    "_reshape_alias", "_efficientzerotensor", "_fused_sdp_choice", "_cudnn_init_dropout_state", "_cudnn_rnn_flatten_weight",
    "_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
    "_efficient_attention_backward", "_has_same_storage_numel", "_copy_from", "_copy_from_and_resize", "_resize_output_",
    "_fill_mem_eff_dropout_mask_", "_assert_async", "_cslt_compress"};

// from libraries that the emulation has no sizes for: computed on the CPU alone
const std::vector<std::string> ON_THE_CPU = {"linalg_", "_linalg_", "_fft_", "cholesky", "geqrf", "ormqr", "lu_", "triangular_solve"};

// choices of libraries that are not emulated: torch's own kernels of the same layers serve
const std::unordered_set<std::string> NOT_CHOSEN = {"cudnn_is_acceptable", "_use_cudnn_rnn_flatten_weight", "_use_cudnn_ctc_loss"};

bool is_by_value(const c10::FunctionSchema &schema, const std::string &name) {
  if (schema.is_mutable()) return false;
  for (const std::string &prefix : ON_THE_CPU)
    if (!name.rfind(prefix, 0)) return true;
  return BY_VALUE.count(name) > 0;
}

bool on_gpu(const Tensor &tensor) {
  return tensor.defined() && tensor.is_cuda() && tensor.layout() == at::kStrided && tensor.has_storage();
}
bool is_short(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// a tensor of the CPU over the bytes of one of the GPU
Tensor over(const Tensor &tensor) {
  void *at = tensor.numel() ? tensor.data_ptr() : nullptr;
  Tensor made = at::from_blob(at, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

using Change = std::function<IValue(const IValue &)>;
// applies a change to every tensor, device and generator within an argument
IValue changed(const IValue &value, const Change &change) {
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor &each : value.toTensorVector()) list.push_back(change(each).toTensor());
    return list;
  }
  if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
    auto from = value.toList();
    c10::impl::GenericList list(from.elementType());
    for (const IValue &each : from) list.push_back(changed(each, change));
    return list;
  }
  return change(value);
}
void collect(const IValue &value, std::vector<Tensor> &found) {
  if (value.isTensor()) found.push_back(value.toTensor());
  else if (value.isList())
    for (const IValue &each : value.toList()) collect(each, found);
}

uint64_t seed_of(const IValue *generator, const std::vector<Tensor> &tensors) {
  at::Generator chosen;
  if (generator && generator->isGenerator()) chosen = generator->toGenerator();
  if (!chosen.defined() || chosen.device().type() != at::kCUDA) {
    c10::DeviceIndex device = emulated_current();
    for (const Tensor &each : tensors)
      if (each.defined() && each.is_cuda()) device = each.device().index();
    chosen = at::globalContext().defaultGenerator(at::Device(at::kCUDA, device));
  }
  std::lock_guard<std::mutex> lock(chosen.mutex());
  auto state = at::check_generator<at::CUDAGeneratorImpl>(chosen);
  return state->current_seed() * 1000003 + state->philox_offset_per_thread();
}

// the CPU's default generator, seeded for as long as this lives; its state before comes back
class Seeded {
 public:
  explicit Seeded(uint64_t seed) : lock_(mutex()), generator_(at::detail::getDefaultCPUGenerator()) {
    std::lock_guard<std::mutex> lock(generator_.mutex());
    before_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~Seeded() {
    std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(before_);
  }

 private:
  static std::recursive_mutex &mutex() {
    static auto &made = *new std::recursive_mutex;
    return made;
  }
  std::lock_guard<std::recursive_mutex> lock_;
  at::Generator generator_;
  Tensor before_;
};

struct Call {  // one call of an operator
  const OperatorHandle &op;
  std::vector<IValue> arguments;  // on the CPU, shorts as floats
  uint64_t seed;

  const IValue &operator[](const char *name) const {
    auto index = op.schema().argumentIndexWithName(name);
    TORCH_CHECK(index, op.schema().name(), " has no argument ", name);
    return arguments[*index];
  }
  Tensor tensor(const char *name) const { return (*this)[name].isTensor() ? (*this)[name].toTensor() : Tensor(); }
  std::vector<int64_t> ints(const char *name) const { return (*this)[name].toIntVector(); }
};
using Values = std::vector<Tensor>;  // one for each tensor that the operator returns; undefined ones are left as they are
using Rule = std::function<Values(const Call &)>;

// ---- rules for operators that only CUDA has

struct Attention {  // scaled dot products, as all of CUDA's kernels compute them
  Tensor query, key, value, weights, keep, scores;
  double scale, dropout;
  int64_t shared;

  Attention(const Call &call, uint64_t seed) {
    query = call.tensor("query").to(at::kDouble);
    key = call.tensor("key").to(at::kDouble);
    value = call.tensor("value").to(at::kDouble);
    dropout = call["dropout_p"].toDouble();
    scale = call["scale"].isNone() ? 1 / std::sqrt((double)query.size(-1)) : call["scale"].toDouble();
    shared = query.size(1) / key.size(1);  // query heads to each key
    if (shared > 1) key = key.repeat_interleave(shared, 1), value = value.repeat_interleave(shared, 1);
    scores = query.matmul(key.transpose(-1, -2)) * scale;
    if (call.op.schema().argumentIndexWithName("attn_bias"))
      if (Tensor bias = call.tensor("attn_bias"); bias.defined() && bias.numel()) scores = scores + bias.to(at::kDouble);
    if (call["is_causal"].toBool()) {
      auto future = at::ones({scores.size(-2), scores.size(-1)}, at::kBool).tril().logical_not();
      scores = scores.masked_fill(future, -INFINITY);
    }
    weights = scores.softmax(-1).nan_to_num(0.0);  // of a row that may see nothing
    keep = at::ones({}, at::kDouble);
    if (dropout > 0) {
      auto generator = at::detail::createCPUGenerator(seed);
      keep = (at::rand(weights.sizes(), generator, at::kDouble) >= dropout).to(at::kDouble) / (1 - dropout);
    }
  }
  Tensor per_key_head(const Tensor &gradient, int64_t heads) const {
    return shared > 1 ? gradient.unflatten(1, {heads, shared}).sum(2) : gradient;
  }
};
Values attention_forward(const Call &call) {
  Attention attention(call, call.seed);
  Values values(call.op.schema().returns().size());
  values[0] = (attention.weights * attention.keep).matmul(attention.value);
  values[1] = attention.scores.logsumexp(-1);
  size_t place = 0;
  for (size_t i = 0; i < values.size(); i++) {
    const std::string &name = call.op.schema().returns()[i].name();
    if (name == "philox_seed" || name == "rng_state") place = i;
  }
  values[place] = at::scalar_tensor((int64_t)(call.seed & INT64_MAX), at::kLong);  // for the backward pass
  return values;
}
Values attention_backward(const Call &call) {
  bool is_dropping = call["dropout_p"].toDouble() > 0;
  Attention attention(call, is_dropping ? (uint64_t)call.tensor("philox_seed").reshape(-1)[0].item<int64_t>() : 0);
  const char *incoming = call.op.schema().argumentIndexWithName("grad_out") ? "grad_out" : "grad_out_";
  Tensor gradient = call.tensor(incoming).to(at::kDouble);
  Tensor of_weights = gradient.matmul(attention.value.transpose(-1, -2)) * attention.keep;
  Tensor of_scores = attention.weights * (of_weights - (of_weights * attention.weights).sum(-1, true));
  int64_t heads = call.tensor("key").size(1);
  Values values = {
      of_scores.matmul(attention.key) * attention.scale,
      attention.per_key_head(of_scores.transpose(-1, -2).matmul(attention.query) * attention.scale, heads),
      attention.per_key_head((attention.weights * attention.keep).transpose(-1, -2).matmul(gradient), heads)};
  if (call.op.schema().argumentIndexWithName("grad_input_mask")) {
    Tensor bias = call.tensor("attn_bias");
    values.push_back(bias.defined() && bias.numel() ? at::sum_to(of_scores, bias.sizes()) : Tensor());
  }
  return values;
}
Values convolution(const Call &call) {
  return {at::convolution(call.tensor("self"), call.tensor("weight"), {}, call.ints("stride"), call.ints("padding"),
                          call.ints("dilation"), false, std::vector<int64_t>(call.ints("padding").size(), 0), call["groups"].toInt())};
}
Values transposed_convolution(const Call &call) {
  return {at::convolution(call.tensor("self"), call.tensor("weight"), {}, call.ints("stride"), call.ints("padding"),
                          call.ints("dilation"), true, call.ints("output_padding"), call["groups"].toInt())};
}
Values convolution_relu(const Call &call) {
  Tensor sum = at::convolution(call.tensor("self"), call.tensor("weight"), call.tensor("bias"), call.ints("stride"), call.ints("padding"),
                               call.ints("dilation"), false, std::vector<int64_t>(call.ints("padding").size(), 0), call["groups"].toInt());
  if (call.op.schema().argumentIndexWithName("z")) {
    double alpha = call["alpha"].isNone() ? 1 : call["alpha"].toScalar().toDouble();
    sum = sum + call.tensor("z") * alpha;
  }
  return {sum.relu()};
}
Values depthwise_convolution(const Call &call) {
  Tensor input = call.tensor("self");
  return {at::convolution(input, call.tensor("weight"), call.tensor("bias"), call.ints("stride"), call.ints("padding"),
                          call.ints("dilation"), false, std::vector<int64_t>(call.ints("padding").size(), 0), input.size(1))};
}
Values batch_norm(const Call &call) {
  auto [output, mean, scale] = at::native_batch_norm(call.tensor("input"), call.tensor("weight"), call.tensor("bias"), call.tensor("running_mean"),
                                                     call.tensor("running_var"), call["training"].toBool(),
                                                     call["exponential_average_factor"].toDouble(), call["epsilon"].toDouble());
  return {output, mean, scale, Tensor()};
}
Values batch_norm_backward(const Call &call) {
  auto [input, weight, bias] = at::native_batch_norm_backward(
      call.tensor("grad_output"), call.tensor("input"), call.tensor("weight"), call.tensor("running_mean"), call.tensor("running_var"),
      call.tensor("save_mean"), call.tensor("save_var"), true, call["epsilon"].toDouble(), {true, true, true});
  return {input, weight, bias};
}
Values lstm_cell(const Call &call) {
  Tensor sum = call.tensor("input_gates") + call.tensor("hidden_gates");
  if (Tensor bias = call.tensor("input_bias"); bias.defined()) sum = sum + bias + call.tensor("hidden_bias");
  auto gates = sum.chunk(4, 1);
  Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  Tensor next = forget * call.tensor("cx") + in * cell;
  return {out * next.tanh(), next, at::cat({in, forget, cell, out}, 1)};
}
Values lstm_cell_backward(const Call &call) {
  auto gates = call.tensor("workspace").chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  Tensor next = call.tensor("cy"), squashed = next.tanh(), of_output = call.tensor("grad_hy"), of_next = call.tensor("grad_cy");
  Tensor sum = of_next.defined() ? of_next : at::zeros_like(next);
  Tensor of_out = at::zeros_like(next);
  if (of_output.defined()) sum = sum + of_output * out * (1 - squashed * squashed), of_out = of_output * squashed * out * (1 - out);
  Tensor of_gates = at::cat({sum * cell * in * (1 - in), sum * call.tensor("cx") * forget * (1 - forget), sum * in * (1 - cell * cell), of_out}, 1);
  Tensor of_bias = call["has_bias"].toBool() ? of_gates.sum(0) : Tensor();
  return {of_gates, sum * forget, of_bias};
}
Values gru_cell(const Call &call) {
  Tensor in = call.tensor("input_gates"), hidden = call.tensor("hidden_gates"), before = call.tensor("hx");
  if (Tensor bias = call.tensor("input_bias"); bias.defined()) in = in + bias, hidden = hidden + call.tensor("hidden_bias");
  auto ins = in.chunk(3, 1), hiddens = hidden.chunk(3, 1);
  Tensor reset = (ins[0] + hiddens[0]).sigmoid(), keep = (ins[1] + hiddens[1]).sigmoid();
  Tensor next = (ins[2] + reset * hiddens[2]).tanh();
  return {(before - next) * keep + next, at::cat({reset, keep, next, before, hiddens[2]}, 1)};
}
Values gru_cell_backward(const Call &call) {
  auto held = call.tensor("workspace").chunk(5, 1);
  const Tensor &reset = held[0], &keep = held[1], &next = held[2], &before = held[3], &hidden = held[4];
  Tensor gradient = call.tensor("grad_hy");
  Tensor of_keep = gradient * (before - next) * keep * (1 - keep), of_next = gradient * (1 - keep) * (1 - next * next);
  Tensor of_reset = of_next * hidden * reset * (1 - reset);
  Tensor of_in = at::cat({of_reset, of_keep, of_next}, 1), of_hidden = at::cat({of_reset, of_keep, of_next * reset}, 1);
  bool has_bias = call["has_bias"].toBool();
  return {of_in, of_hidden, gradient * keep, has_bias ? of_in.sum(0) : Tensor(), has_bias ? of_hidden.sum(0) : Tensor()};
}
Values rms_norm_backward(const Call &call) {
  Tensor gradient = call.tensor("grad_out").to(at::kDouble), input = call.tensor("input").to(at::kDouble);
  Tensor scale = call.tensor("rstd").to(at::kDouble), weight = call.tensor("weight");
  int64_t dims = (int64_t)call["normalized_shape"].toIntVector().size();
  std::vector<int64_t> last, first;
  for (int64_t i = 0; i < input.dim(); i++) (i < input.dim() - dims ? first : last).push_back(i);
  Tensor normal = input * scale;
  Tensor inner = weight.defined() ? gradient * weight.to(at::kDouble) : gradient;
  Tensor of_input = scale * (inner - normal * (inner * normal).mean(last, true));
  Tensor of_weight = weight.defined() ? (first.empty() ? gradient * normal : (gradient * normal).sum(first)) : Tensor();
  return {of_input, of_weight};
}
Values product(const Call &call) { return {call.tensor("self").matmul(call.tensor("mat2"))}; }
Values product_with_sum(const Call &call) {
  bool is_batched = call.op.schema().argumentIndexWithName("batch1").has_value();
  Tensor matrix = call.tensor(is_batched ? "batch1" : "mat1").matmul(call.tensor(is_batched ? "batch2" : "mat2"));
  return {call.tensor("self") * call["beta"].toScalar() + matrix * call["alpha"].toScalar()};
}
// softmax of shorts with a result in floats: the CPU has none
Values softmax(const Call &call) { return {at::_softmax(call.tensor("self"), call["dim"].toInt(), false)}; }
Values log_softmax(const Call &call) { return {at::_log_softmax(call.tensor("self"), call["dim"].toInt(), false)}; }
Values softmax_backward(const Call &call) {
  return {at::_softmax_backward_data(call.tensor("grad_output"), call.tensor("output"), call["dim"].toInt(), call.tensor("output").scalar_type())};
}
Values log_softmax_backward(const Call &call) {
  return {at::_log_softmax_backward_data(call.tensor("grad_output"), call.tensor("output"), call["dim"].toInt(), call.tensor("output").scalar_type())};
}
Values dropout(const Call &call) {
  Tensor input = call.tensor("input");
  double p = call["p"].toDouble();
  bool is_training = call["train"].isNone() || call["train"].toBool();
  if (!is_training) return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor keep = at::rand(input.sizes(), at::detail::createCPUGenerator(call.seed)) >= p;
  return {p < 1 ? input * keep / (1 - p) : at::zeros_like(input), keep};
}

const std::unordered_map<std::string, Rule> RULES = {
    {"_scaled_dot_product_efficient_attention", attention_forward},
    {"_scaled_dot_product_efficient_attention_backward", attention_backward},
    {"_scaled_dot_product_flash_attention", attention_forward},
    {"_scaled_dot_product_flash_attention_backward", attention_backward},
    {"_scaled_dot_product_cudnn_attention", attention_forward},
    {"_scaled_dot_product_cudnn_attention_backward", attention_backward},
    {"cudnn_convolution", convolution},
    {"cudnn_convolution_transpose", transposed_convolution},
    {"cudnn_convolution_relu", convolution_relu},
    {"cudnn_convolution_add_relu", convolution_relu},
    {"_conv_depthwise2d", depthwise_convolution},
    {"conv_depthwise3d", depthwise_convolution},
    {"cudnn_batch_norm", batch_norm},
    {"cudnn_batch_norm_backward", batch_norm_backward},
    {"_thnn_fused_lstm_cell", lstm_cell},
    {"_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
    {"_thnn_fused_gru_cell", gru_cell},
    {"_thnn_fused_gru_cell_backward", gru_cell_backward},
    {"_fused_rms_norm_backward", rms_norm_backward},
    {"mm.dtype", product},
    {"bmm.dtype", product},
    {"addmm.dtype", product_with_sum},
    {"baddbmm.dtype", product_with_sum},
    {"_softmax", softmax},
    {"_log_softmax", log_softmax},
    {"_softmax_backward_data", softmax_backward},
    {"_log_softmax_backward_data", log_softmax_backward},
    {"native_dropout", dropout},
};

// cuDNN's attention as torch calls it: its graphs are more than the emulated cuDNN understands, the memory it takes is not
Values cudnn_attention_memory(const Tensor &query, const Tensor &key, const Tensor &value, bool has_statistics) {
  Tensor output = at::empty_like(query.size(-1) == value.size(-1) ? query : query.narrow(-1, 0, value.size(-1)));
  Tensor statistics = has_statistics ? at::empty({query.size(0), query.size(1), query.size(2), 1}, query.options().dtype(at::kFloat)) : Tensor();
  return {output, statistics};
}

// ---- running

void say_once(const std::string &text) {
  static auto &said = *new std::set<std::string>;
  static auto &mutex = *new std::mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (said.insert(text).second) fprintf(stderr, "emulated GPU: %s\n", text.c_str());
}

std::string full_name(const OperatorHandle &op) {
  const auto &name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

c10::DispatchKeySet above_the_kernels() {  // what a call from within a kernel must not meet again
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
         DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PreDispatch, DispatchKey::Functionalize,
                         DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode});
}

class Valued : public c10::OperatorKernel {
 public:
  Valued(const OperatorHandle &op, c10::KernelFunction original) : original_(std::move(original)) {
    const auto &schema = op.schema();
    std::string name = schema.name().substr(schema.name().find("::") + 2);
    std::string with_overload = op.operator_name().overload_name.empty() ? name : name + "." + op.operator_name().overload_name;
    is_copy_ = name == "copy_";
    is_list_copy_ = name == "_foreach_copy_";
    is_by_value_ = is_by_value(schema, name);
    is_cudnn_attention_ = name == "_cudnn_attention_forward";
    is_cudnn_attention_backward_ = name == "_cudnn_attention_backward";
    // these write what they are asked to and nothing else; those over lists may call operators for each tensor
    may_write_more_ = name.rfind("_fused_", 0) && name.rfind("_amp_", 0);
    is_random_ = op.hasTag(at::Tag::nondeterministic_seeded) || name.find("dot_product") != std::string::npos;
    generator_ = schema.argumentIndexWithName("generator");
    for (const char *each : {with_overload.c_str(), name.c_str()})
      if (auto found = RULES.find(each); !rule_ && found != RULES.end() && !schema.is_mutable()) rule_ = found->second;
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      auto alias = schema.arguments()[i].alias_info();
      if (alias && alias->isWrite()) written_.push_back(i);
    }
    returns_tensors_ = false;
    for (const auto &each : schema.returns()) {
      returns_tensors_ |= each.type()->isSubtypeOf(*c10::TensorType::get()) || each.type()->kind() == c10::TypeKind::ListType;
      is_view_ |= each.alias_info() && !each.alias_info()->isWrite();
    }
  }

  void operator()(const OperatorHandle &op, DispatchKeySet keys, Stack *stack);

 private:
  void compute(const OperatorHandle &op, Call &call, std::vector<IValue> &arguments, Stack *stack, size_t returns, bool is_by_value);
  void copy(const OperatorHandle &op, DispatchKeySet keys, Stack *stack);
  void leave(const OperatorHandle &op, DispatchKeySet keys, Stack *stack) { original_.callBoxed(op, keys, stack); }
  bool writes_to_the_host(const std::vector<IValue> &arguments) const;

  c10::KernelFunction original_;
  Rule rule_;
  std::optional<int> generator_;
  std::vector<size_t> written_;
  bool is_copy_, is_list_copy_, is_by_value_, is_cudnn_attention_, is_cudnn_attention_backward_, may_write_more_, is_random_,
      returns_tensors_, is_view_ = false;
};

class AnswersNo : public c10::OperatorKernel {
 public:
  void operator()(const OperatorHandle &op, DispatchKeySet, Stack *stack) {
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->emplace_back(false);
  }
};

bool is_left(const OperatorHandle &op) {
  const auto &schema = op.schema();
  std::string name = schema.name().substr(schema.name().find("::") + 2);
  if (LEFT.count(name)) return true;
  if (!schema.name().rfind("c10d::", 0)) return true;  // the emulated NCCL has done it
  for (const auto &each : schema.returns())
    if (each.alias_info() && !each.alias_info()->isWrite()) return true;  // a view
  return false;
}

std::atomic<bool> is_stale{true};  // operators have been registered since the last look
void stand_in();

Tensor to_gpu(const Tensor &tensor) {
  Tensor made = at::empty(tensor.sizes(), tensor.options().device(at::Device(at::kCUDA, emulated_current())));
  over(made).copy_(tensor);
  return made;
}

// kernels run on the device of their tensors, whichever is current
std::optional<at::Device> device_of(const std::vector<Tensor> &tensors) {
  for (const Tensor &each : tensors)
    if (each.defined() && each.is_cuda()) return each.device();
  return std::nullopt;
}

bool Valued::writes_to_the_host(const std::vector<IValue> &arguments) const {
  std::vector<Tensor> written;
  for (size_t i : written_) collect(arguments[i], written);
  for (const Tensor &each : written)
    if (each.defined() && !each.is_cuda()) return true;
  return false;
}

void Valued::operator()(const OperatorHandle &op, DispatchKeySet keys, Stack *stack) {
  if (is_stale.load()) stand_in();
  if (is_copy_) return copy(op, keys, stack);
  size_t count = op.schema().arguments().size();
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  std::vector<Tensor> tensors;
  for (const IValue &each : arguments) collect(each, tensors);
  bool is_mixed = false;
  for (const Tensor &each : tensors) {
    if (each.defined() && each.is_cuda() && !on_gpu(each)) return leave(op, keys, stack);  // sparse and the like
    is_mixed |= each.defined() && !each.is_cuda();
  }
  if (is_list_copy_ && is_mixed) return leave(op, keys, stack);  // its copies are real ones
  if (is_mixed && writes_to_the_host(arguments)) return leave(op, keys, stack);  // it calls an operator for each tensor
  c10::cuda::OptionalCUDAGuard guard(device_of(tensors));
  emulated_catch_up(c10::cuda::getCurrentCUDAStream(emulated_current()).stream());
  uint64_t seed = is_random_ ? seed_of(generator_ ? &arguments[*generator_] : nullptr, tensors) : 0;
  Call call{op, {}, seed};

  if (is_cudnn_attention_ || is_cudnn_attention_backward_) {
    torch::jit::drop(*stack, count);
    const Tensor &query = arguments[is_cudnn_attention_ ? 0 : 1].toTensor(), &key = arguments[is_cudnn_attention_ ? 1 : 2].toTensor();
    const Tensor &value = arguments[is_cudnn_attention_ ? 2 : 3].toTensor();
    if (is_cudnn_attention_backward_) {
      for (const Tensor &each : {query, key, value}) stack->emplace_back(at::empty_like(each));
      return;
    }
    auto made = cudnn_attention_memory(query, key, value, arguments[8].toBool());
    auto number = at::empty({}, query.options().dtype(at::kLong));
    // the generator moves on, as with dropout on a GPU
    if (arguments[9].toDouble() > 0) at::empty({4}, query.options()).uniform_();
    for (const IValue &each : {IValue(made[0]), IValue(made[1]), IValue(Tensor()), IValue(Tensor()), IValue(query.size(2)), IValue(key.size(2)),
                               IValue(number), IValue(at::empty_like(number)), IValue(Tensor())})
      stack->push_back(each);
    return;
  }
  if (is_by_value_) {
    torch::jit::drop(*stack, count);
    compute(op, call, arguments, stack, op.schema().returns().size(), true);
    return;
  }
  std::vector<Tensor> before;  // of what is written in place
  std::vector<Tensor> written;
  for (size_t index : written_) collect(arguments[index], written);
  if (may_write_more_)
    for (const Tensor &each : written) before.push_back(on_gpu(each) ? over(each).clone() : Tensor());
  original_.callBoxed(op, keys, stack);
  for (size_t i = 0; i < before.size(); i++)
    if (before[i].defined() && before[i].sizes() == written[i].sizes()) over(written[i]).copy_(before[i]);
  compute(op, call, arguments, stack, op.schema().returns().size(), false);
}

void Valued::compute(const OperatorHandle &op, Call &call, std::vector<IValue> &arguments, Stack *stack, size_t returns, bool is_by_value) {
  c10::impl::ExcludeDispatchKeyGuard below(above_the_kernels());
  std::vector<std::pair<Tensor, Tensor>> widened;  // what lies on the GPU in 16 bits, and its copy
  Change change = [&](const IValue &value) -> IValue {
    if (value.isDevice() && value.toDevice().is_cuda()) return at::Device(at::kCPU);
    if (value.isGenerator()) return call.seed || is_random_ ? IValue(at::detail::createCPUGenerator(call.seed)) : IValue();
    if (!value.isTensor() || !on_gpu(value.toTensor())) return value;
    Tensor made = over(value.toTensor());
    if (!is_short(made.scalar_type()) || is_by_value) return made;
    Tensor wide = made.to(at::kFloat);
    widened.emplace_back(made, wide);
    return wide;
  };
  for (size_t i = 0; i < arguments.size(); i++) {
    IValue given = changed(arguments[i], change);
    if (op.schema().arguments()[i].name() == "pin_memory") given = IValue();
    call.arguments.push_back(given);
  }
  bool has_rule = rule_ && true;
  Stack results;
  Values values;
  try {
    if (has_rule) {
      values = rule_(call);
    } else {
      results = call.arguments;
      std::optional<Seeded> seeded;
      if (is_random_) seeded.emplace(call.seed);
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &results);
    }
  } catch (const c10::Error &error) {
    if (is_by_value) throw;
    std::string text = error.what_without_backtrace();
    say_once("no values for " + full_name(op) + ": " + text.substr(0, text.find('\n')).substr(0, 160));
    for (size_t i = stack->size() - returns; i < stack->size(); i++) {
      std::vector<Tensor> found;
      collect((*stack)[i], found);
      for (const Tensor &each : found)
        if (on_gpu(each) && each.is_floating_point()) over(each).fill_(NAN);
    }
    return;
  }
  if (is_by_value) {
    for (const IValue &each : results) stack->push_back(each.isTensor() && each.toTensor().defined() ? IValue(to_gpu(each.toTensor())) : each);
    return;
  }
  if (!written_.empty()) {
    std::vector<Tensor> written;
    for (size_t index : written_) collect(arguments[index], written);
    for (const auto &[narrow, wide] : widened)
      for (const Tensor &each : written)
        if (on_gpu(each) && each.numel() && each.data_ptr() == narrow.data_ptr() && each.sizes() == narrow.sizes()) {
          Tensor(narrow).copy_(wide);
          break;
        }
  }
  if (has_rule) {
    results.clear();
    for (const Tensor &each : values) results.emplace_back(each);
  }
  for (size_t i = 0; i < returns && i < results.size(); i++) {
    IValue &mine = (*stack)[stack->size() - returns + i];
    const auto &alias = op.schema().returns()[i].alias_info();
    if (alias && alias->isWrite()) continue;  // written already
    std::vector<Tensor> here, theirs;
    collect(mine, here);
    collect(results[i], theirs);
    if (here.empty() && !returns_tensors_) mine = results[i];  // a number that was read from the device
    for (size_t j = 0; j < here.size() && j < theirs.size(); j++) {
      if (!here[j].defined() || !theirs[j].defined() || !here[j].numel()) continue;
      Tensor to = on_gpu(here[j]) ? over(here[j]) : here[j];
      if (to.sizes() == theirs[j].sizes()) to.copy_(theirs[j]);
      else if (to.numel() == theirs[j].numel()) to.copy_(theirs[j].reshape(to.sizes()));
      else if (theirs[j].numel() == 1) to.fill_(theirs[j].item());
      else if (to.dim() == theirs[j].dim() && to.size(-1) > theirs[j].size(-1)) to.narrow(-1, 0, theirs[j].size(-1)).copy_(theirs[j]);
      else say_once("no values for " + full_name(op) + ": its result has another shape on the CPU");
    }
  }
}

// copies between the host and a device are real, and so are those within a device that need no kernel
void Valued::copy(const OperatorHandle &op, DispatchKeySet keys, Stack *stack) {
  Tensor to = (*stack)[stack->size() - 3].toTensor(), from = (*stack)[stack->size() - 2].toTensor();
  if (!on_gpu(to) || !on_gpu(from) || !to.numel()) return leave(op, keys, stack);
  bool is_plain = to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.strides() == from.strides() &&
                  to.is_non_overlapping_and_dense() && to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
  c10::cuda::OptionalCUDAGuard guard(to.device());
  emulated_catch_up(c10::cuda::getCurrentCUDAStream(emulated_current()).stream());
  leave(op, keys, stack);
  if (is_plain) return;
  c10::impl::ExcludeDispatchKeyGuard below(above_the_kernels());
  Tensor source = over(from);
  if (from.is_conj()) source = source.conj();
  if (from.is_neg()) source = source.neg();
  over(to).copy_(source);
}

void stand_in() {
  static auto &mutex = *new std::recursive_mutex;
  static auto &done = *new std::set<c10::OperatorName, bool (*)(const c10::OperatorName &, const c10::OperatorName &)>(
      [](const auto &a, const auto &b) { return std::tie(a.name, a.overload_name) < std::tie(b.name, b.overload_name); });
  static auto &handles = *new std::vector<c10::RegistrationHandleRAII>;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (!is_stale.exchange(false)) return;
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning &) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard quietly(&silent);  // standing in for a kernel is worth a warning as a rule
  bool has_values = emulated_has_values();
  auto &dispatcher = c10::Dispatcher::singleton();
  for (const auto &name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || done.count(name)) continue;
    std::string bare = name.name.substr(name.name.find("::") + 2);
    if (NOT_CHOSEN.count(bare)) {
      std::optional<DispatchKey> key;  // of all devices, unless CUDA has a kernel of its own
      if (op->hasKernelForDispatchKey(DispatchKey::CUDA)) key = DispatchKey::CUDA;
      done.insert(name);
      handles.push_back(dispatcher.registerImpl(name, key, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<AnswersNo>()),
                                                std::nullopt, nullptr, "emulated GPU"));
      continue;
    }
    bool is_copy = name.name == "aten::copy_";
    if (!is_copy && !op->hasKernelForDispatchKey(DispatchKey::CUDA)) continue;
    bool is_always = is_by_value(op->schema(), bare) || bare == "_cudnn_attention_forward" || bare == "_cudnn_attention_backward";
    if ((!has_values && !is_always) || (is_left(*op) && !is_copy)) continue;
    if (!is_copy && !op->hasComputedKernelForDispatchKey(DispatchKey::CUDA)) continue;
    auto original = op->getComputedKernelForDispatchKey(DispatchKey::CUDA).kernelFunction();
    done.insert(name);
    handles.push_back(dispatcher.registerImpl(name, DispatchKey::CUDA,
                                              c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Valued>(*op, original)),
                                              std::nullopt, nullptr, "emulated GPU"));
  }
}

class Listener : public c10::OpRegistrationListener {
  void onOperatorRegistered(const OperatorHandle &) override { is_stale = true; }
  void onOperatorDeregistered(const OperatorHandle &) override {}
};

// an initializer, as it needs the tables above; functions marked as constructors run before them
const bool has_begun = [] {
  stand_in();
  static auto &listening = *new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));
  (void)listening;
  is_stale = false;  // the listener was told of all there are
  return true;
}();
}  // namespace
