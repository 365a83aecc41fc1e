#include <doctest/doctest.h>

#include <set>

#include "model/stack_lists.h"
#include "model/upstream.h"
#include "tests/program/lists.h"

using namespace gdn;
using namespace gdn::test;
using config::Build;
using config::LayerKind;
using config::MlpKind;
using model::OpKind;

namespace {

// Layers and ends of a stack that, together, have all of its kinds.
std::vector<model::OpList> lists(const std::string& stack) {
  std::vector<model::OpList> out;
  config::Model m = reference_model();
  m.mtp_layers = 1;
  for (std::int64_t parallel : {1, 2})
    for (bool plain : {false, true}) {
      config::Run run = one_gpu(plain ? Build::Local : Build::Te, "main", 512);
      run.parallel.tp = run.parallel.cp = run.parallel.ep = run.parallel.etp = parallel;
      run.parallel.gpus = 16;
      run.parallel.sequence_parallel = parallel > 1;
      run.stack = stack;
      run.moe_permute_fusion = !plain;
      if (stack == "megatron") {
        run.deterministic = plain;
        run.fused_attention = !plain;
        run.hidden_dropout = run.attention_dropout = plain ? 0.1 : 0;
      }
      run.cross_entropy = plain ? config::CrossEntropy::ChunkedLinear : config::CrossEntropy::FusedTe;
      run.loss_chunk = 128;
      for (LayerKind mixer : {LayerKind::Gdn, LayerKind::Gdn2, LayerKind::Attention})
        for (MlpKind mlp : {MlpKind::Moe, MlpKind::Dense}) out.push_back(model::decoder_layer(m, run, mixer, mlp));
      out.push_back(model::embedding_unit(m, run));
      out.push_back(model::head_unit(m, run));
      run.cross_entropy = config::CrossEntropy::Unfused;
      out.push_back(model::head_unit(m, run));
    }
  return out;
}

} // namespace

TEST_CASE("every op kind has an implementation upstream, or a reason why it has none") {
  const auto& entries = model::upstream::entries();
  REQUIRE(entries.size() == static_cast<size_t>(OpKind::Toy) + 1);
  for (size_t i = 0; i < entries.size(); ++i) {
    CAPTURE(model::name_of(entries[i].kind));
    CHECK(static_cast<size_t>(entries[i].kind) == i);
    CHECK((entries[i].work != nullptr) == entries[i].reason.empty());
  }
}

TEST_CASE("every implemented kind occurs in a list of a stack, and every run of it has a sane cost") {
  std::set<OpKind> seen;
  std::vector<model::OpList> all = lists("megatron");
  for (model::OpList& list : lists("native")) all.push_back(std::move(list));
  for (const model::OpList& list : all)
    for (const model::Op& op : list.ops) {
      seen.insert(op.kind);
      for (int step = -1; step < static_cast<int>(op.steps.size()); ++step) {
        CAPTURE(op.name);
        CAPTURE(step);
        const model::Work w = model::upstream_provider().work(list, op, step);
        CHECK(w.scratch >= 0);
        CHECK((w.family == model::Family::None) == (w.kernels == 0));
        if (w.family == model::Family::None) continue;
        CHECK(w.traffic > 0);
        CHECK(w.size > 0);
        const bool matrix = w.family == model::Family::Gemm || w.family == model::Family::GroupedGemm || w.family == model::Family::Attention;
        CHECK(!(matrix && w.flops <= 0));
      }
    }
  for (const auto& entry : model::upstream::entries())
    if (entry.work && entry.kind != OpKind::Toy) {
      CAPTURE(model::name_of(entry.kind));
      CHECK(seen.contains(entry.kind));
    }
}

TEST_CASE("executed FLOPs: GEMMs equal their model FLOPs, forward and each backward step") {
  for (const model::OpList& list : lists("megatron"))
    for (const model::Op& op : list.ops)
      if ((op.kind == OpKind::Linear || op.kind == OpKind::GroupedLinear || op.kind == OpKind::LmHead) && !op.name.ends_with("router")) {
        CAPTURE(op.name);
        for (int step = -1; step < 2; ++step) CHECK(model::upstream_provider().work(list, op, step).flops == op.model_flops);
      }
}

TEST_CASE("FLA's rule: 11 units of 16,384 FLOP a token and head and the inverse forward; about 32 backward") {
  const model::OpList list = model::megatron::module_list(reference_model(), one_gpu(Build::Te), "gdn");
  const model::Op& rule = list.ops[static_cast<size_t>(list.find_op("rule"))];
  const double token_heads = 8192.0 * 32;
  CHECK(model::upstream_provider().work(list, rule, -1).flops == 11.5 * 16384 * token_heads);
  CHECK(model::upstream_provider().work(list, rule, 0).flops == doctest::Approx(32 * 16384 * token_heads).epsilon(0.05));
  // Published kernel by kernel for keys shared by two heads: 4,000 bytes forward; 10,204 backward without
  // the norm's and the reduction over shared heads. Here q and k have 32 heads of their own: 128 bytes
  // more each of the 5 (9) times that a kernel reads them.
  CHECK(static_cast<double>(model::upstream_provider().work(list, rule, -1).traffic) == (4000 + 5 * 128) * token_heads);
  CHECK(static_cast<double>(model::upstream_provider().work(list, rule, 0).traffic) == (10204 + 9 * 128 + 2) * token_heads);
}

TEST_CASE("sequence parallelism: what other ranks hold is scratch of the run") {
  config::Run run = one_gpu(Build::Te);
  run.parallel.tp = run.parallel.gpus = 2;
  run.parallel.sequence_parallel = true;
  const Traced t = module_alone(reference_model(), run, "gdn");
  const Bytes full = Bytes{8192} * 2048 * 2;
  auto scratch = [&](const char* op, int step) { return model::upstream_provider().work(t.list, op_of(t, op), step).scratch; };
  CHECK(scratch("in_proj", -1) == full);  // gathered ln_out, 2h N
  CHECK(scratch("in_proj", 0) == full);   // d:ln_out before its reduction
  CHECK(scratch("in_proj", 1) == full);   // gathered again
  CHECK(scratch("out_proj", -1) == full); // output before its reduction
  CHECK(op_of(t, "in_proj").steps[1].collectives[0].kind == model::CollectiveKind::AllGather);
  CHECK(op_of(t, "out_proj").collectives[0].kind == model::CollectiveKind::ReduceScatter);
}

TEST_CASE("dispatcher: received rows wait in a buffer while they are sorted by local expert") {
  config::Run run = one_gpu(Build::Te);
  run.parallel.ep = run.parallel.gpus = 8;
  const Traced many = module_alone(reference_model(), run, "moe");
  CHECK(model::upstream_provider().work(many.list, op_of(many, "dispatch"), -1).scratch == Bytes{81920} * (4096 + 4));
  run.parallel.ep = run.parallel.gpus = 512; // one expert a rank: received in order
  const Traced one = module_alone(reference_model(), run, "moe");
  CHECK(model::upstream_provider().work(one.list, op_of(one, "dispatch"), -1).scratch == 0);
  // Unfused permutation sorts [E, T] indices in int64.
  run.moe_permute_fusion = false;
  const Traced sorted = module_alone(reference_model(), run, "moe");
  CHECK(model::upstream_provider().work(sorted.list, op_of(sorted, "permute"), -1).scratch >= Bytes{8} * 512 * 8192);
}
