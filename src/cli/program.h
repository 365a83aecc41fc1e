#pragma once
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"

namespace gdn::cli {

// Runs a command that was parsed and gives the program's exit status: 0, or what the command documents.
using Runner = std::function<int()>;

// A program of subcommands: "gdnplan COMMAND ...".
class Program {
public:
  Program(const std::string& name, const std::string& description, const std::string& version);
  ~Program();

  // `make` adds one subcommand to what it is given and returns what runs it.
  void add(Runner (*make)(Command& program));

  struct Choice {
    std::string command;
    Runner run;
  };
  // The command that the arguments ask for; none when they ask for help or the version, which go to `out`.
  // Throws Error{Usage}: the option or command, what is allowed, the nearest spelling, where help is.
  std::optional<Choice> parse(int argc, const char* const* argv, std::ostream& out) const;

private:
  std::unique_ptr<CLI::App> app_;
  std::vector<Runner> runners_; // of the subcommands, in their order
};

// The body of `main`: runs it, and turns what it throws into "NAME: error: ..." on stderr and an exit status.
int reporting(const std::string& name, const std::function<int()>& body);

} // namespace gdn::cli
