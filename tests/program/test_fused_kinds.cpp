#include <algorithm>
#include <set>

#include <doctest/doctest.h>

#include "core/error.h"
#include "model/kinds/definitions.h"
#include "model/stack_lists.h"
#include "program/summary.h"
#include "tests/program/lists.h"

using namespace gdn;
using namespace gdn::test;
using model::OpKind;
using model::Tensor;

namespace {

void check_definition(const model::OpList& list, const model::Op& op) {
  CAPTURE(op.name);
  const model::Definition d = model::definition(list, op);
  REQUIRE(d.inputs.size() == op.inputs.size());
  REQUIRE(d.outputs.size() == op.outputs.size());
  for (size_t i = 0; i < d.inputs.size(); ++i) {
    const Tensor &mine = d.list.tensor(d.inputs[i]), &fused = list.tensor(op.inputs[i]);
    CHECK(mine.dtype == fused.dtype);
    CHECK(mine.shape == fused.shape);
    CHECK(mine.row_stride == fused.row_stride);
  }
  for (size_t i = 0; i < d.outputs.size(); ++i) {
    const Tensor &mine = d.list.tensor(d.outputs[i]), &fused = list.tensor(op.outputs[i]);
    CHECK(mine.dtype == fused.dtype);
    CHECK(mine.shape == fused.shape);
    CHECK(mine.row_stride == mine.cols()); // contiguous in storages of their own
    CHECK(mine.base < 0);
  }
  std::set<std::string> parameters;
  Flops flops = 0;
  for (const model::Op& plain : d.list.ops) {
    CHECK_FALSE(model::is_fused(plain.kind));
    flops += plain.model_flops;
    for (const model::ParamRef& p : plain.params) {
      CHECK(parameters.insert(p.name).second);
      const bool known = std::any_of(op.params.begin(), op.params.end(),
                                     [&](const model::ParamRef& q) { return q.name == p.name && q.elements == p.elements; });
      CHECK(known);
    }
  }
  CHECK(parameters.size() == op.params.size());
  CHECK(flops == op.model_flops);
  // Each input's gradient follows from those of the outputs through the plain ops' steps.
  std::set<model::TensorId> reached(d.outputs.begin(), d.outputs.end());
  for (auto plain = d.list.ops.rbegin(); plain != d.list.ops.rend(); ++plain)
    for (const model::Step& s : plain->steps)
      for (model::TensorId t : s.grad_reads)
        if (reached.count(t)) {
          for (model::TensorId w : s.grad_writes)
            for (model::TensorId base = w; base >= 0; base = d.list.tensor(base).base) reached.insert(base);
          break;
        }
  for (model::TensorId t : d.inputs) CHECK(reached.count(t) == 1);
}

} // namespace

TEST_CASE("a fused op and its definition have the same inputs, outputs, parameters and FLOPs") {
  config::Model plain = reference_model(), other = plain;
  other.gdn.conv_bias = true;
  other.gdn.use_qk_l2norm = other.attention.rope = other.attention.output_gate = false;
  other.attention.whole_vector_qk_norm = true;
  config::Model bare = plain;
  bare.attention.qk_norm = false;
  config::Run run = one_gpu(config::Build::Te);
  run.stack = "native";
  std::set<OpKind> seen;
  for (const config::Model* m : {&plain, &other, &bare})
    for (const char* module : {"gdn", "gdn2", "attention"}) {
      CAPTURE(module);
      const model::OpList list = model::module_list(*m, run, module);
      for (const model::Op& op : list.ops)
        if (model::is_fused(op.kind)) {
          check_definition(list, op);
          seen.insert(op.kind);
        }
    }
  for (int k = 0; k <= static_cast<int>(OpKind::Toy); ++k)
    CHECK(model::is_fused(static_cast<OpKind>(k)) == (seen.count(static_cast<OpKind>(k)) == 1));
}

TEST_CASE("a plain kind has no definition") {
  config::Run run = one_gpu(config::Build::Te);
  run.stack = "native";
  const model::OpList list = model::module_list(reference_model(), run, "mlp");
  CHECK_THROWS_AS(model::definition(list, list.ops[0]), Error);
}
