#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "config/profile.h"
#include "config/profiles.h"
#include "config/train.h"
#include "plan/setting.h"
#include "trainer/device.h"

namespace gdn::trainer {

// A configuration file, read and checked: a model file (its own keys, or `base:` a profile), `run:` and
// `train:`.
struct Setup {
  std::filesystem::path file;
  config::ModelProfile profile;
  config::Train train;
  plan::Setting setting;      // what the run recomputes

  std::filesystem::path folder() const { return file.parent_path(); }
};

// Settings are `--set`s: "train.KEY" belongs to the train block, all others to model and run. Throws
// Error{Config} for anything unknown, for the first rule of the target stack that the run breaks, and
// for the first setting that is priced but not executed (executed.h).
Setup load_setup(const std::string& file, const std::vector<config::Setting>& settings);

// The whole resolved configuration; loading it gives the same setup.
std::string resolved_yaml(const Setup& setup);

// Who measured what, for the head of a gdn.profile/1.
config::Profile profile_identity(const Setup& setup, const Device& device, const model::Provider& provider,
                                 const std::string& command);

} // namespace gdn::trainer
