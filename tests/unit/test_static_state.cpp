#include <cmath>

#include <doctest/doctest.h>

#include "known_models.h"
#include "model/static_state.h"

using namespace gdn;
using namespace gdn::model;
using gdn::test::known_model;

namespace {

double gb(Bytes bytes) { return static_cast<double>(bytes) / 1e9; }

config::Run run_on(std::int64_t gpus, std::int64_t pp, std::int64_t ep) {
  config::Run run;
  run.parallel.gpus = gpus;
  run.parallel.pp = pp;
  run.parallel.ep = ep;
  return run;
}

// The closed form "fixed + shared/D a parameter", without padding.
double closed_form(const config::Model& m, const config::Run& run, std::int64_t rank, double fixed,
                   double shared) {
  const ParameterTable table = parameter_table(m, run);
  const RankElements n = rank_elements(table, m, run, rank);
  const double dense =
      run.optimizer.distributed ? static_cast<double>(run.parallel.dp() * run.parallel.cp) : 1;
  const double expert = run.optimizer.distributed ? static_cast<double>(run.parallel.edp()) : 1;
  return static_cast<double>(n.dense) * (fixed + shared / dense) +
         static_cast<double>(n.expert) * (fixed + shared / expert);
}

} // namespace

TEST_CASE("bytes per parameter of every optimizer set-up") {
  struct Row {
    const char* what;
    DType dtype, gradients;
    bool distributed, aware;
    DType master, moment1, moment2;
    Bytes fixed, shared; // fixed + shared / D
  };
  const DType f32 = DType::FP32, b16 = DType::BF16, f16 = DType::FP16, f8 = DType::FP8;
  const Row rows[] = {
      {"bf16, no distributed optimizer: 18", b16, f32, false, false, f32, f32, f32, 18, 0},
      {"bf16, distributed: 6 + 12/D", b16, f32, true, false, f32, f32, f32, 6, 12},
      {"fp32: 16", f32, f32, false, false, f32, f32, f32, 16, 0},
      {"fp32, distributed: 8 + 8/D", f32, f32, true, false, f32, f32, f32, 8, 8},
      {"fp16: 20", f16, f16, false, false, f32, f32, f32, 20, 0},
      {"fp16, distributed: 4 + 16/D", f16, f16, true, false, f32, f32, f32, 4, 16},
      {"bf16 gradients: 4 + 12/D", b16, b16, true, false, f32, f32, f32, 4, 12},
      {"precision aware, bf16 moments: 6 + 8/D", b16, f32, true, true, f32, b16, b16, 6, 8},
      {"precision aware, bf16 gradients and moments, remainders: 4 + 6/D", b16, b16, true, true,
       b16, b16, b16, 4, 6},
      {"precision aware, fp8 moments, fp16 master: 6 + 4/D", b16, f32, true, true, f16, f8, f8, 6,
       4}};
  const config::Model m = known_model("qwen3.5-35b-a3b");
  for (const Row& r : rows) {
    CAPTURE(r.what);
    config::Run run = run_on(16, 1, 4); // dp 16, edp 4
    run.dtype = r.dtype;
    run.optimizer = {r.distributed, r.gradients, r.aware, r.master, r.moment1, r.moment2};
    const double expected =
        closed_form(m, run, 0, static_cast<double>(r.fixed), static_cast<double>(r.shared));
    const double actual = static_cast<double>(static_state(m, run, 0).total());
    CHECK(actual >= expected); // padding only adds
    CHECK(actual <= expected * (1 + 1e-5));
    if (!r.distributed) CHECK(actual == expected); // no padding without the distributed optimizer
  }
}

