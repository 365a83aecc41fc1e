#include "planner/options.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/format.h>

#include "core/error.h"
#include "model/modules.h"
#include "model/spans.h"
#include "report/figure.h"

namespace gdn::planner {

void ModelOptions::shorthand(cli::Command& command, const std::string& flag, const std::string& key, const std::string& help) {
  command.option(
      flag, [this, flag, key](const std::string& value) { settings.push_back({key, value, flag}); }, help + " (" + key + ")")
      .group("Run");
}

void ModelOptions::add_to(cli::Command& command) {
  command.option("MODEL", model, "name of a profile, a YAML file, or a Hugging Face config.json").required();
  command.option("--hardware", hardware, "name of a hardware profile or a YAML file; the model's own if not given");
  command.option("--run", run_file, "YAML file of run settings");
  command.option("--profiles", profiles_folder, "folder of models/*.yaml and hardware/*.yaml that add to or replace the built-in ones");
  command.option("--budget", budget, "bytes one GPU may use, such as 130GiB (powers of 1024); the profile's total if not given");
  command.repeated("--set", [this](const std::string& v) {
    settings.push_back(config::parse_setting(v));
  }, "key=value, any key of a run or model file").group("Run");
  shorthand(command, "--tp", "tensor_model_parallel_size", "tensor parallel");
  shorthand(command, "--cp", "context_parallel_size", "context parallel");
  shorthand(command, "--pp", "pipeline_model_parallel_size", "pipeline parallel");
  shorthand(command, "--vp", "virtual_pipeline_model_parallel_size", "virtual pipeline");
  shorthand(command, "--ep", "expert_model_parallel_size", "expert parallel");
  shorthand(command, "--etp", "expert_tensor_parallel_size", "expert tensor parallel");
  shorthand(command, "--sp", "sequence_parallel", "sequence parallel, true or false");
  shorthand(command, "--mbs", "micro_batch_size", "sequences in a micro-batch");
  shorthand(command, "--gbs,--global-batch", "global_batch_size", "sequences in a step");
  shorthand(command, "--seq", "seq_length", "tokens in a sequence");
  shorthand(command, "--gpus", "gpus", "GPUs in all");
  shorthand(command, "--granularity", "recompute_granularity", "none, selective or full");
  command.option("--modules", [this](const std::string& value) {
    for (config::Setting& s : config::modules_settings(value)) settings.push_back(std::move(s));
  }, "recompute modules, separated by commas; 'none' for an empty list (recompute_modules)").group("Run");
  shorthand(command, "--stack", "stack", "megatron or native");
  shorthand(command, "--build", "build", "te or local");
  shorthand(command, "--revision", "revision", "of the stack, such as main+gdn_qkv");
  shorthand(command, "--l2norm", "l2norm", "who normalises q and k: caller, kernel or off");
  command.option("--span", spans, "NAME=FIRST_OP..LAST_OP[:discard]: price any run of ops of a layer as a checkpoint").group("Run");
}

namespace {

config::UserSpan parse_span(const std::string& text) {
  const size_t equal = text.find('='), dots = text.find("..");
  if (equal == std::string::npos || dots == std::string::npos || dots < equal || equal == 0)
    throw Error(ErrorCode::Usage, fmt::format("--span: '{}' is not NAME=FIRST_OP..LAST_OP[:discard]", text),
                "for instance --span prep=conv1d..gates:discard; `layer` lists the ops");
  config::UserSpan s;
  s.name = text.substr(0, equal);
  s.first = text.substr(equal + 1, dots - equal - 1);
  s.last = text.substr(dots + 2);
  if (size_t colon = s.last.find(':'); colon != std::string::npos) {
    const std::string kind = s.last.substr(colon + 1);
    if (kind != "discard")
      throw Error(ErrorCode::Usage, fmt::format("--span {}: unknown kind '{}'{}", s.name, kind, did_you_mean(kind, {"discard"})),
                  "':discard', or nothing for a whole-block checkpoint");
    s.discard = true;
    s.last.resize(colon);
  }
  if (!std::all_of(s.name.begin(), s.name.end(), [](unsigned char ch) { return std::isalnum(ch) || ch == '_'; }))
    throw Error(ErrorCode::Usage, fmt::format("--span: '{}' cannot be its name", s.name), "letters, digits and _");
  if (s.first.empty() || s.last.empty())
    throw Error(ErrorCode::Usage, fmt::format("--span {}: first or last op is missing", s.name));
  return s;
}

bool asked(const ModelOptions& o, const char* key) {
  return std::any_of(o.settings.begin(), o.settings.end(), [&](const config::Setting& s) { return s.key == key; });
}

// A profile lists its modules for the stack it was written for; under another one (--stack) they mean
// nothing, unless the user named modules as well.
void drop_foreign_modules(Case& c, const ModelOptions& o) {
  config::Recompute& r = c.profile.run.recompute;
  const bool native = c.profile.run.stack == "native";
  if (!asked(o, "stack") || asked(o, "recompute_modules") || !r.modules) return;
  const bool foreign = std::any_of(r.modules->begin(), r.modules->end(), [&](const std::string& m) {
    return native ? !model::is_native_module(m) : !model::find_module(m.substr(0, m.find(':')));
  });
  if (!foreign) return;
  c.overrides.push_back(fmt::format("without the profile's modules ({}), which stack {} does not have", join(*r.modules, ", "), c.profile.run.stack));
  r.modules.reset();
  if (r.granularity == config::Granularity::Selective) r.granularity = config::Granularity::None;
}

} // namespace

void refuse_keys(const ModelOptions& o, const std::vector<std::string>& keys, const std::string& why, const std::string& instead) {
  for (const config::Setting& s : o.settings)
    if (std::find(keys.begin(), keys.end(), s.key) != keys.end())
      throw Error(ErrorCode::Usage, fmt::format("{}: {}", s.where == "--set" ? "--set " + s.key : s.where, why), instead);
}

Case load(const ModelOptions& o) {
  std::optional<std::string> folder, run;
  if (!o.profiles_folder.empty()) folder = o.profiles_folder;
  if (!o.run_file.empty()) run = o.run_file;
  const config::Profiles profiles(folder);
  Case c{profiles.model(o.model, o.settings, run), {}, {}, {}};
  c.hardware = profiles.hardware(o.hardware.empty() ? c.profile.hardware : o.hardware);
  if (!o.run_file.empty()) c.overrides.push_back("--run " + o.run_file);
  for (const config::Setting& s : o.settings)
    if (s.key != "recompute_granularity" && s.key != "recompute_modules") c.overrides.push_back(s.key + "=" + s.value);
  drop_foreign_modules(c, o);
  if (c.profile.run.recompute.granularity == config::Granularity::None && asked(o, "recompute_modules"))
    c.overrides.push_back("recompute_modules does nothing without selective granularity");
  for (const std::string& s : o.spans) c.profile.run.recompute.user_spans.push_back(parse_span(s));
  if (!o.budget.empty()) {
    c.budget = parse_bytes(o.budget, "--budget");
    if (*c.budget < kGiB)
      throw Error(ErrorCode::Usage, fmt::format("--budget: '{}' is under 1 GiB", o.budget), "give the unit, such as 130GiB");
  }
  return c;
}

void OutputOptions::add_to(cli::Command& command, const std::vector<std::string>& formats) {
  command.option("--format", format, "output format").one_of(formats);
  command.option("-o,--output", file, "write to a file instead of stdout");
  command.option("--color,--colour", colour, "auto, always or never").one_of({"auto", "always", "never"});
}

report::TextStyle OutputOptions::style() const {
  report::TextStyle style;
  const bool terminal = file.empty() && isatty(STDOUT_FILENO) != 0;
  const char* no_colour = std::getenv("NO_COLOR");
  style.colour = colour == "always" || (colour == "auto" && terminal && !(no_colour && *no_colour));
  winsize size{};
  if (terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 40) style.width = size.ws_col;
  else if (const char* columns = std::getenv("COLUMNS"); columns && std::atoi(columns) >= 40) style.width = std::atoi(columns);
  style.width = std::min(style.width, 100);
  return style;
}

namespace {

void write_file(const std::string& path, const std::string& text) {
  const std::string temporary = fmt::format("{}.tmp{}", path, getpid());
  auto fail = [&](const char* what) {
    const std::string why = std::strerror(errno);
    std::remove(temporary.c_str());
    throw Error(ErrorCode::Io, fmt::format("cannot {} '{}': {}", what, path, why));
  };
  errno = 0;
  std::error_code ec;
  const auto status = std::filesystem::status(path, ec);
  const bool device = std::filesystem::exists(status) && !std::filesystem::is_regular_file(status); // never replaced
  std::FILE* f = std::fopen(device ? path.c_str() : temporary.c_str(), "wb");
  if (!f) fail("write");
  const bool written = std::fwrite(text.data(), 1, text.size(), f) == text.size() && std::fflush(f) == 0;
  const int saved = errno;
  std::fclose(f);
  errno = saved;
  if (!written) fail("write");
  if (device) return;
  if (std::rename(temporary.c_str(), path.c_str()) != 0) fail("replace");
}

} // namespace

void write(const Output& output, const OutputOptions& options) {
  std::string format = options.format;
  if (format == "text" && !options.file.empty()) {
    const std::string ending = std::filesystem::path(options.file).extension().string();
    if (ending == ".json" && output.json) format = "json";
    if ((ending == ".yaml" || ending == ".yml") && output.yaml) format = "yaml";
    if (ending == ".csv") format = "csv";
    if (ending == ".html" && output.html) format = "html";
    if (ending == ".svg" && output.svg) format = "svg";
  }
  if ((format == "html" && !output.html) || (format == "svg" && !output.svg) || (format == "yaml" && !output.yaml))
    throw Error(ErrorCode::Usage, fmt::format("--format {}: this answer has no such form", format), "text and json always work");
  std::string text;
  if (format == "json") text = output.json().dump(2) + "\n";
  else if (format == "yaml") text = output.yaml();
  else if (format == "html") text = report::render_html(output.html());
  else if (format == "svg") text = report::standalone(output.svg());
  else if (format == "csv") text = report::render_csv(output.csv ? output.csv() : output.text);
  else text = report::render_text(output.text, options.style());
  if (!options.file.empty()) return write_file(options.file, text);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    throw Error(ErrorCode::Io, fmt::format("cannot write the result: {}", std::strerror(errno)));
}

std::string join(const std::vector<std::string>& words, const std::string& between) {
  return fmt::format("{}", fmt::join(words, between));
}

} // namespace gdn::planner
