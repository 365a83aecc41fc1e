#pragma once
#include <string>
#include <vector>

#include "model/builder.h"

// The ops of a model's ends. N = tokens of this rank before sequence parallelism, N_sp after it.
namespace gdn::model {

struct EmbeddingShape {
  std::int64_t hidden = 0, tp = 1;
  bool sequence_parallel = false; // the partial rows are reduce-scattered instead of reduced
  bool dropout = false;           // a mask of one byte an element is kept
};
// Rows of the table, ids [N] -> [N_sp, hidden]. Backward reads the ids (and the mask).
TensorId embedding(Builder& b, std::string name, TensorId ids, ParamRef weight, const EmbeddingShape& shape,
                   DType dtype, std::string out);

// Logits [N, local vocabulary]: a column-parallel linear whose output is counted as logits.
TensorId lm_head(Builder& b, std::string name, TensorId x, ParamRef weight, std::int64_t vocab, std::int64_t tp,
                 bool sequence_parallel, LossForm form, std::string out);

// Loss per token [N] fp32 of vocabulary-parallel logits. What is kept is attr.form:
// Softmax: fp32 softmax, a mask and an id a token; Overwrite: the gradient in the logits' own storage;
// Logits: the logits and one log-sum-exp a row.
TensorId cross_entropy(Builder& b, std::string name, TensorId logits, TensorId labels, const LossAttr& attr,
                       std::int64_t tp, std::string out);

// Head and loss at once, over chunks of tokens: x [N_sp, hidden] -> loss [N]. Keeps x and one
// log-sum-exp a row; the logits of a chunk are scratch, in both passes.
TensorId linear_cross_entropy(Builder& b, std::string name, TensorId x, TensorId labels, ParamRef weight,
                              const LossAttr& attr, std::int64_t tp, bool sequence_parallel, std::string out);

// The masked mean of the losses, and where backward starts.
void loss_sum(Builder& b, std::string name, const std::vector<TensorId>& losses);

} // namespace gdn::model
