#pragma once
#include <string>
#include <vector>

#include "model/builder.h"

// The routed half of a mixture of experts, in the dense form (probabilities and map [T, E]).
// T = tokens of this rank, k = top_k, E = experts.
namespace gdn::model {

struct RouteOutputs {
  TensorId probs; // [T, E], weights of the chosen experts, 0 elsewhere; dtype of the logits
  TensorId map;   // [T, E] bool
};
// Scores, top-k, weights, scatter into the dense form. Kept: the scores (all E where they are taken
// before top-k, else the chosen k), the indices of top-k and of the scatter, the scores of the
// auxiliary loss where its coefficient is > 0, the logits where a z-loss reads them. `pin` (a reason)
// holds probs and map as well.
RouteOutputs route(Builder& b, std::string name, TensorId logits, const MoeAttr& attr, std::string pin);

struct PermuteOutputs {
  TensorId rows;    // [rows, hidden], by expert
  TensorId prob;    // [rows], weight of each row
  TensorId row_map; // fused: [T, 2E+1] int32; else [T, k] int64
};
// Copies each token once per chosen expert. Backward reads the row map, not the tokens.
PermuteOutputs permute(Builder& b, std::string name, TensorId x, const RouteOutputs& routing, std::int64_t rows,
                       bool fused, const MoeAttr& attr);

// The exchanges around the experts: over expert ranks, then gathered over expert-tensor ranks.
struct Exchange {
  std::vector<Collective> out, back; // towards the experts, and home
  bool any() const { return !out.empty(); }
};
// `row`: bytes of one row.
Exchange expert_exchange(std::int64_t ep, std::int64_t etp, std::int64_t sent, std::int64_t received, Bytes row);

struct RowsOutputs {
  TensorId rows, prob;
  TensorId offsets = -1, counts = -1; // native: of the local experts, and of every (rank, local expert)
};
// Rows to the ranks of their experts, sorted by local expert there; a gather over expert-tensor ranks
// where there are any. Backward is the reverse exchange and reads nothing. Native keeps the row counts
// on the device: `offsets` [E + 1] of the rows sent is an input, offsets [E_local + 1] and counts
// [ep * etp * E_local] of the rows received are outputs, and backward reads them.
RowsOutputs dispatch(Builder& b, std::string name, TensorId rows, TensorId prob, std::int64_t received,
                     const std::vector<Collective>& forward, const std::vector<Collective>& backward,
                     const MoeAttr& attr, TensorId offsets = -1);
// The way back: [received, hidden] -> [sent, hidden]. Native: `sizes` are the tensors that say how many
// rows go where (offsets of the rows sent, counts of those received); both passes read them.
TensorId combine(Builder& b, std::string name, TensorId rows, std::int64_t sent,
                 const std::vector<Collective>& forward, const std::vector<Collective>& backward, const MoeAttr& attr,
                 std::string out, const std::vector<TensorId>& sizes = {});

// One GEMM per local expert, as linear: dgrad reads weights, wgrad the input. Native gives the first row
// of every expert as a tensor, `offsets` [E_local + 1] int32, and makes wgrad first: the input goes
// before its gradient, as large, is made.
TensorId grouped_linear(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t out_cols,
                        const MoeAttr& attr, std::string out, TensorId offsets = -1);

// act = silu(gate) * up * prob, [rows, 2 f], [rows] -> [rows, f]. Backward reads both inputs. Native's
// shared expert is this with the score of its gate as probability.
TensorId swiglu_prob(Builder& b, std::string name, TensorId fc1, TensorId prob, std::string out);

// y_t = sum of the token's rows, in order of its slots. Backward reads the row map.
TensorId unpermute(Builder& b, std::string name, TensorId rows, TensorId row_map, std::int64_t tokens,
                   const MoeAttr& attr, std::string out);

} // namespace gdn::model
