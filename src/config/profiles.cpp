#include "config/profiles.h"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>

#include "config/embedded.h"
#include "config/hardware_io.h"
#include "config/import.h"
#include "config/json.h"
#include "config/model_io.h"
#include "config/packed.h"
#include "config/run_io.h"
#include "config/text.h"
#include "config/yaml.h"
#include "core/error.h"

namespace gdn::config {

namespace fs = std::filesystem;

namespace {

bool is_model_setting(const std::string& key) {
  return key != "source" && !canonical_model_key(key).empty();
}

// Replaces the value of a model key, whichever of its names the file uses.
void set_model_key(Node& map, const Setting& s) {
  std::string name(canonical_model_key(s.key));
  Node value = Node::scalar(s.value, s.where, s.key);
  if (s.value.empty()) value.kind = Node::Kind::Null;
  if (name == "layer_types") map.erase("full_attention_interval");
  if (name == "full_attention_interval") map.erase("layer_types");
  for (Entry& e : map.entries)
    if (canonical_model_key(e.key) == name) {
      e.value = std::move(value);
      return;
    }
  map.set(name, std::move(value));
}

ModelProfile read_hugging_face(const fs::path& file, const std::vector<Setting>& settings,
                               const std::optional<std::string>& run_file) {
  std::string text = read_text_file(file), shown = file.string();
  std::vector<std::string> notes;
  fs::path parent = fs::absolute(file).parent_path();
  std::string name = file.stem() == "config" ? parent.filename().string() : file.stem().string();
  Node map = model_from_hugging_face(parse_json(text, shown), name.empty() ? "model" : name, notes);
  ModelProfile p = read_model_profile(map, settings, run_file);
  p.notes.insert(p.notes.begin(), notes.begin(), notes.end());
  return p;
}

// `base: NAME` starts from another profile: the file's keys replace its keys one by one, those of
// `run` as well. Sizes that differ make the published counts of the base somebody else's.
Node overlay(Node base, const Node& file) {
  bool resized = false;
  for (const Entry& e : file.entries) {
    if (e.key == "base") continue;
    if (e.key == "run") {
      Node run;
      run.kind = Node::Kind::Map;
      if (const Node* old = base.find("run")) run = *old;
      if (e.value.kind != Node::Kind::Map) e.value.fail("expected a map of run settings");
      for (const Entry& r : e.value.entries) run.set(r.key, r.value);
      base.set("run", std::move(run));
      continue;
    }
    const std::string name(canonical_model_key(e.key));
    if (name == "layer_types") base.erase("full_attention_interval");
    if (name == "full_attention_interval") base.erase("layer_types");
    if (!name.empty() && name != "name" && name != "aliases" && name != "source") {
      resized = true;
      std::erase_if(base.entries, [&](const Entry& old) { return canonical_model_key(old.key) == name; });
    }
    base.set(e.key, e.value);
  }
  if (!file.find("aliases")) base.erase("aliases");
  if (resized && !file.find("parameters")) base.erase("parameters");
  return base;
}

// A bare word is always a profile, so that a folder "tiny" beside you never shadows it.
bool looks_like_path(const std::string& what) {
  return what.starts_with("/") || what.starts_with(".") || what.ends_with(".yaml") || what.ends_with(".yml") ||
         what.ends_with(".json");
}

// "Qwen/Qwen3.5-35B-A3B", as a model card writes it -> "qwen3.5-35b-a3b".
std::string as_profile_name(const std::string& what) {
  std::string name = what.substr(what.rfind('/') + 1);
  for (char& c : name)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return name;
}

} // namespace

Setting parse_setting(const std::string& text, const std::string& where) {
  std::size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0)
    throw Error(ErrorCode::Usage, fmt::format("{}: '{}' is not key=value", where, text.substr(0, 100)),
                "for example --set micro_batch_size=2");
  return {text.substr(0, equals), text.substr(equals + 1), where};
}

std::vector<Setting> modules_settings(const std::string& names, const std::string& where) {
  const std::vector<std::string> list = as_strings(Node::scalar(names, where));
  const bool none = names == "[]" || std::find(list.begin(), list.end(), "none") != list.end();
  if ((!none && list.empty()) || (none && list.size() > 1))
    throw Error(ErrorCode::Usage, fmt::format("{}: {}", where, none ? "'none' stands alone" : "no name is given"), fmt::format("{} none lists no module", where));
  return {{"recompute_modules", none ? "[]" : names, where}, {"recompute_granularity", "selective", where}};
}

