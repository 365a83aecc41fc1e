#include <numeric>

#include "core/error.h"
#include "reference/linear.h"
#include "reference/mlp.h"
#include "reference/moe.h"
#include "reference/permute.h"
#include "support.h"

using namespace gdn::reference;
using namespace gdn::reference::test;

TEST_CASE("routing: the largest logits, ties by lowest index, weights as defined") {
  Tensor<float> logits(2, 5), weight(2, 2), scores(2, 5);
  Tensor<std::int32_t> index(2, 2);
  logits.data = {1, 3, 3, 0, 2, /**/ 7, 7, 7, 7, 7};
  for (const bool renormalise : {true, false}) {
    route_forward({.experts = 5, .top_k = 2, .renormalise = renormalise}, logits, index, weight,
                  scores);
    CHECK(index(0, 0) == 1);
    CHECK(index(0, 1) == 2);
    CHECK(index(1, 0) == 0);
    CHECK(index(1, 1) == 1);
    const double sum = std::exp(1) + 2 * std::exp(3) + 1 + std::exp(2);
    CHECK(scores(0, 4) == doctest::Approx(std::exp(2) / sum));
    CHECK(weight(0, 0) == doctest::Approx(renormalise ? 0.5 : std::exp(3) / sum));
  }
  route_forward({.experts = 5, .top_k = 2, .score = Score::Sigmoid}, logits, index, weight, scores);
  CHECK(scores(0, 4) == doctest::Approx(1 / (1 + std::exp(-2))));
  CHECK(weight(1, 1) == doctest::Approx(0.5));
  CHECK_THROWS_AS(route_forward({.experts = 5, .top_k = 6}, logits, index, weight, {}), gdn::Error);
}

TEST_CASE("forced balance fills every expert equally, also over ranks") {
  Tensor<float> logits(6, 4), weight(6, 2);
  logits.normal();
  std::vector<int64> total(4);
  for (const int64 rank : {0, 1}) {
    Tensor<int64> index(6, 2);
    route_forward({.experts = 4, .top_k = 2, .balanced = true, .first_slot = rank * 12}, logits,
                  index, weight, {});
    const auto counts = expert_counts(4, index);
    for (std::size_t e = 0; e < 4; ++e) total[e] += counts[e];
    for (const int64 n : counts) CHECK(n == 3);
    CHECK(weight(0, 0) + weight(0, 1) == doctest::Approx(1));
  }
  CHECK(total == std::vector<int64>{6, 6, 6, 6});
}

TEST_CASE("router gradients against central differences, every mode") {
  for (const auto score : {Score::Softmax, Score::Sigmoid})
    for (const bool renormalise : {true, false})
      for (const bool balanced : {false, true})
        for (const int64 top_k : {1, 3, 6}) {
          CAPTURE(renormalise);
          CAPTURE(balanced);
          CAPTURE(static_cast<int>(score));
          CAPTURE(top_k);
          const Router r{6, top_k, score, renormalise, balanced, 0};
          Tensor<double> logits(5, 6); // well apart, so that no step changes the choice
          logits.uniform(0, 0.2);
          for (int64 t = 0; t < 5; ++t)
            for (int64 e = 0; e < 6; ++e)
              logits(t, e) += 0.5 * static_cast<double>((5 * e + t) % 6);
          const auto dw = random_tensor<double>(5, top_k);
          Tensor<double> weight(5, top_k), dlogits(5, 6);
          Tensor<std::int32_t> index(5, top_k);
          route_forward(r, logits, index, weight, {});
          const auto chosen = index;
          auto loss = [&] {
            route_forward(r, logits, index, weight, {});
            REQUIRE(same_bits(index, chosen));
            return dot(dw, weight);
          };
          route_backward(r, logits, chosen, dw, dlogits);
          CHECK(gradient_error(logits, dlogits, loss) < kNumericGradient);
          if (top_k == 1 && renormalise && score == Score::Softmax)
            for (const double d : dlogits.data) CHECK(d == 0); // no gradient reaches the router
        }
}

TEST_CASE("dense and compact routing hold the same") {
  Tensor<float> logits(7, 8), weight(7, 3), probs(7, 8), back(7, 3);
  Tensor<int64> index(7, 3);
  Tensor<std::int32_t> map(7, 8);
  logits.normal();
  route_forward({.experts = 8, .top_k = 3}, logits, index, weight, {});
  dense_from_slots(index, weight, probs, map);
  slots_from_dense(index, probs, back);
  CHECK(same_bits(back, weight));
  for (int64 t = 0; t < 7; ++t) {
    int64 chosen = 0;
    for (int64 e = 0; e < 8; ++e) {
      chosen += map(t, e);
      CHECK((probs(t, e) != 0) == (map(t, e) == 1));
    }
    CHECK(chosen == 3);
  }
}

