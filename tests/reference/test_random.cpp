#include <cstdint>

#include "core/error.h"
#include "reference/gates.h"
#include "reference/init.h"
#include "reference/random.h"
#include "support.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

TEST_CASE("Philox4x32-10: the published known answers (Random123, kat_vectors)") {
  using Block = std::array<std::uint32_t, 4>;
  CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) == Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  const std::uint32_t ones = 0xffffffff;
  CHECK(philox4x32({ones, ones, ones, ones}, {ones, ones}) ==
        Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("a value depends on every coordinate of its place and on nothing else") {
  const RandomStream s{1, 2, 3, 4, 5};
  CHECK(s.bits(6) == RandomStream{1, 2, 3, 4, 5}.bits(6));
  const RandomStream others[] = {{0, 2, 3, 4, 5}, {1, 0, 3, 4, 5}, {1, 2, 0, 4, 5},
                                 {1, 2, 3, 0, 5}, {1, 2, 3, 4, 0}, {1, 3, 2, 4, 5},
                                 {1, 2, 4, 3, 5}, {1, 2, 3, 5, 4}};
  for (const auto& other : others) CHECK(other.bits(6) != s.bits(6));
  CHECK(s.bits(7) != s.bits(6));
  CHECK(s.bits(std::uint64_t{6} + (std::uint64_t{1} << 32)) != s.bits(6));
  CHECK(stream_id("in_proj", 7) != stream_id("out_proj", 8));
  CHECK(stream_id("", 0) == 0xCBF29CE484222325u);  // FNV-1a's offset basis
  CHECK(stream_id("a", 1) == 0xAF63DC4C8601EC8Cu); // published FNV-1a 64 of "a"
}

TEST_CASE("moments of the uniform and normal numbers") {
  const RandomStream s{.seed = 11};
  const int n = 200000;
  double mean = 0, square = 0, sum = 0, sum2 = 0, sum4 = 0;
  for (int i = 0; i < n; ++i) {
    const double u = s.uniform(std::uint64_t(i)), z = s.normal(std::uint64_t(i));
    REQUIRE(u >= 0);
    REQUIRE(u < 1);
    mean += u / n, square += u * u / n;
    sum += z / n, sum2 += z * z / n, sum4 += z * z * z * z / n;
  }
  CHECK(mean == doctest::Approx(0.5).epsilon(0.005));
  CHECK(square == doctest::Approx(1.0 / 3).epsilon(0.01));
  CHECK(std::abs(sum) < 0.01);
  CHECK(sum2 == doctest::Approx(1).epsilon(0.015));
  CHECK(sum4 == doctest::Approx(3).epsilon(0.05));
}

TEST_CASE("A_log of 1152 heads and 100 seeds is finite; fp32 keeps the gate, bf16 would not") {
  for (const auto& [lo, hi] : {std::pair{1.0, 16.0}, {0.0, 16.0}, {0.01, 16.0}})
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
      Tensor<float> a_log(1, 1152);
      init_a_log(a_log, lo, hi, {.seed = seed});
      for (const float x : a_log.data) {
        REQUIRE(std::isfinite(x));
        REQUIRE(std::exp(static_cast<double>(x)) >= lo * (1 - 1e-6));
        REQUIRE(std::exp(static_cast<double>(x)) <= hi * (1 + 1e-6));
      }
    }
  // The gate after a reload from fp32 and from bf16, against the drawn A.
  Tensor<double> a(1, 1152);
  init_a_log(a, 1, 16, {.seed = 5});
  double worst_single = 0, worst_half = 0;
  for (const double x : a.data) {
    const double A = std::exp(x);
    worst_single = std::max(worst_single, std::abs(std::exp(double(float(x))) / A - 1));
    worst_half = std::max(worst_half, std::abs(std::exp(double(round_to_bf16(x))) / A - 1));
  }
  CHECK(worst_single < 1e-6);
  CHECK(worst_half > 1e-3);
  CHECK(worst_half < 0.0079); // half a unit in the last place of A_log below log 16
}

TEST_CASE("ranges of A that cannot be are refused") {
  Tensor<float> a(1, 4);
  CHECK_THROWS_AS(init_a_log(a, -1, 16, {}), gdn::Error);
  CHECK_THROWS_AS(init_a_log(a, 2, 1, {}), gdn::Error);
  CHECK_THROWS_AS(init_a_log(a, 0, 0, {}), gdn::Error);
  init_a_log(a, 4, 4, {});
  CHECK(a(0, 2) == doctest::Approx(std::log(4.0)));
}

TEST_CASE("conv weights, step sizes, shards") {
  Tensor<float> conv(1000, 4), limited(1000, 4);
  init_conv(conv, {}, {.seed = 1});
  init_conv(limited, 0.02, {.seed = 1});
  float top = 0, top_limited = 0;
  for (const float x : conv.data) top = std::max(top, std::abs(x));
  for (const float x : limited.data) top_limited = std::max(top_limited, std::abs(x));
  CHECK(top <= 0.5f); // 1 / sqrt(4)
  CHECK(top > 0.49f);
  CHECK(top_limited <= 0.02f);
  CHECK(top_limited > 0.0196f);

  Tensor<double> dt(1, 5000);
  init_dt_bias_gdn2(dt, {.seed = 2});
  double mean_log = 0;
  for (const double x : dt.data) {
    const double step = softplus(x);
    REQUIRE(step >= 1e-3 * (1 - 1e-9));
    REQUIRE(step <= 0.1 * (1 + 1e-9));
    mean_log += std::log10(step) / 5000;
  }
  CHECK(mean_log == doctest::Approx(-2).epsilon(0.02)); // log-uniform between 1e-3 and 1e-1

  // A shard draws what the whole draws in its place.
  Tensor<float> whole(8, 5), shard(3, 5);
  fill_normal(whole, 0.02, {.seed = 9});
  fill_normal(shard, 0.02, {.seed = 9}, 2 * 5);
  for (int64 i = 0; i < 3; ++i)
    for (int64 j = 0; j < 5; ++j) CHECK(shard(i, j) == whole(i + 2, j));
  fill_constant(whole, 1);
  CHECK(whole(7, 4) == 1);
}
