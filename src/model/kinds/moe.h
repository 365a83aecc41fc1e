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

struct RowsOutputs {
  TensorId rows, prob;
};
// Rows to the ranks of their experts, sorted by local expert there; a gather over expert-tensor ranks
// where there are any. Backward is the reverse exchange and reads nothing.
RowsOutputs dispatch(Builder& b, std::string name, TensorId rows, TensorId prob, std::int64_t received,
                     const std::vector<Collective>& forward, const std::vector<Collective>& backward,
                     const MoeAttr& attr);
// The way back: [received, hidden] -> [sent, hidden].
TensorId combine(Builder& b, std::string name, TensorId rows, std::int64_t sent,
                 const std::vector<Collective>& forward, const std::vector<Collective>& backward, const MoeAttr& attr,
                 std::string out);

// One GEMM per local expert, as linear: dgrad reads weights, wgrad the input.
TensorId grouped_linear(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t out_cols,
                        const MoeAttr& attr, std::string out);

// act = silu(gate) * up * prob, [rows, 2 f], [rows] -> [rows, f]. Backward reads both inputs.
TensorId swiglu_prob(Builder& b, std::string name, TensorId fc1, TensorId prob, std::string out);

// y_t = sum of the token's rows. Backward reads the row map.
TensorId unpermute(Builder& b, std::string name, TensorId rows, TensorId row_map, std::int64_t tokens,
                   const MoeAttr& attr, std::string out);

} // namespace gdn::model
