#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "config/model.h"
#include "config/node.h"
#include "config/profiles.h"
#include "config/run.h"

// Which settings a step of gdntrain acts on. gdnplan prices more than is executed; whatever is not
// executed is refused by name, never ignored.
namespace gdn::trainer {

enum class Treatment {
  Executed, // a step acts on it
  NoEffect, // it changes nothing that a step computes or holds
  Fixed     // one value is executed: its default; any other is refused
};

struct ExecutedSetting {
  std::string_view key;             // of the run, or of the model
  Treatment treatment = Treatment::Executed;
  std::string_view values = {};     // Executed: the values that are, separated by spaces; empty: all
  std::string_view native = {};     // Executed: the same under stack native, where more are
  std::string_view why = {};        // for the message and the reader
};
// The one table: every key of config::run_keys() and config::model_keys() has a row.
const std::vector<ExecutedSetting>& executed_settings();

// Throws Error{Config} for the first setting of `model` and `run` that is not executed: its key, its
// value, what is, and where it was given if `origin` tells.
struct SettingOrigin {
  const config::Node* file = nullptr;                      // the map of the configuration file
  const std::vector<config::Setting>* settings = nullptr;  // --set and its shorthands
};
void require_executed(const config::Model& model, const config::Run& run, const SettingOrigin& origin = {});

} // namespace gdn::trainer
