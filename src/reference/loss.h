#pragma once
#include <span>

#include "reference/view.h"

// Cross entropy over the vocabulary; label -100 is ignored. The caller divides: mean over the valid
// labels is sum / valid, and `scale` (upstream gradient / valid) multiplies the gradient.
namespace gdn::reference {

inline constexpr int64 kIgnoreLabel = -100;

struct LossSum {
  double sum = 0;  // of -log p(label), over valid labels
  int64 valid = 0; // labels that are not ignored
};

int64 count_valid(std::span<const int64> labels);

// Full: logits [tokens, vocab] stay; lse [tokens, 1] = log sum exp.
template <class T>
LossSum cross_entropy_forward(In<T> logits, std::span<const int64> labels, Values lse);
// dlogits = scale (softmax - onehot), zero on ignored rows; may be the storage of the logits.
template <class T>
void cross_entropy_backward(In<T> logits, std::span<const int64> labels, ConstValues lse,
                            double scale, Grad<T> dlogits);

// Unfused: the softmax itself is kept in the arithmetic type.
template <class T>
LossSum cross_entropy_softmax_forward(In<T> logits, std::span<const int64> labels,
                                      Out<Acc<T>> softmax);
template <class T>
void cross_entropy_softmax_backward(In<Acc<T>> softmax, std::span<const int64> labels, double scale,
                                    Grad<T> dlogits);

// Fused: the gradient is written over the logits in the forward pass.
template <class T>
LossSum cross_entropy_fused(Out<T> logits, std::span<const int64> labels, double scale);

// Chunked over tokens: head and loss together, logits [chunk, vocab] in `scratch` only.
template <class T> struct ChunkedLoss {
  Mat<const T> hidden; // [tokens, hidden]
  Mat<const T> weight; // [vocab, hidden]
  std::span<const int64> labels;
  double scale = 0;
  Mat<T> scratch;      // [chunk, vocab]; its rows are the chunk
  Grad<T> dhidden;     // optional
  Mat<Acc<T>> dweight; // optional, accumulates
};
template <class T> LossSum cross_entropy_chunked(const ChunkedLoss<T>& p);

// Vocabulary split over ranks: this shard holds columns first .. first + logits.cols - 1. Three
// steps with a reduction after each of the first two: row maximum (max), sum of exponentials and
// label logit (sum), gradient. row_max, exp_sum, label_logit [tokens, 1].
template <class T> void vocab_row_max(In<T> logits, Values row_max);
template <class T>
void vocab_exp_sum(In<T> logits, std::span<const int64> labels, int64 first, ConstValues row_max,
                   Values exp_sum, Values label_logit);
LossSum vocab_loss(std::span<const int64> labels, ConstValues row_max, ConstValues exp_sum,
                   ConstValues label_logit);
template <class T>
void vocab_backward(In<T> logits, std::span<const int64> labels, int64 first, ConstValues row_max,
                    ConstValues exp_sum, double scale, Grad<T> dlogits);

} // namespace gdn::reference
