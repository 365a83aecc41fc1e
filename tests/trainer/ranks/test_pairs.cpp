// More pairs of 4 ranks, and what needs both of them: shared key-value heads, heads exchanged for attention.
#include <limits>

#include "core/error.h"
#include "tests/trainer/ranks/equality.h"

using namespace gdn;
using namespace gdn::trainer;
using namespace gdn::trainer::ranks_test;
using config::LayerKind;
using config::MlpKind;
using config::Parallel;

namespace {

config::Model deep_gdn2() {
  return small({LayerKind::Gdn, LayerKind::Attention, LayerKind::Gdn2, LayerKind::Attention},
               {MlpKind::Moe, MlpKind::Dense, MlpKind::Moe, MlpKind::Moe});
}

void both_stacks(const config::Model& m, Parallel p, std::string cp_comm_type = "all_gather", std::vector<std::string> modules = {}, std::int64_t micro_batches = 4) {
  p.gpus = 4;
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    Case c{m, run_of(stack, p, micro_batches), modules};
    c.run.cp_comm_type = cp_comm_type;
    check_equal(c);
  }
}

} // namespace

TEST_CASE("pairs of 4 ranks: tensor x pipeline, interleaved, experts over the tensor ranks") {
  both_stacks(deep_gdn2(), {.tp = 2, .pp = 2, .vp = 2, .ep = 2, .sequence_parallel = true}, "all_gather", {"moe"});
}
TEST_CASE("pairs of 4 ranks: pipeline x context, and its packed documents") {
  both_stacks(deep_gdn2(), {.cp = 2, .pp = 2});
  for (const char* stack : kStacks) check_equal(packed(deep_gdn2(), run_of(stack, {.cp = 2, .pp = 2, .vp = 2, .gpus = 4})));
}
TEST_CASE("pairs of 4 ranks: tensor x context, heads exchanged for attention") {
  config::Model m = hybrid();
  m.attention.kv_heads = 4;
  both_stacks(m, {.tp = 2, .cp = 2, .sequence_parallel = true}, "a2a");
  both_stacks(m, {.tp = 2, .cp = 2, .ep = 4, .sequence_parallel = true}, "all_gather");
}
TEST_CASE("pairs of 4 ranks: context parallel by heads needs heads") {
  config::Run run = run_of("native", {.cp = 4, .gpus = 4});
  run.cp_comm_type = "a2a";
  CpuDevice device;
  const Ranks ranks(world(), run.parallel);
  CHECK_THROWS_WITH_AS(Session(hybrid(), run, device, std::numeric_limits<Bytes>::max(), nullptr, &ranks),
                       doctest::Contains("2 key-value heads a TP rank do not divide by context_parallel_size 4"), Error);
}

// Two key-value heads on four ranks: pairs of them compute one twice, each for its own query heads.
TEST_CASE("pairs of 4 ranks: more tensor ranks than key-value heads") {
  both_stacks(hybrid(), {.tp = 4, .etp = 4, .sequence_parallel = true}, "all_gather", {"moe"}, 2);
  config::Model plain = small({LayerKind::Attention}, {MlpKind::Dense});
  plain.attention.heads = 8; // two of each rank
  plain.attention.output_gate = false;
  plain.attention.qk_norm = false;
  plain.attention.qkv_bias = true;
  both_stacks(plain, {.tp = 4}, "all_gather", {}, 1);
  plain.attention.output_gate = true;
  plain.attention.kv_heads = 1;
  both_stacks(plain, {.tp = 4, .sequence_parallel = true}, "all_gather", {}, 1);
}

// Replays that exchange heads again, alone and one inside the other.
TEST_CASE("pairs of 4 ranks: exchanges replayed") {
  auto check = [](const config::Model& m, const char* stack, std::vector<std::string> modules) {
    CAPTURE(stack);
    CAPTURE(modules.front());
    check_equal({m, run_of(stack, {.cp = 2, .gpus = 4}, 2), std::move(modules)});
  };
  config::Model m = small({LayerKind::Gdn, LayerKind::Gdn2, LayerKind::Attention}, {MlpKind::Dense, MlpKind::Moe, MlpKind::Dense});
  m.attention.qk_norm = false; // then nothing but a replay reads the projection again
  check(m, "native", {"gdn_rule", "attention_proj"});
  check(m, "native", {"gdn_norm_out", "gdn_proj"});
  check(m, "native", {"gdn_norm_out", "gdn_proj", "gdn_rule", "attention"});
  check(hybrid(), "megatron", {"gdn_qkv", "gdn_norm_out", "core_attn"});
}
