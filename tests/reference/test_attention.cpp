#include "reference/attention.h"
#include "support.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

namespace {

// Softmax attention of one query row over explicit keys, by the definition.
double brute_force(const AttentionShape& s, const Tensor<double>& q, const Tensor<double>& k,
                   const Tensor<double>& v, int64 row, int64 first, int64 visible, int64 h,
                   int64 c) {
  const int64 d = s.head_dim, kv = h / (s.heads / s.kv_heads);
  double top = 0, bottom = 0;
  for (int64 j = first; j < first + visible; ++j) {
    double score = 0;
    for (int64 i = 0; i < d; ++i) score += q(row, h * d + i) * k(j, kv * d + i);
    const double p = std::exp(score / std::sqrt(static_cast<double>(d)));
    top += p * v(j, kv * d + c);
    bottom += p;
  }
  return top / bottom;
}

} // namespace

TEST_CASE("causal grouped-query attention: definition and gradients") {
  const AttentionShape shape{.heads = 4, .kv_heads = 2, .head_dim = 6};
  const auto cu = offsets({3, 0, 70, 1});
  auto q = random_tensor<double>(76, 24), k = random_tensor<double>(76, 12); // two rows of padding
  auto v = random_tensor<double>(76, 12);
  const auto d_o = random_tensor<double>(76, 24);
  Tensor<double> o(76, 24), lse(76, 4), dq(76, 24), dk(76, 12), dv(76, 12);
  const AttentionRows rows{cu, cu};
  attention_forward<double>(shape, rows, q, k, v, o, lse);
  for (std::size_t s = 0; s < 4; ++s)
    for (int64 t = cu[s]; t < cu[s + 1]; t += 5)
      for (int64 h = 0; h < 4; ++h)
        CHECK(o(t, h * 6 + 2) ==
              doctest::Approx(brute_force(shape, q, k, v, t, cu[s], t - cu[s] + 1, h, 2))
                  .epsilon(1e-12));
  CHECK(o(75, 0) == 0);

  attention_backward<double>(shape, rows, {q, k, v, o, lse, d_o, dq, dk, dv});
  auto loss = [&] {
    Tensor<double> out(76, 24);
    attention_forward<double>(shape, rows, q, k, v, out, {});
    double sum = 0;
    for (int64 t = 0; t < 74; ++t)
      for (int64 j = 0; j < 24; ++j) sum += d_o(t, j) * out(t, j);
    return sum;
  };
  CHECK(gradient_error(q, dq, loss, 40) < kNumericGradient);
  CHECK(gradient_error(k, dk, loss, 40) < kNumericGradient);
  CHECK(gradient_error(v, dv, loss, 40) < kNumericGradient);
  CHECK(dk(75, 1) == 0);

  SUBCASE("the kept statistic is not needed for the value") {
    Tensor<double> dq2(76, 24);
    attention_backward<double>(shape, rows, {q, k, v, o, {}, d_o, dq2, {}, {}});
    CHECK(max_error(dq2, dq) < 1e-13);
  }
}

TEST_CASE_TEMPLATE("attention of a packed sequence equals the sequence alone, bit by bit", T, float,
                   bf16) {
  const AttentionShape shape{.heads = 2, .kv_heads = 1, .head_dim = 16};
  const std::vector<int64> lengths{5, 80, 64, 1};
  const auto cu = offsets(lengths);
  const auto q = random_tensor<T>(150, 32), k = random_tensor<T>(150, 16),
             v = random_tensor<T>(150, 16);
  Tensor<T> o(150, 32), dq(150, 32), dk(150, 16), dv(150, 16);
  Tensor<float> lse(150, 2);
  attention_forward<T>(shape, {cu, cu}, q, k, v, o, lse);
  attention_backward<T>(shape, {cu, cu}, {q, k, v, o, lse, q, dq, dk, dv});
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    const int64 n = lengths[s];
    const std::vector<int64> one{0, n};
    auto part = [&](const Tensor<T>& m) { return Mat<const T>(m).row_range(cu[s], n); };
    Tensor<T> o1(n, 32), dq1(n, 32), dk1(n, 16), dv1(n, 16);
    Tensor<float> lse1(n, 2);
    attention_forward<T>(shape, {one, one}, part(q), part(k), part(v), o1, lse1);
    attention_backward<T>(shape, {one, one},
                          {part(q), part(k), part(v), o1, lse1, part(q), dq1, dk1, dv1});
    for (int64 t = 0; t < n; ++t) {
      for (int64 j = 0; j < 32; ++j) CHECK(o1(t, j) == o(cu[s] + t, j));
      for (int64 j = 0; j < 32; ++j) CHECK(dq1(t, j) == dq(cu[s] + t, j));
      for (int64 j = 0; j < 16; ++j) CHECK(dk1(t, j) == dk(cu[s] + t, j));
      for (int64 j = 0; j < 16; ++j) CHECK(dv1(t, j) == dv(cu[s] + t, j));
    }
  }
}

