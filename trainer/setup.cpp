#include "trainer/setup.h"

#include <fmt/core.h>

#include "config/text.h"
#include "config/yaml.h"
#include "core/error.h"
#include "kernels/describe/own.h"
#include "model/provider.h"
#include "model/validate.h"
#include "plan/workload.h"
#include "trainer/executed.h"

namespace gdn::trainer {

Setup load_setup(const std::string& file, const std::vector<config::Setting>& settings) {
  Setup s;
  s.file = file;
  std::vector<config::Setting> rest, train;
  for (const config::Setting& setting : settings)
    (setting.key.rfind("train.", 0) == 0 ? train : rest).push_back(setting);
  const config::Node map = config::parse_yaml(config::read_text_file(s.file), file);
  s.profile = config::Profiles().model(std::filesystem::path(file).is_absolute() ? file : "./" + file, rest);
  if (const config::Node* n = map.find("train")) s.train = config::read_train(*n);
  for (const config::Setting& t : train) config::apply(s.train, t.key.substr(6), t.value, t.where);
  const config::Node* block = map.find("train");
  config::check_complete(s.train, block ? block->where : file);
  s.setting = plan::Setting::of(s.profile.run);
  if (!s.setting.user_spans.empty()) plan::Workload(s.profile.model, s.profile.run, kernels::provider_of(s.profile.run.stack)).require_known_ops(s.setting);
  for (const model::Violation& v : model::validate(s.profile.model, s.profile.run))
    if (v.verdict == model::Verdict::Rejected) throw Error(ErrorCode::Config, model::describe(v), "gdnplan check lists every violation");
  if (!s.profile.hardware.empty()) config::Profiles().hardware(s.profile.hardware); // a name nobody knows: now, not after the last step
  require_executed(s.profile.model, s.profile.run, {&map, &rest});
  return s;
}

std::string resolved_yaml(const Setup& s) {
  config::Node out = config::to_node(s.profile);
  config::Train train = s.train;
  if (!train.data_path.empty() && std::filesystem::path(train.data_path).is_relative())
    train.data_path = std::filesystem::absolute(s.folder() / train.data_path).lexically_normal().string();
  out.set("train", config::to_node(train));
  return config::to_yaml(out);
}

config::Profile profile_identity(const Setup& s, const Device& device, const model::Provider& provider,
                                 const std::string& command) {
  const config::Run& run = s.profile.run;
  config::Profile p;
  p.identity = {{"model", s.profile.model.name}, {"run", run.source}, {"stack", run.stack},
                {"build", std::string(config::name_of(run.build))}, {"revision", run.revision.text()},
                {"provider", std::string(provider.name())}, {"hardware", s.profile.hardware},
                {"device", device.name()}, {"kind", "measured"}, {"program", "gdntrain"}, {"command", command}};
  return p;
}

} // namespace gdn::trainer
