#include <doctest/doctest.h>

#include <filesystem>

#include "core/error.h"
#include "plan/plan.h"
#include "tests/plan/published.h"

using namespace gdn;

namespace {

Bytes kept(plan::Estimator& e, const plan::Setting& setting) {
  Bytes sum = 0;
  for (const plan::LayerEstimate& l : e.layers(setting)) sum += l.retained;
  return sum;
}

// The legal settings of at most `few` modules, and of most.
std::vector<plan::Setting> few_or_all(plan::Estimator& e, size_t few) {
  std::vector<plan::Setting> legal = plan::legal_settings(e.workload(), false);
  size_t most = 0;
  for (const plan::Setting& s : legal) most = std::max(most, s.modules.size());
  std::erase_if(legal, [&](const plan::Setting& s) { return s.modules.size() > few && s.modules.size() < most; });
  return legal;
}

// Every module, every pair, and all: each has a price, and none keeps more than no recompute does.
void check_settings(const std::string& model, std::vector<config::Setting> settings) {
  CAPTURE(model);
  const config::Profiles profiles;
  const config::ModelProfile p = profiles.model(model, settings);
  if (p.model.parameters_only) return;
  const config::Hardware h200 = profiles.hardware("h200");
  plan::Estimator e(p.model, p.run, h200);
  const Bytes none = kept(e, {});
  size_t priced = 0;
  for (const plan::Setting& s : few_or_all(e, 2)) {
    CAPTURE(s.text());
    try {
      CHECK(e.evaluate(s).peak_bytes > 0);
      CHECK(kept(e, s) <= none);
      ++priced;
    } catch (const Error& error) {
      FAIL_CHECK(error.what());
    }
  }
  CHECK(priced > 2);
}

} // namespace

TEST_CASE("stack native: every module of every built-in model has a price, alone and beside each other") {
  for (const auto& l : config::Profiles().models()) check_settings(l.name, {{"stack", "native"}});
}

TEST_CASE("every example of a mode: each module and all of them have a price, whatever its stack") {
  const config::Profiles profiles;
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(test::source_file("examples/modes"))) {
    if (entry.path().extension() != ".yaml") continue;
    CAPTURE(entry.path().filename().string());
    const config::ModelProfile p = profiles.model(entry.path().string());
    const config::Hardware hardware = profiles.hardware(p.hardware);
    plan::Estimator e(p.model, p.run, hardware);
    for (const plan::Setting& s : few_or_all(e, 1)) {
      CAPTURE(s.text());
      CHECK_NOTHROW(e.evaluate(s));
    }
    ++files;
  }
  CHECK(files >= 20);
}

TEST_CASE("stack native: also where ranks share heads and sequences") {
  for (const char* cp : {"all_gather", "a2a"})
    for (const char* model : {"qwen3-next-80b-a3b", "olmo-hybrid-7b", "llama3-70b"})
      check_settings(model, {{"stack", "native"}, {"context_parallel_size", "2"}, {"cp_comm_type", cp}, {"gpus", "128"}});
}
