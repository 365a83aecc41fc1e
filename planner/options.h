#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "config/profiles.h"
#include "core/units.h"
#include "report/document.h"
#include "report/html.h"

namespace gdn::planner {

// Options that every command on a model takes.
struct ModelOptions {
  std::string model;
  std::string hardware;                    // empty: the model profile's
  std::string run_file, profiles_folder;
  std::vector<config::Setting> settings;   // --set and its shorthands, in the order given
  std::vector<std::string> spans;          // --span
  std::string budget;                      // --budget

  void add_to(cli::Command& command);

private:
  void shorthand(cli::Command& command, const std::string& flag, const std::string& key, const std::string& help);
};

// A model with everything a command plans it with.
struct Case {
  config::ModelProfile profile;
  config::Hardware hardware;
  std::optional<Bytes> budget;
  std::vector<std::string> overrides = {}; // "seq_length=8192": what flags and files changed
};
// Throws Error{Usage} when one of these keys of the run was given by an option: `why`.
void refuse_keys(const ModelOptions& options, const std::vector<std::string>& keys, const std::string& why, const std::string& instead);
Case load(const ModelOptions& options);

// Where and how results go.
struct OutputOptions {
  std::string format = "text", file, colour = "auto";

  void add_to(cli::Command& command, const std::vector<std::string>& formats);
  report::TextStyle style() const;
};

using Json = nlohmann::ordered_json;

// What a command says, in each of its forms; unset forms are not offered by the command.
struct Output {
  report::Document text;
  std::function<Json()> json;
  std::function<std::string()> yaml;
  std::function<report::Page()> html;
  std::function<std::string()> svg;      // one figure
  std::function<report::Document()> csv; // raw numbers for scripts; unset: the text's own tables
};
// Writes to stdout, or whole to -o FILE (a temporary beside it, renamed). The format follows the file's
// ending unless --format says otherwise. Throws Error{Io}.
void write(const Output& output, const OutputOptions& options);

// A value a user asked for that is a flag as well as a YAML key, so that "who said it" can be printed.
std::string join(const std::vector<std::string>& words, const std::string& between = " ");

} // namespace gdn::planner