TEST_CASE("published shapes: static state per GPU") {
  struct Row {
    const char* model;
    std::int64_t gpus, pp, ep, rank;
    bool vision, bf16_gradients;
    double expert, dense, total; // GB, one decimal
  };
  const Row rows[] = {{"qwen3-next-80b-a3b", 16, 2, 8, 0, false, false, 87.0, 8.9, 95.8},
                      {"qwen3-next-80b-a3b", 16, 2, 8, 1, false, false, 90.6, 11.5, 102.1},
                      {"qwen3-next-80b-a3b", 32, 4, 8, 0, false, false, 43.5, 5.6, 49.1},
                      {"qwen3-next-80b-a3b", 32, 4, 8, 1, false, false, 43.5, 3.3, 46.8},
                      {"qwen3-next-80b-a3b", 32, 4, 8, 2, false, false, 43.5, 3.3, 46.8},
                      {"qwen3-next-80b-a3b", 32, 4, 8, 3, false, false, 47.1, 8.2, 55.3},
                      {"qwen3.5-35b-a3b", 8, 1, 8, 0, true, true, 66.0, 16.1, 82.2},
                      {"qwen3.5-35b-a3b", 8, 1, 8, 0, true, false, 74.3, 22.0, 96.3},
                      {"qwen3.5-122b-a10b", 32, 1, 32, 0, true, true, 59.2, 29.3, 88.5},
                      {"qwen3.5-122b-a10b", 32, 1, 32, 0, true, false, 66.6, 42.8, 109.3},
                      {"qwen3.5-397b-a17b", 64, 1, 64, 0, true, true, 98.2, 43.6, 141.8},
                      {"qwen3.5-397b-a17b", 64, 1, 64, 0, true, false, 110.5, 64.4, 174.9}};
  for (const Row& r : rows) {
    CAPTURE(r.model);
    CAPTURE(r.rank);
    config::Run run = run_on(r.gpus, r.pp, r.ep);
    if (r.vision) run.vision = config::VisionMode::Trained;
    if (r.bf16_gradients) run.optimizer.gradient_dtype = DType::BF16;
    const StaticState s = static_state(known_model(r.model), run, r.rank);
    CHECK(std::abs(gb(s.expert.total()) - r.expert) <= 0.05);
    CHECK(std::abs(gb(s.dense.total()) - r.dense) <= 0.05);
    CHECK(std::abs(gb(s.total()) - r.total) <= 0.05);
  }
}

TEST_CASE("18 bytes a parameter over all GPUs: the lower bounds of two recipes") {
  auto bound = [](const char* model, std::int64_t gpus) {
    return 18 * gb(totals(parameter_table(known_model(model))).sum()) / static_cast<double>(gpus);
  };
  CHECK(std::abs(bound("qwen3.5-122b-a10b", 48) - 46.9) <= 0.05);
  CHECK(std::abs(bound("qwen3.5-397b-a17b", 128) - 56.7) <= 0.05);
  CHECK(std::abs(bound("qwen3.5-35b-a3b", 2) - 323.6) <= 0.05);
}

// Megatron-Bridge verification cards: bytes of saved checkpoints. A checkpoint holds each weight
// once, and the optimizer state of every copy that is trained.
TEST_CASE("saved checkpoints: 27B at PP4, 35B at PP2") {
  struct Row {
    const char* model;
    std::int64_t pp, ep;
    double computed, saved, tolerance; // GB, GB, relative
  };
  for (const Row& r : {Row{"qwen3.5-27b", 4, 1, 404.197, 404.423, 6e-4},
                       Row{"qwen3.5-35b-a3b", 2, 8, 509.428, 509.637, 5e-4}}) {
    CAPTURE(r.model);
    const config::Model m = known_model(r.model);
    config::Run run = run_on(16, r.pp, r.ep);
    run.vision = config::VisionMode::Trained;
    const ParameterTable table = parameter_table(m, run);
    std::int64_t optimizer = 0;
    for (std::int64_t rank = 0; rank < r.pp; ++rank)
      for (const LocalParameter& p : local_parameters(table, m, run, rank)) {
        const bool expert = p.parameter->group == ParameterGroup::RoutedExpert;
        optimizer += p.elements * (expert ? r.ep : 1);
      }
    const double bytes = 2 * gb(totals(table).sum()) + 12 * gb(optimizer);
    CHECK(std::abs(bytes - r.computed) <= 0.0005);
    CHECK(std::abs(bytes / r.saved - 1) <= r.tolerance);
    // Without the last stage's copy of the embedding the miss would be 12 V h bytes more.
    CHECK(bytes - 12 * gb(m.vocab * m.hidden) < r.saved * (1 - 0.01));
  }
}

