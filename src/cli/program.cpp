#include "cli/program.h"

#include <cstdio>
#include <new>
#include <ostream>

#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include "cli/usage.h"
#include "core/error.h"
#include "report/document.h"

namespace gdn::cli {

namespace {

std::vector<CLI::App*> subcommands(const CLI::App& app) {
  std::vector<CLI::App*> all;
  for (const CLI::App* s : app.get_subcommands([](const CLI::App*) { return true; })) all.push_back(const_cast<CLI::App*>(s));
  return all;
}

int report(const std::string& name, const Error& error) {
  report::Document d;
  d.line(fmt::format("{}: error: {}", name, error.what()));
  if (!error.hint().empty()) d.line(error.hint(), report::Tone::Plain, 2);
  fmt::print(stderr, "{}", report::render_text(d)); // long lists of what is allowed wrap at 100 columns
  return exit_status(error.code());
}

} // namespace

Program::Program(const std::string& name, const std::string& description, const std::string& version)
    : app_(std::make_unique<CLI::App>(description, name)) {
  app_->set_version_flag("--version", version);
  app_->require_subcommand(1);
}

Program::~Program() = default;

void Program::add(Runner (*make)(Command& program)) {
  Command program(app_.get());
  runners_.push_back(make(program));
}

std::optional<Program::Choice> Program::parse(int argc, const char* const* argv, std::ostream& out) const {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& e) { // help and version are thrown too, with 0
    if (e.get_exit_code() != 0) throw usage_error(e, *app_);
    app_->exit(e, out, out);
    return std::nullopt;
  }
  const std::vector<CLI::App*> commands = subcommands(*app_);
  for (size_t i = 0; i < commands.size(); ++i)
    if (commands[i]->parsed()) return Choice{commands[i]->get_name(), runners_[i]};
  throw Error(ErrorCode::Internal, "the arguments name no command");
}

int reporting(const std::string& name, const std::function<int()>& body) {
  try {
    return body();
  } catch (const Error& e) {
    return report(name, e);
  } catch (const std::bad_alloc&) {
    return report(name, Error(ErrorCode::Internal, "out of host memory"));
  } catch (const std::exception& e) {
    return report(name, Error(ErrorCode::Internal, fmt::format("unexpected: {}", e.what())));
  }
}

} // namespace gdn::cli
