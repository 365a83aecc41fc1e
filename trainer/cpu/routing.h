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

inline std::int64_t top_k_of(const OpCall& call) { return call.attr<model::MoeAttr>().top_k; }

// reference::route_forward on this rank's tokens. Forced balance deals out the slots of all tokens in turn,
// whoever holds them.
void route_tokens(const OpCall& call, View logits, View index, View weight, View scores);

// Ranks that share the tokens of a micro-batch; a router's losses are means over the tokens of all.
std::int64_t token_shards(const OpCall& call);
bool is_first_token_shard(const OpCall& call);

// Load counters and auxiliary losses of one router, in the forward pass only. `summed`: the counts are those of all ranks that
// share the tokens, the same on each, not of this one alone.
void add_routing_totals(const OpCall& call, reference::ConstValues logits, std::span<const std::int64_t> counts, bool summed);

} // namespace gdn::trainer::cpu
