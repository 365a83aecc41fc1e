#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "model/op.h"
#include "program/trace.h"
#include "trainer/comm/token_shards.h"

namespace gdn::trainer {

class Ranks;

// A matrix in memory: rows x cols elements, `stride` elements from row to row.
struct View {
  std::byte* data = nullptr;
  DType dtype = DType::BF16;
  std::int64_t rows = 0, cols = 0, stride = 0;
  explicit operator bool() const { return data != nullptr; }
};

// A gradient to be written, or added to what is there.
struct GradView {
  View to;
  bool accumulate = false;
  explicit operator bool() const { return to.data != nullptr; }
};

struct SequenceStates; // decode/states.h

// What an op may know besides its operands: which step and micro-batch runs, and its data.
struct MicroBatch {
  std::span<const std::int64_t> ids, labels;  // [tokens]; label -100 is ignored
  std::span<const std::int64_t> sequences;    // offsets of the packed sequences, 0 .. tokens
  std::int64_t index = 0;
  const TokenShards* shards = nullptr;        // who holds which tokens under context parallelism; else nullptr
  const SequenceStates* states = nullptr;     // decoding: what the tokens before left behind; absent in training
};

// Collected during a step; ops with effects add to it in the forward pass only.
struct StepTotals {
  double loss_sum = 0;         // of -log p over valid labels, all micro-batches
  double mtp_sum = 0;          // weighted sums of the multi-token losses
  std::int64_t valid = 0;      // labels seen
  double aux_loss = 0;         // balance and z losses, mean over micro-batches
  std::vector<std::int64_t> expert_load; // slots per expert, all layers and micro-batches
};

struct StepContext {
  std::uint64_t seed = 0, step = 0;
  std::span<const MicroBatch> micro_batches;
  double loss_scale = 1;       // d(loss)/d(sum over labels): 1 / valid labels of the step
  double aux_scale = 1;        // 1 / micro-batches
  StepTotals* totals = nullptr;
  const Ranks* ranks = nullptr; // whom collectives reach; nullptr: a rank alone
};

// Small tables that a stack keeps on the host as well (rows per expert), by op of a unit and micro-batch.
using HostTables = std::map<int, std::vector<std::int64_t>>;

// One run of an op or backward step with the memory it declared, and nothing else: asking for an
// undeclared tensor throws Error{Internal}, and so does ending without having used a declared one.
class OpCall {
public:
  struct Operand {
    program::Access access;
    std::byte* buffer = nullptr;
    model::TensorId named = -1; // the tensor whose shape the gradient buffer has
    View placed = {};           // where it lies, for operands that are no buffer of their own
  };
  struct Parameter {
    View value;
    View gradient;  // fp32; absent where the step does not write it
  };

  OpCall(const model::OpList& list, const program::Event& event, std::vector<Operand> operands,
         std::vector<Parameter> parameters, std::span<std::byte> scratch, const StepContext& context,
         int micro_batch, HostTables& tables);

  const model::OpList& list() const { return list_; }
  const model::Op& op() const { return op_; }
  int step() const { return event_.step; } // -1: forward
  const model::Step& backward_step() const { return op_.steps[static_cast<size_t>(event_.step)]; }
  program::Pass pass() const { return event_.pass; }
  const StepContext& context() const { return context_; }
  const MicroBatch& batch() const { return context_.micro_batches[static_cast<size_t>(micro_batch_)]; }
  int micro_batch() const { return micro_batch_; }
  // The group of this rank; throws Error{Internal} for a rank alone.
  Communicator& group(model::Group kind) const;
  // Tokens of this rank and, under context parallelism, where in their sequences they stand (else empty).
  std::span<const std::int64_t> local_sequences() const;
  std::span<const std::int64_t> local_positions() const;
  int op_index() const { return event_.op; }
  std::vector<std::int64_t>& host_table(int op) const { return tables_[op]; }
  template <class A> const A& attr() const { return std::get<A>(op_.attr); }

  // Forward tensors: input i, output i (written in forward, read in backward).
  View in(size_t i) const { return forward(op_.inputs.at(i)); }
  View out(size_t i) const { return forward(op_.outputs.at(i)); }
  // d:output i to be read. Throws Error{Internal} naming it when nothing downstream contributed; `if_any`: for steps
  // that do without, absent then.
  View d_out(size_t i) const;
  View d_out_if_any(size_t i) const;
  // d:input i to be written; absent when nobody needs it.
  GradView d_in(size_t i) const;

  // Parameter i as a [rows, cols] matrix; throws unless it has that many elements.
  View param(size_t i, std::int64_t rows, std::int64_t cols) const;
  // Its fp32 gradient, which accumulates; absent when the parameter is frozen.
  View param_grad(size_t i, std::int64_t rows, std::int64_t cols) const;

  // Scratch of at least `bytes`; throws Error{Internal} when less was declared.
  std::span<std::byte> scratch(Bytes bytes) const;

  // Marks every operand as used: for ops that only rename memory.
  void use_all() const;
  // Throws Error{Internal} naming a declared operand that was never used.
  void check_all_used() const;

  const std::vector<Operand>& operands() const { return operands_; }
  View view_of(const Operand& operand) const;
  std::string name() const; // "in_proj.wgrad"

private:
  View forward(model::TensorId t) const;
  const Operand* find(model::TensorId t, bool gradient, bool write) const;
  [[noreturn]] void undeclared(const std::string& what) const;

  const model::OpList& list_;
  const model::Op& op_;
  const program::Event& event_;
  std::vector<Operand> operands_;
  std::vector<Parameter> parameters_;
  std::span<std::byte> scratch_;
  const StepContext& context_;
  int micro_batch_;
  HostTables& tables_;
  mutable std::vector<char> used_, used_gradient_;
  mutable bool used_scratch_ = false;
};

// A contiguous matrix under another number of rows; strided ones must have it already.
View with_rows(const OpCall& c, View v, std::int64_t rows);
inline GradView with_rows(const OpCall& c, GradView g, std::int64_t rows) { return {with_rows(c, g.to, rows), g.accumulate}; }

} // namespace gdn::trainer
