#include <doctest/doctest.h>

#include <filesystem>
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

TEST_CASE("the README's table of modes names every example, and its commands run") {
  std::ifstream readme(source_root() + "/README.md");
  std::string text;
  int commands = 0;
  for (std::string line; std::getline(readme, line); text += line + "\n") {
    const size_t at = line.find("| `./gdn estimate examples/modes/");
    if (at == std::string::npos) continue;
    const std::string arguments = line.substr(at + 9, line.rfind('`') - at - 9);
    CAPTURE(arguments);
    Result r = run({"sh", "-c", gdnplan() + " " + arguments}, {}, 0, source_root());
    CAPTURE(r.err);
    CHECK(r.status == 0);
    ++commands;
  }
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(source_root() + "/examples/modes")) {
    if (entry.path().extension() != ".yaml") continue;
    const std::string name = entry.path().filename().string();
    CAPTURE(name);
    CHECK(text.find("estimate examples/modes/" + name) != std::string::npos);
    ++files;
  }
  CHECK(commands == files);
  CHECK(files >= 15);
}
