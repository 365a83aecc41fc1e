#include "trainer/parameters.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/init.h"
#include "trainer/executed.h"

namespace gdn::trainer {

using model::Parameter;

namespace {

bool is_norm_or_bias(const Parameter& p) { return p.shape.size() < 2 || p.init == model::Init::ALog; }

} // namespace

CategoryBytes Parameters::bytes_of(const model::StaticState& s) {
  CategoryBytes b;
  b[Category::Parameters] = s.dense.parameters + s.expert.parameters;
  b[Category::Gradients] = s.dense.gradients + s.expert.gradients;
  b[Category::Optimizer] = s.dense.optimizer + s.expert.optimizer;
  return b;
}

Parameters::Parameters(const config::Model& model, const config::Run& run, Device& device, Ledger& ledger)
    : model_(model), device_(device), ledger_(ledger), table_(model::parameter_table(model, run)) {
  require_executed(model, run);
  for (const Parameter& p : table_.parameters)
    if (!p.trainable)
      throw Error(ErrorCode::Config, fmt::format("'{}' is frozen: parameters that are not trained are not executed", p.name),
                  "gdnplan prices it; gdntrain does not execute it");
  lay_out(model::state_buffers(table_, model, run, 0));
  std::sort(slots_.begin(), slots_.end(), [](const ParameterSlot& a, const ParameterSlot& b) { return a.parameter < b.parameter; });
  for (size_t i = 0; i < slots_.size(); ++i) index_[slots_[i].name()] = i;
}

Parameters::~Parameters() {
  for (Ledger::Ticket t : tickets_) ledger_.release(t);
}

// Three allocations; buffer after buffer, each with its padding: exactly what the plan counts. An
// expert parameter's tensors follow one another, so that ops see one [experts * out, in] matrix.
void Parameters::lay_out(const std::vector<model::StateBuffer>& buffers) {
  Bytes live = 0, gradients = 0, optimizer = 0;
  for (const model::StateBuffer& b : buffers) {
    const bool own_master = b.dtype == DType::FP32;
    live += b.elements * size_of(b.dtype);
    gradients += b.elements * 4;
    optimizer += b.elements / b.ranks * (own_master ? 8 : 12);
  }
  live_ = DeviceMemory(device_, std::max<Bytes>(live, 1), "the parameters");
  gradients_ = DeviceMemory(device_, std::max<Bytes>(gradients, 1), "the gradients");
  optimizer_ = DeviceMemory(device_, std::max<Bytes>(optimizer, 1), "the optimizer state");
  device_.fill(live_.data(), live, 0);
  device_.fill(gradients_.data(), gradients, 0);
  device_.fill(optimizer_.data(), optimizer, 0);
  gradient_bytes_ = gradients;
  bytes_[Category::Parameters] = live;
  bytes_[Category::Gradients] = gradients;
  bytes_[Category::Optimizer] = optimizer;
  tickets_ = {ledger_.acquire("parameters", Category::Parameters, live),
              ledger_.acquire("gradients", Category::Gradients, gradients),
              ledger_.acquire("optimizer", Category::Optimizer, optimizer)};

  std::byte* live_at = live_.data();
  auto* gradient_at = reinterpret_cast<float*>(gradients_.data());
  auto* optimizer_at = reinterpret_cast<float*>(optimizer_.data());
  for (const model::StateBuffer& b : buffers) {
    const Bytes size = size_of(b.dtype);
    const bool own_master = b.dtype == DType::FP32;
    for (const model::BufferSlot& s : b.slots) {
      if (s.tensor > 0) { // the next expert of the parameter just added
        ParameterSlot& whole = slots_.back();
        if (live_at + s.offset * size != whole.live + whole.elements * size)
          throw Error(ErrorCode::Config, fmt::format("'{}': the matrices of its experts have {} elements; gdntrain needs a multiple of 64",
                                                     whole.name(), s.elements));
        whole.elements += s.elements;
        continue;
      }
      ParameterSlot slot{s.parameter, s.elements, b.dtype, live_at + s.offset * size, gradient_at + s.offset};
      float* state = optimizer_at + s.offset;
      slot.m = state;
      slot.v = state + b.elements;
      slot.master = own_master ? reinterpret_cast<float*>(slot.live) : state + 2 * b.elements;
      slots_.push_back(slot);
    }
    live_at += b.elements * size;
    gradient_at += b.elements;
    optimizer_at += b.elements * (own_master ? 2 : 3);
  }
}

ParameterSlot& Parameters::at(std::string_view name) {
  auto it = index_.find(name);
  if (it == index_.end()) {
    table_.at(name); // names the nearest
    throw Error(ErrorCode::Config, fmt::format("parameter '{}' is not on this rank", name));
  }
  return slots_[it->second];
}

// "L1.gdn.in_proj" of a unit that starts at layer 4 is "layers.5.gdn.in_proj" (model/concat.h).
ParameterSlot& Parameters::resolve(const std::string& prefix, const model::ParamRef& ref) {
  std::string name = prefix + ref.name;
  if (prefix.rfind("layers.", 0) == 0 && ref.name.size() > 2 && ref.name[0] == 'L' && std::isdigit(ref.name[1])) {
    const size_t dot = ref.name.find('.');
    const int layer = std::stoi(prefix.substr(7)) + std::stoi(ref.name.substr(1, dot));
    name = fmt::format("layers.{}.{}", layer, ref.name.substr(dot + 1));
  }
  ParameterSlot& slot = at(name);
  if (slot.elements != ref.elements || slot.dtype != ref.dtype)
    throw Error(ErrorCode::Internal, fmt::format("'{}' has {} elements in {}, the op list expects {} in {}", name, slot.elements,
                                                 name_of(slot.dtype), ref.elements, name_of(ref.dtype)));
  return slot;
}

// ------------------------------------------------------------------------------- host copies ----

std::vector<float> Parameters::read(const float* from, std::int64_t n) {
  std::vector<float> out(static_cast<size_t>(n));
  device_.to_host(out.data(), reinterpret_cast<const std::byte*>(from), n * 4);
  return out;
}

std::vector<float> Parameters::weights(std::string_view name) {
  ParameterSlot& s = at(name);
  return read(s.master, s.elements);
}

std::vector<float> Parameters::gradient(std::string_view name) {
  ParameterSlot& s = at(name);
  return read(s.gradient, s.elements);
}

void Parameters::set_weights(std::string_view name, std::span<const float> values) {
  ParameterSlot& s = at(name);
  if (static_cast<std::int64_t>(values.size()) != s.elements)
    throw Error(ErrorCode::Config, fmt::format("'{}' has {} elements, {} are given", name, s.elements, values.size()));
  device_.to_device(reinterpret_cast<std::byte*>(s.master), values.data(), s.elements * 4);
  if (s.dtype != DType::FP32) device_.convert(s.master, s.value());
}

std::vector<float> Parameters::moment(std::string_view name, bool second) {
  ParameterSlot& s = at(name);
  return read(second ? s.v : s.m, s.elements);
}

void Parameters::set_moment(std::string_view name, bool second, std::span<const float> values) {
  ParameterSlot& s = at(name);
  if (static_cast<std::int64_t>(values.size()) != s.elements)
    throw Error(ErrorCode::Checkpoint, fmt::format("'{}' has {} elements, {} are given", name, s.elements, values.size()));
  device_.to_device(reinterpret_cast<std::byte*>(second ? s.v : s.m), values.data(), s.elements * 4);
}

// ---------------------------------------------------------------------------- initialisation ----

void Parameters::initialise(std::uint64_t seed) {
  for (ParameterSlot& s : slots_) initialise(s, seed);
  zero_gradients();
}

void Parameters::initialise(ParameterSlot& slot, std::uint64_t seed) {
  const Parameter& p = *slot.parameter;
  const reference::RandomStream stream{.seed = seed, .op = reference::stream_id(p.name.data(), p.name.size())};
  std::vector<float> w(static_cast<size_t>(slot.elements));
  // Standard deviation 0.02, over sqrt(2 L) for projections back to the residual stream (Megatron-LM).
  const double stddev = 0.02, scaled = stddev / std::sqrt(2.0 * static_cast<double>(std::max<std::int64_t>(1, model_.layers())));
  const reference::Values flat(reference::vector_view(std::span<float>(w)));
  switch (p.init) {
  case model::Init::Normal: reference::fill_normal(flat, stddev, stream); break;
  case model::Init::ScaledNormal: reference::fill_normal(flat, scaled, stream); break;
  case model::Init::Zero: reference::fill_constant(flat, 0); break;
  case model::Init::One: reference::fill_constant(flat, 1); break;
  case model::Init::Conv: { // PyTorch's bound 1 / sqrt(taps), which the bias keeps whatever conv_init says
    const double torch = 1 / std::sqrt(static_cast<double>(model_.gdn.conv_kernel));
    const double bound = p.shape.size() == 1 ? torch : model_.gdn.conv_init.value_or(torch);
    reference::fill_uniform(flat, -bound, bound, stream);
    break;
  }
  case model::Init::ALog: reference::init_a_log(flat, model_.gdn.a_init_lo, model_.gdn.a_init_hi, stream); break;
  case model::Init::Gdn2DtBias: reference::init_dt_bias_gdn2(flat, stream); break;
  }
  set_weights(p.name, w);
}

// ------------------------------------------------------------------------------------ update ----

void Parameters::zero_gradients() { device_.fill(gradients_.data(), gradient_bytes_, 0); }

double Parameters::gradient_norm() {
  double sum = 0;
  for (const ParameterSlot& s : slots_) sum += device_.sum_of_squares(s.gradient, s.elements);
  return std::sqrt(sum);
}

double Parameters::update(const UpdateSettings& u) {
  const double norm = gradient_norm();
  if (!std::isfinite(norm)) return norm; // the caller stops; weights stay as they were
  AdamWUpdate a{u.lr, u.beta1, u.beta2, u.eps, 0, u.step, 1};
  if (u.clip > 0) a.gradient_scale = std::min(1.0, u.clip / (norm + 1e-6)); // as Megatron-LM clips
  for (ParameterSlot& s : slots_) {
    a.weight_decay = is_norm_or_bias(*s.parameter) ? 0 : u.weight_decay;
    device_.adamw(a, s.gradient, s.master, s.m, s.v, s.elements, s.dtype == DType::FP32 ? View{} : s.value());
  }
  return norm;
}

} // namespace gdn::trainer
