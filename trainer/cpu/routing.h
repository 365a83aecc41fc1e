#pragma once
#include <span>

#include "reference/moe.h"
#include "trainer/op_call.h"

// What the routers of both stacks share.
namespace gdn::trainer::cpu {

inline reference::Router router_of(const model::MoeAttr& a) {
  return {a.experts, a.top_k, a.sigmoid ? reference::Score::Sigmoid : reference::Score::Softmax, a.renormalise,
          a.forced_balance, 0};
}

// Load counters and auxiliary losses of one router, in the forward pass only.
void add_routing_totals(const OpCall& call, reference::ConstValues logits, std::span<const std::int64_t> counts);

} // namespace gdn::trainer::cpu
