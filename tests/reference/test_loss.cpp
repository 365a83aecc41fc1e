#include "core/error.h"
#include "reference/embedding.h"
#include "reference/linear.h"
#include "reference/loss.h"
#include "reference/optimizer.h"
#include "support.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

namespace {
const std::vector<int64> kLabels{3, -100, 0, 6, 6, -100, 2};
}

TEST_CASE("cross entropy: definition, ignored labels, gradient") {
  auto logits = random_tensor<double>(7, 8);
  Tensor<double> lse(7, 1), d(7, 8);
  double expected = 0;
  for (int64 t = 0; t < 7; ++t) {
    if (kLabels[std::size_t(t)] == kIgnoreLabel) continue;
    double sum = 0;
    for (int64 j = 0; j < 8; ++j) sum += std::exp(logits(t, j));
    expected -= std::log(std::exp(logits(t, kLabels[std::size_t(t)])) / sum);
  }
  auto loss = [&] { return 0.25 * cross_entropy_forward<double>(logits, kLabels, lse).sum; };
  CHECK(loss() == doctest::Approx(0.25 * expected).epsilon(1e-13));
  CHECK(count_valid(kLabels) == 5);
  cross_entropy_backward<double>(logits, kLabels, lse, 0.25, d);
  CHECK(gradient_error(logits, d, loss) < kNumericGradient);
  for (int64 j = 0; j < 8; ++j) CHECK(d(1, j) == 0);
  // Equal logits: log of the vocabulary.
  logits.zero();
  CHECK(cross_entropy_forward<double>(logits, kLabels, {}).sum == doctest::Approx(5 * std::log(8)));
}

TEST_CASE_TEMPLATE("every variant of the loss gives the same loss and gradients", T, double, float,
                   bf16) {
  using A = Acc<T>;
  const auto hidden = random_tensor<T>(7, 12), weight = random_tensor<T>(8, 12, 0.3);
  const double scale = 1.0 / 5, tolerance = std::is_same_v<T, double> ? 1e-13 : 1e-6;
  Tensor<T> logits(7, 8);
  linear_forward<T>(hidden, weight, {}, logits);
  Tensor<A> lse(7, 1);
  Tensor<T> full(7, 8);
  const auto reference = cross_entropy_forward<T>(logits, kLabels, lse);
  cross_entropy_backward<T>(logits, kLabels, lse, scale, full);

  Tensor<A> softmax(7, 8);
  Tensor<T> unfused(7, 8);
  CHECK(cross_entropy_softmax_forward<T>(logits, kLabels, softmax).sum == reference.sum);
  cross_entropy_softmax_backward<T>(softmax, kLabels, scale, unfused);
  const double rounding = std::is_same_v<T, bf16> ? 4e-3 : tolerance;
  CHECK(max_error(unfused, full) < rounding);

  Tensor<T> fused = logits;
  CHECK(cross_entropy_fused<T>(fused, kLabels, scale).sum == reference.sum);
  CHECK(max_error(fused, full) < rounding);

  Tensor<T> dhidden(7, 12), dhidden_full(7, 12);
  Tensor<A> dweight(8, 12), dweight_full(8, 12);
  linear_dgrad<T>(fused, weight, dhidden_full);
  linear_wgrad<T>(fused, hidden, dweight_full.zero());
  for (const int64 chunk : {1, 3, 7, 10}) {
    Tensor<T> scratch(chunk, 8);
    const auto loss = cross_entropy_chunked<T>(
        {hidden, weight, kLabels, scale, scratch, dhidden, dweight.zero()});
    CHECK(loss.sum == doctest::Approx(reference.sum).epsilon(1e-14));
    CHECK(loss.valid == 5);
    CHECK(same_bits(dhidden, dhidden_full));
    CHECK(max_error(dweight, dweight_full) < tolerance);
  }
}

TEST_CASE("a vocabulary split over ranks gives the loss and gradient of the whole") {
  const auto logits = random_tensor<double>(7, 8, 3);
  Tensor<double> lse(7, 1), whole(7, 8);
  const double expected = cross_entropy_forward<double>(logits, kLabels, lse).sum;
  cross_entropy_backward<double>(logits, kLabels, lse, 0.2, whole);
  Tensor<double> row_max(7, 1), exp_sum(7, 1), label(7, 1), one(7, 1), two(7, 1);
  row_max.fill(-1e300);
  exp_sum.zero(), label.zero();
  auto shard = [&](int64 rank) { return Mat<const double>(logits).columns(rank * 4, 4); };
  for (int64 rank = 0; rank < 2; ++rank) {
    vocab_row_max<double>(shard(rank), one);
    for (int64 t = 0; t < 7; ++t) row_max(t, 0) = std::max(row_max(t, 0), one(t, 0));
  }
  for (int64 rank = 0; rank < 2; ++rank) {
    vocab_exp_sum<double>(shard(rank), kLabels, rank * 4, row_max, one, two);
    for (int64 t = 0; t < 7; ++t) exp_sum(t, 0) += one(t, 0), label(t, 0) += two(t, 0);
  }
  const auto loss = vocab_loss(kLabels, row_max, exp_sum, label);
  CHECK(loss.valid == 5);
  CHECK(loss.sum == doctest::Approx(expected).epsilon(1e-13));
  Tensor<double> d(7, 8);
  for (int64 rank = 0; rank < 2; ++rank)
    vocab_backward<double>(shard(rank), kLabels, rank * 4, row_max, exp_sum, 0.2,
                           Grad<double>(d.view().columns(rank * 4, 4)));
  CHECK(max_error(d, whole) < 1e-13);
}

