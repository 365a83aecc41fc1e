#pragma once
#include <string>

#include "model/builder.h"

// The routed half of a mixture of experts in native's compact form: k slots a token, no [T, E] tensor
// but the logits. T = tokens of this rank, k = top_k, E = experts; slot (t, j) is token t's j-th expert.
namespace gdn::model {

struct TopKOutputs {
  TensorId weights; // [T, k] fp32, in descending order of score
  TensorId experts; // [T, k] int32; ties by lowest index
};
// Scores, choice, weights. attr.forced_balance: slots go round-robin over the experts and only the
// weights come from the logits. Backward reads weights and experts where the weights are a softmax over
// the chosen logits alone, else the logits and the experts. Sigmoid scores are chosen with a bias that
// no gradient reaches (`expert_bias`).
TopKOutputs top_k(Builder& b, std::string name, TensorId logits, const MoeAttr& attr, const ParamRef* expert_bias = nullptr);

struct SortOutputs {
  TensorId row_map;  // [T, k] int32: row of each slot, -1 where a full expert dropped it
  TensorId offsets;  // [E + 1] int32: first row of each expert
  TensorId row_prob; // [rows] fp32: weight of each row, 0 on padding
  TensorId counts;   // [E] int32: slots of each expert, dropped ones included
};
// Stable counting sort of the slots by expert. `rows` = T k, or E * attr.capacity where experts are
// padded. Backward gathers d:weights through the row map.
SortOutputs sort_slots(Builder& b, std::string name, const TopKOutputs& routing, std::int64_t rows, const MoeAttr& attr);

// Load counters and the values of the auxiliary losses go to the step's log, in the forward pass only.
// `counts` [E]: slots of each expert on all ranks that share the sequences. Backward adds the losses'
// gradient to d:logits; it reads both, and does not exist where both coefficients are 0.
void router_loss(Builder& b, std::string name, TensorId logits, TensorId counts, const MoeAttr& attr);

// Copies each token to the rows of its slots: x [T, h] -> [rows, h], zeros on padding. Backward sums
// each token's rows in order of its slots; it reads the row map.
TensorId gather_rows(Builder& b, std::string name, TensorId x, TensorId row_map, std::int64_t rows, const MoeAttr& attr,
                     std::string out);

// sigmoid(x . w), one fp32 score a row. Under sequence parallelism (`tp` > 1) the scores of all TP ranks
// are gathered, for a column-parallel reader that gathers x; each rank's part of d:score is then summed.
// Backward reads x and the scores.
TensorId shared_score(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t tp, bool sequence_parallel,
                      std::string out);

} // namespace gdn::model
