#pragma once
#include "kernels/moe/router.h"
#include "trainer/cuda/ops.h"

// What the routers of both stacks share.
namespace gdn::trainer::cuda {

inline kernels::Route route_of(const model::MoeAttr& a) { return {static_cast<int>(a.top_k), a.renormalise, a.forced_balance}; }

// Factor of the balance loss: coef E / (k T^2).
double balance_factor(const model::MoeAttr& a, std::int64_t tokens);

// Load counters and auxiliary losses of one router, in the forward pass only. `summed`: the counts are those of all ranks that share
// the tokens, the same on each, not of this one alone. `losses`: one fp32 a token of scratch.
void add_routing_totals(const OpCall& c, Engine& e, const Matrix& logits, const std::int32_t* counts, bool summed, void* losses);

} // namespace gdn::trainer::cuda
