#pragma once
#include <cstdlib>
#include <string>
#include <vector>

#include "config/profile.h"
#include "config/profiles.h"
#include "plan/estimate.h"

// Published rows: the sets of a file in profiles/measured, each with the run that it changes.
namespace gdn::test {

struct PublishedRow {
  std::string id;                 // "S1-4"
  config::ModelProfile profile;   // its model and run
  config::Hardware hardware;
  config::ProfileSet measured;

  // "memory.allocated_bytes", ...; 0 where it is not published.
  double value(std::string_view key) const {
    const config::ProfileRow* row = measured.find(key);
    return row ? row->value : 0;
  }
  plan::Estimate predicted() const {
    plan::Estimator estimator(profile.model, profile.run, hardware);
    return estimator.evaluate(plan::Setting::of(profile.run));
  }
};

inline std::string source_file(const std::string& path) {
  const char* root = std::getenv("GDN_SOURCE_ROOT");
  return std::string(root ? root : ".") + "/" + path;
}

// `file`: a name in profiles/measured without its ending.
inline std::vector<PublishedRow> published_rows(const std::string& file) {
  const config::Profile measured = config::read_profile(source_file("profiles/measured/" + file + ".yaml"));
  std::string run, hardware;
  for (const auto& [key, value] : measured.identity) {
    if (key == "run") run = source_file(value);
    if (key == "hardware") hardware = value;
  }
  const config::Profiles profiles;
  std::vector<PublishedRow> rows;
  for (const config::ProfileSet& set : measured.sets) {
    std::vector<config::Setting> settings;
    for (const std::string& text : set.settings) settings.push_back(config::parse_setting(text));
    PublishedRow row{set.modules, profiles.model(run, settings), {}, set};
    row.hardware = profiles.hardware(hardware.empty() ? row.profile.hardware : hardware);
    rows.push_back(std::move(row));
  }
  return rows;
}

} // namespace gdn::test
