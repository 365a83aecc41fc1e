#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>

#include <fmt/core.h>

#include "config/model_io.h"
#include "config/yaml.h"
#include "identical.h"
#include "model/spans.h"
#include "plan/plan.h"
#include "reduced.h"

// Every example at reduced size, both stacks, every legal module set with every hypothetical form, each
// with and without spans of the user's: hundreds of programs an example. GDN_PART=1/3 runs a third of them.
using namespace gdn;
using namespace gdn::trainer;
using config::LayerKind;
using config::MlpKind;
namespace fs = std::filesystem;

namespace {

struct Share {
  size_t index = 0, count = 1;
  Share() {
    if (const char* text = std::getenv("GDN_PART")) {
      index = static_cast<size_t>(text[0] - '1');
      count = static_cast<size_t>(text[2] - '0');
    }
  }
  template <class T> std::vector<T> of(const std::vector<T>& all) const {
    std::vector<T> mine;
    for (size_t i = index; i < all.size(); i += count) mine.push_back(all[i]);
    return mine;
  }
};

// What decides a program: examples that differ in hardware, parallelism or name alone are one.
std::string content(fixture::Reduced r, config::ModelProfile p) {
  p.model = std::move(r.model);
  p.run = std::move(r.run);
  p.hardware = p.model.name = p.model.source = p.run.source = "";
  p.model.aliases.clear();
  p.run.stack = "";
  return config::to_yaml(config::to_node(p));
}

std::map<std::string, config::ModelProfile> distinct_examples() {
  std::map<std::string, config::ModelProfile> distinct;
  for (const auto& entry : fs::directory_iterator(std::getenv("GDN_EXAMPLES"))) {
    if (entry.path().extension() != ".yaml") continue;
    config::ModelProfile p = config::Profiles().model(entry.path().string(), {});
    distinct.emplace(content(fixture::reduced(p, p.run.stack), p), std::move(p));
  }
  return distinct;
}

// A replayed and a dropped run of ops in every layer kind of the stack that the model has.
std::vector<config::UserSpan> user_spans(const config::Model& m, const std::string& stack) {
  const bool native = stack == "native";
  const auto has = [](const auto& kinds, auto kind) { return std::find(kinds.begin(), kinds.end(), kind) != kinds.end(); };
  std::vector<config::UserSpan> spans;
  if (has(m.mixers, LayerKind::Gdn))
    spans.push_back(native ? config::UserSpan{"projection", "input_norm", "in_proj", true} : config::UserSpan{"front", "conv1d", "gates", true});
  if (has(m.mixers, LayerKind::Attention)) spans.push_back({"core", native ? "linear_qkv" : "rope_q", "output_gate", false});
  if (has(m.mlps, MlpKind::Moe)) spans.push_back({"experts", "expert_fc1", "expert_fc2", false});
  if (has(m.mlps, MlpKind::Dense)) spans.push_back({"dense", "mlp_fc1", "mlp_act", true});
  return spans;
}

// Native's cheap rebuilds are on by default; these turn them off.
std::vector<std::string> off_forms() {
  std::vector<std::string> off;
  for (const std::string& name : model::native_modules())
    if (name[0] == '-') off.push_back(name);
  return off;
}

// Each off, each pair off, all off, each off beside a module.
std::vector<plan::Setting> rebuilds_off() {
  std::vector<std::string> off, on;
  for (const std::string& name : model::native_modules()) (name[0] == '-' ? off : on).push_back(name);
  std::vector<plan::Setting> out{fixture::modules(off)};
  for (size_t i = 0; i < off.size(); ++i) {
    out.push_back(fixture::modules({off[i]}));
    for (size_t j = 0; j < i; ++j) out.push_back(fixture::modules({off[i], off[j]}));
    for (const std::string& name : on) out.push_back(fixture::modules({off[i], name}));
  }
  return out;
}

} // namespace

TEST_CASE("every example: every module set, with and without the user's spans") {
  const Share part;
  const auto examples = distinct_examples();
  CHECK(examples.size() >= 4);
  for (const auto& [text, profile] : examples)
    for (const char* stack : {"megatron", "native"}) {
      fixture::Reduced r = fixture::reduced(profile, stack);
      r.run.recompute.user_spans = user_spans(r.model, stack);
      CAPTURE(profile.model.name);
      CAPTURE(std::string(stack));
      CpuDevice device;
      Session s(r.model, r.run, device);
      std::vector<plan::Setting> settings = plan::legal_settings(s.workload(), true);
      if (r.run.stack == "native")
        for (plan::Setting& x : rebuilds_off()) settings.push_back(std::move(x));
      // The spans in turn, one to a set: all at once mostly stand in each other's way.
      size_t turn = 0;
      for (plan::Setting& x : settings)
        if (x.user_spans.size() > 1) x.user_spans = {x.user_spans[turn++ % x.user_spans.size()]};
      // Settings come with and without a span in turn: every part is to have both.
      std::stable_partition(settings.begin(), settings.end(), [](const plan::Setting& x) { return x.user_spans.empty(); });
      const std::vector<plan::Setting> mine = part.of(settings);
      const size_t ran = fixture::check_identical(s, mine, fixture::is_hypothetical);
      CHECK(ran > mine.size() / 3);
      MESSAGE(fmt::format("{} {}: {} of {} settings ran", profile.model.name, stack, ran, mine.size()));
    }
}

// Every run of consecutive ops of a layer as a span, replayed whole or dropped; beside it nothing else is
// rebuilt, or most spans would cut through native's own.
TEST_CASE("every possible span of the user's, on every layer kind") {
  const Share part;
  const std::pair<LayerKind, MlpKind> layers[] = {{LayerKind::Gdn, MlpKind::Moe}, {LayerKind::Attention, MlpKind::Dense},
                                                  {LayerKind::Gdn2, MlpKind::Dense}};
  for (const char* stack : {"megatron", "native"})
    for (const auto& [mixer, mlp] : layers) {
      config::ModelProfile p = config::Profiles().model("tiny", {});
      p.model.mixers = {mixer};
      p.model.mlps = {mlp};
      fixture::Reduced r = fixture::reduced(p, stack);
      CAPTURE(std::string(stack));
      CAPTURE(std::string(config::name_of(mixer)));
      CpuDevice device;
      Session s(r.model, r.run, device);
      const auto chunk = model::chunks_of_rank(1, r.run.parallel, 0)[0];
      const model::OpList& list = *s.workload().units(chunk, {})[1].unit->list;
      std::vector<plan::Setting> settings;
      for (size_t i = 0; i < list.ops.size(); ++i)
        for (size_t j = i; j < list.ops.size(); ++j)
          for (bool discard : {false, true}) {
            plan::Setting x = fixture::modules(r.run.stack == "native" ? off_forms() : std::vector<std::string>{});
            x.granularity = config::Granularity::Selective;
            x.user_spans = {{"mine", list.ops[i].name, list.ops[j].name, discard}};
            settings.push_back(std::move(x));
          }
      const std::vector<plan::Setting> mine = part.of(settings);
      const size_t ran = fixture::check_identical(s, mine, fixture::is_hypothetical);
      CHECK(ran > mine.size() / 3);
      MESSAGE(fmt::format("{} {} {}: {} of {} spans ran", stack, config::name_of(mixer), config::name_of(mlp), ran, mine.size()));
    }
}
