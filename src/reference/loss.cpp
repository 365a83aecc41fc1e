#include "reference/loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/detail.h"
#include "reference/linear.h"

namespace gdn::reference {
namespace {

void expect_labels(std::span<const int64> labels, int64 tokens) {
  expect(static_cast<int64>(labels.size()) == tokens, "one label a token");
}

void check_label(int64 t, int64 label, int64 vocab) {
  if (label >= 0 && label < vocab) return;
  throw Error(ErrorCode::Config,
              "label of token " + std::to_string(t) + " is " + std::to_string(label) +
                  ", outside the vocabulary of " + std::to_string(vocab),
              "only " + std::to_string(kIgnoreLabel) + " marks a label to be ignored");
}

template <class T> double log_sum_exp(const T* x, int64 n) {
  Acc<T> top = -std::numeric_limits<Acc<T>>::infinity();
  for (int64 j = 0; j < n; ++j) top = std::max(top, up(x[j]));
  double sum = 0;
  for (int64 j = 0; j < n; ++j) sum += static_cast<double>(std::exp(up(x[j]) - top));
  return static_cast<double>(top) + std::log(sum);
}

// to = scale (softmax - onehot(label)), zeros when the label is ignored or the scale is 0.
template <class T>
void gradient_row(const T* x, int64 n, int64 label, double lse, double scale, T* to, Write write) {
  using A = Acc<T>;
  const A shift = static_cast<A>(lse), s = static_cast<A>(scale);
  for (int64 j = 0; j < n; ++j) {
    const A p = std::exp(up(x[j]) - shift) - (j == label ? 1 : 0);
    store(to[j], label == kIgnoreLabel ? A(0) : s * p, write);
  }
}

} // namespace

int64 count_valid(std::span<const int64> labels) {
  return static_cast<int64>(labels.size()) - std::count(labels.begin(), labels.end(), kIgnoreLabel);
}

template <class T>
LossSum cross_entropy_forward(In<T> logits, std::span<const int64> labels, Values lse) {
  expect_labels(labels, logits.rows);
  expect_shape(lse, logits.rows, 1, "log sum exp");
  LossSum loss;
  for (int64 t = 0; t < logits.rows; ++t) {
    const double l = log_sum_exp(logits.row(t), logits.cols);
    if (lse) lse.set(t, 0, l);
    if (labels[at(t)] == kIgnoreLabel) continue;
    check_label(t, labels[at(t)], logits.cols);
    loss.sum += l - static_cast<double>(logits(t, labels[at(t)]));
    ++loss.valid;
  }
  return loss;
}

template <class T>
void cross_entropy_backward(In<T> logits, std::span<const int64> labels, ConstValues lse,
                            double scale, Grad<T> dlogits) {
  expect_labels(labels, logits.rows);
  expect_shape(lse, logits.rows, 1, "log sum exp");
  expect_shape(dlogits, logits.rows, logits.cols, "logit gradient");
  for (int64 t = 0; t < logits.rows; ++t)
    gradient_row(logits.row(t), logits.cols, labels[at(t)], lse.get(t, 0), scale, dlogits.to.row(t),
                 dlogits.write);
}

template <class T>
LossSum cross_entropy_softmax_forward(In<T> logits, std::span<const int64> labels,
                                      Out<Acc<T>> softmax) {
  using A = Acc<T>;
  expect_shape(softmax, logits.rows, logits.cols, "softmax");
  for (int64 t = 0; t < logits.rows; ++t) {
    const A l = static_cast<A>(log_sum_exp(logits.row(t), logits.cols));
    for (int64 j = 0; j < logits.cols; ++j) softmax(t, j) = std::exp(up(logits(t, j)) - l);
  }
  return cross_entropy_forward<T>(logits, labels, {});
}

template <class T>
void cross_entropy_softmax_backward(In<Acc<T>> softmax, std::span<const int64> labels, double scale,
                                    Grad<T> dlogits) {
  using A = Acc<T>;
  expect_labels(labels, softmax.rows);
  expect_shape(dlogits, softmax.rows, softmax.cols, "logit gradient");
  const A s = static_cast<A>(scale);
  for (int64 t = 0; t < softmax.rows; ++t)
    for (int64 j = 0; j < softmax.cols; ++j) {
      const A p = softmax(t, j) - (j == labels[at(t)] ? 1 : 0);
      store(dlogits.to(t, j), labels[at(t)] == kIgnoreLabel ? A(0) : s * p, dlogits.write);
    }
}

template <class T>
LossSum cross_entropy_fused(Out<T> logits, std::span<const int64> labels, double scale) {
  expect_labels(labels, logits.rows);
  LossSum loss;
  for (int64 t = 0; t < logits.rows; ++t) {
    double lse = 0;
    const Mat<T> row = logits.row_range(t, 1);
    const LossSum one =
        cross_entropy_forward<T>(row, labels.subspan(at(t), 1), vector_view(&lse, 1));
    cross_entropy_backward<T>(row, labels.subspan(at(t), 1), vector_view(&lse, 1), scale,
                              Grad<T>(row));
    loss.sum += one.sum;
    loss.valid += one.valid;
  }
  return loss;
}

template <class T> LossSum cross_entropy_chunked(const ChunkedLoss<T>& p) {
  expect_labels(p.labels, p.hidden.rows);
  expect_shape(p.scratch, p.scratch.rows, p.weight.rows, "logits of a chunk");
  expect(p.scratch.rows > 0 || p.hidden.rows == 0, "chunked loss needs rows of scratch");
  LossSum loss;
  for (int64 first = 0; first < p.hidden.rows; first += p.scratch.rows) {
    const int64 n = std::min(p.scratch.rows, p.hidden.rows - first);
    const Mat<const T> hidden = p.hidden.row_range(first, n);
    const Mat<T> logits = p.scratch.row_range(0, n);
    linear_forward<T>(hidden, p.weight, {}, logits);
    const LossSum part =
        cross_entropy_fused<T>(logits, p.labels.subspan(at(first), at(n)), p.scale);
    loss.sum += part.sum;
    loss.valid += part.valid;
    if (p.dhidden)
      linear_dgrad<T>(logits, p.weight, Grad<T>(p.dhidden.to.row_range(first, n), p.dhidden.write));
    if (p.dweight) linear_wgrad<T>(logits, hidden, p.dweight);
  }
  return loss;
}

template <class T> void vocab_row_max(In<T> logits, Values row_max) {
  expect_shape(row_max, logits.rows, 1, "row maximum");
  for (int64 t = 0; t < logits.rows; ++t) {
    const T* x = logits.row(t);
    Acc<T> top = -std::numeric_limits<Acc<T>>::infinity();
    for (int64 j = 0; j < logits.cols; ++j) top = std::max(top, up(x[j]));
    row_max.set(t, 0, static_cast<double>(top));
  }
}

template <class T>
void vocab_exp_sum(In<T> logits, std::span<const int64> labels, int64 first, ConstValues row_max,
                   Values exp_sum, Values label_logit) {
  expect_labels(labels, logits.rows);
  for (int64 t = 0; t < logits.rows; ++t) {
    const Acc<T> top = static_cast<Acc<T>>(row_max.get(t, 0));
    double sum = 0;
    for (int64 j = 0; j < logits.cols; ++j)
      sum += static_cast<double>(std::exp(up(logits(t, j)) - top));
    exp_sum.set(t, 0, sum);
    const int64 j = labels[at(t)] - first;
    const bool here = labels[at(t)] != kIgnoreLabel && j >= 0 && j < logits.cols;
    label_logit.set(t, 0, here ? static_cast<double>(logits(t, j)) : 0);
  }
}

LossSum vocab_loss(std::span<const int64> labels, ConstValues row_max, ConstValues exp_sum,
                   ConstValues label_logit) {
  LossSum loss;
  for (int64 t = 0; t < static_cast<int64>(labels.size()); ++t) {
    if (labels[at(t)] == kIgnoreLabel) continue;
    loss.sum += row_max.get(t, 0) + std::log(exp_sum.get(t, 0)) - label_logit.get(t, 0);
    ++loss.valid;
  }
  return loss;
}

template <class T>
void vocab_backward(In<T> logits, std::span<const int64> labels, int64 first, ConstValues row_max,
                    ConstValues exp_sum, double scale, Grad<T> dlogits) {
  expect_labels(labels, logits.rows);
  expect_shape(dlogits, logits.rows, logits.cols, "logit gradient");
  for (int64 t = 0; t < logits.rows; ++t) {
    const bool ignored = labels[at(t)] == kIgnoreLabel;
    // A label of another shard matches no column here.
    const int64 label = ignored ? kIgnoreLabel : std::max<int64>(labels[at(t)] - first, -1);
    const double lse = row_max.get(t, 0) + std::log(exp_sum.get(t, 0));
    gradient_row(logits.row(t), logits.cols, label, lse, scale, dlogits.to.row(t), dlogits.write);
  }
}

#define GDN_LOSS(T)                                                                                \
  template LossSum cross_entropy_forward<T>(In<T>, std::span<const int64>, Values);                \
  template void cross_entropy_backward<T>(In<T>, std::span<const int64>, ConstValues, double,      \
                                          Grad<T>);                                                \
  template LossSum cross_entropy_softmax_forward<T>(In<T>, std::span<const int64>, Out<Acc<T>>);   \
  template void cross_entropy_softmax_backward<T>(In<Acc<T>>, std::span<const int64>, double,      \
                                                  Grad<T>);                                        \
  template LossSum cross_entropy_fused<T>(Out<T>, std::span<const int64>, double);                 \
  template LossSum cross_entropy_chunked<T>(const ChunkedLoss<T>&);                                \
  template void vocab_row_max<T>(In<T>, Values);                                                   \
  template void vocab_exp_sum<T>(In<T>, std::span<const int64>, int64, ConstValues, Values,        \
                                 Values);                                                          \
  template void vocab_backward<T>(In<T>, std::span<const int64>, int64, ConstValues, ConstValues,  \
                                  double, Grad<T>);
GDN_LOSS(bf16)
GDN_LOSS(float)
GDN_LOSS(double)
#undef GDN_LOSS

} // namespace gdn::reference
