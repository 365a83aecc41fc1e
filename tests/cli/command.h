#pragma once
#include <string>
#include <vector>

// Runs a program as a user would, for tests.
namespace gdn::test {

struct Result {
  int status = 0; // exit status; 128 + signal when killed
  std::string out, err;
};

// `environment` entries are "NAME=value"; the rest is inherited. `columns` > 0: stdout is a terminal
// of that width.
Result run(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {}, int columns = 0,
           const std::string& folder = {});

// Path of the gdnplan under test (from the environment) and of the source tree.
std::string gdnplan();
std::string source_root();

} // namespace gdn::test
