#include "cli/usage.h"

#include <sstream>

#include <fmt/core.h>

namespace gdn::cli {

namespace {

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> words;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, at);)
    if (!word.empty()) words.push_back(word);
  return words;
}

// "--format: xml not in {text,json}": the value, and what it may be.
Error not_a_member(const std::string& what, size_t at, const std::string& hint) {
  const size_t colon = what.find(": "), open = what.find('{', at), close = what.rfind('}');
  const std::string option = what.substr(0, colon), value = what.substr(colon + 2, at - colon - 2);
  const std::vector<std::string> allowed = split(what.substr(open + 1, close - open - 1), ',');
  std::string list;
  for (const std::string& a : allowed) list += (list.empty() ? "" : ", ") + a;
  return {ErrorCode::Usage, fmt::format("{}: '{}' is none of {}{}", option, value, list, did_you_mean(value, allowed)), hint};
}

} // namespace

Error usage_error(const CLI::ParseError& error, const CLI::App& program) {
  const CLI::App* deepest = &program; // "bench", then "bench rule"
  std::string path = program.get_name();
  while (!deepest->get_subcommands().empty()) {
    deepest = deepest->get_subcommands().front();
    path += " " + deepest->get_name();
  }
  const CLI::App& app = *deepest;
  const std::string help = fmt::format("`{} --help` shows how", path);
  const bool names_commands = !app.get_subcommands([](const CLI::App*) { return true; }).empty();
  const std::string what = error.what();
  if (const size_t at = what.find(" not in {"); at != std::string::npos && what.find(": ") < at) return not_a_member(what, at, help);
  std::vector<std::string> words;
  if (dynamic_cast<const CLI::ExtrasError*>(&error)) {
    const size_t list = what.find(": ");
    words = split(list == std::string::npos ? what : what.substr(list + 2), ' ');
  } else if (names_commands) { // "A subcommand is required", whatever stood in its place
    words = program.remaining(true);
  }
  if (!words.empty()) {
    std::string extra = words.front();
    for (const std::string& w : words)
      if (w.front() == '-') {
        extra = w;
        break;
      }
    std::vector<std::string> known;
    if (extra.front() == '-')
      for (const CLI::Option* o : app.get_options()) {
        for (const std::string& n : o->get_lnames()) known.push_back("--" + n);
        for (const std::string& n : o->get_snames()) known.push_back("-" + n);
      }
    else
      for (const CLI::App* s : app.get_subcommands([](const CLI::App*) { return true; })) known.push_back(s->get_name());
    const char* kind = extra.front() == '-' ? "option" : names_commands ? "command" : "argument";
    return {ErrorCode::Usage, fmt::format("unknown {} '{}'{}", kind, extra, did_you_mean(extra, known)), help};
  }
  return {ErrorCode::Usage, what, help};
}

} // namespace gdn::cli
