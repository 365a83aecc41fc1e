#pragma once
#include <string_view>

#include "model/provider.h"

// The provider `own`: what our CUDA kernels need and cost, op kind by op kind, without CUDA. The cuda device hands
// out exactly this scratch, so what is counted is what runs.
namespace gdn::kernels {

struct OwnEntry {
  model::OpKind kind;
  model::Work (*work)(const model::OpList& list, const model::Op& op, int step); // null: no kernel, for the reason given
  std::string_view reason;
};
const OwnEntry& own_entry(model::OpKind kind); // there is one for every kind
// The entry's work, and what other ranks ask for (ranks.h).
model::Work own_work(const model::OpList& list, const model::Op& op, int step);

const model::Provider& own_provider();

// Whose kernels a stack is planned with: ours for `native`, those of a Megatron user for `megatron`.
const model::Provider& provider_of(std::string_view stack);

// Sizes of one Rule or GdnPre op: tokens, planned sequences, heads, widths.
struct GdnShape;
GdnShape gdn_shape_of(const model::OpList& list, const model::Op& op);

} // namespace gdn::kernels