namespace {

// A list of modules asks for selective granularity: another one beside it would be lost.
void require_one_granularity(const std::vector<Setting>& settings) {
  const Setting *by_modules = nullptr, *other = nullptr;
  for (const Setting& s : settings) {
    if (s.key != "recompute_granularity") continue;
    if (s.where == "--modules") by_modules = &s;
    else if (s.value == "full" || s.value == "none") other = &s; // another spelling is refused where it is read
  }
  if (by_modules && other)
    throw Error(ErrorCode::Usage, fmt::format("--modules is for selective granularity, and {} asks for '{}'", other->where, other->value), "one of them");
}

} // namespace

ModelProfile read_model_profile(const Node& source, const std::vector<Setting>& settings,
                                const std::optional<std::string>& run_file) {
  require_one_granularity(settings);
  Fields check(source); // throws unless a map
  ModelProfile p;
  Node map = source, run;
  if (const Node* n = source.find("run")) run = *n;
  if (const Node* n = source.find("hardware")) p.hardware = as_string(*n);
  map.erase("run");
  map.erase("hardware");
  map.erase("train"); // gdntrain's (train.h): its configurations plan as they are

  std::vector<std::string> changes;
  for (const Setting& s : settings) {
    if (!is_model_setting(s.key)) continue;
    set_model_key(map, s);
    if (s.key != "name" && s.key != "aliases") changes.push_back(s.key + "=" + s.value);
  }
  if (!changes.empty() && map.find("parameters")) {
    map.erase("parameters");
    p.notes.push_back(fmt::format("the published parameter counts are not those of this model: {}", fmt::join(changes, ", ")));
  }
  p.model = read_model(map);

  apply(p.run, run);
  if (run_file) apply(p.run, parse_yaml(read_text_file(*run_file), *run_file));
  for (const Setting& s : settings) {
    if (is_model_setting(s.key)) continue;
    if (!find_run_key(s.key)) { // neither: the message offers both tables
      std::vector<std::string> allowed;
      for (const RunKey& k : run_keys()) allowed.emplace_back(k.name);
      for (const ModelKey& k : model_keys()) {
        allowed.emplace_back(k.name);
        if (!k.megatron.empty() && k.megatron != k.name) allowed.emplace_back(k.megatron);
      }
      fail_unknown_key({s.key, s.where, {}}, "", allowed);
    }
    apply(p.run, s.key, s.value, s.where);
  }
  resolve_layout(p.run, p.model.layers());
  return p;
}

Node to_node(const ModelProfile& profile) {
  Node out = to_node(profile.model);
  out.set("hardware", string_node(profile.hardware));
  out.set("run", to_node(profile.run));
  return out;
}

// Name and aliases of a built-in profile without parsing it (start-up time): they stand at the
// beginning of two lines, as a test checks.
Profiles::File Profiles::built_in(const EmbeddedFile& f) {
  File file{fmt::format("built in: {}.yaml", f.name), std::string(f.packed), std::string(f.name), {}, true};
  const std::string_view text = f.text;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line = text.substr(at, end - at);
    if (line.starts_with("name: ")) file.name = std::string(line.substr(6));
    if (line.starts_with("aliases: ")) {
      file.aliases = as_strings(Node::scalar(std::string(line.substr(9))));
      break;
    }
    at = end + 1;
  }
  return file;
}

Node Profiles::File::parse() const { return packed ? unpack(text, origin) : parse_yaml(text, origin); }

Profiles::Profiles(std::optional<std::string> folder) {
  for (const EmbeddedFile& f : embedded_models()) models_.push_back(built_in(f));
  for (const EmbeddedFile& f : embedded_hardware()) hardware_.push_back(built_in(f));
  if (!folder) return;
  bool any = false;
  for (auto [sub, files] : {std::pair{"models", &models_}, std::pair{"hardware", &hardware_}}) {
    std::error_code ec;
    fs::path dir = fs::path(*folder) / sub;
    if (!fs::is_directory(dir, ec)) continue;
    any = true;
    std::vector<fs::path> paths;
    for (const fs::directory_entry& e : fs::directory_iterator(dir, ec))
      if (e.path().extension() == ".yaml" || e.path().extension() == ".yml") paths.push_back(e.path());
    if (ec) throw Error(ErrorCode::Config, fmt::format("{}: cannot be read: {}", dir.string(), ec.message()));
    std::sort(paths.begin(), paths.end());
    for (const fs::path& p : paths) add(*files, p.string(), read_text_file(p));
  }
  if (!any)
    throw Error(ErrorCode::Config, fmt::format("{}: no profiles here", *folder),
                "a profile folder has models/*.yaml or hardware/*.yaml");
}

