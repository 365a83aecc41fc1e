#include "reference/gates.h"
#include "reference/heads.h"
#include "reference/l2norm.h"
#include "reference/mlp.h"
#include "reference/norm.h"
#include "support.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

TEST_CASE("RMS norm: definition and gradients, plain and zero-centred, whole rows and heads") {
  for (const bool zero_centred : {false, true})
    for (const int64 group : {0, 6}) {
      CAPTURE(zero_centred);
      CAPTURE(group);
      const RmsNorm norm{.group = group, .zero_centred = zero_centred};
      const int64 n = group ? group : 12;
      auto x = random_tensor<double>(5, 12), w = random_tensor<double>(1, n);
      const auto dy = random_tensor<double>(5, 12);
      Tensor<double> y(5, 12), rstd(5, 12 / n), dx(5, 12), dw(1, n);
      auto loss = [&] {
        rms_norm_forward<double>(norm, x, w, y, rstd);
        return dot(dy, y);
      };
      loss();
      double mean = 0;
      for (int64 j = 0; j < n; ++j) mean += x(2, j) * x(2, j) / static_cast<double>(n);
      CHECK(rstd(2, 0) == doctest::Approx(1 / std::sqrt(mean + 1e-6)).epsilon(1e-14));
      CHECK(y(2, 3) == doctest::Approx((w(0, 3) + (zero_centred ? 1 : 0)) * x(2, 3) * rstd(2, 0))
                           .epsilon(1e-14));
      rms_norm_backward<double>(norm, x, w, rstd, dy, dx, dw.zero());
      CHECK(gradient_error(x, dx, loss) < kNumericGradient);
      CHECK(gradient_error(w, dw, loss) < kNumericGradient);

      Tensor<double> rebuilt(5, 12), in_place = dy;
      rms_norm_backward<double>(norm, x, w, {}, dy, rebuilt, {});
      CHECK(same_bits(rebuilt, dx)); // without the statistic
      rms_norm_backward<double>(norm, x, w, rstd, in_place, in_place, {});
      CHECK(same_bits(in_place, dx)); // over its own input
    }
}

TEST_CASE("norms of extreme rows stay finite") {
  for (const double size : {0.0, 1e-4, 1e4}) {
    Tensor<float> x(1, 64), w(1, 64), y(1, 64), rstd(1, 1), dx(1, 64);
    x.normal(size);
    w.fill(-1); // 1 + w = 0
    rms_norm_forward<float>({}, x, w, y, rstd);
    for (const float v : y.data) CHECK(v == 0);
    rms_norm_backward<float>({}, x, w, rstd, random_tensor<float>(1, 64), dx, {});
    for (const float v : dx.data) CHECK(v == 0);
    l2norm_forward<float>(64, x, y, rstd);
    for (const float v : y.data) CHECK(std::isfinite(v));
  }
}

TEST_CASE("gated norm: gradients of o, z and the weight") {
  const RmsNorm norm{.group = 4, .zero_centred = false};
  auto o = random_tensor<double>(6, 8), z = random_tensor<double>(6, 8),
       w = random_tensor<double>(1, 4);
  const auto dy = random_tensor<double>(6, 8);
  Tensor<double> y(6, 8), rstd(6, 2), d_o(6, 8), dz(6, 8), dw(1, 4);
  auto loss = [&] {
    gated_norm_forward<double>(norm, o, z, w, y, rstd);
    return dot(dy, y);
  };
  loss();
  const double silu = z(1, 5) / (1 + std::exp(-z(1, 5)));
  CHECK(y(1, 5) == doctest::Approx(w(0, 1) * o(1, 5) * rstd(1, 1) * silu).epsilon(1e-14));
  gated_norm_backward<double>(norm, o, z, w, rstd, dy, d_o, dz, dw.zero());
  CHECK(gradient_error(o, d_o, loss) < kNumericGradient);
  CHECK(gradient_error(z, dz, loss) < kNumericGradient);
  CHECK(gradient_error(w, dw, loss) < kNumericGradient);

  SUBCASE("a kept normalised value changes nothing in double") {
    loss();
    Tensor<double> y2(6, 8), o_norm(6, 8), d_o2(6, 8), dz2(6, 8);
    gated_norm_forward<double>(norm, o, z, w, y2, rstd, o_norm);
    gated_norm_backward<double>(norm, o, z, w, rstd, dy, d_o2, dz2, {}, o_norm);
    CHECK(same_bits(y, y2));
    CHECK(same_bits(dz, dz2));
    CHECK(same_bits(d_o, d_o2));
    CHECK(o_norm(3, 2) == doctest::Approx(w(0, 2) * o(3, 2) * rstd(3, 0)).epsilon(1e-14));
  }
}

