#pragma once
#include <optional>
#include <string>
#include <vector>

#include "config/hardware.h"
#include "config/model.h"
#include "config/node.h"
#include "config/run.h"

// Where models, their default runs and hardware come from: profiles compiled in, a folder that adds
// or overrides, and files given by path.
namespace gdn::config {

// A model file (on its own, or on a `base:` profile whose keys it changes): the model, the run it is
// planned with unless told otherwise, and on what.
struct ModelProfile {
  Model model;
  Run run;
  std::string hardware = "h200";       // name of a hardware profile
  std::vector<std::string> notes = {}; // what an import left unread or assumed, one line each
};

// One `--set key=value`, or a flag that is shorthand for it.
struct Setting {
  std::string key, value;
  std::string where = "--set";
};
// "key=value"; Error{Usage} if there is no '='.
Setting parse_setting(const std::string& text, const std::string& where = "--set");
// --modules NAMES as the settings it stands for; "none": an empty list. Error{Usage} for no name, and for none beside others.
std::vector<Setting> modules_settings(const std::string& names, const std::string& where = "--modules");

struct EmbeddedFile;

class Profiles {
public:
  // `folder` holds models/*.yaml and hardware/*.yaml, which add to the built-in profiles or replace
  // those of the same name. Error{Config} if it has neither subfolder, or a profile in it is wrong.
  explicit Profiles(std::optional<std::string> folder = {});

  // `what` is a name or alias in any case ("Qwen/Qwen3.5-35B-A3B" too), or a path: starts with . or /
  // or ends in .yaml, .yml or .json; a folder is one that holds a Hugging Face config.json.
  // Settings are applied last: keys of the model to the model, all others to the run; a run file
  // (a map of run keys) lies between the profile's own run and the settings. Resolves the pipeline
  // layout. Error{Config} for an unknown name lists what there is, with the nearest spelling.
  ModelProfile model(const std::string& what, const std::vector<Setting>& settings = {},
                     const std::optional<std::string>& run_file = {}) const;
  // `what` is a name, an alias or a YAML file.
  Hardware hardware(const std::string& what) const;

  struct Listed {
    std::string name;
    std::vector<std::string> aliases;
    std::string origin; // "built in" or the file
  };
  std::vector<Listed> models() const;
  std::vector<Listed> hardwares() const;

private:
  struct File {
    std::string origin, text;
    std::string name;
    std::vector<std::string> aliases;
    bool packed = false; // what the text is (packed.h)
    Node parse() const;
  };
  static File built_in(const EmbeddedFile& file);
  static void add(std::vector<File>& files, std::string origin, std::string text);
  static const File* find(const std::vector<File>& files, const std::string& what);
  Node on_base(Node map, int depth = 0) const; // resolves `base: NAME`

  std::vector<File> models_ = {}, hardware_ = {};
};

// A model profile from the map of its file: the model's keys, `run:` and `hardware:`. Settings as in
// Profiles::model.
ModelProfile read_model_profile(const Node& map, const std::vector<Setting>& settings = {},
                                const std::optional<std::string>& run_file = {});

// The map that read_model_profile gives the same profile back from: the whole resolved configuration.
Node to_node(const ModelProfile& profile);

} // namespace gdn::config
