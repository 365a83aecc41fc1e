#pragma once
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "plan/workload.h"
#include "trainer/comm/ranks.h"
#include "trainer/executor.h"
#include "trainer/step_program.h"

namespace gdn::trainer {

// Tokens of one micro-batch: packed sequences, labels already shifted (-100: ignored).
struct Batch {
  std::vector<std::int64_t> ids, labels;
  std::vector<std::int64_t> sequences; // offsets, from 0 to the number of tokens
};
// Throws Error{Config} naming what is wrong: sizes, offsets that do not strictly increase or end
// elsewhere, ids or labels outside the vocabulary.
void check_batch(const Batch& batch, std::int64_t tokens, std::int64_t vocab);
// Throws Error{Config} if micro-batch `index` has more sequences than the scratch of `run` has room for (model::most_sequences):
// how many it has, the bound, the key that raises it.
void check_sequences(const Batch& batch, const config::Run& run, std::int64_t index);
// `batch` sequences of `seq` tokens each.
std::vector<std::int64_t> dense_sequences(std::int64_t batch, std::int64_t seq);

struct StepResult {
  double loss = 0;       // mean over valid labels
  double aux_loss = 0;   // balance and z losses; multi-token losses, weighted
  double mtp_loss = 0;
  std::int64_t tokens = 0, valid = 0;
  std::vector<std::int64_t> expert_load;
  Ledger::Peak peak;     // during forward and backward, parameters and optimizer included
  Seconds seconds = 0;   // forward and backward
};

// A model on a device under a run: weights that stay, and one program at a time. Everything that
// runs a step, measures it or compares two ways of running it is built on this.
class Session {
public:
  // `budget`: bytes that may be allocated; less where less is free once the ranks are connected. `laid_out_for`: whose scratch the program reserves, if not the
  // device's own provider; so the CPU can check what a GPU run would hold, byte by byte. Throws Error{Config} for what is priced but not executed.
  // `ranks`: this rank of several, which outlives the session; not given: a rank alone, and Error{Config}
  // for a run of more. With several ranks all of them make their sessions and run their steps together.
  Session(config::Model model, config::Run run, Device& device, Bytes budget = std::numeric_limits<Bytes>::max(),
          const model::Provider* laid_out_for = nullptr, const Ranks* ranks = nullptr);

  // Lays out and allocates the program of `setting`, in place of the one before. Throws
  // Error{DoesNotFit} naming the largest tensors and the setting that would fit.
  void use(const plan::Setting& setting, std::optional<Checks> checks = {}); // absent: all, but no poison where it would wait

  // Zeroes the gradients, then forward and backward of every micro-batch and the sums over ranks. `step` and
  // `seed` feed the random numbers; batches are checked first. With several ranks `batches` are the
  // micro-batches of this data-parallel rank, whole whatever the other parallelisms; results are those of
  // the whole step, but for the peak and the time.
  StepResult run(const std::vector<Batch>& batches, std::uint64_t step = 0, std::uint64_t seed = 0,
                 const Observer& observer = {});

  const config::Model& model() const { return model_; }
  const config::Run& run_settings() const { return run_; }
  Device& device() { return device_; }
  Ledger& ledger() { return ledger_; }
  const Ranks& ranks() const { return *ranks_; }
  Parameters& parameters() { return *parameters_; }
  plan::Workload& workload() { return *workload_; }
  const program::Program& program() const { return *program_; }
  Executor& executor() { return *executor_; }
  Bytes arena_bytes() const { return executor_ ? executor_->arena_bytes() : 0; }

private:
  Bytes may_take() const; // state and arena together

  config::Model model_;
  config::Run run_;
  Device& device_;
  Bytes budget_;
  std::unique_ptr<Ranks> alone_; // where no ranks are given
  const Ranks* ranks_;
  Ledger ledger_;
  std::unique_ptr<plan::Workload> workload_;
  std::unique_ptr<Parameters> parameters_;
  std::unique_ptr<program::Program> program_;
  std::unique_ptr<Executor> executor_;
};

// One forward and backward with what a comparison with another implementation needs, on the host.
struct Trace {
  StepResult result;
  std::vector<std::vector<float>> hidden; // [tokens * hidden] entering layer 0, leaving layer 0, 1, ...
  std::vector<float> normed;              // [tokens * hidden] after the final norm
  std::vector<float> logits;              // [tokens * padded vocabulary]; empty when no tensor holds them
};
// Gradients are in session.parameters(). The session must be using a setting of one micro-batch.
Trace run_traced(Session& session, const Batch& batch);

} // namespace gdn::trainer