TEST_CASE("queries split over ranks, all keys on each: rows and summed gradients of the whole") {
  const AttentionShape shape{.heads = 2, .kv_heads = 2, .head_dim = 8};
  const std::vector<int64> whole{0, 40};
  const auto q = random_tensor<double>(40, 16), k = random_tensor<double>(40, 16);
  const auto v = random_tensor<double>(40, 16), d_o = random_tensor<double>(40, 16);
  Tensor<double> o(40, 16), dq(40, 16), dk(40, 16), dv(40, 16), dk_sum(40, 16);
  attention_forward<double>(shape, {whole, whole}, q, k, v, o, {});
  attention_backward<double>(shape, {whole, whole}, {q, k, v, o, {}, d_o, dq, dk, dv});
  dk_sum.zero();
  // Zig-zag: rank 0 holds quarters 0 and 3, rank 1 quarters 1 and 2.
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<int64> positions;
    for (const int64 quarter : {rank, 3 - rank})
      for (int64 i = 0; i < 10; ++i) positions.push_back(quarter * 10 + i);
    Tensor<double> ql(20, 16), dl(20, 16), ol(20, 16), dql(20, 16);
    for (int64 i = 0; i < 20; ++i)
      for (int64 j = 0; j < 16; ++j) {
        ql(i, j) = q(positions[std::size_t(i)], j);
        dl(i, j) = d_o(positions[std::size_t(i)], j);
      }
    const std::vector<int64> local{0, 20};
    const AttentionRows rows{local, whole, positions};
    attention_forward<double>(shape, rows, ql, k, v, ol, {});
    attention_backward<double>(shape, rows, {ql, k, v, ol, {}, dl, dql, dk_sum.add(), {}});
    for (int64 i = 0; i < 20; ++i)
      for (int64 j = 0; j < 16; ++j) {
        CHECK(ol(i, j) == doctest::Approx(o(positions[std::size_t(i)], j)).epsilon(1e-12));
        CHECK(dql(i, j) == doctest::Approx(dq(positions[std::size_t(i)], j)).epsilon(1e-9));
      }
  }
  CHECK(max_error(dk_sum, dk) < 1e-13);
}

TEST_CASE("rotary embedding: halves paired, only the first channels, inverse undoes it") {
  const Rope r{.head_dim = 10, .rotary = 4, .theta = 100};
  const auto cu = offsets({3, 4});
  const auto x = random_tensor<double>(7, 20);
  Tensor<double> y(7, 20), back(7, 20);
  rope<double>(r, cu, {}, x, y);
  // Token 5 is position 2 of its sequence; pair (1, 3) turns by 2 * 100^(-1/2).
  const double angle = 2 * std::pow(100.0, -0.5);
  CHECK(y(5, 11) == doctest::Approx(x(5, 11) * std::cos(angle) - x(5, 13) * std::sin(angle)));
  CHECK(y(5, 13) == doctest::Approx(x(5, 13) * std::cos(angle) + x(5, 11) * std::sin(angle)));
  for (int64 j = 4; j < 10; ++j) CHECK(y(5, j) == x(5, j));
  Rope inverse = r;
  inverse.inverse = true;
  rope<double>(inverse, cu, {}, y, back);
  CHECK(max_error(back, x) < 1e-14);
  // The backward pass is the inverse rotation: <dy, R x> = <R^-1 dy, x>.
  const auto dy = random_tensor<double>(7, 20);
  Tensor<double> dx(7, 20);
  rope<double>(inverse, cu, {}, dy, dx);
  CHECK(dot(dy, y) == doctest::Approx(dot(dx, x)).epsilon(1e-12));
  // Explicit positions say the same.
  const std::vector<int64> positions{0, 1, 2, 0, 1, 2, 3}, whole{0, 7};
  Tensor<double> z(7, 20);
  rope<double>(r, whole, positions, x, z);
  CHECK(same_bits(z, y));
}

TEST_CASE("scores of 1e4 neither overflow nor lose the row") {
  const AttentionShape shape{.heads = 1, .kv_heads = 1, .head_dim = 4};
  const std::vector<int64> cu{0, 20};
  Tensor<float> q(20, 4), k(20, 4), v(20, 4), o(20, 4), dq(20, 4), dk(20, 4), dv(20, 4);
  Tensor<float> lse(20, 1);
  q.normal(100), k.normal(100), v.normal();
  attention_forward<float>(shape, {cu, cu}, q, k, v, o, lse);
  attention_backward<float>(shape, {cu, cu}, {q, k, v, o, lse, v, dq, dk, dv});
  for (const auto* m : {&o, &dq, &dk, &dv})
    for (const float x : m->data) CHECK(std::isfinite(x));
}
