#include "cli/command.h"

#include <CLI/CLI.hpp>

namespace gdn::cli {

Option& Option::required() { return option_->required(), *this; }
Option& Option::one_of(const std::vector<std::string>& values) { return option_->check(CLI::IsMember(values)), *this; }
Option& Option::existing_file() { return option_->check(CLI::ExistingFile), *this; }
Option& Option::or_alone(const std::string& value) { return option_->expected(0, 1)->default_str(value), *this; }
Option& Option::group(const std::string& heading) { return option_->group(heading), *this; }
bool Option::given() const { return option_->count() > 0; }

Option& Option::between(std::int64_t least, std::int64_t most) {
  option_->check(CLI::Range(least, most));
  return *this;
}

Option Command::option(const std::string& names, std::string& value, const std::string& help) {
  return Option(app_->add_option(names, value, help));
}

Option Command::option(const std::string& names, int& value, const std::string& help) {
  return Option(app_->add_option(names, value, help));
}

Option Command::option(const std::string& names, std::int64_t& value, const std::string& help) {
  return Option(app_->add_option(names, value, help));
}

Option Command::option(const std::string& names, std::vector<std::string>& values, const std::string& help) {
  return Option(app_->add_option(names, values, help)->take_all());
}

Option Command::flag(const std::string& names, bool& value, const std::string& help) {
  return Option(app_->add_flag(names, value, help));
}

Option Command::option(const std::string& names, Take take, const std::string& help) {
  return Option(app_->add_option_function<std::string>(names, std::move(take), help));
}

Option Command::repeated(const std::string& names, Take take, const std::string& help) {
  auto each = [take = std::move(take)](const std::vector<std::string>& values) {
    for (const std::string& v : values) take(v);
  };
  return Option(app_->add_option_function<std::vector<std::string>>(names, std::move(each), help)->take_all());
}

Command Command::subcommand(const std::string& name, const std::string& text) { return Command(app_->add_subcommand(name, text)); }
void Command::needs_subcommand(int least, int most) { app_->require_subcommand(static_cast<size_t>(least), static_cast<size_t>(most)); }
void Command::footer(const std::string& text) { app_->footer(text); }
void Command::allow_extras() { app_->allow_extras(); }
std::vector<std::string> Command::extras() const { return app_->remaining(); }
bool Command::chosen() const { return app_->parsed(); }

} // namespace gdn::cli
