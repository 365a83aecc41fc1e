#include <doctest/doctest.h>

#include "tests/program/lists.h"

using namespace gdn;
using namespace gdn::test;
using config::Build;
using config::LayerKind;
using config::MlpKind;

TEST_CASE("gated attention, everything pinned") {
  // 4h + 4 hidden; mixed, q copy, rotated q and k, v, output, gate, gated 2nd each or 2gd; statistics.
  CHECK(retained_per_token(module_alone(reference_model(), one_gpu(Build::Te), "attention")) == 69772);
}

TEST_CASE("expert side of a balanced MoE layer") {
  Traced t = module_alone(reference_model(), one_gpu(Build::Te), "moe");
  double expert = 0;
  for (const char* name : {"permuted", "permuted_prob", "e_fc1", "e_act"})
    expert += static_cast<double>(t.list.storage_of(t.list.find_tensor(name)).bytes) / static_cast<double>(t.list.tokens);
  CHECK(expert == 71720);
}

TEST_CASE("every unit builds and traces in both builds") {
  config::Model m = reference_model();
  m.mtp_layers = 1;
  for (Build build : {Build::Te, Build::Local})
    for (LayerKind mixer : {LayerKind::Gdn, LayerKind::Gdn2, LayerKind::Attention})
      for (MlpKind mlp : {MlpKind::Moe, MlpKind::Dense}) {
        Traced t = whole_layer(m, one_gpu(build), mixer, mlp);
        CHECK(t.levels.retained > 0);
        MESSAGE(t.list.name << " " << retained_per_token(t) << " fwd " << mib(t.levels.forward.bytes) << " bwd " << mib(t.levels.backward.bytes));
      }
  Traced head = traced(model::megatron::head_unit(m, one_gpu(Build::Te)), {}, false);
  Traced embedding = traced(model::megatron::embedding_unit(m, one_gpu(Build::Te)), {}, false);
  MESSAGE(retained_per_token(head) << " " << retained_per_token(embedding));
}
