#pragma once
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/model.h"
#include "config/run.h"
#include "model/parameters.h"
#include "model/static_state.h"
#include "trainer/device.h"
#include "trainer/ledger.h"

namespace gdn::trainer {

// One parameter on this rank and what belongs to it. Pointers are device memory.
struct ParameterSlot {
  const model::Parameter* parameter = nullptr;
  std::int64_t elements = 0;
  DType dtype = DType::BF16;
  std::byte* live = nullptr;      // what ops read, in `dtype`
  float* gradient = nullptr;      // nullptr: frozen
  float *master = nullptr, *m = nullptr, *v = nullptr; // master is `live` itself for fp32 parameters

  const std::string& name() const { return parameter->name; }
  bool trainable() const { return gradient != nullptr; }
  View value() const { return {live, dtype, 1, elements, elements}; }
  View gradient_view() const {
    return {reinterpret_cast<std::byte*>(gradient), DType::FP32, 1, elements, elements};
  }
};

struct UpdateSettings {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
  double clip = 0;           // largest gradient norm; 0: no clipping
  std::int64_t step = 1;     // 1-based
};

// Weights, gradients and optimizer state of one rank, laid out in the buckets that the plan counts
// (model/static_state.h), each in one allocation. Fed to the ledger at construction.
class Parameters {
public:
  // Throws Error{Config} for settings that are not executed (executed.h), and for frozen parameters.
  Parameters(const config::Model& model, const config::Run& run, Device& device, Ledger& ledger);
  Parameters(const Parameters&) = delete;
  ~Parameters();

  // Draws every weight from (seed, its name): the same whatever the topology.
  void initialise(std::uint64_t seed);

  const std::vector<ParameterSlot>& slots() const { return slots_; }
  // By canonical name. Throws Error{Config} with the nearest spelling.
  ParameterSlot& at(std::string_view name);
  // A reference of an op list in the unit with `prefix` ("layers.3.", or empty at the ends).
  ParameterSlot& resolve(const std::string& prefix, const model::ParamRef& ref);

  // Host copies by canonical name: weights as the master holds them, in fp32.
  std::vector<float> weights(std::string_view name);
  std::vector<float> gradient(std::string_view name);
  // Sets the master and the live copy. Throws Error{Config} unless the sizes agree.
  void set_weights(std::string_view name, std::span<const float> values);

  void zero_gradients();
  double gradient_norm();
  // Clips and applies AdamW; returns the norm before clipping. Weight decay acts on matrices only.
  double update(const UpdateSettings& settings);

  // Optimizer moments, for checkpoints; laid out as the weights.
  std::vector<float> moment(std::string_view name, bool second);
  void set_moment(std::string_view name, bool second, std::span<const float> values);

  const model::ParameterTable& table() const { return table_; }
  CategoryBytes bytes() const { return bytes_; }
  static CategoryBytes bytes_of(const model::StaticState& state);

private:
  void lay_out(const std::vector<model::StateBuffer>& buffers);
  std::vector<float> read(const float* from, std::int64_t n);
  void initialise(ParameterSlot& slot, std::uint64_t seed);

  config::Model model_;
  Device& device_;
  Ledger& ledger_;
  model::ParameterTable table_;
  std::vector<ParameterSlot> slots_;
  std::map<std::string, size_t, std::less<>> index_;
  DeviceMemory live_, gradients_, optimizer_;
  Bytes gradient_bytes_ = 0;
  CategoryBytes bytes_;
  std::vector<Ledger::Ticket> tickets_;
};

} // namespace gdn::trainer
