#include <doctest/doctest.h>

#include "model/megatron/gdn.h"
#include "model/spans.h"
#include "program/summary.h"
#include "tests/program/lists.h"

using namespace gdn;
using namespace gdn::test;

namespace {

config::Model qwen35_35b() {
  config::Model m;
  m.name = "gdn-only";
  m.hidden = 2048;
  return m; // GdnShape's defaults are the reference shape
}

program::Levels module_levels(const config::Model& model, const config::Run& run, std::vector<std::string> modules) {
  model::Dims d = model::Dims::of(model, run);
  model::Builder b("gdn");
  model::TensorId x = b.input("x", run.dtype, {d.tokens_sp, d.hidden}, true);
  model::TensorId out = model::megatron::gdn_mixer(b, x, model, run, d);
  b.hold(out, model::HoldKind::Caller);
  model::OpList list = b.finish(out, d.tokens);
  std::vector<model::Span> spans = model::spans_for(list, modules, {}, "megatron");
  program::TraceOptions options;
  options.external_output_gradient = true;
  return program::levels(program::trace(list, spans, model::upstream_provider(), options));
}

} // namespace

TEST_CASE("one GDN module of Megatron-LM, build local, measured on an H200") {
  struct Row {
    const char* revision;
    std::vector<std::string> modules;
    std::int64_t retained;
    double forward, backward, tolerance;
  };
  // bytes per token; MiB; the measured rows and their accepted difference.
  const Row rows[] = {{"main", {}, 86592, 1060.5, 1478.0, 0},
                      {"main", {"gdn_norm_out"}, 78272, 1060.5, 1478.0, 0},
                      {"main+gdn_qkv", {"gdn_qkv"}, 53568, 674.5, 1220.0, 0},
                      {"main+gdn_qkv", {"gdn_qkv", "gdn_norm_out"}, 45248, 674.5, 1220.0, 0},
                      {"main+gdn_qkv", {}, 86592, 932.5, 1478.0, 0},
                      {"main+gdn_qkv", {"gdn_norm_out"}, 78272, 932.5, 1478.0, 0}};
  for (const Row& row : rows) {
    CAPTURE(row.revision);
    CAPTURE(row.modules.size());
    program::Levels l = module_levels(qwen35_35b(), one_gpu(config::Build::Local, row.revision), row.modules);
    CHECK(l.retained - 2 * 2048 * 8192 == row.retained * 8192); // beyond the input x
    CHECK(mib(l.forward.bytes) == doctest::Approx(row.forward).epsilon(1e-9));
    CHECK(mib(std::max(l.backward.bytes, l.replay.bytes)) == doctest::Approx(row.backward).epsilon(1e-9));
  }
}