TEST_CASE("balance loss: perfect balance gives coef, gradient with constant counts; z-loss") {
  const Router r{.experts = 4, .top_k = 2};
  Tensor<double> uniform(6, 4);
  uniform.zero();
  const std::vector<int64> equal{3, 3, 3, 3};
  const BalanceLoss megatron{.coef = 0.01, .kappa = 2, .tokens = 6}, hf{.coef = 0.01, .tokens = 6};
  CHECK(balance_loss(r, megatron, uniform, equal) == doctest::Approx(0.01));
  CHECK(balance_loss(r, hf, uniform, equal) == doctest::Approx(0.02));

  auto logits = random_tensor<double>(6, 4);
  const std::vector<int64> counts{5, 0, 4, 3};
  for (const auto score : {Score::Softmax, Score::Sigmoid}) {
    const Router mode{.experts = 4, .top_k = 2, .score = score};
    Tensor<double> d(6, 4);
    balance_loss_backward(mode, megatron, logits, counts, 3.0, d);
    CHECK(gradient_error(logits, d, [&] {
            return 3 * balance_loss(mode, megatron, logits, counts);
          }) < kNumericGradient);
  }
  Tensor<double> d(6, 4);
  z_loss_backward(0.1, logits, 2.0, d);
  CHECK(gradient_error(logits, d, [&] { return 2 * z_loss(0.1, logits); }) < kNumericGradient);
  CHECK(z_loss(1, uniform) == doctest::Approx(std::log(4) * std::log(4)));
}

TEST_CASE("the permutation is one: stable, complete, and undone by its adjoint") {
  for (const int64 experts : {1, 3, 40}) { // 40: most experts are empty
    Tensor<int64> index(9, 2);
    RandomStream random{.seed = 3};
    for (std::size_t i = 0; i < 18; ++i)
      index.data[i] = int64(random.bits(i) % std::uint64_t(experts));
    const auto p = sort_slots(experts, index);
    std::vector<int64> seen(p.row_of_slot);
    std::sort(seen.begin(), seen.end());
    std::vector<int64> all(18);
    std::iota(all.begin(), all.end(), int64{0});
    CHECK(seen == all);
    CHECK(p.groups.back() == 18);
    for (int64 e = 0; e < experts; ++e)
      for (int64 row = p.groups[std::size_t(e)]; row < p.groups[std::size_t(e) + 1]; ++row) {
        const int64 slot = p.slot_of_row[std::size_t(row)];
        CHECK(index(slot / 2, slot % 2) == e);
        CHECK(p.row_of_slot[std::size_t(slot)] == row);
        if (row > p.groups[std::size_t(e)]) CHECK(slot > p.slot_of_row[std::size_t(row) - 1]);
      }
    Tensor<std::int32_t> map(9, 2);
    store_row_map(p, map);
    const auto again = load_row_map(map, 18);
    CHECK(again.row_of_slot == p.row_of_slot);
    CHECK(again.slot_of_row == p.slot_of_row);
  }
}

TEST_CASE("a full expert drops later slots, unused rows are zeros") {
  Tensor<int64> index(4, 1);
  index.data = {1, 1, 1, 0};
  const auto p = sort_slots(2, index, 2);
  CHECK(p.groups == std::vector<int64>{0, 2, 4});
  CHECK(p.row_of_slot == std::vector<int64>{2, 3, -1, 0});
  const auto x = random_tensor<float>(4, 3), dy = random_tensor<float>(4, 3);
  Tensor<float> rows(4, 3), y(4, 3), drows(4, 3), w(4, 1), rw(4, 1), dw(4, 1);
  permute_forward<float>(p, 1, x, rows);
  for (int64 j = 0; j < 3; ++j) CHECK(rows(1, j) == 0);
  w.fill(2);
  combine_forward<float>(p, 1, rows, w, y);
  for (int64 j = 0; j < 3; ++j) {
    CHECK(y(0, j) == 2 * x(0, j));
    CHECK(y(2, j) == 0);
  }
  permute_weights(p, w, rw);
  CHECK(rw.data == std::vector<float>{2, 0, 2, 2});
  unpermute_weights(p, rw, dw);
  CHECK(dw.data == std::vector<float>{2, 2, 0, 2});
  combine_backward<float>(p, 1, rows, w, dy, drows, dw);
  CHECK(dw(2, 0) == 0);
  CHECK(drows(1, 0) == 0);
}

TEST_CASE("rows gathered by an index, missing ones are zeros") {
  const auto x = random_tensor<float>(3, 2);
  Tensor<float> out(4, 2);
  const std::vector<int64> source{2, -1, 0, 0};
  gather_rows<float>(x, source, out);
  CHECK(out(0, 1) == x(2, 1));
  CHECK(out(1, 0) == 0);
  CHECK(out(3, 1) == x(0, 1));
}

