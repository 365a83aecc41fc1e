#include "trainer/parameters.h"

#include <algorithm>
#include <cmath>

#include <fmt/core.h>

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

std::vector<HeldStretch> held_stretches(const Parameter& p, const config::Parallel& parallel, const Place& place) {
  const bool expert = p.group == model::ParameterGroup::RoutedExpert;
  const auto dim = static_cast<size_t>(p.dim);
  std::int64_t outer = 1, inner = 1, local = 0;
  for (size_t d = 0; d < p.shape.size(); ++d) (d < dim ? outer : inner) *= d == dim ? 1 : p.shape[d];
  const std::int64_t mine = expert ? outer / parallel.ep : outer, first = expert ? mine * place.ep : 0;
  const auto rows = model::shard_rows(p, parallel, expert ? place.etp : place.tp);
  std::vector<HeldStretch> out;
  for (std::int64_t o = first; o < first + mine; ++o)
    for (const model::RowRange& r : rows) {
      const HeldStretch s{(o * p.shape[dim] + r.first) * inner, local, r.count * inner};
      local += s.count;
      if (!out.empty() && out.back().global + out.back().count == s.global) out.back().count += s.count;
      else out.push_back(s);
    }
  return out;
}

Parameters::Parameters(const config::Model& model, const config::Run& run, Device& device, Ledger& ledger, const Ranks& ranks)
    : model_(model), run_(run), device_(device), ledger_(ledger), ranks_(ranks), table_(model::parameter_table(model, run)) {
  require_executed(model, run);
  for (const Parameter& p : table_.parameters)
    if (!p.trainable)
      throw Error(ErrorCode::Config, fmt::format("'{}' is frozen: parameters that are not trained are not executed", p.name),
                  "gdnplan prices it; gdntrain does not execute it");
  lay_out(model::state_buffers(table_, model, run, ranks.place().pp));
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
    optimizer += b.elements / (run_.optimizer.distributed ? b.ranks : 1) * (own_master ? 8 : 12);
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
    Communicator& replicas = b.expert ? ranks_.group(model::Group::Edp) : ranks_.dense_replicas();
    const std::int64_t shard = run_.optimizer.distributed ? b.elements / b.ranks : b.elements;
    const std::int64_t shard_first = run_.optimizer.distributed ? replicas.rank() * shard : 0;
    const size_t first_slot = slots_.size();
    buckets_.push_back({live_at, gradient_at, b.dtype, b.elements, shard, &replicas});
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
      slot.copy = s.copy;
      slots_.push_back(slot);
    }
    for (size_t i = first_slot; i < slots_.size(); ++i) { // where a parameter and this rank's shard meet
      ParameterSlot& slot = slots_[i];
      const std::int64_t offset = slot.gradient - gradient_at;
      const std::int64_t from = std::clamp(shard_first - offset, std::int64_t{0}, slot.elements);
      slot.owned_first = from;
      slot.owned = std::clamp(shard_first + shard - offset, from, slot.elements) - from;
      float* state = optimizer_at + std::max<std::int64_t>(offset + from - shard_first, 0);
      slot.m = state;
      slot.v = state + shard;
      slot.master = own_master ? reinterpret_cast<float*>(slot.live) + from : state + 2 * shard;
    }
    live_at += b.elements * size;
    gradient_at += b.elements;
    optimizer_at += shard * (own_master ? 2 : 3);
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

// This rank's part of a parameter, from the ranks that own stretches of it.
std::vector<float> Parameters::gather(const ParameterSlot& s, const float* owned) {
  if (s.owned == s.elements && !run_.optimizer.distributed) return read(owned, s.elements);
  const bool expert = s.parameter->group == model::ParameterGroup::RoutedExpert;
  Communicator& replicas = expert ? ranks_.group(model::Group::Edp) : ranks_.dense_replicas();
  if (replicas.size() == 1) return read(owned, s.elements);
  const std::vector<float> mine = read(owned, s.owned);
  std::vector<double> all(static_cast<size_t>(s.elements), 0);
  std::copy(mine.begin(), mine.end(), all.begin() + s.owned_first);
  replicas.sum_on_host(all); // every element has one owner: the sum is its value
  return {all.begin(), all.end()};
}

std::vector<float> Parameters::weights(std::string_view name) {
  const ParameterSlot& s = at(name);
  return gather(s, s.master);
}

std::vector<float> Parameters::gradient(std::string_view name) {
  const ParameterSlot& s = at(name);
  return gather(s, s.gradient + s.owned_first);
}