TEST_CASE("tensors start on 64 elements and buffers end on lcm(ranks, 128)") {
  const config::Model m = known_model("qwen3.5-35b-a3b");
  config::Run run = run_on(12, 1, 4); // dp 12, edp 3
  const ParameterTable table = parameter_table(m, run);
  const std::vector<StateBuffer> buffers = state_buffers(table, m, run, 0);
  REQUIRE(buffers.size() == 2);
  for (const StateBuffer& b : buffers) {
    CHECK(b.ranks == (b.expert ? 3 : 12));
    CHECK(b.elements % 384 == 0); // lcm(12, 128) = lcm(3, 128)
    std::int64_t end = 0;
    for (const BufferSlot& s : b.slots) {
      CHECK(s.offset % 64 == 0);
      CHECK(s.offset >= end);
      CHECK(s.offset - end < 64);
      end = s.offset + s.elements;
    }
    CHECK(b.elements >= end);
    CHECK(b.elements - end < 384);
  }
  // Experts are separate tensors: 64 local experts, two matrices, 41 layers (one of MTP).
  for (const StateBuffer& b : buffers)
    if (b.expert) CHECK(b.slots.size() == 64 * 2 * 41);
  // A_log (32), dt_bias (32) and the out norm (128) of TP1: the first two cost 32 elements of
  // padding.
  std::int64_t used = 0;
  for (const StateBuffer& b : buffers)
    if (!b.expert)
      for (const BufferSlot& s : b.slots) used += s.elements;
  for (const StateBuffer& b : buffers)
    if (!b.expert)
      CHECK(b.elements - used == 30 * 2 * 32 + (384 - (used + 30 * 2 * 32) % 384) % 384);
}

TEST_CASE("frozen parts cost their own bytes only; native keeps gates in fp32") {
  const config::Model m = known_model("qwen3.5-35b-a3b");
  config::Run run = run_on(1, 1, 1);
  run.optimizer.distributed = false;
  const StaticState text = static_state(m, run, 0);
  run.vision = config::VisionMode::Frozen;
  const StaticState frozen = static_state(m, run, 0);
  CHECK(frozen.total() - text.total() == 2 * Bytes{446571248});
  CHECK(frozen.dense.gradients == text.dense.gradients);
  run.vision = config::VisionMode::Trained;
  CHECK(static_state(m, run, 0).total() - text.total() == 18 * Bytes{446571248});

  run.vision = config::VisionMode::Absent;
  run.stack = "native"; // 30 layers x (A_log 32 + dt_bias 32): 4 + 4 + 8 instead of 2 + 4 + 12
  const StaticState native = static_state(m, run, 0);
  CHECK(native.dense.parameters - text.dense.parameters == 2 * 30 * 64);
  CHECK(native.dense.optimizer - text.dense.optimizer == -4 * 30 * 64);
}

TEST_CASE("virtual stages have buffers of their own, context parallel ranks share the optimizer") {
  const config::Model m = known_model("qwen3-next-80b-a3b");
  config::Run run = run_on(16, 2, 8);
  run.parallel.vp = 2;
  const ParameterTable table = parameter_table(m, run);
  CHECK(state_buffers(table, m, run, 0).size() == 4);
  config::Run cp = run_on(16, 1, 16);
  cp.parallel.cp = 4;
  const StaticState with_cp = static_state(m, cp, 0);
  cp.parallel.cp = 1;
  CHECK(with_cp.total() == static_state(m, cp, 0).total());
}
