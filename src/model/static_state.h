#pragma once
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/units.h"
#include "model/parameters.h"

// Parameters, gradients and optimizer state of one rank: what stays for the whole run.
namespace gdn::model {

// Bytes of one element. `optimizer` is divided over the data-parallel ranks by the distributed
// optimizer. bf16 with fp32 gradients: 2 + 4 + 12; fp32: 4 + 4 + 8; fp16 with fp16 gradients:
// 2 + 2 + 16 (an fp32 copy of the gradient); precision-aware Adam: master + first + second moment.
struct ElementBytes {
  Bytes parameter = 0, gradient = 0, optimizer = 0;
};
ElementBytes element_bytes(const config::Run& run, DType stored);

// Where one tensor lies in a buffer: `elements` at `offset`, both in elements.
struct BufferSlot {
  const Parameter* parameter = nullptr;
  std::int64_t tensor = 0; // local expert of a routed-expert parameter, else 0
  bool copy = false;       // the last stage's copy of the word embedding
  std::int64_t offset = 0, elements = 0;
};

// A contiguous run of trainable parameters of one dtype, and of their gradients: one bucket.
// With the distributed optimizer every tensor starts on a multiple of 64 elements and the buffer
// ends on a multiple of lcm(ranks, 128), as Megatron-LM lays it out without overlapped reduction.
struct StateBuffer {
  bool expert = false;
  std::int64_t virtual_stage = 0;
  DType dtype = DType::BF16;
  std::int64_t ranks = 1;    // data-parallel ranks sharing it: dp * cp, or edp for experts
  std::int64_t elements = 0; // padding included
  std::vector<BufferSlot> slots = {};
};
// `table` must outlive the result.
std::vector<StateBuffer> state_buffers(const ParameterTable& table, const config::Model& model,
                                       const config::Run& run, std::int64_t pipeline_rank);

// Whether frozen_weight_bits applies: linear weights of decoder layers. Embedding, head, norms, router, the
// shared expert's gate, convolution, A_log, dt_bias and every adapter keep the run's dtype.
bool quantised_when_frozen(const Parameter& parameter);

struct StateBytes {
  Bytes parameters = 0, gradients = 0, optimizer = 0;
  Bytes total() const { return parameters + gradients + optimizer; }
};

struct StaticState {
  StateBytes dense, expert; // expert: routed experts only
  Bytes host = 0;           // optimizer_cpu_offload: offloaded state and an fp32 copy of its gradients, in host memory
  Bytes total() const { return dense.total() + expert.total(); }
};
// Frozen parameters cost their own bytes only.
StaticState static_state(const ParameterTable& table, const config::Model& model,
                         const config::Run& run, std::int64_t pipeline_rank);
StaticState static_state(const config::Model& model, const config::Run& run,
                         std::int64_t pipeline_rank);

} // namespace gdn::model
