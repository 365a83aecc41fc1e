#include "reference/conv.h"
#include "reference/mlp.h"
#include "support.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

namespace {

// The definition, token by token.
double tap_sum(const Tensor<double>& x, const Tensor<double>& w, int64 first, int64 t, int64 c) {
  double sum = 0;
  for (int64 k = 0; k < w.cols; ++k) {
    const int64 from = t - (w.cols - 1) + k;
    if (from >= first) sum += w(c, k) * x(from, c);
  }
  return sum;
}

} // namespace

TEST_CASE(
    "causal convolution: definition and gradients for every kernel width and short sequences") {
  const auto cu = offsets({0, 1, 2, 3, 4, 0, 9});
  for (const int64 taps : {1, 2, 3, 4, 7})
    for (const auto activation : {Activation::None, Activation::Silu}) {
      CAPTURE(taps);
      const int64 rows = cu.back() + 2, channels = 5; // two rows of padding
      auto x = random_tensor<double>(rows, channels), w = random_tensor<double>(channels, taps);
      auto b = random_tensor<double>(1, channels);
      auto dy = random_tensor<double>(rows, channels);
      Tensor<double> y(rows, channels), dx(rows, channels), dw(channels, taps), db(1, channels);
      auto loss = [&] {
        conv_forward<double>(activation, cu, x, w, b, y);
        return dot(dy, y);
      };
      loss();
      for (std::size_t s = 0; s + 1 < cu.size(); ++s)
        for (int64 t = cu[s]; t < cu[s + 1]; ++t)
          for (int64 c = 0; c < channels; ++c) {
            double p = b(0, c) + tap_sum(x, w, cu[s], t, c);
            if (activation == Activation::Silu) p = p / (1 + std::exp(-p));
            CHECK(y(t, c) == doctest::Approx(p).epsilon(1e-12));
          }
      for (int64 c = 0; c < channels; ++c) CHECK(y(rows - 1, c) == 0);
      conv_backward<double>(activation, cu, x, w, b, dy, dx, dw.zero(), db.zero());
      CHECK(gradient_error(x, dx, loss) < kNumericGradient);
      CHECK(gradient_error(w, dw, loss) < kNumericGradient);
      CHECK(gradient_error(b, db, loss) < kNumericGradient);
      for (int64 c = 0; c < channels; ++c) CHECK(dx(rows - 1, c) == 0);
    }
}

TEST_CASE_TEMPLATE("packed equals each sequence alone, bit by bit", T, float, bf16) {
  const std::vector<int64> lengths{3, 0, 70, 1, 12};
  const auto cu = offsets(lengths);
  const int64 channels = 9;
  const auto x = random_tensor<T>(cu.back(), channels), dy = random_tensor<T>(cu.back(), channels);
  const auto w = random_tensor<T>(channels, 4);
  Tensor<T> y(cu.back(), channels), dx(cu.back(), channels);
  conv_forward<T>(Activation::Silu, cu, x, w, {}, y);
  conv_backward<T>(Activation::Silu, cu, x, w, {}, dy, dx, {}, {});
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    const std::vector<int64> alone{0, lengths[s]};
    Tensor<T> y1(lengths[s], channels), dx1(lengths[s], channels);
    const auto xs = Mat<const T>(x).row_range(cu[s], lengths[s]);
    conv_forward<T>(Activation::Silu, alone, xs, w, {}, y1);
    conv_backward<T>(Activation::Silu, alone, xs, w, {},
                     Mat<const T>(dy).row_range(cu[s], lengths[s]), dx1, {}, {});
    for (int64 t = 0; t < lengths[s]; ++t)
      for (int64 c = 0; c < channels; ++c) {
        CHECK(y1(t, c) == y(cu[s] + t, c));
        CHECK(dx1(t, c) == dx(cu[s] + t, c));
      }
  }
}

TEST_CASE("fused convolution equals the plain one followed by SiLU") {
  const auto cu = offsets({11, 5});
  const auto x = random_tensor<double>(16, 6), w = random_tensor<double>(6, 4);
  const auto dy = random_tensor<double>(16, 6);
  Tensor<double> fused(16, 6), pre(16, 6), plain(16, 6), dpre(16, 6), dx(16, 6), dx_plain(16, 6);
  conv_forward<double>(Activation::Silu, cu, x, w, {}, fused);
  conv_forward<double>(Activation::None, cu, x, w, {}, pre);
  silu_forward<double>(pre, plain);
  CHECK(same_bits(fused, plain));
  conv_backward<double>(Activation::Silu, cu, x, w, {}, dy, dx, {}, {});
  silu_backward<double>(pre, dy, dpre);
  conv_backward<double>(Activation::None, cu, x, w, {}, dpre, dx_plain, {}, {});
  CHECK(same_bits(dx, dx_plain));
}

TEST_CASE("prefill and steps give the rows of one pass") {
  const int64 channels = 6, taps = 4, slots = 5;
  const std::vector<int64> lengths{7, 2, 0}, full{10, 5, 3}; // three steps each
  const auto cu_full = offsets(full), cu = offsets(lengths);
  const std::vector<int64> slot{4, 0, 2};
  const auto x = random_tensor<float>(cu_full.back(), channels),
             w = random_tensor<float>(channels, taps);
  Tensor<float> y(cu_full.back(), channels), prefix(cu.back(), channels),
      pool(slots * channels, taps);
  conv_forward<float>(Activation::Silu, cu_full, x, w, {}, y);
  for (std::size_t s = 0; s < full.size(); ++s)
    for (int64 t = 0; t < lengths[s]; ++t)
      for (int64 c = 0; c < channels; ++c) prefix(cu[s] + t, c) = x(cu_full[s] + t, c);
  conv_state_from<float>(cu, prefix, slot, pool);
  for (int64 step = 0; step < 3; ++step) {
    Tensor<float> in(3, channels), out(3, channels);
    for (std::size_t s = 0; s < 3; ++s)
      for (int64 c = 0; c < channels; ++c) in(int64(s), c) = x(cu_full[s] + lengths[s] + step, c);
    conv_step<float>(Activation::Silu, in, w, {}, slot, pool, out);
    for (std::size_t s = 0; s < 3; ++s)
      for (int64 c = 0; c < channels; ++c)
        CHECK(out(int64(s), c) ==
              doctest::Approx(y(cu_full[s] + lengths[s] + step, c)).epsilon(1e-6));
  }
}

TEST_CASE("sequence offsets that do not fit are named") {
  auto message = [](std::vector<int64> cu, int64 rows, Coverage coverage) -> std::string {
    try {
      check_sequences(cu, rows, coverage);
    } catch (const std::exception& e) {
      return e.what();
    }
    return {};
  };
  CHECK(message({0, 29, 77, 128}, 128, Coverage::Exact).empty());
  CHECK(message({0, 64, 64, 128}, 128, Coverage::Exact).empty()); // an empty sequence is legal
  const auto wrong = message({0, 29, 77, 120}, 128, Coverage::Exact);
  CHECK(wrong.find("120") != std::string::npos);
  CHECK(wrong.find("128") != std::string::npos);
  CHECK(message({0, 29, 77, 120}, 128, Coverage::AtMost).empty());
  CHECK_FALSE(message({0, 130}, 128, Coverage::AtMost).empty());
  CHECK_FALSE(message({0, 5, 4}, 4, Coverage::Exact).empty());
  CHECK_FALSE(message({1, 4}, 4, Coverage::Exact).empty());
  CHECK(chunk_count(offsets({0, 1, 63, 64, 65, 0, 200, 0}), 64) == 9);
}
