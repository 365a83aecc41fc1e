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
#include "trainer/comm/ranks.h"
#include "trainer/device.h"
#include "trainer/ledger.h"

namespace gdn::trainer {

// Elements [global, global + count) of a whole parameter, at `local` in the memory of a rank.
struct HeldStretch {
  std::int64_t global = 0, local = 0, count = 0;
};
// What the rank at `place` holds of a parameter, in the order in which it stores it.
std::vector<HeldStretch> held_stretches(const model::Parameter& parameter, const config::Parallel& parallel, const Place& place);

// One parameter on this rank and what belongs to it: name(), parameter->shape and held_stretches() say which
// part of the whole it is. Pointers are device memory.
struct ParameterSlot {
  const model::Parameter* parameter = nullptr;
  std::int64_t elements = 0;      // of this rank
  DType dtype = DType::BF16;
  std::byte* live = nullptr;      // what ops read, in `dtype`
  float* gradient = nullptr;      // nullptr: frozen
  // Optimizer state of elements [owned_first, owned_first + owned): all of them, unless the distributed
  // optimizer divides them over the ranks with the same weights. Pointers are to the first owned one;
  // master is `live` itself for fp32 parameters.
  float *master = nullptr, *m = nullptr, *v = nullptr;
  std::int64_t owned_first = 0, owned = 0;
  bool copy = false;              // the last stage's copy of the word embedding

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
// (model/static_state.h), each in one allocation. Fed to the ledger at construction. With several ranks,
// functions marked "together" are called by all of them at the same time.
class Parameters {
public:
  // Throws Error{Config} for settings that are not executed (executed.h), and for frozen parameters.
  Parameters(const config::Model& model, const config::Run& run, Device& device, Ledger& ledger, const Ranks& ranks);
  Parameters(const Parameters&) = delete;
  ~Parameters();

  // Draws every weight from (seed, its name): the same whatever the topology.
  void initialise(std::uint64_t seed);

  const std::vector<ParameterSlot>& slots() const { return slots_; }
  // By canonical name. Throws Error{Config} with the nearest spelling.
  ParameterSlot& at(std::string_view name);
  // A reference of an op list in the unit with `prefix` ("layers.3.", or empty at the ends).
  ParameterSlot& resolve(const std::string& prefix, const model::ParamRef& ref);

  // Host copies by canonical name, of this rank's part: weights as the master holds them, in fp32. Together
  // (the ranks that hold the parameter).
  std::vector<float> weights(std::string_view name);
  std::vector<float> gradient(std::string_view name);
  // Of this rank's gradient, without moving it.
  kernels::Fingerprint gradient_fingerprint(const ParameterSlot& slot);
  // Sets the master and the live copy, from this rank's part. Throws Error{Config} unless the sizes agree.
  void set_weights(std::string_view name, std::span<const float> values);

  void zero_gradients();
  // Sums over the ranks that saw other tokens or other heads, once a step. Afterwards a rank has the sums of
  // the elements whose optimizer state it owns. Together.
  void reduce_gradients();
  double gradient_norm(); // of the whole model; together
  // Clips and applies AdamW, then gathers the weights; returns the norm before clipping. Weight decay acts
  // on matrices only. Together.
  double update(const UpdateSettings& settings);

  // Optimizer moments, for checkpoints; laid out as the weights. Reading them: together.
  std::vector<float> moment(std::string_view name, bool second);
  void set_moment(std::string_view name, bool second, std::span<const float> values);

  const model::ParameterTable& table() const { return table_; }
  CategoryBytes bytes() const { return bytes_; }
  static CategoryBytes bytes_of(const model::StaticState& state);
  // Whether first and last pipeline stage both hold the word embedding, and sum its gradients.
  static bool copies_embedding(const config::Model& model, const config::Run& run);

private:
  // A contiguous run of parameters whose gradients are summed over the same ranks.
  struct Bucket {
    std::byte* live;
    float* gradient;
    DType dtype;
    std::int64_t elements, shard; // shard: elements that this rank owns, a whole bucket or its part
    Communicator* replicas;
  };
  void lay_out(const std::vector<model::StateBuffer>& buffers);
  std::vector<float> read(const float* from, std::int64_t n);
  void set_weights(const ParameterSlot& slot, std::span<const float> values);
  std::vector<float> gather(const ParameterSlot& slot, const float* owned);
  bool is_partial(const ParameterSlot& slot) const;
  bool is_counted(const ParameterSlot& slot) const;
  void initialise(ParameterSlot& slot, std::uint64_t seed);

  config::Model model_;
  config::Run run_;
  Device& device_;
  Ledger& ledger_;
  const Ranks& ranks_;
  model::ParameterTable table_;
  std::vector<ParameterSlot> slots_;
  std::vector<Bucket> buckets_;
  std::map<std::string, size_t, std::less<>> index_;
  DeviceMemory live_, gradients_, optimizer_;
  Bytes gradient_bytes_ = 0;
  CategoryBytes bytes_;
  std::vector<Ledger::Ticket> tickets_;
};

} // namespace gdn::trainer
