#pragma once
#include <string_view>
#include <vector>

#include "model/provider.h"

// The `upstream` provider: what FLA (bc3b101d), Transformer Engine, cuBLAS, cuDNN and PyTorch need
// and cost when they run an op of stack `megatron`. Workspaces of FLA's rule are exact [read and
// measured]; the others are read in their sources or inferred.
namespace gdn::model::upstream {

using WorkFunction = Work (*)(const OpList& list, const Op& op, int step);

struct Entry {
  OpKind kind;
  WorkFunction work;       // null: stack megatron has no such op, for the reason given
  std::string_view reason;
};
const std::vector<Entry>& entries(); // one for every kind, in the order of the enum

// ------------------------------------------------------------------ shared by the entries ----

inline bool is_forward(int step) { return step < 0; }
inline const Step& step_of(const Op& op, int step) { return op.steps[static_cast<size_t>(step)]; }

// Bytes of what a run touches, every tensor once: inputs, outputs and weights in forward; what the
// step reads and writes in backward, weights where it makes an input's gradient, and fp32 weight
// gradients read and written.
Bytes touched(const OpList& list, const Op& op, int step);

// A memory-bound run: traffic and size are `touched` times `passes`.
Work memory_bound(const OpList& list, const Op& op, int step, Family family, Bytes scratch = 0, int kernels = 1,
                  double passes = 1);

// upstream_linear.cpp
Work norm(const OpList&, const Op&, int);
Work linear(const OpList&, const Op&, int);
Work grouped_linear(const OpList&, const Op&, int);
// upstream_gdn.cpp
Work conv(const OpList&, const Op&, int);
Work l2_norm(const OpList&, const Op&, int);
Work rule(const OpList&, const Op&, int);
Work gdn2_gates(const OpList&, const Op&, int);
Work gdn2_rule(const OpList&, const Op&, int);
Work gated_norm(const OpList&, const Op&, int);
// upstream_attention.cpp
Work core_attention(const OpList&, const Op&, int);
// upstream_moe.cpp
Work router(const OpList&, const Op&, int);
Work permute(const OpList&, const Op&, int);
Work exchange_rows(const OpList&, const Op&, int); // dispatch and combine
Work unpermute(const OpList&, const Op&, int);
// upstream_native.cpp
Work gdn_pre(const OpList&, const Op&, int); // and its GDN2 form
Work attention_pre(const OpList&, const Op&, int);
Work compact_router(const OpList&, const Op&, int);
Work sort_slots(const OpList&, const Op&, int);
Work shared_score(const OpList&, const Op&, int);
// upstream_ends.cpp
Work embedding(const OpList&, const Op&, int);
Work cross_entropy(const OpList&, const Op&, int);
Work linear_cross_entropy(const OpList&, const Op&, int);

} // namespace gdn::model::upstream