kernels::Fingerprint Parameters::gradient_fingerprint(const ParameterSlot& s) { return device_.fingerprint(s.gradient, s.elements); }

void Parameters::set_weights(std::string_view name, std::span<const float> values) { set_weights(at(name), values); }

void Parameters::set_weights(const ParameterSlot& s, std::span<const float> values) {
  if (static_cast<std::int64_t>(values.size()) != s.elements)
    throw Error(ErrorCode::Config, fmt::format("'{}' has {} elements, {} are given", s.name(), s.elements, values.size()));
  if (s.dtype == DType::FP32) return device_.to_device(s.live, values.data(), s.elements * 4); // its own master
  device_.to_device(reinterpret_cast<std::byte*>(s.master), values.data() + s.owned_first, s.owned * 4);
  if (s.owned == s.elements) return device_.convert(s.master, s.value());
  // Masters of the other elements lie elsewhere: the gradient's memory holds them for the moment.
  auto* whole = reinterpret_cast<std::byte*>(s.gradient);
  device_.to_device(whole, values.data(), s.elements * 4);
  device_.convert(s.gradient, s.value());
  device_.fill(whole, s.elements * 4, 0);
}

std::vector<float> Parameters::moment(std::string_view name, bool second) {
  const ParameterSlot& s = at(name);
  return gather(s, second ? s.v : s.m);
}

void Parameters::set_moment(std::string_view name, bool second, std::span<const float> values) {
  const ParameterSlot& s = at(name);
  if (static_cast<std::int64_t>(values.size()) != s.elements)
    throw Error(ErrorCode::Checkpoint, fmt::format("'{}' has {} elements, {} are given", name, s.elements, values.size()));
  device_.to_device(reinterpret_cast<std::byte*>(second ? s.v : s.m), values.data() + s.owned_first, s.owned * 4);
}

// ---------------------------------------------------------------------------- initialisation ----

void Parameters::initialise(std::uint64_t seed) {
  for (ParameterSlot& s : slots_) initialise(s, seed);
  zero_gradients();
}

void Parameters::initialise(ParameterSlot& slot, std::uint64_t seed) {
  const Parameter& p = *slot.parameter;
  const reference::RandomStream stream{.seed = seed, .op = reference::stream_id(p.name.data(), p.name.size())};
  // Standard deviation 0.02, over sqrt(2 L) for projections back to the residual stream (Megatron-LM).
  const double stddev = 0.02, scaled = stddev / std::sqrt(2.0 * static_cast<double>(std::max<std::int64_t>(1, model_.layers())));
  const std::vector<HeldStretch> stretches = held_stretches(p, run_.parallel, ranks_.place());
  if ((p.init == model::Init::Normal || p.init == model::Init::ScaledNormal) && slot.dtype != DType::FP32) {
    // By the device, if it can; where masters of other elements lie elsewhere, in the gradient's memory.
    float* const whole = slot.owned == slot.elements ? slot.master : slot.gradient;
    auto drawn = [&](const HeldStretch& held) {
      return device_.fill_normal(whole + held.local, held.count, p.init == model::Init::Normal ? stddev : scaled, stream, held.global);
    };
    if (std::all_of(stretches.begin(), stretches.end(), drawn)) {
      device_.convert(whole, slot.value());
      if (whole == slot.master) return;
      if (slot.owned > 0) device_.convert(whole + slot.owned_first, {reinterpret_cast<std::byte*>(slot.master), DType::FP32, 1, slot.owned, slot.owned});
      return device_.fill(reinterpret_cast<std::byte*>(slot.gradient), slot.elements * 4, 0);
    }
  }
  std::vector<float> w(static_cast<size_t>(slot.elements));
  for (const HeldStretch& held : stretches) {
    const reference::Values part(reference::vector_view(std::span<float>(w).subspan(static_cast<size_t>(held.local), static_cast<size_t>(held.count))));
    const std::int64_t first = held.global;
    switch (p.init) {
    case model::Init::Normal: reference::fill_normal(part, stddev, stream, first); break;
    case model::Init::ScaledNormal: reference::fill_normal(part, scaled, stream, first); break;
    case model::Init::Zero: reference::fill_constant(part, 0); break;
    case model::Init::One: reference::fill_constant(part, 1); break;
    case model::Init::Conv: { // PyTorch's bound 1 / sqrt(taps), which the bias keeps whatever conv_init says
      const double torch = 1 / std::sqrt(static_cast<double>(model_.gdn.conv_kernel));
      const double bound = p.shape.size() == 1 ? torch : model_.gdn.conv_init.value_or(torch);
      reference::fill_uniform(part, -bound, bound, stream, first);
      break;
    }
    case model::Init::ALog: reference::init_a_log(part, model_.gdn.a_init_lo, model_.gdn.a_init_hi, stream, first); break;
    case model::Init::Gdn2DtBias: reference::init_dt_bias_gdn2(part, stream, first); break;
    }
  }
  set_weights(slot, w);
}

