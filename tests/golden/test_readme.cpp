#include <doctest/doctest.h>

#include <fstream>
#include <sstream>

#include "command.h"

using namespace gdn::test;

// Every gdnplan command of the README runs, with the exit status its comment states (0 if none).
TEST_CASE("every README command runs as written") {
  std::ifstream readme(source_root() + "/README.md");
  CHECK(readme.good());
  bool inside = false;
  int commands = 0;
  for (std::string line; std::getline(readme, line);) {
    if (line.rfind("```", 0) == 0) {
      inside = line == "```sh";
      continue;
    }
    if (!inside || line.rfind("./gdn ", 0) != 0) continue;
    int expected = 0;
    if (size_t comment = line.find("  # exit "); comment != std::string::npos) {
      expected = std::stoi(line.substr(comment + 9));
      line.resize(comment);
    }
    const std::string arguments = line.substr(6), first = arguments.substr(0, arguments.find(' '));
    if (first == "train" || first == "test" || first == "build") continue; // tests of their own
    CAPTURE(line);
    Result r = run({"sh", "-c", gdnplan() + " " + arguments}, {}, 0, source_root());
    CAPTURE(r.err);
    CHECK(r.status == expected);
    ++commands;
  }
  CHECK(commands >= 8);
}
