#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}

// Command lines of both programs. The parser behind them (CLI11) takes half a minute to compile wherever it
// is included, so that only this room includes it.
namespace gdn::cli {

// What may still be said of an option that was added. Values outside of what it allows are usage errors.
class Option {
public:
  explicit Option(CLI::Option* option) : option_(option) {}
  Option& required();
  Option& one_of(const std::vector<std::string>& values);
  Option& between(std::int64_t least, std::int64_t most);
  Option& existing_file();
  Option& or_alone(const std::string& value); // the option without a value stands for this one
  Option& group(const std::string& heading);  // of the help
  bool given() const;

private:
  CLI::Option* option_;
};

// A command, to which options are added: "--long,-s" names, or a positional "NAME". What is bound must live
// until the command has run.
class Command {
public:
  explicit Command(CLI::App* app) : app_(app) {}

  Option option(const std::string& names, std::string& value, const std::string& help);
  Option option(const std::string& names, int& value, const std::string& help);
  Option option(const std::string& names, std::int64_t& value, const std::string& help);
  Option option(const std::string& names, std::vector<std::string>& values, const std::string& help); // may be repeated
  Option flag(const std::string& names, bool& value, const std::string& help);

  using Take = std::function<void(const std::string&)>;
  Option option(const std::string& names, Take take, const std::string& help);
  Option repeated(const std::string& names, Take take, const std::string& help); // in the order given

  Command subcommand(const std::string& name, const std::string& text);
  void needs_subcommand(int least, int most);
  void footer(const std::string& text);

  // Words that no option takes, instead of an error for the first of them.
  void allow_extras();
  std::vector<std::string> extras() const;

  bool chosen() const; // by the arguments

private:
  CLI::App* app_;
};

} // namespace gdn::cli