TEST_CASE("a label outside the vocabulary is named") {
  auto logits = random_tensor<float>(2, 4);
  CHECK_THROWS_WITH_AS(cross_entropy_forward<float>(logits, std::vector<int64>{1, 4}, {}),
                       "label of token 1 is 4, outside the vocabulary of 4", gdn::Error);
}

TEST_CASE("embedding: rows by id, gradients in token order, shards add up") {
  const std::vector<int64> ids{2, 0, 2, 5};
  const auto table = random_tensor<float>(6, 3), dy = random_tensor<float>(4, 3);
  Tensor<float> y(4, 3), d(6, 3), low(4, 3), high(4, 3), d_high(3, 3);
  embedding_forward<float>(ids, table, y);
  for (int64 j = 0; j < 3; ++j) CHECK(y(3, j) == table(5, j));
  embedding_backward<float>(ids, dy, d.zero());
  for (int64 j = 0; j < 3; ++j) {
    CHECK(d(2, j) == dy(0, j) + dy(2, j));
    CHECK(d(1, j) == 0);
  }
  embedding_forward<float>(ids, Mat<const float>(table).row_range(0, 3), low, 0, 6);
  embedding_forward<float>(ids, Mat<const float>(table).row_range(3, 3), high, 3, 6);
  for (std::size_t i = 0; i < 12; ++i) CHECK(low.data[i] + high.data[i] == y.data[i]);
  embedding_backward<float>(ids, dy, d_high.zero(), 3);
  for (int64 j = 0; j < 3; ++j) CHECK(d_high(2, j) == d(5, j));
  CHECK_THROWS_WITH_AS(embedding_forward<float>(std::vector<int64>{0, 6, 0, 0}, table, y),
                       "token 1 has id 6, outside the vocabulary of 6", gdn::Error);
}

TEST_CASE("AdamW: two steps by hand") {
  // lr 0.1, betas 0.9 / 0.99, eps 0, decay 0.5; w = 1, gradients 2 then -1.
  // Step 1: m = 0.2, v = 0.04, m^ = 2, v^ = 4: w = 1 - 0.1 (1 + 0.5) = 0.85.
  // Step 2: m = 0.08, v = 0.0496, m^ = 0.08 / 0.19, v^ = 0.0496 / 0.0199.
  std::vector<float> w{1}, m{0}, v{0};
  bf16 live;
  AdamW a{.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 0, .weight_decay = 0.5};
  adamw_step(a, std::vector<float>{2}, w, m, v, vector_view(&live, 1));
  CHECK(w[0] == doctest::Approx(0.85));
  CHECK(live == static_cast<bf16>(w[0]));
  a.step = 2;
  a.grad_scale = 0.5;
  adamw_step(a, std::vector<float>{-2}, w, m, v, vector_view(&live, 1));
  const double update = (0.08 / 0.19) / std::sqrt(0.0496 / 0.0199);
  CHECK(w[0] == doctest::Approx(0.85 - 0.1 * (update + 0.5 * 0.85)));
  CHECK(live == static_cast<bf16>(w[0]));
}

TEST_CASE("small updates survive in the masters, not in bf16") {
  std::vector<float> w{1}, m{0}, v{0};
  bf16 live(1.f);
  AdamW a{.lr = 1e-4, .eps = 1e-8, .weight_decay = 0};
  for (a.step = 1; a.step <= 10; ++a.step)
    adamw_step(a, std::vector<float>{1}, w, m, v, vector_view(&live, 1));
  CHECK(w[0] == doctest::Approx(1 - 10e-4).epsilon(1e-6));
  CHECK(static_cast<float>(live) == 1); // half a unit in the last place is 2e-3
}

TEST_CASE("gradient norm and clipping") {
  CHECK(sum_of_squares(std::vector<float>{3, 4}) == 25);
  CHECK(sum_of_squares(std::vector<float>(1 << 20, 1e-3f)) ==
        doctest::Approx(1.048576).epsilon(1e-6));
  CHECK(clip_factor(5, 1) == doctest::Approx(0.2));
  CHECK(clip_factor(0.5, 1) == 1);
  CHECK(clip_factor(5, 0) == 1);
}
