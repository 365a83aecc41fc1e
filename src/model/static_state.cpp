#include "model/static_state.h"

#include <algorithm>
#include <numeric>

namespace gdn::model {

namespace {

// Megatron-LM main d98e8a64, param_layout.py: 128-byte aligned starts at 2 bytes an element, and
// bucket ends aligned for cuBLAS.
constexpr std::int64_t kTensorAlignment = 64;
constexpr std::int64_t kBucketAlignment = 128;

bool is_expert(const LocalParameter& p) {
  return p.parameter->group == ParameterGroup::RoutedExpert;
}

// Frozen linear weights may be stored in 8 bits (one fp32 scale a row) or 4 (one fp32 scale a block of 64).
Bytes frozen_bytes(const LocalParameter& p, const config::Run& run) {
  const Bytes plain = checked_mul(p.elements, size_of(stored_dtype(*p.parameter, run)));
  if (run.frozen_bits == 16 || !quantised_when_frozen(*p.parameter)) return plain;
  return run.frozen_bits == 8 ? p.elements + p.elements / p.parameter->shape.back() * 4 : p.elements / 2 + p.elements / 64 * 4;
}

} // namespace

bool quantised_when_frozen(const Parameter& p) {
  static const std::vector<std::string_view> linears{"gdn.in_proj", "gdn.out_proj", "attention.linear_qkv", "attention.linear_proj",
                                                     "mlp.fc1", "mlp.fc2", "moe.shared.fc1", "moe.shared.fc2",
                                                     "moe.experts.fc1", "moe.experts.fc2"};
  return std::find(linears.begin(), linears.end(), p.local) != linears.end();
}

ElementBytes element_bytes(const config::Run& run, DType stored) {
  const config::Optimizer& o = run.optimizer;
  ElementBytes b;
  b.parameter = size_of(stored);
  b.gradient = stored == DType::FP32 ? 4 : stored == DType::FP16 ? 2 : size_of(o.gradient_dtype);
  const Bytes master = stored == DType::FP32 ? 0 : 4; // fp32 parameters are their own master
  if (o.precision_aware)
    b.optimizer = (master == 0 ? 0 : size_of(o.master_dtype)) + size_of(o.moment1_dtype) +
                  size_of(o.moment2_dtype);
  else
    b.optimizer = master + 8;
  if (stored == DType::FP16 && !o.precision_aware)
    b.optimizer += 4; // unscaled fp32 copy of the gradient
  return b;
}

std::vector<StateBuffer> state_buffers(const ParameterTable& table, const config::Model& model,
                                       const config::Run& run, std::int64_t pipeline_rank) {
  std::vector<StateBuffer> buffers;
  const bool padded = run.optimizer.distributed;
  for (const LocalParameter& p : local_parameters(table, model, run, pipeline_rank)) {
    if (!p.parameter->trainable) continue;
    const DType dtype = stored_dtype(*p.parameter, run);
    auto buffer = std::find_if(buffers.begin(), buffers.end(), [&](const StateBuffer& b) {
      return b.expert == is_expert(p) && b.virtual_stage == p.virtual_stage && b.dtype == dtype;
    });
    if (buffer == buffers.end()) {
      const std::int64_t ranks =
          is_expert(p) ? run.parallel.edp() : run.parallel.dp() * run.parallel.cp;
      buffers.push_back({is_expert(p), p.virtual_stage, dtype, ranks, 0, {}});
      buffer = buffers.end() - 1;
    }
    for (std::int64_t t = 0; t < p.tensors; ++t) {
      if (padded) buffer->elements = round_up(buffer->elements, kTensorAlignment);
      buffer->slots.push_back({p.parameter, t, p.copy, buffer->elements, p.elements / p.tensors});
      buffer->elements = checked_add(buffer->elements, p.elements / p.tensors);
    }
  }
  if (padded)
    for (StateBuffer& b : buffers)
      b.elements = round_up(b.elements, std::lcm(b.ranks, kBucketAlignment));
  return buffers;
}

StaticState static_state(const ParameterTable& table, const config::Model& model,
                         const config::Run& run, std::int64_t pipeline_rank) {
  StaticState state;
  for (const StateBuffer& b : state_buffers(table, model, run, pipeline_rank)) {
    const ElementBytes bytes = element_bytes(run, b.dtype);
    StateBytes& part = b.expert ? state.expert : state.dense;
    part.parameters += checked_mul(b.elements, bytes.parameter);
    part.gradients += checked_mul(b.elements, bytes.gradient);
    const std::int64_t shard = run.optimizer.distributed ? b.elements / b.ranks : b.elements;
    const Bytes optimizer = checked_mul(shard, bytes.optimizer);
    const Bytes moved = static_cast<Bytes>(static_cast<double>(optimizer) * run.optimizer.offload_fraction);
    part.optimizer += optimizer - moved;
    state.host += moved + static_cast<Bytes>(static_cast<double>(4 * shard) * run.optimizer.offload_fraction);
  }
  for (const LocalParameter& p : local_parameters(table, model, run, pipeline_rank))
    if (!p.parameter->trainable)
      (is_expert(p) ? state.expert : state.dense).parameters +=
          frozen_bytes(p, run);
  return state;
}

StaticState static_state(const config::Model& model, const config::Run& run,
                         std::int64_t pipeline_rank) {
  return static_state(parameter_table(model, run), model, run, pipeline_rank);
}

} // namespace gdn::model
