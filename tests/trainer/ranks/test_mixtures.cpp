// 4 ranks: each kind, and the useful pairs.
#include "tests/trainer/ranks/equality.h"

using namespace gdn;
using namespace gdn::trainer;
using namespace gdn::trainer::ranks_test;
using config::LayerKind;
using config::MlpKind;
using config::Parallel;

namespace {

config::Model deep() {
  return small({LayerKind::Gdn, LayerKind::Attention, LayerKind::Gdn, LayerKind::Attention},
               {MlpKind::Moe, MlpKind::Dense, MlpKind::Dense, MlpKind::Moe});
}

void both(const config::Model& m, Parallel p, std::vector<std::string> modules = {}) {
  p.gpus = 4;
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    check_equal({m, run_of(stack, p), modules});
  }
}

} // namespace

TEST_CASE("4 ranks: data parallel") { both(hybrid(), {}); }
TEST_CASE("4 ranks: expert parallel") {
  Case c{hybrid(), run_of("megatron", {.ep = 4, .gpus = 4})};
  c.run.moe_imbalance = 4;
  check_equal(c);
  c.run.stack = "native";
  check_equal(c);
}
TEST_CASE("4 ranks: tensor parallel") {
  config::Model m = hybrid();
  m.attention.kv_heads = 4;
  both(m, {.tp = 4, .etp = 4, .sequence_parallel = true});
}
TEST_CASE("4 ranks: context parallel") { both(hybrid(), {.cp = 4}); }
TEST_CASE("4 ranks: pipeline") { both(deep(), {.pp = 4}); }

TEST_CASE("4 ranks: data x expert") { both(hybrid(), {.ep = 2}); }
TEST_CASE("4 ranks: expert x expert tensor") { both(hybrid(), {.ep = 2, .etp = 2}); }
TEST_CASE("4 ranks: tensor x expert") { both(hybrid(), {.tp = 2, .ep = 2, .sequence_parallel = true}); }
TEST_CASE("4 ranks: context x data") { both(hybrid(), {.cp = 2}); }
TEST_CASE("4 ranks: context x expert") { both(hybrid(), {.cp = 2, .ep = 2}); }
TEST_CASE("4 ranks: tensor x context") { both(hybrid(), {.tp = 2, .cp = 2, .ep = 2, .sequence_parallel = true}); }
TEST_CASE("4 ranks: pipeline x data") { both(deep(), {.pp = 2}); }
TEST_CASE("4 ranks: pipeline x expert, interleaved") { both(deep(), {.pp = 2, .vp = 2, .ep = 2}); }
TEST_CASE("4 ranks: tensor x pipeline") { both(deep(), {.tp = 2, .pp = 2, .etp = 2, .sequence_parallel = true}, {"moe"}); }
