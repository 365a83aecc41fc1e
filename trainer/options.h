#pragma once
#include <optional>
#include <string>
#include <vector>


#include "cli/command.h"
#include "report/document.h"
#include "trainer/device.h"
#include "trainer/setup.h"

namespace gdn::trainer {

// Options that every command on a configuration takes.
struct CommonOptions {
  std::string config;
  std::string device = "auto", provider, budget, folder;
  std::vector<config::Setting> settings; // --set and its shorthands, in the order given

  void add_to(cli::Command& command);
  Bytes budget_bytes(const Device& device) const; // --budget, else what the device has
  // --provider: whose scratch is laid out; the device's own if not given.
  const model::Provider& laid_out_for(const Device& device) const;
  // Where the command writes: -o, else runs/<name of the configuration>; created.
  std::filesystem::path output_folder() const;
};

// Only the first of several ranks prints and says anything.
// To stdout, as wide as the terminal but at most 100 columns, coloured where the user and the terminal
// want it (not with NO_COLOR, nor on TERM=dumb).
void print(const report::Document& document);
// One line on stderr.
void say(const std::string& line);

// Whether Ctrl-C (SIGINT, SIGTERM or SIGUSR1) has asked to stop; installs the handlers on first use. A
// second signal ends the program at once, with 130.
bool interrupted();

} // namespace gdn::trainer
