#include <doctest/doctest.h>

#include "model/native/gdn.h"
#include "model/spans.h"
#include "program/summary.h"

using namespace gdn;

namespace {

program::Levels native_levels(std::int64_t key_heads, std::int64_t value_heads, std::vector<std::string> modules) {
  config::Model m;
  m.hidden = 2048;
  m.gdn.key_heads = key_heads;
  m.gdn.value_heads = value_heads;
  config::Run run;
  run.stack = "native";
  run.seq = 8192;
  model::Dims d = model::Dims::of(m, run);
  model::Builder b("gdn");
  model::TensorId x = b.input("x", run.dtype, {d.tokens_sp, d.hidden}, true);
  model::TensorId out = model::native::gdn_mixer(b, x, m, run, d);
  b.hold(out, model::HoldKind::Caller);
  model::OpList list = b.finish(out, d.tokens);
  std::vector<model::Span> spans = model::spans_for(list, modules, {}, "native");
  program::TraceOptions options;
  options.external_output_gradient = true;
  program::UnitTrace t = program::trace(list, spans, model::upstream_provider(), options);
  for (const program::Event& e : t.events)
    if (e.pass == program::Pass::Replay) {
      model::OpKind kind = list.ops[static_cast<size_t>(e.op)].kind;
      CHECK(kind != model::OpKind::Linear);
      CHECK(kind != model::OpKind::Rule);
    }
  return program::levels(t);
}

} // namespace

TEST_CASE("native keeps at most 45 % of Megatron's bytes per GDN layer, replaying no GEMM and no rule") {
  // Megatron, build local, caller-side norm, input not counted: 2D + 4QK + 8Hk + 4Hv dk + 8V + 138 Hv.
  for (std::int64_t r : {1, 2, 3, 4}) { // 44 % at r = 1
    CAPTURE(r);
    const std::int64_t hk = 16, hv = 16 * r, qk = hk * 128, v = hv * 128, d = 2 * qk + 2 * v + 2 * hv;
    const std::int64_t megatron = 2 * d + 4 * qk + 8 * hk + 4 * hv * 128 + 8 * v + 138 * hv;
    const std::int64_t native = native_levels(hk, hv, {}).retained / 8192 - 2 * 2048;
    CHECK(static_cast<double>(native) <= 0.45 * static_cast<double>(megatron));
    // projection, inverse, rule output, gate sums: nothing else
    CHECK(native == 2 * d + 128 * hv + 2 * v + 4 * hv);
  }
}