TEST_CASE("L2 norm: eps under the root, gradient exact also for small rows") {
  for (const double size : {1.0, 1e-3}) {
    auto x = random_tensor<double>(4, 10, size);
    const auto dy = random_tensor<double>(4, 10);
    Tensor<double> y(4, 10), rstd(4, 2), dx(4, 10);
    auto loss = [&] {
      l2norm_forward<double>(5, x, y, rstd);
      return dot(dy, y);
    };
    loss();
    double sum = 0;
    for (int64 j = 5; j < 10; ++j) sum += x(3, j) * x(3, j);
    CHECK(rstd(3, 1) == doctest::Approx(1 / std::sqrt(sum + 1e-6)).epsilon(1e-14));
    l2norm_backward<double>(5, y, rstd, dy, dx);
    CHECK(gradient_error(x, dx, loss, 200, 1e-3 * size) < kNumericGradient);
  }
}

TEST_CASE("gates: definition, gradients, tails") {
  for (const bool doubled : {false, true}) {
    auto alpha = random_tensor<double>(9, 3), b = random_tensor<double>(9, 3);
    auto a_log = random_tensor<double>(1, 3), dt = random_tensor<double>(1, 3);
    const auto dg = random_tensor<double>(9, 3), dbeta = random_tensor<double>(9, 3);
    Tensor<double> g(9, 3), beta(9, 3), dalpha(9, 3), db(9, 3), da_log(1, 3), ddt(1, 3);
    auto loss = [&] {
      gates_forward(alpha, b, a_log, dt, doubled, g, beta);
      return dot(dg, g) + dot(dbeta, beta);
    };
    loss();
    CHECK(g(4, 1) ==
          doctest::Approx(-std::exp(a_log(0, 1)) * std::log(1 + std::exp(alpha(4, 1) + dt(0, 1)))));
    CHECK(beta(4, 1) == doctest::Approx((doubled ? 2 : 1) / (1 + std::exp(-b(4, 1)))));
    gates_backward({alpha, b, a_log, dt, dg, dbeta, dalpha, db, da_log.zero(), ddt.zero()},
                   doubled);
    CHECK(gradient_error(alpha, dalpha, loss) < kNumericGradient);
    CHECK(gradient_error(b, db, loss) < kNumericGradient);
    CHECK(gradient_error(a_log, da_log, loss) < kNumericGradient);
    CHECK(gradient_error(dt, ddt, loss) < kNumericGradient);
  }
  // A small decay stays a decay: log1p, not log(1 + e^x).
  CHECK(softplus(-40) == doctest::Approx(std::exp(-40)).epsilon(1e-12));
  CHECK(softplus(1000) == 1000);
  CHECK(sigmoid(-800) >= 0);
  CHECK(sigmoid(-700) > 0);
  CHECK(sigmoid(800) == 1);
}

TEST_CASE("A = 0 gives no decay and no NaN") {
  Tensor<float> alpha(3, 1), a_log(1, 1), dt(1, 1), g(3, 1), beta(3, 1), dalpha(3, 1), da(1, 1),
      ddt(1, 1);
  alpha.normal();
  a_log.fill(-std::numeric_limits<float>::infinity());
  dt.fill(1);
  gates_forward(alpha, alpha, a_log, dt, false, g, beta);
  gates_backward({alpha, alpha, a_log, dt, alpha, alpha, dalpha, {}, da.zero(), ddt.zero()}, false);
  for (const float v : g.data) CHECK(v == 0);
  CHECK(da(0, 0) == 0);
  CHECK(ddt(0, 0) == 0);
}

TEST_CASE("GDN2 decay: one rate a head, one bias a channel") {
  auto f = random_tensor<double>(5, 6), a_log = random_tensor<double>(1, 2),
       dt = random_tensor<double>(1, 6);
  const auto dg = random_tensor<double>(5, 6);
  Tensor<double> g(5, 6), df(5, 6), da_log(1, 2), ddt(1, 6);
  auto loss = [&] {
    decay_forward(3, f, a_log, dt, g);
    return dot(dg, g);
  };
  loss();
  CHECK(g(2, 4) ==
        doctest::Approx(-std::exp(a_log(0, 1)) * std::log1p(std::exp(f(2, 4) + dt(0, 4)))));
  decay_backward(3, f, a_log, dt, dg, df, da_log.zero(), ddt.zero());
  CHECK(gradient_error(f, df, loss) < kNumericGradient);
  CHECK(gradient_error(a_log, da_log, loss) < kNumericGradient);
  CHECK(gradient_error(dt, ddt, loss) < kNumericGradient);
}

