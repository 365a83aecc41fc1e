// 2 ranks of each kind equal 1 rank.
#include "tests/trainer/ranks/equality.h"

using namespace gdn;
using namespace gdn::trainer;
using namespace gdn::trainer::ranks_test;
using config::LayerKind;
using config::MlpKind;
using config::Parallel;

namespace {

config::Model dense() {
  return small({LayerKind::Gdn, LayerKind::Gdn2, LayerKind::Attention}, {MlpKind::Dense, MlpKind::Dense, MlpKind::Dense});
}

} // namespace

TEST_CASE("2 ranks: data parallel") {
  for (const char* stack : kStacks)
    for (bool distributed : {true, false}) {
      CAPTURE(stack);
      Case c{hybrid(), run_of(stack, {.gpus = 2})};
      c.run.optimizer.distributed = distributed;
      check_equal(c);
    }
}

TEST_CASE("2 ranks: expert parallel, dropless") {
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    check_equal({hybrid(), run_of(stack, {.ep = 2, .gpus = 2})});
  }
}

TEST_CASE("2 ranks: expert parallel, balanced and padded to capacity") {
  Case balanced{hybrid(), run_of("native", {.ep = 2, .gpus = 2})};
  balanced.run.moe_router_force_load_balancing = true;
  balanced.run.moe_imbalance = 1;
  check_equal(balanced);
  Case capacity{hybrid(), run_of("native", {.ep = 2, .gpus = 2})};
  capacity.run.moe_capacity_factor = 1.0;
  capacity.run.moe_imbalance = 1;
  check_equal(capacity);
}

TEST_CASE("2 ranks: expert tensor parallel") {
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    check_equal({hybrid(), run_of(stack, {.etp = 2, .gpus = 2})});
  }
}

TEST_CASE("2 ranks: tensor parallel") {
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    Case c{dense(), run_of(stack, {.tp = 2, .gpus = 2})};
    check_equal(c);
  }
}

TEST_CASE("2 ranks: tensor and sequence parallel") {
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    check_equal({dense(), run_of(stack, {.tp = 2, .sequence_parallel = true, .gpus = 2})});
    check_equal({hybrid(), run_of(stack, {.tp = 2, .etp = 2, .sequence_parallel = true, .gpus = 2})});
    check_equal({hybrid(), run_of(stack, {.tp = 2, .ep = 2, .sequence_parallel = true, .gpus = 2}), {"moe"}});
  }
}

TEST_CASE("2 ranks: tensor parallel, every loss") {
  using config::CrossEntropy;
  const config::Model m = small({LayerKind::Attention}, {MlpKind::Dense});
  for (bool sp : {false, true})
    for (CrossEntropy loss : {CrossEntropy::Unfused, CrossEntropy::FusedNative, CrossEntropy::FusedTe, CrossEntropy::ChunkedLinear}) {
      Case c{m, run_of("megatron", {.tp = 2, .sequence_parallel = sp, .gpus = 2})};
      c.run.cross_entropy = loss;
      c.run.loss_chunk = 24;
      check_equal(c);
    }
}

TEST_CASE("2 ranks: context parallel") {
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    check_equal({dense(), run_of(stack, {.cp = 2, .gpus = 2})});
    check_equal({hybrid(), run_of(stack, {.cp = 2, .gpus = 2})});
  }
}

TEST_CASE("2 ranks: context parallel, packed documents") {
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    check_equal(packed(hybrid(), run_of(stack, {.cp = 2, .gpus = 2})));
  }
}

TEST_CASE("2 ranks: pipeline") {
  const config::Model m = small({LayerKind::Gdn, LayerKind::Attention, LayerKind::Gdn, LayerKind::Attention},
                                {MlpKind::Moe, MlpKind::Dense, MlpKind::Dense, MlpKind::Moe});
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    check_equal({m, run_of(stack, {.pp = 2, .gpus = 2})});
    check_equal({m, run_of(stack, {.pp = 2, .vp = 2, .gpus = 2})});
  }
}

TEST_CASE("2 ranks: pipeline with tied embeddings and multi-token prediction") {
  for (const char* stack : kStacks) {
    CAPTURE(stack);
    Case c{hybrid(), run_of(stack, {.pp = 2, .gpus = 2})};
    c.model.tied_embeddings = true;
    c.model.mtp_layers = 1;
    check_equal(c);
  }
}

TEST_CASE("2 ranks: one of them without a single label, experts without rows") {
  auto no_labels = [](std::vector<Batch>& batches) {
    for (size_t i = 1; i < batches.size(); i += 2) batches[i].labels.assign(batches[i].labels.size(), -100);
  };
  for (const char* stack : kStacks) {
    Case c{hybrid(), run_of(stack, {.ep = 2, .gpus = 2})};
    c.edit = no_labels;
    c.model.moe.experts = 64; // 160 slots a micro-batch: some expert gets none
    check_equal(c);
  }
}