// Only name and aliases are read here; a profile is checked whole when it is asked for.
void Profiles::add(std::vector<File>& files, std::string origin, std::string text) {
  Node map = parse_yaml(text, origin);
  File f{std::move(origin), std::move(text), {}, {}, false};
  Fields fields(map);
  if (const Node* n = map.find("name")) f.name = as_string(*n);
  if (const Node* n = map.find("aliases")) f.aliases = as_strings(*n);
  if (f.name.empty()) map.fail("missing key name");
  std::erase_if(files, [&](const File& other) { return other.name == f.name; });
  files.push_back(std::move(f));
}

const Profiles::File* Profiles::find(const std::vector<File>& files, const std::string& what) {
  std::string name = as_profile_name(what);
  // The last one wins: profiles of a folder come after the built-in ones.
  for (auto f = files.rbegin(); f != files.rend(); ++f)
    if (as_profile_name(f->name) == name ||
        std::any_of(f->aliases.begin(), f->aliases.end(), [&](const std::string& a) { return as_profile_name(a) == name; }))
      return &*f;
  return nullptr;
}

namespace {

[[noreturn]] void fail_unknown(const char* what, const std::string& name, const std::vector<Profiles::Listed>& listed) {
  std::vector<std::string> candidates, names;
  for (const Profiles::Listed& l : listed) {
    names.push_back(l.name);
    candidates.push_back(l.name);
    candidates.insert(candidates.end(), l.aliases.begin(), l.aliases.end());
  }
  throw Error(ErrorCode::Config, fmt::format("unknown {} '{}'{}", what, name.substr(0, 100), did_you_mean(as_profile_name(name).substr(0, 100), candidates)),
              fmt::format("known: {}; or give a path (./folder, file.yaml, config.json)", fmt::join(names, ", ")));
}

} // namespace

ModelProfile Profiles::model(const std::string& what, const std::vector<Setting>& settings,
                             const std::optional<std::string>& run_file) const {
  Node map;
  if (looks_like_path(what)) {
    std::error_code ec;
    fs::path file = fs::is_directory(what, ec) ? fs::path(what) / "config.json" : fs::path(what);
    if (file.extension() == ".json") return read_hugging_face(file, settings, run_file);
    map = parse_yaml(read_text_file(file), file.string());
  } else if (const File* f = find(models_, what)) {
    map = f->parse();
  } else {
    fail_unknown("model", what, models());
  }
  return read_model_profile(on_base(std::move(map)), settings, run_file);
}

Node Profiles::on_base(Node map, int depth) const {
  const Node* base = map.find("base");
  if (!base) return map;
  const std::string name = as_string(*base);
  const File* f = find(models_, name);
  if (!f) {
    std::vector<std::string> names;
    for (const File& m : models_) names.push_back(m.name);
    base->fail(fmt::format("unknown model '{}'{}", name, did_you_mean(name, names)), fmt::format("known: {}", fmt::join(names, ", ")));
  }
  if (depth > 8) base->fail("profiles are based on one another in a circle");
  return overlay(on_base(f->parse(), depth + 1), map);
}

Hardware Profiles::hardware(const std::string& what) const {
  if (looks_like_path(what)) return read_hardware(parse_yaml(read_text_file(what), what));
  if (const File* f = find(hardware_, what)) return read_hardware(f->parse());
  fail_unknown("hardware", what, hardwares());
}

std::vector<Profiles::Listed> Profiles::models() const {
  std::vector<Listed> out;
  for (const File& f : models_) out.push_back({f.name, f.aliases, f.origin});
  return out;
}

std::vector<Profiles::Listed> Profiles::hardwares() const {
  std::vector<Listed> out;
  for (const File& f : hardware_) out.push_back({f.name, f.aliases, f.origin});
  return out;
}

} // namespace gdn::config