TEST_CASE("feed-forward and gate ops against central differences") {
  auto x = random_tensor<double>(4, 10), z = random_tensor<double>(4, 10),
       w = random_tensor<double>(4, 1);
  Tensor<double> y(4, 10), half(4, 5), dx(4, 10), dz(4, 10), dw(4, 1);
  const auto dy = random_tensor<double>(4, 10), dhalf = random_tensor<double>(4, 5);

  SUBCASE("SwiGLU, with and without a row weight") {
    for (const bool weighted : {false, true}) {
      const ConstValues weight = weighted ? ConstValues(w) : ConstValues();
      auto loss = [&] {
        swiglu_forward<double>(x, weight, half);
        return dot(dhalf, half);
      };
      loss();
      const double gate = x(1, 2), value = x(1, 7);
      CHECK(half(1, 2) ==
            doctest::Approx(gate / (1 + std::exp(-gate)) * value * (weighted ? w(1, 0) : 1)));
      swiglu_backward<double>(x, weight, dhalf, dx, dw);
      CHECK(gradient_error(x, dx, loss) < kNumericGradient);
      if (weighted) CHECK(gradient_error(w, dw, loss) < kNumericGradient);
    }
  }
  SUBCASE("SiLU") {
    auto loss = [&] {
      silu_forward<double>(x, y);
      return dot(dy, y);
    };
    silu_backward<double>(x, dy, dx);
    CHECK(gradient_error(x, dx, loss) < kNumericGradient);
  }
  SUBCASE("x silu(z)") {
    auto loss = [&] {
      silu_gate_forward<double>(x, z, y);
      return dot(dy, y);
    };
    silu_gate_backward<double>(x, z, dy, dx, dz);
    CHECK(gradient_error(x, dx, loss) < kNumericGradient);
    CHECK(gradient_error(z, dz, loss) < kNumericGradient);
  }
  SUBCASE("x sigmoid(z)") {
    auto loss = [&] {
      sigmoid_gate_forward<double>(x, z, y);
      return dot(dy, y);
    };
    sigmoid_gate_backward<double>(x, z, dy, dx, dz);
    CHECK(gradient_error(x, dx, loss) < kNumericGradient);
    CHECK(gradient_error(z, dz, loss) < kNumericGradient);
  }
  SUBCASE("x sigmoid(score), one score a row") {
    auto loss = [&] {
      row_gate_forward<double>(x, w, y);
      return dot(dy, y);
    };
    row_gate_backward<double>(x, w, dy, dx, dw);
    CHECK(gradient_error(x, dx, loss) < kNumericGradient);
    CHECK(gradient_error(w, dw, loss) < kNumericGradient);
  }
  SUBCASE("plain sigmoid of a small tensor") {
    auto loss = [&] {
      sigmoid_forward(x, y);
      return dot(dy, y);
    };
    sigmoid_backward(x, dy, dx);
    CHECK(gradient_error(x, dx, loss) < kNumericGradient);
  }
}

TEST_CASE("activations are finite for every finite input") {
  Tensor<float> x(1, 6), y(1, 6), dx(1, 6), one(1, 6);
  x.data = {-3e38f, -1000, -0.0f, 0, 1000, 3e38f};
  silu_forward<float>(x, y);
  silu_backward<float>(x, one.fill(1), dx);
  for (const float v : y.data) CHECK(std::isfinite(v));
  for (const float v : dx.data) CHECK(std::isfinite(v));
}

TEST_CASE("heads: repeated, sliced, interleaved, and back") {
  const auto x = random_tensor<float>(3, 4); // two heads of 2
  Tensor<float> y(3, 12), dx(3, 4);
  repeat_heads_forward<float>(2, 3, x, y);
  for (int64 copy = 0; copy < 3; ++copy) CHECK(y(1, 6 + copy * 2 + 1) == x(1, 3));
  repeat_heads_backward<float>(2, 3, y, dx);
  for (std::size_t i = 0; i < x.data.size(); ++i)
    CHECK(dx.data[i] == x.data[i] + x.data[i] + x.data[i]);

  // [a 2 | b 1] per group, two groups.
  auto mixed = random_tensor<float>(3, 6);
  Tensor<float> a(3, 4), b(3, 2), back(3, 6);
  const Interleave sa{2, 3, 0, 2}, sb{2, 3, 2, 1};
  take_section<float>(sa, mixed, a);
  take_section<float>(sb, mixed, b);
  CHECK(a(2, 2) == mixed(2, 3));
  CHECK(b(2, 1) == mixed(2, 5));
  put_section<float>(sa, a, back);
  put_section<float>(sb, b, back);
  CHECK(same_bits(back, mixed));
  put_section<float>(sb, b, back.add());
  CHECK(back(0, 2) == mixed(0, 2) + mixed(0, 2));
  CHECK(back(0, 0) == mixed(0, 0));
}

TEST_CASE("sums, scales and conversions round once") {
  const auto a = random_tensor<bf16>(4, 9), b = random_tensor<bf16>(4, 9);
  Tensor<bf16> y(4, 9);
  add<bf16>(a, b, y);
  CHECK(y(2, 2) == static_cast<bf16>(static_cast<float>(a(2, 2)) + static_cast<float>(b(2, 2))));
  auto sum = a;
  scale<bf16>(2, b, sum.add());
  CHECK(sum(1, 1) ==
        static_cast<bf16>(static_cast<float>(a(1, 1)) + 2 * static_cast<float>(b(1, 1))));
  // 1 + 2^-8 + 2^-40 lies above the middle of two bf16 numbers, and exactly on it in fp32.
  CHECK(static_cast<float>(round_to_bf16(1 + 0x1p-8 + 0x1p-40)) == 1 + 0x1p-7f);
  CHECK(static_cast<float>(round_to_bf16(1 + 0x1p-8)) == 1);
  CHECK(static_cast<float>(round_to_bf16(-1 - 0x1p-8 - 0x1p-40)) == -1 - 0x1p-7f);
  CHECK(static_cast<float>(round_to_bf16(1 + 0x1p-8 - 0x1p-40)) == 1);
}
