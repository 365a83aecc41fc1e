#pragma once
#include "kernels/common/matrix.h"

// A vocabulary whose rows (of a table) or columns (of logits) are divided over ranks.
namespace gdn::kernels {

// ids [N] Int64 as places in this rank's part of `count`, which starts at `first`: -1 where the id is another
// rank's; -100, a label that is ignored, stays.
void local_ids(const Matrix& ids, std::int64_t first, std::int64_t count, const Matrix& to, const LaunchContext& context);

// Per row of logits, of the columns seen so far, [N] each: their maximum, the sum of exponentials above it, and
// the label's logit, 0 where the label is another rank's.
struct VocabularyParts {
  float *top = nullptr, *sum = nullptr, *label = nullptr;
};
// Of this rank's columns; labels: local_ids.
void vocabulary_parts(const Matrix& logits, const Matrix& labels, const VocabularyParts& parts, const LaunchContext& context);
// sum *= exp(own - top): sums above this rank's maximum `own` become sums above that of all.
void vocabulary_rescale(const float* own, const VocabularyParts& parts, std::int64_t rows, const LaunchContext& context);
// Of all ranks, whose [top | sum | label] lie one behind the other in `gathered` [ranks, 3, rows].
void vocabulary_merge(const float* gathered, int ranks, std::int64_t rows, const VocabularyParts& parts, const LaunchContext& context);

// From the parts of all ranks; every output may be absent. loss, lse [N, 1]; softmax, gradient = softmax - onehot
// [N, V] of this rank's columns (the gradient may be the logits themselves); mask [N] (Bool: ignored); label_ids [N]
// (0 where ignored).
struct VocabularyLossParams {
  VocabularyParts parts = {};
  Matrix logits = {}, labels = {}; // labels: local_ids
  Matrix loss = {}, lse = {}, softmax = {}, gradient = {}, mask = {}, label_ids = {};
};
void vocabulary_loss(const VocabularyLossParams& params, const LaunchContext& context);

} // namespace gdn::kernels
