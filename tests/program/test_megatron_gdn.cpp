#include <doctest/doctest.h>

#include "tests/program/lists.h"

using namespace gdn;
using namespace gdn::test;
using config::Build;

namespace {

// Without the module's input, 2h = 4,096 B/token, which is the caller's.
double beyond_input(const Traced& t) { return retained_per_token(t) - 4096; }

double gdn_retained(Build build, const std::string& revision, const std::vector<std::string>& modules,
                    config::L2Norm l2norm = config::L2Norm::Caller) {
  config::Run run = one_gpu(build, revision);
  run.l2norm = l2norm;
  return beyond_input(module_alone(reference_model(), run, "gdn", modules));
}

} // namespace

TEST_CASE("GDN module: retained bytes per token of both builds, for every module") {
  struct Row {
    std::vector<std::string> modules;
    double local, te;
  };
  const Row rows[] = {{{}, 86592, 98884},
                      {{"gdn_norm_out"}, 78272, 82372},
                      {{"gdn_qkv"}, 53568, 61760},
                      {{"gdn_qkv", "gdn_norm_out"}, 45248, 45248},
                      {{"gdn_qkv:discard"}, 20736, 28928},
                      {{"gdn_qkv:discard", "gdn_norm_out"}, 12416, 12416},
                      {{"gdn"}, 0, 0}};
  for (const Row& row : rows) {
    CAPTURE(row.modules);
    CHECK(gdn_retained(Build::Local, "main+gdn_qkv", row.modules) == row.local);
    CHECK(gdn_retained(Build::Te, "main+gdn_qkv", row.modules) == row.te);
  }
}