// ------------------------------------------------------------------------------------ update ----

void Parameters::zero_gradients() { device_.fill(gradients_.data(), gradient_bytes_, 0); }

// Whether this rank's gradient is a part of it although all TP ranks hold the whole parameter: each saw its
// rows (sequence parallelism), or its heads. Biases after a reduction have seen every row.
bool Parameters::is_partial(const ParameterSlot& s) const {
  const Parameter& p = *s.parameter;
  if (run_.parallel.tp == 1 || p.rule() != model::ShardRule::Replicated || p.local.ends_with(".bias")) return false;
  const bool per_head = p.local.ends_with("attention.q_norm") || p.local.ends_with("attention.k_norm") || p.local.ends_with("gdn.out_norm");
  return per_head || ranks_.sequence_parallel();
}

// Whether this rank counts its owned elements in sums over the whole model: one rank of those that own them.
bool Parameters::is_counted(const ParameterSlot& s) const {
  const bool expert = s.parameter->group == model::ParameterGroup::RoutedExpert;
  if (s.copy || (!expert && s.parameter->rule() == model::ShardRule::Replicated && ranks_.place().tp != 0)) return false;
  return run_.optimizer.distributed || (expert ? ranks_.place().edp : ranks_.dense_replicas().rank()) == 0;
}

bool Parameters::copies_embedding(const config::Model& m, const config::Run& run) { return m.tied_embeddings || (run.train_mtp && m.mtp_layers > 0); }

void Parameters::reduce_gradients() {
  if (ranks_.alone()) return;
  auto sum = [](const ParameterSlot& s, Communicator& over) { over.all_reduce(reinterpret_cast<std::byte*>(s.gradient), s.elements, DType::FP32); };
  for (const ParameterSlot& s : slots_)
    if (is_partial(s)) sum(s, ranks_.group(model::Group::Tp));
  if (copies_embedding(model_, run_) && ranks_.pipeline_ends().size() > 1) sum(at("embedding.word"), ranks_.pipeline_ends());
  for (const Bucket& b : buckets_) {
    if (b.replicas->size() == 1) continue;
    auto* all = reinterpret_cast<std::byte*>(b.gradient);
    if (b.shard == b.elements) b.replicas->all_reduce(all, b.elements, DType::FP32);
    else b.replicas->reduce_scatter(all, all + b.replicas->rank() * b.shard * 4, b.shard, DType::FP32);
  }
}

double Parameters::gradient_norm() {
  double sum = 0;
  for (const ParameterSlot& s : slots_)
    if (is_counted(s)) sum += device_.sum_of_squares(s.gradient + s.owned_first, s.owned);
  ranks_.world().sum_on_host({&sum, 1});
  return std::sqrt(sum);
}

double Parameters::update(const UpdateSettings& u) {
  const double norm = gradient_norm();
  if (!std::isfinite(norm)) return norm; // the caller stops; weights stay as they were
  AdamWUpdate a{u.lr, u.beta1, u.beta2, u.eps, 0, u.step, 1};
  if (u.clip > 0) a.gradient_scale = std::min(1.0, u.clip / (norm + 1e-6)); // as Megatron-LM clips
  for (ParameterSlot& s : slots_) {
    a.weight_decay = is_norm_or_bias(*s.parameter) ? 0 : u.weight_decay;
    View live{s.live + s.owned_first * size_of(s.dtype), s.dtype, 1, s.owned, s.owned};
    device_.adamw(a, s.gradient + s.owned_first, s.master, s.m, s.v, s.owned, s.dtype == DType::FP32 ? View{} : live);
  }
  for (const Bucket& b : buckets_)
    if (b.shard != b.elements) {
      const Bytes bytes = b.shard * size_of(b.dtype);
      b.replicas->all_gather(b.live + b.replicas->rank() * bytes, b.live, bytes);
    }
  return norm;
}

} // namespace gdn::trainer