namespace {

// Router, experts and shared expert, as one differentiable function of everything.
struct Block {
  int64 tokens = 7, hidden = 6, experts = 4, top_k = 2, f = 5;
  bool folded;
  Router router;
  Tensor<double> x, w_router, w1, w2, dy;
  Tensor<double> logits, weight, xp, fc1, act, yp, y, row_weight;
  Tensor<std::int32_t> index;
  Permutation p;

  Block(bool fold, bool renormalise)
      : folded(fold), router{4, 2, Score::Softmax, renormalise, false, 0},
        x(random_tensor<double>(7, 6)), w_router(random_tensor<double>(4, 6)),
        w1(random_tensor<double>(4 * 10, 6)), w2(random_tensor<double>(4 * 6, 5)),
        dy(random_tensor<double>(7, 6)), logits(7, 4), weight(7, 2), xp(14, 6), fc1(14, 10),
        act(14, 5), yp(14, 6), y(7, 6), row_weight(14, 1), index(7, 2) {}

  double loss() {
    linear_forward<double>(x, w_router, {}, logits);
    route_forward(router, logits, index, weight, {});
    p = sort_slots(experts, index);
    permute_forward<double>(p, top_k, x, xp);
    permute_weights(p, weight, row_weight);
    grouped_linear_forward<double>(xp, w1, p.groups, fc1);
    swiglu_forward<double>(fc1, folded ? ConstValues(row_weight) : ConstValues(), act);
    grouped_linear_forward<double>(act, w2, p.groups, yp);
    combine_forward<double>(p, top_k, yp, folded ? ConstValues() : ConstValues(weight), y);
    return dot(dy, y);
  }
};

} // namespace

TEST_CASE("a whole MoE block against central differences, the weight at either place") {
  double losses[2];
  for (const bool folded : {false, true})
    for (const bool renormalise : {true, false}) {
      CAPTURE(folded);
      next_stream() = 1000; // the same numbers in both
      Block m(folded, renormalise);
      losses[folded] = m.loss();
      Tensor<double> dyp(14, 6), dact(14, 5), dfc1(14, 10), dxp(14, 6), dx(7, 6), dw1(40, 6),
          dw2(24, 5);
      Tensor<double> dweight(7, 2), drow(14, 1), dlogits(7, 4), dw_router(4, 6);
      combine_backward<double>(m.p, 2, m.yp, folded ? ConstValues() : ConstValues(m.weight), m.dy,
                               dyp, folded ? ValuesGrad() : ValuesGrad(Values(dweight)));
      grouped_linear_dgrad<double>(dyp, m.w2, m.p.groups, dact);
      grouped_linear_wgrad<double>(dyp, m.act, m.p.groups, dw2.zero());
      swiglu_backward<double>(m.fc1, folded ? ConstValues(m.row_weight) : ConstValues(), dact, dfc1,
                              drow);
      if (folded) unpermute_weights(m.p, drow, dweight);
      grouped_linear_dgrad<double>(dfc1, m.w1, m.p.groups, dxp);
      grouped_linear_wgrad<double>(dfc1, m.xp, m.p.groups, dw1.zero());
      permute_backward<double>(m.p, 2, dxp, dx);
      route_backward(m.router, m.logits, m.index, dweight, dlogits);
      linear_dgrad<double>(dlogits, m.w_router, dx.add());
      linear_wgrad<double>(dlogits, m.x, dw_router.zero());
      auto loss = [&] { return m.loss(); };
      CHECK(gradient_error(m.x, dx, loss, 200, 1e-4) < 1e-7);
      CHECK(gradient_error(m.w_router, dw_router, loss, 200, 1e-4) < 1e-7);
      CHECK(gradient_error(m.w1, dw1, loss, 80, 1e-4) < 1e-7);
      CHECK(gradient_error(m.w2, dw2, loss, 80, 1e-4) < 1e-7);
      if (!renormalise && folded) CHECK(losses[0] == doctest::Approx(losses[1]).epsilon(1e-13));
    }
}

TEST_CASE("all tokens to one expert, and no tokens at all") {
  Tensor<int64> one(5, 1), none(0, 1);
  one.zero();
  const auto p = sort_slots(3, one);
  CHECK(p.groups == std::vector<int64>{0, 5, 5, 5});
  const auto empty = sort_slots(3, none);
  CHECK(empty.groups == std::vector<int64>{0, 0, 0, 0});
  Tensor<float> x(0, 4), rows(0, 4), w(12, 4), y(0, 4);
  permute_forward<float>(empty, 1, x, rows);
  grouped_linear_forward<float>(rows, w.zero(), empty.groups, y);
}
