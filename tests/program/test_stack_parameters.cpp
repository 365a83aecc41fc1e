#include <map>
#include <set>

#include <doctest/doctest.h>
#include <fmt/core.h>

#include "model/parameters.h"
#include "model/stack_lists.h"
#include "tests/program/lists.h"

using namespace gdn;
using namespace gdn::test;
using config::LayerKind;
using config::MlpKind;

namespace {

// Every parameter that a list names is in the table with as many elements on a rank, and the table has
// no trainable parameter that no list reads.
void check_against_table(const config::Model& m, const config::Run& run) {
  const model::ParameterTable table = model::parameter_table(m, run);
  std::set<std::string> read;
  auto check = [&](const model::OpList& list, const std::string& prefix) {
    for (const model::Op& op : list.ops)
      for (const model::ParamRef& p : op.params) {
        const std::string name = prefix + p.name;
        CAPTURE(name);
        const model::Parameter* parameter = table.find(name);
        REQUIRE(parameter != nullptr);
        CHECK(p.elements == model::local_elements(*parameter, run.parallel));
        CHECK(p.trainable == parameter->trainable);
        CHECK(p.dtype == model::stored_dtype(*parameter, run));
        read.insert(name);
      }
  };
  check(model::embedding_unit(m, run), "");
  for (size_t i = 0; i < m.mixers.size(); ++i)
    check(model::decoder_layer(m, run, m.mixers[i], m.mlps[i]), fmt::format("layers.{}.", i));
  check(model::head_unit(m, run), "");
  for (const model::Parameter& p : table.parameters) {
    CAPTURE(p.name);
    CHECK((read.count(p.name) == 1 || !p.trainable));
  }
}

config::Model every_layer() {
  config::Model m = reference_model();
  m.mixers = {LayerKind::Gdn, LayerKind::Gdn2, LayerKind::Gdn, LayerKind::Attention};
  m.mlps = {MlpKind::Moe, MlpKind::Dense, MlpKind::Moe, MlpKind::Moe};
  m.mtp_layers = 2;
  return m;
}

} // namespace

TEST_CASE("op lists and parameter table agree on names, elements and dtypes") {
  config::Model plain = every_layer();
  config::Model other = plain; // the options that add or reshape parameters
  other.gdn.bias = other.gdn.conv_bias = other.attention.qkv_bias = true;
  other.attention.whole_vector_qk_norm = true;
  other.attention.kv_heads = 4;
  other.attention.output_gate = other.moe.shared_gate = false;
  other.moe.score = "sigmoid";
  other.tied_embeddings = true;
  other.mlps.back() = MlpKind::Dense;
  config::Parallel one, tp, cp, ep;
  tp.tp = tp.gpus = 4; // more ranks than kv heads in `plain`
  tp.sequence_parallel = true;
  cp.cp = cp.gpus = 2;
  ep.ep = 8;
  ep.etp = 2;
  ep.gpus = 16;
  for (const char* stack : {"megatron", "native"})
    for (const config::Model* m : {&plain, &other})
      for (const config::Parallel& parallel : {one, tp, cp, ep}) {
        config::Run run = one_gpu(config::Build::Te);
        run.stack = stack;
        run.parallel = parallel;
        CAPTURE(stack);
        CAPTURE(m == &other);
        CAPTURE(parallel.tp);
        CAPTURE(parallel.cp);
        CAPTURE(parallel.ep);
        check_against_table(*m, run);
      }
}

TEST_CASE("both stacks count the same model FLOPs") {
  const config::Model m = every_layer();
  std::map<std::string, Flops> sum;
  for (const char* stack : {"megatron", "native"}) {
    config::Run run = one_gpu(config::Build::Te);
    run.stack = stack;
    for (size_t i = 0; i < m.mixers.size(); ++i)
      for (const model::Op& op : model::decoder_layer(m, run, m.mixers[i], m.mlps[i]).ops) sum[stack] += op.model_flops;
    for (const model::Op& op : model::head_unit(m, run).ops) sum[stack] += op.model_flops;
  }
  CHECK(sum["native"] == sum["megatron"]);
}
